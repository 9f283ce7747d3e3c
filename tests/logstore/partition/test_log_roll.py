from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.limits import RELATIVE_OFFSET_MAX
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.roll import RollReason
from reference.roll_rule import ActiveSegment, NextAppend, roll_reason
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import (
    DIRECTORY,
    NOW_MS,
    bases,
    batch,
    contents,
    directory_bytes,
    expected,
    open_log,
    rec,
    recs,
    sized_batch,
)
from simulation.tracing import TracingFileSystem

COMPACT = frozenset({"compact"})


@dataclass
class Twin:
    """Where a log must roll, by the pure rule and a plain account of the active segment."""

    config: LogConfig
    bases: list[int]
    segment: ActiveSegment
    reasons: list[RollReason]
    end: int = 0
    bytes_since: int = 0
    largest_ms: int = -1
    last_time_ms: int = -1

    @classmethod
    def of(cls, config: LogConfig, now_ms: int) -> Twin:
        return cls(config, [0], cls.fresh(config, 0, now_ms), [])

    @staticmethod
    def fresh(config: LogConfig, base_offset: int, now_ms: int) -> ActiveSegment:
        index_bytes = config.segment_index_bytes
        return ActiveSegment(base_offset, 0, -1, now_ms, 0, 0, index_bytes // 8, 0, index_bytes // 12)

    def append(self, size_bytes: int, count: int, at_ms: int, now_ms: int, base: int | None = None) -> None:
        """One batch; `base` is given for one that keeps its offsets."""
        first = self.end if base is None else base
        last = first + count - 1
        reason = roll_reason(self.config, self.segment, NextAppend(size_bytes, last, at_ms), now_ms)
        if reason is not None:
            self.reasons.append(reason)
            if first != self.segment.base_offset:
                self.bases.append(first)
            self.segment = self.fresh(self.config, first, now_ms)
            self.bytes_since, self.largest_ms, self.last_time_ms = 0, -1, -1
        self._place(size_bytes, at_ms)
        self.end = last + 1

    def _place(self, size_bytes: int, at_ms: int) -> None:
        segment = self.segment
        self.largest_ms = max(self.largest_ms, at_ms)
        entries, times = segment.index_entries, segment.time_index_entries
        if self.bytes_since > self.config.index_interval_bytes:
            entries += 1
            if self.largest_ms > self.last_time_ms:
                times += 1
                self.last_time_ms = self.largest_ms
            self.bytes_since = 0
        self.bytes_since += size_bytes
        first_ms = at_ms if segment.size_bytes == 0 else segment.first_timestamp_ms
        self.segment = replace(
            segment,
            size_bytes=segment.size_bytes + size_bytes,
            first_timestamp_ms=first_ms,
            index_entries=entries,
            time_index_entries=times,
        )


APPENDS = st.lists(
    st.tuples(
        st.integers(1, 3),  # records
        st.integers(0, 120),  # bytes of value
        st.integers(-1, 60),  # timestamp, -1 none
        st.integers(0, 30),  # time that passes before
        st.sampled_from(("records", "batch", "idempotent", "replicated")),
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=200)
@given(
    appends=APPENDS,
    segment_bytes=st.integers(480, 1500),
    segment_ms=st.integers(1, 100),
    index_bytes=st.sampled_from((4, 8, 12, 16, 24, 36, 48, 4096)),
    interval=st.integers(0, 200),
    lag_ms=st.sampled_from((10, 10**9)),
    policy=st.sampled_from((COMPACT, frozenset({"delete"}))),
)
def test_the_log_rolls_exactly_where_the_rule_says(
    appends: list[tuple[int, int, int, int, str]],
    segment_bytes: int,
    segment_ms: int,
    index_bytes: int,
    interval: int,
    lag_ms: int,
    policy: frozenset[str],
) -> None:
    config = LogConfig(
        segment_bytes=segment_bytes,
        segment_ms=segment_ms,
        segment_index_bytes=index_bytes,
        index_interval_bytes=interval,
        max_compaction_lag_ms=lag_ms,
        cleanup_policy=policy,
        message_timestamp_after_max_ms=2**62,
    )
    clock = ManualClock(1000)
    log = open_log(SimulatedFileSystem(), config=config, clock=clock)
    twin = Twin.of(config, clock.now_ms())
    sequence = 0
    for count, length, at_ms, wait_ms, how in appends:
        clock.advance(wait_ms)
        records = [rec(b"x" * length, b"k", at_ms)] * count
        size = len(batch(records))
        rolls_before = len(twin.reasons)
        twin.append(size, count, at_ms, clock.now_ms())
        if how == "records":
            info = log.append(records)
        elif how == "batch":
            info = log.append_batches(batch(records))
        elif how == "idempotent":
            sent = batch(records, producer_id=5, producer_epoch=0, base_sequence=sequence)
            info = log.append_batches(sent)
            sequence += count
        else:
            info = log.append_batches(batch(records, base_offset=log.log_end_offset), origin=AppendOrigin.REPLICATION)
        assert (info.first_offset, info.last_offset) == (twin.end - count, twin.end - 1)
        assert info.rolls == len(twin.reasons) - rolls_before
        assert bases(log) == twin.bases
    assert log.log_end_offset == twin.end


@settings(max_examples=100)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 50)), min_size=1, max_size=60),
    batch_bytes=st.integers(70, 300),
    segment_bytes=st.integers(300, 900),
    interval=st.integers(0, 200),
    index_bytes=st.sampled_from((4, 24, 36, 4096)),
)
def test_one_large_append_rolls_as_its_batches_one_by_one_would(
    rows: list[tuple[int, int]], batch_bytes: int, segment_bytes: int, interval: int, index_bytes: int
) -> None:
    config = LogConfig(
        segment_bytes=segment_bytes, segment_ms=40, index_interval_bytes=interval, segment_index_bytes=index_bytes
    )
    records = [rec(b"x" * length, b"k", at_ms) for length, at_ms in rows]
    fs, other_fs = SimulatedFileSystem(), SimulatedFileSystem()
    log, other = open_log(fs, config=config), open_log(other_fs, config=config)
    log.append(records, batch_bytes=batch_bytes)
    for segment in log.segments:
        for header in segment.headers():
            assert header.base_offset is not None
            other.append(records[header.base_offset : header.next_offset])
    assert bases(log) == bases(other)
    log.close()
    other.close()
    assert directory_bytes(fs) == directory_bytes(other_fs)


