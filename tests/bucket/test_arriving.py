"""Topics that come into a bucket: as they come into a directory, and at any moment absent or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bucket.faulty import READS, WRITES, Fault, FaultyObjects
from compaction.lab import Lab
from logstore.bucket.collecting import Ages
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.commit.store_face import Store
from logstore.commit.transactions import abort_transaction
from logstore.errors import DuramenError, TopicExists
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.restore.lookup import latest_in_partition
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import ImportedTopic, import_topics
from logstore.transfer.kafka_source import examine

NOW_MS = 1_700_000_000_000
LATER_MS = NOW_MS + 1_000
COMPACT = {"cleanup.policy": "compact", "segment.bytes": 1_000, "min.cleanable.dirty.ratio": 0}
WEEK_MS = 7 * 24 * 3_600_000


def broker_directory(root: Path) -> Path:
    """`t-0`: records 0 to 9, transactions of producer 7 from 10 and of producer 8 from 15 on, records behind them."""
    root.mkdir()
    lab = Lab(root, segment_bytes=1_000, message_timestamp_before_max_ms=1 << 62)
    with lab.open() as log:
        log.append([Record(b"k%d" % at, b"v" * 50, NOW_MS) for at in range(10)], batch_bytes=200)
        for producer_id in (7, 8):
            batch = [Record(b"k%d" % at, b"%d" % producer_id, NOW_MS + producer_id) for at in range(5)]
            options = BatchOptions(transactional=True, producer_id=producer_id, producer_epoch=3, base_sequence=0)
            log.append_batches(encode_batch(columns_of(batch), options), origin=AppendOrigin.CLIENT)
        log.append([Record(b"k%d" % at, b"w" * 50, NOW_MS) for at in range(10, 20)], batch_bytes=200)
    return root


def opened(objects: Objects, clock: ManualClock | None = None) -> BucketStore:
    return BucketStore("memory://test", create=True, objects=objects, clock=clock or ManualClock(LATER_MS))


def take(store: Store, directory: Path, configs: dict[str, Any] | None = None) -> list[ImportedTopic]:
    return import_topics(store, examine(OS_FILES, str(directory), limits=DEFAULT_LIMITS), configs or {})


def records(store: Store, name: str = "t", *, committed: bool = False) -> list[Record]:
    reader = store.reader(name, 0)
    return list(reader.records(reader.log_start_offset(), committed=committed))


def offsets(store: Store, *, committed: bool = True) -> list[int]:
    return [record.offset for record in records(store, committed=committed)]


def stable(store: Store) -> tuple[int, int]:
    ends = store.ends(store.topic("t"))
    return ends.last_stable_offsets[0], ends.high_watermarks[0]


@pytest.fixture
def kafka(tmp_path: Path) -> Path:
    return broker_directory(tmp_path / "kafka")


@pytest.fixture
def both(tmp_path: Path, kafka: Path) -> tuple[LogStore, BucketStore]:
    """A directory and a bucket, with the same import."""
    posix = LogStore(tmp_path / "posix", create=True, clock=ManualClock(LATER_MS))
    bucket = opened(MemoryObjects(ManualClock(LATER_MS)))
    for store in (posix, bucket):
        take(store, kafka, COMPACT)
    return posix, bucket


def sealed(store: BucketStore) -> None:
    done = maintain(store, MaintenanceRules(seal=SealRules(force=True), compact=False, sweep=False))
    assert not done.failed


def test_both_kinds_of_store_take_the_same(both: tuple[LogStore, BucketStore], tmp_path: Path) -> None:
    posix, bucket = both
    for committed in (False, True):
        assert records(bucket, committed=committed) == records(posix, committed=committed)
    assert stable(bucket) == stable(posix) == (10, 30)
    for store in both:
        store.append("t", [Record(b"more", b"v", NOW_MS)])
        assert stable(store) == (10, 31), "nobody sees past an open transaction"
    sealed(bucket)
    assert stable(bucket) == (10, 31)
    topic = bucket.topic("t")
    assert verify_partition(bucket, bucket.source(topic, 0)).findings == ()
    assert bucket.partition_state(topic, 0).transactions
    assert topic.configs == posix.topic("t").configs
    assert not [*bucket.objects.list("arriving")]


def test_transactions_are_listed_and_aborted_before_and_after_a_seal(both: tuple[LogStore, BucketStore]) -> None:
    for seals in (False, True):
        for producer_id in (7, 8):
            found = [[(t.producer_id, t.first_offset) for t in s.open_transactions(s.topic("t"), 0)] for s in both]
            assert found[0] == found[1]
            if producer_id not in [each for each, _ in found[0]]:
                continue
            done = [abort_transaction(store, "t", 0, producer_id) for store in both]
            assert done[0] == done[1]
            assert stable(both[1]) == stable(both[0])
            assert records(both[1], committed=True) == records(both[0], committed=True)
            break
        if seals:
            sealed(both[1])
        assert records(both[1], committed=True) == records(both[0], committed=True)
        assert stable(both[1]) == stable(both[0])
    assert not both[1].open_transactions(both[1].topic("t"), 0)
    assert offsets(both[1]) == [*range(10), *range(20, 30)]
    reopened = opened(both[1].objects)
    assert stable(reopened) == (32, 32)
    assert verify_partition(reopened, reopened.source(reopened.topic("t"), 0)).findings == ()


def test_compaction_stops_at_an_open_transaction_and_removes_what_was_aborted(
    both: tuple[LogStore, BucketStore],
) -> None:
    from compaction_job import compact

    posix, bucket = both
    forced = MaintenanceRules(seal=SealRules(force=True), force_compaction=True, sweep=False)
    maintain(bucket, forced)
    assert offsets(bucket, committed=False) == list(range(30))
    for store in both:
        for producer_id in (8, 7):
            abort_transaction(store, "t", 0, producer_id)
    compact(posix, force=True, roll_active=True)
    (done,) = maintain(bucket, forced).compacted
    assert done.report.removed["aborted"] == 10
    assert records(bucket, committed=False) == records(posix, committed=False)
    assert offsets(bucket) == [*range(10), *range(20, 30)]


def test_settings_that_nobody_told_delete_nothing(kafka: Path) -> None:
    clock = ManualClock(LATER_MS)
    store = opened(MemoryObjects(clock), clock)
    take(store, kafka)
    assert store.topic("t").settings_unknown
    clock.advance(400 * 24 * 3_600_000)
    done = maintain(store, MaintenanceRules(force_compaction=True))
    assert not done.retained
    assert not done.compacted
    assert offsets(store, committed=False) == list(range(30))
    store.alter_topic("t", configs={"retention.ms": 1000})
    assert maintain(store).retained
    assert offsets(store, committed=False) == []


def test_a_name_that_is_taken_is_refused_and_nothing_is_left(kafka: Path) -> None:
    objects = MemoryObjects(ManualClock(LATER_MS))
    store = opened(objects)
    take(store, kafka)
    with pytest.raises(TopicExists, match="Delete it first"):
        take(store, kafka)
    before = sorted(head.key for head in objects.list("logs"))
    other = opened(objects)
    original = other.check_free
    other.check_free = lambda topic: None if topic.name == "t" else original(topic)  # type: ignore[method-assign]
    with pytest.raises(TopicExists):  # somebody was faster
        take(other, kafka)
    assert sorted(head.key for head in objects.list("logs")) == before
    assert offsets(store, committed=False) == list(range(30))


def test_damage_of_the_source_costs_its_own_batch_and_is_kept(tmp_path: Path) -> None:
    """As into a directory: what is lost is told, what was damaged is kept."""
    with LogStore(tmp_path / "from", create=True, clock=ManualClock(NOW_MS)) as origin:
        origin.create_topic("t", partitions=2, configs={"segment.bytes": "2000"})
        for at in range(30):
            origin.append("t", [Record(b"k%d" % (at * 3 + n), b"v" * 30, NOW_MS) for n in range(3)])
        export_topics(origin, str(tmp_path / "kafka"), origin.topics(), unclean=True)
    logs = sorted((tmp_path / "kafka" / "t-0").glob("*.log"))
    data = bytearray(logs[0].read_bytes())
    data[100] ^= 1
    logs[0].write_bytes(data)
    store = opened(MemoryObjects(ManualClock(LATER_MS)))
    (imported,) = take(store, tmp_path / "kafka")
    assert imported.partitions[0].quarantined
    assert all(store.objects.head(key).size_bytes for key in imported.partitions[0].quarantined)
    (loss,) = store.partition_state(store.topic("t"), 0).losses
    end = store.high_watermark(store.topic("t"), 0)
    assert offsets(store, committed=False) == [o for o in range(end) if not loss.base_offset <= o < loss.end_offset]


@pytest.mark.parametrize("fault", [*{*WRITES, *READS}], ids=lambda fault: fault.name)
def test_an_arrival_that_fails_anywhere_is_absent_or_whole(kafka: Path, fault: Fault) -> None:
    calls = FaultyObjects(MemoryObjects(ManualClock(LATER_MS)))
    opened(calls)
    first = len(calls.calls)
    take(opened(calls), kafka)
    for number in range(first, len(calls.calls) + 1):
        clock = ManualClock(LATER_MS)
        inner = MemoryObjects(clock)
        opened(inner)
        faulty = FaultyObjects(inner, {number - first: fault})
        told: DuramenError | None = None
        try:
            take(opened(faulty, clock), kafka)
        except DuramenError as error:
            told = error
        faulty.land()
        store = opened(inner, clock)
        there = store.topic_names() == ["t"]
        assert there or told is not None
        if there:
            assert offsets(store, committed=False) == list(range(30))
            assert verify_partition(store, store.source(store.topic("t"), 0)).findings == ()
        clock.advance(WEEK_MS)
        maintain(store, MaintenanceRules(compact=False, ages=Ages()))
        if there:
            assert offsets(store, committed=False) == list(range(30))
        else:
            assert not [head.key for prefix in ("logs", "manifest", "arriving") for head in inner.list(prefix)]


def test_what_the_ledger_does_not_know_and_no_mark_names_is_left_alone(kafka: Path) -> None:
    clock = ManualClock(LATER_MS)
    objects = MemoryObjects(clock)
    store = opened(objects, clock)
    objects.put("logs/unknown-topic/0/00000000000000000000-x", [b"somebody's"])
    clock.advance(2 * WEEK_MS)
    maintain(store)
    assert objects.head("logs/unknown-topic/0/00000000000000000000-x")


def followed(store: Store, *, committed: bool) -> list[int]:
    found = store.follow("t", wait=False, committed=committed)  # type: ignore[attr-defined]
    return [record.offset for each in found for record in each.records]


def state(store: Store) -> dict[bytes, bytes]:
    batches = store.restore("t")  # type: ignore[attr-defined]
    return {row["key"]: row["value"] for batch in batches for row in batch.to_pylist()}


def test_every_way_to_read_stops_at_an_open_transaction_and_leaves_out_aborted_ones(
    both: tuple[LogStore, BucketStore],
) -> None:
    posix, bucket = both
    for step in range(4):
        assert followed(bucket, committed=True) == followed(posix, committed=True)
        assert followed(bucket, committed=False) == followed(posix, committed=False)
        assert state(bucket) == state(posix)
        for key in (b"k1", b"k12"):
            found = [latest_in_partition(store, store.topic("t"), 0, key) for store in both]
            assert found[0] == found[1]
        if step < 2:
            for store in both:
                abort_transaction(store, "t", 0, (8, 7)[step])
        elif step == 2:
            sealed(bucket)
    assert followed(bucket, committed=True) == [*range(10), *range(20, 30)]
    assert all(value not in (b"7", b"8") for value in state(bucket).values())
