"""Bad input to sink, source and restore: an error that says what, where and the way out, before anything is committed.

What parsing options and resolving offsets refuses is in tests/streaming_reads; here is what only Spark shows, and what
the sink must refuse.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.committer import Committer
from logstore.errors import (
    AppendUnfinished,
    DiskFull,
    DuramenError,
    InvalidConfig,
    InvalidPartition,
    InvalidRecord,
    InvalidTimestamp,
    NotAStore,
    NullKey,
    OffsetOutOfRange,
    RecordTooLarge,
    ReplayMismatch,
    StoreVersionError,
    UnknownTopic,
    UnsuitableFileSystem,
)
from logstore.records.record import Record
from logstore.store import LogStore
from streaming.options import SinkOptions
from streaming.restore import restore_state
from streaming.sink import LogSink

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
Spark = Any
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def checked(store: LogStore) -> Iterator[LogStore]:
    """A store to which nothing must happen in the test."""
    store.create_topic("state", partitions=2, configs={"cleanup.policy": "compact"})
    store.create_topic("small", configs={"max.message.bytes": "1000"})
    store.create_topic("recent", configs={"message.timestamp.before.max.ms": "60000"})
    yield store
    assert_nothing_happened(store)


def assert_nothing_happened(store: LogStore) -> None:
    assert Committer(store).ledger.commits() == []
    assert [path for path in Path(store.layout.logs).glob("*/*.log") if path.stat().st_size] == []
    assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == []


def rows(spark: Spark, columns: str) -> Any:
    return spark.sql(f"select {columns}")


# --- the sink -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "columns", "kind", "said"),
    [
        ("state", "cast(null as string) as key, 'v' as value", NullKey, ["has no key", "compacted topic", "state"]),
        ("state", "'v' as value", NullKey, ["has no key", "state"]),
        ("small", "'k' as key, repeat('x', 2000) as value", RecordTooLarge, ["max.message.bytes is 1000", "raise max"]),
        ("nowhere", "'v' as value", UnknownTopic, ["nowhere", "duramen topics create", "create_topics"]),
        ("orders", "'v' as value, 'nowhere' as topic", UnknownTopic, ["'nowhere'", "Create it"]),
        ("orders", "'v' as value, 3 as partition", InvalidPartition, ["partition 3", "the topic has 3"]),
        ("orders", "'v' as value, -1 as partition", InvalidPartition, ["partition -1"]),
        ("orders", "1.5 as value", InvalidRecord, ["'value' is decimal", "Expected: key binary|string"]),
        (
            "orders",
            "'v' as value, map('a', 'b') as headers",
            InvalidRecord,
            ["'headers' is map", "headers array<struct"],
        ),
        ("orders", "'v' as value, -1L as timestamp", InvalidTimestamp, ["-1", "Leave it null"]),
        ("recent", "'v' as value, 1L as timestamp", InvalidTimestamp, ["message.timestamp.before.max.ms=60000"]),
    ],
)
def test_rows_that_cannot_be_records(
    spark: Spark, checked: LogStore, topic: str, columns: str, kind: type[DuramenError], said: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        LogSink(checked.path, topic, app_id="app").write(rows(spark, columns), 0)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["bigint", "timestamp"])
def test_times_are_checked_though_some_are_null(spark: Spark, checked: LogStore, kind: str) -> None:
    """What stands behind a null in the column is anybody's guess, and must be neither refused nor excuse the rest."""
    now_ms = checked.clock.now_ms()
    for old_ms in (-7, 1):
        numbers = f"case when id % 3 = 0 then null when id = 70 then {old_ms} else {now_ms} end"
        column = f"cast({numbers} as bigint)" if kind == "bigint" else f"timestamp_millis({numbers})"
        df = spark.range(0, 100, 1, 1).selectExpr("'v' as value", f"{column} as timestamp")
        with pytest.raises(InvalidTimestamp):
            LogSink(checked.path, "recent", app_id="app").write(df, 0)