# --- by name ----------------------------------------------------------------------------------------------------------


def test_a_new_segment_begins_where_the_append_that_did_not_fit_begins() -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(segment_bytes=300))
    for _ in range(5):
        log.append_batches(sized_batch(100, count=2))
    assert bases(log) == [0, 6]
    assert [segment.size_bytes for segment in log.segments] == [300, 200]


def test_an_index_without_room_makes_every_batch_a_segment_of_its_own() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=LogConfig(segment_index_bytes=4))
    for _ in range(3):
        log.append_batches(sized_batch(100, count=2))
    assert bases(log) == [0, 2, 4]
    log.append([rec()] * 4, batch_bytes=70)
    assert len(contents(log)) == 10
    assert bases(log)[3:] == sorted({row[0] for row in contents(log, 6)})
    log.close()
    again = open_log(fs, config=LogConfig(segment_index_bytes=4))
    assert again.recovery.rebuilt == []
    assert again.log_end_offset == 10


def test_offsets_far_apart_get_segments_of_their_own() -> None:
    log = open_log(SimulatedFileSystem())
    for base in (0, 10, RELATIVE_OFFSET_MAX, RELATIVE_OFFSET_MAX + 1, 1 << 40, (1 << 40) + 5):
        log.append_batches(batch([rec(f"at {base}")], base_offset=base), origin=AppendOrigin.REPLICATION)
    assert bases(log) == [0, RELATIVE_OFFSET_MAX + 1, 1 << 40]
    assert [row[0] for row in contents(log)] == [
        0,
        10,
        RELATIVE_OFFSET_MAX,
        RELATIVE_OFFSET_MAX + 1,
        1 << 40,
        (1 << 40) + 5,
    ]


