"""The latest record of each key in a range: against a dictionary, in little memory, and while files are replaced."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.errors import DamagedLog
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.partition import latest
from logstore.partition.latest import Wanted, latest_records
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import LogView
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.partition_writer import PartitionWriter

PARTITION = TopicPartition("t", 0)
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


class Written:
    """A log that was written and closed, and a reader of it."""

    def __init__(self, root: str, batches: list[tuple[str, list[Record]]], *, segment_bytes: int = 1 << 20) -> None:
        self.directory = os.path.join(root, "t-0")
        self.state_path = os.path.join(root, "state")
        os.makedirs(self.directory, exist_ok=True)
        log = PartitionWriter.open(
            self.directory,
            partition=PARTITION,
            config=LogConfig(segment_bytes=segment_bytes),
            clean=True,
            state_path=self.state_path,
            long_lived=False,
        )
        for codec, records in batches:
            log.append(records, codec_id=CODECS.index(codec))
        self.end_offset = log.log_end_offset
        log.close()

    def reader(self) -> PartitionReader:
        return PartitionReader(
            PartitionPlace(self.directory, PARTITION, self.state_path), high_watermark=lambda: self.end_offset
        )

    def state(self) -> PartitionState:
        state = read_state(OS_FILES, self.state_path)
        assert state is not None
        return state

    def latest(self, start: int | None = None, end: int | None = None, **options: Any) -> list[Record]:
        reader = self.reader()
        try:
            found = latest_records(reader, start, end, wanted=Wanted(**options), limits=DEFAULT_LIMITS)
            return [record for columns in found for record in columns.records()]
        finally:
            reader.close()


def oracle(records: list[Record], low: int, high: int, *, tombstones: bool) -> dict[bytes, tuple[int, bytes | None]]:
    found: dict[bytes, tuple[int, bytes | None]] = {}
    for offset, record in enumerate(records):
        if low <= offset < high and record.key is not None:
            found[record.key] = (offset, record.value)
    return {key: (at, value) for key, (at, value) in found.items() if tombstones or value is not None}


records_ = st.builds(
    Record,
    st.none() | st.sampled_from([b"", b"a", b"b", b"c", b"key-that-is-longer"]) | st.binary(max_size=3),
    st.none() | st.binary(max_size=40),
    st.integers(0, 10**12),
)
batches_ = st.lists(st.tuples(st.sampled_from(CODECS), st.lists(records_, min_size=1, max_size=12)), max_size=8)


@settings(max_examples=200)
@given(batches_, st.data(), st.booleans())
def test_it_is_what_a_dictionary_would_hold(
    batches: list[tuple[str, list[Record]]], data: st.DataObject, tombstones: bool
) -> None:
    records = [record for _, batch in batches for record in batch]
    low = data.draw(st.integers(0, len(records)))
    high = data.draw(st.integers(low, len(records)))
    with tempfile.TemporaryDirectory() as root:
        written = Written(root, batches, segment_bytes=1_100)  # a batch has less
        found = written.latest(low, high, tombstones=tombstones)
    offsets = [record.offset for record in found]
    assert offsets == sorted(offsets)
    keys = [record.key for record in found]
    assert len(keys) == len(set(keys))
    expected = oracle(records, low, high, tombstones=tombstones)
    assert {record.key: (record.offset, record.value) for record in found} == expected


@contextmanager
def map_of(slots: int) -> Iterator[None]:
    before, latest._MEMORY_BYTES_MIN = latest._MEMORY_BYTES_MIN, 24 * slots
    try:
        yield
    finally:
        latest._MEMORY_BYTES_MIN = before


@pytest.mark.parametrize("slots", [8, 40, 4096])
def test_little_memory_means_buckets_and_the_same_answer(tmp_path: Path, slots: int) -> None:
    records = [Record(b"k%d" % (n * 7 % 500), None if n % 11 == 0 else b"v%d" % n, n) for n in range(2000)]
    written = Written(
        str(tmp_path), [("none", records[at : at + 100]) for at in range(0, 2000, 100)], segment_bytes=9000
    )
    with map_of(slots):
        found = written.latest(memory_bytes=slots * 24)
    assert {record.key: (record.offset, record.value) for record in found} == oracle(records, 0, 2000, tombstones=False)
    assert len(found) == len({record.key for record in found})


def test_an_empty_log_and_an_empty_range(tmp_path: Path) -> None:
    assert Written(str(tmp_path / "a"), []).latest() == []
    assert Written(str(tmp_path / "b"), [("none", [Record(b"k", b"v", 1)])]).latest(1, 1) == []


def test_headers_come_only_when_asked_for(tmp_path: Path) -> None:
    written = Written(str(tmp_path), [("lz4", [Record(b"k", b"v", 1, (("h", b"x"),))])])
    assert written.latest()[0].headers == ()
    assert written.latest(headers=True)[0].headers == (("h", b"x"),)


def test_what_is_below_the_log_start_does_not_count(tmp_path: Path) -> None:
    written = Written(str(tmp_path), [("none", [Record(b"a", b"1", 1), Record(b"b", b"2", 2), Record(b"a", b"3", 3)])])
    state = written.state()
    write_state(
        OS_FILES,
        written.state_path,
        PartitionState(state.generation + 1, log_start_offset=2, segments=state.segments, producers=False),
    )
    assert [record.key for record in written.latest()] == [b"a"]
    assert [record.key for record in written.latest(0, 3)] == [b"a"]


def test_files_removed_in_the_middle_change_nothing(tmp_path: Path) -> None:
    records = [Record(b"k%d" % n, b"v" * 50, n) for n in range(300)]
    written = Written(str(tmp_path), [("none", records[at : at + 10]) for at in range(0, 300, 10)], segment_bytes=2000)
    reader = written.reader()
    found = latest_records(reader, limits=DEFAULT_LIMITS)
    first = next(found)
    for name in os.listdir(written.directory):
        os.unlink(os.path.join(written.directory, name))
    rest = [record for columns in found for record in columns.records()]
    assert len(list(first.records())) + len(rest) == 300


def test_a_list_that_changes_while_files_are_opened_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tombstones dropped behind our back: a value read before and the list read after would bring a key back."""
    written = Written(str(tmp_path), [("none", [Record(b"a", b"1", 1)]), ("none", [Record(b"b", b"2", 2)])])
    reader = written.reader()
    views = 0
    real = PartitionReader.view

    def view(self: PartitionReader, *, committed: bool = False) -> LogView:
        nonlocal views
        views += 1
        seen = real(self, committed=committed)
        if views == 1:
            state = written.state()
            changed = PartitionState(state.generation, dropped_tombstones=5, segments=state.segments, producers=False)
            write_state(OS_FILES, written.state_path, changed)
        return seen

    monkeypatch.setattr(PartitionReader, "view", view)
    told: list[int] = []
    found = latest_records(
        reader, limits=DEFAULT_LIMITS, held=lambda state, seen: told.append(state.dropped_tombstones)
    )
    assert sum(len(columns) for columns in found) == 2
    assert (views, told) == (2, [5])


def test_a_file_that_stays_missing_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "_LOOK_AGAIN_S", 0.0)
    written = Written(str(tmp_path), [("none", [Record(b"a", b"1", 1)])])
    for name in os.listdir(written.directory):
        os.unlink(os.path.join(written.directory, name))
    with pytest.raises(DamagedLog, match="names missing files"):
        written.latest()


def test_more_segments_than_files_are_usually_allowed(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("the system allows too few files to try")
    records = [Record(b"k%d" % n, b"v", n) for n in range(120)]
    written = Written(str(tmp_path), [("none", [record]) for record in records], segment_bytes=80)
    assert len(written.state().segments) > 100
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert len(written.latest()) == 120
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
