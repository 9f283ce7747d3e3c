"""`duramen top`: what it shows is what there is, also of passes that other processes make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from duramen.commands.top import Sort, Watch, screen_lines, span_text
from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import ROOT, Command, on_a_terminal, plain_lines

SLOW = "log.cleaner.io.max.bytes.per.second = 50000\n"


@pytest.fixture
def accounts(store_path: Path) -> Path:
    with LogStore(store_path, create=True) as store:
        store.create_topic("accounts", partitions=2, configs={"cleanup.policy": "compact", "segment.bytes": 100_000})
        store.create_topic("plain", configs={"cleanup.policy": "delete"})
        # Keys that differ, and values that do not compress: a pass has something to read.
        store.append("accounts", [Record(b"k%d" % (at % 5000), os.urandom(60)) for at in range(10_000)])
    return store_path


def test_a_snapshot_has_every_partition_with_what_explain_says(duramen: Command, accounts: Path) -> None:
    found = duramen("top", "--output", "json")
    assert found.code == 0
    document = found.json
    explained = {(e["topic"], e["partition"]): e for e in duramen("explain", output="json").json["partitions"]}
    assert {(e["topic"], e["partition"]) for e in document["partitions"]} == set(explained)
    for each in document["partitions"]:
        same = explained[each["topic"], each["partition"]]
        assert (each["due"], each["why"], each["dirty_ratio"]) == (same["due"], same["why"], same["dirty_ratio"])
    assert sum(each["records"] for each in document["partitions"]) == 10_000
    assert all(each["records_exact"] and each["records_per_second"] is None for each in document["partitions"])
    assert document["passes"] == document["problems"] == []
    assert document["free_bytes"] > 0
    assert {each["threshold"] for each in document["partitions"]} == {0.5}


def test_two_looks_tell_how_fast_records_come(accounts: Path) -> None:
    with LogStore(accounts) as store:
        watch = Watch(store, ["accounts"])
        began = time.monotonic()
        watch.look(Sort.NAME)
        store.append("accounts", [Record(b"x%d" % at, b"v") for at in range(500)])
        time.sleep(0.2)
        after = watch.look(Sort.RATE)["partitions"]
        elapsed = time.monotonic() - began
        assert 499 / elapsed < sum(each["records_per_second"] for each in after) <= 500 / 0.2
        assert after[0]["records_per_second"] >= after[1]["records_per_second"]


@pytest.mark.parametrize("sort", list(Sort))
def test_sorting(accounts: Path, sort: Sort) -> None:
    with LogStore(accounts) as store:
        rows = Watch(store, None).look(sort)["partitions"]
    names = [(each["topic"], each["partition"]) for each in rows]
    if sort is Sort.NAME:
        assert names == sorted(names)
    elif sort is Sort.DUE:
        assert [each["due"] for each in rows] == [True, True, False]
    elif sort is not Sort.RATE:
        field = {Sort.SIZE: "size_bytes", Sort.RECORDS: "records", Sort.DIRTY: "dirty_ratio"}[sort]
        assert [each[field] for each in rows] == sorted((each[field] for each in rows), reverse=True)


def test_a_pass_of_another_process_is_seen_with_its_step_and_bytes(duramen: Command, accounts: Path) -> None:
    (accounts / "duramen.toml").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DURAMEN_STORE": str(accounts)}
    process = subprocess.Popen(
        [sys.executable, "-m", "duramen", "compact", "--roll-active", "--partition", "0", "--topic", "accounts"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seen: dict[str, Any] = {}
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            for each in duramen("top", output="json").json["passes"]:
                if each["done_bytes"] and each["bytes_per_second"]:
                    seen = each
            if seen:
                shown = duramen("top", "--once").out.splitlines()
                assert any(line.startswith("accounts-0") and f"pid {process.pid}" in line for line in shown)
                break
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    assert (seen["topic"], seen["partition"]) == ("accounts", 0)
    assert (seen["pid"], seen["engine"]) == (process.pid, "local")
    assert 0 < seen["done_bytes"] <= seen["total_bytes"]
    assert seen["step"] in ("index", "rewrite")
    assert seen["bytes_per_second"] > 0
    # It was killed: what it said is still there, and is not taken for a pass under way.
    assert duramen("top", output="json").json["passes"] == []


def test_a_screen_has_no_more_lines_and_columns_than_it_has(accounts: Path) -> None:
    with LogStore(accounts) as store:
        store.create_topic("many", partitions=60, configs={"cleanup.policy": "compact"})
        document = Watch(store, None).look(Sort.DUE)
    lines = screen_lines(document, 80, 24)
    assert any(line.startswith("accounts-0 ") and line.endswith(("above the ratio", "…")) for line in lines)
    document["partitions"][0]["why"] = "a sentence that is far too long for what is left of the line"
    lines = screen_lines(document, 80, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("and ")
    assert any(line.endswith("…") for line in lines)


def test_it_lives_on_a_terminal_until_it_is_interrupted(accounts: Path) -> None:
    seen = on_a_terminal(accounts, ["top", "--interval", "0.2"], stop_when="plain-0")
    assert "\x1b[?1049h" in seen  # a screen of its own, which is given back
    assert "\x1b[?1049l" in seen
    lines = plain_lines(seen)
    assert any("3 partitions, 2 due" in line for line in lines)
    assert json.dumps("Traceback") not in seen


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [(-5, "0s"), (900, "0s"), (119_000, "119s"), (120_000, "2m"), (7_200_000, "2h"), (10**9, "11d")],
)
def test_spans(span_ms: int, text: str) -> None:
    assert span_text(span_ms) == text
