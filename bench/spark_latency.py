"""What a small micro-batch costs: the `foreachBatch` call, less one that only runs the same rows into Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from bench import spark as bench_spark
from bench.result import Result
from logstore.store import LogStore
from streaming.sink import LogSink

ROWS, PARTITIONS = 100, 8
EXTRA_MS_MAX = 150.0


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    rounds, discarded = (5, 2) if quick else (50, 5)
    store = folder / "latency-store"
    with LogStore(store, create=True) as opened:
        opened.create_topic("rows", partitions=PARTITIONS)
    with bench_spark.session(folder) as spark:
        rows = bench_spark.rows(spark, folder, ROWS)
        sink = LogSink(store, "rows", app_id="bench")
        batch_ids = itertools.count()
        series = bench_spark.in_turns(
            [("consume", lambda: bench_spark.consume(rows)), ("sink", lambda: sink(rows, next(batch_ids)))],
            rounds=rounds,
            discarded=discarded,
            folder=folder,
        )
    consume_ms, sink_ms = (series.median(name) * 1000 for name in ("consume", "sink"))
    extra_ms = sink_ms - consume_ms
    yield Result(
        part="latency",
        name=f"{ROWS} rows into {PARTITIONS} partitions; theirs only consumes",
        ours=f"{sink_ms:.0f} ms",
        theirs=f"{consume_ms:.0f} ms",
        ratio=None,
        target=f"< {EXTRA_MS_MAX:.0f} ms more",
        met=extra_ms < EXTRA_MS_MAX,
        others_cores=max(series.others_cores),
        detail=series.detail() | {"extra_ms": extra_ms},
    )
