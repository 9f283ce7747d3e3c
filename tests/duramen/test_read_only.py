"""Stores that can be read and not written: mounted read-only, or another user's. Readers work, writers are told why."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compaction_job.job import compact
from logstore.errors import AccessDenied, ReadOnlyStore
from logstore.ledger import Ledger
from logstore.records.record import Record
from logstore.store import LogStore

ROOT = Path(__file__).resolve().parents[2]
IS_ROOT = os.geteuid() == 0
NOBODY = 65534

READERS = [
    ["topics", "list"],
    ["offsets", "--timestamp", "max-timestamp"],
    ["consume", "t"],
    ["consume", "t", "--isolation", "read_committed"],
    ["get", "t", "k0"],
    ["restore", "t"],
    ["explain", "t", "--now-ms", "1700000000000"],
    ["plan", "--now-ms", "1700000000000"],
    ["describe"],
    ["verify"],
    ["config"],
    ["transactions", "list"],
    ["topics", "delete", "t", "--dry-run"],
]
WRITERS = [
    ["topics", "create", "x"],
    ["topics", "alter", "t", "--config", "segment.bytes=300"],
    ["topics", "delete", "t", "--yes"],
    ["produce", "t", "{lines}"],
    ["compact"],
    ["pause", "t"],
    ["retain"],
    ["recover"],
    ["delete-records", "t", "--partition", "0", "--before-offset", "latest", "--yes"],
    ["schedule", "--once"],
    ["backup", "{elsewhere}"],
]

#: commands in one process, as nobody or with the store mounted read-only
USE = f"""
import contextlib, io, json, os, sys
from duramen.cli import run
import compaction_job.job, compaction_job.scheduler
import logstore.restore.lookup, logstore.restore.restore, logstore.upkeep.verify, logstore.upkeep.backup
from logstore.records.native import kernels
kernels()
form, store, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if form == "user" and os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["--store", store, "--output", "json", *command])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
MOUNT = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


def make(path: Path) -> None:
    with LogStore(path, create=True) as store:
        store.create_topic("t", partitions=2, configs={"cleanup.policy": "compact", "segment.bytes": 200})
        for number in range(8):
            store.append("t", [Record(b"k%d" % (number % 3), b"v%d" % number, timestamp_ms=1_600_000_000_000)])
        compact(store, force=True, roll_active=True)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may enter, with a store that only its owner may write."""
    with tempfile.TemporaryDirectory(prefix="duramen-read-only-") as name:
        os.chmod(name, 0o755)
        make(Path(name) / "store")
        (Path(name) / "lines").write_text('{"key": "k0", "value": "new"}\n')
        yield Path(name)


@pytest.fixture(scope="module")
def usual(place: Path) -> list[Any]:
    """What the store's owner is answered."""
    return use("owner", place / "store", READERS)


@contextlib.contextmanager
def only_reading(root: Path) -> Iterator[None]:
    """This process may read what is below `root`, and write nothing of it."""
    if IS_ROOT:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    modes = {path: path.stat().st_mode for path in [root, *root.rglob("*")]}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def can_mount() -> bool:
    unshare = ["unshare", "--mount"] if IS_ROOT else ["unshare", "--user", "--map-root-user", "--mount"]
    return subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0


def use(form: str, store: Path, commands: list[list[str]]) -> list[Any]:
    arguments = [sys.executable, "-c", USE, form, str(store), json.dumps(commands)]
    if form == "mount":
        if not can_mount():
            pytest.skip("this user may not mount")
        unshare = ["unshare", "--mount"] if IS_ROOT else ["unshare", "--user", "--map-root-user", "--mount"]
        arguments = [*unshare, "sh", "-ec", MOUNT, "sh", str(store), *arguments]
    rights = contextlib.nullcontext() if IS_ROOT or form != "user" else only_reading(store)
    with rights:
        done = subprocess.run(
            arguments,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def contents(root: Path) -> dict[str, Any]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["user", "mount"])
