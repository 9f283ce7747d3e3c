"""The guarantees of log compaction, each with a clock of its own, and random logs against a model in plain Python."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.cleaner import run_pass
from logstore.cleaner.engine import LocalEngine
from logstore.cleaner.rewrite import GroupWriter
from logstore.errors import CorruptBatch
from logstore.files import OS_FILES
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record

DAY_MS = 86_400_000


def keys(rng: random.Random, count: int, of: int, *, at_ms: int = NOW_MS, tombstones: float = 0.2) -> list[Record]:
    return [
        Record(
            b"k%d" % rng.randrange(of), None if rng.random() < tombstones else rng.randbytes(rng.randrange(30)), at_ms
        )
        for _ in range(count)
    ]


def live(records: list[Record]) -> dict[bytes | None, bytes]:
    """The state: the latest value of each key that was not deleted."""
    latest = {r.key: r.value for r in records}
    return {key: value for key, value in latest.items() if value is not None}


def survivors(records: list[Record], end: int) -> list[Record]:
    """The model: below `end` only the last record of each key stays."""
    last = {r.key: r.offset for r in records if r.offset < end}
    return [r for r in records if r.offset >= end or last[r.key] == r.offset]


def test_a_reader_inside_the_head_sees_every_record(lab: Lab) -> None:
    rng = random.Random(1)
    lab.append(*[keys(rng, 5, 4) for _ in range(30)])
    everything = lab.records()
    report = lab.compact()
    assert report.removed["superseded"] > 50
    head = lab.state.segments[-1].base_offset
    assert lab.records(head) == [r for r in everything if r.offset >= head]
    assert lab.records() == survivors(everything, report.end_offset)


def test_nothing_younger_than_the_minimal_lag_goes(lab: Lab) -> None:
    lab.reconfigure(min_compaction_lag_ms=1000)
    rng = random.Random(2)
    for step in range(20):
        lab.append(*[keys(rng, 6, 3, at_ms=NOW_MS + step * 200)], roll=step % 3 == 2)
    everything = lab.records()
    now_ms = NOW_MS + 20 * 200
    lab.compact(now_ms)
    left = {r.offset for r in lab.records()}
    young = {r.offset for r in everything if r.timestamp_ms > now_ms - 1000}
    assert young
    assert young <= left
    assert len(left) < len(everything)


def test_order_never_changes_and_an_offset_always_means_the_same_record(lab: Lab) -> None:
    rng = random.Random(3)
    known: dict[int, tuple[bytes | None, bytes | None, int]] = {}
    for step in range(12):
        lab.append(*[keys(rng, 7, 9, at_ms=NOW_MS + step) for _ in range(4)])
        found = lab.records()
        assert [r.offset for r in found] == sorted({r.offset for r in found})
        for r in found:
            assert known.setdefault(r.offset, (r.key, r.value, r.timestamp_ms)) == (r.key, r.value, r.timestamp_ms)
        lab.compact(NOW_MS + step * DAY_MS // 3)


def test_a_reader_from_the_start_sees_every_tombstone_for_as_long_as_it_may(lab: Lab) -> None:
    lab.append([Record(b"a", b"1", NOW_MS), Record(b"b", b"1", NOW_MS)], [Record(b"a", None, NOW_MS)], roll=True)
    report = lab.compact(NOW_MS)
    assert report.next_horizon_ms == NOW_MS + DAY_MS
    for later in (0, DAY_MS // 2, DAY_MS - 1):
        lab.compact(NOW_MS + later)
        assert [(r.key, r.value) for r in lab.records()] == [(b"b", b"1"), (b"a", None)]
    assert lab.compact(NOW_MS + DAY_MS).removed == {"tombstone": 1}
    assert [(r.key, r.value) for r in lab.records()] == [(b"b", b"1")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 32),
    threads=st.sampled_from([1, 2, 3]),
    codec=st.sampled_from([0, 3, 4]),
    buffer=st.sampled_from([60, 24 * 9, 1 << 20]),
    algorithm=st.sampled_from(["siphash", "md5"]),
)
def test_random_logs_keep_the_last_record_of_each_key(
    tmp_path_factory: pytest.TempPathFactory, seed: int, threads: int, codec: int, buffer: int, algorithm: str
) -> None:
    rng = random.Random(seed)
    lab = Lab(tmp_path_factory.mktemp("lab"), segment_bytes=rng.choice([300, 1000, 5000]))
    lab.append(*[keys(rng, rng.randrange(1, 9), rng.choice([2, 10, 100])) for _ in range(rng.randrange(1, 40))])
    for _ in range(3):
        everything = lab.records()
        report = lab.compact(
            NOW_MS, threads=threads, map_settings=MapSettings(buffer_bytes=buffer, algorithm=algorithm)
        )
        assert lab.records() == survivors_in(everything, report.first_dirty_offset, report.end_offset)
        assert lab.state.first_dirty_offset == report.end_offset
        if report.map_full:
            assert report.map_buffer_wanted is not None
            assert report.map_buffer_wanted > 0
        lab.append(keys(rng, 5, 10), codec_id=codec, roll=rng.random() < 0.5)


def survivors_in(records: list[Record], dirty: int, end: int) -> list[Record]:
    """Only what the map of [dirty, end) knows is superseded."""
    last = {r.key: r.offset for r in records if dirty <= r.offset < end}
    return [r for r in records if r.offset >= end or last.get(r.key, r.offset) <= r.offset]


def test_threads_change_nothing(tmp_path: Path) -> None:
    rng = random.Random(5)
    batches = [keys(rng, 8, 50) for _ in range(120)]
    files = []
    for threads in (1, 2, 4):
        lab = Lab(tmp_path / str(threads))
        lab.append(*batches)
        lab.compact(threads=threads)
        files.append({path.name: path.read_bytes() for path in sorted(Path(lab.directory).glob("*.log"))})
    assert files[0] == files[1] == files[2]


def test_a_group_that_fails_ends_the_pass_before_any_later_one_is_swapped_in(lab: Lab) -> None:
    """A tombstone may only go once all older groups are in, or its key comes back."""
    rng = random.Random(6)
    lab.append([Record(b"k", b"old", NOW_MS)], *[keys(rng, 9, 5) for _ in range(40)])
    lab.append([Record(b"k", None, NOW_MS)], roll=True)
    lab.compact(NOW_MS)
    lab.append(*[keys(rng, 9, 5) for _ in range(40)], roll=True)
    state = lab.state
    found = lab.cleanable(NOW_MS + DAY_MS)
    work = lab.work(
        MapSettings(buffer_bytes=1 << 20),
        now_ms=NOW_MS + DAY_MS,
        first_uncleanable_offset=found.first_uncleanable_offset,
    )
    before = lab.records()
    Path(lab.folder).mkdir()

    class Failing(GroupWriter):
        def rewrite(self, group, number):  # type: ignore[no-untyped-def]
            if group.pieces[number].source.segment == work.segments[2]:
                group.order.fail()
                raise CorruptBatch("as if", file="here")
            return super().rewrite(group, number)

    import logstore.cleaner.engine as module

    original = module.GroupWriter
    module.GroupWriter = Failing  # type: ignore[misc]
    try:
        swapped = []
        with pytest.raises(CorruptBatch):
            run_pass(
                OS_FILES,
                work,
                engine=LocalEngine(OS_FILES, threads=3),
                state_path=lab.state_path,
                folder=lab.folder,
                swapped=swapped.append,
            )
    finally:
        module.GroupWriter = original  # type: ignore[misc]
    assert all(done.sources[-1].base_offset < work.segments[2].base_offset for done in swapped)
    assert os.listdir(lab.folder) == [], "what was written of other groups is gone"
    assert lab.state.first_dirty_offset == state.first_dirty_offset
    assert live(lab.records()) == live(before)
    assert lab.compact(NOW_MS + DAY_MS).groups  # the next pass goes on
