"""Compaction and retention in a bucket: the survivors of a store in a directory, and no fault brings a key back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from bucket.small_store import NOW_MS, TOPIC, TOPIC_ID, SmallStore, some_records
from compaction_job import compact
from logstore.bucket.manifest import Manifest
from logstore.bucket.passes import PassRoom, compact_partition, plan_pass_of
from logstore.bucket.reader import look
from logstore.bucket.retaining import delete_records, retain_partition
from logstore.bucket.sealing import SealRules
from logstore.cleaner.work import PassReport
from logstore.clock import ManualClock
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.commit.staging import EncodeOptions
from logstore.compaction.budget import Budget
from logstore.compaction.local_workers import LocalWorkers
from logstore.compaction.maintenance import Context
from logstore.compaction.planning import PlanOptions
from logstore.compaction.receipts import Run, Skip
from logstore.config import LogConfig
from logstore.errors import (
    DamagedLog,
    ObjectMissing,
    ObjectStoreError,
    ObjectTruncated,
    OffsetOutOfRange,
    SegmentsChanged,
)
from logstore.objects.counted import CountedObjects
from logstore.objects.objects import Bytes, Version
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.retention import retain

QUICK = Patience(deadline_s=5, first_wait_s=0.001, sleep=lambda _: None, monotonic=lambda: 0.0)
SMALL_MAP = Budget(1 << 20)
WORKERS = LocalWorkers(1, lambda _name, _step, _bytes: None)
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "3000", "min.cleanable.dirty.ratio": "0.01"}


def attempt(store: SmallStore, number: int = 0, *, forced: bool = False) -> Run:
    """One pass, whatever becomes of it."""
    config = LogConfig.from_mapping(store.configs)
    room = PassRoom(store.environment(), store.source(number), store.topic(), config, store.clock.now_ms)
    context = Context(WORKERS, PlanOptions(store.clock.now_ms(), forced), SMALL_MAP)
    plan = replace(plan_pass_of(room, context, look(room.source)), rolls_active=False)  # tests seal when they want
    return compact_partition(room, context, plan)


def clean(store: SmallStore, number: int = 0, *, forced: bool = False) -> PassReport | None:
    """What a pass did; None: it was not due. Raises what made it fail."""
    run = attempt(store, number, forced=forced)
    if run.skip is Skip.TAKEN:
        raise SegmentsChanged(run.reason)
    if run.error is not None:
        raise run.error
    return run.report


def deleted(store: SmallStore, before_offset: int | None, *, dry_run: bool = False) -> tuple[int, int]:
    done = delete_records(store.environment(), store.source(), TOPIC_ID, before_offset=before_offset, dry_run=dry_run)
    return done.log_start_offset_before, done.log_start_offset


def manifest_of(store: SmallStore, number: int = 0) -> Manifest:
    manifest = store.manifests().read(TOPIC_ID, number).manifest
    assert manifest is not None
    return manifest


def latest(records: Iterable[Record]) -> dict[bytes | None, Record]:
    """The newest record of each key that has a value."""
    found = {record.key: record for record in records}
    return {key: record for key, record in found.items() if record.value is not None}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"delete.retention.ms": "0", "message.timestamp.type": "LogAppendTime"},
        {"duramen.compaction.recompress.type": "zstd", "duramen.compaction.recompress.after.ms": "0"},
        {"duramen.key.ttl.ms": "15000", "duramen.compaction.merge.bytes": "20000"},
    ],
    ids=["plain", "no-tombstones", "recompress", "ttl"],
)
def test_what_survives_is_what_survives_in_a_directory(
    tmp_path: Path, rng: random.Random, more: dict[str, str]
) -> None:
    configs = COMPACTED | more
    clock = ManualClock(NOW_MS)
    bucket = SmallStore(tmp_path, configs, clock=clock)
    with LogStore(str(tmp_path / "posix"), create=True, clock=clock) as posix:
        posix.create_topic(TOPIC, partitions=1, configs=configs)
        committer = Committer(posix)
        for turn in range(3):
            for _ in range(4):
                table = table_of(some_records(rng, 40, keys=30, at_ms=clock.now_ms()))
                bucket.append(table, EncodeOptions(batch_size=600))
                append_table(committer, TOPIC, table, options=EncodeOptions(batch_size=600))
                clock.advance(2000)
            before = latest(bucket.records())
            compact(store=posix, topics=[TOPIC], roll_active=True, force=True, now_ms=clock.now_ms())
            bucket.seal()
            done = clean(bucket, forced=True)
            assert done is not None, turn
            expected = list(posix.reader(TOPIC, 0).records(0))
            assert bucket.records() == expected
            state, manifest = posix.partition_state(posix.topic(TOPIC), 0), manifest_of(bucket)
            assert manifest.first_dirty_offset == state.first_dirty_offset
            assert manifest.next_horizon_ms == state.next_horizon_ms
            assert manifest.dropped_tombstones == state.dropped_tombstones
            assert sum(segment.records for segment in manifest.segments) == len(expected)
            if "duramen.key.ttl.ms" not in more:
                assert latest(expected) == before
            assert {each.key for each in manifest.garbage}.isdisjoint(s.key for s in manifest.segments)


def test_a_log_is_compacted_when_it_is_due(tmp_path: Path, rng: random.Random) -> None:
    store = SmallStore(tmp_path, COMPACTED | {"min.cleanable.dirty.ratio": "0.5"})
    assert clean(store) is None  # nothing is sealed
    store.append(some_records(rng, 100))
    store.seal()
    assert clean(store) is not None
    assert clean(store) is None
    store.append(some_records(rng, 10))
    store.seal()
    assert clean(store) is None
    store.append(some_records(rng, 400))
    store.seal()
    assert clean(store) is not None
    store.configs |= {"duramen.compaction.paused": "true"}
    assert clean(store, forced=True) is None
    store.configs = {"segment.bytes": "3000"}
    assert clean(store, forced=True) is None  # not a compacted topic


def test_young_records_are_left_alone(tmp_path: Path, rng: random.Random) -> None:
    store = SmallStore(tmp_path, COMPACTED | {"min.compaction.lag.ms": "9000"})
    store.append(some_records(rng, 100, keys=5))
    store.seal()
    store.clock.advance(8000)
    assert clean(store, forced=True) is None
    store.append(some_records(rng, 100, keys=5, at_ms=store.clock.now_ms()))
    store.seal()
    young = [record for record in store.records() if record.offset >= 100]
    store.clock.advance(3000)
    assert clean(store, forced=True) is not None
    assert [record for record in store.records() if record.offset >= 100] == young
    assert len(store.records()) < 100 + len(young) // 2


class Meanwhile(CountedObjects):
    """Something happens the moment before the first output is put."""

    def __init__(self, store: SmallStore, happens: object) -> None:
        super().__init__(store.inner)
        self._happens = happens

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()  # type: ignore[operator]
        return super().put(key, parts)


def test_a_seal_does_not_disturb_a_pass_and_another_pass_does(tmp_path: Path, rng: random.Random) -> None:
    store = SmallStore(tmp_path, COMPACTED)
    store.append(some_records(rng, 200, keys=20))
    store.seal()
    store.append(some_records(rng, 50, keys=20))
    kept = latest(store.records())
    assert clean(store.over(Meanwhile(store, store.seal))) is not None
    assert latest(store.records()) == kept
    assert not manifest_of(store).segments[-1].next_offset < store.rows[-1].end_offsets[0]
    store.append(some_records(rng, 50, keys=20))
    store.seal()
    kept = latest(store.records())
    before = manifest_of(store).generation
    with pytest.raises(SegmentsChanged):
        clean(store.over(Meanwhile(store, lambda: clean(store))))
    assert manifest_of(store).generation == before + 1
    assert latest(store.records()) == kept


def test_retention_meanwhile_does_not_void_a_pass(tmp_path: Path, rng: random.Random) -> None:
    store = SmallStore(tmp_path, COMPACTED)
    store.append(some_records(rng, 200, keys=20))
    store.seal()
    end = store.rows[-1].end_offsets[0]
    at = manifest_of(store).segments[2].base_offset
    kept = {key: each for key, each in latest(store.records()).items() if each.offset >= at}

    def retained() -> None:
        delete_records(store.environment(), store.source(), TOPIC_ID, before_offset=at)

    assert clean(store.over(Meanwhile(store, retained))) is not None
    manifest = manifest_of(store)
    assert manifest.log_start_offset == at
    assert manifest.first_dirty_offset == end
    assert latest(list(store.reader().records(at))) == kept


def test_retention_removes_what_a_directory_removes(tmp_path: Path, rng: random.Random) -> None:
    clock = ManualClock(NOW_MS)
    configs = {"segment.bytes": "2000", "retention.ms": "60000", "retention.bytes": "9000"}
    bucket = SmallStore(tmp_path, configs, clock=clock)
    with LogStore(str(tmp_path / "posix"), create=True, clock=clock) as posix:
        posix.create_topic(TOPIC, partitions=1, configs=configs)
        for _ in range(8):
            for _ in range(3):
                table = table_of(some_records(rng, 12, at_ms=clock.now_ms()))
                bucket.append(table, EncodeOptions(batch_size=300))
                append_table(Committer(posix), TOPIC, table, options=EncodeOptions(batch_size=300))
            clock.advance(rng.randrange(30_000))
            posix.flush() if hasattr(posix, "flush") else None
            config, now_ms = LogConfig.from_mapping(configs), clock.now_ms()
            dry = retain_partition(bucket.environment(), bucket.source(), TOPIC_ID, config, now_ms, dry_run=True)
            done = retain_partition(bucket.environment(), bucket.source(), TOPIC_ID, config, now_ms)
            assert dry == done
            retain(posix, posix.topic(TOPIC), 0, now_ms=now_ms)
            bucket.seal()
            # Segments end elsewhere, so as much stays as whole segments more or less make up.
            start = bucket.reader().log_start_offset()
            kept = sum(segment.log_bytes for segment in manifest_of(bucket).segments)
            assert kept <= 9000 + 2000 + 3 * 3000
            assert all(r.offset >= start for r in bucket.reader().records(start))
    clock.advance(120_000)
    retain_partition(bucket.environment(), bucket.source(), TOPIC_ID, LogConfig.from_mapping(configs), clock.now_ms())
    manifest = manifest_of(bucket)
    assert not manifest.segments
    assert manifest.log_start_offset == manifest.sealed_offset == bucket.rows[-1].end_offsets[0]


def test_records_are_deleted_up_to_an_offset(tmp_path: Path, rng: random.Random) -> None:
    store = SmallStore(tmp_path, {"segment.bytes": "2000"})
    store.append(some_records(rng, 50), EncodeOptions(batch_size=300))
    records = store.records()
    assert deleted(store, 20, dry_run=True) == (0, 20)
    assert store.reader().log_start_offset() == 0
    assert deleted(store, 20) == (0, 20)
    assert list(store.reader().records(20)) == records[20:]  # nothing is sealed yet
    with pytest.raises(OffsetOutOfRange):
        list(store.reader().records(19))
    store.seal()
    assert list(store.reader().records(20)) == records[20:]
    assert deleted(store, 10) == (20, 20)
    with pytest.raises(OffsetOutOfRange):
        delete_records(store.environment(), store.source(), TOPIC_ID, before_offset=51)
    assert deleted(store, None) == (20, 50)
    assert list(store.reader().records(50)) == []
    store.append(some_records(rng, 3))
    assert len(list(store.reader().records(50))) == 3


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
def test_a_pass_that_fails_anywhere_brings_no_key_back(tmp_path: Path, rng: random.Random, fault: Fault) -> None:
    base = SmallStore(tmp_path, COMPACTED | {"segment.bytes": "1500", "delete.retention.ms": "0"})
    for _ in range(3):
        base.append(some_records(rng, 20, keys=9), EncodeOptions(batch_size=400))
        base.seal()
    clean(base, forced=True)  # notes when the tombstones may go
    base.clock.advance(10)
    base.append(some_records(rng, 20, keys=9), EncodeOptions(batch_size=400))
    base.seal()
    at, calls = -1, 1  # first without a fault
    while at < calls:
        store = base.copied()
        kept, before = latest(store.records()), manifest_of(store)
        faulty = FaultyObjects(store.inner, {at: fault})
        with contextlib.suppress(SegmentsChanged, ObjectStoreError, ObjectTruncated, ObjectMissing, DamagedLog):
            clean(store.over(RetryingObjects(faulty, QUICK)), forced=True)
        calls = max(calls, len(faulty.calls))
        for landed in (False, True):
            if landed:
                faulty.faults.clear()
                faulty.land()
            assert latest(store.records()) == kept, (fault, at, landed)
            check_rises(before, manifest_of(store))
        assert clean(store, forced=True) is not None
        assert latest(store.records()) == kept, (fault, at)
        assert manifest_of(store).dropped_tombstones >= before.dropped_tombstones
        at += 1
    assert calls > 4


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
def test_retention_that_fails_anywhere_loses_nothing_above_the_log_start(
    tmp_path: Path, rng: random.Random, fault: Fault
) -> None:
    base = SmallStore(tmp_path, {"segment.bytes": "1500"})
    for _ in range(2):
        base.append(some_records(rng, 20), EncodeOptions(batch_size=400))
        base.seal(rules=SealRules(force=True))
    records = base.records()
    at, calls = -1, 1  # first without a fault
    while at < calls:
        store = base.copied()
        before = manifest_of(store)
        faulty = FaultyObjects(store.inner, {at: fault})
        seen = store.over(RetryingObjects(faulty, QUICK))
        with contextlib.suppress(SegmentsChanged, ObjectStoreError):
            delete_records(seen.environment(), seen.source(), TOPIC_ID, before_offset=25)
        calls = max(calls, len(faulty.calls))
        faulty.faults.clear()
        faulty.land()
        start = store.reader().log_start_offset()
        assert start in (0, 25)
        check_rises(before, manifest_of(store))
        assert list(store.reader().records(start)) == records[start:]
        assert deleted(store, 25)[1] == 25
        at += 1


def check_rises(before: Manifest, after: Manifest) -> None:
    assert after.generation >= before.generation
    assert after.log_start_offset >= before.log_start_offset
    assert after.sealed_offset >= before.sealed_offset
    assert after.first_dirty_offset >= before.first_dirty_offset
    assert after.dropped_tombstones >= before.dropped_tombstones
