"""`writeStream.format("duramen")`: every row once, whatever Spark runs again, and errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.committer import Committer
from logstore.records.record import Record
from logstore.store import LogStore

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
Spark = Any
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def add_file(folder: Path, number: int, rows: int = 20) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"key": f"k{n % 5}", "value": f"{number}-{n:03d}", "more": n}) for n in range(rows)]
    path = folder / f"part-{number}.json"
    path.write_text("\n".join(lines))
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def expected(files: int, rows: int = 20) -> list[bytes]:
    return sorted(f"{number}-{n:03d}".encode() for number in range(files) for n in range(rows))


def values(read_all: ReadAll, store: LogStore) -> list[bytes]:
    return sorted(record.value or b"" for records in read_all(store, "orders").values() for record in records)


def run(spark: Spark, store: LogStore, root: Path, *, checkpoint: str = "checkpoint", **options: str) -> None:
    stream = spark.readStream.schema("key string, value string, more int").option("maxFilesPerTrigger", 1)
    query = (
        stream.json(str(root / "in"))
        .writeStream.format("duramen")
        .option("topic", "orders")
        .options(**options)
        .option("checkpointLocation", str(root / checkpoint))
        .trigger(availableNow=True)
        .start(store.path)
    )
    query.awaitTermination()


def test_every_row_once_also_when_spark_forgets_that_a_batch_is_done(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll
) -> None:
    for number in range(2):
        add_file(tmp_path / "in", number)
    run(spark, store, tmp_path, app_id="app")
    assert values(read_all, store) == expected(2)
    rows = Committer(store).ledger.commits_of_app("app", 10)
    assert [row.batch_id for row in rows] == [0, 1]
    assert len({row.query_id for row in rows}) == 1
    assert rows[0].query_id  # tasks know it
    for name in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    add_file(tmp_path / "in", 2)
    run(spark, store, tmp_path, app_id="app")
    assert values(read_all, store) == expected(3)
    assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == []
    # Another query under the same name, as after a lost checkpoint.
    with pytest.raises(Exception, match=r"ReplayMismatch.*was last written by query"):
        run(spark, store, tmp_path, checkpoint="other", app_id="app")
    assert values(read_all, store) == expected(3)


def test_a_stream_without_app_id_or_in_complete_mode_is_told_what_to_do(
    spark: Spark, store: LogStore, tmp_path: Path
) -> None:
    add_file(tmp_path / "in", 0)
    with pytest.raises(Exception, match="a stream needs the option app_id"):
        run(spark, store, tmp_path)
    stream = spark.readStream.schema("key string, value string").json(str(tmp_path / "in"))
    counts = stream.groupBy("key").count().selectExpr("key", "cast(count as string) as value")
    writer = counts.writeStream.format("duramen").outputMode("complete").options(topic="orders", app_id="counts")
    with pytest.raises(Exception, match="LogSink in foreachBatch"):
        writer.option("checkpointLocation", str(tmp_path / "counts")).trigger(availableNow=True).start(
            store.path
        ).awaitTermination()


def test_a_driver_killed_between_our_commit_and_sparks_repeats_nothing(
    store: LogStore, tmp_path: Path, read_all: ReadAll
) -> None:
    for number in range(3):
        add_file(tmp_path / "in", number)
    told = {"source": str(tmp_path / "in"), "checkpoint": str(tmp_path / "checkpoint"), "store": store.path}
    command = [sys.executable, str(HERE / "driver.py"), json.dumps(told | {"format": "duramen"})]
    usual = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    deadly = usual | {"PYTHONPATH": f"{HERE / 'deadly'}{os.pathsep}{ROOT}", "DEADLY_BATCH": "1"}
    killed = subprocess.run(command, env=deadly, capture_output=True, check=False, timeout=600)
    assert killed.returncode == -9, killed.stderr.decode()[-3000:]
    assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
    assert [row.batch_id for row in Committer(store).ledger.commits_of_app("app", 10)] == [0, 1]
    done = subprocess.run(command, env=usual, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert values(read_all, store) == expected(3)
    assert [row.batch_id for row in Committer(store).ledger.commits_of_app("app", 10)] == [0, 1, 2]
