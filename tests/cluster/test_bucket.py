"""A store in a bucket on a cluster whose driver and executors share no directory: nothing but the bucket."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket.servers import Server, ministack
from cluster.conftest import Cluster, Host, Processes, drive, start_cluster


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


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Apart]:
    processes = Processes(tmp_path_factory.mktemp("apart"))
    try:
        yield Apart(processes, server)
    finally:
        processes.stop()
        shutil.rmtree(processes.scratch, ignore_errors=True)


def test_sink_source_and_restore_need_nothing_but_the_bucket(apart: Apart, server: Server) -> None:
    url = server.url("apart")
    from logstore.bucket.store import BucketStore

    BucketStore(url, create=True, storage_options=server.options)
    found = apart.run("in_a_bucket", url=url, count=600, batches=3)
    workers = sorted(apart.cluster.workers)
    assert {worker for worker, _ in found["seen"]} == set(workers), "both executors had a look"
    for worker, seen in found["seen"]:
        assert seen == [f"was-here-{worker}"], "an executor sees its own folder only"
    assert found["encoders"] == workers, "both executors put staged objects"
    assert 0 < found["keys"] < 23
    assert found["left"] < 100, "1,800 records of 23 keys were compacted"
    assert not list(Path(apart.driver.own).iterdir()), "nothing was written outside the hosts"
