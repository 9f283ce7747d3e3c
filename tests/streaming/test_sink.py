"""The sink from end to end: columns, topics, order, errors that name what was expected, and the batch writer."""

from __future__ import annotations

import datetime
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.committer import Committer
from logstore.commit.folder_outputs import check_sees_store, store_token
from logstore.errors import (
    InvalidConfig,
    InvalidPartition,
    InvalidRecord,
    MissingBatches,
    NotAStore,
    NullKey,
    PackageMissing,
    UnknownTopic,
    UnsuitableFileSystem,
)
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.store import LogStore
from streaming import restore_into_delta
from streaming.flusher import flush_now
from streaming.options import SinkOptions
from streaming.sink import LogSink

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
Spark = Any
BASE = datetime.datetime(2024, 1, 2, 3, 4, 5, 678000, tzinfo=datetime.timezone.utc)
BASE_MS = int(BASE.timestamp() * 1000)


def everything(read_all: ReadAll, store: LogStore, topic: str = "orders") -> list[Record]:
    return [record for records in read_all(store, topic).values() for record in records]


def sink(store: LogStore, topic: str | None = "orders", app_id: str = "app", **given: Any) -> LogSink:
    return LogSink(store.path, topic, app_id=app_id, **given)


def json_files(folder: Path, files: int, rows: int) -> Path:
    folder.mkdir()
    for number in range(files):
        lines = [json.dumps({"key": f"k{n % 5}", "value": f"{number}-{n:03d}"}) for n in range(rows)]
        path = folder / f"part-{number}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return folder


