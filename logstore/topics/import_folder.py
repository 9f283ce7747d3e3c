"""An import's folder under `staging/`, locked by the process that fills it while it works. A sweep removes a folder,
and what the marks of imports name, only when no process holds it.
"""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import TYPE_CHECKING

from logstore.directory.locks import FileLock
from logstore.directory.trees import remove_tree

if TYPE_CHECKING:
    from logstore.topics.opened import OpenStore

SUFFIX = "-import"
_OWNER_FILE = "owner"


class ImportFolder:
    """Use it as a context manager; it gives the folder's path, and removes what is left in it."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self.path = store.layout.work("import")
        draft = store.layout.work("draft")
        store.fs.mkdir(draft)
        self._owner = FileLock(store.fs, os.path.join(draft, _OWNER_FILE))
        self._owner.acquire(0)  # before the folder has its name: a sweep never finds it without its owner
        self._owner.sign(store.clock, "import")
        store.fs.rename(draft, self.path)

    def __enter__(self) -> str:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            remove_tree(self._store.fs, self.path)
        finally:
            self._owner.release()


def sweep_import_folders(store: OpenStore, *, oldest_ms: int) -> tuple[list[str], bool]:
    """Remove the folders of imports that died; returns their paths, and whether an import is at work."""
    removed, at_work = [], False
    for name in store.fs.listdir(store.layout.staging):
        if not name.endswith(SUFFIX):
            continue
        folder = os.path.join(store.layout.staging, name)
        with contextlib.suppress(FileNotFoundError):
            if not store.fs.exists(os.path.join(folder, _OWNER_FILE)):
                # Of an older release, or half removed; its age is all there is to go by.
                if store.fs.stat(folder).mtime_ms < oldest_ms:
                    remove_tree(store.fs, folder)
                    removed.append(folder)
                continue
            owner = FileLock(store.fs, os.path.join(folder, _OWNER_FILE))
            if not owner.try_acquire():
                at_work = True
                continue
            try:
                remove_tree(store.fs, folder)
                removed.append(folder)
            finally:
                owner.release()
    return removed, at_work
