"""A store in a bucket by its public face: topics, appends, exactly once, reads; and how many requests they take."""

from __future__ import annotations

import pickle
import uuid
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from bucket.servers import Server
from logstore import errors
from logstore.bucket import committing
from logstore.bucket.committing import BucketCommitter
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.driver import Batch, Encoded, append_batch
from logstore.commit.produce import table_of
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.records.record import Record
from logstore.restore import follow as following
from logstore.restore.lookup import latest_of_key
from logstore.store import LogStore, open_store

NOW_MS = 1_700_000_000_000


def opened(objects: Objects, *, create: bool = False) -> BucketStore:
    return BucketStore("memory://test", create=create, objects=objects, clock=ManualClock(NOW_MS))


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects(ManualClock(NOW_MS))


@pytest.fixture
def store(objects: MemoryObjects) -> BucketStore:
    store = opened(objects, create=True)
    store.create_topic("orders", partitions=2, configs={"cleanup.policy": "compact"})
    return store


def records(first: int, count: int) -> list[Record]:
    return [Record(b"k%d" % n, b"v%d" % n, NOW_MS + n) for n in range(first, first + count)]


def values(store: BucketStore, topic: str = "orders") -> list[bytes | None]:
    found = store.topic(topic)
    return [r.value for number in range(found.partitions) for r in store.reader(topic, number).records(0)]


def batch_of(store: BucketStore, tasks: dict[str, list[list[Record]]], now_ms: int = NOW_MS) -> Any:
    """An encode step: of each topic the records of each task."""
    committer = store.committer

    def encode(staging: Batch) -> Encoded:
        targets = {name: committer.target(name) for name in tasks}
        files = []
        for task in range(max(len(parts) for parts in tasks.values())):
            writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=now_ms)
            for name, parts in tasks.items():
                if task < len(parts):
                    writer.write(targets[name], table_of(parts[task]).to_batches()[0])
            files.append(writer.finish())
        return Encoded(files, targets.values())

    return encode


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_is_created_altered_widened_and_deleted(store: BucketStore, objects: MemoryObjects) -> None:
    other = opened(objects)
    assert other.topic_names() == ["orders"]
    with pytest.raises(errors.TopicExists):
        other.create_topic("orders")
    first = other.topic("orders")
    altered = store.alter_topic("orders", configs={"segment.bytes": 5000})
    assert (altered.config_version, altered.configs["segment.bytes"]) == (2, "5000")
    store.append("orders", records(0, 10))
    wide = other.alter_topic("orders", partitions=5)
    assert (wide.partitions, wide.keyed) == (5, False)
    assert store.ends(store.topics()[0]).high_watermarks[2:] == (0, 0, 0)
    assert len(values(store)) == 10
    with pytest.raises(errors.InvalidConfig):
        store.alter_topic("orders", partitions=2)
    store.delete_topic("orders")
    with pytest.raises(errors.UnknownTopic):
        other.check_exists(first)
    with pytest.raises(errors.UnknownTopic):
        other.delete_topic("orders")
    again = other.create_topic("orders")
    assert again.id != first.id
    assert values(other) == []


def test_a_dry_run_changes_nothing(store: BucketStore) -> None:
    before = store.ledger.refresh()
    store.create_topic("more", dry_run=True)
    store.alter_topic("orders", partitions=7, dry_run=True)
    store.delete_topic("orders", dry_run=True)
    assert store.ledger.refresh() == before


def test_a_copy_of_the_definition_lies_below_topics(store: BucketStore, objects: MemoryObjects) -> None:
    store.alter_topic("orders", configs={"segment.bytes": 4321})
    assert b'"segment.bytes":"4321"' in objects.get("topics/orders")[0]
    store.delete_topic("orders")
    assert b'"ended":true' in objects.get("topics/orders")[0]


# --- appending -------------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_by_others(store: BucketStore, objects: MemoryObjects) -> None:
    for turn in range(5):
        done = store.append("orders", records(turn * 10, 10))
        assert done.records == 10
    assert sorted(v for v in values(opened(objects)) if v) == sorted(b"v%d" % n for n in range(50))


def test_a_batch_that_comes_again_is_not_written_again(store: BucketStore, objects: MemoryObjects) -> None:
    app = AppBatch("app", 0, "query")
    assert not store.append("orders", records(0, 10), app=app).replayed
    assert opened(objects).append("orders", records(0, 10), app=app).replayed
    assert len(values(store)) == 10


