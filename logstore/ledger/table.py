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
import errno
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from logstore.clock import Clock
from logstore.directory.trees import remove_tree
from logstore.directory.unsynced import is_unsynced
from logstore.errors import CommitConflict, CommitUnknown, DuramenError, LedgerError, ReadOnlyStore
from logstore.files import FileSystem, read_whole, replace_file
from logstore.ledger.commit_file import OF_VERSION, SEAL, is_whole, seal_of
from logstore.ledger.data_file import DATA_FILE_BYTES_MAX, DataFile, empty_table, files_to_merge, parse_data, write_data
from logstore.ledger.delta_log import GRACE_MS, LOG_FOLDER, RECOVER, DeltaLog, Torn, delete_superseded, sync_file
from logstore.ledger.forks import enter_delta
from logstore.ledger.gate import Gate
from logstore.ledger.proof import read_proofs, write_proof
from logstore.read_only import check_writable

ATTEMPTS_MAX = 200
UNLOCKED_LOOKS = 20
UPKEEP_WAIT_MS = 200
UPKEEP_PAUSE_MS = 10_000  # after an upkeep that could not get in

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
#: a table complete beside the damaged one whose place it takes
REBUILT = ".rebuilt"
PROPERTIES = {
    "delta.enableExpiredLogCleanup": "false",
    "delta.deletedFileRetentionDuration": f"interval {GRACE_MS // 1000} seconds",
}
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does. Rows without `version` get the commit's own."""

    rows: pa.Table | Sequence[dict[str, Any]]
    transactions: dict[str, int] = field(default_factory=dict)
    removes: tuple[DataFile, ...] = ()
    is_rewrite: bool = False


