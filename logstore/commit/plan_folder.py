"""A plan's folder in `staging/`: filled by one process, removed by it, by a flush or by a sweep."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from logstore.commit.folder_outputs import FolderOutputs, store_token
from logstore.commit.staged_output import FileOutput
from logstore.directory.locks import FileLock
from logstore.directory.trees import remove_tree
from logstore.errors import DiskFull, LockHeld, is_disk_full
from logstore.topics.opened import OpenStore

OWNER_FILE = "owner"


class Staging:
    """A plan's folder while it is being filled; locked, so that a sweep leaves it alone. Close it in any case."""

    def __init__(self, store: OpenStore, plan_id: str | None = None) -> None:
        """Raises LockHeld when another process has the folder of this `plan_id`, DiskFull."""
        self._store = store
        #: from here on a commit may name the folder: it is the redo log, and only `flush` or `sweep` may remove it
        self.decided = False
        while True:
            self.plan_id = plan_id or uuid.uuid4().hex
            self.folder = store.layout.plan(self.plan_id)
            self._lock = FileLock(store.fs, os.path.join(self.folder, OWNER_FILE))
            try:
                store.fs.mkdir(self.folder)
                if self._lock.try_acquire():
                    return
            except FileNotFoundError:
                pass  # a sweep was faster
            except OSError as error:
                with contextlib.suppress(OSError):
                    store.fs.rmdir(self.folder)
                if is_disk_full(error):
                    raise disk_full(error) from error
                raise
            if plan_id is not None:
                raise LockHeld(f"the staged files of plan {plan_id} are in use", file=self.folder)

    def output(self) -> FileOutput:
        """A new staged file in it."""
        return FileOutput(self._store.fs, self.folder)

    def outputs(self) -> FolderOutputs:
        """For tasks in other processes, which share the store's file system."""
        return FolderOutputs(self._store.path, self.folder, store_token(self._store))

    def close(self) -> None:
        """Give the folder up; it is removed unless a commit may name it. Idempotent."""
        if not self._lock.held:
            return
        try:
            if not self.decided:
                with contextlib.suppress(OSError):  # a late task may be writing into it: swept later
                    remove_folder(self._store, self.folder)
        finally:
            self._lock.release()


def remove_folder(store: OpenStore, folder: str) -> None:
    """Renamed away in one step, then removed; what a crash leaves is removed by a sweep."""
    grave = store.layout.work("delete")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        store.fs.rename(folder, grave)
        remove_tree(store.fs, grave)


@contextlib.contextmanager
def reporting_full_disk(staging: Staging | None = None) -> Iterator[None]:
    """Raises DiskFull for the system's error, unless the staged files may be committed already."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error) and not (staging is not None and staging.decided):
            raise disk_full(error) from error
        raise


def disk_full(error: OSError) -> DiskFull:
    return DiskFull(
        f"the disk is full: {error}",
        file=error.filename,
        hint="Nothing was committed; make room and run the batch again",
    )
