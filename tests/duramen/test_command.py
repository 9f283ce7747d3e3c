"""The command as a process: start-up, what it loads, pipes, interruptions, tracebacks."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compaction_job import compact
from logstore.records.record import Record
from logstore.store import LogStore
from reference.partition_writer import writing

ROOT = Path(__file__).resolve().parents[2]
QUICK = (["--help"], ["topics", "list"], ["config"], ["offsets"], ["describe"])
HEAVY = {"numba", "llvmlite", "pyarrow", "numpy", "pyspark", "deltalake", "rich"}


def environment(store: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "DURAMEN_STORE": str(store),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def run(store: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "duramen", *arguments],
        env=environment(store),
        capture_output=True,
        text=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )


def median_start_s(store: Path, arguments: list[str], *, runs: int) -> float:
    """The median wall time of several runs; on a machine busy with other things, that of their processor time if it is
    less: threads that wait at once on several cores count more of it.
    """
    walls, processors = [], []
    run(store, *arguments)  # the first run ever compiles the modules
    for _ in range(runs):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        assert run(store, *arguments).returncode == 0
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processors.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    busy = os.getloadavg()[0] > 0.8 * (os.cpu_count() or 1)
    wall_s = statistics.median(walls)
    return min(wall_s, statistics.median(processors)) if busy else wall_s


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_commands_start_at_once(orders: Path, arguments: list[str]) -> None:
    # What else begins on the machine meanwhile does not show in its load yet.
    assert any(median_start_s(orders, arguments, runs=5) < 0.4 for _ in range(3))


def test_describe_of_a_written_store_leaves_pandas_alone(store_path: Path) -> None:
    """PyArrow loads it unasked where it is installed, and half of the command's time goes into that."""
    with LogStore(store_path, create=True) as store:
        store.create_topic("orders", configs={"cleanup.policy": "compact"})
        store.append("orders", [Record(b"k", b"v"), Record(b"k", b"w")])
        compact(store, roll_active=True)
    code = "import sys; from duramen.cli import run; run(['describe']); sys.exit('pandas' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(store_path), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "counted segments" in done.stdout


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_commands_load_nothing_heavy(orders: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from duramen.cli import run; code = run(sys.argv[1:]); "
        f"sys.stderr.write(repr(sorted({HEAVY!r} & set(sys.modules)))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(orders), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "[]")


@pytest.mark.parametrize(
    "arguments", [["consume", "orders", "--max-records", "1"], ["verify"], ["retain", "--dry-run"]], ids=" ".join
)
def test_other_commands_start_soon(orders: Path, arguments: list[str]) -> None:
    assert median_start_s(orders, arguments, runs=3) < 1.5


def test_json_is_one_document_on_stdout_and_errors_one_on_stderr(orders: Path) -> None:
    done = run(orders, "--output", "json", "topics", "list")
    assert json.loads(done.stdout)["topics"][0]["name"] == "orders"
    assert done.stderr == ""
    failed = run(orders, "--output", "json", "topics", "describe", "nope")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert json.loads(failed.stderr)["error"] == {
        "kind": "UnknownTopic",
        "what": "no topic is called nope",
        "where": {},
        "hint": "`duramen topics list` shows what is there.",
    }


def test_tracebacks_only_with_debug(orders: Path) -> None:
    assert "Traceback" not in run(orders, "topics", "describe", "nope").stderr
    assert "Traceback" in run(orders, "--debug", "topics", "describe", "nope").stderr


def test_a_reader_that_has_had_enough_is_no_failure(orders: Path) -> None:
    with LogStore(orders) as store:
        topic = store.topic("orders")
        with writing(store, topic, 0, what="test") as log:
            log.append([Record(b"k", b"x" * 500, 1_700_000_000_000) for _ in range(1000)])
    process = subprocess.Popen(
        [sys.executable, "-m", "duramen", "consume", "orders"],
        env=environment(orders),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b'{"partition": 0, "offset": 0')
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert errors == b""


def test_following_sees_new_records_and_ends_cleanly_when_interrupted(orders: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "duramen",
            "consume",
            "orders",
            "--follow",
            "--from-offset",
            "48",
            "--partition",
            "1",
        ],
        env={**environment(orders), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background has the signal ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        ready = [json.loads(process.stdout.readline())["offset"] for _ in range(2)]
        assert ready == [48, 49]
        with LogStore(orders) as store:
            topic = store.topic("orders")
            for value in (b"one", b"two"):
                with writing(store, topic, 1, what="test") as log:
                    log.append([Record(b"k", value, 1_700_000_000_000)])
        seen = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [(each["offset"], each["value"]) for each in seen] == [(50, "one"), (51, "two")]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_nothing_destructive_happens_without_a_person(orders: Path) -> None:
    refused = run(orders, "topics", "delete", "orders", stdin=subprocess.DEVNULL)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert run(orders, "topics", "list").stdout.count("orders") == 1


def test_help_names_every_command_and_the_exit_codes(tmp_path: Path) -> None:
    text = run(tmp_path, "--help").stdout
    for name in (
        "topics", "consume", "offsets", "describe", "dump", "verify", "recover", "retain", "delete-records", "import",
        "export", "config",
    ):  # fmt: skip
        assert f"\n  {name} " in text
    assert "3 found damage" in text
    without = run(tmp_path)
    assert without.returncode == 2
    assert "Commands:" in without.stderr


def test_the_short_import_name() -> None:
    code = (
        "import sys, duramen; assert 'logstore' not in sys.modules; "
        "print(duramen.LogStore.__name__, 'LogStore' in dir(duramen), hasattr(duramen, 'Nope'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["LogStore", "True", "False"]


def test_the_list_of_commands_has_whole_sentences(duramen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = duramen("--help").out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 30
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []
    assert max(map(len, listed)) <= 80
