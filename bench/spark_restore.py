"""Restoring the latest value of a million keys, against `max_by(value, offset)` over Kafka and over a Delta table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import spark as bench_spark
from bench.kafka import broker
from bench.result import Result
from logstore.store import LogStore
from streaming.flusher import flush_now
from streaming.restore import restore_state
from streaming.sink import LogSink

PARTITIONS = 4
TIMES_OTHERS = 10.0


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    from pyspark.sql import functions as f

    count, rounds, discarded = (500_000, 1, 1) if quick else (bench_spark.ROWS, 3, 2)
    store = folder / "restore-store"
    with LogStore(store, create=True) as opened:
        opened.create_topic("rows", partitions=PARTITIONS)
    table = str(folder / "restore-delta")
    with broker(folder / "restore") as node, bench_spark.session(folder, kafka=True, delta=True) as spark:
        node.create_topic("rows", PARTITIONS)
        rows = bench_spark.rows(spark, folder, count)
        servers = ("kafka.bootstrap.servers", node.bootstrap)
        rows.write.format("kafka").option(*servers).option("topic", "rows").save()
        LogSink(store, "rows", app_id="bench")(rows, 0)
        flush_now()
        rows.withColumn("offset", f.monotonically_increasing_id()).write.format("delta").save(table)
        kafka = spark.read.format("kafka").option(*servers).option("subscribe", "rows").load()
        delta = spark.read.format("delta").load(table)

        def latest(changes: Any) -> Any:
            return changes.groupBy("key").agg(f.max_by("value", "offset").alias("value"))

        def restored() -> Any:
            return restore_state(spark, store=store, topic="rows").df

        keys = restored().count()
        if latest(delta).count() != keys:
            raise AssertionError("the two do not restore the same number of keys")
        series = bench_spark.in_turns(
            [
                ("restore", lambda: bench_spark.noop(restored())),
                ("kafka", lambda: bench_spark.noop(latest(kafka))),
                ("delta", lambda: bench_spark.noop(latest(delta))),
            ],
            rounds=rounds,
            discarded=discarded,
            folder=folder,
        )
    for name, theirs in (("Spark's Kafka source with max_by", "kafka"), ("max_by over a Delta table", "delta")):
        what = f"latest of {keys:,} keys; theirs is {name}"
        yield bench_spark.compared("restore", what, count, series, "restore", theirs, TIMES_OTHERS)
