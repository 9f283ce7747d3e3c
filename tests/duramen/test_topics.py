"""`duramen topics`: the life of a topic from the command line."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def test_a_topic_over_its_life(duramen: Command, store_path: Path) -> None:
    created = duramen(
        "topics", "create", "orders", "--partitions", 3, "--config", "cleanup.policy=compact", output="json"
    )
    assert created.code == 0
    topic = created.json["topic"]
    assert created.json["created"] is True
    assert topic["partitions"] == 3
    assert topic["configs"] == {"cleanup.policy": "compact"}
    extent = {"size_bytes": 0, "records": 0, "records_exact": True}
    assert duramen("topics", "list", output="json").json == {"topics": [topic | extent], "strays": []}
    assert duramen("topics", "describe", "orders", output="json").json["topic"] == topic

    altered = duramen(
        "topics",
        "alter",
        "orders",
        "--config",
        "retention.ms=5",
        "--unset",
        "cleanup.policy",
        "--partitions",
        4,
        output="json",
    )
    assert altered.json["topic"]["configs"] == {"retention.ms": "5"}
    assert altered.json["topic"]["config_version"] == 2
    assert altered.json["topic"]["partitions"] == 4

    deleted = duramen("topics", "delete", "orders", "--yes", output="json")
    assert (deleted.code, deleted.json["deleted"]) == (0, True)
    assert duramen("topics", "list", output="json").json == {"topics": [], "strays": []}
    assert not list((store_path / "logs").glob("orders-*"))


def test_text_is_a_table_for_people(duramen: Command) -> None:
    duramen("topics", "create", "orders", "--partitions", 3)
    duramen("topics", "create", "events", "--config", "cleanup.policy=")
    listed = duramen("topics", "list").out.splitlines()
    assert listed[0].split() == ["topic", "partitions", "size", "records", "cleanup.policy"]
    assert listed[1].split() == ["events", "1", "0", "B", "0", "(none)"]
    assert listed[2].split() == ["orders", "3", "0", "B", "0", "delete"]
    assert "partitions      3" in duramen("topics", "describe", "orders").out


def test_size_and_records_of_a_topic(duramen: Command, orders: Path) -> None:
    (found,) = duramen("topics", "list", output="json").json["topics"]
    described = duramen("describe", output="json").json["topics"][0]["partitions"]
    assert found["size_bytes"] == sum(each["size_bytes"] for each in described) > 0
    assert (found["records"], found["records_exact"]) == (150, True)
    assert duramen("delete-records", "orders", "--partition", 0, "--before-offset", 30, "--yes").code == 0
    assert duramen("topics", "alter", "orders", "--config", "cleanup.policy=compact").code == 0
    assert duramen("topics", "list", output="json").json["topics"][0]["records"] == 120
    assert duramen("compact", "--roll-active").code == 0
    (after,) = duramen("topics", "list", output="json").json["topics"]
    assert (after["records"], after["records_exact"]) == (120, False)
    assert " ≤120 " in duramen("topics", "list").out
    (orders / "state" / found["id"] / "1").write_bytes(b"damaged")
    assert duramen("topics", "list", output="json").json["topics"][0]["records"] is None


def test_templates_fill_a_topic_and_config_is_stronger(duramen: Command) -> None:
    template = ROOT / "conf" / "topics" / "changelog.toml"
    created = duramen(
        "topics", "create", "orders", "--config-file", template, "--config", "segment.bytes=14", output="json"
    )
    assert created.json["topic"]["configs"]["cleanup.policy"] == "compact"
    assert created.json["topic"]["configs"]["segment.bytes"] == "14"


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "says"),
    [
        (["create", "a/b"], 2, "InvalidTopic", "character outside"),
        (["create", "x", "--config", "segment.byte=1"], 2, "UnknownConfig", "segment.byte"),
        (["create", "x", "--config", "segment.bytes=1"], 2, "InvalidConfig", ">= 14"),
        (["create", "x", "--config", "segment.bytes"], 2, "BadUsage", "name=value"),
        (["create", "x", "--config", "a=1", "--config", "a=2"], 2, "BadUsage", "twice"),
        (["create", "x", "--partitions", "0"], 2, "BadUsage", "partitions"),
        (["create", "x", "--config-file", "/no/such/file.toml"], 2, "InvalidConfig", "cannot read"),
        (["create", "orders"], 1, "TopicExists", "already"),
        (["create"], 2, "BadUsage", "NAME"),
        (["describe", "order"], 1, "UnknownTopic", "no topic is called order"),
        (["alter", "orders"], 2, "BadUsage", "nothing to alter"),
        (["alter", "orders", "--partitions", "1"], 2, "InvalidConfig", "only grow"),
        (["delete", "nope", "--yes"], 1, "UnknownTopic", "nope"),
        (["frobnicate"], 2, "BadUsage", "frobnicate"),
    ],
)
def test_refusals_have_a_kind_a_reason_and_a_code(
    duramen: Command, arguments: list[str], code: int, kind: str, says: str
) -> None:
    duramen("topics", "create", "orders", "--partitions", 2)
    import json

    in_json = duramen("topics", *arguments, output="json")
    error = json.loads(in_json.err)["error"]
    assert (in_json.code, error["kind"]) == (code, kind)
    assert says in error["what"]
    assert in_json.out == ""
    in_text = duramen("topics", *arguments)
    assert in_text.code == code
    assert in_text.err.startswith("error: ")
    assert "Traceback" not in in_text.err


def test_dry_runs_change_nothing(duramen: Command, store_path: Path) -> None:
    duramen("topics", "create", "orders")
    before = sorted(store_path.rglob("*"))
    assert duramen("topics", "create", "other", "--dry-run", output="json").json["created"] is False
    assert duramen("topics", "alter", "orders", "--partitions", 2, "--dry-run", output="json").json["altered"] is False
    assert duramen("topics", "delete", "orders", "--dry-run", output="json").json["deleted"] is False
    assert [path for path in sorted(store_path.rglob("*")) if "locks" not in path.parts] == [
        path for path in before if "locks" not in path.parts
    ]
    assert duramen("topics", "list", output="json").json["topics"][0]["partitions"] == 1


def test_deletion_asks_and_without_anyone_to_ask_refuses(duramen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    duramen("topics", "create", "orders")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    refused = duramen("topics", "delete", "orders")
    assert refused.code == 2
    assert "--yes" in refused.err

    class Person(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Person("n\n"))
    assert duramen("topics", "delete", "orders").code == 130
    assert len(duramen("topics", "list", output="json").json["topics"]) == 1
    monkeypatch.setattr("sys.stdin", Person("y\n"))
    assert duramen("topics", "delete", "orders").code == 0
    assert duramen("topics", "list", output="json").json["topics"] == []


def test_no_store_is_said(duramen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = duramen("topics", "list")
    assert missing.code == 1
    assert "no store here" in missing.err
    monkeypatch.delenv("DURAMEN_STORE")
    unnamed = duramen("topics", "list")
    assert unnamed.code == 2
    assert "DURAMEN_STORE" in unnamed.err


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_an_alteration_that_changes_nothing_is_not_written(
    kind: str, duramen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "bucket":
        monkeypatch.setenv("DURAMEN_STORE", f"memory://{uuid.uuid4().hex}/store")
    assert duramen("topics", "create", "orders", "--config", "retention.ms=5").code == 0
    same = ("topics", "alter", "orders", "--config", "retention.ms=5", "--partitions", 1)
    found = duramen(*same, output="json").json
    assert (found["altered"], found["topic"]["config_version"]) == (False, 1)
    assert duramen(*same).out == "Nothing to change: orders with 1 partition\nretention.ms  5\n"
    dry = duramen("topics", "alter", "orders", "--config", "retention.ms=6", "--dry-run")
    assert dry.out == "Would alter orders with 1 partition\nretention.ms  6\n"
    paused = [duramen(command, "orders", output="json").json for command in ("pause", "pause", "resume", "resume")]
    assert [each["altered"] for each in paused] == [True, False, True, False]
    assert duramen("topics", "describe", "orders", output="json").json["topic"]["config_version"] == 3


def test_a_dry_run_names_nothing_that_will_not_be(duramen: Command, tmp_path: Path) -> None:
    assert duramen("topics", "create", "orders").code == 0
    assert duramen("topics", "create", "other", "--partitions", 2, "--dry-run").out == (
        "Would create other with 2 partitions\n"
    )
    lines = tmp_path / "lines"
    lines.write_text("a:b\n")
    assert duramen("produce", "orders", lines, "-K", ":", "--dry-run").out == "Would append 1 record to orders\n"
