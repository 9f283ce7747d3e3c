"""The export of a store in a bucket: the bytes that a store in a directory exports, and a log that opens."""

from __future__ import annotations

import random
from pathlib import Path

from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.objects.memory import MemoryObjects
from logstore.partition.environment import LastKnown
from logstore.partition.log import PartitionLog
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topic import TopicPartition
from logstore.transfer.kafka_export import export_topics

NOW_MS = 1_700_000_000_000
CONFIGS = {"segment.bytes": "6000"}


def batch(rng: random.Random, now_ms: int) -> list[Record]:
    return [
        Record(b"k%d" % rng.randrange(40), rng.randbytes(rng.randrange(80)), now_ms + n)
        for n in range(rng.randrange(1, 50))
    ]


def exported(store: BucketStore, target: Path) -> None:
    done = export_topics(store, str(target), store.topics())
    assert done.clean


def bytes_of(folder: Path, partition: int) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / f"orders-{partition}").glob("*.log")))


def test_both_kinds_of_store_export_the_same_bytes(tmp_path: Path, rng: random.Random) -> None:
    clock = ManualClock(NOW_MS)
    objects = MemoryObjects(clock)
    bucket = BucketStore("memory://test", create=True, objects=objects, clock=clock)
    with LogStore(str(tmp_path / "posix"), create=True, clock=clock) as posix:
        for store in (bucket, posix):
            store.create_topic("orders", partitions=3, configs=CONFIGS)
        for number in range(8):
            records = batch(rng, clock.now_ms())
            bucket.append("orders", records)
            posix.append("orders", records)
            clock.advance(1000)
            if number == 5:
                maintain(bucket, MaintenanceRules(seal=SealRules(force=True)))
        export_topics(posix, str(tmp_path / "from-posix"), posix.topics())
        exported(bucket, tmp_path / "from-bucket")
        for number in range(3):
            assert bytes_of(tmp_path / "from-bucket", number) == bytes_of(tmp_path / "from-posix", number)
            expected = list(posix.reader("orders", number).records(0))
            log = PartitionLog.open(
                str(tmp_path / "from-bucket" / f"orders-{number}"),
                partition=TopicPartition("orders", number),
                known=LastKnown(clean=True),
            )
            assert log.log_end_offset == len(expected)
            log.close()
        names = {path.name for path in (tmp_path / "from-posix").iterdir()}
        assert {path.name for path in (tmp_path / "from-bucket").iterdir()} == names
        bucket.close()  # reads of an hour share a pin
        assert not list(objects.list("pins"))


def test_an_empty_partition_and_one_whose_records_are_gone_are_exported(tmp_path: Path, rng: random.Random) -> None:
    clock = ManualClock(NOW_MS)
    bucket = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    bucket.create_topic("orders", partitions=2, configs=CONFIGS | {"retention.ms": "1000"})
    records = [Record(b"k", b"v", NOW_MS)] * 10
    for _ in range(3):
        bucket.append("orders", records)
    clock.advance(60_000)
    maintain(bucket, MaintenanceRules(seal=SealRules(force=True)))
    exported(bucket, tmp_path / "out")
    checkpoint = (tmp_path / "out" / "replication-offset-checkpoint").read_text()
    ends = bucket.ends(bucket.topic("orders")).high_watermarks
    assert sorted(ends) == [0, 30]
    assert all(f"orders {number} {end}" in checkpoint for number, end in enumerate(ends))