def test_jitter_rolls_earlier_and_is_drawn_for_each_segment() -> None:
    config = LogConfig(segment_ms=1000, segment_jitter_ms=1000)
    rolled_at = []
    for seed in range(5):
        log = open_log(SimulatedFileSystem(), config=config, randomness=random.Random(seed))
        drawn = [log.segments[0].jitter_ms]
        at_ms = NOW_MS
        while len(log.segments) < 4:
            log.append([rec(at_ms=at_ms)])
            at_ms += 10
            if len(log.segments) > len(drawn):
                drawn.append(log.segments[-1].jitter_ms)
        for before, after, jitter_ms in zip(log.segments, log.segments[1:], drawn, strict=False):
            age_ms = after.first_timestamp_ms - before.first_timestamp_ms
            assert 1000 - jitter_ms < age_ms <= 1010 - jitter_ms + (10 if jitter_ms % 10 else 0)
        rolled_at.append(tuple(drawn))
    assert len(set(rolled_at)) == 5


def test_the_compaction_lag_rolls_a_compacted_log_before_its_segment_age() -> None:
    config = LogConfig(segment_ms=10**9, max_compaction_lag_ms=100, cleanup_policy=COMPACT)
    log = open_log(SimulatedFileSystem(), config=config)
    for at_ms in (0, 100, 101):
        log.append([rec(at_ms=NOW_MS + at_ms)])
    assert bases(log) == [0, 2]


def test_opening_again_counts_the_age_of_records_without_time_from_now() -> None:
    fs, clock = SimulatedFileSystem(), ManualClock(NOW_MS)
    config = LogConfig(segment_ms=100)
    log = open_log(fs, config=config, clock=clock)
    log.append([rec(at_ms=-1)])
    log.close()
    clock.advance(1000)
    again = open_log(fs, config=config, clock=clock)
    again.append([rec(at_ms=-1)])
    assert bases(again) == [0]
    clock.advance(101)
    again.append([rec(at_ms=-1)])
    assert bases(again) == [0, 2]


def test_truncating_a_segment_to_nothing_begins_its_age_anew() -> None:
    clock = ManualClock(NOW_MS)
    log = open_log(SimulatedFileSystem(), config=LogConfig(segment_ms=100), clock=clock)
    log.append([rec(at_ms=-1)])
    clock.advance(1000)
    log.truncate_to(0)
    log.append([rec(at_ms=-1)])
    log.append([rec(at_ms=-1)])
    assert bases(log) == [0]


def test_a_roll_by_hand_seals_the_old_segment_and_does_nothing_to_an_empty_one() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=LogConfig(segment_index_bytes=1000))
    assert log.roll() == 0
    log.append(recs(3))
    assert log.roll() == 3
    assert log.roll() == 3
    assert bases(log) == [0, 3]
    files = directory_bytes(fs)
    sealed = {name: len(data) for name, data in files.items() if name.startswith("00000000000000000000.")}
    assert sealed == {
        "00000000000000000000.log": log.segments[0].size_bytes,
        "00000000000000000000.index": 0,
        "00000000000000000000.timeindex": 12,
    }
    assert len(files["00000000000000000003.index"]) == 1000
    assert "00000000000000000003.snapshot" in files


