"""Topics copied between stores of both kinds: the same offsets, and exactly-once goes on."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from bucket.faulty import WRITES, Fault, FaultyObjects
from bucket.test_arriving import COMPACT, LATER_MS, broker_directory, opened, records, stable, take
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.store_face import Store
from logstore.commit.transactions import abort_transaction
from logstore.errors import BackupRefused, DuramenError, MissingBatches, TopicExists
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.copying import copy_topics
from logstore.transfer.kafka_export import export_topics

SEED = int(os.environ.get("DURAMEN_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
KINDS = ("directory", "bucket")


def made(kind: str, path: Path) -> Store:
    clock = ManualClock(LATER_MS)
    if kind == "directory":
        return LogStore(path, create=True, clock=clock)
    return BucketStore(f"memory://{path}", create=True, objects=MemoryObjects(clock), clock=clock)


def filled(store: Store) -> None:
    """Two topics written by an app, and one from a broker with open and aborted transactions."""
    rng = random.Random(SEED)
    print(f"DURAMEN_SEED={SEED}")
    for name in ("orders", "accounts"):
        store.create_topic(name, partitions=2, configs={"segment.bytes": "4000"})
    for batch in range(6):
        for app, name in (("one", "orders"), ("two", "accounts")):
            rows = [Record(b"k%d" % rng.randrange(20), rng.randbytes(60), LATER_MS + batch) for _ in range(40)]
            store.append(name, rows, app=AppBatch(app, batch, "query"))
        if batch == 3 and isinstance(store, BucketStore):
            maintain(store, MaintenanceRules(seal=SealRules(force=True)))


def content(store: Store, name: str) -> list[list[Record]]:
    topic = store.topic(name)
    found = []
    for number in range(topic.partitions):
        reader = store.reader(topic, number)
        found.append(list(reader.records(reader.log_start_offset())))
        reader.close()
    return found


def check_whole(store: Store) -> None:
    if isinstance(store, BucketStore):
        for topic in store.topics():
            for number in range(topic.partitions):
                assert verify_partition(store, store.source(topic, number)).findings == ()


@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_a_copy_has_the_same_offsets_and_exactly_once_goes_on(
    tmp_path: Path, source_kind: str, target_kind: str
) -> None:
    source, target = made(source_kind, tmp_path / "source"), made(target_kind, tmp_path / "target")
    filled(source)
    take(source, broker_directory(tmp_path / "kafka"), COMPACT)
    abort_transaction(source, "t", 0, 8)
    source.append("t", [Record(b"more", b"v", LATER_MS)])
    done = copy_topics(source, target, source.topics())
    assert {each.app_id for each in done.apps} == {"one", "two"}
    for name in ("orders", "accounts", "t"):
        assert content(target, name) == content(source, name)
        assert target.topic(name).configs == source.topic(name).configs
        assert target.topic(name).export_id == source.topic(name).export_id
        assert target.topic(name).id != source.topic(name).id
    assert records(target, committed=True) == records(source, committed=True)
    assert stable(target) == stable(source) == (10, 32)
    check_whole(target)
    again = target.append("orders", [Record(b"k", b"v", LATER_MS)], app=AppBatch("one", 5, "query"))
    assert again.replayed
    with pytest.raises(MissingBatches):
        target.append("orders", [Record(b"k", b"v", LATER_MS)], app=AppBatch("one", 7, "query"))
    for store in (source, target):
        store.append("orders", [Record(b"k", b"next", LATER_MS)], app=AppBatch("one", 6, "query"))
        abort_transaction(store, "t", 0, 7)
    assert content(target, "orders") == content(source, "orders")
    assert records(target, committed=True) == records(source, committed=True)
    with pytest.raises(TopicExists):
        copy_topics(source, target, [source.topic("orders")])
    with pytest.raises(BackupRefused, match="into itself"):
        copy_topics(source, source, [source.topic("orders")])


def exported(store: Store, folder: Path) -> dict[str, bytes]:
    """The concatenated `.log` bytes of each partition."""
    export_topics(store, str(folder), store.topics())
    return {
        path.name: b"".join(log.read_bytes() for log in sorted(path.glob("*.log")))
        for path in folder.iterdir()
        if path.is_dir()
    }


def test_through_a_bucket_and_back_the_bytes_are_the_same(tmp_path: Path) -> None:
    stores = [made("directory", tmp_path / "0")]
    filled(stores[0])
    for number, kind in enumerate(("bucket", "bucket", "directory"), 1):
        stores.append(made(kind, tmp_path / str(number)))
        copy_topics(stores[-2], stores[-1], stores[-2].topics())
    before, *after = [exported(store, tmp_path / f"export-{at}") for at, store in enumerate(stores)]
    assert before
    assert after == [before] * 3


@pytest.mark.parametrize("fault", WRITES, ids=lambda fault: fault.name)
def test_a_copy_that_fails_anywhere_can_be_made_again(tmp_path: Path, fault: Fault) -> None:
    source = made("bucket", tmp_path / "source")
    source.create_topic("orders")
    for batch in range(2):
        source.append("orders", [Record(b"k", b"%d" % batch, LATER_MS)], app=AppBatch("one", batch, "query"))
    counting = FaultyObjects(MemoryObjects(ManualClock(LATER_MS)))
    opened(counting)
    first = len(counting.calls)
    copy_topics(source, opened(counting), source.topics())
    for number in range(first, len(counting.calls)):
        inner = MemoryObjects(ManualClock(LATER_MS))
        opened(inner)
        faulty = FaultyObjects(inner, {number - first: fault})
        try:
            copy_topics(source, opened(faulty), source.topics())
        except DuramenError:
            faulty.land()
            target = opened(inner)
            if not target.topic_names():
                copy_topics(source, target, source.topics())
        faulty.land()
        target = opened(inner)
        assert content(target, "orders") == content(source, "orders")
        check_whole(target)
        assert target.append("orders", [Record(b"k", b"1", LATER_MS)], app=AppBatch("one", 1, "query")).replayed