class LedgerTable:
    """A table at `path`, made when missing; for any number of threads, processes and hosts, opened after any fork."""

    def __init__(
        self, path: str, schema: pa.Schema, *, fs: FileSystem, clock: Clock, upkeep_every: int, spare_files: int
    ) -> None:
        self.path = path
        self.schema = schema
        self._log = DeltaLog(fs, path)
        self._fs = fs
        self._clock = clock
        self._upkeep_every = upkeep_every
        self._spare_files = spare_files
        self._gate = Gate(fs, path + ".gate")
        self._mutex = threading.RLock()
        self._table: DeltaTable | None = None
        #: the checkpoint that the loaded table goes back to; -1: to the first commit
        self._loaded_from = -1
        self._files: tuple[int, list[DataFile]] | None = None
        #: every commit up to this one was read, found whole, and synced
        self._durable_version = -1
        self._checkpoint_version = -1
        self._upkeep_not_before_ms = 0
        #: why the last upkeep that a commit started did not finish; the commit itself stands
        self.upkeep_error: Exception | None = None
        enter_delta()
        if not fs.exists(self._log.folder):
            with self._gate.alone():
                self._create()
        self.run(lambda: None)
        if self._delta.schema().to_json() != Schema.from_arrow(schema).to_json():
            raise LedgerError("the table has other columns than this release writes", file=path)

    # --- looking ------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work` on the newest version, whose files stay in place meanwhile."""
        enter_delta()  # before the lock: a thread that the child does not have may hold it
        with self._mutex:
            try:
                return self._among_others(work)
            except Torn:
                try:
                    check_writable(self._fs)
                except ReadOnlyStore as error:
                    raise ReadOnlyStore(
                        f"the ledger must be repaired, after a power cut or a failed write, but {error.what}",
                        file=self.path,
                        hint="Any command that writes repairs it; run one where the store is writable.",
                    ) from error
                with self._gate.alone():
                    self._repair()
                    self._refresh()
                    return work()

    def _among_others(self, work: Callable[[], T]) -> T:
        for attempt in range(UNLOCKED_LOOKS):
            with self._gate.shared() as locked:
                try:
                    self._refresh()
                    return work()
                except (LedgerError, FileNotFoundError):
                    if locked or attempt == UNLOCKED_LOOKS - 1:
                        raise
            # No lock keeps files in place for a reader that may not open the gate: look again, from the beginning.
            self._table, self._files, self._durable_version = None, None, -1
        raise AssertionError("unreachable")

    @property
    def version(self) -> int:
        return self._delta.version()

    def transaction(self, name: str) -> int | None:
        """The version of an application transaction, from the log alone. Inside `run` or `write`."""
        with self._reading():
            return self._delta.transaction_version(name)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """delta-rs reads parts of the log only when they are asked for; what it meets there has a type of ours."""
        try:
            yield
        except (DeltaError, OSError) as error:
            raise_system_error(error)
            raise LedgerError(f"delta-rs cannot read the table's log: {error}", file=self.path, hint=RECOVER) from error

    def files(self) -> list[DataFile]:
        """The live files, oldest first. Inside `run` or `write`."""
        if self._files is None or self._files[0] != self.version:
            with self._reading():
                adds = pa.RecordBatchReader.from_stream(self._delta.get_add_actions()).read_all()
            columns = [adds[name].to_pylist() for name in ("path", "size_bytes", "num_records")]
            found = [DataFile(name, size, rows or 0) for name, size, rows in zip(*columns, strict=True)]
            self._files = (self.version, sorted(found, key=lambda file: file.name))
        return self._files[1]

    def read(self, file: DataFile, columns: list[str] | None = None) -> pa.Table:
        path = os.path.join(self.path, file.name)
        try:
            return parse_data(file.name, read_whole(self._fs, path, limit=DATA_FILE_BYTES_MAX), columns)
        except FileNotFoundError:
            raise LedgerError("a data file is missing", file=path, hint=RECOVER) from None
        except ValueError as error:
            raise LedgerError(f"a data file is damaged: {error}", file=path, hint=RECOVER) from error

    def read_all(self, columns: list[str] | None = None) -> pa.Table:
        """All rows, oldest first."""
        names = columns or self.schema.names
        empty = empty_table(pa.schema([self.schema.field(name) for name in names]))
        return pa.concat_tables([empty] + [self.read(file, names).cast(empty.schema) for file in self.files()])

    def read_newer(self, version: int, columns: list[str]) -> pa.Table:
        """Rows above `version`, from the files that can hold any; `columns` include the version."""
        empty = empty_table(pa.schema([self.schema.field(name) for name in columns]))
        newer = [file for file in self.files() if int(file.name[:20]) > version]
        rows = pa.concat_tables([empty] + [self.read(file, columns).cast(empty.schema) for file in newer])
        return rows.filter(pc.field("version") > version)

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, prepare: Callable[[], Change]) -> int:
        """Commit what `prepare` makes of the newest version; returns the version it became.

        `prepare` is asked again after a lost race, and may raise to give up. Raises CommitUnknown when it cannot be
        said whether the commit happened, OSError when it certainly did not.
        """
        enter_delta()
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
                raise CommitUnknown(f"no commit {version} came of it: {failure}", file=self.path) from failure
            if name.encode() not in winner:
                with contextlib.suppress(OSError):
                    self._fs.unlink(path)  # else the next upkeep finds it
                return False
            if not is_whole(winner):  # else the next process would take it for torn
                raise CommitUnknown(f"commit {version} does not read back as it was meant", file=self.path)
            self._log.sync_commits([version])
            if is_unsynced(self._fs, self.path):  # the system reports an error once, perhaps to another process
                raise CommitUnknown(f"another process could not sync commit {version}", file=self.path)
            if self._log.find_checkpoints()[-1:] > [version - 1]:
                raise CommitUnknown(f"commit {version} came after a checkpoint of its version", file=self.path)
        except OSError as error:
            raise CommitUnknown(f"commit {version} could not be made durable: {error}", file=self.path) from error
        return True

    def _create(self) -> None:
        if self._fs.exists(self._log.folder):
            return
        if finish_rebuild(self._fs, self.path):
            return
        scratch = f"{self.path}.new"
        remove_tree(self._fs, scratch)
        # delta-rs would let every user write there if the umask does
        self._fs.mkdir(os.path.join(scratch, LOG_FOLDER))
        DeltaTable.create(scratch, self.schema, configuration=dict(PROPERTIES))
        sync_file(self._fs, os.path.join(scratch, LOG_FOLDER, f"{0:020d}.json"))
        self._fs.fsync_dir(os.path.join(scratch, LOG_FOLDER))
        self._fs.fsync_dir(scratch)
        self._fs.rename(scratch, self.path)
        self._fs.fsync_dir(os.path.dirname(self.path))

    # --- loading ------------------------------------------------------------------------------------------------

    @property
    def _delta(self) -> DeltaTable:
        assert self._table is not None
        return self._table

    def _refresh(self) -> None:
        """Load the newest version, having made sure that a power cut cannot take it back."""
        while True:
            self._make_durable()
            table = self._table
            if (
                table is not None
                and table.version() < self._checkpoint_version
                and not self._fs.exists(self._log.commit_path(table.version() + 1))
            ):
                self._table, self._files = None, None  # the table was rebuilt, and versions were left out
            try:
                if self._table is None:
                    self._table, self._loaded_from = DeltaTable(self.path), self._checkpoint_version
                elif self._table.version() < self._durable_version:
                    self._table.update_incremental()
            except (DeltaError, OSError) as error:
                raise_system_error(error)
                raise LedgerError(f"delta-rs cannot load the table: {error}", file=self.path) from error
            if self._table.version() < self._durable_version:
                raise LedgerError(f"delta-rs does not see version {self._durable_version}", file=self.path)
            if self._table.version() == self._durable_version:
                return

    def _make_durable(self) -> None:
        checkpoints = self._log.find_checkpoints()
        if self._durable_version < 0:
            self._log.examine_checkpoint(checkpoints)
        self._checkpoint_version = max([-1, *checkpoints])
        known = max(self._durable_version, self._checkpoint_version)
        commits = self._log.find_commits()
        if self._table is not None and not self._is_at_hand(self._table, checkpoints, commits):
            self._table, self._files = None, None
        newer = self._log.check_newer(known, commits)
        self._log.sync_commits(newer)
        if is_unsynced(
            self._fs, self.path
        ):  # looked up last: our sync proves nothing about what another process could not sync
            raise Torn
        self._durable_version = max([known, *newer])

    def _is_at_hand(self, table: DeltaTable, checkpoints: list[int], commits: list[int]) -> bool:
        """Whether the files that a loaded table goes back to are still there: delta-rs reads them when it is asked."""
        base = self._loaded_from
        return (base < 0 or base in checkpoints) and (table.version() <= base or base + 1 in commits)

    def _repair(self) -> None:
        """Set aside what a power cut left torn; write again what could not be synced. Alone."""
        self._table, self._files, self._durable_version = None, None, -1
        checkpoints = self._log.find_checkpoints()
        while checkpoints and not self._log.is_sound(checkpoints[-1]):
            self._log.check_rebuildable(checkpoints)
            self._log.set_aside(self._log.checkpoint_path(checkpoints.pop()))
        try:
            self._log.examine_checkpoint(checkpoints)
        except Torn:
            self._fs.unlink(self._log.hint_path)  # only a hint; readers list the directory without it
            self._fs.fsync_dir(self._log.folder)
        if is_unsynced(self._fs, self.path):
            self._log.write_again()
        try:
            self._make_durable()
        except Torn:
            self._log.set_aside(self._log.commit_path(self._log.find_commits()[-1]))

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
        enter_delta()
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


def raise_system_error(error: Exception) -> None:
    """Raise what the system said if that is all that delta-rs failed at; it has errors of any class for it.

    That a file is not there is no such error: it was named, so it should be.
    """
    found = _SYSTEM_ERROR.search(str(error))
    number = int(found[1]) if found else error.errno if isinstance(error, OSError) else None
    if number not in (None, errno.ENOENT):
        raise OSError(number, os.strerror(number), getattr(error, "filename", None)) from error


def finish_rebuild(fs: FileSystem, path: str) -> bool:
    """Take the last step of a rebuild that died before it; alone. Whether there was one."""
    if fs.exists(path) or not fs.exists(path + REBUILT):
        return False
    fs.rename(path + REBUILT, path)
    fs.fsync_dir(os.path.dirname(path))
    return True
