"""The compaction job as a Spark application on a real cluster, with a driver too small for the data."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.conftest import ROOT, SPARK_HOME, Cluster, environment
from logstore.directory.checkpoint import read_offset_checkpoint
from logstore.ledger import Ledger
from logstore.segment.names import CLEANER_OFFSET_CHECKPOINT
from logstore.store import LogStore

GIB = 1 << 30
KEYS = 20_000
ROWS = 50_000
VALUE_BYTES = 1000


def fill(store: LogStore, size_bytes: int) -> dict[str, int]:
    """Random keys with large values until the topic has the size; returns the number of each key's last record."""
    rng = np.random.default_rng(3)
    last: dict[str, int] = {}
    written = number = 0
    while written < size_bytes:
        ids = rng.integers(0, KEYS, ROWS)
        keys = [f"key-{each:06d}" for each in ids.tolist()]
        values = np.full((ROWS, VALUE_BYTES), 46, dtype=np.uint8)
        marks = np.char.zfill(np.arange(number, number + ROWS).astype("S12"), 12)
        values[:, :12] = marks.view(np.uint8).reshape(ROWS, 12)
        table = pa.table(
            {
                "key": pa.array(keys, pa.string()).cast(pa.binary()),
                "value": pa.Array.from_buffers(
                    pa.binary(VALUE_BYTES), ROWS, [None, pa.py_buffer(values.tobytes())]
                ).cast(pa.binary()),
            }
        )
        store.append("large", table)
        last.update(zip(keys, range(number, number + ROWS), strict=True))
        number += ROWS
        written += ROWS * (VALUE_BYTES + 10)
    return last


def submission(cluster: Cluster, store: str, report: Path, **conf: str) -> list[str]:
    """The command of the compaction job."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "900m",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    } | {name.replace("_", "."): value for name, value in conf.items()}
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", cluster.url, "--driver-memory", "1g"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    return [*command, str(ROOT / "compaction_job" / "submit.py"), "--store", store, "--report", str(report)]


def submit(cluster: Cluster, folder: Path, *arguments: str, **conf: str) -> dict[str, Any]:
    report = folder / "report.json"
    command = [*submission(cluster, str(folder / "store"), report, **conf), *arguments]
    done = subprocess.run(command, env=environment(folder / "driver"), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_two_gigabytes_are_compacted_by_both_workers(cluster: Cluster, tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": 128 << 20, "file.delete.delay.ms": 0}
        store.create_topic("large", partitions=1, configs=configs)
        last = fill(store, 2 * GIB)
    began = time.monotonic()
    found = submit(cluster, tmp_path, "--roll-active", spark_driver_maxResultSize="1m")
    print(f"2 GiB compacted in {time.monotonic() - began:.1f} s, Spark's start included")
    (run,) = found["runs"]
    assert (found["engine"], run["result"]) == ("spark", "done")
    receipt = run["receipt"]
    assert receipt["before_bytes"] >= 2 * GIB
    assert receipt["records"] == len(last)
    assert receipt["removed"] == {"superseded": receipt["removed"]["superseded"]}
    assert len(receipt["workers"]) == 2, receipt["workers"]
    with LogStore(tmp_path / "store") as store:
        (row,) = [row for row in Ledger(store.layout.ledger).runs() if row.kind == "compaction"]
        assert (row.engine, row.result, list(row.workers)) == ("spark", "done", receipt["workers"])
        state = {
            (record.key or b"").decode(): int((record.value or b"")[:12])
            for record in store.reader(store.topic("large"), 0).records(0)
        }
    assert state == last


def test_many_partitions_and_an_application_run_twice(cluster: Cluster, tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        for name in ("a", "b"):
            store.create_topic(name, partitions=3, configs={"cleanup.policy": "compact", "segment.bytes": 20_000})
            for _ in range(5):
                rows = np.random.default_rng(1).integers(0, 50, 500)
                store.append(name, pa.table({"key": [b"%d" % each for each in rows], "value": [b"x" * 50] * 500}))
    found = submit(cluster, tmp_path, "--airflow-run-id", "manual__2026")
    assert {run["result"] for run in found["runs"]} == {"done"}
    assert len(found["runs"]) == 6
    with LogStore(tmp_path / "store") as store:
        rows = [row for row in Ledger(store.layout.ledger).runs() if row.kind == "compaction"]
        assert {row.airflow_run_id for row in rows} == {"manual__2026"}
        for name in ("a", "b"):
            keys = set()
            for number in range(3):
                keys |= {record.key for record in store.reader(store.topic(name), number).records(0)}
            assert len(keys) == 50
        states = {
            (name, number): store.partition_state(store.topic(name), number) for name in "ab" for number in range(3)
        }
        cleaned = read_offset_checkpoint(store.fs, f"{store.layout.logs}/{CLEANER_OFFSET_CHECKPOINT}")
        assert {(each.topic, each.partition): offset for each, offset in cleaned.items()} == {
            key: state.first_dirty_offset for key, state in states.items()
        }
        assert all(state.first_dirty_offset for state in states.values())
    again = submit(cluster, tmp_path, "--airflow-run-id", "manual__2026", "--force")
    assert {run["reason"] for run in again["runs"]} == {"done already under this Airflow run id"}
    assert {run["skip"] for run in again["runs"]} == {"done_before"}
