"""Segments as objects, tails, seals: what a reader finds before and after, and that a store in a directory agrees."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from bucket.small_store import NOW_MS, TOPIC, TOPIC_ID, SmallStore, some_records
from logstore.bucket.files import BlockCache, CacheLimits
from logstore.bucket.reader import BucketReader, Shelf
from logstore.bucket.sealing import SealRules
from logstore.bucket.tail import Plans, TailCommit, warm
from logstore.clock import ManualClock
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.commit.staging import EncodeOptions
from logstore.errors import (
    DamagedLog,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreUnavailable,
    ObjectTruncated,
    OffsetOutOfRange,
    SegmentsChanged,
)
from logstore.limits import DEFAULT_LIMITS as LIMITS
from logstore.objects.counted import CountedObjects
from logstore.objects.objects import Bytes, Version
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.partition.latest import Wanted, latest_records
from logstore.store import LogStore

QUICK = Patience(deadline_s=5, first_wait_s=0.001, sleep=lambda _: None, monotonic=lambda: 0.0)


def posix_bytes(store: LogStore, partition: int) -> bytes:
    folder = store.layout.partition(store.topic(TOPIC).partition(partition))
    return b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.log")))


CONFIGS = [
    {"segment.bytes": "4000"},
    {"segment.bytes": "3000", "message.timestamp.type": "LogAppendTime", "segment.ms": "2000"},
    {"segment.ms": "500", "index.interval.bytes": "100", "cleanup.policy": "compact"},
    {"segment.index.bytes": "40", "index.interval.bytes": "1", "compression.type": "zstd"},
]


@pytest.mark.parametrize("configs", CONFIGS, ids=["size", "append-time", "age", "full-index"])
def test_a_sealed_partition_has_the_bytes_of_a_store_in_a_directory(
    tmp_path: Path, rng: random.Random, configs: dict[str, str]
) -> None:
    clock = ManualClock(NOW_MS)
    bucket = SmallStore(tmp_path, dict(configs), partitions=3, clock=clock, files_per_batch=1)
    with LogStore(str(tmp_path / "posix"), create=True, clock=clock) as posix:
        posix.create_topic(TOPIC, partitions=3, configs=configs)
        committer = Committer(posix)
        for number in range(7):
            table = table_of(some_records(rng, rng.randrange(1, 60), at_ms=clock.now_ms()))
            row = bucket.append(table, EncodeOptions(batch_size=500))
            append_table(committer, TOPIC, table, options=EncodeOptions(batch_size=500))
            assert row.end_offsets == posix.ends(posix.topic(TOPIC)).high_watermarks
            if number in (2, 3):
                for partition in range(3):
                    bucket.seal(partition)
            clock.advance(rng.randrange(2000))
        for partition in range(3):
            expected = list(posix.reader(TOPIC, partition).records(0))
            assert bucket.records(partition) == expected  # sealed in part
            times = [NOW_MS - 5, -1, -2, -3, *(rng.randrange(NOW_MS, clock.now_ms()) for _ in range(4))]
            in_posix = [posix.reader(TOPIC, partition).offset_for_timestamp(time) for time in times]
            assert [bucket.reader(partition).offset_for_timestamp(time) for time in times] == in_posix
            bucket.seal(partition)
            assert bucket.records(partition) == expected
            assert [bucket.reader(partition).offset_for_timestamp(time) for time in times] == in_posix
            assert bucket.log_bytes(partition) == posix_bytes(posix, partition)


# --- readers ----------------------------------------------------------------------------------------------------------


def filled(tmp_path: Path, rng: random.Random, batches: int = 6, **configs: str) -> SmallStore:
    store = SmallStore(tmp_path, {"segment.bytes": "3000"} | configs, files_per_batch=2)
    for _ in range(batches):
        store.append(some_records(rng, rng.randrange(5, 40), at_ms=store.clock.now_ms()), EncodeOptions(batch_size=400))
        store.clock.advance(1000)
    return store


def test_a_reader_begins_and_ends_anywhere(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()
    for _ in range(2):
        reader = store.reader()
        for start in range(0, len(expected), 7):
            end = rng.randrange(start, len(expected) + 1)
            assert list(reader.records(start, end)) == expected[start:end]
        with pytest.raises(OffsetOutOfRange):
            list(reader.records(len(expected) + 1))
        store.seal(rules=SealRules(force=True, commits_max=3))


def test_a_partition_without_records_has_an_empty_active_segment(tmp_path: Path) -> None:
    store = SmallStore(tmp_path)
    assert store.records() == []
    reader = store.reader()
    assert (reader.log_start_offset(), reader.end_offset(), reader.state().segments[-1].base_offset) == (0, 0, 0)
    assert store.seal() is None


def test_a_cursor_goes_on_when_its_objects_were_sealed_and_freed(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()
    reader = store.reader()
    found = []
    for columns in reader.columns(0):
        found += columns.records()
        if len(found) < 40:  # what it was about to read goes away
            store.seal()
            store.inner.delete([head.key for head in store.inner.list("data")])
    assert found == expected


def test_an_object_that_is_gone_and_still_named_is_damage(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    store.inner.delete([head.key for head in store.inner.list("data") if head.key.endswith(".batches")][:3])
    with pytest.raises(DamagedLog):
        store.records()
    with pytest.raises(DamagedLog, match="gone"):
        store.seal()
    assert store.manifests().read(TOPIC_ID, 0).manifest is None


def test_a_snapshot_does_not_move(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    frozen = store.reader().frozen()
    expected = store.records()
    store.append(some_records(rng, 5))
    store.seal()
    assert list(frozen.records(0)) == expected
    assert len(store.records()) == len(expected) + 5


def test_the_latest_record_of_each_key_is_found(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    latest = {record.key: record for record in store.records()}
    for _ in range(2):
        found = [
            record
            for columns in latest_records(store.reader(), wanted=Wanted(tombstones=True, headers=True), limits=LIMITS)
            for record in columns.records()
        ]
        assert {record.key: record for record in found} == latest
        store.seal(rules=SealRules(force=True, commits_max=3))


def test_a_tail_is_fetched_by_object(tmp_path: Path, rng: random.Random) -> None:
    partitions = 12
    store = SmallStore(tmp_path, partitions=partitions, cache=CacheLimits())
    for _ in range(3):
        store.append(some_records(rng, 300, keys=200))
    counted = CountedObjects(store.inner)
    seen = store.over(counted)
    shelf = seen.shelf()
    readers = [BucketReader(shelf, seen.source(number)) for number in range(partitions)]
    assert sum(len(list(reader.records(0))) for reader in readers) == 900
    assert counted.requests["ranges"] == 3
    assert counted.requests["get"] == 3 + partitions  # plans and manifests

    warm_shelf = seen.shelf()
    commits = [
        TailCommit.of(warm_shelf.plans.get(row.plan), row, number, 0)
        for row in store.rows
        if row.plan is not None
        for number in range(partitions)
    ]
    counted.requests.clear()
    warm(warm_shelf.cache, commits)
    assert counted.requests == {"ranges": 3}
    list(BucketReader(warm_shelf, seen.source(1)).records(0))
    assert counted.requests["ranges"] == 3


def test_a_sealed_log_is_read_in_few_requests(tmp_path: Path, rng: random.Random) -> None:
    store = SmallStore(tmp_path)
    store.append(some_records(rng, 6000), EncodeOptions(batch_size=2000))
    store.seal()
    limits = CacheLimits(memory_bytes=1 << 16, block_bytes=1 << 14, ahead_bytes=1 << 20)
    expected = store.records()
    assert len(store.log_bytes()) > 500_000
    counted = CountedObjects(store.inner)
    shelf = Shelf(BlockCache(counted, limits=limits), Plans(counted, LIMITS))
    assert list(BucketReader(shelf, store.source()).records(0)) == expected
    assert counted.requests["ranges"] <= 8


# --- seals ------------------------------------------------------------------------------------------------------------


def test_a_tail_is_sealed_when_it_is_long_old_or_large(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng, 3, **{"segment.bytes": "100000"})
    assert store.seal(rules=SealRules()) is None
    assert store.seal(rules=SealRules(tail_commits=4)) is None
    done = store.seal(rules=SealRules(tail_commits=3))
    assert done is not None
    assert (done.from_offset, done.end_offset, done.commits) == (0, store.rows[-1].end_offsets[0], 3)
    store.append(some_records(rng, 5))
    assert store.seal(rules=SealRules()) is None
    store.clock.advance(60 * 60_000)
    assert store.seal(rules=SealRules()) is not None
    store.append(some_records(rng, 2000))
    assert store.seal(rules=SealRules()) is not None
    store.configs |= {"cleanup.policy": "compact", "max.compaction.lag.ms": "5000"}
    store.append(some_records(rng, 5))
    assert store.seal(rules=SealRules()) is None
    store.clock.advance(5000)
    assert store.seal(rules=SealRules()) is not None


def test_sealing_goes_by_the_settings_of_each_commit(tmp_path: Path, rng: random.Random) -> None:
    """A topic's settings may change between two commits; each is replayed with its own."""
    store = SmallStore(tmp_path, {"segment.bytes": "100000"})
    store.append(some_records(rng, 40), EncodeOptions(batch_size=300))
    store.configs = {"segment.bytes": "1000", "message.timestamp.type": "LogAppendTime"}
    store.clock.advance(77)
    store.append(some_records(rng, 40), EncodeOptions(batch_size=300))
    expected = store.records()
    done = store.seal()
    assert done is not None
    assert len(done.segments) > 3
    assert all(segment.log_bytes <= 1000 for segment in done.segments[1:])
    assert store.records() == expected
    assert {record.timestamp_ms for record in expected[40:]} == {NOW_MS + 77}


