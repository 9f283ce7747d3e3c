"""The data source in Spark: what a batch read delivers, and how a stream goes on, restarts and notices loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chispa import assert_df_equality
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.retention import delete_records
from reference.partition_writer import writing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BASE_MS = 1_700_000_000_000
Read = Callable[..., "DataFrame"]

#: that of Spark's Kafka source
KAFKA_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)
KAFKA_HEADERS = StructField(
    "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
)


@pytest.fixture
def orders(store: LogStore, append: Any) -> LogStore:
    """Twelve records in two partitions and many segments, a second apart; every fourth a tombstone."""
    store.create_topic("orders", partitions=2, configs={"segment.bytes": 300})
    records = [
        Record(b"k%d" % n, None if n % 4 == 3 else b"v%d" % n, BASE_MS + 1000 * n, (("h", b"%d" % n), ("n", None)))
        for n in range(12)
    ]
    for at in range(0, 12, 3):
        append("orders", records[at : at + 3], [n % 2 for n in range(at, at + 3)])
    return store


def offsets(df: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in df.select("partition", "offset").collect())


def test_a_batch_read_has_the_rows_and_the_schema_of_sparks_kafka_source(
    spark: SparkSession, orders: LogStore, read: Read
) -> None:
    found = read(subscribe="orders", includeHeaders="true")
    assert read(subscribe="orders").schema == KAFKA_SCHEMA
    assert found.schema == StructType([*KAFKA_SCHEMA.fields, KAFKA_HEADERS])
    rows = [
        (
            bytearray(b"k%d" % n),
            None if n % 4 == 3 else bytearray(b"v%d" % n),
            "orders",
            n % 2,
            n // 2,
            (BASE_MS + 1000 * n) / 1000,
            0,
            [("h", bytearray(b"%d" % n)), ("n", None)],
        )
        for n in range(12)
    ]
    columns = [*KAFKA_SCHEMA.fieldNames()[:7], "headers"]
    expected = spark.createDataFrame(
        rows,
        "key binary, value binary, topic string, partition int, offset long, timestamp double, timestampType int, "
        "headers array<struct<key:string,value:binary>>",
    ).withColumn("timestamp", F.col("timestamp").cast("timestamp"))
    assert_df_equality(found.select(*columns), expected.select(*columns), ignore_row_order=True)


def test_a_read_gets_the_columns_its_schema_names(spark: SparkSession, orders: LogStore, read: Read, path: str) -> None:
    def reader(schema: str) -> Any:
        return spark.read.schema(schema).format("duramen").option("store", path).option("subscribe", "orders")

    everything = read(subscribe="orders", includeHeaders="true")
    for schema, same in [
        ("key binary, value binary", everything.select("key", "value")),
        ("value string, KEY string", everything.selectExpr("cast(value as string)", "cast(key as string) as KEY")),
        ("timestamp timestamp", everything.select("timestamp")),
        ("headers array<struct<key:string,value:binary>>, topic string", everything.select("headers", "topic")),
    ]:
        assert_df_equality(reader(schema).load(), same, ignore_row_order=True)
    exact = reader("partition int not null, offset bigint not null, timestampType int not null").load()
    assert [field.nullable for field in exact.schema.fields] == [False] * 3
    assert offsets(exact) == [(partition, offset) for partition in range(2) for offset in range(6)]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("key binary, vale binary", "Did you mean value"),
        ("value int", "column 'value' cannot be read as int, but as binary or string"),
        ("value binary not null", "there are records without a value"),
    ],
)
def test_a_schema_that_cannot_be_read_is_an_error(
    spark: SparkSession, orders: LogStore, path: str, schema: str, expected: str
) -> None:
    source = spark.read.schema(schema).format("duramen").option("store", path).option("subscribe", "orders")
    with pytest.raises(PySparkException, match=expected):
        source.load().collect()


def test_by_offsets_by_time_by_pattern_by_assignment_and_in_more_tasks(orders: LogStore, read: Read) -> None:
    bounds = {"startingOffsets": '{"orders":{"0":2,"1":-2}}', "endingOffsets": '{"orders":{"0":4,"1":1}}'}
    assert offsets(read(subscribe="orders", **bounds)) == [(0, 2), (0, 3), (1, 0)]
    times = {"startingTimestamp": str(BASE_MS + 3500), "endingTimestamp": str(BASE_MS + 7000)}
    assert offsets(read(subscribePattern="ord.*", **times)) == [(0, 2), (0, 3), (1, 2)]
    split = read(assign='{"orders":[1]}', minPartitions="4")
    assert split.rdd.getNumPartitions() >= 4
    assert offsets(split) == [(1, n) for n in range(6)]


@pytest.mark.parametrize("pushdown", ["false", "true"])
def test_filters_give_the_same_rows_pushed_down_or_not(
    spark: SparkSession, orders: LogStore, read: Read, pushdown: str
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
    try:
        source = read(subscribe="orders")
        assert offsets(source.where("partition = 1 and offset > 1 and offset <= 4")) == [(1, 2), (1, 3), (1, 4)]
        assert offsets(source.where("offset in (0, 5) and topic = 'orders'")) == [(0, 0), (0, 5), (1, 0), (1, 5)]
        assert offsets(source.where("partition in (1, 7) and offset = 3")) == [(1, 3)]
        assert offsets(source.where("topic = 'none'")) == []
        low, high = "2023-11-14 22:13:24.000", "2023-11-14 22:13:26.000"  # 4 s and 6 s after the first
        between = source.where(f"timestamp >= timestamp'{low}' and timestamp <= timestamp'{high}'")
        assert offsets(between) == [(0, 2), (0, 3), (1, 2)]
        assert offsets(source.where(f"timestamp > timestamp'{low}' and timestamp < timestamp'{high}'")) == [(1, 2)]
        assert offsets(source.where("value is null and partition = 1")) == [(1, 1), (1, 3), (1, 5)]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscibe": "orders"}, "Did you mean subscribe"),
        ({"subscribe": "nothing"}, "no topic is called nothing"),
        ({"subscribe": "orders", "startingOffsets": '{"orders":{"0":99,"1":0}}'}, "the log ends at 6"),
    ],
)
def test_an_error_reaches_the_user_as_it_was_said(
    orders: LogStore, read: Read, options: dict[str, str], expected: str
) -> None:
    with pytest.raises(PySparkException, match=expected):
        read(**options).collect()


def run_stream(spark: SparkSession, path: str, checkpoint: Path, **options: str) -> list[list[tuple[int, int, bytes]]]:
    """Read all there is as a stream; the rows of each micro-batch."""
    batches: list[list[tuple[int, int, bytes]]] = []

    def take(df: DataFrame, batch_id: int) -> None:
        batches.append([(row.partition, row.offset, bytes(row.key)) for row in df.collect()])

    reader = spark.readStream.format("duramen").option("store", path).option("subscribe", "orders")
    for name, value in {"startingOffsets": "earliest", **options}.items():
        reader = reader.option(name, value)
    query = (
        reader.load()
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return batches


def test_a_stream_is_admitted_in_parts_and_goes_on_from_its_checkpoint(
    spark: SparkSession, orders: LogStore, path: str, append: Any, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    batches = run_stream(spark, path, checkpoint, maxOffsetsPerTrigger="5")
    assert [len(batch) for batch in batches] == [5, 5, 2]
    rows = [row for batch in batches for row in batch]
    assert sorted(rows) == sorted((n % 2, n // 2, b"k%d" % n) for n in range(12))
    append("orders", [Record(b"late", b"x", BASE_MS)], [1])
    assert run_stream(spark, path, checkpoint) == [[(1, 6, b"late")]]
    assert run_stream(spark, path, checkpoint) == []


def test_a_stream_gets_the_columns_its_schema_names(
    spark: SparkSession, orders: LogStore, path: str, tmp_path: Path
) -> None:
    rows: list[Any] = []
    query = (
        spark.readStream.schema("value string, offset bigint")
        .format("duramen")
        .option("store", path)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .load()
        .writeStream.foreachBatch(lambda df, _: rows.extend(map(tuple, df.collect())))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    assert sorted(rows, key=str) == sorted(((None if n % 4 == 3 else f"v{n}", n // 2) for n in range(12)), key=str)


def test_loss_stops_a_stream_unless_it_may_go_on(
    spark: SparkSession, orders: LogStore, path: str, append: Any, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    run_stream(spark, path, checkpoint)
    append("orders", [Record(b"n%d" % n, b"x", BASE_MS) for n in range(4)], [0, 0, 0, 1])
    delete_records(orders, orders.topic("orders"), 0, before_offset=8)
    with pytest.raises(PySparkException, match="records 6 to 8 are gone"):
        run_stream(spark, path, checkpoint)
    assert sorted(run_stream(spark, path, checkpoint, failOnDataLoss="false")[0]) == [(0, 8, b"n2"), (1, 6, b"n3")]


def test_a_gap_that_compaction_left_is_no_loss(spark: SparkSession, store: LogStore, path: str, tmp_path: Path) -> None:
    """Offsets 0 and 9 with nothing in between, as after compaction."""
    from logstore.partition.producer_state import AppendOrigin
    from logstore.records.columns import columns_of
    from logstore.records.encoder import BatchOptions, Encoder

    topic = store.create_topic("orders")
    with writing(store, topic, 0, what="test") as log:
        for base in (0, 9):
            (encoded,) = Encoder(BatchOptions(base_offset=base)).encode(
                columns_of([Record(b"k%d" % base, b"v", BASE_MS)])
            )
            log.append_batches(encoded.data.tobytes(), origin=AppendOrigin.REPLICATION)
    found = run_stream(spark, path, tmp_path / "checkpoint")
    assert found == [[(0, 0, b"k0"), (0, 9, b"k9")]]


def test_a_topic_created_again_is_noticed_over_a_restart(
    spark: SparkSession, orders: LogStore, path: str, append: Any, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    run_stream(spark, path, checkpoint)
    orders.delete_topic("orders")
    orders.create_topic("orders", partitions=2)
    append("orders", [Record(b"new", b"x", BASE_MS)], [0])
    with pytest.raises(PySparkException, match="deleted and created again"):
        run_stream(spark, path, checkpoint)
    assert run_stream(spark, path, checkpoint, failOnDataLoss="false") == [[(0, 0, b"new")]]
    last = sorted((checkpoint / "offsets").iterdir(), key=lambda file: file.name)[-1]
    assert json.loads(last.read_text().splitlines()[-1])["@ids"] == {"orders": orders.topic("orders").id}


def test_sql_reads_by_a_temporary_view(spark: SparkSession, store: LogStore, path: str, append: Any) -> None:
    store.create_topic("orders", partitions=1)
    append("orders", [Record(b"k%d" % n, b"v%d" % n, BASE_MS + n) for n in range(5)])
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING duramen OPTIONS (store '{path}', subscribe 'orders')")
    found = spark.sql("SELECT cast(value AS string) FROM orders ORDER BY offset").collect()
    assert [row[0] for row in found] == [f"v{n}" for n in range(5)]


def test_the_path_of_load_is_the_store(spark: SparkSession, store: LogStore, path: str, append: Any) -> None:
    store.create_topic("orders", partitions=2)
    append("orders", [Record(b"k", b"v", BASE_MS)])
    reader = spark.read.format("duramen").option("subscribe", "orders").option("max_records_per_partition", 1)
    assert reader.load(path).count() == 1
