"""What makes the command easy to type: versions, completion, options in any place, the names Kafka's tools use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import duramen as package
from duramen.cli import _output_first
from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import BASE_MS, ROOT, Command


def test_the_version(duramen: Command) -> None:
    assert duramen("--version").out == f"duramen {package.__version__}\n"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["topics", "list", "--output", "json"], ["--output", "json", "topics", "list"]),
        (["topics", "--output=json", "list"], ["--output", "json", "topics", "list"]),
        (["--output", "text", "topics", "list", "--output", "json"], ["--output", "json", "topics", "list"]),
        (["get", "orders", "--", "--output", "json"], ["get", "orders", "--", "--output", "json"]),
        (["report", "--output", "page.html"], ["report", "--output", "page.html"]),
        (["topics", "--output"], ["topics", "--output"]),
    ],
)
def test_output_behind_the_command(given: list[str], wanted: list[str]) -> None:
    assert _output_first(given) == wanted


def test_output_holds_wherever_it_stands(duramen: Command, orders: Path) -> None:
    assert duramen("topics", "list", "--output", "json").json == duramen("topics", "list", output="json").json
    refused = duramen("topics", "nothing", "--output", "json")
    assert (refused.code, refused.err[:10]) == (2, '{"error": ')
    assert "text or json" in duramen("topics", "list", "--output", "yaml").err


@pytest.mark.parametrize("option", ["--bootstrap-server", "--broker-list", "--zookeeper"])
def test_a_broker_s_address_is_answered_with_the_way(duramen: Command, orders: Path, option: str) -> None:
    for command in (["consume", "orders"], ["produce", "orders"], ["topics", "list"]):
        found = duramen(*command, option, "localhost:9092")
        assert (found.code, "there is no broker" in found.err, "--store DIR" in found.err) == (2, True, True)


def test_kafka_s_names_of_options(duramen: Command, orders: Path) -> None:
    assert len(duramen("consume", "orders", "--from-beginning", "--max-messages", 7).lines) == 7
    assert len(duramen("consume", "orders", "--partition", 0, "--offset", 98).lines) == 2
    assert len(duramen("consume", "--topic", "orders", "--isolation-level", "read_committed").lines) == 150
    assert duramen("consume", "orders", "--from-beginning", "--from-offset", "latest").code == 2
    assert duramen("consume").code == 2


def completed(store: Path | None, line: str, shell: str = "bash") -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "DURAMEN_STORE"}
    environment |= {"PYTHONPATH": str(ROOT), "_DURAMEN_COMPLETE": f"complete_{shell}", "COMP_WORDS": line}
    environment |= {"COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": line}
    if store is not None:
        environment["DURAMEN_STORE"] = str(store)
    done = subprocess.run(
        [sys.executable, "-m", "duramen"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_topics_and_commands_are_completed(orders: Path) -> None:
    with LogStore(orders) as store:
        store.create_topic("orders-by-day")
        store.create_topic("accounts")
    assert completed(orders, "duramen consume o") == ["orders", "orders-by-day"]
    assert completed(None, f"duramen --store {orders} compact --topic a") == ["accounts"]
    assert completed(orders, "duramen topics describe ord") == ["orders", "orders-by-day"]
    assert completed(orders, "duramen ver") == ["verify"]
    assert completed(orders / "nothing", "duramen consume o") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell(shell: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "duramen", "--show-completion", shell],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_DURAMEN_COMPLETE" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n", "-c", done.stdout], check=True)


def test_several_partitions_come_interleaved_by_time(duramen: Command, store_path: Path) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("events", partitions=40)
        rows = [Record(b"k%d" % (at % 97), b"v%d" % at, BASE_MS + at) for at in range(2000)]
        for start in range(0, 2000, 500):
            store.append("events", rows[start : start + 500])
    lines = duramen("consume", "events").lines
    assert len(lines) == 2000
    by_partition: dict[int, list[int]] = {}
    for each in lines:
        by_partition.setdefault(each["partition"], []).append(each["offset"])
    assert all(offsets == list(range(len(offsets))) for offsets in by_partition.values())
    # 32 at a time: within these, by time.
    first = [each["timestamp"] for each in lines if each["partition"] < 32]
    rest = [each["timestamp"] for each in lines if each["partition"] >= 32]
    assert first == sorted(first)
    assert rest == sorted(rest)
    assert [each["value"] for each in duramen("consume", "events", "--max-records", 3).lines] == [
        record.value.decode() for record in rows if (record.value or b"") and _is_early(record, lines)
    ][:3]


def _is_early(record: Record, lines: list[dict[str, object]]) -> bool:
    """Whether it lies in one of the partitions that come first."""
    return any(each["value"] == (record.value or b"").decode() and int(str(each["partition"])) < 32 for each in lines)


def test_an_old_record_behind_a_new_one_keeps_its_place(duramen: Command, store_path: Path) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("events", partitions=2)
        by_time = {0: (10, 5, 30), 1: (7, 20)}
        for number, times in by_time.items():
            import pyarrow as pa

            columns = {
                "key": pa.array([b"k"] * len(times)),
                "value": pa.array([b"%d" % at for at in times]),
                "timestamp": pa.array([BASE_MS + at for at in times]),
                "partition": pa.array([number] * len(times), pa.int32()),
            }
            store.append("events", pa.table(columns))
    assert [each["value"] for each in duramen("consume", "events").lines] == ["7", "10", "5", "20", "30"]
