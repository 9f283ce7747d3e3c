"""On a cluster of two workers: results are right, executors may die or be overtaken, no row meets the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logstore.commit.committer import Committer
from logstore.store import LogStore

RunDriver = Callable[..., dict[str, Any]]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
#: rows of 1000 bytes; more than the driver appends by itself
COUNT = 24_000
#: many small Arrow batches, so that a fault is in the middle of a task
SMALL_BATCHES = {"spark.sql.execution.arrow.maxRecordsPerBatch": "500"}

#: `fault()` in the middle of the first append of all executors, with half of a partition written
APPEND_FAULT = """
import os, signal, time
from logstore.partition.appender import Appender
from pyspark import TaskContext

append = Appender.append

def first_time():
    try:
        file = os.open({marker!r}, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(file, str(TaskContext.get().stageId()).encode())
    os.close(file)
    return True

def kill_executor():
    with open(f"/proc/{{os.getppid()}}/stat") as daemon:
        os.kill(int(daemon.read().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

def disturbed(self, chunks):
    def faulty():
        for number, chunk in enumerate(chunks):
            if number == 3 and first_time():
                {fault}
            yield chunk
    append(self, faulty())

Appender.append = disturbed
"""


def fault_in_append(folder: Path, fault: str) -> dict[str, str]:
    """Settings with which executors run `fault` once in an append. The product knows nothing of it."""
    site = folder / "site"
    site.mkdir()
    marker = str(folder / "append-disturbed")
    (site / "sitecustomize.py").write_text(APPEND_FAULT.format(marker=marker, fault=fault))
    return {"spark.executorEnv.PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def events(folder: Path) -> list[dict[str, Any]]:
    [log] = (folder / "events").iterdir()
    return [json.loads(line) for line in log.read_text().splitlines()]


def failures(folder: Path) -> list[str]:
    """Why tasks ended that did not succeed."""
    reasons = [event["Task End Reason"]["Reason"] for event in events(folder) if event["Event"].endswith("TaskEnd")]
    return [reason for reason in reasons if reason != "Success"]


def speculative_stages(folder: Path) -> set[int]:
    started = [event for event in events(folder) if event["Event"] == "SparkListenerTaskStart"]
    return {event["Stage ID"] for event in started if event["Task Info"]["Speculative"]}


def assert_sound(store: LogStore) -> None:
    """`duramen verify` finds nothing, and nothing staged is left behind."""
    command = [sys.executable, "-m", "duramen", "--store", store.path, "verify"]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert os.listdir(store.layout.staging) == []


def test_what_a_stream_writes_is_read_and_restored(run_driver: RunDriver, store: LogStore) -> None:
    store.create_topic("copy", partitions=4)
    found = run_driver("write_read_restore", files=6, rows=200)
    assert found["rows"] == 1200
    assert 0 < found["keys"] < 46
    rows = Committer(store).ledger.commits()
    assert [(row.app_id, row.batch_id, row.records) for row in rows if row.app_id] == [
        ("app", n, 400) for n in range(3)
    ]
    assert [(row.topic, row.records) for row in rows if not row.app_id] == [("copy", 1200)]
    assert_sound(store)


def test_an_executor_killed_in_the_encode_costs_nothing(run_driver: RunDriver, store: LogStore, tmp_path: Path) -> None:
    found = run_driver("executor_killed_in_encode", SMALL_BATCHES, count=COUNT)
    assert found["killed"]
    assert "ExecutorLostFailure" in failures(tmp_path)
    rows = Committer(store).ledger.commits()
    assert [(row.batch_id, row.records) for row in rows] == [(0, COUNT), (1, COUNT)]
    assert_sound(store)


def test_an_executor_killed_in_the_append_costs_nothing(run_driver: RunDriver, store: LogStore, tmp_path: Path) -> None:
    conf = fault_in_append(tmp_path, "kill_executor()")
    run_driver("written", conf, count=COUNT)
    assert (tmp_path / "append-disturbed").exists()
    assert "ExecutorLostFailure" in failures(tmp_path)
    rows = Committer(store).ledger.commits()
    assert [(row.batch_id, row.records) for row in rows] == [(0, COUNT), (1, COUNT)]
    assert_sound(store)


def test_speculative_attempts_of_the_encode_and_the_append_double_nothing(
    run_driver: RunDriver, store: LogStore, tmp_path: Path
) -> None:
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "200ms",
    }
    conf = fault_in_append(tmp_path, "time.sleep(8)")  # with the partition's lock held: its twin must wait
    run_driver("speculated", SMALL_BATCHES | speculation | conf, count=COUNT)
    encode, append = (int((tmp_path / name).read_text()) for name in ("slept", "append-disturbed"))
    assert encode != append
    assert {encode, append} <= speculative_stages(tmp_path)
    [row] = Committer(store).ledger.commits()
    assert row.records == COUNT
    assert_sound(store)


def test_two_gigabytes_pass_a_small_driver_by(run_driver: RunDriver, store: LogStore, cluster: Any) -> None:
    """No row goes through the driver: it may hold 1 GiB, and all results of a job together 1 MiB."""
    conf = {"spark.driver.maxResultSize": "1m", "spark.driver.memory": "1g"}
    found = run_driver("large", conf, count=2_150_000)
    assert found["bytes"] >= 2 * GIB
    assert found["heap_bytes"] <= GIB
    assert found["workers"] == sorted(cluster.workers)
    print(f"{found['bytes']} bytes in {found['seconds']:.1f} s by {found['names']}")
    assert_sound(store)
