"""One Delta table of the ledger: written by delta-rs, made durable here, committed by compare-and-set, kept small.

What delta-rs does (1.6, tried): a commit is a staged file hard-linked to its version's name, so of two racers for a
version one gets it, and nobody sees half a file; with retries it *rebases* a commit onto a newer version; it never
syncs anything. So this module

- writes and syncs the data file itself, before the commit that names it;
- allows delta-rs no retry: a commit goes to exactly the version after the snapshot whose values were checked, or fails,
  and whether it is ours is read from the commit file, not from the error;
- syncs the commit file and the log directory before it believes a commit, its own or another's. Each process does so
  for every version it loads, thus version N is durable before anybody writes N + 1.

**Torn files.** A commit carries a checksum of its actions. The last commit file may be unreadable after a power cut: it
was never synced, so nobody was told of it; it counts as not committed and is moved to `torn/`. An unreadable commit
file below another one cannot come from a power cut: LedgerError. A checkpoint nobody synced may be torn too; it is
moved to `torn/` if the commits it sums up are all there, which they are unless it was synced: else LedgerError. Only
bytes that were read in full and do not parse are evidence of damage. An error of the system is passed on as it is.

**Failed syncs.** After one, the next sync succeeds and proves nothing. If a commit file or its name could not be
synced, the table is marked (`NAME.unsynced`). Whoever loads it next, alone behind the gate, writes the commits again as
new files before it believes them. A checkpoint counts as durable only with its proof (`proof.py`); one without it is
made again, and until then no commit is deleted.

**Upkeep**, alone behind the gate: merge small files into tiers, checkpoint, then delete what is superseded. Readers
that do not pass the gate (delta-spark) keep GRACE_MS for a snapshot, or as long as the newest `spare_files` superseded
files last, whichever is shorter; a version's number is never used twice, because the gate keeps a stalled committer's
log files in place. This module knows nothing of topics and apps.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from logstore.clock import Clock
from logstore.directory.unsynced import clear_unsynced, is_unsynced, marking_unsynced
from logstore.errors import CommitConflict, CommitUnknown, DuramenError, LedgerError, ReadOnlyStore
from logstore.files import FileSystem, make_directory, read_whole, replace_file, take_from_others
from logstore.ledger.forks import enter_delta
from logstore.ledger.gate import Gate
from logstore.ledger.proof import is_as_proved, read_proofs, remove_proofs, write_proof
from logstore.read_only import check_writable, is_read_only

GRACE_MS = 60_000
ATTEMPTS_MAX = 200
UNLOCKED_LOOKS = 20
UPKEEP_WAIT_MS = 200
UPKEEP_PAUSE_MS = 10_000  # after an upkeep that could not get in
MERGED_BYTES_MAX = 8 << 20
LOG_FILE_BYTES_MAX = 64 << 20
DATA_FILE_BYTES_MAX = 256 << 20
#: where files are set aside, beside the tables
TORN = "torn"
RECOVER = "`duramen recover` rebuilds the ledger from what is left"

COMMIT_NAME = re.compile(r"(\d{20})\.json\Z")
CHECKPOINT_NAME = re.compile(r"(\d{20})\.checkpoint\.parquet\Z")
_DATA_NAME = re.compile(r"\d{20}-[0-9a-f]{32}-([0-9a-f]{8})\.parquet\Z")
_ADDED = re.compile(r"(\d{20})-[0-9a-f]{32}-[0-9a-f]{8}\.parquet\Z")
_STAGED = re.compile(r".+(#\d+|\.tmp)\Z")  # what a killed delta-rs, or a killed repair, leaves of a file on its way
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
HINT_NAME = "_last_checkpoint"
LOG_FOLDER = "_delta_log"
#: a table complete beside the damaged one whose place it takes
REBUILT = ".rebuilt"
SEAL = "duramenSeal"
OF_VERSION = "duramenVersion"
PROPERTIES = {
    "delta.enableExpiredLogCleanup": "false",
    "delta.deletedFileRetentionDuration": f"interval {GRACE_MS // 1000} seconds",
}
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A live data file; names sort by the version of their newest rows."""

    name: str
    size_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does. Rows without `version` get the commit's own."""

    rows: pa.Table | Sequence[dict[str, Any]]
    transactions: dict[str, int] = field(default_factory=dict)
    removes: tuple[DataFile, ...] = ()
    is_rewrite: bool = False