def test_who_seals_what_others_sealed_meanwhile_changes_nothing(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()

    racing = FirstPut(store)
    with pytest.raises(SegmentsChanged):
        store.over(racing).seal()
    assert racing.raced
    assert store.records() == expected
    rest = store.seal()
    assert rest is not None
    assert rest.commits == 4
    assert store.records() == expected


class FirstPut(CountedObjects):
    """Somebody else seals the moment before the first segment is put."""

    def __init__(self, store: SmallStore) -> None:
        super().__init__(store.inner)
        self._store = store
        self.raced = False

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        if not self.raced:
            self.raced = True
            self._store.seal(rules=SealRules(force=True, commits_max=2))
        return super().put(key, parts)


def test_a_damaged_piece_is_kept_aside_and_the_log_goes_on(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()
    key = next(head.key for head in store.inner.list("data") if head.key.endswith(".batches"))
    data = bytearray(store.inner.get(key)[0])
    data[70] ^= 1
    store.inner.put(key, [data])
    with pytest.raises(DamagedLog, match="damaged"):
        store.records()
    done = store.seal()
    assert done is not None
    (lost,) = done.lost
    assert lost.quarantine is not None
    assert store.inner.get(lost.quarantine)[0] in bytes(data)
    left = [record for record in expected if not lost.base_offset <= record.offset < lost.end_offset]
    assert store.records() == left
    assert sum(segment.records for segment in done.segments) == len(left)
    manifest = store.manifests().read(TOPIC_ID, 0).manifest
    assert manifest is not None
    assert manifest.sealed_offset == store.rows[-1].end_offsets[0]


def test_a_fault_on_the_way_is_not_damage(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()

    class Flipping(CountedObjects):
        def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
            found = [bytearray(each) for each in super().ranges(key, spans)]
            if self.requests["ranges"] == 1:
                found[0][80] ^= 4
            return list(found)

    done = store.over(Flipping(store.inner)).seal()
    assert done is not None
    assert not done.lost
    assert store.records() == expected


def test_answers_that_are_cut_short_for_ever_are_not_damage(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()

    class Cutting(CountedObjects):
        def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
            if key.endswith(".batches"):
                raise ObjectTruncated("short", file=key)
            return super().ranges(key, spans)

    with pytest.raises(ObjectStoreUnavailable, match="whole"):
        store.over(Cutting(store.inner)).seal()
    assert store.records() == expected
    assert store.manifests().read(TOPIC_ID, 0).manifest is None


def test_bytes_that_change_on_the_way_again_and_again_are_not_damage(tmp_path: Path, rng: random.Random) -> None:
    store = filled(tmp_path, rng)
    expected = store.records()

    class Flipping(CountedObjects):
        def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
            found = [bytearray(each) for each in super().ranges(key, spans)]
            if self.requests["ranges"] <= 2:
                found[0][80] ^= 4
            return list(found)

    done = store.over(Flipping(store.inner)).seal()
    assert done is not None
    assert not done.lost
    assert store.records() == expected


def settle(objects: FaultyObjects) -> None:
    """The faults are over: what was under way lands."""
    objects.faults.clear()
    objects.land()


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
def test_a_seal_that_fails_anywhere_loses_and_doubles_nothing(tmp_path: Path, rng: random.Random, fault: Fault) -> None:
    at, calls = -1, 1  # first without a fault
    while at < calls:
        store = SmallStore(tmp_path, {"segment.bytes": "1500"})
        for _ in range(3):
            store.append(some_records(rng, 12), EncodeOptions(batch_size=400))
        expected = store.records()
        faulty = FaultyObjects(store.inner, {at: fault})
        with contextlib.suppress(SegmentsChanged, ObjectStoreError, ObjectTruncated, ObjectMissing, DamagedLog):
            store.over(RetryingObjects(faulty, QUICK)).seal(rules=SealRules(force=True, commits_max=2))
        calls = max(calls, len(faulty.calls))
        assert store.records() == expected, (fault, at)
        settle(faulty)
        assert store.records() == expected, (fault, at)
        while store.seal() is not None:
            pass
        assert store.records() == expected, (fault, at)
        at += 1
    assert calls > 4