def test_a_stream_of_files_arrives_once_and_in_order(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll
) -> None:
    source = json_files(tmp_path / "in", files=3, rows=40)
    stream = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 1).json(str(source))
    query = (
        stream.writeStream.foreachBatch(sink(store))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    found = read_all(store, "orders")
    assert sum(map(len, found.values())) == 120
    for number, records in found.items():
        assert [record.offset for record in records] == list(range(len(records)))
        for key in {record.key for record in records}:
            assert partition_for_key(key or b"", 3) == number
            values = [record.value for record in records if record.key == key]
            assert values == sorted(values)  # by file, then by row
    rows = Committer(store).ledger.commits()
    assert [(row.app_id, row.batch_id, row.records) for row in rows] == [("app", n, 40) for n in range(3)]
    assert {row.query_id for row in rows} == {str(query.id)}
    assert all({"encode", "plan"} <= set(row.timings_ms) and row.workers and row.engine == "spark" for row in rows)


def test_columns_are_taken_as_sparks_kafka_sink_takes_them(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    from pyspark.sql import types as t

    header = t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
    schema = t.StructType(
        [
            t.StructField("key", t.BinaryType()),
            t.StructField("value", t.StringType()),
            t.StructField("headers", t.ArrayType(header)),
            t.StructField("timestamp", t.TimestampType()),
        ]
    )
    rows = [
        (bytearray(b"a"), "text", [("h", bytearray(b"1")), ("h", None)], BASE),
        (bytearray(b"b"), None, None, BASE + datetime.timedelta(seconds=1)),
        (bytearray(b"c"), "ä€", [], None),
    ]
    before_ms = store.clock.now_ms()
    sink(store).write(spark.createDataFrame(rows, schema), 0)
    found = {record.key: record for record in everything(read_all, store)}
    assert (found[b"a"].value, found[b"a"].timestamp_ms) == (b"text", BASE_MS)
    assert tuple(found[b"a"].headers) == (("h", b"1"), ("h", None))
    assert (found[b"b"].value, found[b"b"].timestamp_ms, tuple(found[b"b"].headers)) == (None, BASE_MS + 1000, ())
    assert found[b"c"].value == "ä€".encode()
    assert before_ms <= found[b"c"].timestamp_ms <= store.clock.now_ms()


@pytest.mark.parametrize(
    "timestamp",
    [
        f"cast({BASE_MS} as bigint)",
        "timestamp_ntz'2024-01-02 03:04:05.678'",
        "timestamp'2024-01-02 03:04:05.678'",
    ],
)
def test_timestamps_of_each_type_are_milliseconds(
    spark: Spark, store: LogStore, read_all: ReadAll, timestamp: str
) -> None:
    sink(store).write(spark.sql(f"select 'k' as key, 'v' as value, {timestamp} as timestamp"), 0)
    assert [record.timestamp_ms for record in everything(read_all, store)] == [BASE_MS]


def test_rows_go_to_the_topic_and_partition_they_name(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    store.create_topic("payments", partitions=2)
    rows = spark.sql(
        "select * from values ('a', '1', 'orders', 2), ('a', '2', 'payments', cast(null as int)), "
        "('a', '3', cast(null as string), 0), ('a', '4', 'created', 1) as t(key, value, topic, partition)"
    )
    with pytest.raises(UnknownTopic, match="'created'"):
        sink(store).write(rows, 0)
    assert Committer(store).ledger.commits() == []
    assert not any(name.endswith("-plan") for name in os.listdir(store.layout.staging))
    done = sink(store, create_topics={"partitions": 2}).write(rows, 0)
    assert done.records == 4
    orders, payments = read_all(store, "orders"), read_all(store, "payments")
    assert [record.value for record in orders[2]] == [b"1"]
    assert [record.value for record in orders[0]] == [b"3"]
    assert [record.value for record in payments[partition_for_key(b"a", 2)]] == [b"2"]
    assert [record.value for record in read_all(store, "created")[1]] == [b"4"]
    assert len({row.plan_id for row in Committer(store).ledger.commits()}) == 1


def test_order_within_a_key_is_the_order_of_the_rows(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    rows = spark.range(0, 20_000, 1, 6).selectExpr("cast(id % 50 as string) as key", "cast(id as string) as value")
    sink(store).write(rows, 0)
    sink(store).write(rows.selectExpr("key", "concat('9', lpad(value, 6, '0')) as value"), 1)
    for records in read_all(store, "orders").values():
        last: dict[bytes | None, int] = {}
        for record in records:
            value = int(record.value or b"-1")
            assert last.get(record.key, -1) < value
            last[record.key] = value
    assert len(everything(read_all, store)) == 40_000


def test_an_option_sorts_first(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    rows = spark.range(0, 500, 1, 4).selectExpr("'k' as key", "lpad(cast(499 - id as string), 3, '0') as value")
    sink(store, order_by="value").write(rows, 0)
    assert [record.value for record in everything(read_all, store)] == [b"%03d" % n for n in range(500)]


def test_rows_sort_by_any_column_and_columns_of_no_record_are_left_out_with_one_warning(
    spark: Spark, store: LogStore, read_all: ReadAll, caplog: pytest.LogCaptureFixture
) -> None:
    """Change data capture: a sequence number says the order, and the rows have more than a record takes."""
    rows = spark.range(0, 60, 1, 4).selectExpr(
        "'k' as key", "cast(59 - id as string) as value", "59 - id as sequence", "'eu' as region", "1 as timestmap"
    )
    by_sequence = sink(store, order_by="sequence")
    by_sequence.write(rows, 0)
    by_sequence.write(rows.limit(0), 1)
    assert [record.value for record in everything(read_all, store)] == [b"%d" % n for n in range(60)]
    told = [record.getMessage() for record in caplog.records if record.name == "duramen"]
    assert told == [
        "columns that are not part of a record are left out: region, timestmap. Did you mean timestamp by timestmap?"
    ]
    with pytest.raises(InvalidConfig, match="order_by is 'sequenze', and there is no such column"):
        sink(store, order_by="sequenze").write(rows, 2)


def test_sql_reads_by_the_options_behind_a_tables_name(spark: Spark, store: LogStore) -> None:
    sink(store).write(spark.range(5).selectExpr("'k' as key", "'v' as value"), 0)
    spark.sql("CREATE TABLE log USING duramen")
    try:
        options = f"store = '{store.path}', subscribe = 'orders', includeHeaders = 'true'"
        assert spark.sql(f"SELECT count(*) FROM log WITH ({options})").collect()[0][0] == 5
    finally:
        spark.sql("DROP TABLE log")


def test_create_topics_makes_the_store_too(spark: Spark, tmp_path: Path, read_all: ReadAll) -> None:
    path = tmp_path / "not" / "yet"
    rows = spark.sql("select 'k' as key, 'v' as value")
    with pytest.raises(NotAStore):
        LogSink(path, "orders", app_id="app").write(rows, 0)
    LogSink(path, "orders", app_id="app", create_topics={"partitions": 1}).write(rows, 0)
    with LogStore(path) as made:
        assert len(everything(read_all, made)) == 1


def test_a_session_without_delta_is_told_what_to_install(spark: Spark, store: LogStore, tmp_path: Path) -> None:
    with pytest.raises(PackageMissing, match="configure_spark_with_delta_pip"):
        restore_into_delta(spark, store=store.path, topic="orders", path=str(tmp_path / "table"))


def test_a_batch_write_to_a_path_leaves_columns_of_no_record_out(
    spark: Spark, store: LogStore, read_all: ReadAll
) -> None:
    rows = spark.sql("select 'k' as key, 'v' as value, 'x' as colour")
    rows.write.format("duramen").option("topic", "orders").option("compression_type", "zstd").mode("append").save(
        store.path
    )
    assert [record.value for record in everything(read_all, store)] == [b"v"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("1 as value", "column 'value' is int, expected binary or string"),
        ("'k' as key", "there is no column 'value'"),
        ("'v' as valeu, 'x' as colour", "The columns are valeu, colour"),
        ("'v' as value, 'x' as partition", "column 'partition' is string"),
        ("'v' as value, array('x') as headers", "column 'headers' is array<string>"),
        ("'v' as value, true as timestamp", "column 'timestamp' is boolean"),
    ],
)
def test_wrong_columns_are_told_with_the_expected_schema(
    spark: Spark, store: LogStore, columns: str, message: str
) -> None:
    with pytest.raises(InvalidRecord) as caught:
        sink(store).write(spark.sql(f"select {columns}"), 0)
    assert message in str(caught.value)
    assert "value binary|string" in str(caught.value)
    assert Committer(store).ledger.commits() == []


def test_bad_rows_and_settings_are_refused_before_the_commit(spark: Spark, store: LogStore) -> None:
    store.create_topic("state", configs={"cleanup.policy": "compact"})
    with pytest.raises(NullKey, match="has no key"):
        sink(store, "state").write(spark.sql("select cast(null as string) as key, 'v' as value"), 0)
    with pytest.raises(InvalidPartition, match="asks for partition 3"):
        sink(store).write(spark.sql("select 'v' as value, 3 as partition"), 0)
    with pytest.raises(UnknownTopic, match=r"duramen topics create.*create_topics"):
        sink(store, "nowhere").write(spark.sql("select 'v' as value"), 0)
    with pytest.raises(InvalidRecord, match="neither the sink nor a column"):
        sink(store, None).write(spark.sql("select 'v' as value"), 0)
    with pytest.raises(InvalidConfig, match="app_id"):
        LogSink(store.path, "orders", app_id="")
    with pytest.raises(TypeError, match="app_id"):
        LogSink(store.path, "orders")  # type: ignore[call-arg]
    assert Committer(store).ledger.commits() == []
    assert not any(name.endswith("-plan") for name in os.listdir(store.layout.staging))


def test_an_empty_batch_counts_and_writes_nothing(spark: Spark, store: LogStore) -> None:
    empty = spark.sql("select 'v' as value where false")
    done = sink(store).write(empty, 0)
    assert done.records == 0
    assert [(row.batch_id, row.topic_id, row.records) for row in Committer(store).ledger.commits()] == [(0, "", 0)]
    assert sink(store).write(empty, 0).replayed
    assert sink(store).write(spark.sql("select 'v' as value"), 1).records == 1
    with pytest.raises(MissingBatches, match=r"at batch 1; batch 4 leaves out 2 to 3.*adopt"):
        sink(store).write(empty, 4)
    assert os.listdir(os.path.join(store.path, "staging"))  # of batch 1, which is not flushed yet


def test_a_sink_travels_without_its_last_receipt(store: LogStore) -> None:
    given = sink(store, options=SinkOptions(compression_type="zstd"), create_topics={"partitions": 2}, adopt="query:3")
    given.last = object()  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(given))
    assert again.last is None
    assert {k: v for k, v in again.__dict__.items() if k not in ("last", "_mark")} == {
        k: v for k, v in given.__dict__.items() if k not in ("last", "_mark")
    }


def test_an_executor_that_does_not_see_the_store_is_refused(store: LogStore, tmp_path: Path) -> None:
    token = store_token(store)
    check_sees_store(store.path, token)
    with LogStore(tmp_path / "other", create=True) as other:
        assert store_token(other) != token
        for path in (other.path, str(tmp_path / "nothing")):
            with pytest.raises(UnsuitableFileSystem, match="does not see the driver's store"):
                check_sees_store(path, token)


def test_a_large_batch_is_appended_by_tasks(
    spark: Spark, store: LogStore, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming.sink.APPLY_ON_DRIVER_BYTES", 0)
    monkeypatch.setattr("logstore.commit.apply.apply_partitions", None)  # the driver must not do it
    rows = spark.range(3000).selectExpr("cast(id as string) as key", "cast(id as string) as value")
    sink(store).write(rows, 0)
    assert sorted(int(record.value or b"") for record in everything(read_all, store)) == list(range(3000))


def test_tasks_on_another_host_append_in_the_drivers_name(
    spark: Spark, store: LogStore, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's boot id is made up here, so the workers are on another host: they sync, and the driver goes on."""
    monkeypatch.setattr("streaming.sink.APPLY_ON_DRIVER_BYTES", 0)
    for module in ("streaming.sink", "logstore.directory.tails"):
        monkeypatch.setattr(f"{module}.boot_id", lambda: "driver")
    opened: list[str] = []
    open_log = LogStore.open_log

    def counted(self: LogStore, *of: Any, **how: Any) -> Any:
        opened.append(self.path)
        return open_log(self, *of, **how)

    monkeypatch.setattr(LogStore, "open_log", counted)
    given, topic = sink(store), store.topic("orders")
    for batch in range(3):
        given.write(spark.range(300).selectExpr("cast(id as string) as key", "cast(id as string) as value"), batch)
        with store.tails(topic) as slots:
            assert slots.not_of_this_boot(range(topic.partitions)) == []
    assert store.path not in opened, "no log was checked"
    assert len(everything(read_all, store)) == 900


def test_staging_goes_when_the_flush_has_been(spark: Spark, store: LogStore) -> None:
    sink(store, options=SinkOptions(flush_ms=60_000)).write(spark.sql("select 'k' as key, 'v' as value"), 0)
    assert any(name.endswith("-plan") for name in os.listdir(store.layout.staging))
    flush_now()
    assert not any(name.endswith("-plan") for name in os.listdir(store.layout.staging))
    assert store.ends(store.topic("orders")).flushed_sequence == 1


def test_a_batch_write_that_fails_after_its_commit_keeps_its_staged_files(
    spark: Spark, store: LogStore, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark aborts a write whose commit raised; but the batch stands, and staging is all there is of it."""
    import pyarrow as pa
    from pyspark.sql.types import StringType, StructField, StructType

    from logstore.errors import AppendUnfinished
    from streaming.batch_writer import LogWriter
    from streaming.options import write_options

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    options = write_options({"store": store.path, "topic": "orders"})
    rows = pa.record_batch({"value": pa.array(["a", "b", "c"])})
    for committed in (False, True):
        writer = LogWriter(options, StructType([StructField("value", StringType())]), False)
        message = writer.write(iter([rows]))
        if committed:
            with monkeypatch.context() as patch:
                patch.setattr("logstore.commit.apply.apply_partitions", full)
                with pytest.raises(AppendUnfinished):
                    writer.commit([message])
        writer.abort([message])
        assert len(os.listdir(store.layout.staging)) == committed
    Committer(store).settle_topic(store.topic("orders"))
    assert sorted(record.value or b"" for record in everything(read_all, store)) == [b"a", b"b", b"c"]


def test_a_data_frame_is_written_as_a_batch(spark: Spark, store: LogStore, read_all: ReadAll) -> None:
    rows = spark.range(0, 1000, 1, 3).selectExpr("cast(id % 7 as string) as key", "cast(id as string) as value")
    writer = rows.write.format("duramen").mode("append").option("store", store.path).option("topic", "orders")
    for _ in range(2):
        writer.option("app_id", "nightly").option("batch_id", "1").save()
    assert sorted(int(record.value or b"") for record in everything(read_all, store)) == list(range(1000))
    for records in read_all(store, "orders").values():
        for key in {record.key for record in records}:
            values = [int(record.value or b"") for record in records if record.key == key]
            assert values == sorted(values)
    assert os.listdir(store.layout.staging) == []
    with pytest.raises(Exception, match="only ever appended"):
        rows.write.format("duramen").mode("overwrite").option("store", store.path).option("topic", "orders").save()
    with pytest.raises(Exception, match="asks for partition 9"):
        rows.selectExpr("value", "9 as partition").write.format("duramen").mode("append").option(
            "store", store.path
        ).option("topic", "orders").save()
    assert os.listdir(store.layout.staging) == []
