"""The source, against Spark's own Kafka source: the same rows in as many partitions, read into nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench import spark as bench_spark
from bench.kafka import broker
from bench.result import Result
from logstore.store.store import LogStore
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
        LogSink(store, "rows", "bench")(rows, 0)
        flush_now()
        ours = spark.read.format("duramen").option("store", str(store)).option("subscribe", "rows").load()
        kafka = spark.read.format("kafka").option(*servers).option("subscribe", "rows").load()
        for each in (ours, kafka):
            if each.count() != count:
                raise AssertionError("a source lacks rows")
        columns = ("key", "value", "offset")
        series = bench_spark.in_turns(
            [
                ("source", lambda: bench_spark.noop(ours.select(*columns))),
                ("kafka", lambda: bench_spark.noop(kafka.select(*columns))),
                ("source, all columns", lambda: bench_spark.noop(ours)),
                ("kafka, all columns", lambda: bench_spark.noop(kafka)),
            ],
            rounds=rounds,
            discarded=discarded,
            folder=folder,
        )
    for suffix in ("", ", all columns"):
        name = f"{suffix.strip(', ') or ', '.join(columns)}; theirs is Spark's Kafka source"
        yield bench_spark.compared("source", name, count, series, f"source{suffix}", f"kafka{suffix}", TIMES_KAFKA)
