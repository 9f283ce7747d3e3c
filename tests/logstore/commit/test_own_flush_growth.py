"""What must not grow with the age of a store: staging without a daemon, receipts, what is read to plan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from compaction_job.choice import Choice
from compaction_job.report import Report
from compaction_job.retention import retain_all
from logstore.commit import own_flush
from logstore.commit.committer import Committer
from logstore.compaction.failures import KIND, failures_of
from logstore.ledger import Ledger, RunRow, receipts
from logstore.ledger import ledger as ledger_module
from logstore.ledger.rows import DONE, FAILED, RUNNING
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.ledger_figures import LedgerFigures


def staged(store: LogStore) -> int:
    return len(os.listdir(store.layout.staging))


def test_a_writer_without_a_daemon_flushes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_flush, "COMMITS_MAX", 8)
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("orders", partitions=2)
        most = 0
        for number in range(3 * 8):
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


def test_flush_messages_and_flush_ms_of_a_topic_make_a_flush_due_earlier(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("counted", configs={"flush.messages": 3})
        store.create_topic("timed", configs={"flush.ms": 0})
        store.create_topic("plain")
        after = []
        for name, records in (("plain", 9), ("timed", 1), ("counted", 2), ("counted", 1), ("counted", 4)):
            store.append(name, [Record(b"k", b"v", -1)] * records)
            after.append(staged(store))
        assert after == [1, 1, 2, 1, 1], "the first commit stays, and two of `counted` wait for a third record"


def test_a_flush_that_finds_the_topic_taken_fails_no_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_flush, "COMMITS_MAX", 1)
    with LogStore(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        topic = store.create_topic("orders")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(Committer, "_make_durable", full)
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) == 1, "nothing is lost: the redo log stays"
        patch.undo()
        store.append("orders", [Record(b"k", b"v", -1)])
        assert staged(store) == 0
        assert store.ends(topic).flushed_sequence == 2


def test_retention_flushes_first_and_so_leaves_neither_logs_nor_staging(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        configs = {"cleanup.policy": "delete", "retention.bytes": 5_000, "segment.bytes": 2_000}
        topic = store.create_topic("orders", configs=configs)
        committer = Committer(store)
        from logstore.commit.produce import append_table, table_of

        for _ in range(20):
            append_table(committer, "orders", table_of([Record(b"k", b"v" * 1_000, -1)]))
        assert staged(store) == 20
        report = Report("r", "local", store.clock.now_ms())
        retain_all(store, Choice(), report)
        assert report.problems == []
        assert staged(store) == 0
        assert store.log_bytes(topic, 0) <= 5_000 + 2_000


# --- receipts --------------------------------------------------------------------------------------------------------


def run_row(number: int, partition: int, **more: object) -> RunRow:
    fields = {"result": DONE, "started_ms": number, "ended_ms": number, "topic_id": "t", "topic": "orders"}
    details = json.dumps({"read_bytes": 10, "written_bytes": 3})
    return replace(
        RunRow(f"run-{number}", KIND, partition=partition, removed={"superseded": 2}, details=details),
        **{**fields, **more},  # type: ignore[arg-type]
    )


def totals(store: LogStore, ledger: Ledger) -> tuple[dict[str, int], dict[str, int], int, int]:
    found = LedgerFigures(store, ledger).runs()
    return dict(found.results), dict(found.removed), found.read_bytes, found.written_bytes


def test_receipts_are_bounded_and_what_proofs_and_counters_need_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "ROWS_MIN", 16)
    monkeypatch.setattr(receipts, "KEPT_EACH", 3)
    monkeypatch.setattr(ledger_module, "_PRUNE_EVERY", 5)
    with LogStore(tmp_path / "store", create=True) as store:
        ledger = Ledger(store.layout.ledger)
        watching = LedgerFigures(store, ledger)
        ledger.record_run(run_row(0, 1, removed={"tombstone": 7, "superseded": 1}))
        ledger.record_run(run_row(1, 2, result=RUNNING, ended_ms=None, removed={}))
        ledger.record_run(run_row(2, 3, result=FAILED, reason="broken", removed={}))
        for number in range(3, 24):
            if number % 3 == 0:
                ledger.record_run(run_row(number, 1, result=RUNNING, ended_ms=None, removed={}))
            ledger.record_run(run_row(number, 1))
            if number % 8 == 0:
                watching.runs()
        rows = ledger.runs_table.run(lambda: ledger.runs_table.read_all().num_rows)
        assert rows < 20, "of 31"
        kept = {run.run_id for run in ledger.runs()}
        assert {"run-0", "run-1", "run-2", *(f"run-{number}" for number in range(21, 24))} <= kept
        expected = ({DONE: 22, FAILED: 1}, {"superseded": 1 + 2 * 21, "tombstone": 7}, 10 * 22, 3 * 23)
        assert totals(store, ledger) == expected, "the counters go on"
        seen = watching.runs()
        assert (dict(seen.results), dict(seen.removed), seen.read_bytes, seen.written_bytes) == expected
        assert set(failures_of(store, ledger)) == {("t", 3)}
        assert [run.run_id for run in ledger.unfinished_runs(KIND, RUNNING)] == ["run-1"]


def test_what_failed_and_then_worked_is_not_set_aside(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        ledger = Ledger(store.layout.ledger)
        for number, (partition, result) in enumerate([(0, FAILED), (1, FAILED), (0, DONE), (1, FAILED), (2, DONE)]):
            ledger.record_run(run_row(number, partition, result=result, reason=f"r{number}"))
        found = failures_of(store, ledger)
        assert {key: (each.failures, each.reason) for key, each in found.items()} == {("t", 1): (2, "r3")}