def test_a_roll_syncs_no_data(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    log = open_log(fs, str(tmp_path / "orders-0"), LogConfig(segment_bytes=300))
    log.append(recs(1))
    fs.calls.clear()
    for _ in range(6):
        log.append_batches(sized_batch(100))
    assert len(log.segments) == 3
    synced = [call.path for call in fs.calls if call.kind in ("fsync", "fsync_dir")]
    assert synced, "the segment list is durable"
    assert {path.removeprefix(str(tmp_path)) for path in synced} == {"/state", "/state/orders-0.tmp"}
    assert log.recovery_point == 0


def test_stale_files_of_the_new_base_are_removed_first() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append(recs(3))
    for suffix in ("log", "index", "timeindex", "txnindex"):
        fs.open(f"{DIRECTORY}/{3:020d}.{suffix}", create=True).pwrite(b"left behind", 0)
    log.roll()
    log.append(recs(2, first=3))
    log.close()
    assert contents(open_log(fs)) == expected(recs(5), 0)[:3] + expected(recs(2, first=3), 3)


# --- preallocation ----------------------------------------------------------------------------------------------------


PREALLOCATED = LogConfig(segment_bytes=1000, preallocate=True, segment_index_bytes=960)


def log_sizes(fs: SimulatedFileSystem) -> list[int]:
    return [len(data) for name, data in directory_bytes(fs).items() if name.endswith(".log")]


def test_preallocated_files_are_cut_on_roll_and_on_close() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=PREALLOCATED)
    assert log_sizes(fs) == [1000]
    for _ in range(4):
        log.append_batches(sized_batch(300))
    assert log_sizes(fs) == [900, 1000]
    assert log.size_bytes == 1200
    log.close()
    assert log_sizes(fs) == [900, 300]


def test_a_short_lived_writer_preallocates_nothing() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=PREALLOCATED, long_lived=False)
    for _ in range(4):
        log.append_batches(sized_batch(300))
    assert {name.split(".")[1]: len(data) for name, data in directory_bytes(fs).items() if name.startswith("0")} == {
        "log": 300,
        "index": 0,
        "timeindex": 0,
        "snapshot": len(directory_bytes(fs)[f"{3:020d}.snapshot"]),
    }
    assert log_sizes(fs) == [900, 300]


@pytest.mark.parametrize("batches", [0, 1, 3, 4])
def test_recovery_cuts_a_preallocated_tail_and_sets_nothing_aside(batches: int) -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=PREALLOCATED)
    for _ in range(batches):
        log.append_batches(sized_batch(300))
    before = contents(log)
    again = open_log(fs.kill(), config=PREALLOCATED, clean=False, long_lived=False)
    assert contents(again) == before
    assert not again.recovery.found_damage
    assert again.recovery.dropped_bytes == 0
    assert any("preallocated" in note for note in again.recovery.notes)
    assert again.size_bytes == 300 * batches


def test_a_torn_batch_in_a_preallocated_file_is_set_aside_without_the_zeros_behind_it() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=PREALLOCATED)
    log.append_batches(sized_batch(300))
    log.segments[0].log.pwrite(sized_batch(300, base_offset=1)[:150], 300)
    survivor = fs.kill()
    again = open_log(survivor, config=PREALLOCATED, clean=False)
    assert again.log_end_offset == 1
    (cut,) = again.recovery.cuts
    assert (cut.position, cut.dropped_bytes) == (300, 700)
    (aside,) = again.recovery.quarantined
    assert survivor.files()[aside] == sized_batch(300, base_offset=1)[:150].rstrip(b"\0")


def test_a_rolled_segment_whose_cut_was_lost_does_not_cost_the_segments_behind_it() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=PREALLOCATED)
    for _ in range(5):
        log.append_batches(sized_batch(300))
    before = contents(log)
    log.segments[0].log.truncate(1000)  # a power cut forgot the truncation of the roll
    again = open_log(fs.kill(), config=PREALLOCATED, clean=False)
    assert contents(again) == before
    assert not again.recovery.found_damage


def test_zeros_where_records_must_have_been_are_damage() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=PREALLOCATED)
    for _ in range(5):
        log.append_batches(sized_batch(300))
    log.segments[0].log.pwrite(bytes(300), 600)
    again = open_log(fs.kill(), config=PREALLOCATED, clean=False)
    assert again.log_end_offset == 2
    assert again.recovery.found_damage
    assert [path.rsplit("/", 1)[1] for path in again.recovery.quarantined] == [f"{3:020d}.log"]
