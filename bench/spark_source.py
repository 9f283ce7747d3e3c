"""The source, against Spark's own Kafka source: the same rows in as many partitions, read into nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench import spark as bench_spark
from bench.kafka import broker
from bench.result import Result
from logstore.store import LogStore
from streaming.flusher import flush_now
from streaming.sink import LogSink
from streaming.source import DuramenSource

PARTITIONS = 4
TIMES_KAFKA = 4.0


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    count, rounds, discarded = (500_000, 1, 1) if quick else (bench_spark.ROWS, 3, 2)
    store = folder / "source-store"
    with LogStore(store, create=True) as opened:
        opened.create_topic("rows", partitions=PARTITIONS)
    with broker(folder / "source") as node, bench_spark.session(folder, kafka=True) as spark:
        spark.dataSource.register(DuramenSource)
        node.create_topic("rows", PARTITIONS)
        rows = bench_spark.rows(spark, folder, count)
        servers = ("kafka.bootstrap.servers", node.bootstrap)
        rows.write.format("kafka").option(*servers).option("topic", "rows").save()
        LogSink(store, "rows", app_id="bench")(rows, 0)
        flush_now()
        reader = spark.read.format("duramen").option("store", str(store)).option("subscribe", "rows")
        ours = reader.load()
        kafka = spark.read.format("kafka").option(*servers).option("subscribe", "rows").load()
        for each in (ours, kafka):
            if each.count() != count:
                raise AssertionError("a source lacks rows")
        columns = ("key", "value", "offset")
        named = reader.schema("key binary, value binary, offset bigint").load()
        series = bench_spark.in_turns(
            [
                ("named", lambda: bench_spark.noop(named)),
                ("selected", lambda: bench_spark.noop(ours.select(*columns))),
                ("all", lambda: bench_spark.noop(ours)),
                ("kafka", lambda: bench_spark.noop(kafka.select(*columns))),
                ("kafka, all", lambda: bench_spark.noop(kafka)),
            ],
            rounds=rounds,
            discarded=discarded,
            folder=folder,
        )
    for name, our_way, their_way in (
        (f"{', '.join(columns)}, named in the schema", "named", "kafka"),
        (f"{', '.join(columns)}, selected", "selected", "kafka"),
        ("all columns", "all", "kafka, all"),
    ):
        full = f"{name}; theirs is Spark's Kafka source"
        yield bench_spark.compared("source", full, count, series, our_way, their_way, TIMES_KAFKA)
