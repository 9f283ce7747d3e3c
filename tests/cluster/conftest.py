"""A real Spark: a standalone master with two workers, and a Spark Connect server, both from the pyspark package.

Drivers are processes of their own (`driver.py`), so that settings such as spark.driver.memory are real. Each worker has
a loopback address of its own: Spark never puts a speculative attempt on the host of the first one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from logstore.store import LogStore
from ports import free_port

pyspark = pytest.importorskip("pyspark")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPARK_HOME = Path(pyspark.__file__).parent
WORKER_HOSTS = ("127.0.0.1", "127.0.0.2")
START_S = 120
DRIVER_S = 600


@dataclass(frozen=True)
class Cluster:
    url: str
    #: the Worker processes
    workers: tuple[int, ...]


def environment(scratch: Path) -> dict[str, str]:
    """What a Spark process of ours gets: nothing of the user's own Spark settings, all files in `scratch`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    (scratch / "conf").mkdir(parents=True, exist_ok=True)
    return kept | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_CONF_DIR": str(scratch / "conf"),
        "SPARK_LOCAL_DIRS": str(scratch / "local"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }


class Processes:
    """Started processes that end with the block, whatever happens in it, and what they started with them."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, name: str, command: list[str], host: Host | None = None, **env: str) -> tuple[int, Path]:
        log = self.scratch / f"{name}.log"
        given = (environment(self.scratch) if host is None else host.environment()) | env
        if host is not None:
            command = host.command(command)
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=given)
        self._running.append((process, log))
        return process.pid, log

    def wait_for(self, log: Path, pattern: str) -> re.Match[str]:
        """The first match in a log; fails when the process ends or takes too long."""
        process = next(process for process, path in self._running if path == log)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            found = re.search(pattern, log.read_text(errors="replace"))
            if found:
                return found
            if process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"{log.name} never said {pattern!r}:\n{log.read_text(errors='replace')[-4000:]}")

    def stop(self) -> None:
        family = {pid for process, _ in self._running for pid in descendants(process.pid)}
        for process, _ in reversed(self._running):
            process.terminate()
        for process, _ in reversed(self._running):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid, began in family:
            if started_at(pid) == began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def started_at(pid: int) -> str | None:
    """When a process began, by which it is told from a later one of the same number; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def descendants(pid: int) -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                began = started_at(child)
                if began is not None:
                    found.add((child, began))
                found |= descendants(child)
    return found


class Host:
    """A machine of its own as far as files and its name are concerned: one folder can be written.

    All hosts have theirs under one name, and what is written there no other one sees. Programs are read-only.
    """

    _ENTER = """
        set -e
        mount --bind "$1" "$2"
        mount -t tmpfs none "$3"
        mount -t tmpfs none /dev/shm
        mount -o remount,bind,ro /
        hostname "$4"
        mount --bind "$2/etc-hosts" /etc/hosts
        cd "$2"
        shift 4
        exec "$@"
    """

    def __init__(self, scratch: Path, name: str, env: Mapping[str, str]) -> None:
        self._all = scratch / "hosts"
        #: what the others do not see, and its name on the host itself
        self.folder, self.own = self._all / name, scratch / "own"
        self._env = dict(env)
        for each in (self.folder / "tmp", self.own):
            each.mkdir(parents=True, exist_ok=True)
        (self.folder / "etc-hosts").write_text(f"127.0.0.1 localhost {name}\n")

    def command(self, command: list[str]) -> list[str]:
        enter = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "--uts"]
        given = [str(self.folder), str(self.own), str(self._all), self.folder.name]
        return [*enter, "sh", "-c", self._ENTER, "sh", *given, *command]

    def environment(self) -> dict[str, str]:
        found = {
            name: value.replace(str(self.folder), str(self.own)) for name, value in environment(self.folder).items()
        }
        temporary = str(self.own / "tmp")
        return found | self._env | {"TMPDIR": temporary, "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={temporary}"}


def start_cluster(processes: Processes, hosts: Sequence[Host | None] = (None, None)) -> Cluster:
    """A master and two workers, each on a host of its own or all on this one."""
    spark_class = str(SPARK_HOME / "bin" / "spark-class")
    deploy = "org.apache.spark.deploy"
    address = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    _, log = processes.start("master", [spark_class, f"{deploy}.master.Master", *address])
    url = processes.wait_for(log, r"Starting Spark master at (spark://\S+)").group(1)
    workers = []
    for number, (ip, host) in enumerate(zip(WORKER_HOSTS, hosts, strict=True)):
        work = processes.scratch / f"work-{number}" if host is None else host.own / "work"
        resources = ["--cores", "1", "--memory", "1g", "--work-dir", str(work)]
        address = ["--host", ip, "--port", "0", "--webui-port", "0"]
        command = [spark_class, f"{deploy}.worker.Worker", *address, *resources, url]
        workers.append(processes.start(f"worker-{number}", command, host, SPARK_LOCAL_IP=ip))
    for _, log in workers:
        processes.wait_for(log, "Successfully registered with master")
    return Cluster(url, tuple(pid for pid, _ in workers))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    processes = Processes(tmp_path_factory.mktemp("cluster"))
    try:
        yield start_cluster(processes)
    finally:
        processes.stop()
        shutil.rmtree(processes.scratch, ignore_errors=True)


RunDriver = Callable[..., dict[str, Any]]


@pytest.fixture
def run_driver(cluster: Cluster, tmp_path: Path) -> Iterator[RunDriver]:
    """Runs one function of `driver.py` against the cluster; returns what it found. Nothing is left in `tmp_path`."""

    def run(scenario: str, conf: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
        task = {"scenario": scenario, "master": cluster.url, "conf": conf or {}, "given": given}
        return drive(tmp_path, task | {"folder": str(tmp_path), "workers": cluster.workers})

    yield run
    shutil.rmtree(tmp_path, ignore_errors=True)


def drive(scratch: Path, task: dict[str, Any], host: Host | None = None) -> dict[str, Any]:
    """Run a driver, on this host or on one of its own; what it reported in its folder."""
    task["report"] = f"{task['folder']}/report.json"
    command = [sys.executable, "-W", "ignore", str(HERE / "driver.py"), json.dumps(task)]
    log = scratch / "driver.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command if host is None else host.command(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment(scratch / "driver") if host is None else host.environment(),
        )
    try:
        code = process.wait(DRIVER_S)
    finally:
        family = descendants(process.pid)
        process.kill()
        process.wait()
        for pid, began in family:
            if started_at(pid) == began:
                os.kill(pid, signal.SIGKILL)
    assert code == 0, f"the driver ended with {code}:\n{log.read_text(errors='replace')[-8000:]}"
    report = Path(task["report"]) if host is None else host.folder / "report.json"
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    with LogStore(tmp_path / "store", create=True) as opened:
        opened.create_topic("orders", partitions=4)
        yield opened


@pytest.fixture(scope="session")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session of a Spark Connect server that runs in a process of its own."""
    from pyspark.sql import SparkSession

    scratch = tmp_path_factory.mktemp("connect")
    port = free_port()
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
    }
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command += [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")] + ["spark-internal"]
    processes = Processes(scratch)
    try:
        _, log = processes.start("server", command, SPARK_DAEMON_MEMORY="1g")  # by which its heap is counted
        processes.wait_for(log, "Spark Connect server started")
        session = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
        try:
            yield session
        finally:
            session.stop()
    finally:
        processes.stop()
        shutil.rmtree(scratch, ignore_errors=True)
