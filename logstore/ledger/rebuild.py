"""Puts a table of given rows and transactions in place of a damaged one, which is set aside in `torn/`.

    build beside it → `NAME.rebuilt`, complete and synced → the old one to `torn/` → `NAME.rebuilt` to its place

Whoever opens the table after a crash in between finds `NAME.rebuilt` and no table, and takes the last step. The new
table begins at a version above all that was ever used, so a process that still has the old one open notices.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction

from logstore.clock import Clock
from logstore.directory.trees import remove_tree
from logstore.directory.unsynced import clear_unsynced
from logstore.files import FileSystem, make_directory, replace_file
from logstore.forks import DELTA
from logstore.ledger.commit_file import OF_VERSION, SEAL, seal_of
from logstore.ledger.data_file import write_data
from logstore.ledger.delta_log import HINT_NAME, LOG_FOLDER, TORN, sync_file
from logstore.ledger.gate import Gate
from logstore.ledger.loaded_table import PROPERTIES, REBUILT, finish_rebuild
from logstore.ledger.proof import remove_proofs
from logstore.ledger.table import NO_HOOKS

#: versions left free above the newest one known: those of lost commits, which a process may have in memory
VERSIONS_FREE = 1000


@dataclass(frozen=True, slots=True)
class Contents:
    """What a table is rebuilt of."""

    schema: pa.Schema
    rows: pa.Table
    transactions: Mapping[str, int]
    #: the newest that is known of the old table
    version: int


def rebuild_table(fs: FileSystem, clock: Clock, path: str, contents: Contents) -> str | None:
    """Replace the table at `path`; returns where the old one lies now."""
    parent = os.path.dirname(path)
    make_directory(fs, parent)
    gate = Gate(fs, path + ".gate")
    with gate.alone():
        rebuilt = path + REBUILT
        finish_rebuild(fs, path)  # never lose the only copy
        remove_tree(fs, rebuilt)
        _build(fs, clock, f"{path}.new", contents)
        fs.rename(f"{path}.new", rebuilt)
        fs.fsync_dir(parent)
        aside = None
        if fs.exists(path):
            shelf = os.path.join(parent, TORN)
            make_directory(fs, shelf)
            aside = os.path.join(shelf, f"{os.path.basename(path)}-{uuid.uuid4().hex}")
            fs.rename(path, aside)
            fs.fsync_dir(shelf)
            fs.fsync_dir(parent)
        remove_proofs(fs, path)
        clear_unsynced(fs, path)  # the mark was about the old one
        fs.rename(rebuilt, path)
        fs.fsync_dir(parent)
        return aside


def _build(fs: FileSystem, clock: Clock, path: str, contents: Contents) -> None:
    schema, rows, transactions = contents.schema, contents.rows, contents.transactions
    version = contents.version + VERSIONS_FREE
    DELTA.enter()
    remove_tree(fs, path)
    log = os.path.join(path, LOG_FOLDER)
    table = DeltaTable.create(path, schema, configuration=dict(PROPERTIES))
    # Named for the version that the commit gets below: a commit file is known by it.
    name, size_bytes = write_data(fs, path, version, rows)
    table.create_write_transaction(
        [AddAction(name, size_bytes, {}, clock.now_ms(), True, json.dumps({"numRecords": rows.num_rows}))],
        "append",
        schema,
        commit_properties=CommitProperties(
            custom_metadata={
                SEAL: seal_of([(name, size_bytes)], [], list(transactions.items())),
                OF_VERSION: str(version),
            },
            max_commit_retries=0,
            app_transactions=[Transaction(key, value) for key, value in transactions.items()],
        ),
        post_commithook_properties=NO_HOOKS,
    )
    DeltaTable(path).create_checkpoint()
    hint = {"version": version, "size": _checkpoint_actions(fs, log)}
    # A checkpoint does not say of which version it is: its name does.
    for suffix in (".json", ".checkpoint.parquet"):
        fs.rename(os.path.join(log, f"{1:020d}{suffix}"), os.path.join(log, f"{version:020d}{suffix}"))
        sync_file(fs, os.path.join(log, f"{version:020d}{suffix}"))
    fs.unlink(os.path.join(log, f"{0:020d}.json"))
    replace_file(fs, os.path.join(log, HINT_NAME), json.dumps(hint).encode())
    for folder in (log, path, os.path.dirname(path)):
        fs.fsync_dir(folder)


def _checkpoint_actions(fs: FileSystem, log: str) -> int:
    file = fs.open(os.path.join(log, HINT_NAME))
    try:
        return int(json.loads(file.pread(file.size(), 0))["size"])
    finally:
        file.close()
