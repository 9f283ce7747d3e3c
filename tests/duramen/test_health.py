"""A damaged ledger, version or locks folder on the command line: what `verify`, `describe` and `recover` say and do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.apps import AppBatch
from logstore.records.record import Record
from logstore.store import LogStore

Command = Callable[..., Any]


@pytest.fixture
def written(store_path: Path) -> Path:
    """Topic `orders` with three committed batches."""
    with LogStore(store_path, create=True) as store:
        store.create_topic("orders")
        for batch in range(3):
            store.append("orders", [Record(b"k", b"v%d" % batch)], app=AppBatch("app", batch, "query-1"))
    return store_path


def newest_commit(root: Path) -> Path:
    return max((root / "ledger" / "commits" / "_delta_log").glob("*.json"))


@pytest.mark.parametrize("damage", ["removed", "truncated", "emptied", "garbled"])
def test_a_lost_commit_is_found_and_made_good(duramen: Command, written: Path, damage: str) -> None:
    path = newest_commit(written)
    if damage == "removed":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes({"truncated": data[:90], "emptied": b"", "garbled": data[::-1]}[damage])
    found = duramen("verify", output="json")
    assert (found.code, found.json["sound"], found.json["store"]["sound"]) == (3, False, False)
    assert "3 commits were applied, the ledger knows 2" in duramen("describe").out
    failed = duramen("recover", "--dry-run")
    assert failed.code == 3
    assert "would rebuild the ledger" in failed.out
    assert duramen("verify").code == 3  # the dry run changed nothing
    recovered = duramen("recover", output="json")
    assert (recovered.code, recovered.json["sound"]) == (3, False)
    assert recovered.json["store"]["actions"]
    for command in ("verify", "recover"):
        sound = duramen(command, output="json")
        assert (sound.code, sound.json["store"]["sound"]) == (0, True), sound
    with LogStore(written) as store:
        assert store.append("orders", [Record(b"k", b"v2")], app=AppBatch("app", 2, "query-1")).replayed
        store.append("orders", [Record(b"k", b"v3")], app=AppBatch("app", 3, "query-1"))
    assert [each["value"] for each in duramen("consume", "orders").lines] == ["v0", "v1", "v2", "v3"]


def test_a_missing_ledger_is_found_and_made_good(duramen: Command, written: Path) -> None:
    shutil.rmtree(written / "ledger")
    assert duramen("verify").code == 3
    assert duramen("describe").code == 0
    assert duramen("recover").code == 3
    assert duramen("verify").code == 0
    assert len(duramen("consume", "orders").lines) == 3


def test_a_missing_version_is_said_and_written_again(duramen: Command, written: Path) -> None:
    (written / "version").unlink()
    for arguments in (["verify"], ["describe"], ["topics", "list"], ["topics", "create", "new"]):
        failed = duramen(*arguments)
        assert failed.code == 3
        assert "version file is missing" in failed.err
        assert "`duramen recover`" in failed.err
    dry = duramen("recover", "--dry-run")
    assert (dry.code, "would write the version file" in dry.out) == (3, True)
    assert not (written / "version").exists()
    assert duramen("recover").code == 3
    assert duramen("verify").code == 0


def test_missing_locks_are_made_again(duramen: Command, written: Path) -> None:
    shutil.rmtree(written / "locks")
    assert duramen("verify").code == 0
    assert duramen("recover").code == 0


def test_a_restored_backup_says_since_when_and_from_what(duramen: Command, written: Path, tmp_path: Path) -> None:
    assert duramen("describe", output="json").json["store"]["origin"] is None
    copy = tmp_path / "copy"
    assert duramen("backup", copy).code == 0
    arguments = ("--store", str(copy))
    assert "nothing was written to it since" in duramen(*arguments, "describe").out
    with LogStore(copy) as store:
        store.append("orders", [Record(b"k", b"v3")], app=AppBatch("app", 3, "query-1"))
    for command in (("describe",), ("topics", "describe", "orders")):
        told = duramen(*arguments, *command).out
        assert f"restored from a backup of {written}, taken 20" in told
        assert "written to since 20" in told
    assert duramen(*arguments, "describe", output="json").json["store"]["origin"]["source"] == str(written)
    assert duramen(*arguments, "verify").code == 0
