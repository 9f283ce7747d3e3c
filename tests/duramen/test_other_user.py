"""Stores made under an open or a tight umask, and another user's commands on them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duramen import cli

ROOT = Path(__file__).resolve().parents[2]
IS_ROOT = os.geteuid() == 0
NOBODY = 65534

MAKE = """
import os, sys
os.umask(int(sys.argv[1], 8))
from compaction_job.job import compact
from logstore.records.record import Record
from logstore.upkeep.backup import backup
from logstore.store import LogStore
root = sys.argv[2]
with LogStore(os.path.join(root, "deep", "store"), create=True) as store:
    store.create_topic("t", configs={"cleanup.policy": "compact", "segment.bytes": 200})
    for number in range(6):
        store.append("t", [Record(b"k%d" % (number % 2), b"v%d" % number)])
    compact(store, force=True, roll_active=True)
    store.project_checkpoints()
    backup(store, os.path.join(root, "deep", "backup"))
"""

READERS = [
    ["topics", "list"],
    ["consume", "t"],
    ["get", "t", "k0"],
    ["describe"],
    ["explain"],
    ["verify"],
    ["restore", "t"],
]
WRITERS = [
    ["topics", "create", "x"],
    ["topics", "delete", "t", "--yes"],
    ["recover"],
    ["compact"],
    ["retain"],
    ["delete-records", "t", "--partition", "0", "--before-offset", "latest", "--yes"],
    ["schedule", "--once"],
]

USE = f"""
import contextlib, io, json, os, sys
from duramen.cli import run
import compaction_job.job, compaction_job.scheduler
import logstore.restore.lookup, logstore.restore.restore, logstore.upkeep.verify
from logstore.records.native import kernels
kernels()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
os.chdir("/")
for command in json.loads(sys.argv[2]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = run(["--store", sys.argv[1], "--output", "json", *command])
    print(json.dumps([code, err.getvalue()]))
"""


@pytest.fixture(scope="module", params=["000", "077"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A store and its backup, made under an umask, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="duramen-users-") as name:
        os.chmod(name, 0o755)
        run(MAKE, request.param, name)
        yield request.param, Path(name)


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}


def contents(root: Path) -> dict[str, Any]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_whatever_the_umask_nobody_else_may_write(made: tuple[str, Path]) -> None:
    umask, place = made
    found = modes(place)
    assert len(found) > 50
    shut = stat.S_IWOTH | int(umask, 8)
    assert {name: oct(mode) for name, mode in found.items() if mode & shut} == {}


def test_another_user_reads_what_the_umask_leaves_and_changes_nothing(made: tuple[str, Path]) -> None:
    umask, place = made
    may_read = IS_ROOT and umask == "000"
    store = place / "deep" / "store"
    before = contents(store)
    if not IS_ROOT:  # nobody else to be: take the rights from the owner
        store.chmod(0)
    try:
        answers = [json.loads(line) for line in run(USE, str(store), json.dumps(READERS + WRITERS)).splitlines()]
    finally:
        if not IS_ROOT:
            store.chmod(0o755)
    for command, (code, err) in zip(READERS + WRITERS, answers, strict=True):
        if may_read and command in READERS:
            assert (code, err) == (0, "") or command == ["restore", "t"], (command, code, err)
            continue
        error = json.loads(err.strip().splitlines()[-1])["error"]
        wanted = "ReadOnlyStore" if may_read else "AccessDenied"
        if command == ["recover"] and not may_read:
            wanted = error["kind"] if error["kind"] == "PermissionError" else wanted  # looks before it opens the store
        assert (code, error["kind"]) == (1, wanted), (command, error)
    assert contents(store) == before


def test_deleted_files_are_not_held_against_the_log_that_has_their_name_now(made: tuple[str, Path]) -> None:
    """`dump` of a partition's folder right after a compaction said DAMAGE of indexes that were replaced."""
    folder = made[1] / "deep" / "store" / "logs" / "t-0"
    assert list(folder.glob("*.timeindex.deleted"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.run(["dump", str(folder)])
    assert (code, "DAMAGE" in out.getvalue()) == (0, False), out.getvalue()
