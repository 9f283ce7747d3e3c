"""`python -m compaction_job.retention`: retention for schedulers that compact one partition at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from compaction_job import compact
from compaction_job.retention import main
from logstore.commit.produce import table_of
from logstore.records.record import Record
from logstore.store import LogStore

HOUR_MS = 3_600_000


def audited(store_path: Path, *names: str) -> None:
    """Topics that keep hardly a byte, with three segments each."""
    with LogStore(store_path) as store:
        for name in names:
            store.create_topic(name, configs={"cleanup.policy": "delete", "retention.bytes": 1, "segment.bytes": 2000})
            for _ in range(3):
                store.append(name, table_of([Record(None, bytes(1500), store.clock.now_ms())]))


def retained(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int]]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return [(each["topic"], each["log_start_offset"]) for each in document["retained"]]


def test_topics_that_are_not_compacted_are_retained_once(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audited(store_path, "audit", "trail")
    assert main(["--store", str(store_path), "--topic", "audit"]) == 0
    assert retained(capsys) == [("audit", 2)]
    assert main(["--store", str(store_path)]) == 0
    assert retained(capsys) == [("trail", 2)]
    assert main(["--store", str(store_path)]) == 0
    assert retained(capsys) == []


def test_what_compaction_replaced_goes_when_its_delay_is_over(store_path: Path) -> None:
    compact(store_path, retention=False)
    waiting = list((store_path / "logs").rglob("*.deleted"))
    assert waiting
    assert main(["--store", str(store_path)]) == 0
    assert list((store_path / "logs").rglob("*.deleted")) == waiting
    with LogStore(store_path) as store:
        later_ms = store.clock.now_ms() + HOUR_MS
    assert main(["--store", str(store_path), "--now-ms", str(later_ms)]) == 0
    assert list((store_path / "logs").rglob("*.deleted")) == []


def test_a_partition_that_fails_does_not_stop_the_others(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audited(store_path, "audit", "broken", "trail")
    with LogStore(store_path) as store:
        os.truncate(store.layout.partition_state(store.topic("broken").id, 0), 1)
    assert main(["--store", str(store_path)]) == 1
    said = capsys.readouterr()
    assert [each["topic"] for each in json.loads(said.out)["retained"]] == ["audit", "trail"]
    assert said.err.startswith("error: retention of broken-0: ")
    assert len(said.err.splitlines()) == 1


def test_an_unknown_topic_and_a_missing_store_are_one_line(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--store", str(store_path), "--topic", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: no topic is called nothing")
    assert main(["--store", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: no store here")