class _Torn(Exception):
    """A file only a power cut leaves so, or one whose sync failed."""


class LedgerTable:
    """A table at `path`, made when missing; for any number of threads, processes and hosts, opened after any fork."""

    def __init__(
        self, path: str, schema: pa.Schema, *, fs: FileSystem, clock: Clock, upkeep_every: int, spare_files: int
    ) -> None:
        self.path = path
        self.schema = schema
        self._log = os.path.join(path, LOG_FOLDER)
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
        if not fs.exists(self._log):
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
            except _Torn:
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
                adds = pa.table(self._delta.get_add_actions())
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
        empty = pa.schema([self.schema.field(name) for name in names]).empty_table()
        return pa.concat_tables([empty] + [self.read(file, names).cast(empty.schema) for file in self.files()])

    def read_newer(self, version: int, columns: list[str]) -> pa.Table:
        """Rows above `version`, from the files that can hold any; `columns` include the version."""
        empty = pa.schema([self.schema.field(name) for name in columns]).empty_table()
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
        """Try to become the version after the loaded one; False when somebody else did."""
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
            winner = self._read_commit(version)
            if winner is None and not self._fs.exists(self._commit_path(version - 1)):
                # delta-rs reads a table without it, but does not commit to it.
                raise LedgerError("the commit file is missing", file=self._commit_path(version - 1), hint=RECOVER)
            if winner is None:
                raise CommitUnknown(f"no commit {version} came of it: {failure}", file=self.path) from failure
            if name.encode() not in winner:
                with contextlib.suppress(OSError):
                    self._fs.unlink(path)  # else the next upkeep finds it
                return False
            if not is_whole(winner):  # else the next process would take it for torn
                raise CommitUnknown(f"commit {version} does not read back as it was meant", file=self.path)
            self._sync_commits([version])
            if is_unsynced(self._fs, self.path):  # the system tells of an error once, perhaps not us
                raise CommitUnknown(f"another process could not sync commit {version}", file=self.path)
            if self._find_checkpoints()[-1:] > [version - 1]:
                raise CommitUnknown(f"commit {version} came after a checkpoint of its version", file=self.path)
        except OSError as error:
            raise CommitUnknown(f"commit {version} could not be made durable: {error}", file=self.path) from error
        return True

    def _create(self) -> None:
        if self._fs.exists(self._log):
            return
        if finish_rebuild(self._fs, self.path):
            return
        scratch = f"{self.path}.new"
        remove_tree(self._fs, scratch)
        # delta-rs would let anybody write there if the umask does
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
                and not self._fs.exists(self._commit_path(table.version() + 1))
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
        checkpoints = self._find_checkpoints()
        if self._durable_version < 0:
            self._examine_checkpoint(checkpoints)
        self._checkpoint_version = max([-1, *checkpoints])
        known = max(self._durable_version, self._checkpoint_version)
        commits = self._find_commits()
        if self._table is not None and not self._is_at_hand(self._table, checkpoints, commits):
            self._table, self._files = None, None
        newer = [version for version in commits if version > known]
        if newer != list(range(known + 1, known + 1 + len(newer))):
            raise LedgerError(f"a commit file between {known} and {newer[-1]} is missing", file=self._log, hint=RECOVER)
        for version in newer:
            data = self._read_commit(version)
            if data is None:
                raise LedgerError("a commit file vanished while it was looked at", file=self._commit_path(version))
            if not is_whole(data):
                if version != newer[-1] or version == 0:
                    raise LedgerError("a commit file is damaged", file=self._commit_path(version), hint=RECOVER)
                raise _Torn
            if not is_of_version(data, version):  # no power cut leaves that
                raise LedgerError("a commit file is another version's", file=self._commit_path(version), hint=RECOVER)
        self._sync_commits(newer)
        if is_unsynced(self._fs, self.path):  # looked up last: what another could not sync, ours does not prove
            raise _Torn
        self._durable_version = max([known, *newer])

    def _is_at_hand(self, table: DeltaTable, checkpoints: list[int], commits: list[int]) -> bool:
        """Whether the files that a loaded table goes back to are still there: delta-rs reads them when it is asked."""
        base = self._loaded_from
        return (base < 0 or base in checkpoints) and (table.version() <= base or base + 1 in commits)

    def _sync_commits(self, versions: list[int]) -> None:
        if is_read_only(self._fs):
            return  # nothing is decided by what only reads
        for version in versions:
            sync_file(self._fs, self._commit_path(version), table=self.path)
        if versions:
            with marking_unsynced(self._fs, self.path):
                self._fs.fsync_dir(self._log)
        if versions[:1] == [0]:  # whoever made the table may have died before its own name was synced
            parent = os.path.dirname(self.path)
            for folder in (self.path, parent, os.path.dirname(parent)):
                self._fs.fsync_dir(folder)

    def _examine_checkpoint(self, checkpoints: list[int]) -> None:
        hint = self._hint_version()
        if hint is not None and hint not in checkpoints:
            raise _Torn
        if checkpoints and not self._is_sound(checkpoints[-1]):
            raise _Torn

    def _is_sound(self, checkpoint: int) -> bool:
        """Whether it can be read, and is the one that was proved if any was."""
        data = self._read_log(self._checkpoint_path(checkpoint))
        return is_parquet(data) and is_as_proved(read_proofs(self._fs, self.path), checkpoint, data)

    def _repair(self) -> None:
        """Set aside what a power cut left torn; write again what could not be synced. Alone."""
        self._table, self._files, self._durable_version = None, None, -1
        checkpoints = self._find_checkpoints()
        while checkpoints and not self._is_sound(checkpoints[-1]):
            self._check_rebuildable(checkpoints)
            self._set_aside(self._checkpoint_path(checkpoints.pop()))
        try:
            self._examine_checkpoint(checkpoints)
        except _Torn:
            self._fs.unlink(self._hint_path)  # only a hint; readers list the directory without it
            self._fs.fsync_dir(self._log)
        if is_unsynced(self._fs, self.path):
            self._write_again()
        try:
            self._make_durable()
        except _Torn:
            self._set_aside(self._commit_path(self._find_commits()[-1]))

    def _write_again(self) -> None:
        """Every commit as a new file with a new name, which the sync of the old one says nothing about."""
        for version in self._find_commits():
            data = self._read_commit(version)
            if data is not None and is_whole(data):
                replace_file(self._fs, self._commit_path(version), data)
        clear_unsynced(self._fs, self.path)

    def _check_rebuildable(self, checkpoints: list[int]) -> None:
        """Raises LedgerError unless all that the last checkpoint sums up can be read without it."""
        torn = checkpoints[-1]
        # The one before may be torn as well: then the commits must go back to the first.
        whole = [each for each in checkpoints[:-1] if self._is_sound(each)]
        for version in range(max([-1, *whole]) + 1, torn + 1):
            data = self._read_commit(version)
            if data is None or not is_whole(data) or not is_of_version(data, version):
                raise LedgerError(
                    f"a checkpoint is damaged, and commit {version} that it sums up is not there to replace it",
                    file=self._checkpoint_path(torn),
                    hint=RECOVER,
                )

    def _set_aside(self, path: str) -> None:
        """Move a file of the log to `torn/`: nobody looks for it there, and nothing is lost."""
        shelf = os.path.join(os.path.dirname(self.path), TORN)
        make_directory(self._fs, shelf)
        stem, dot, suffix = os.path.basename(path).partition(".")
        name = f"{os.path.basename(self.path)}-{stem}-{uuid.uuid4().hex}{dot}{suffix}"
        self._fs.rename(path, os.path.join(shelf, name))
        self._fs.fsync_dir(shelf)
        self._fs.fsync_dir(self._log)

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
            except _Torn:
                self._repair()
                self._refresh()
            self._settle_checkpoints()
            self._merge()
            self._checkpoint()
            self._delete_log()
            self._delete_data()

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
        """Leave no newest checkpoint without a proof: nobody knows whether it is on disk."""
        checkpoints = self._find_checkpoints()
        while checkpoints and checkpoints[-1] not in read_proofs(self._fs, self.path):
            try:
                self._check_rebuildable(checkpoints)
            except LedgerError:  # an older release made it, and deleted what it sums up
                data = self._read_log(self._checkpoint_path(checkpoints[-1]))
                replace_file(self._fs, self._checkpoint_path(checkpoints[-1]), data)
                write_proof(self._fs, self.path, checkpoints[-1], data)
            else:
                self._drop_checkpoint(checkpoints.pop())
                self._table = None
                self._refresh()

    def _drop_checkpoint(self, version: int) -> None:
        """The commits it sums up are all there."""
        for path in (self._hint_path, self._checkpoint_path(version)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path)
        self._fs.fsync_dir(self._log)

    def _checkpoint(self) -> None:
        if self.version > self._checkpoint_version:
            self._delta.create_checkpoint()
            try:
                sync_file(self._fs, self._checkpoint_path(self.version))
                sync_file(self._fs, self._hint_path)
                self._fs.fsync_dir(self._log)
            except OSError:
                with contextlib.suppress(OSError):  # else the next upkeep does, since it has no proof
                    self._drop_checkpoint(self.version)
                raise
            data = self._read_log(self._checkpoint_path(self.version))
            write_proof(self._fs, self.path, self.version, data)
            self._checkpoint_version = self.version
            self._table = None  # a table loaded from the checkpoint commits faster than one that remembers every commit
            self._refresh()

    def _delete_log(self) -> None:
        proofs = read_proofs(self._fs, self.path)
        found = [version for version in self._find_checkpoints() if version in proofs]
        if not found:
            return
        if not self._is_sound(found[-1]):
            raise LedgerError("a checkpoint is damaged", file=self._checkpoint_path(found[-1]), hint=RECOVER)
        checkpoints = {version: self._mtime_ms(self._checkpoint_path(version)) for version in found}
        superseded: list[tuple[int, int, str]] = []
        for name in self._fs.listdir(self._log):
            path = os.path.join(self._log, name)
            if _STAGED.match(name):
                self._fs.unlink(path)
            elif match := COMMIT_NAME.match(name) or CHECKPOINT_NAME.match(name):
                version = int(match[1])
                later = [since_ms for checkpoint, since_ms in checkpoints.items() if checkpoint > version]
                if later:
                    superseded.append((min(later), version, path))
        self._delete_superseded((since_ms, path) for since_ms, _, path in sorted(superseded))
        remove_proofs(self._fs, self.path, keep=self._find_checkpoints())

    def _delete_data(self) -> None:
        live = {file.name for file in self.files()}
        paths = [
            os.path.join(self.path, name)
            for name in self._fs.listdir(self.path)
            if name.endswith(".parquet") and name not in live
        ]
        self._delete_superseded(sorted((self._mtime_ms(path), path) for path in paths))

    def _delete_superseded(self, files: Iterable[tuple[int, str]]) -> None:
        ordered = list(files)
        cutoff_ms = self._clock.now_ms() - GRACE_MS
        for index, (since_ms, path) in enumerate(ordered):
            if since_ms < cutoff_ms or index < len(ordered) - self._spare_files:
                self._fs.unlink(path)

    # --- files --------------------------------------------------------------------------------------------------

    def _commit_path(self, version: int) -> str:
        return os.path.join(self._log, f"{version:020d}.json")

    def _checkpoint_path(self, version: int) -> str:
        return os.path.join(self._log, f"{version:020d}.checkpoint.parquet")

    @property
    def _hint_path(self) -> str:
        return os.path.join(self._log, HINT_NAME)

    def _hint_version(self) -> int | None:
        try:
            return int(json.loads(self._read_log(self._hint_path))["version"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _Torn from error

    def _find_commits(self) -> list[int]:
        return [int(found[1]) for name in self._fs.listdir(self._log) if (found := COMMIT_NAME.match(name))]

    def _find_checkpoints(self) -> list[int]:
        return [int(found[1]) for name in self._fs.listdir(self._log) if (found := CHECKPOINT_NAME.match(name))]

    def _read_commit(self, version: int) -> bytes | None:
        try:
            return self._read_log(self._commit_path(version))
        except FileNotFoundError:
            return None

    def _read_log(self, path: str) -> bytes:
        return read_whole(self._fs, path, limit=LOG_FILE_BYTES_MAX)

    def _mtime_ms(self, path: str) -> int:
        return self._fs.stat(path).mtime_ms


def sync_file(fs: FileSystem, path: str, *, table: str | None = None) -> None:
    """If the sync fails, `table` gets the mark: the next one that succeeds proves nothing."""
    file = fs.open(path)
    try:
        with contextlib.suppress(OSError):  # a simulated file, or another user's
            take_from_others(file.fileno())  # delta-rs makes files that anybody may write where the umask is 0
        with marking_unsynced(fs, table):
            file.fsync()
    finally:
        file.close()


def write_data(fs: FileSystem, folder: str, newest: int, rows: pa.Table) -> tuple[str, int]:
    """A data file whose newest row has version `newest`, durable with its name when this returns; its name and size.

    The name carries the checksum of the file: Parquet's own do not cover its footer.
    """
    sink = io.BytesIO()
    pq.write_table(rows, sink, compression="zstd", store_schema=False)
    data = sink.getvalue()
    name = f"{newest:020d}-{uuid.uuid4().hex}-{zlib.crc32(data):08x}.parquet"
    path = os.path.join(folder, name)
    file = fs.open(path, create=True, exclusive=True)
    try:
        file.pwrite(data, 0)
        file.fsync()
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(path)
        raise
    finally:
        file.close()
    fs.fsync_dir(folder)
    return name, len(data)


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


def remove_tree(fs: FileSystem, path: str) -> None:
    if fs.exists(path):
        for name in fs.listdir(path):
            child = os.path.join(path, name)
            if os.path.isdir(child):
                remove_tree(fs, child)
            else:
                fs.unlink(child)
        fs.rmdir(path)


def files_to_merge(files: Sequence[DataFile]) -> int:
    """How many of the newest files become one: as far back as they hold no more rows than all newer ones together.

    So sizes double from tier to tier, and a row is rewritten about log2(rows / upkeep_every) times. A file near
    MERGED_BYTES_MAX stays as it is. 0 when nothing is to be merged.
    """
    count = rows = size_bytes = 0
    for file in reversed(files):
        if count and (file.rows > rows or size_bytes + file.size_bytes > MERGED_BYTES_MAX):
            break
        count, rows, size_bytes = count + 1, rows + file.rows, size_bytes + file.size_bytes
    return count if count > 1 else 0


def seal_of(adds: list[tuple[str, int]], removes: list[str], transactions: list[tuple[str, int]]) -> str:
    text = json.dumps([sorted(adds), sorted(removes), sorted(transactions)])
    return f"{zlib.crc32(text.encode()):08x}"


def is_whole(data: bytes) -> bool:
    """Whether a commit file holds all its actions; one without our seal only has to be readable."""
    try:
        # Not splitlines(): texts may hold U+0085 and other line ends that JSON does not escape.
        actions = [json.loads(line) for line in data.decode().split("\n") if line]
        found = {key: [action[key] for action in actions if key in action] for key in ("add", "remove", "txn")}
        seals = [action["commitInfo"].get(SEAL) for action in actions if "commitInfo" in action]
        adds = [(str(add["path"]), int(add["size"])) for add in found["add"]]
        removes = [str(remove["path"]) for remove in found["remove"]]
        transactions = [(str(txn["appId"]), int(txn["version"])) for txn in found["txn"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    if not actions:
        return False
    return not seals or seals[0] is None or seals[0] == seal_of(adds, removes, transactions)


def is_of_version(data: bytes, version: int) -> bool:
    """Whether a whole commit file can be the one of this version: it says so.

    One of an older release is known by its data file, which is named for the newest row: that is of the commit's own
    version, or older where the commit puts it in the place of others.
    """
    actions = [json.loads(line) for line in data.decode().split("\n") if line]
    if any("metaData" in action for action in actions):  # what makes the table; nothing changes it later
        return version == 0
    stated = [action["commitInfo"].get(OF_VERSION) for action in actions if "commitInfo" in action]
    if stated and stated[0] is not None:
        return bool(stated[0] == str(version))
    named = [int(found[1]) for action in actions if "add" in action and (found := _ADDED.match(action["add"]["path"]))]
    newest = max(named, default=version)
    return newest <= version if any("remove" in action for action in actions) else newest == version


def is_parquet(data: bytes) -> bool:
    """Whether these bytes are a Parquet file that can be read to its end."""
    try:
        parse_parquet(data)
    except ValueError:
        return False
    return True


def parse_data(name: str, data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The rows of a data file. Raises ValueError when the bytes are not those that were written under this name."""
    found = _DATA_NAME.match(name)  # an older release gave names without a checksum
    if found and zlib.crc32(data) != int(found[1], 16):
        raise ValueError("the checksum in its name does not match")
    return parse_parquet(data, columns)


def parse_parquet(data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The rows of a Parquet file in memory. Raises ValueError when the bytes are not one, MemoryError as it is."""
    try:
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(
            columns=columns,
            use_threads=False,  # where no thread can be started, that would look like damage
        )
    except MemoryError:  # Arrow's own is one, too
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # of bytes in memory: they do not parse
        raise ValueError(str(error)) from error
