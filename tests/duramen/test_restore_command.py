"""`duramen restore`: rows and where they go, moments, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.directory.state import write_state
from logstore.files import OS_FILES
from logstore.records.record import Record
from logstore.store import LogStore

Command = Callable[..., object]
BASE_MS = 1_700_000_000_000


@pytest.fixture
def accounts(store_path: Path) -> Path:
    """One partition: a=1, b=1, a=2, b deleted, c=ü."""
    with LogStore(store_path, create=True) as store:
        store.create_topic("accounts", configs={"cleanup.policy": "compact"})
        rows = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"c", "ü".encode())]
        records = [Record(key, value, BASE_MS + at) for at, (key, value) in enumerate(rows)]
        append_table(Committer(store), "accounts", table_of(records))
    return store_path


def test_the_latest_value_of_every_key_a_line_each(accounts: Path, duramen: Command) -> None:
    done = duramen("restore", "accounts")
    assert done.code == 0
    assert done.lines == [
        {"partition": 0, "offset": 2, "timestamp": BASE_MS + 2, "key": "a", "value": "2"},
        {"partition": 0, "offset": 4, "timestamp": BASE_MS + 4, "key": "c", "value": "ü"},
    ]
    assert done.err == "restored 2 keys of accounts\n"
    assert duramen("restore", "accounts", output="json").lines == done.lines


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (["--as-of-offsets", '{"0": 2}'], {"a": "1", "b": "1"}),
        (["--as-of-timestamp", str(BASE_MS + 2)], {"a": "2", "b": "1"}),
        (["--as-of-timestamp", "0"], {}),
    ],
)
def test_as_of_a_moment(accounts: Path, duramen: Command, moment: list[str], expected: dict[str, str]) -> None:
    found = duramen("restore", "accounts", *moment).lines
    assert {row["key"]: row["value"] for row in found} == expected


def test_into_files(accounts: Path, duramen: Command, tmp_path: Path) -> None:
    lines, parquet = tmp_path / "state.jsonl", tmp_path / "state.parquet"
    done = duramen("restore", "accounts", "--output-file", lines, "--encoding", "base64", output="json")
    assert done.json == {
        "topic": "accounts",
        "rows": 2,
        "end_offsets": {"0": 5},
        "by_partition": True,
        "losses": [],
        "plan": "restore accounts: at most 5 records of 1 partitions, each partition alone, without a shuffle",
        "file": str(lines),
        "restored": True,
    }
    assert [json.loads(line)["value"] for line in lines.read_text().splitlines()] == ["Mg==", "w7w="]
    done = duramen("restore", "accounts", "--output-file", parquet, "--format", "parquet")
    assert (done.code, done.out) == (0, "restored 2 keys of accounts\n")
    assert pq.read_table(parquet).column("key").to_pylist() == [b"a", b"c"]
    assert sorted(os.listdir(tmp_path)) == ["state.jsonl", "state.parquet", "store"]


def test_a_dry_run_shows_the_plan(accounts: Path, duramen: Command) -> None:
    done = duramen("restore", "accounts", "--dry-run")
    assert done.out.startswith("restore accounts: at most 5 records")
    assert duramen("restore", "accounts", "--dry-run", output="json").json["restored"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["nothing"], 1, "no topic is called nothing"),
        (["accounts", "--as-of-offsets", "{"], 2, "not JSON of the form"),
        (["accounts", "--as-of-offsets", '{"0": "x"}'], 2, "not a whole number"),
        (["accounts", "--as-of-offsets", '{"1": 0}'], 2, "lacks partition 0"),
        (["accounts", "--as-of-offsets", '{"0": 9}'], 1, "asks for 9, the log ends at 5"),
        (["accounts", "--as-of-offsets", '{"0": 1}', "--as-of-timestamp", "1"], 2, "exclude each other"),
        (["accounts", "--format", "parquet"], 2, "--output-file FILE"),
    ],
)
def test_what_is_refused(accounts: Path, duramen: Command, arguments: list[str], code: int, expected: str) -> None:
    done = duramen("restore", *arguments)
    assert done.code == code
    assert expected in done.err
    assert done.out == ""


def test_what_damage_took_of_a_state_is_said(accounts: Path, duramen: Command) -> None:
    with LogStore(accounts) as store:
        append_table(Committer(store), "accounts", table_of([Record(b"a", b"3", BASE_MS + 9)]))
        Committer(store).flush(store.topic("accounts"))
    (log,) = (accounts / "logs" / "accounts-0").glob("*.log")
    log.write_bytes(log.read_bytes()[:-1] + b"\xff")
    assert duramen("recover", "--yes").code == 3
    done = duramen("restore", "accounts")
    assert {row["key"]: row["value"] for row in done.lines} == {"a": "2", "c": "ü"}
    assert "accounts-0: offsets 5 to 5 were lost to damage: older values may show" in done.err
    planned = duramen("restore", "accounts", "--dry-run", output="json").json
    (loss,) = planned["losses"]
    assert (loss["partition"], loss["base_offset"], loss["end_offset"]) == (0, 5, 6)
    assert "1 offsets among them were lost to damage" in planned["plan"]
    before = duramen("restore", "accounts", "--as-of-offsets", '{"0": 5}')
    assert (before.lines, "lost" in before.err) == (done.lines, False)


def test_a_moment_that_was_thinned_and_a_value_not_text(accounts: Path, duramen: Command, tmp_path: Path) -> None:
    with LogStore(accounts) as store:
        topic = store.topic("accounts")
        state = store.partition_state(topic, 0)
        changed = replace(state, generation=state.generation + 1, first_dirty_offset=4)
        write_state(OS_FILES, store.layout.partition_state(topic.id, 0), changed)
        append_table(Committer(store), "accounts", table_of([Record(b"x", b"\xff", BASE_MS)]))
    done = duramen("restore", "accounts", "--as-of-offsets", '{"0": 2}')
    assert done.code == 1
    assert "exact from offset 4 of partition 0 on" in done.err
    assert len(duramen("restore", "accounts", "--as-of-offsets", '{"0": 2}', "--allow-thinned").lines) == 2
    done = duramen("restore", "accounts", "--output-file", tmp_path / "out")
    assert (done.code, "the value is not UTF-8" in done.err) == (1, True)
    assert sorted(os.listdir(tmp_path)) == ["store"]
