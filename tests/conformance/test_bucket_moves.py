"""A store in a bucket and Apache Kafka: what came from a broker goes back to one, before and after compaction.

Every start of a broker costs seconds, so one story is told over two lives of one broker.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from conformance.broker import Broker
from conformance.kafka import Kafka
from conformance.test_broker import SMALL, Place, Writer, append_with_the_broker, assert_served, committed
from conformance.workload import NOW_MS, as_kafka
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine, stopped_source

TOPICS = ["codecs", "transactions", "old"]
LATER_MS = NOW_MS + 60_000


def bucket() -> BucketStore:
    clock = ManualClock(LATER_MS)
    return BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)


def take(store: BucketStore, directory: Path) -> None:
    with stopped_source(OS_FILES, str(directory)):
        source = examine(OS_FILES, str(directory), only=TOPICS, limits=DEFAULT_LIMITS)
        imported = import_topics(store, source, dict(SMALL))
    assert [part for each in imported for part in each.partitions if part.found_damage] == []


def assert_holds(store: BucketStore, writer: Writer) -> None:
    for place, expected in writer.expected.items():
        topic = store.topic(place[0])
        assert store.high_watermark(topic, place[1]) == writer.ends[place], place
        reader = store.reader(topic, place[1])
        start = reader.log_start_offset()
        assert [as_kafka(r) for r in reader.records(start)] == expected, place
        assert [as_kafka(r) for r in reader.records(start, committed=True)] == committed(expected), place
        assert verify_partition(store, store.source(topic, place[1])).findings == (), place


def append_with_the_sink(store: BucketStore, writer: Writer) -> None:
    """Plain records behind whatever is there; some are sealed, some are left to the tail."""
    for at in range(4):
        for (name, number), end in list(writer.ends.items()):
            records = [Record(b"more-%d" % n, b"%d" % at, LATER_MS + n) for n in range(5)]
            columns = {
                "key": [record.key for record in records],
                "value": [record.value for record in records],
                "timestamp": pa.array([record.timestamp_ms for record in records], pa.timestamp("ms", "UTC")),
                "partition": pa.array([number] * len(records), pa.int32()),
            }
            store.append(name, pa.table(columns))
            writer.note((name, number), records, end)
            writer.ends[name, number] += len(records)
        if at == 1:
            maintain(store, MaintenanceRules(seal=SealRules(force=True), compact=False))


@pytest.mark.timeout(300)
def test_a_broker_serves_what_a_bucket_exports_and_a_bucket_takes_it_back(
    kafka: Kafka, tmp_path: Path, seed: int
) -> None:
    with LogStore(tmp_path / "store", create=True) as origin:
        writer = Writer(kafka, origin, random.Random(seed))
        writer.codecs("codecs", partitions=2)
        writer.transactions("transactions")
        writer.replicated("old")
        export_topics(origin, str(tmp_path / "from"), origin.topics())
    store = bucket()
    take(store, tmp_path / "from")
    assert_holds(store, writer)
    append_with_the_sink(store, writer)
    assert_holds(store, writer)
    with Broker(kafka, tmp_path / "broker") as broker:
        forever = {"retention.ms": -1}
        ids = {t.name: broker.create_topic(t.name, t.partitions, forever) for t in store.topics()}
        for clean in (True, False):
            broker.stop()
            topics = [store.topic(name) for name in TOPICS]
            for directory in broker.logs_dir.iterdir():
                if directory.name.rpartition("-")[0] in TOPICS:
                    for path in directory.iterdir():
                        path.unlink()
                    directory.rmdir()
            done = export_topics(store, str(broker.logs_dir), topics, topic_ids=ids, unclean=not clean)
            assert done.clean is clean
            for place in writer.expected:
                assert kafka.dump_findings(broker.partition_dir(*place), compacted=place[0] == "old") == []
            broker.start()
            assert_served(kafka, broker, writer, TOPICS)
        append_with_the_broker(kafka, broker, writer, TOPICS)
        assert_served(kafka, broker, writer, TOPICS)
        broker.stop()
        back = bucket()
        take(back, broker.logs_dir)
        assert_holds(back, writer)


@pytest.mark.parametrize("name", ["codecs", "transactions"])
def test_compaction_of_a_bucket_leaves_what_kafkas_cleaner_leaves(
    kafka: Kafka, scratch: Path, seed: int, name: str
) -> None:
    config = {"cleanup.policy": "compact", "segment.bytes": 4000, "min.cleanable.dirty.ratio": 0}
    with LogStore(scratch / "store", create=True) as origin:
        writer = Writer(kafka, origin, random.Random(seed))
        if name == "codecs":
            writer.codecs(name, partitions=1)
        else:
            writer.transactions(name)
        export_topics(origin, str(scratch / "from"), origin.topics())
    store = bucket()
    with stopped_source(OS_FILES, str(scratch / "from")):
        import_topics(store, examine(OS_FILES, str(scratch / "from"), limits=DEFAULT_LIMITS), config)
    place: Place = (name, 0)
    export_topics(store, str(scratch / "before"), store.topics())
    passed = kafka.clean(scratch / "before" / f"{name}-0", config, now_ms=LATER_MS, roll=True)
    assert passed.cleaned
    done = maintain(store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    assert not done.failed
    assert len(done.compacted) == 1
    export_topics(store, str(scratch / "after"), store.topics())
    ours, theirs = scratch / "after" / f"{name}-0", scratch / "before" / f"{name}-0"
    left = list(kafka.records(ours))
    assert left == list(kafka.records(theirs))
    assert 0 < len(left) < len(writer.expected[place])
    kept = [[(b.base_offset, b.last_offset, b.count, b.control) for b in kafka.read(each)] for each in (ours, theirs)]
    assert kept[0] == kept[1]
    assert kafka.dump_findings(ours, compacted=True) == []
    assert verify_partition(store, store.source(store.topic(name), 0)).findings == ()
