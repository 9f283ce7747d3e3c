"""The sink, against what `mapInArrow` reaches when it only consumes, Delta's append and Spark's own Kafka sink.

All of them get the same rows out of Parquet files. The sink's time ends when readers can see the
batch: staged files fsynced, committed and appended; its flush of the log comes later, Kafka's never.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from bench import spark as bench_spark
from bench.kafka import broker
from bench.result import Result
from logstore.commit.plan_folder import Staging
from logstore.store import LogStore
from streaming.flusher import flush_now
from streaming.sink import LogSink, committer_of

PARTITIONS = 4
STAGED, WITH_APPEND = 0.75, 0.65
TIMES_KAFKA, TIMES_DELTA = 2.5, 3.0


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    count, rounds, discarded = (500_000, 1, 1) if quick else (bench_spark.ROWS, 5, 2)
    store = folder / "sink-store"
    with LogStore(store, create=True) as opened:
        opened.create_topic("rows", partitions=PARTITIONS)
    table = str(folder / "sink-delta")
    with broker(folder / "sink") as node, bench_spark.session(folder, kafka=True, delta=True) as spark:
        node.create_topic("rows", PARTITIONS)
        rows = bench_spark.rows(spark, folder, count)
        sink = LogSink(store, "rows", app_id="bench")
        batch_ids = itertools.count()
        committer = committer_of(sink.store)

        left: list[Staging] = []

        def staged() -> None:
            left.append(Staging(committer.store))
            files = sink._encode(rows, left[-1], sink._targets(sink._opened().store, rows))
            if sum(file.records for file in files) != count:
                raise AssertionError("the staged files lack rows")

        def tidy() -> None:
            while left:
                left.pop().close()
            flush_now()

        kafka = rows.write.format("kafka").option("kafka.bootstrap.servers", node.bootstrap).option("topic", "rows")
        series = bench_spark.in_turns(
            [
                ("consume", lambda: bench_spark.consume(rows)),
                ("consume like the sink", lambda: bench_spark.consume_like_the_sink(rows)),
                ("staged", staged),
                ("sink", lambda: sink(rows, next(batch_ids))),
                ("delta", lambda: rows.write.format("delta").mode("append").save(table)),
                ("kafka", lambda: kafka.save()),
            ],
            rounds=rounds,
            discarded=discarded,
            folder=folder,
            between=tidy,
        )
    for name, ours, theirs, at_least in (
        ("rows to staged files; theirs only consumes", "staged", "consume", STAGED),
        ("rows to appended batches; theirs only consumes", "sink", "consume", WITH_APPEND),
        ("the same; theirs consumes the sink's way", "sink", "consume like the sink", None),
        ("sink; theirs is Spark's Kafka sink", "sink", "kafka", TIMES_KAFKA),
        ("sink; theirs is Delta append", "sink", "delta", TIMES_DELTA),
    ):
        yield bench_spark.compared("sink", name, count, series, ours, theirs, at_least)