def test_the_rules_of_an_app_are_those_of_a_directory(store: BucketStore) -> None:
    store.append("orders", records(0, 1), app=AppBatch("app", 0, "query"))
    with pytest.raises(errors.MissingBatches):
        store.append("orders", records(0, 1), app=AppBatch("app", 2, "query"))
    with pytest.raises(errors.ReplayMismatch):
        store.append("orders", records(0, 1), app=AppBatch("app", 1, "other"))
    store.append("orders", records(1, 1), app=AppBatch("app", 5, "other", adopt="query:0"))
    with pytest.raises(errors.ReplayMismatch):
        store.append("orders", records(1, 1), app=AppBatch("app", 1, "query", adopt="query:0"))
    assert len(values(store)) == 2


def test_an_empty_batch_counts_and_is_a_replay_when_it_comes_again(store: BucketStore) -> None:
    nothing = table_of([])
    assert not store.append("orders", nothing, app=AppBatch("app", 0, "query")).replayed
    assert store.append("orders", nothing, app=AppBatch("app", 0, "query")).replayed
    store.append("orders", records(0, 1), app=AppBatch("app", 1, "query"))
    before = store.ledger.refresh()
    store.append("orders", nothing)
    assert store.ledger.refresh() == before


def test_several_topics_are_committed_at_once(store: BucketStore, objects: MemoryObjects) -> None:
    store.create_topic("other")
    encode = batch_of(store, {"orders": [records(0, 5), records(5, 5)], "other": [records(0, 3)]})
    done = append_batch(store.committer, encode, app=AppBatch("app", 0, "query"))
    assert {name: plan.records for name, plan in done.topics.items()} == {"orders": 10, "other": 3}
    reader = opened(objects)
    assert (len(values(reader)), len(values(reader, "other"))) == (10, 3)
    assert {row.plan for row in reader.ledger.view.rows if row.plan is not None}.__len__() == 1


def test_a_topic_that_is_altered_meanwhile_is_encoded_again(store: BucketStore, objects: MemoryObjects) -> None:
    other, turns = opened(objects), []
    inner = batch_of(store, {"orders": [records(0, 5)]})

    def encode(staging: Batch) -> Encoded:
        encoded: Encoded = inner(staging)
        turns.append(1)
        if len(turns) == 1:
            other.alter_topic("orders", partitions=4)
        return encoded

    done = append_batch(store.committer, encode, app=AppBatch("app", 0, "query"))
    assert (len(turns), done.topics["orders"].partitions) == (2, 4)
    assert len(values(other)) == 5


def test_a_topic_that_is_deleted_meanwhile_takes_nothing(store: BucketStore, objects: MemoryObjects) -> None:
    other = opened(objects)
    inner = batch_of(store, {"orders": [records(0, 5)]})

    def encode(staging: Batch) -> Encoded:
        encoded: Encoded = inner(staging)
        other.delete_topic("orders")
        return encoded

    with pytest.raises(errors.UnknownTopic):
        append_batch(store.committer, encode)
    assert all(row.plan is None for row in other.ledger.refresh().rows)


def test_rows_placed_by_hand_make_a_topic_unkeyed_in_the_same_commit(store: BucketStore) -> None:
    table = pa.table({"key": [b"a"], "value": [b"1"], "partition": pa.array([1], pa.int32())})
    assert store.topic("orders").keyed
    store.append("orders", table)
    assert not store.topic("orders").keyed


