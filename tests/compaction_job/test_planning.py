"""`python -m compaction_job.planning`: what schedulers are told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from compaction_job import compact
from compaction_job.planning import main
from logstore.commit.produce import table_of
from logstore.records.record import Record
from logstore.store import LogStore

BOTH = [("accounts", 0), ("accounts", 1)]


def planned(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str) -> dict[str, Any]:
    assert main(["--store", str(store), *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def names(listed: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return sorted((each["topic"], each["partition"]) for each in listed)


def test_due_partitions_are_listed_and_nothing_is_changed(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in store_path.rglob("*") if path.name != "clock"}
    document = planned(capsys, store_path)
    assert (document["store"], document["topics"]) == (str(store_path), ["accounts"])
    assert names(document["due"]) == BOTH
    assert {each["dirty_ratio"] for each in document["due"]} == {1.0}
    assert document["not_due"] == document["problems"] == []
    assert {path: path.stat().st_mtime_ns for path in store_path.rglob("*") if path.name != "clock"} == before


def test_a_ratio_stands_in_for_the_topics_own(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compact(store_path)
    with LogStore(store_path) as store:
        now_ms = store.clock.now_ms()
        store.append("accounts", table_of([Record(b"key-%d" % at, bytes(100), now_ms) for at in range(80)]))
    (ratio, _) = sorted(each["dirty_ratio"] for each in planned(capsys, store_path)["due"])
    assert 0.1 < ratio < 1.0
    assert planned(capsys, store_path, "--ratio", "1")["due"] == []
    with LogStore(store_path) as store:
        store.alter_topic("accounts", configs={"min.cleanable.dirty.ratio": "1.0"})
    assert planned(capsys, store_path)["due"] == []
    assert names(planned(capsys, store_path, "--ratio", "0.1")["due"]) == BOTH
    assert names(planned(capsys, store_path, "--force")["due"]) == BOTH


def test_what_failed_is_left_alone_until_it_is_forced(flushed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_path = flushed
    damaged = store_path / "logs" / "accounts-0" / f"{0:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[17] ^= 1  # the first batch's CRC
    damaged.write_bytes(data)
    report = compact(store_path)
    assert [(run.plan.topic, run.plan.partition) for run in report.failed] == [("accounts", 0)]
    document = planned(capsys, store_path)
    aside = [each["why"] for each in document["not_due"] if each["partition"] == 0]
    assert aside[0].startswith("set aside after 1 failure")
    assert ("accounts", 0) in names(planned(capsys, store_path, "--force")["due"])


def test_a_topic_whose_state_is_damaged_does_not_hide_the_others(
    store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LogStore(store_path) as store:
        topic = store.create_topic("broken", configs={"cleanup.policy": "compact"})
        path = store.layout.partition_state(topic.id, 0)
    os.truncate(path, 1)
    document = planned(capsys, store_path)
    assert names(document["due"]) == BOTH
    assert len(document["problems"]) == 1
    assert document["problems"][0].startswith("broken could not be planned: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--topic", "nothing"], "error: no topic is called nothing"),
        (["--topic", "events"], "error: topic events is not compacted"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    store_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["--store", str(store_path), *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(told)
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("ratio", ["1.01", "-0.1", "nan", "half"])
def test_a_ratio_beyond_its_range_is_bad_usage(
    store_path: Path, capsys: pytest.CaptureFixture[str], ratio: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--store", str(store_path), f"--ratio={ratio}"])
    assert "--ratio" in capsys.readouterr().err


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: no store here")
    assert not (tmp_path / "none").exists()
