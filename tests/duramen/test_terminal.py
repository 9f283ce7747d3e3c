"""Control characters in keys, values, headers, settings and names never reach a terminal as they are."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from duramen.terminal import SafeStream, json_text, printable, printable_lines
from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import Command

ROOT = Path(__file__).resolve().parents[2]
#: set the title, clear the screen, colour by a one-character introducer, ring, turn text around, go back
HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x00\x08\r\x7f\u202etxt"
STYLES = re.compile(r"\x1b\[\??[0-9;]*[A-IKlhm]|\r(?=\x1b)")  # rich's own: styles, and the cursor of its progress
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def hostile(store_path: Path) -> Path:
    with LogStore(store_path, create=True) as store:
        # No setting takes such a value from the command line; a file from elsewhere may have it.
        topic = store.create_topic("orders", configs={"cleanup.policy": "compact"})
        key = HOSTILE.encode()
        store.append("orders", [Record(key, HOSTILE.encode(), headers=((HOSTILE, HOSTILE.encode()),))])
        file = Path(store.layout.logs) / str(topic.partition(0)) / "00000000000000000000.log"
    return file


def seen_on_a_terminal(store: Path, lines: list[list[str]]) -> str:
    """What a terminal gets from these command lines; with what a shell's carriage returns add taken away."""
    script = "import json, sys; from duramen.cli import run; [run(line) for line in json.loads(sys.argv[1])]"
    near, far = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(lines)],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "DURAMEN_STORE": str(store), "TERM": "xterm-256color", "COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        stdout=far,
        stderr=far,
    )
    os.close(far)
    data = b""
    while True:
        try:
            more = os.read(near, 1 << 16)
        except OSError:  # the last one closed it
            break
        if not more:
            break
        data += more
    os.close(near)
    assert process.wait(60) == 0
    return STYLES.sub("", data.decode()).replace("\r\n", "\n")


def test_no_command_sends_control_characters_to_a_terminal(hostile: Path, store_path: Path) -> None:
    passable = HOSTILE.replace("\x00", "")  # a command line ends at a zero byte
    lines = [
        ["consume", "orders"],
        ["get", "orders", passable],
        ["dump", "--print-data-log", str(hostile)],
        ["--output", "json", "dump", "--print-data-log", str(hostile)],
        ["restore", "orders"],
        ["prove-erased", "orders", passable],
        ["describe"],
        ["verify"],
        ["topics", "describe", passable],
        ["--debug", "topics", "describe", passable],
        ["offsets", "orders", "--timestamp", passable],
        ["--output", "json", "topics", "describe", passable],
        [passable],
        ["--store", passable, "topics", "list"],
    ]
    seen = seen_on_a_terminal(store_path, lines)
    for shown in ("\\u001b]0;title", "\\x1b]0;title", "\\u009b31m", "\\x9b31m"):
        assert shown in seen
    assert CONTROL.findall(seen) == []


def test_json_gives_back_what_was_written(hostile: Path, duramen: Command) -> None:
    out = duramen("consume", "orders", output="json")
    (line,) = out.lines
    assert (line["key"], line["value"], line["headers"]) == (HOSTILE, HOSTILE, [[HOSTILE, HOSTILE]])
    assert not CONTROL.search(out.out)
    assert duramen("get", "orders", HOSTILE, output="json").json["value"] == HOSTILE


def test_dump_into_a_pipe_is_what_kafka_s_tool_writes(hostile: Path, duramen: Command) -> None:
    assert HOSTILE in duramen("dump", "--print-data-log", hostile).out


def test_a_file_name_that_is_no_text_can_be_shown(tmp_path: Path, duramen: Command) -> None:
    name = os.fsdecode(b"\xff.log")
    out = duramen("dump", tmp_path / name)
    assert "\\udcff.log" in out.err
    assert duramen("dump", tmp_path / name, output="json").code == out.code != 0


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("plain äöü 日本 🙂", "plain äöü 日本 🙂", "plain äöü 日本 🙂"),
        ("a\nb\tc\r", "a\\nb\\tc\\r", "a\nb\tc\\r"),
        ("\x1b\x9b\x7f\x00", "\\x1b\\x9b\\x7f\\x00", "\\x1b\\x9b\\x7f\\x00"),
        ("\u202e\u2028\udcff", "\\u202e\\u2028\\udcff", "\\u202e\\u2028\\udcff"),
    ],
)
def test_escapes(text: str, line: str, lines: str) -> None:
    assert printable(text) == line
    assert printable_lines(text) == lines
    assert json.loads(json_text({"text": text})) == {"text": text}
    assert printable_lines(json_text(text)) == json_text(text)


def test_a_terminal_that_knows_few_characters_gets_escapes(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        SafeStream(file).write("日\x1b\n")
    assert (tmp_path / "out").read_text() == "\\u65e5\\x1b\n"
