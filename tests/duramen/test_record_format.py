"""kcat's format strings and the output of Kafka's console consumer; lines of a key and a value."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import BASE_MS, ROOT, Command, on_a_terminal

HOSTILE = b"\x1b]0;title\x07\xff\n"


@pytest.fixture
def events(store_path: Path) -> Path:
    with LogStore(store_path, create=True) as store:
        store.create_topic("events")
        headers = (("source", b"shop"), ("none", None))
        store.append("events", [Record(b"k1", b"v:1", BASE_MS, headers), Record(None, None, BASE_MS + 1)])
    return store_path


@pytest.mark.parametrize(
    ("format_", "wanted"),
    [
        ("%t %p %o %k %s\\n", "events 0 0 k1 v:1\nevents 0 1  \n"),
        ("%T|%K|%S|%h;", "1700000000000|2|3|source=shop,none=;1700000000001|-1|-1|;"),
        ("100%% \\x41\\t\\\\\\r\\0", "100% A\t\\\r\0" * 2),
        ("ä%o\n", "ä0\nä1\n"),
        ("", ""),
    ],
)
def test_format_strings(duramen: Command, events: Path, format_: str, wanted: str) -> None:
    found = duramen("consume", "events", "--format", format_)
    assert (found.code, found.out) == (0, wanted)


@pytest.mark.parametrize("format_", ["%x", "%", "a\\", "\\q", "\\x4", "%z\\n"])
def test_wrong_formats_are_refused_before_anything_is_read(duramen: Command, events: Path, format_: str) -> None:
    found = duramen("consume", "events", "--format", format_)
    assert (found.code, found.out) == (2, "")
    assert "--format" in found.err


@pytest.mark.parametrize(
    ("properties", "wanted"),
    [
        (["print.key=true"], "k1\tv:1\nnull\tnull\n"),
        (["print.key=true", "key.separator=|", "null.literal=-"], "k1|v:1\n-|-\n"),
        (
            ["print.value=false", "print.offset=true", "print.partition=true"],
            "Partition:0\tOffset:0\nPartition:0\tOffset:1\n",
        ),
        (
            ["print.timestamp=true", "print.headers=true"],
            "CreateTime:1700000000000\tsource:shop,none:null\tv:1\nCreateTime:1700000000001\tNO_HEADERS\tnull\n",
        ),
    ],
)
def test_kafka_s_properties(duramen: Command, events: Path, properties: list[str], wanted: str) -> None:
    given = [word for each in properties for word in ("--property", each)]
    assert duramen("consume", "--topic", "events", "--from-beginning", *given).out == wanted


def test_wrong_properties(duramen: Command, events: Path) -> None:
    for arguments in (
        ["--property", "print.everything=true"],
        ["--property", "print.key"],
        ["--property", "print.key=true", "--format", "%s"],
        ["--format", "%s", "--output", "json"],
    ):
        assert duramen("consume", "events", *arguments).code == 2


def test_a_pipe_gets_the_bytes_and_a_terminal_none_of_its_escapes(store_path: Path) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("events")
        store.append("events", [Record(HOSTILE, HOSTILE, headers=((HOSTILE[:9].decode(), HOSTILE),))])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DURAMEN_STORE": str(store_path)}
    command = [sys.executable, "-m", "duramen", "consume", "events", "--format", "%k%s"]
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == HOSTILE * 2
    seen = on_a_terminal(
        store_path, ["consume", "events", "-f", "%k %s %h\\n"], ["consume", "events", "--property", "print.key=true"]
    )
    assert "\x1b" not in seen
    assert "\x07" not in seen
    assert seen.count("\\x1b]0;title\\x07\\xff\\n") >= 5


def test_lines_of_a_key_and_a_value(duramen: Command, events: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"a:1\n\nb:2:3\r\nc:NULL\n:empty\nd:")
    found = duramen("produce", "events", lines, "-K", ":", "--null-marker", "NULL", output="json")
    assert (found.code, found.json["records"]) == (0, 5)
    pairs = [(each["key"], each["value"]) for each in duramen("consume", "events", "--from-offset", 2).lines]
    assert pairs == [("a", "1"), ("b", "2:3"), ("c", None), ("", "empty"), ("d", "")]


def test_lines_as_of_kafka_s_console_producer(duramen: Command, events: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"a\t1\n")
    assert duramen("produce", "events", lines, "--property", "parse.key=true").code == 0
    lines.write_bytes(b"b=2\n")
    given = ["--property", "parse.key=true", "--property", "key.separator=="]
    assert duramen("produce", "events", lines, *given).code == 0
    assert duramen("consume", "events", "--from-offset", 2, "--format", "%k=%s;").out == "a=1;b=2;"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-K", "|"], "line 1: there is no '|'"),
        (["-K", ""], "empty"),
        (["--null-marker", "x"], "--key-separator"),
        (["--property", "parse.key=false"], "parse.key=true"),
        (["--property", "headers=x"], "has no meaning here"),
        (["-K", ":", "--encoding", "base64"], "base64"),
    ],
)
def test_wrong_lines_append_nothing(
    duramen: Command, events: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"a!:1!\n")
    found = duramen("produce", "events", lines, *arguments)
    assert (found.code, says in found.err) == (2, True), found.err
    assert len(duramen("consume", "events").lines) == 2
