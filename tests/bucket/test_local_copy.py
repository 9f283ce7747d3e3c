"""A restore fetches what it reads once, side by side and ahead of itself, and keeps it in a file without a name."""

from __future__ import annotations

import itertools
import resource
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucket.test_maintaining import NOW_MS, opened
from logstore.bucket.files import BlockCache, CacheLimits
from logstore.bucket.keys import manifest_key
from logstore.bucket.local_copy import LocalCopy, Piece, pieces_to_read
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.manifest import Segment
from logstore.bucket.reader import Shelf
from logstore.bucket.sealing import SealRules
from logstore.bucket.segment_object import object_bytes
from logstore.bucket.store import BucketStore
from logstore.bucket.tail import Plans
from logstore.clock import ManualClock
from logstore.errors import ObjectMissing, ObjectStoreUnavailable
from logstore.limits import MIB
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Bytes, Version
from logstore.records.record import Record
from logstore.restore.lookup import latest_of_key
from logstore.restore.restore import plan_restore, restore_partition

PIECE = 4096
#: memory keeps nothing, so that what is read again comes from the copy or by a request
LIMITS = CacheLimits(memory_bytes=1, block_bytes=512, ahead_bytes=0, copy_piece_bytes=PIECE)
WAIT_S = 60


class Asked(MemoryObjects):
    """Notes what is asked for. The first requests for bytes wait for each other where `together` is set."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked: list[tuple[str, int, int]] = []
        self.together = threading.Barrier(1)
        self._first = threading.Semaphore(0)

    def wait_for(self, requests: int) -> None:
        """Answer none of so many requests before all of them were made."""
        self.together, self._first = threading.Barrier(requests), threading.Semaphore(requests)

    def get(self, key: str) -> tuple[bytes, Version]:
        self.asked.append((key, 0, 0))
        return super().get(key)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        self.asked += [(key, begin, end) for begin, end in spans]
        if self._first.acquire(blocking=False):
            self.together.wait(WAIT_S)
        return super().ranges(key, spans)

    def of_segments(self) -> list[tuple[str, int, int]]:
        return sorted(each for each in self.asked if each[0].startswith("logs/"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def objects(clock: ManualClock) -> Asked:
    """Two partitions, each with several sealed segments of more than one piece."""
    objects, rng = Asked(clock), np.random.default_rng(3)
    store = opened(objects, clock, create=True)
    store.create_topic("orders", partitions=2, configs={"cleanup.policy": "compact", "segment.bytes": "20000"})
    for _ in range(8):
        store.append("orders", [Record(b"k%d" % n, rng.bytes(200), NOW_MS) for n in rng.integers(0, 90, 60).tolist()])
    done = maintain(store, MaintenanceRules(seal=SealRules(force=True), compact=False, sweep=False))
    assert not done.failed, done.failed
    objects.asked.clear()
    return objects


def over(objects: Asked, clock: ManualClock, limits: CacheLimits = LIMITS) -> BucketStore:
    store = opened(objects, clock)
    store.shelf = Shelf(BlockCache(objects, limits=limits), Plans(objects, store.limits))
    return store


def segments_of(store: BucketStore) -> list[Segment]:
    return [segment for n in range(2) for segment in store.reader("orders", n).look().view.segments]


def state(store: BucketStore, memory_bytes: int = 1 << 20) -> dict[bytes, bytes]:
    plan = plan_restore(store, "orders")
    found = [
        each
        for n in range(2)
        for columns in restore_partition(store, plan, n, memory_bytes=memory_bytes)
        for each in columns.records()
    ]
    assert len({record.key for record in found}) == len(found)
    return {record.key: record.value for record in found}  # type: ignore[misc]


def latest(store: BucketStore) -> dict[bytes, bytes]:
    return {each.key: each.value for n in range(2) for each in store.reader("orders", n).records(0)}  # type: ignore[misc]


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [512 << 20, 1])
def test_a_restore_fetches_each_byte_once(objects: Asked, clock: ManualClock, memory_bytes: int) -> None:
    """However many passes it makes: without memory for the keys, they are taken in buckets."""
    expected = latest(opened(objects, clock))
    store = over(objects, clock)
    segments = segments_of(store)
    assert len(segments) >= 4
    assert all(object_bytes(segment) > PIECE for segment in segments)
    objects.asked.clear()
    assert state(store, memory_bytes=memory_bytes) == expected
    asked = objects.of_segments()
    for (key, _, end), (after, begin, _) in itertools.pairwise(asked):
        assert after != key or begin == end, "nothing comes twice, and nothing is left out"
    assert sum(end - begin for _, begin, end in asked) == sum(map(object_bytes, segments))
    assert max(end - begin for _, begin, end in asked) <= PIECE


def test_pieces_are_asked_for_side_by_side(objects: Asked, clock: ManualClock) -> None:
    expected, store = latest(opened(objects, clock)), over(objects, clock)
    objects.wait_for(4)
    assert state(store) == expected
    assert not objects.together.broken


def test_a_partition_is_begun_before_the_one_in_front_of_it_is_read(objects: Asked, clock: ManualClock) -> None:
    store = over(objects, clock)
    batches = store.restore("orders")
    first = next(batches)
    assert set(first.column("partition").to_pylist()) == {0}
    topic = store.topic("orders")
    asked = [key for key, _, _ in objects.asked]
    second = [n for n, key in enumerate(asked) if key == manifest_key(topic.id, 1)][-1]
    assert second > asked.index(f"{segments_of(store)[0].key}"), "looked at while the first one is fetched"
    batches.close()  # type: ignore[attr-defined]
    store.close()
    assert not list(objects.list("pins")), "nobody holds what was begun"


def test_little_is_fetched_as_other_readers_do(objects: Asked, clock: ManualClock) -> None:
    asked = []
    for limits in (LIMITS, replace(LIMITS, copy_bytes=0)):
        store = over(objects, clock, limits)
        since = {number: end - 1 for number, end in enumerate(plan_restore(store, "orders").end_offsets)}
        objects.asked.clear()
        assert sum(batch.num_rows for batch in store.restore("orders", since_offsets=since)) == 2
        assert latest_of_key(store, store.topic("orders"), b"k7") is not None
        asked.append(objects.of_segments())
    assert asked[0] == asked[1]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_has_no_room_is_fetched_again(objects: Asked, clock: ManualClock) -> None:
    expected = latest(opened(objects, clock))
    store = over(objects, clock, replace(LIMITS, copy_bytes=20_000))
    objects.asked.clear()
    assert state(store) == expected
    asked = objects.of_segments()
    assert len(set(asked)) < len(asked)


@contextmanager
def small_files(bytes_max: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_costs_requests_only(objects: Asked, clock: ManualClock) -> None:
    expected, store = latest(opened(objects, clock)), over(objects, clock)
    objects.asked.clear()
    with small_files(3 * PIECE):
        assert state(store) == expected
    asked = objects.of_segments()
    assert len(set(asked)) < len(asked)


def test_no_folder_for_temporary_files_costs_requests_only(
    objects: Asked, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, store = latest(opened(objects, clock)), over(objects, clock)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert state(store) == expected


def test_in_a_task_it_lies_where_spark_keeps_its_own(
    objects: Asked, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, store = latest(opened(objects, clock)), over(objects, clock)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'gone'},{tmp_path}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    objects.asked.clear()
    assert state(store) == expected
    asked = objects.of_segments()
    assert len(set(asked)) == len(asked), "it was kept"
    assert not list(tmp_path.iterdir()), "it has no name"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_what_fails_ahead_is_asked_for_again_and_told_then(threads: ThreadPoolExecutor) -> None:
    class Failing(MemoryObjects):
        fails = True

        def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
            if self.fails:
                raise ObjectStoreUnavailable("not now")
            return super().ranges(key, spans)

    objects = Failing()
    objects.put("logs/x", [b"abcdef"])
    copy = LocalCopy(objects, threads, [Piece("logs/x", 0, 3, 0), Piece("logs/x", 3, 6, 3)])
    found = bytearray(4)
    with pytest.raises(ObjectStoreUnavailable):
        copy.read_into("logs/x", memoryview(found), 1)
    objects.fails = False
    assert copy.read_into("logs/x", memoryview(found), 1)
    assert found == b"bcde"
    objects.delete(["logs/x"])
    assert copy.read_into("logs/x", memoryview(found), 2), "it is kept"
    assert found == b"cdef"
    assert not copy.read_into("logs/x", memoryview(found), 3), "nobody said that there is more"
    assert not copy.read_into("logs/y", memoryview(found), 0)
    copy.close()


def test_an_object_that_is_gone_is_missing_when_it_is_read(threads: ThreadPoolExecutor) -> None:
    copy = LocalCopy(MemoryObjects(), threads, [Piece("logs/gone", 0, 3, 0)])
    with pytest.raises(ObjectMissing):
        copy.read_into("logs/gone", memoryview(bytearray(3)), 0)
    copy.close()


def test_a_copy_that_is_closed_ends_with_the_request_on_its_way() -> None:
    """Its descriptor is not another file's before the last answer was written."""
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(MemoryObjects):
        asked = 0

        def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
            self.asked += 1
            begun.set()
            assert goes_on.wait(WAIT_S)
            return super().ranges(key, spans)

    objects = Slow()
    objects.put("logs/x", [b"abcdef"])
    with ThreadPoolExecutor(1) as threads:
        copy = LocalCopy(objects, threads, [Piece("logs/x", 0, 3, 0), Piece("logs/x", 3, 6, 3)])
        assert begun.wait(WAIT_S)
        copy.close()
        closed = [copy._file.closed]
        goes_on.set()
    assert [*closed, copy._file.closed] == [False, True]
    assert objects.asked == 1
    copy.close()


