"""What must not grow with the age of a store: staging without a daemon, receipts, what is read to plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compaction_job.job import Report, retain_all
from logstore.records.record import Record
from logstore.store import own_flush
from logstore.store.committer import Committer
from logstore.store.store import LogStore


def staged(store: LogStore) -> int:
    return len(os.listdir(store.layout.staging))


def test_a_writer_without_a_daemon_flushes_its_own(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("orders", partitions=2)
        most = 0
        for number in range(3 * own_flush.COMMITS_MAX):
            store.append("orders", [Record(b"k%d" % number, b"v", -1)])
            most = max(most, staged(store))
        assert most <= own_flush.COMMITS_MAX
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) > 0
    assert staged(store) == 0, "closing flushes the rest"
    assert store.ends(topic).recovery_points == store.ends(topic).high_watermarks
    store.close()  # once more does no harm


def test_bytes_and_age_make_a_flush_due_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("orders")
        monkeypatch.setattr(own_flush, "BYTES_MAX", 1000)
        store.append("orders", [Record(b"k", b"v" * 2000, -1)])
        assert staged(store) == 0
        monkeypatch.setattr(own_flush, "BYTES_MAX", 1 << 30)
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) == 1
        monkeypatch.setattr(own_flush, "AGE_S_MAX", 0.0)
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) == 0


def test_a_flush_that_finds_the_topic_taken_fails_no_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_flush, "COMMITS_MAX", 1)
    with LogStore(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        topic = store.create_topic("orders")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(Committer, "_sync_all", full)
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) == 1, "nothing is lost: the redo log stays"
        patch.undo()
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) == 0
        assert store.ends(topic).flushed_sequence == 2


def test_retention_flushes_first_and_so_leaves_neither_logs_nor_staging(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        configs = {"cleanup.policy": "delete", "retention.bytes": 10_000, "segment.bytes": 4_000}
        topic = store.create_topic("orders", configs=configs)
        committer = Committer(store)
        from logstore.store.produce import append_table, table_of

        for _ in range(50):
            append_table(committer, "orders", table_of([Record(b"k", b"v" * 1_000, -1)]))
        assert staged(store) == 50
        report = Report("r", "local", store.clock.now_ms())
        retain_all(store, None, None, store.clock.now_ms(), report)
        assert report.problems == []
        assert staged(store) == 0
        assert store.log_bytes(topic, 0) <= 10_000 + 4_000
