"""The `_delta_log` folder of a ledger table: its commits and checkpoints, read, synced, checked, and set aside.

**Torn files.** The last commit file may be unreadable after a power cut: it was never synced, so it was never
acknowledged; it counts as not committed and is moved to `torn/`. An unreadable commit file below another one cannot
come from a power cut: LedgerError. A checkpoint that was not synced may be torn too; it is moved to `torn/` if the
commits it sums up are all there, which they are unless it was synced: else LedgerError. Only bytes that were read in
full and do not parse are evidence of damage. An error of the system is passed on as it is.

**Failed syncs.** After one, the next sync succeeds and proves nothing. If a commit file or its name could not be
synced, the table is marked (`NAME.unsynced`). Whoever loads it next holds the gate alone, and writes the commits again
as new files before it believes them. A checkpoint counts as durable only with its proof (`proof.py`); one without it is
rebuilt, and until then no commit is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid

from logstore.directory.unsynced import clear_unsynced, marking_unsynced
from logstore.errors import LedgerError
from logstore.files import FileSystem, make_directory, read_whole, replace_file, take_from_others
from logstore.ledger.commit_file import is_of_version, is_whole
from logstore.ledger.data_file import is_parquet
from logstore.ledger.proof import is_as_proved, read_proofs, remove_proofs
from logstore.read_only import is_read_only

GRACE_MS = 60_000
LOG_FILE_BYTES_MAX = 64 << 20
#: where files are set aside, beside the tables
TORN = "torn"
RECOVER = "`duramen recover` rebuilds the ledger from what is left"
COMMIT_NAME = re.compile(r"(\d{20})\.json\Z")
CHECKPOINT_NAME = re.compile(r"(\d{20})\.checkpoint\.parquet\Z")
_STAGED = re.compile(r".+(#\d+|\.tmp)\Z")  # what a killed delta-rs, or a killed repair, leaves of a file on its way
HINT_NAME = "_last_checkpoint"
LOG_FOLDER = "_delta_log"


class Torn(Exception):
    """A file only a power cut leaves so, or one whose sync failed."""


class DeltaLog:
    """The log folder of the table at `table`. Whoever changes anything here holds the table's gate alone."""

    def __init__(self, fs: FileSystem, table: str) -> None:
        self._fs = fs
        self.table = table
        self.folder = os.path.join(table, LOG_FOLDER)

    def commit_path(self, version: int) -> str:
        return os.path.join(self.folder, f"{version:020d}.json")

    def checkpoint_path(self, version: int) -> str:
        return os.path.join(self.folder, f"{version:020d}.checkpoint.parquet")

    @property
    def hint_path(self) -> str:
        return os.path.join(self.folder, HINT_NAME)

    def hint_version(self) -> int | None:
        try:
            return int(json.loads(self.read(self.hint_path))["version"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Torn from error

    def find_commits(self) -> list[int]:
        return [int(found[1]) for name in self._fs.listdir(self.folder) if (found := COMMIT_NAME.match(name))]

    def find_checkpoints(self) -> list[int]:
        return [int(found[1]) for name in self._fs.listdir(self.folder) if (found := CHECKPOINT_NAME.match(name))]

    def read_commit(self, version: int) -> bytes | None:
        try:
            return self.read(self.commit_path(version))
        except FileNotFoundError:
            return None

    def read(self, path: str) -> bytes:
        return read_whole(self._fs, path, limit=LOG_FILE_BYTES_MAX)

    def check_newer(self, known: int, commits: list[int]) -> list[int]:
        """The commits above `known`, all of them whole. Raises Torn when a power cut may have torn the last one."""
        newer = [version for version in commits if version > known]
        if newer != list(range(known + 1, known + 1 + len(newer))):
            raise LedgerError(
                f"a commit file between {known} and {newer[-1]} is missing", file=self.folder, hint=RECOVER
            )
        for version in newer:
            path, data = self.commit_path(version), self.read_commit(version)
            if data is None:
                raise LedgerError("a commit file vanished while it was looked at", file=path)
            if not is_whole(data):
                if version != newer[-1] or version == 0:
                    raise LedgerError("a commit file is damaged", file=path, hint=RECOVER)
                raise Torn
            if not is_of_version(data, version):  # no power cut leaves that
                raise LedgerError("a commit file is another version's", file=path, hint=RECOVER)
        return newer

    def sync_commits(self, versions: list[int]) -> None:
        if is_read_only(self._fs):
            return  # a reader decides nothing
        for version in versions:
            sync_file(self._fs, self.commit_path(version), table=self.table)
        if versions:
            with marking_unsynced(self._fs, self.table):
                self._fs.fsync_dir(self.folder)
        if versions[:1] == [0]:  # the process that made the table may have died before the table's name was synced
            parent = os.path.dirname(self.table)
            for folder in (self.table, parent, os.path.dirname(parent)):
                self._fs.fsync_dir(folder)

    def examine_checkpoint(self, checkpoints: list[int]) -> None:
        """Raises Torn unless the newest one is sound and the hint, if any, names one of them."""
        hint = self.hint_version()
        if hint is not None and hint not in checkpoints:
            raise Torn
        if checkpoints and not self.is_sound(checkpoints[-1]):
            raise Torn

    def is_sound(self, checkpoint: int) -> bool:
        """Whether it can be read, and is the one that was proved if any was."""
        data = self.read(self.checkpoint_path(checkpoint))
        return is_parquet(data) and is_as_proved(read_proofs(self._fs, self.table), checkpoint, data)

    def check_rebuildable(self, checkpoints: list[int]) -> None:
        """Raises LedgerError unless all that the last checkpoint sums up can be read without it."""
        torn = checkpoints[-1]
        # The one before may be torn as well: then the commits must go back to the first.
        whole = [each for each in checkpoints[:-1] if self.is_sound(each)]
        for version in range(max([-1, *whole]) + 1, torn + 1):
            data = self.read_commit(version)
            if data is None or not is_whole(data) or not is_of_version(data, version):
                raise LedgerError(
                    f"a checkpoint is damaged, and commit {version} that it sums up is not there to replace it",
                    file=self.checkpoint_path(torn),
                    hint=RECOVER,
                )

    def write_again(self) -> None:
        """Every commit as a new file with a new name, which the sync of the old one says nothing about."""
        for version in self.find_commits():
            data = self.read_commit(version)
            if data is not None and is_whole(data):
                replace_file(self._fs, self.commit_path(version), data)
        clear_unsynced(self._fs, self.table)

    def set_aside(self, path: str) -> None:
        """Move a file of the log to `torn/`: it is out of the way there, and nothing is lost."""
        shelf = os.path.join(os.path.dirname(self.table), TORN)
        make_directory(self._fs, shelf)
        stem, dot, suffix = os.path.basename(path).partition(".")
        name = f"{os.path.basename(self.table)}-{stem}-{uuid.uuid4().hex}{dot}{suffix}"
        self._fs.rename(path, os.path.join(shelf, name))
        self._fs.fsync_dir(shelf)
        self._fs.fsync_dir(self.folder)

    def drop_checkpoint(self, version: int) -> None:
        """The commits it sums up are all there."""
        for path in (self.hint_path, self.checkpoint_path(version)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path)
        self._fs.fsync_dir(self.folder)

    def delete_superseded(self, before_ms: int, spare_files: int) -> None:
        """Delete what a proved checkpoint sums up: see the function of this name."""
        proofs = read_proofs(self._fs, self.table)
        found = [version for version in self.find_checkpoints() if version in proofs]
        if not found:
            return
        if not self.is_sound(found[-1]):
            raise LedgerError("a checkpoint is damaged", file=self.checkpoint_path(found[-1]), hint=RECOVER)
        checkpoints = {version: self._fs.stat(self.checkpoint_path(version)).mtime_ms for version in found}
        superseded: list[tuple[int, int, str]] = []
        for name in self._fs.listdir(self.folder):
            path = os.path.join(self.folder, name)
            if _STAGED.match(name):
                self._fs.unlink(path)
            elif match := COMMIT_NAME.match(name) or CHECKPOINT_NAME.match(name):
                version = int(match[1])
                later = [since_ms for checkpoint, since_ms in checkpoints.items() if checkpoint > version]
                if later:
                    superseded.append((min(later), version, path))
        ordered = [(since_ms, path) for since_ms, _, path in sorted(superseded)]
        delete_superseded(self._fs, ordered, before_ms, spare_files)
        remove_proofs(self._fs, self.table, keep=self.find_checkpoints())


def delete_superseded(fs: FileSystem, files: list[tuple[int, str]], before_ms: int, spare_files: int) -> None:
    """Delete those of `files` (since when, path; oldest first) that no reader without the gate can still need."""
    for index, (since_ms, path) in enumerate(files):
        if since_ms < before_ms or index < len(files) - spare_files:
            fs.unlink(path)


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
