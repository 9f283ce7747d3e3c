"""One Delta table of the ledger: written by delta-rs, made durable here, committed by compare-and-set, kept small.

What delta-rs does (1.6, tried): a commit is a staged file hard-linked to its version's name, so of two racers for a
version one gets it, and no reader sees half a file; with retries it *rebases* a commit onto a newer version; it never
syncs anything. So this module

- writes and syncs the data file itself, before the commit that names it;
- allows delta-rs no retry: a commit goes to exactly the version after the snapshot whose values were checked, or fails,
  and whether it is ours is read from the commit file, not from the error;
- syncs the commit file and the log directory before it believes a commit, its own or another's. Each process does so
  for every version it loads, so version N is durable before N + 1 is written.

**Upkeep**, holding the gate alone: merge small files into tiers, checkpoint, then delete what is superseded. Readers
that do not pass the gate (delta-spark) keep GRACE_MS for a snapshot, or as long as the newest `spare_files` superseded
files last, whichever is shorter; a version's number is never used twice, because the gate keeps a stalled committer's
log files in place. This module knows nothing of topics and apps.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from logstore.clock import Clock
from logstore.directory.unsynced import is_unsynced
from logstore.errors import CommitConflict, CommitUnknown, DuramenError, LedgerError
from logstore.files import FileSystem, replace_file
from logstore.forks import DELTA
from logstore.ledger.commit_file import OF_VERSION, SEAL, is_whole, seal_of
from logstore.ledger.data_file import DataFile, files_to_merge, write_data
from logstore.ledger.delta_log import GRACE_MS, RECOVER, Torn, delete_superseded, sync_file
from logstore.ledger.loaded_table import LoadedTable
from logstore.ledger.proof import read_proofs, write_proof

ATTEMPTS_MAX = 200
UPKEEP_WAIT_MS = 200
UPKEEP_PAUSE_MS = 10_000  # after an upkeep that could not get in
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does. Rows without `version` get the commit's own."""

    rows: pa.Table | Sequence[dict[str, Any]]
    transactions: dict[str, int] = field(default_factory=dict)
    removes: tuple[DataFile, ...] = ()
    is_rewrite: bool = False


