"""One Delta table of the ledger as it is now: made where it is missing, loaded with delta-rs, read.

delta-rs never syncs anything (1.6, tried). So the commit files and the log directory are synced here before a commit is
believed, whoever wrote it: each process does so for every version it loads, and version N is durable before N + 1 is
written. `table.py` has how one is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from logstore.clock import Clock
from logstore.directory.trees import remove_tree
from logstore.directory.unsynced import is_unsynced
from logstore.errors import LedgerError, ReadOnlyStore
from logstore.files import FileSystem, read_whole
from logstore.forks import DELTA
from logstore.ledger.data_file import DATA_FILE_BYTES_MAX, DataFile, empty_table, parse_data
from logstore.ledger.delta_log import GRACE_MS, LOG_FOLDER, RECOVER, DeltaLog, Torn, sync_file
from logstore.ledger.gate import Gate
from logstore.read_only import check_writable

UNLOCKED_LOOKS = 20

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
#: a table complete beside the damaged one whose place it takes
REBUILT = ".rebuilt"
PROPERTIES = {
    "delta.enableExpiredLogCleanup": "false",
    "delta.deletedFileRetentionDuration": f"interval {GRACE_MS // 1000} seconds",
}

T = TypeVar("T")


class LoadedTable:
    """A table at `path`, made when missing."""

    def __init__(self, path: str, schema: pa.Schema, *, fs: FileSystem, clock: Clock) -> None:
        self.path = path
        self.schema = schema
        self._log = DeltaLog(fs, path)
        self._fs = fs
        self._clock = clock
        self._gate = Gate(fs, path + ".gate")
        self._mutex = threading.RLock()
        self._table: DeltaTable | None = None
        #: the checkpoint that the loaded table goes back to; -1: to the first commit
        self._loaded_from = -1
        self._files: tuple[int, list[DataFile]] | None = None
        #: every commit up to this one was read, found whole, and synced
        self._durable_version = -1
        self._checkpoint_version = -1
        DELTA.enter()
        if not fs.exists(self._log.folder):
            with self._gate.alone():
                self._create()
        self.run(lambda: None)
        if self._delta.schema().to_json() != Schema.from_arrow(schema).to_json():
            raise LedgerError("the table has other columns than this release writes", file=path)

    # --- looking ------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work` on the newest version, whose files stay in place meanwhile."""
        DELTA.enter()  # before the lock: a thread that the child does not have may hold it
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
        if self._table is not None and not self._has_its_files(self._table, checkpoints, commits):
            self._table, self._files = None, None
        newer = self._log.check_newer(known, commits)
        self._log.sync_commits(newer)
        if is_unsynced(
            self._fs, self.path
        ):  # looked up last: our sync proves nothing about what another process could not sync
            raise Torn
        self._durable_version = max([known, *newer])

    def _has_its_files(self, table: DeltaTable, checkpoints: list[int], commits: list[int]) -> bool:
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
