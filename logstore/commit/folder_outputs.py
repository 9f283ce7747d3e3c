"""Staged files of tasks that share a file system with the driver, and the token by which they show that they do."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, replace

from logstore.commit.staged_output import FileOutput
from logstore.directory.layout import Layout
from logstore.directory.shared_clock import agreed_ms
from logstore.files import OS_FILES
from logstore.spark_tasks import check_seen
from logstore.topics.opened import OpenStore


@dataclass(frozen=True, slots=True)
class FolderOutputs:
    """Implements `Outputs`: new files in a plan's folder."""

    store: str
    folder: str
    token: str

    def check(self) -> None:
        check_sees_store(self.store, self.token)

    def of(self, plan_id: str) -> FolderOutputs:
        return replace(self, folder=Layout(self.store).plan(plan_id))

    def open(self, task: int) -> tuple[FileOutput, int]:
        output = FileOutput(OS_FILES, self.folder)
        own_ms = time.time_ns() // 1_000_000
        return output, agreed_ms(own_ms, OS_FILES.stat(os.path.join(self.folder, output.name)).mtime_ms)


def check_sees_store(store: str, token: str) -> None:
    """Raises UnsuitableFileSystem when this process does not see the store the driver sees."""
    try:
        with open(os.path.join(store, "locks", "token")) as file:
            found = file.read()
    except (FileNotFoundError, NotADirectoryError):
        found = ""  # another error is the system's, and says nothing about the store
    check_seen(store, found == token)


def store_token(store: OpenStore) -> str:
    """The secret of the store's own file system, by which executors show that they see it."""
    path = os.path.join(store.layout.locks, "token")
    if not store.fs.exists(path):
        draft = f"{path}.{uuid.uuid4().hex}"
        file = store.fs.open(draft, create=True)
        try:
            file.pwrite(uuid.uuid4().hex.encode(), 0)
            file.fsync()
        finally:
            file.close()
        try:
            store.fs.link(draft, path)
        except FileExistsError:
            pass
        finally:
            store.fs.unlink(draft)
    file = store.fs.open(path)
    try:
        return file.pread(64, 0).decode("ascii")
    finally:
        file.close()