# --- what is fetched --------------------------------------------------------------------------------------------------


def segment(base: int, log: int, index: int = 100, offsets: int = 1000) -> Segment:
    return Segment(f"logs/{base}", base, base + offsets, log, index)


@pytest.mark.parametrize(
    ("start", "end", "spans"),
    [
        (0, 3000, [("logs/0", 20, 24), ("logs/1000", 0, 3), ("logs/2000", 9, 10)]),
        (0, 1000, [("logs/0", 20, 24)]),
        (1000, 2000, [("logs/1000", 0, 3)]),
        (1999, 2000, []),  # little of a segment
        (0, 0, []),
        (3000, 9000, []),
        (500, 1000, [("logs/0", 20, 24)]),
    ],
)
def test_what_comes_first(start: int, end: int, spans: list[tuple[str, int, int]]) -> None:
    """Indexes, and small objects whole; then logs."""
    listed = [segment(0, 20 * MIB, 4 * MIB), segment(1000, 2 * MIB, MIB), segment(2000, 9 * MIB, MIB)]
    pieces = pieces_to_read(listed, start, end, piece_bytes=8 * MIB, bytes_max=1 << 30)
    assert [(each.key, each.begin // MIB, each.end // MIB) for each in pieces[: len(spans)]] == spans
    assert all(each.end <= 20 * MIB for each in pieces[len(spans) :])
    covered = 0
    for each in pieces:
        assert each.position == covered
        covered += each.end - each.begin
        assert each.end - each.begin <= 8 * MIB


def test_a_part_is_fetched_by_whole_pieces_and_as_far_as_there_is_room() -> None:
    (_, *logs) = pieces_to_read([segment(0, 40 * MIB)], 500, 700, piece_bytes=8 * MIB, bytes_max=1 << 30)
    assert [(each.begin // MIB, each.end // MIB) for each in logs] == [(16, 24), (24, 32)]
    listed = [segment(base, 8 * MIB, 0) for base in range(0, 5000, 1000)]
    assert len(pieces_to_read(listed, 0, 5000, piece_bytes=8 * MIB, bytes_max=25 * MIB)) == 3