def test_writers_that_meet_lose_nothing(objects: MemoryObjects, store: BucketStore) -> None:
    import threading

    def run(number: int) -> None:
        mine = opened(objects)
        for turn in range(10):
            mine.append("orders", records(number * 1000 + turn, 1), app=AppBatch(f"app{number}", turn, "query"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(b"v%d" % (number * 1000 + turn) for number in range(4) for turn in range(10))
    assert sorted(v for v in values(store) if v) == expected


def test_objects_too_old_to_be_named_are_not_committed(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Elapsed):
        def ms(self) -> int:
            return 4 * 24 * 3_600_000

    monkeypatch.setattr(committing, "Elapsed", Old)
    with pytest.raises(errors.StaleObjects):
        store.append("orders", records(0, 1))
    assert values(store) == []


# --- reading ---------------------------------------------------------------------------------------------------------


def test_get_restore_follow_and_as_of(store: BucketStore) -> None:
    store.append("orders", [Record(b"a", b"1", NOW_MS), Record(b"b", b"1", NOW_MS)])
    store.append("orders", [Record(b"a", b"2", NOW_MS + 10), Record(b"b", None, NOW_MS + 10)])
    found = latest_of_key(store, store.topic("orders"), b"a")
    assert found is not None
    assert found.record.value == b"2"
    state = {row["key"]: row["value"] for batch in store.restore("orders") for row in batch.to_pylist()}
    assert state == {b"a": b"2"}
    then = store.restore("orders", as_of_timestamp_ms=NOW_MS + 5)
    assert {row["key"] for batch in then for row in batch.to_pylist()} == {b"a", b"b"}
    followed = list(store.follow("orders", wait=False))
    assert sum(len(each.records) for each in followed) == 4
    store.append("orders", [Record(b"c", b"3", NOW_MS)])
    more = list(store.follow("orders", followed[-1].position, wait=False))
    assert [record.value for each in more for record in each.records] == [b"3"]


def test_several_topics_are_followed_at_one_moment(store: BucketStore) -> None:
    store.create_topic("other")
    append_batch(store.committer, batch_of(store, {"orders": [records(0, 5)], "other": [records(0, 5)]}))
    assert sum(len(each.records) for each in store.follow(["orders", "other"], wait=False)) == 10


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_batch_of_some_tasks_takes_eight_requests_more_than_tasks(objects: MemoryObjects, store: BucketStore) -> None:
    counted = CountedObjects(objects)
    mine = opened(counted)
    for batch in range(12):
        counted.requests.clear()
        encode = batch_of(mine, {"orders": [records(task, 4) for task in range(5)]})
        append_batch(mine.committer, encode, app=AppBatch("app", batch, "query"))
        assert counted.requests.total() <= 5 + 8, counted.requests
        assert not counted.requests["list"]


def test_opening_takes_six_requests_and_an_idle_poll_one(objects: MemoryObjects, store: BucketStore) -> None:
    for batch in range(20):
        store.append("orders", records(batch, 1))
        counted = CountedObjects(objects)
        reader = opened(counted)
        assert counted.requests.total() <= 6, counted.requests
        topic = reader.topic("orders")
        counted.requests.clear()
        reader.ends(topic)
        assert counted.requests == {"get": 1}


@pytest.mark.parametrize("topics", ["orders", ["orders", "other"]], ids=str)
def test_an_idle_follow_takes_one_request_a_look(
    objects: MemoryObjects, store: BucketStore, monkeypatch: pytest.MonkeyPatch, topics: Any
) -> None:
    """Partitions without any record, too."""
    store.create_topic("other", partitions=3)
    store.append("orders", [Record(b"k", b"v", NOW_MS)])
    counted = CountedObjects(objects)
    seen: list[Counter[str]] = []

    def sleep(_: float) -> None:
        seen.append(counted.requests.copy())
        counted.requests.clear()
        if len(seen) == 5:
            store.append("orders", [Record(b"k", b"last", NOW_MS)])

    monkeypatch.setattr(following.time, "sleep", sleep)
    for followed in opened(counted).follow(topics):
        if followed.records[0].value == b"last":
            break
    assert seen[1:5] == [{"get": 1}] * 4


# --- opening ---------------------------------------------------------------------------------------------------------


def test_a_url_opens_a_store_in_a_bucket() -> None:
    url = f"memory://{uuid.uuid4().hex}/prefix"
    with pytest.raises(errors.NotAStore):
        LogStore(url)
    with LogStore(url, create=True) as store:
        store.create_topic("orders")
        store.append("orders", [Record(b"a", b"1")])
    with open_store(url) as again:
        assert isinstance(again, BucketStore)
        assert again.topic_names() == ["orders"]
        assert len(values(again)) == 1


def test_a_path_opens_a_directory_and_takes_no_storage_options(tmp_path: Any) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        assert isinstance(store, LogStore)
    with pytest.raises(errors.InvalidConfig, match="storage options"):
        LogStore(tmp_path / "store", storage_options={"region": "x"})


def test_a_newer_store_and_a_foreign_file_are_told(objects: MemoryObjects, store: BucketStore) -> None:
    version = objects.get("duramen.json")[1]
    objects.replace("duramen.json", b"{}", version)
    with pytest.raises(errors.NotAStore):
        opened(objects)
    objects.delete(["duramen.json"])
    from logstore.directory.sealed import seal

    objects.create("duramen.json", seal({"store_id": "x"}, version=2))
    with pytest.raises(errors.StoreVersionError):
        opened(objects)


# --- a store that others have open as well ----------------------------------------------------------------------------


def test_a_topic_that_others_widened_is_restored_as_it_is_now(objects: MemoryObjects, store: BucketStore) -> None:
    store.append("orders", records(0, 4))
    other = opened(objects)
    other.alter_topic("orders", partitions=4)
    other.append("orders", records(4, 20))
    assert sum(batch.num_rows for batch in store.restore("orders")) == 24


def test_a_topic_that_others_created_again_is_the_new_one(objects: MemoryObjects, store: BucketStore) -> None:
    store.append("orders", records(0, 4))
    views = [opened(objects) for _ in range(4)]
    other = opened(objects)
    other.delete_topic("orders")
    other.create_topic("orders", partitions=1)
    other.append("orders", records(7, 1))
    assert [row["value"] for batch in views[0].restore("orders") for row in batch.to_pylist()] == [b"v7"]
    assert [each.value for each in views[1].reader("orders", 0).records(0)] == [b"v7"]
    assert [each.value for found in views[2].follow("orders", wait=False) for each in found.records] == [b"v7"]
    assert views[3].topic("orders").partitions == 1


def test_what_others_allowed_is_no_longer_refused(objects: MemoryObjects, store: BucketStore) -> None:
    big = [Record(b"k", bytes(2000), NOW_MS)]
    store.alter_topic("orders", configs={"max.message.bytes": 1000})
    with pytest.raises(errors.RecordTooLarge):
        store.append("orders", big)
    opened(objects).alter_topic("orders", configs={"max.message.bytes": 10_000})
    assert store.append("orders", big).records == 1


# --- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def served(ministack: Server) -> BucketStore:
    url = ministack.url(uuid.uuid4().hex)
    return LogStore(url, create=True, storage_options=ministack.options)  # type: ignore[return-value]


def test_end_to_end_on_a_server(served: BucketStore, ministack: Server) -> None:
    served.create_topic("orders", partitions=3, configs={"cleanup.policy": "compact"})
    for batch in range(3):
        served.append("orders", records(batch * 5, 5), app=AppBatch("app", batch, "query"))
    assert served.append("orders", records(0, 5), app=AppBatch("app", 2, "query")).replayed
    with LogStore(served.url, storage_options=ministack.options) as other:
        state = [row for batch in other.restore("orders") for row in batch.to_pylist()]
        assert len(state) == 15
        assert sum(len(each.records) for each in other.follow("orders", wait=False)) == 15


def test_a_missing_bucket_and_a_place_without_a_store_are_told(ministack: Server) -> None:
    with pytest.raises(errors.NotAStore):
        LogStore(ministack.url(uuid.uuid4().hex), storage_options=ministack.options)
    with pytest.raises(errors.UnknownBucket):
        LogStore(f"s3://nobody-made-{uuid.uuid4().hex}/x", create=True, storage_options=ministack.options)


def test_no_secret_is_in_a_message_or_a_pickle(ministack: Server) -> None:
    secret = "a-secret-nobody-may-see"
    options = {**ministack.options, "secret_access_key": secret}
    store = BucketStore(ministack.url(uuid.uuid4().hex), create=True, storage_options=options)
    assert secret not in repr(store)
    assert secret.encode() not in pickle.dumps(store.objects)
    staging = BucketCommitter(store).begin()
    assert secret.encode() not in pickle.dumps(staging)


# --- the same as a directory -----------------------------------------------------------------------------------------


def test_the_same_appends_have_the_same_offsets_as_in_a_directory(tmp_path: Any, objects: MemoryObjects) -> None:
    import random

    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    with LogStore(tmp_path / "store", create=True, clock=ManualClock(NOW_MS)) as directory:
        bucket = opened(objects, create=True)
        for store in (directory, bucket):
            configs = {"cleanup.policy": "compact", "segment.bytes": 2000, "max.message.bytes": 1500}
            store.create_topic("orders", partitions=3, configs=configs)
        for _ in range(20):
            some = [
                Record(b"k%d" % rng.randrange(20), rng.choice([None, rng.randbytes(rng.randrange(60))]), NOW_MS + n)
                for n in range(rng.randrange(1, 40))
            ]
            for store in (directory, bucket):
                store.append("orders", some)
            if rng.random() < 0.1:
                wide = directory.topic("orders").partitions + 1
                for store in (directory, bucket):
                    store.alter_topic("orders", partitions=wide)
        for number in range(directory.topic("orders").partitions):
            expected = list(directory.reader("orders", number).records(0))
            assert list(bucket.reader("orders", number).records(0)) == expected, seed
        state = [
            sorted(
                (row["key"], row["value"], row["offset"])
                for each in store.restore("orders")
                for row in each.to_pylist()
            )
            for store in (directory, bucket)
        ]
        assert state[0] == state[1], seed


def test_a_restore_whose_objects_were_deleted_says_so(store: BucketStore, objects: MemoryObjects) -> None:
    store.append("orders", records(0, 10))
    deleted = [head.key for head in objects.list("data") if head.key.endswith(".batches")]
    batches = store.restore("orders")
    objects.delete(deleted)
    with pytest.raises((errors.SegmentsChanged, errors.DamagedLog)):
        list(batches)
