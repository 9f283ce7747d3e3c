"""`duramen import` and `export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
KAFKA_ID = "Kf3BP2PlSxiZLtZdEXcE9w"


def test_out_and_in_again(duramen: Command, orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = duramen("consume", "orders").out
    out = tmp_path / "broker"
    planned = duramen("export", out, "--dry-run", output="json").json
    assert planned["exported"] is False
    assert not out.exists()
    exported = duramen("export", out, "--topic-id", f"orders={KAFKA_ID}", output="json").json
    assert exported["clean"] is True
    assert [each["log_end_offset"] for each in exported["partitions"]] == [100, 50]
    assert {each["topic_id"] for each in exported["partitions"]} == {KAFKA_ID}

    monkeypatch.setenv("DURAMEN_STORE", str(tmp_path / "second"))
    duramen("topics", "create", "other")
    looked = duramen("import", out, "--dry-run", output="json").json
    assert looked["imported"] is False
    assert looked["topics"][0]["kafka_id"] == KAFKA_ID
    imported = duramen("import", out, "--link", "--topic-config", "segment.bytes=3000", output="json")
    assert imported.code == 0
    assert imported.json["clean"] is True
    assert [each["log_end_offset"] for each in imported.json["topics"][0]["partitions"]] == [100, 50]
    assert duramen("consume", "orders").out == before
    topic = duramen("topics", "describe", "orders", output="json").json["topic"]
    assert (topic["kafka_id"], topic["configs"]) == (KAFKA_ID, {"segment.bytes": "3000"})
    assert duramen("verify").code == 0
    checkpoint = tmp_path / "second" / "logs" / "replication-offset-checkpoint"
    assert checkpoint.read_text() == "0\n3\norders 0 100\norders 1 50\nother 0 0\n"


def test_import_makes_the_store(
    duramen: Command, orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duramen("export", tmp_path / "broker")
    monkeypatch.setenv("DURAMEN_STORE", str(tmp_path / "new"))
    text = duramen("import", tmp_path / "broker")
    assert text.code == 0
    assert text.out.splitlines()[0].split()[:2] == ["partition", "segments"]


def test_import_of_a_torn_log_says_so(
    duramen: Command, orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "broker"
    assert duramen("export", out, "--unclean", output="json").json["clean"] is False
    last = sorted((out / "orders-0").glob("*.log"))[-1]
    last.write_bytes(last.read_bytes() + b"torn batch")
    monkeypatch.setenv("DURAMEN_STORE", str(tmp_path / "new"))
    found = duramen("import", out, output="json")
    assert found.code == 3
    assert found.json["topics"][0]["partitions"][0]["dropped_bytes"] == 10
    assert len(duramen("consume", "orders").lines) == 150


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["import", "{tmp}/none"], 1, "no such directory"),
        (["import", "{tmp}/store/logs"], 1, "live store"),
        (["import", "{tmp}/broker"], 1, "already"),
        (["import", "{tmp}/broker", "--topic-config", "a=b"], 2, "a"),
        (["export", "{tmp}/store/logs/x"], 1, "inside the store"),
        (["export", "{tmp}/broker"], 1, "holds records"),
        (["export", "{tmp}/new", "--topic", "nope"], 1, "no topic is called nope"),
        (["export", "{tmp}/new", "--topic-id", "orders=x"], 1, "not a topic id"),
        (["export", "{tmp}/new", "--node-id", "1"], 2, "belong together"),
    ],
)
def test_refusals(duramen: Command, orders: Path, tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    assert duramen("export", tmp_path / "broker").code == 0
    found = duramen(*(each.replace("{tmp}", str(tmp_path)) for each in arguments))
    assert found.code == code, found.err
    assert says in found.err
