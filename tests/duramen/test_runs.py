"""`duramen runs`: the ledger's receipts, filtered, newest first."""

from __future__ import annotations

from pathlib import Path

import pytest

from logstore.ledger import RunRow
from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import BASE_MS, Command, on_a_terminal, plain_lines


@pytest.fixture
def history(store_path: Path) -> Path:
    with LogStore(store_path, create=True) as store:
        for name in ("orders", "accounts"):
            store.create_topic(name, partitions=2, configs={"cleanup.policy": "compact"})
        store.append("orders", [Record(b"k", b"v")])
        ledger = store.ledger()
        for at in range(30):
            name = ("orders", "accounts")[at % 2]
            ledger.record_run(
                RunRow(
                    run_id=f"{at:08x}-{name}-{at % 4 // 2}",
                    kind="compaction",
                    topic_id=store.topic(name).id,
                    topic=name,
                    partition=at % 4 // 2,
                    engine="local",
                    started_ms=BASE_MS + at * 1000,
                    ended_ms=BASE_MS + at * 1000 + 500,
                    result="failed" if at % 10 == 9 else "done",
                    reason="no space left" if at % 10 == 9 else "due: its dirty ratio is above the threshold",
                    before_bytes=2000,
                    after_bytes=1000,
                    removed={"superseded": at, "tombstone": 1},
                    seconds=0.5,
                )
            )
    return store_path


def test_newest_first_and_no_more_than_asked_for(duramen: Command, history: Path) -> None:
    found = duramen("runs", output="json").json
    assert [each["started_ms"] for each in found["runs"]] == [BASE_MS + at * 1000 for at in range(29, 9, -1)]
    assert found["left_out"] == 10
    assert len(duramen("runs", "--limit", 100, output="json").json["runs"]) == 30


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--topic", "orders"], [at for at in range(30) if at % 2 == 0]),
        (["--topic", "orders", "--partition", "1"], [at for at in range(30) if at % 4 == 2]),
        (["--result", "failed"], [9, 19, 29]),
        (["--result", "failed", "--result", "done"], list(range(30))),
        (["--since", "2023-11-14T22:13:45Z"], [25, 26, 27, 28, 29]),
        (["--since", "-1m"], []),
    ],
)
def test_filters(duramen: Command, history: Path, arguments: list[str], wanted: list[int]) -> None:
    found = duramen("runs", "--limit", 100, *arguments, output="json").json["runs"]
    assert sorted(each["started_ms"] for each in found) == [BASE_MS + at * 1000 for at in wanted]


def test_a_receipt_by_its_id_or_the_beginning_of_it(duramen: Command, history: Path) -> None:
    (exact,) = duramen("runs", "show", "00000004-orders-0", output="json").json["runs"]
    assert (exact["removed"], exact["result"], exact["partition"]) == ({"superseded": 4, "tombstone": 1}, "done", 0)
    assert len(duramen("runs", "show", "0000000", output="json").json["runs"]) == 16
    text = duramen("runs", "show", "00000009").out
    assert "no space left" in text
    assert "2023-11-14T22:13:29.000Z" in text
    missing = duramen("runs", "show", "ffff", output="json")
    assert (missing.code, missing.out) == (1, "")
    assert '"UnknownRun"' in missing.err


def test_the_receipt_of_a_real_pass(duramen: Command, orders: Path) -> None:
    assert duramen("topics", "alter", "orders", "--config", "cleanup.policy=compact").code == 0
    run = duramen("compact", "--roll-active", output="json").json["runs"][0]
    (found,) = duramen("runs", "show", run["run_id"], output="json").json["runs"]
    receipt = run["receipt"]
    assert {name: found[name] for name in ("before_bytes", "after_bytes", "removed")} == {
        name: receipt[name] for name in ("before_bytes", "after_bytes", "removed")
    }
    assert found["details"]["end_offset"] == receipt["end_offset"]


def test_a_store_without_runs_has_none_and_gets_no_ledger(duramen: Command, store_path: Path) -> None:
    LogStore(store_path, create=True).close()
    assert duramen("runs", output="json").json == {"runs": [], "left_out": 0}
    assert not list((store_path / "ledger").glob("*/_delta_log"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--topic", "nothing"], 1), (["--partition", "1"], 2), (["--since", "soon"], 2), (["--result", "odd"], 2)],
)
def test_refusals(duramen: Command, history: Path, arguments: list[str], code: int) -> None:
    assert duramen("runs", *arguments).code == code


def test_it_fits_a_terminal_and_only_what_failed_is_red(history: Path) -> None:
    seen = on_a_terminal(history, ["runs", "--limit", "4"])
    lines = plain_lines(seen)
    assert lines[0] == "started            partition   result   before   after  removed  run"
    assert lines[1] == "2023-11-14T22:13Z  accounts-0  failed  2.0 KiB  1000 B        -  0000001d"
    assert max(map(len, lines)) <= 80
    assert seen.count("\x1b[31m") == 1
    assert "\x1b[" not in on_a_terminal(history, ["runs"], NO_COLOR="1")


def test_a_hostile_reason_is_shown_and_does_nothing(history: Path) -> None:
    with LogStore(history) as store:
        hostile = "\x1b]0;title\x07\x9b31m"
        store.ledger().record_run(RunRow("ff-run", "compaction", topic="orders", partition=0, reason=hostile))
    seen = on_a_terminal(history, ["runs", "show", "ff"], NO_COLOR="1")
    assert "\x1b" not in seen
    assert "\\x1b]0;title\\x07\\x9b31m" in seen
