"""A store's whole life on a real server, beside a store in a directory that takes the same batches.

`make soak SUITES=azure` runs it on Azurite.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket.servers import Server, chosen
from bucket.small_store import all_keys
from bucket.test_copying import content, exported
from bucket.test_store import batch_of
from logstore import errors
from logstore.bucket.collecting import Ages
from logstore.bucket.erasing import find_keys_in_bucket
from logstore.bucket.keys import new_nonce, staged_key
from logstore.bucket.maintaining import MaintenanceRules, delete_up_to, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.commit.apps import AppBatch
from logstore.commit.driver import append_batch
from logstore.commit.store_face import Store
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.copying import copy_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine
from logstore.upkeep.backing_up import back_up, back_up_into

COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "3000", "min.cleanable.dirty.ratio": "0"}
SEALED = MaintenanceRules(seal=SealRules(force=True), force_compaction=True)
#: seconds of a server's clock, and no day
SWEPT = MaintenanceRules(seal=SealRules(force=True), ages=Ages(grace_ms=1, orphan_ms=1_500))
APP = "query"


class Life:
    def __init__(self, server: Server, folder: Path, rng: random.Random) -> None:
        self.server, self.folder, self.rng = server, folder, rng
        self.prefix = uuid.uuid4().hex
        self.now_ms = int(time.time() * 1000) - 60_000
        self.posix = LogStore(folder / "posix", create=True)
        self.bucket = self.opened("life", create=True)

    def opened(self, name: str, *, create: bool = False, is_draft: bool = False) -> BucketStore:
        url = self.server.url(f"{self.prefix}/{name}")
        return BucketStore(url, create=create, is_draft=is_draft, storage_options=self.server.options)

    @property
    def both(self) -> tuple[Store, Store]:
        return self.bucket, self.posix

    def records(self, count: int) -> list[Record]:
        self.now_ms += 100
        keys = [b"k%d" % self.rng.randrange(30) for _ in range(count)]
        return [
            Record(key, None if self.rng.random() < 0.1 else self.rng.randbytes(60), self.now_ms + at)
            for at, key in enumerate(keys)
        ]

    def write(self, batch: int) -> None:
        for topic in ("log", "state"):
            records = self.records(self.rng.randrange(1, 60))
            for store in self.both:
                assert not store.append(topic, records, app=AppBatch(topic, batch, APP)).replayed
                assert store.append(topic, records, app=AppBatch(topic, batch, APP)).replayed


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(params=chosen("ministack", "versitygw"))
def life(request: pytest.FixtureRequest, tmp_path: Path, rng: random.Random) -> Iterator[Life]:
    life = Life(request.getfixturevalue(request.param), tmp_path, rng)
    yield life
    for store in life.both:
        store.close()


def state(store: Store, **when: Any) -> dict[bytes, tuple[bytes, int]]:
    return {
        row["key"]: (row["value"], row["offset"])
        for batch in store.restore("state", **when)
        for row in batch.to_pylist()
    }


def check_whole(store: BucketStore) -> None:
    for topic in store.topics():
        for number in range(topic.partitions):
            assert verify_partition(store, store.source(topic, number)).findings == ()


def test_a_store_from_its_creation_to_its_copies(life: Life) -> None:
    bucket, posix = life.both
    for store in life.both:
        store.create_topic("log", partitions=2, configs={"segment.bytes": "3000"})
        store.create_topic("state", partitions=2, configs=COMPACTED)
    middle_ms = 0
    for batch in range(9):
        life.write(batch)
        if batch == 2:
            for store in life.both:
                store.alter_topic("log", partitions=3, configs={"segment.bytes": "4000"})
        if batch == 4:
            middle_ms = life.now_ms + 99
        if batch == 5:
            assert state(bucket, as_of_timestamp_ms=middle_ms) == state(posix, as_of_timestamp_ms=middle_ms)
        if batch in (3, 6):
            done = maintain(life.bucket, SEALED)
            assert not done.failed
            assert done.sealed
            assert done.compacted
    assert content(bucket, "log") == content(posix, "log")
    assert state(bucket) == state(posix)
    for store in life.both:
        with pytest.raises(errors.MissingBatches):
            store.append("log", life.records(1), app=AppBatch("log", 20, APP))
        with pytest.raises(errors.TopicExists):
            store.create_topic("log")
    followed = [record for each in bucket.follow("log", wait=False) for record in each.records]
    assert len(followed) == sum(map(len, content(posix, "log")))
    check_whole(life.bucket)

    keep_and_erase(life)
    copies(life)


def keep_and_erase(life: Life) -> None:
    """Retention, deleted records, a deleted topic, and the sweep: each takes what it is for and nothing else."""
    bucket, before = life.bucket, content(life.bucket, "log")
    bucket.alter_topic("log", configs={"retention.bytes": "1000"})
    done = maintain(bucket, SEALED)
    assert not done.failed
    kept = content(bucket, "log")
    assert done.retained
    assert [was[len(was) - len(now) :] for was, now in zip(before, kept, strict=True)] == kept != before
    bucket.alter_topic("log", configs={"retention.bytes": "-1"})
    number = next(number for number, records in enumerate(kept) if len(records) > 2)
    delete_up_to(bucket, bucket.topic("log"), number, before_offset=kept[number][2].offset)
    kept[number] = kept[number][2:]
    assert content(bucket, "log") == kept

    bucket.create_topic("gone")
    encode = batch_of(bucket, {"gone": [life.records(5)], "log": [life.records(5)]}, life.now_ms)
    assert append_batch(bucket.committer, encode, app=AppBatch("both", 0, APP)).topics.keys() == {"gone", "log"}
    bucket.delete_topic("gone")
    left = staged_key(new_nonce(), 0, new_nonce())
    bucket.objects.put(left, [b"left by a killed task"])
    expected, keys = content(bucket, "log"), set(all_keys(bucket.objects))
    bucket.close()  # and with it the pins of what was read
    life.bucket = bucket = life.opened("life")
    time.sleep(2.5)
    swept = maintain(bucket, SWEPT)
    assert not swept.failed
    assert left in swept.swept
    time.sleep(0.1)
    again = maintain(bucket, SWEPT)
    assert not again.failed
    assert swept.garbage + again.garbage
    assert keys - set(all_keys(bucket.objects))
    assert content(bucket, "log") == expected
    assert state(bucket) == state(life.posix)
    check_whole(bucket)
    key = next(iter(state(bucket)))
    (found,) = find_keys_in_bucket(bucket, bucket.topic("state"), [key], now_ms=int(time.time() * 1000))
    assert found.places


def copies(life: Life) -> None:
    """Everything that leaves the store has what the store has, and goes on with what is written next."""
    bucket, folder = life.bucket, life.folder
    expected = {name: content(bucket, name) for name in ("log", "state")}
    logs = exported(bucket, folder / "exported")
    back_up_into(bucket, life.opened("backup", is_draft=True))
    back_up(bucket, str(folder / "backup"), lambda path: LogStore(path, create=True))
    copy = life.opened("copy", create=True)
    copy_topics(bucket, copy, bucket.topics())
    taken = life.opened("taken", create=True)
    import_topics(taken, examine(OS_FILES, str(folder / "exported"), limits=DEFAULT_LIMITS), {})
    directory = LogStore(folder / "copy", create=True)
    copy_topics(copy, directory, copy.topics())
    stores: list[Store] = [life.opened("backup"), LogStore(folder / "backup"), copy, taken, directory]
    for at, store in enumerate(stores):
        assert {name: content(store, name) for name in expected} == expected
        assert exported(store, folder / f"exported-{at}") == logs
        if store is not taken:
            assert store.append("log", life.records(1), app=AppBatch("log", 8, APP)).replayed
            assert not store.append("log", life.records(1), app=AppBatch("log", 9, APP)).replayed
        if isinstance(store, BucketStore):
            check_whole(store)
        store.close()
    assert {name: content(life.opened("life"), name) for name in expected} == expected
