"""`duramen produce`: what is appended when a later line is wrong or the command is interrupted, and how to go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from duramen.commands import produce_lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_lines, "ROWS_PER_COMMIT", 3)


def lines(path: Path, *values: object, bad: str | None = None) -> str:
    text = "".join(json.dumps({"key": f"k{value}", "value": f"v{value}"}) + "\n" for value in values)
    path.write_text(text + (bad or ""))
    return str(path)


def values(duramen: Any, topic: str = "t") -> list[str]:
    return [json.loads(line)["value"] for line in duramen("consume", topic).out.splitlines()]


def test_a_bad_line_behind_a_commit_tells_what_is_appended_and_how_to_go_on(duramen: Any, tmp_path: Path) -> None:
    """It said "row 1" for line 5, and nothing of the lines that were in the log already."""
    duramen("topics", "create", "t", "--config", "cleanup.policy=compact")
    file = lines(tmp_path / "f", 0, 1, 2, 3, bad='{"value": "no key"}\n')
    found = duramen("produce", "t", file)
    assert (found.code, found.err) == (
        1,
        "error: line 5 has no key; a compacted topic needs a key in every record (partition t). "
        f"Lines 1 to 3 of {file} are appended: go on with --from-line 4.\n",
    )
    assert values(duramen) == ["v0", "v1", "v2"]
    lines(tmp_path / "f", 0, 1, 2, 3, 4)
    assert duramen("produce", "t", file, "--from-line", "4").out == (
        "Appended 2 records to t (83 B); lines 1 to 3 were skipped\n"
    )
    assert values(duramen) == ["v0", "v1", "v2", "v3", "v4"]


def test_the_same_in_json(duramen: Any, tmp_path: Path) -> None:
    duramen("topics", "create", "t")
    file = lines(tmp_path / "f", 0, 1, 2, 3, bad="not json\n")
    found = duramen("--output", "json", "produce", "t", file)
    error = json.loads(found.err)["error"]
    assert (found.code, error["where"]) == (2, {"file": file, "line": 5})
    assert error["done"] == {"topic": "t", "lines_appended": {"from": 1, "to": 3}, "lines_unsure": None}
    assert error["so_far"] == f"Lines 1 to 3 of {file} are appended: go on with --from-line 4."


def test_an_app_id_goes_on_where_it_was_and_takes_no_line_twice(duramen: Any, tmp_path: Path) -> None:
    duramen("topics", "create", "t")
    file = lines(tmp_path / "f", 0, 1, 2, 3, bad="not json\n")
    stopped = duramen("produce", "t", file, "--app-id", "load")
    assert stopped.err.endswith(f"Lines 1 to 3 of {file} are appended: run the same command again.\n")
    lines(tmp_path / "f", *range(5))
    for _ in range(2):  # the second run finds nothing left to do
        assert duramen("produce", "t", file, "--app-id", "load").code == 0
        assert values(duramen) == [f"v{number}" for number in range(5)]
    lines(tmp_path / "f", *range(9))  # the file grew
    assert json.loads(duramen("--output", "json", "produce", "t", file, "--app-id", "load").out)["records"] == 4
    assert values(duramen) == [f"v{number}" for number in range(9)]


def test_an_app_id_refuses_another_file(duramen: Any, tmp_path: Path) -> None:
    duramen("topics", "create", "t")
    assert duramen("produce", "t", lines(tmp_path / "f", 0, 1), "--app-id", "load").code == 0
    other = lines(tmp_path / "g", 5, 6, 7)
    found = duramen("produce", "t", other, "--app-id", "load")
    assert (found.code, found.err) == (
        2,
        f"error: {other} is not the file that was appended as app id 'load': its first 2 lines differ. Give that file, "
        "or choose another app id. `duramen produce --help` explains it.\n",
    )
    assert values(duramen) == ["v0", "v1"]


@pytest.mark.parametrize("output", ["text", "json"])
def test_an_interrupt_says_what_is_done(duramen: Any, store_path: Path, tmp_path: Path, output: str) -> None:
    duramen("topics", "create", "t")
    script = (
        # Whoever runs tests in the background may have it ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; from duramen.commands import produce, produce_lines; produce_lines.ROWS_PER_COMMIT = 3\n"
        "class Lines(type(sys.stdin.buffer)):\n"
        "    def readline(self, *limit):\n"
        "        self.asked = getattr(self, 'asked', 0) + 1\n"
        "        if self.asked == 5: open(sys.argv[1], 'x').close()\n"
        "        return super().readline(*limit)\n"
        "produce._lines = lambda file: Lines(open(0, 'rb', buffering=0, closefd=False))\n"
        "from duramen.cli import run; sys.exit(run(sys.argv[2:]))"
    )
    waits = tmp_path / "waits"  # for the fifth line, which does not come
    arguments = ["--store", str(store_path), "--output", output, "produce", "t", "-"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(waits), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("".join(f'{{"key": "k{number}", "value": "v"}}\n' for number in range(4)))
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not waits.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    assert len(values(duramen)) == 3
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    said = "Lines 1 to 3 of standard input are appended: go on with --from-line 4."
    assert process.returncode == 130
    if output == "text":
        assert err == f"error: interrupted. {said}\n"
    else:
        error = json.loads(err)["error"]
        assert (error["kind"], error["so_far"]) == ("Interrupted", said)


def test_an_interrupted_reader_says_that_nothing_was_changed(duramen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from logstore.store import LogStore

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LogStore, "__init__", interrupted)
    assert duramen("describe").err == "error: interrupted. Nothing was changed.\n"
    assert duramen("backup", "elsewhere").err.startswith("error: interrupted. The copy is not complete")


def test_sizes_and_durations_take_units(duramen: Any) -> None:
    """`10MB` was "not a whole number"."""
    created = duramen(
        "--output", "json", "topics", "create", "t", "--config", "segment.bytes=10MB", "--config=retention.ms=7d"
    )
    assert json.loads(created.out)["topic"]["configs"] == {"segment.bytes": "10485760", "retention.ms": "604800000"}
    assert duramen("topics", "create", "u", "--config", "segment.index.bytes=4KiB").code == 0
    assert duramen("topics", "create", "v", "--config", "segment.bytes=7d").code == 2


def test_more_partitions_for_a_keyed_compacted_topic_come_with_a_warning(duramen: Any) -> None:
    duramen("topics", "create", "t", "--config", "cleanup.policy=compact")
    duramen("topics", "create", "u")
    warned = duramen("topics", "alter", "t", "--partitions", "4")
    assert warned.code == 0
    assert warned.err.startswith(
        "warning: with 4 partitions instead of 1, most keys of t get their new records in another"
    )
    assert duramen("topics", "alter", "u", "--partitions", "4").err == ""
