"""One tree's side of `bench.against`: reads names of work, does it, answers with its seconds and its processor seconds.

Started by path, with the measured tree in front of the path, so it may use only what every version has: it tries the
present way to call something first, then those of earlier versions.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from machine import family_s

sys.path.pop(0)  # this file's own folder, which has `machine`


class Clock:
    """Seconds since it was made, and processor seconds of this process, Spark and its Python workers."""

    def __init__(self) -> None:
        self._worked, self._began = family_s(), time.perf_counter()

    def took(self) -> tuple[float, float]:
        return time.perf_counter() - self._began, family_s() - self._worked


def first(name: str, *modules: str) -> Any:
    """The name out of the first of the modules that this version has."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"no module of this version has {name}")


LogStore = first("LogStore", "logstore.store", "logstore.store.store")
to_arrow = first("to_arrow", "logstore.records.arrow")
Record = first("Record", "logstore.records.record")
compact = first("compact", "compaction_job.job", "compaction_job.compact")
plan_restore = first("plan_restore", "logstore.restore.restore", "logstore.store.restore")
restore = first("restore", "logstore.restore.restore", "logstore.store.restore")

ROWS, KEYS, BATCHES, SMALL = 1_000_000, 300_000, 10, 20
SPARK_ROWS = 2_000_000
COMPACTED: dict[str, Any] = {"cleanup.policy": "compact", "segment.bytes": 16 << 20}


def table(seed: int, rows: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    keys = np.char.zfill(rng.integers(0, KEYS, rows).astype("S10"), 10)
    values = rng.integers(65, 91, (rows, 100), dtype=np.uint8).view("S100").reshape(rows)
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


class Work:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts = [table(seed, ROWS // BATCHES) for seed in range(BATCHES)]
        self.numbers = itertools.count()
        self._spark: Any = None
        self._filled: Path | None = None

    def store(self, partitions: int = 1, **configs: object) -> Any:
        store = LogStore(self.folder / f"store-{next(self.numbers)}", create=True)
        store.create_topic("rows", partitions=partitions, configs=configs)
        return store

    def filled(self) -> Path:
        """A store with all rows, flushed; made once."""
        if self._filled is None:
            with self.store(**COMPACTED) as store:
                for part in self.parts:
                    store.append("rows", part)
                self._filled = Path(store.path)
        return self._filled

    def copy(self) -> Path:
        return Path(shutil.copytree(self.filled(), self.folder / f"copy-{next(self.numbers)}"))

    def append(self) -> tuple[float, float]:
        with self.store() as store:
            clock = Clock()
            for part in self.parts:
                store.append("rows", part)
            return clock.took()

    def small_appends(self) -> tuple[float, float]:
        with self.store() as store:
            store.append("rows", [Record(b"k", b"v")])
            clock = Clock()
            for _ in range(SMALL):
                store.append("rows", [Record(b"k", b"v" * 100)])
            return clock.took()

    def read(self) -> tuple[float, float]:
        with LogStore(self.filled()) as store:
            clock = Clock()
            reader = store.reader(store.topic("rows"), 0)
            assert sum(to_arrow(chunk).num_rows for chunk in reader.columns(0)) == ROWS
            return clock.took()

    def compact(self) -> tuple[float, float]:
        with LogStore(self.copy()) as store:
            clock = Clock()
            report = compact(store=store, force=True, roll_active=True, retention=False, threads=2)
            assert not report.failed
            return clock.took()

    def restore(self) -> tuple[float, float]:
        with LogStore(self.filled()) as store:
            clock = Clock()
            assert sum(batch.num_rows for batch in restore(store, plan_restore(store, "rows"))) <= KEYS
            return clock.took()

    # --- Spark ---------------------------------------------------------------------------------------------------

    def spark(self) -> Any:
        if self._spark is None:
            from pyspark.sql import SparkSession

            os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            settings = {
                "spark.ui.enabled": "false",
                "spark.driver.memory": "2g",
                "spark.sql.shuffle.partitions": "4",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.local.dir": str(self.folder / "spark"),
            }
            builder = SparkSession.builder.master("local[2]")
            for name, value in settings.items():
                builder = builder.config(name, value)
            self._spark = builder.getOrCreate()
            self._spark.sparkContext.setLogLevel("ERROR")
        return self._spark

    def rows(self) -> Any:
        path = self.folder / "rows.parquet"
        if not path.exists():
            import pyarrow.parquet as pq

            path.mkdir()
            for number in range(4):
                part = table(100 + number, SPARK_ROWS // 4)
                pq.write_table(part, path / f"{number}.parquet", compression="none")
        return self.spark().read.parquet(str(path))

    def _sink(self, rows: Any, times: int) -> tuple[float, float]:
        from streaming.sink import LogSink

        with self.store(partitions=4) as store:
            path = store.path
        sink = LogSink(store=path, topic="rows", app_id="bench")
        sink(rows.limit(10), 0)
        clock = Clock()
        for number in range(times):
            sink(rows, number + 1)
        return clock.took()

    def sink(self) -> tuple[float, float]:
        return self._sink(self.rows(), 1)

    def small_sink(self) -> tuple[float, float]:
        return self._sink(self.spark().range(100).selectExpr("cast(id as string) key", "'paid' value"), 10)

    def source(self) -> tuple[float, float]:
        rows = (
            self.spark().read.format("duramen").option("store", str(self.filled())).option("subscribe", "rows").load()
        )
        clock = Clock()
        rows.select("key", "value", "offset").write.format("noop").mode("overwrite").save()
        return clock.took()

    def restore_state(self) -> tuple[float, float]:
        from streaming.restore import restore_state

        clock = Clock()
        state: Any = restore_state(self.spark(), store=str(self.filled()), topic="rows")
        getattr(state, "df", state).write.format("noop").mode("overwrite").save()
        return clock.took()

    def spark_compact(self) -> tuple[float, float]:
        with LogStore(self.copy()) as store:
            clock = Clock()
            report = compact(store=store, spark=self.spark(), force=True, roll_active=True, retention=False)
            assert not report.failed, [run.reason for run in report.failed]
            return clock.took()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    work = Work(Path(sys.argv[1]))
    todo: dict[str, Callable[[], tuple[float, float]]] = {
        name.replace("_", " "): method
        for name, method in inspect.getmembers(work, inspect.ismethod)
        if not name.startswith("_")
    }
    todo["restore_state"] = work.restore_state
    for line in sys.stdin:
        print(json.dumps(todo[line.strip()]()), file=answers, flush=True)
        for left in [*work.folder.glob("store-*"), *work.folder.glob("copy-*")]:
            if left != work._filled:
                shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    main()
