"""`duramen schedule`: what it refuses, signals in the middle of a run, others at work on the same store."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compaction_job import compact
from compaction_job.job import Report
from logstore.commit.produce import table_of
from logstore.ledger import Ledger, RunRow
from logstore.records.record import Record
from logstore.store import LogStore
from ports import free_port

Command = Callable[..., Any]
#: a pass over a partition takes about half a minute with this
SLOW = "log.cleaner.io.max.bytes.per.second = 1500.0"


@pytest.fixture
def accounts(store_path: Path) -> Path:
    """Compacted topic `accounts`, three partitions of about 15 kB: each key written ten times."""
    with LogStore(store_path, create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": 4000, "min.cleanable.dirty.ratio": 0.1}
        store.create_topic("accounts", partitions=3, configs=configs)
        now_ms = int(time.time() * 1000)
        for turn in range(10):
            rows = [(b"key-%d" % at, b"value-%d-%d" % (turn, at) * 4) for at in range(90)]
            store.append("accounts", table_of([Record(key, value, now_ms) for key, value in rows]))
    return store_path


def settings(store_path: Path, *lines: str) -> None:
    text = ["log.initial.task.delay.ms = 0", "log.cleaner.backoff.ms = 1000", *lines]
    (store_path / "duramen.toml").write_text("\n".join(text) + "\n")


def values(store_path: Path) -> dict[bytes | None, bytes | None]:
    found = {}
    with LogStore(store_path) as store:
        topic = store.topic("accounts")
        for number in range(topic.partitions):
            for record in store.reader(topic, number).records(0):
                found[record.key] = record.value
    return found


def runs_of(store_path: Path) -> list[RunRow]:
    return Ledger(store_path / "ledger").runs()


@contextmanager
def process(store_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "duramen", "--store", str(store_path), *arguments]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdout, started.stderr):
            if pipe is not None:
                pipe.close()


def until(condition: Callable[[], bool], started: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 80
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        if started is not None and started.poll() is not None:
            pytest.fail(f"it ended with {started.returncode}: {started.communicate()}")
        time.sleep(0.1)


def running(store_path: Path) -> list[int | None]:
    return sorted(run.partition or 0 for run in runs_of(store_path) if run.result == "running")


# --- in process ----------------------------------------------------------------------------------------------------


def test_once_does_all_there_is_to_do(accounts: Path, duramen: Command) -> None:
    truth = values(accounts)
    dry = duramen("schedule", "--dry-run", "--interval", "ledger=5000", output="json").json
    assert {name: job["interval_ms"] for name, job in dry["jobs"].items()} == {
        "flush": 60_000,
        "compaction": 15_000,
        "retention": 300_000,
        "ledger": 5000,
    }
    assert runs_of(accounts) == []
    done = duramen("schedule", "--once")
    assert done.code == 0
    assert re.search(r"compaction +15 s .* ok", done.out)
    assert re.search(r"accounts-0: \d+ bytes became \d+ in .* s, removed \d+ superseded", done.err)
    assert {run.result for run in runs_of(accounts)} == {"done"}
    assert values(accounts) == truth
    again = duramen("schedule", "--once", output="json")
    assert all(job["ok"] for job in again.json["jobs"].values())


@pytest.mark.parametrize(
    ("arguments", "toml", "code", "expected"),
    [
        (["--interval", "compaction=0"], "", 2, "the interval of compaction = 0 ms is too short"),
        (["--interval", "compaction=soon"], "", 2, "takes milliseconds, not 'soon'"),
        (["--interval", "cleaning=1000"], "", 2, "there is no job 'cleaning'"),
        (["--metrics-port", "70000"], "", 2, "--metrics-port"),
        (["--metrics-host", "no such host"], "", 1, "cannot serve metrics on no such host:9464"),
        ([], "log.retention.check.interval.ms = 0", 2, "log.retention.check.interval.ms = 0"),
        ([], "log.flush.scheduler.interval.ms = 0", 2, "log.flush.scheduler.interval.ms = 0 ms is too short"),
        ([], "[log", 2, "malformed TOML on line"),
    ],
)
def test_what_is_refused(
    accounts: Path, duramen: Command, arguments: list[str], toml: str, code: int, expected: str
) -> None:
    (accounts / "duramen.toml").write_text(toml)
    done = duramen("schedule", *arguments)
    assert (done.code, done.out) == (code, "")
    assert expected in done.err


def test_no_store(store_path: Path, duramen: Command) -> None:
    done = duramen("schedule")
    assert (done.code, "no store" in done.err or "not a store" in done.err) == (1, True), done.err


# --- as a process --------------------------------------------------------------------------------------------------


def test_sigterm_in_the_middle_of_a_run_and_the_next_start_goes_on(accounts: Path, duramen: Command) -> None:
    truth = values(accounts)
    settings(accounts, SLOW)
    with process(accounts, "schedule", "--metrics-port", "0", "--threads", "1") as daemon:
        until(lambda: running(accounts) == [0], daemon)
        time.sleep(1)
        daemon.send_signal(signal.SIGTERM)
        _, err = daemon.communicate(timeout=60)  # at its next step, not at the end of the pass
    assert daemon.returncode == 0, err
    assert "accounts-0: abandoned, the run was stopped" in err
    assert [run.result for run in runs_of(accounts)] == ["abandoned"]
    assert not list((accounts / "staging").glob("*-run"))
    with LogStore(accounts) as store:
        assert [store.partition_state(store.topic("accounts"), number).swap for number in range(3)] == [None] * 3
    assert values(accounts) == truth
    assert duramen("verify").code == 0
    settings(accounts)
    assert duramen("schedule", "--once").code == 0
    assert sorted(run.result for run in runs_of(accounts)) == ["abandoned", "done", "done", "done"]
    assert values(accounts) == truth


def test_a_vanished_store_ends_it_with_a_plain_error(accounts: Path) -> None:
    settings(accounts)
    with process(accounts, "schedule", "--metrics-port", "0") as daemon:
        until(lambda: any(run.result == "done" for run in runs_of(accounts)), daemon)
        shutil.rmtree(accounts, ignore_errors=True)
        shutil.rmtree(accounts, ignore_errors=True)
        _, err = daemon.communicate(timeout=60)
    assert daemon.returncode == 1, err
    assert f"error the store at {accounts} is gone" in err
    assert "Traceback" not in err


def test_three_at_once_never_touch_a_partition_twice_and_say_what_they_skip(accounts: Path, duramen: Command) -> None:
    truth = values(accounts)
    settings(accounts, SLOW)
    stopping = threading.Event()
    reports: list[Report] = []

    def job() -> None:
        reports.append(compact(accounts, threads=1, stopping=stopping.is_set))

    thread = threading.Thread(target=job)
    with process(accounts, "compact", "--threads", "1") as person:
        until(lambda: running(accounts) == [0], person)
        with process(accounts, "schedule", "--metrics-port", "0", "--threads", "1") as daemon:
            until(lambda: running(accounts) == [0, 1], daemon)
            thread.start()
            until(lambda: running(accounts) == [0, 1, 2], daemon)
            stopping.set()
            thread.join(60)
            daemon.send_signal(signal.SIGTERM)
            _, told = daemon.communicate(timeout=60)
        person.send_signal(signal.SIGINT)
        out, _ = person.communicate(timeout=60)
    assert (daemon.returncode, person.returncode) == (0, 130)
    assert re.search(rf"accounts-0: skipped, another process is at work on it: .* pid {person.pid},", told)
    skipped = {run.plan.partition: run.reason for run in reports[0].runs if run.result == "skipped"}
    assert f"pid {person.pid}," in skipped[0]
    assert f"pid {daemon.pid}," in skipped[1]
    assert re.search(r"accounts-0 +abandoned", out)
    assert sorted((run.partition, run.result) for run in runs_of(accounts)) == [(n, "abandoned") for n in range(3)]
    settings(accounts)
    assert duramen("compact").code == 0
    assert values(accounts) == truth


def test_health_and_metrics_of_a_running_daemon(accounts: Path, duramen: Command) -> None:
    settings(accounts)
    port = free_port()

    def get(path: str) -> tuple[int, str]:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            client.request("GET", path)
            answer = client.getresponse()
            return answer.status, answer.read().decode()
        except ConnectionRefusedError:
            return 0, "{}"
        finally:
            client.close()

    def compacted() -> bool:
        found = json.loads(get("/healthz")[1]).get("jobs", {}).get("compaction", {})
        return found.get("ok") is True

    with process(accounts, "--output", "json", "schedule", "--metrics-port", str(port)) as daemon:
        until(compacted, daemon)
        code, text = get("/healthz")
        assert (code, json.loads(text)["status"]) == (200, "ok")
        code, text = get("/metrics")
        assert code == 200
        assert 'duramen_compaction_runs_total{result="done"} 3.0' in text.splitlines()
        second = duramen("schedule", "--metrics-port", port)
        assert second.code == 1
        assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use" in second.err
        daemon.send_signal(signal.SIGINT)
        _, err = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, err
    lines = [json.loads(line) for line in err.splitlines()]
    assert f"metrics on http://127.0.0.1:{port}/metrics" in [line["message"] for line in lines]
    assert {line["level"] for line in lines} == {"info"}