def test_readers_answer_as_ever_and_writers_are_told(form: str, place: Path, usual: list[Any]) -> None:
    store = place / "store"
    writers = [[word.format(lines=place / "lines", elsewhere=place / "backup") for word in each] for each in WRITERS]
    before = contents(store)
    answers = use(form, store, READERS + writers)
    assert contents(store) == before
    for command, (code, out, err), (usual_code, usual_out, usual_err) in zip(READERS, answers, usual, strict=False):
        expected = usual_out.replace('"read_only": false', '"read_only": true')
        assert (code, out, err) == (usual_code, expected, usual_err), (command, out, err)
        assert code == 0, command
    for command, (code, out, err) in zip(writers, answers[len(READERS) :], strict=True):
        error = json.loads(err.strip().splitlines()[-1])["error"]
        assert (code, error["kind"], out) == (1, "ReadOnlyStore", ""), (command, out, err)
        said = {"user": "this user may not write to the store", "mount": "the store is mounted read-only"}[form]
        assert error["what"].startswith(said), error
        assert error["hint"].startswith("Reading works. To write,"), error


def test_a_store_that_cannot_be_read_is_not_called_read_only(place: Path) -> None:
    closed = place / "closed"
    make(closed)
    (closed / "version").chmod(0)
    with only_reading(closed), pytest.raises(AccessDenied, match="this user has no right to read the store") as refused:
        LogStore(closed)
    assert not isinstance(refused.value, ReadOnlyStore)


def test_a_reader_without_a_lock_survives_compaction_by_others(place: Path) -> None:
    """Nothing tells the writer that somebody reads; a file that goes under the reader means: look at the list again."""
    path = place / "busy"
    make(path)
    (path / "logs" / ".lock").unlink()
    with only_reading(path):
        reading = LogStore(path)
        reader = reading.reader(reading.topic("t"), 0)
        list(reader.columns(0, reader.view().end_offset))
    assert reading.is_read_only
    with LogStore(path) as store:
        store.alter_topic("t", configs={"file.delete.delay.ms": 0})
        for number in range(6):
            store.append("t", [Record(b"k%d" % (number % 3), b"w%d" % number, timestamp_ms=1_600_000_000_000)])
        compact(store, force=True, roll_active=True)
        now = {each.key: each.value for each in consumed(store)}
    with only_reading(path):
        assert {each.key: each.value for each in consumed(reading)} == now
        reader.close()
        reading.close()
        with pytest.raises(ReadOnlyStore):
            reading.append("t", [Record(b"k", b"v")])


def consumed(store: LogStore) -> list[Record]:
    topic = store.topic("t")
    found = []
    for number in range(topic.partitions):
        reader = store.reader(topic, number)
        start = store.partition_state(topic, number).log_start_offset
        for columns in reader.columns(start, reader.view().end_offset):
            found += columns.records()
        reader.close()
    return found


def test_what_was_committed_and_not_published_is_left_to_a_writer(place: Path) -> None:
    path = place / "unpublished"
    make(path)
    with LogStore(path) as store:
        topic = store.topic("t")
        before, shown = store.ends(topic), consumed(store)
        store.append("t", [Record(b"k0", b"later")])
    with LogStore(path) as store:
        store.write_ends(topic, before)  # as if the writer died before it published
    with only_reading(path), LogStore(path) as reading:
        assert consumed(reading) == shown


def test_a_torn_ledger_is_left_and_named(place: Path) -> None:
    path = place / "torn"
    make(path)
    log = path / "ledger" / "commits" / "_delta_log"
    newest = max(log.glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:20])
    before = contents(path)
    with only_reading(path), LogStore(path) as reading:
        with pytest.raises(ReadOnlyStore, match="the ledger must be repaired, after a power cut"):
            Ledger(reading.layout.ledger, fs=reading.fs, clock=reading.clock)
        assert len(consumed(reading)) > 0
    assert contents(path) == before


def test_a_ledger_whose_gate_cannot_be_opened_is_read_without_a_lock(place: Path) -> None:
    path = place / "gateless"
    make(path)
    for gate in (path / "ledger").glob("*.gate"):
        gate.unlink()
    with only_reading(path), LogStore(path) as reading:
        ledger = Ledger(reading.layout.ledger, fs=reading.fs, clock=reading.clock)
        assert len(ledger.commits()) == 8
