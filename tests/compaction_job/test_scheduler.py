"""The scheduler inside a process: its jobs do their work at their intervals, and tell how it went."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from compaction_job.scheduler import Scheduler, intervals_of, jitter_s
from logstore.config import BrokerConfig
from logstore.errors import InvalidConfig
from logstore.ledger import Ledger
from logstore.limits import INT64_MAX
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.directory_maintenance import directory_intervals

COMPACTION, RETENTION, FLUSH, LEDGER = "compaction", "retention", "flush", "ledger"
FAST = {COMPACTION: 200, RETENTION: 200, FLUSH: 200, LEDGER: 1000}


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def health_of(daemon: Scheduler) -> tuple[int, Any]:
    assert daemon.metrics_address is not None
    client = http.client.HTTPConnection(*daemon.metrics_address, timeout=30)
    client.request("GET", "/healthz")
    answer = client.getresponse()
    document = json.loads(answer.read())
    client.close()
    return answer.status, document


def at_once(store_path: Path, *lines: str) -> None:
    (store_path / "duramen.toml").write_text("\n".join(["log.initial.task.delay.ms = 0", *lines]) + "\n")


def test_intervals_have_kafkas_names_and_ours_where_kafka_says_never() -> None:
    assert intervals_of(directory_intervals(BrokerConfig())) == {
        COMPACTION: 15_000,
        RETENTION: 300_000,
        FLUSH: 60_000,
        LEDGER: 3_600_000,
    }
    config = replace(BrokerConfig(), log_cleaner_backoff_ms=0, log_retention_check_interval_ms=INT64_MAX)
    assert intervals_of(directory_intervals(config))[COMPACTION] == 1000
    assert intervals_of(directory_intervals(config))[RETENTION] is None
    assert intervals_of(directory_intervals(config), {FLUSH: 5000})[FLUSH] == 5000
    assert jitter_s(10) == 1
    assert jitter_s(3600) == 30


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({}, {COMPACTION: 0}, "the interval of compaction = 0 ms is too short"),
        ({}, {RETENTION: -5}, "the interval of retention = -5 ms"),
        ({}, {"cleaning": 5000}, "no job 'cleaning'"),
        ({"log_flush_scheduler_interval_ms": -1}, {}, "log.flush.scheduler.interval.ms = -1 ms is too short"),
        ({"log_retention_check_interval_ms": 1}, {}, "log.retention.check.interval.ms = 1 ms is too short"),
    ],
)
def test_impossible_intervals(config: dict[str, Any], overrides: dict[str, int], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        intervals_of(directory_intervals(replace(BrokerConfig(), **config)), overrides)


def test_the_jobs_do_their_work_and_say_so(store_path: Path) -> None:
    at_once(store_path)
    with LogStore(store_path) as store, Scheduler(store_path, intervals=FAST, metrics_port=None) as daemon:
        accounts, events = store.topic("accounts"), store.topic("events")
        until(lambda: store.partition_state(accounts, 0).first_dirty_offset > 0, "nothing was compacted")
        until(lambda: store.ends(events).recovery_points == (5,), "an idle topic was not flushed")
        until(lambda: all(status.runs > 1 for status in daemon.status().values()), "a job did not run twice")
        assert not list((store_path / "staging").glob("*-plan"))
        code, document = health_of(daemon)
        assert (code, document["status"], document["failed"]) == (200, "ok", [])
        assert document["jobs"][COMPACTION]["ok"] is True
        results = {run.result for run in Ledger(store.layout.ledger).runs()}
        assert results == {"done"}
    assert daemon.stop()
    assert daemon.health().healthy is False  # it does not work any more


def test_a_failed_run_shows_until_one_succeeds(flushed: Path) -> None:
    store_path = flushed
    at_once(store_path, "duramen.cleaner.retry.ms = 86_400_000")
    path = sorted((store_path / "logs" / "accounts-0").glob("*.log"))[0]
    data = bytearray(path.read_bytes())
    data[90] ^= 0xFF
    path.write_bytes(data)
    daemon = Scheduler(store_path, metrics_port=None, intervals=dict.fromkeys(FAST, 3600000))
    try:
        assert daemon.run_once() is False
        status = daemon.status()[COMPACTION]
        assert status.ok is False
        assert str(path) in status.problems[0]
        assert "accounts-0" in status.problems[0]
        daemon.start()
        until(lambda: daemon.status()[COMPACTION].runs == 2, "the job did not run")
        assert health_of(daemon)[0] == 200  # set aside now: nothing failed
        with LogStore(store_path) as store:
            assert store.partition_state(store.topic("accounts"), 1).first_dirty_offset > 0
    finally:
        daemon.stop()


def test_keys_expire_although_nothing_new_comes(store_path: Path) -> None:
    at_once(store_path)
    long_ago_ms = int(time.time() * 1000) - 86_400_000
    with LogStore(store_path) as store:
        store.create_topic("sessions", configs={"cleanup.policy": "compact", "segment.ms": 1000})
        store.append("sessions", [Record(b"key-%d" % at, b"v", long_ago_ms) for at in range(20)])
        daemon = Scheduler(store_path)
        try:
            assert daemon.run_once()
            topic = store.topic("sessions")
            assert store.partition_state(topic, 0).first_dirty_offset == 20
            store.alter_topic("sessions", configs={"duramen.key.ttl.ms": 3_600_000})
            assert daemon.run_once()
        finally:
            daemon.stop()
        assert [record.value for record in store.reader(topic, 0).records(0)] == [None] * 20


def test_without_the_cleaner_only_compaction_stops(store_path: Path) -> None:
    at_once(store_path, "log.cleaner.enable = false", "log.retention.bytes = 0", "log.segment.bytes = 200")
    with LogStore(store_path) as store:
        for _ in range(3):
            store.append("events", [Record(None, b"e" * 90, int(time.time() * 1000))])
    daemon = Scheduler(store_path)
    assert daemon.run_once()
    daemon.stop()
    with LogStore(store_path) as store:
        assert Ledger(store.layout.ledger).runs() == []
        assert store.partition_state(store.topic("accounts"), 0).first_dirty_offset == 0
        assert store.partition_state(store.topic("events"), 0).log_start_offset > 0


def test_a_second_daemon_is_told_and_works_beside_the_first(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    at_once(store_path)
    caplog.set_level(logging.INFO, "duramen")
    slow = dict.fromkeys(FAST, 3600000)
    with Scheduler(store_path, intervals=slow) as first, Scheduler(store_path, intervals=slow) as second:
        for daemon in (first, second):
            until(lambda daemon=daemon: daemon.status()[COMPACTION].ok is True, "a daemon did not work")
    assert "another daemon is running on this store" in caplog.text
    with LogStore(store_path) as store:
        runs = Ledger(store.layout.ledger).runs()
        assert sorted((run.partition, run.result) for run in runs) == [(0, "done"), (1, "done")]


def test_an_error_of_the_system_is_no_vanished_store(
    store_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(store_path)
    daemon = Scheduler(store_path, intervals=dict.fromkeys(FAST, 3600000))
    try:
        with monkeypatch.context() as failing:
            error = OSError(errno.EIO, os.strerror(errno.EIO), "version")
            failing.setattr(daemon._maintenance, "is_same", Mock(side_effect=error))
            daemon._look_for_store()
        assert daemon.failure is None
        assert "cannot look at the store: [Errno 5] Input/output error" in caplog.text
        daemon._look_for_store()
        assert daemon.failure is None
    finally:
        daemon.stop()


def test_a_store_that_vanishes_ends_the_daemon(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    at_once(store_path)
    caplog.set_level(logging.INFO, "duramen")
    daemon = Scheduler(store_path, intervals=dict.fromkeys(FAST, 3600000))
    daemon.start()
    try:
        until(lambda: all(status.ok for status in daemon.status().values()), "the jobs did not run")
        shutil.rmtree(store_path)
        assert daemon.wait() is False
        assert daemon.failure == f"the store at {store_path} is gone"
        assert daemon.failure in caplog.text
        assert daemon.health().healthy is False
    finally:
        daemon.stop()
    assert not store_path.exists()