def test_nulls_among_times_are_the_time_of_encoding(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    store.create_topic("recent", configs={"message.timestamp.before.max.ms": "60000"})
    before_ms = store.clock.now_ms()
    df = spark.range(0, 100, 1, 1).selectExpr(
        "cast(id as string) as value",
        f"case when id % 3 = 0 then cast(null as bigint) else {before_ms - 5} end as timestamp",
    )
    LogSink(store.path, "recent", app_id="app").write(df, 0)
    for record in read_all(store, "recent")[0]:
        if int(record.value or b"") % 3:
            assert record.timestamp_ms == before_ms - 5
        else:
            assert before_ms <= record.timestamp_ms <= store.clock.now_ms()


def test_a_topic_is_created_where_that_was_asked_for(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    LogSink(store.path, "fresh", app_id="app", create_topics={"partitions": 2}).write(rows(spark, "'v' as value"), 0)
    assert store.topic("fresh").partitions == 2
    assert sum(map(len, read_all(store, "fresh").values())) == 1


def test_an_app_whose_batches_went_back_is_told_the_way_out(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    df = rows(spark, "'k' as key, 'v' as value")
    LogSink(store.path, "orders", app_id="app", options=SinkOptions(query_id="first")).write(df, 5)
    for query_id, batch_id, said in (("first", 3, "is at batch 5; batch 3 is older"), ("second", 0, "query second")):
        with pytest.raises(ReplayMismatch) as caught:
            LogSink(store.path, "orders", app_id="app", options=SinkOptions(query_id=query_id)).write(df, batch_id)
        for words in (said, "adopt='first:5'", "new app_id"):
            assert words in str(caught.value)
    assert len(Committer(store).ledger.commits()) == 1
    adopting = LogSink(store.path, "orders", app_id="app", options=SinkOptions(query_id="second"), adopt="first:5")
    assert adopting.write(df, 0).records == 1
    assert adopting.write(df, 0).replayed  # once is enough: from here on it is the app's query
    assert sum(map(len, read_all(store, "orders").values())) == 2


def test_an_executor_that_sees_another_folder_is_told_of(
    spark: Spark, checked: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's token is one that no file of the executors has: as if the path led them to another file system."""
    monkeypatch.setattr("logstore.commit.plan_folder.store_token", lambda store: "of another file system")
    with pytest.raises(UnsuitableFileSystem) as caught:
        LogSink(checked.path, "orders", app_id="app").write(rows(spark, "'v' as value"), 0)
    for words in ("does not see the driver's store", checked.path, "all executors share"):
        assert words in str(caught.value)


def test_a_folder_that_is_no_store_and_a_newer_one(spark: Spark, store: LogStore, tmp_path: Path) -> None:
    df = rows(spark, "'v' as value")
    Path(store.path, "version").write_text("99\n")
    for path, kind, said in (
        (str(tmp_path), NotAStore, "no store here"),
        (store.path, StoreVersionError, "format version 99.*Install the release"),
    ):
        with pytest.raises(kind, match=said):
            LogSink(path, "orders", app_id="app").write(df, 0)
        with pytest.raises(kind, match=said):
            restore_state(spark, store=path, topic="orders")
        for act in (
            lambda path=path: (
                spark.read.format("duramen").option("store", path).option("subscribe", "orders").load().count()
            ),
            lambda path=path: (
                df.write.format("duramen").mode("append").option("store", path).option("topic", "orders").save()
            ),
        ):
            with pytest.raises(Exception, match=said):
                act()
    Path(store.path, "version").write_text("1\n")
    assert_nothing_happened(store)


# --- a full disk ----------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_while_rows_are_staged(
    spark: Spark, checked: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the task, where rows are encoded."""
    import streaming.sink

    whole = streaming.sink.encode_rows

    def without_room(job: Any) -> Any:
        encode = whole(job)

        def run(batches: Any) -> Any:
            import errno

            from logstore.commit.staging import StagedWriter

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            before, StagedWriter._write_piece = StagedWriter._write_piece, full  # type: ignore[method-assign]
            try:
                yield from encode(batches)
            finally:
                StagedWriter._write_piece = before  # type: ignore[method-assign]

        return run

    monkeypatch.setattr("streaming.sink.encode_rows", without_room)
    with pytest.raises(DiskFull, match=r"Nothing was committed; make room"):
        LogSink(checked.path, "orders", app_id="app").write(rows(spark, "'v' as value"), 0)


@pytest.mark.parametrize(
    "where",
    ["logstore.commit.committer.write_plan", "logstore.ledger.table.write_data"],
)
def test_a_disk_that_is_full_before_the_commit(
    spark: Spark, checked: LogStore, monkeypatch: pytest.MonkeyPatch, where: str, read_all: ReadAll
) -> None:
    def full(*_: object, **__: object) -> None:
        raise NO_SPACE

    monkeypatch.setattr(where, full)
    with pytest.raises(DiskFull, match=r"disk is full.*Nothing was committed; make room and run the batch again"):
        LogSink(checked.path, "orders", app_id="app").write(rows(spark, "'v' as value"), 0)


def test_too_little_room_is_noticed_before_the_commit(
    spark: Spark, checked: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def nearly_full(path: Any) -> Any:
        found = list(real(path))
        found[4] = 0  # blocks free for us
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.raises(DiskFull, match=r"needs about \d+ bytes, 0 are free.*Nothing was committed"):
        LogSink(checked.path, "orders", app_id="app").write(rows(spark, "'v' as value"), 0)


def test_a_disk_that_is_full_after_the_commit_is_made_good_by_the_next_holder(
    spark: Spark, store: LogStore, monkeypatch: pytest.MonkeyPatch, read_all: ReadAll
) -> None:
    def full(*_: object) -> None:
        raise NO_SPACE

    sink = LogSink(store.path, "orders", app_id="app")
    with monkeypatch.context() as patch:
        patch.setattr("logstore.commit.apply._append", full)
        with pytest.raises(AppendUnfinished, match=r"the batch is committed .*No space left.*Nothing is lost"):
            sink.write(rows(spark, "'first' as value"), 0)
        assert read_all(store, "orders") == {0: [], 1: [], 2: []}
    LogSink(store.path, "orders", app_id="another").write(rows(spark, "'second' as value"), 0)
    assert sink.write(rows(spark, "'first' as value"), 0).replayed
    found = [record.value for records in read_all(store, "orders").values() for record in records]
    assert sorted(found) == [b"first", b"second"]  # type: ignore[type-var]


# --- source and restore ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "nothing"}, "no topic is called nothing"),
        ({"subscribe": "orders", "startingOffsets": "{"}, "startingOffsets is not JSON of the form"),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"0": 0}}'}, "lacks orders-1, orders-2"),
        (
            {
                "subscribe": "orders",
                "startingOffsets": '{"orders": {"0": 1, "1": 0, "2": 0}}',
                "endingOffsets": '{"orders": {"0": 0, "1": 0, "2": 0}}',
            },
            "orders-0 would end at 0, before its start 1",
        ),
        (
            {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 9, "1": 0, "2": 0}}'},
            "startingOffsets asks for 9, the log ends at 1",
        ),
        ({"subscribe": "orders", "startingOfsets": "earliest"}, "Did you mean startingOffsets"),
    ],
)
def test_reads_that_cannot_be(spark: Spark, store: LogStore, options: dict[str, str], said: str) -> None:
    LogSink(store.path, "orders", app_id="app").write(rows(spark, "'v' as value, 0 as partition"), 0)
    with pytest.raises(Exception, match=said):
        spark.read.format("duramen").options(store=store.path, **options).load().collect()


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"topic": "nothing"}, UnknownTopic, "no topic is called nothing"),
        ({"as_of_offsets": {0: 0}}, InvalidConfig, "as_of_offsets lacks partition 1"),
        ({"as_of_offsets": {0: 0, 1: 0, 2: 0, 3: 0}}, InvalidConfig, "names partition 3"),
        ({"as_of_offsets": {0: "1", 1: 0, 2: 0}}, InvalidConfig, "expected a whole number"),
        ({"as_of_offsets": {0: 2, 1: 0, 2: 0}}, OffsetOutOfRange, "asks for 2, the log ends at 1"),
        ({"since_offsets": {0: 2, 1: 0, 2: 0}}, OffsetOutOfRange, "since_offsets asks for 2, the log ends at 1"),
        ({"as_of_timestamp_ms": -1}, InvalidConfig, "expected milliseconds from 0 up"),
        ({"as_of_timestamp_ms": 1, "as_of_offsets": {0: 0}}, InvalidConfig, "exclude each other"),
        (
            {"as_of_offsets": {0: 0, 1: 0, 2: 0}, "since_offsets": {0: 1, 1: 0, 2: 0}},
            InvalidConfig,
            "orders-0 would end at 0, before its start 1",
        ),
    ],
)
def test_restores_that_cannot_be(
    spark: Spark, store: LogStore, given: dict[str, Any], kind: type[DuramenError], said: str
) -> None:
    LogSink(store.path, "orders", app_id="app").write(rows(spark, "'k' as key, 'v' as value, 0 as partition"), 0)
    with pytest.raises(kind, match=said):
        restore_state(spark, **{"store": store.path, "topic": "orders", **given})


def test_a_typo_in_an_option_of_a_write_is_answered_with_the_nearest(spark: Spark, checked: LogStore) -> None:
    writer = rows(spark, "'v' as value").write.format("duramen").mode("append").option("store", checked.path)
    with pytest.raises(Exception, match=r"Did you mean compression\.type"):
        writer.option("topic", "orders").option("compresion.type", "lz4").save()
