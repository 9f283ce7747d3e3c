"""Micro-batches that Spark runs again: no record twice, none missing, whatever changed or died in between.

`Rows` is the oracle: every value it puts into a source folder must be in the topic exactly once, in order by key.
`DURAMEN_SOAK=1` asks for twenty rounds instead of three.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.records.record import Record
from logstore.store.committer import Committer
from logstore.store.store import LogStore
from streaming.sink import LogSink

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
Spark = Any
ROOT = Path(__file__).parents[2]
ROUNDS = 20 if os.environ.get("DURAMEN_SOAK") == "1" else 3
STEPS = ("staged", "planned", "committed", "appending", "appended", "published")


class Rows:
    """A source folder, and what was put into it."""

    def __init__(self, folder: Path, name: str, rng: random.Random) -> None:
        self.folder = folder
        self.name = name
        self.rng = rng
        self.files = 0
        self.values: list[str] = []
        folder.mkdir()

    def add(self) -> None:
        values = [f"{self.name}-{self.files:03d}-{n:04d}" for n in range(self.rng.randrange(1, 60))]
        lines = [json.dumps({"key": f"k{self.rng.randrange(6)}", "value": value}) for value in values]
        draft = self.folder / f".{self.files}"
        draft.write_text("\n".join(lines))
        os.utime(draft, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
        draft.rename(self.folder / f"{self.files:05d}.json")
        self.files += 1
        self.values += values


def start(spark: Spark, rows: Rows, checkpoint: Path, write: Callable[[Any, int], None]) -> Any:
    stream = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 1).json(str(rows.folder))
    return (
        stream.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def run(spark: Spark, rows: Rows, checkpoint: Path, write: Callable[[Any, int], None]) -> Any:
    query = start(spark, rows, checkpoint, write)
    assert query.awaitTermination(110)
    return query


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had died before Spark noted the end of its last batch."""
    last = max((path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def check(store: LogStore, read_all: ReadAll, *given: Rows) -> None:
    found = read_all(store, "orders")
    values = [record.value.decode() for records in found.values() for record in records if record.value]
    assert Counter(values) == Counter(value for rows in given for value in rows.values)
    for records in found.values():
        assert [record.offset for record in records] == list(range(len(records)))
        for rows in given:
            for key in {record.key for record in records}:
                mine = [r.value for r in records if r.key == key and (r.value or b"").startswith(rows.name.encode())]
                assert mine == sorted(mine)


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_a_batch_run_again_is_recognised(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, adaptive: str, seed: int
) -> None:
    """Also with another number of partitions each time, so that tasks and files are others than the first time."""
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    log_sink = LogSink(store.path, "orders", "app")
    spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        rows.add()
        run(spark, rows, checkpoint, log_sink)
        for round_number in range(ROUNDS):
            forget_last_commit(checkpoint)
            rows.add()
            partitions = rng.randrange(1, 5)
            run(spark, rows, checkpoint, lambda df, batch_id, n=partitions: log_sink(df.coalesce(n), batch_id))
            check(store, read_all, rows)
            assert len(Committer(store).ledger.commits()) == round_number + 2
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")


def test_a_shuffled_batch_run_again_with_other_partitions_is_recognised(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    """After a shuffle rows have no order between keys, but each key keeps its own."""
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    log_sink = LogSink(store.path, "orders", "app")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        rows.add()
        for _ in range(ROUNDS):
            partitions = rng.randrange(1, 6)

            def write(df: Any, batch_id: int, partitions: int = partitions) -> None:
                log_sink(df.repartition(partitions, "key").sortWithinPartitions("value"), batch_id)

            run(spark, rows, checkpoint, write)
            forget_last_commit(checkpoint)
            rows.add()
        run(spark, rows, checkpoint, log_sink)
        check(store, read_all, rows)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")


def test_two_queries_take_turns_on_one_topic(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    both = [Rows(tmp_path / name, name, rng) for name in ("a", "b")]
    for _ in range(ROUNDS):
        for rows in both:
            checkpoint = tmp_path / f"checkpoint-{rows.name}"
            rows.add()
            run(spark, rows, checkpoint, LogSink(store.path, "orders", f"app-{rows.name}"))
            forget_last_commit(checkpoint)
    for rows in both:
        run(spark, rows, tmp_path / f"checkpoint-{rows.name}", LogSink(store.path, "orders", f"app-{rows.name}"))
    check(store, read_all, *both)


def test_two_queries_under_one_app_id_one_stops_and_names_the_other(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    from pyspark.errors import StreamingQueryException

    rng = random.Random(seed)
    first, second = (Rows(tmp_path / name, name, rng) for name in ("a", "b"))
    for rows in (first, second):
        for _ in range(2):
            rows.add()
    winner = run(spark, first, tmp_path / "one", LogSink(store.path, "orders", "app"))
    for _ in range(2):
        loser = start(spark, second, tmp_path / "two", LogSink(store.path, "orders", "app"))
        with pytest.raises(StreamingQueryException) as caught:
            loser.awaitTermination(110)
        assert str(winner.id) in str(caught.value)
        assert str(loser.id) in str(caught.value)
        assert "adopt=True" in str(caught.value)
        check(store, read_all, first)
    first.add()
    run(spark, first, tmp_path / "one", LogSink(store.path, "orders", "app"))
    run(spark, second, tmp_path / "two", LogSink(store.path, "orders", "another app"))
    check(store, read_all, first, second)


# --- the driver killed ----------------------------------------------------------------------------------------------

_DRIVER = """
import os, signal, sys
step, store, source, checkpoint = sys.argv[1:]
from logstore.store import committer as module
from logstore.store.committer import Committer

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    def run(*given, **named):
        die()
    setattr(owner, name, run)

def after(owner, name):
    work = getattr(owner, name)
    def run(*given, **named):
        work(*given, **named)
        die()
    setattr(owner, name, run)

if step == "staged":
    before(Committer, "commit")
elif step == "planned":
    after(module, "write_plan")
elif step == "committed":
    after(Committer, "_decide")
elif step == "appending":
    import logstore.store.apply as apply
    after(apply, "apply_partition")
elif step == "appended":
    before(Committer, "_publish")
elif step == "published":
    after(Committer, "_publish")

from pyspark.sql import SparkSession
from streaming import LogSink
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
stream = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 1).json(source)
query = (stream.writeStream.foreachBatch(LogSink(store, "orders", "app")).option("checkpointLocation", checkpoint)
    .trigger(availableNow=True).start())
query.awaitTermination()
"""


@pytest.mark.timeout(900)
def test_a_driver_killed_at_each_step_loses_and_doubles_nothing(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    rows.add()
    run(spark, rows, checkpoint, LogSink(store.path, "orders", "app"))
    steps = list(STEPS) if ROUNDS > 3 else rng.sample(STEPS, 3)
    began = time.monotonic()
    for step in steps:
        rows.add()
        before = len(Committer(store).ledger.commits())
        command = [sys.executable, "-c", _DRIVER, step, store.path, str(rows.folder), str(checkpoint)]
        driver = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
        )
        assert driver.wait(400) == -signal.SIGKILL, step
        assert len(Committer(store).ledger.commits()) == before + (step not in ("staged", "planned")), step
        rows.add()
        run(spark, rows, checkpoint, LogSink(store.path, "orders", "app"))  # the restart
        check(store, read_all, rows)
        assert time.monotonic() - began < 800
