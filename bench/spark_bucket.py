"""A store in a bucket against one in a directory, Spark's Kafka sink and Kafka's cleaner; and both far away.

The server is versitygw on the loopback, on the same cores. Rows, partitions and settings are those of the parts `sink`,
`source`, `restore`, `latency` and `compaction`, all ways in turns.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench import compaction as bench_compaction
from bench import machine
from bench import spark as bench_spark
from bench.kafka import TimedKafka, broker
from bench.result import Result, median, rate
from bench.slow_proxy import slow_proxy
from bucket.servers import Server, versitygw
from logstore.bucket.keys import manifest_key
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.store import open_store
from streaming.flusher import flush_now
from streaming.options import SinkOptions
from streaming.restore import restore_state
from streaming.sink import LogSink
from streaming.source import DuramenSource

PARTITIONS = 4
OF_POSIX, TIMES_KAFKA, TIMES_CLEANER = 0.6, 1.5, 3.0
DELAY_MS = 30.0
SMALL_ROWS, SMALL_PARTITIONS, EXTRA_MS_MAX = 100, 8, 500.0
RESTORED_KEYS, TIMES_SLOWER_MAX = 1_000_000, 2.0


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    machine.take_all_cores()
    with versitygw(_made(folder / "server")) as server, _reached(server):
        # First, and on one core: the threads of the library that makes requests are on it from then on.
        yield _compaction(folder, server, 1_000_000 if quick else 10_000_000, 2 if quick else 6)
        machine.take_all_cores()
        count, rounds, discarded = (500_000, 1, 1) if quick else (bench_spark.ROWS, 5, 2)
        yield from _sink(folder, server, count, rounds, discarded)
        with bench_spark.session(folder) as spark, slow_proxy(urlsplit(server.endpoint).port or 0, DELAY_MS) as slow:
            yield from _source_and_restore(spark, folder, server, slow, (count, rounds, discarded))
            yield from _latency(spark, folder, server, slow, 5 if quick else 40)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _reached(server: Server) -> Iterator[None]:
    """The environment says how the bucket is reached, to executors as well."""
    given = {f"AWS_{name.upper()}": value for name, value in server.options.items()}
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _force(**more: Any) -> MaintenanceRules:
    return MaintenanceRules(seal=SealRules(force=True), sweep=False, **more)


# --- compaction -----------------------------------------------------------------------------------------------------


def _compaction(folder: Path, server: Server, count: int, rounds: int) -> Result:
    """A pass over a sealed partition, fetched and put back. The manifest of before is put back behind each round."""
    keys = count // 10
    local = folder / "source"
    bench_compaction._write(local, count, keys, "none")
    machine.take_one_core()
    store = BucketStore(server.url("compaction"), create=True)
    topic = store.create_topic("compacted", configs=bench_compaction.CONFIG)
    rng = np.random.default_rng(count + keys)
    is_used = np.zeros(keys, dtype=bool)
    for at in range(0, count, bench_compaction.ROWS):
        ids = rng.integers(0, keys, min(bench_compaction.ROWS, count - at))
        is_used[ids] = True
        store.append("compacted", bench_compaction._columns(rng, ids, False))
    sealed = maintain(store, _force(compact=False))
    assert not sealed.failed, sealed.failed
    manifest = manifest_key(topic.id, 0)
    before = store.objects.get(manifest)[0]
    ours: list[float] = []
    kafka: list[float] = []
    others: list[float] = []
    processor_s: list[tuple[float, float]] = []  # the server's are ours
    requests = 0
    with TimedKafka() as judge:
        for number in range(rounds):
            machine.fill_cache(folder)
            asked = store.requests.total()
            with machine.watching(*judge.processes) as watch:
                began, worked = time.perf_counter(), machine.family_s()
                done = maintain(store, _force(force_compaction=True))
                seconds = time.perf_counter() - began
                processor_ours = machine.family_s() - worked
                requests = store.requests.total() - asked
                machine.fill_cache(folder)
                worked = machine.family_s()
                theirs = judge.clean(
                    bench_compaction._copy(local, folder / "kafka-0"),
                    bench_compaction.CONFIG,
                    now_ms=bench_compaction.NOW_MS + 1000,
                    dedupe_buffer_bytes=bench_compaction.BUFFER_BYTES,
                    timeout_s=600,
                )
                processor_kafka = machine.family_s() - worked
            (done_run,) = done.compacted
            assert done_run.report is not None
            assert sum(done_run.report.removed.values()) == count - int(is_used.sum())
            store.objects.put(manifest, [before])
            if number:  # the first round warms both sides up
                ours.append(seconds)
                kafka.append(theirs.stats["nanos"] / 1e9)
                others.append(watch.others_cores)
                processor_s.append((round(processor_ours, 2), round(processor_kafka, 2)))
    for name in ("source", "kafka-0"):
        shutil.rmtree(folder / name, ignore_errors=True)
    ratio = median(kafka) / median(ours)
    return Result(
        part="bucket",
        name=f"compaction of {count / 1e6:g} M records, one core, fetched and put; theirs is Kafka's cleaner",
        ours=rate(count, median(ours)),
        theirs=rate(count, median(kafka)),
        ratio=ratio,
        target=f">= {TIMES_CLEANER:g}x",
        met=ratio >= TIMES_CLEANER,
        others_cores=median(others),
        detail={"seconds_ours": ours, "seconds_kafka": kafka, "processor_s": processor_s, "requests": requests},
    )


# --- the sink -------------------------------------------------------------------------------------------------------


def _stores(folder: Path, server: Server, name: str, partitions: int, **configs: object) -> tuple[str, str]:
    """A directory and a URL, each with a topic `rows`."""
    places = str(folder / f"{name}-store"), server.url(name)
    for place in places:
        with open_store(place, create=True) as store:
            store.create_topic("rows", partitions=partitions, configs=configs)
    return places


def _writes(sink: LogSink) -> Callable[[Any], None]:
    """Writes the rows it is given as the next micro-batch."""
    batch_ids = itertools.count()
    return lambda rows: sink(rows, next(batch_ids))


def _sink(folder: Path, server: Server, count: int, rounds: int, discarded: int) -> Iterator[Result]:
    directory, url = _stores(folder, server, "sink", PARTITIONS)
    with broker(_made(folder / "sink")) as node, bench_spark.session(folder, kafka=True) as spark:
        node.create_topic("rows", PARTITIONS)
        rows = bench_spark.rows(spark, folder, count)
        local, remote = (
            _writes(LogSink(directory, "rows", app_id="bench")),
            _writes(LogSink(url, "rows", app_id="bench")),
        )
        kafka = rows.write.format("kafka").option("kafka.bootstrap.servers", node.bootstrap).option("topic", "rows")
        series = bench_spark.in_turns(
            [
                ("directory", lambda: local(rows)),
                ("bucket", lambda: remote(rows)),
                ("kafka", lambda: kafka.save()),
            ],
            rounds=rounds,
            discarded=discarded,
            folder=folder,
            between=flush_now,
        )
    yield bench_spark.compared(
        "bucket", "sink; theirs is a store in a directory", count, series, "bucket", "directory", OF_POSIX
    )
    yield bench_spark.compared(
        "bucket", "sink; theirs is Spark's Kafka sink", count, series, "bucket", "kafka", TIMES_KAFKA
    )


# --- reading --------------------------------------------------------------------------------------------------------


def _source_and_restore(
    spark: Any, folder: Path, server: Server, slow: str, size: tuple[int, int, int]
) -> Iterator[Result]:
    count, rounds, discarded = size
    spark.dataSource.register(DuramenSource)
    directory, url = _stores(folder, server, "reads", PARTITIONS, **{"cleanup.policy": "compact"})
    rows = bench_spark.rows(spark, folder, count)
    for place in (directory, url):
        LogSink(place, "rows", app_id="bench")(rows, 0)
    flush_now()
    with BucketStore(url) as store:
        done = maintain(store, _force(compact=False))
        assert not done.failed, done.failed

    def read(place: str) -> Any:
        named = spark.read.format("duramen").schema("key binary, value binary, offset bigint")
        return named.option("store", place).option("subscribe", "rows").load()

    def restored(place: str) -> Any:
        return restore_state(spark, store=place, topic="rows").df

    def restored_here(endpoint: str) -> None:
        with BucketStore(url, storage_options={"endpoint": endpoint}) as store:
            assert sum(batch.num_rows for batch in store.restore("rows")) == keys

    keys = restored(url).count()
    assert keys == restored(directory).count()
    assert read(url).count() == count
    series = bench_spark.in_turns(
        [
            ("source of a directory", lambda: bench_spark.noop(read(directory))),
            ("source of a bucket", lambda: bench_spark.noop(read(url))),
            ("restore of a directory", lambda: bench_spark.noop(restored(directory))),
            ("restore of a bucket", lambda: bench_spark.noop(restored(url))),
            ("restore without Spark", lambda: restored_here(server.endpoint)),
            ("restore from far away", lambda: restored_here(slow)),
        ],
        rounds=rounds,
        discarded=discarded,
        folder=folder,
    )
    for what in ("source", "restore"):
        name = f"{what} of a sealed topic; theirs is a store in a directory"
        ours, theirs = f"{what} of a bucket", f"{what} of a directory"
        yield bench_spark.compared("bucket", name, count, series, ours, theirs, OF_POSIX)
    name = f"restore of {keys:,} keys without Spark, with {DELAY_MS:g} ms a request; theirs is without"
    far, near = "restore from far away", "restore without Spark"
    yield bench_spark.compared("bucket", name, count, series, far, near, 1 / TIMES_SLOWER_MAX)


def _latency(spark: Any, folder: Path, server: Server, slow: str, rounds: int) -> Iterator[Result]:
    directory, url = _stores(folder, server, "small", SMALL_PARTITIONS)
    _stores(folder, server, "small-far", SMALL_PARTITIONS)
    rows = bench_spark.rows(spark, folder, SMALL_ROWS)
    far = SinkOptions(storage_options={"endpoint": slow})
    sinks = {
        "directory": _writes(LogSink(directory, "rows", app_id="bench")),
        "bucket": _writes(LogSink(url, "rows", app_id="bench")),
        "far away": _writes(LogSink(f"{url}-far", "rows", app_id="bench", options=far)),
    }
    ways = [(name, partial(write, rows)) for name, write in sinks.items()]
    series = bench_spark.in_turns(
        [("consume", lambda: bench_spark.consume(rows)), *ways], rounds=rounds, discarded=5, folder=folder
    )
    consume_ms = series.median("consume") * 1000
    for name in sinks:
        extra_ms = series.median(name) * 1000 - consume_ms
        is_far = name == "far away"
        place = f"a bucket with {DELAY_MS:g} ms a request" if is_far else f"a {name}"
        yield Result(
            part="bucket",
            name=f"{SMALL_ROWS} rows into {SMALL_PARTITIONS} partitions of {place}; theirs only consumes",
            ours=f"{extra_ms + consume_ms:.0f} ms",
            theirs=f"{consume_ms:.0f} ms",
            ratio=None,
            target=f"< {EXTRA_MS_MAX:.0f} ms more" if is_far else "",
            met=extra_ms < EXTRA_MS_MAX if is_far else None,
            others_cores=max(series.others_cores),
            detail=series.detail() | {"extra_ms": extra_ms},
        )
