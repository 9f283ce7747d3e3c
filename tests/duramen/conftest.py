"""The command in process: `duramen(...)` gives its exit code and what it wrote; and a store to try it on."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from duramen.cli import run
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topic import parse_uuid
from metadata_log import partition, topic, write_log
from reference.partition_writer import writing

ROOT = Path(__file__).resolve().parents[2]
BASE_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Outcome]


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def duramen(store_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line on the store; `output="json"` asks for JSON."""
    monkeypatch.setenv("DURAMEN_STORE", str(store_path))

    def command(*arguments: object, output: str = "text") -> Outcome:
        capsys.readouterr()
        code = run(["--output", output, *(str(each) for each in arguments)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return command


@pytest.fixture
def orders(store_path: Path) -> Path:
    """Topic `orders`, two partitions of 100 and 50 records in several segments; returns the store's path."""
    with LogStore(store_path, create=True) as store:
        topic = store.create_topic("orders", partitions=2, configs={"segment.bytes": 1000, "index.interval.bytes": 100})
        for number, count in ((0, 100), (1, 50)):
            with writing(store, topic, number, what="test") as log:
                log.append(
                    [
                        Record(b"k%d" % (at % 7), None if at % 10 == 9 else b"v%d" % at, BASE_MS + at, (("h", b"x"),))
                        for at in range(count)
                    ],
                    batch_bytes=200,
                )
    return store_path


@pytest.fixture
def broker(duramen: Command, orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped broker's directory with topic `orders`; commands go to a store that is not made yet from here on."""
    assert duramen("export", tmp_path / "broker").code == 0
    monkeypatch.setenv("DURAMEN_STORE", str(tmp_path / "second"))
    return tmp_path / "broker"


def with_metadata(orders: Path, directory: Path, *messages: bytes) -> None:
    """A metadata log for the directory that knows topic `orders`, and what `messages` tell."""
    with LogStore(orders) as store:
        topic_id = parse_uuid(store.topic("orders").export_id)
    write_log(directory / "__cluster_metadata-0", [topic("orders", topic_id), partition(0, topic_id), *messages])


def on_a_terminal(
    store: Path, *lines: list[str], columns: int = 80, rows: int = 24, stop_when: str | None = None, **more: str
) -> str:
    """What a terminal of that size gets from these command lines, one after the other in one process.

    With `stop_when` it is interrupted (Ctrl-C) once it has shown that text.
    """
    # A process that a shell put into the background ignores interrupts, and so would its children.
    script = (
        "import json, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from duramen.cli import run; sys.exit(max([run(line) for line in json.loads(sys.argv[1])]))"
    )
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    surroundings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(lines)],
        env=surroundings
        | {"PYTHONPATH": str(ROOT), "DURAMEN_STORE": str(store), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        | more,
        stdin=subprocess.DEVNULL,
        stdout=far,
        stderr=far,
    )
    os.close(far)
    data = b""
    while True:
        try:
            chunk = os.read(near, 1 << 16)
        except OSError:  # the last one closed it
            break
        data += chunk
        if stop_when is not None and stop_when in data.decode(errors="replace"):
            stop_when = None
            process.send_signal(signal.SIGINT)
    os.close(near)
    assert process.wait(60) == 0, data.decode()
    return data.decode()


_ESCAPE = re.compile(r"\x1b\[\??[0-9;]*[A-Za-z]")


def plain_lines(seen: str) -> list[str]:
    """What was written, without escape sequences; a line that was drawn again counts again."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", _ESCAPE.sub("", seen)) if line.strip()]
