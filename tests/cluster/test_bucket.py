"""A store in a bucket on a cluster whose driver and executors share no directory: nothing but the bucket."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bucket.servers import Server, ministack
from cluster.conftest import Cluster, Host, Processes, drive, start_cluster
from cluster.test_compaction import submission
from logstore.bucket.store import BucketStore
from logstore.records.native import kernels


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ministack(tmp_path_factory.mktemp("s3")) as started:
        yield started


class Apart:
    """A cluster of hosts, and the one where drivers run."""

    def __init__(self, processes: Processes, server: Server) -> None:
        # Each host has its credentials in its environment, as a role would give them.
        env = {f"AWS_{name.upper()}": value for name, value in server.options.items()}
        self._scratch = processes.scratch
        self.driver, *workers = (Host(processes.scratch, name, env) for name in ("driver", "first", "second"))
        self.cluster: Cluster = start_cluster(processes, workers)

    def run(self, scenario: str, **given: Any) -> dict[str, Any]:
        task = {"scenario": scenario, "master": self.cluster.url, "conf": {}, "given": given}
        return drive(self._scratch, task | {"folder": str(self.driver.own)}, self.driver)

    def compact(self, url: str, *arguments: str) -> dict[str, Any]:
        """What the compaction job reports, submitted on the driver's host."""
        command = [*submission(self.cluster, url, self.driver.own / "compaction.json"), *arguments]
        done = subprocess.run(
            self.driver.command(command), env=self.driver.environment(), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, Any] = json.loads((self.driver.folder / "compaction.json").read_text())
        return found


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Apart]:
    kernels()  # a host cannot write to the cache
    processes = Processes(tmp_path_factory.mktemp("apart"))
    try:
        yield Apart(processes, server)
    finally:
        processes.stop()
        shutil.rmtree(processes.scratch, ignore_errors=True)


def test_sink_source_and_restore_need_nothing_but_the_bucket(apart: Apart, server: Server) -> None:
    url = server.url("apart")
    BucketStore(url, create=True, storage_options=server.options)
    found = apart.run("in_a_bucket", url=url, count=600, batches=3)
    workers = sorted(apart.cluster.workers)
    assert {worker for worker, _ in found["seen"]} == set(workers), "both executors had a look"
    for worker, seen in found["seen"]:
        assert seen == [f"was-here-{worker}"], "an executor sees its own folder only"
    assert found["encoders"] == workers, "both executors put staged objects"
    assert 0 < found["keys"] < 23
    assert found["removed"] > 1500, "1,800 records of 23 keys were compacted"
    assert not list(Path(apart.driver.own).iterdir()), "nothing was written outside the hosts"


def test_receipts_of_a_compaction_name_both_executors(apart: Apart, server: Server) -> None:
    url = server.url("compacted")
    state: dict[tuple[int, bytes], bytes] = {}
    with BucketStore(url, create=True, storage_options=server.options) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": 100_000}
        topic = store.create_topic("orders", partitions=6, configs=configs)
        for batch in range(6):
            rows = [(number % 6, b"%d" % (number % 97), b"%d-%d" % (batch, number)) for number in range(3000)]
            columns = {"partition": pa.array([row[0] for row in rows], pa.int32())}
            store.append(
                "orders", pa.table({"key": [row[1] for row in rows], "value": [row[2] for row in rows]} | columns)
            )
            state |= {(partition, key): value for partition, key, value in rows}
        found = apart.compact(url, "--force", "--roll-active")
        assert found["engine"] == "spark"
        assert [run["result"] for run in found["runs"]] == ["done"] * 6
        names = {name for run in found["runs"] for name in run["receipt"]["workers"]}
        assert {name.split(":")[0] for name in names} == {"first", "second"}, "both executors had passes"
        left = {
            (number, record.key): record.value
            for number in range(6)
            for record in store.reader(topic, number).records(0)
        }
        assert left == state