class LedgerTable(LoadedTable):
    """A table that is written; for any number of threads, processes and hosts, opened after any fork."""

    def __init__(
        self, path: str, schema: pa.Schema, *, fs: FileSystem, clock: Clock, upkeep_every: int, spare_files: int
    ) -> None:
        self._upkeep_every = upkeep_every
        self._spare_files = spare_files
        self._upkeep_not_before_ms = 0
        #: why the last upkeep that a commit started did not finish; the commit itself stands
        self.upkeep_error: Exception | None = None
        super().__init__(path, schema, fs=fs, clock=clock)

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, prepare: Callable[[], Change]) -> int:
        """Commit what `prepare` returns for the newest version; returns the version it became.

        `prepare` is asked again after a lost race, and may raise to give up. Raises CommitUnknown when it cannot be
        said whether the commit happened, OSError when it certainly did not.
        """
        DELTA.enter()
        with self._mutex:
            version = self.run(lambda: self._commit(prepare))
            if version - self._checkpoint_version >= self._upkeep_every:
                self._upkeep_after_commit()
            return version

    def _commit(self, prepare: Callable[[], Change]) -> int:
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                time.sleep(random.uniform(0, 0.002 * min(attempt, 20)))
                self._refresh()
            if self._attempt(prepare()):
                return self.version + 1
        raise CommitConflict(
            f"other writers were faster {ATTEMPTS_MAX} times in a row", file=self.path, hint="Try again."
        )

    def _attempt(self, change: Change) -> bool:
        """Try to commit the version after the loaded one; False when another writer did."""
        version = self.version + 1
        rows = change.rows
        if not isinstance(rows, pa.Table):
            rows = pa.Table.from_pylist([{"version": version} | row for row in rows], schema=self.schema)
        newest = max(rows["version"].to_pylist(), default=version)
        name, size_bytes = write_data(self._fs, self.path, newest, rows)
        path = os.path.join(self.path, name)
        now_ms = self._clock.now_ms()
        stats = json.dumps({"numRecords": rows.num_rows})
        actions: list[AddAction | RemoveAction] = [
            AddAction(name, size_bytes, {}, now_ms, not change.is_rewrite, stats),
            *(RemoveAction(gone.name, not change.is_rewrite, now_ms, gone.size_bytes, {}) for gone in change.removes),
        ]
        seal = seal_of([(name, size_bytes)], [gone.name for gone in change.removes], list(change.transactions.items()))
        properties = CommitProperties(
            custom_metadata={SEAL: seal, OF_VERSION: str(version)},
            max_commit_retries=0,
            app_transactions=[Transaction(key, value) for key, value in change.transactions.items()],
        )
        failure: Exception | None = None
        try:
            self._delta.create_write_transaction(
                actions, "append", self.schema, commit_properties=properties, post_commithook_properties=NO_HOOKS
            )
        except Exception as error:  # delta-rs raises many kinds; the commit file says what happened
            failure = error
        try:
            winner = self._log.read_commit(version)
            if winner is None and not self._fs.exists(self._log.commit_path(version - 1)):
                # delta-rs reads a table without it, but does not commit to it.
                raise LedgerError("the commit file is missing", file=self._log.commit_path(version - 1), hint=RECOVER)
            if winner is None:
                raise CommitUnknown(f"commit {version} may not have happened: {failure}", file=self.path) from failure
            if name.encode() not in winner:
                with contextlib.suppress(OSError):
                    self._fs.unlink(path)  # else the next upkeep finds it
                return False
            if not is_whole(winner):  # else the next process would take it for torn
                raise CommitUnknown(f"commit {version} does not read back as it was written", file=self.path)
            self._log.sync_commits([version])
            if is_unsynced(self._fs, self.path):  # the system reports an error once, perhaps to another process
                raise CommitUnknown(f"another process could not sync commit {version}", file=self.path)
            if self._log.find_checkpoints()[-1:] > [version - 1]:
                raise CommitUnknown(f"commit {version} came after a checkpoint of its version", file=self.path)
        except OSError as error:
            raise CommitUnknown(f"commit {version} could not be made durable: {error}", file=self.path) from error
        return True

    # --- upkeep -------------------------------------------------------------------------------------------------

    def _upkeep_after_commit(self) -> None:
        if self._clock.monotonic_ms() < self._upkeep_not_before_ms:
            return
        try:
            self.maintain(wait_ms=UPKEEP_WAIT_MS)
            self.upkeep_error = None
        except (DuramenError, DeltaError, OSError, pa.ArrowException) as error:
            self.upkeep_error = error
            self._upkeep_not_before_ms = self._clock.monotonic_ms() + UPKEEP_PAUSE_MS

    def maintain(self, *, wait_ms: int = 30_000) -> None:
        """Merge, checkpoint, delete what is superseded. Raises LockHeld when others stay inside for `wait_ms`."""
        DELTA.enter()
        with self._mutex, self._gate.alone(wait_ms):
            try:
                self._refresh()
            except Torn:
                self._repair()
                self._refresh()
            self._settle_checkpoints()
            self._merge()
            self._checkpoint()
            before_ms = self._clock.now_ms() - GRACE_MS
            self._log.delete_superseded(before_ms, self._spare_files)
            self._delete_data(before_ms)

    def _merge(self) -> None:
        files = self.files()
        merged = tuple(files[len(files) - files_to_merge(files) :])
        if len(merged) < 2:
            return
        rows = pa.concat_tables([self.read(file).cast(self.schema) for file in merged])
        if not self._attempt(Change(rows, removes=merged, is_rewrite=True)):
            raise CommitConflict("a writer did not pass the gate", file=self.path)
        for file in merged:  # from now on the file's time says since when it is superseded
            self._fs.set_mtime(os.path.join(self.path, file.name), self._clock.now_ms())
        self._refresh()

    def _settle_checkpoints(self) -> None:
        """Leave no newest checkpoint without a proof: it may not be on disk."""
        checkpoints = self._log.find_checkpoints()
        while checkpoints and checkpoints[-1] not in read_proofs(self._fs, self.path):
            try:
                self._log.check_rebuildable(checkpoints)
            except LedgerError:  # an older release made it, and deleted what it sums up
                data = self._log.read(self._log.checkpoint_path(checkpoints[-1]))
                replace_file(self._fs, self._log.checkpoint_path(checkpoints[-1]), data)
                write_proof(self._fs, self.path, checkpoints[-1], data)
            else:
                self._log.drop_checkpoint(checkpoints.pop())
                self._table = None
                self._refresh()

    def _checkpoint(self) -> None:
        if self.version > self._checkpoint_version:
            self._delta.create_checkpoint()
            try:
                sync_file(self._fs, self._log.checkpoint_path(self.version))
                sync_file(self._fs, self._log.hint_path)
                self._fs.fsync_dir(self._log.folder)
            except OSError:
                with contextlib.suppress(OSError):  # else the next upkeep does, since it has no proof
                    self._log.drop_checkpoint(self.version)
                raise
            data = self._log.read(self._log.checkpoint_path(self.version))
            write_proof(self._fs, self.path, self.version, data)
            self._checkpoint_version = self.version
            self._table = None  # a table loaded from the checkpoint commits faster than one that remembers every commit
            self._refresh()

    def _delete_data(self, before_ms: int) -> None:
        live = {file.name for file in self.files()}
        paths = [
            os.path.join(self.path, name)
            for name in self._fs.listdir(self.path)
            if name.endswith(".parquet") and name not in live
        ]
        superseded = sorted((self._fs.stat(path).mtime_ms, path) for path in paths)
        delete_superseded(self._fs, superseded, before_ms, self._spare_files)
