"""Exit codes of `verify` and `recover` tell the truth: 3 if anything was wrong, also if all of it was rebuilt."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duramen.cli import run
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.records.record import Record
from logstore.store import LogStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "store"
    with LogStore(root, create=True) as store:
        store.create_topic("orders", partitions=1, configs={"segment.bytes": 600, "retention.ms": -1})
        store.create_topic("empty", partitions=1)
        committer = Committer(store)
        for batch in range(6):
            records = [Record(b"k%d" % at, b"v" * 40, 1_700_000_000_000 + batch) for at in range(4)]
            append_table(committer, "orders", table_of(records), app=AppBatch("app", batch, "query"))
        committer.flush(store.topic("orders"))
        (root.parent / "id").write_text(store.topic("empty").id)
    return root


def duramen(root: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run(["--store", str(root), "--output", "json", *arguments])
    return code, json.loads(out.getvalue())


def remove(path: Path) -> None:
    path.unlink()


def garble(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        ("logs/orders-0/*.index", remove),
        ("logs/orders-0/*.timeindex", garble),
        ("logs/orders-0/*.snapshot", garble),
        ("logs/orders-0/*.snapshot", empty),
        ("state/EMPTY/ends", garble),
        ("state/EMPTY/topic", garble),
        ("state/EMPTY/topic", empty),
        ("logs/replication-offset-checkpoint", garble),
        ("logs/log-start-offset-checkpoint", garble),
        ("logs/meta.properties", remove),
        ("logs/meta.properties", garble),
        ("logs/meta.properties", empty),
        ("ledger/commits/_delta_log/*.json", garble),
    ],
)
def test_recover_says_what_verify_said_and_leaves_nothing_to_say(
    made: Path, tmp_path: Path, pattern: str, how: Callable[[Path], None]
) -> None:
    root = Path(shutil.copytree(made, tmp_path / "store"))
    how(min(root.glob(pattern.replace("EMPTY", (made.parent / "id").read_text()))))
    assert duramen(root, "verify")[0] == 3
    code, planned = duramen(root, "recover", "--dry-run")
    assert (code, planned["sound"]) == (3, False)
    code, recovered = duramen(root, "recover")
    assert (code, recovered["sound"]) == (3, False)
    said = [
        *recovered["store"]["actions"],
        *(note for each in recovered["partitions"] for note in [*each["repaired"], *each["findings"]]),
    ]
    assert said
    assert duramen(root, "verify")[0] == 0
    assert duramen(root, "recover")[0] == 0
