"""The folders in which passes write their outputs, and what is left of passes that died."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pyarrow.compute as pc

from logstore.compaction.failures import KIND
from logstore.directory.locks import FileLock
from logstore.directory.trees import remove_tree
from logstore.errors import LockHeld
from logstore.files import FileSystem
from logstore.ledger import Ledger
from logstore.ledger.rows import ABANDONED, RUNNING
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore

_OWNER_FILE = "owner"


def run_folder(store: OpenStore, partition: TopicPartition, what: str) -> tuple[str, FileLock]:
    """A folder for one pass, locked before it has its name, so that a sweep never takes it for a killed run's."""
    draft, folder = store.layout.work("draft"), store.layout.work("run")
    store.fs.mkdir(draft)
    owner = FileLock(store.fs, os.path.join(draft, _OWNER_FILE))
    owner.acquire(0)
    owner.sign(store.clock, what, partition=str(partition))  # whose records lie here
    store.fs.rename(draft, folder)
    return folder, owner


def remove_run_folder(fs: FileSystem, folder: str) -> None:
    """What cannot be removed now is removed by the next sweep."""
    with contextlib.suppress(OSError):
        remove_tree(fs, folder)


def sweep_runs(store: OpenStore) -> list[str]:
    """Remove folders that killed runs left in `staging/`; returns their names."""
    removed = []
    for name in store.fs.listdir(store.layout.staging):
        if not name.endswith("-run"):
            continue
        folder = os.path.join(store.layout.staging, name)
        lock = FileLock(store.fs, os.path.join(folder, _OWNER_FILE))
        with contextlib.suppress(FileNotFoundError):
            if lock.try_acquire():
                remove_run_folder(store.fs, folder)
                lock.release()
                removed.append(name)
    return removed


def abandon_runs(ledger: Ledger, store: OpenStore) -> list[str]:
    """Close the rows of runs that were killed: what they left undone is planned again. Returns their ids."""
    closed = []
    for run in ledger.unfinished_runs(KIND, RUNNING):
        if run.topic_id is None or run.partition is None:
            continue
        try:
            with store.locks.maintenance(run.topic_id, run.partition, what="look for killed runs", wait_ms=0):
                # It may have ended since the ledger was read; its receipt must stand.
                now = ledger.runs(pc.field("run_id") == run.run_id)
                if now and now[-1].result != RUNNING:
                    continue
                ledger.record_run(
                    replace(run, result=ABANDONED, reason="its process is gone", ended_ms=store.clock.now_ms())
                )
                closed.append(run.run_id)
        except LockHeld:
            continue
    return closed
