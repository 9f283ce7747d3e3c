"""A file system that reads and refuses every change: what a store uses where nothing can be written.

It exists so that no code path of a reader can change a store by accident, and so that every writer gets the same typed
error at its first step, before it has done half of something. It decides nothing about locks.
"""

from __future__ import annotations

import errno
from typing import NoReturn

from logstore.errors import ReadOnlyStore
from logstore.files import File, FileStat, FileSystem

#: what the system says where a file system is mounted read-only, or the user lacks the right
_REFUSALS = (errno.EROFS, errno.EACCES)


def is_refusal(error: OSError) -> bool:
    """Whether the system refused a write for good, unlike a full disk or a failing one."""
    return error.errno in _REFUSALS


def refused(error: OSError, root: str) -> ReadOnlyStore:
    """The error a writer gets, from what the system said when a write was tried."""
    if error.errno == errno.EROFS:
        return ReadOnlyStore(
            "the store is mounted read-only, so nothing can be written to it",
            file=root,
            hint="Reading works. To write, mount it writable.",
        )
    return ReadOnlyStore(
        "this user may not write to the store",
        file=error.filename or root,
        hint="Reading works. To write, use the owner's account, or give this user's group write access to the store.",
    )


class ReadOnlyFiles:
    """`files` for reading only; what would change something raises ReadOnlyStore."""

    def __init__(self, files: FileSystem, why: ReadOnlyStore) -> None:
        self._files = files
        self._why = why

    def check_writable(self) -> NoReturn:
        raise ReadOnlyStore(self._why.what, file=self._why.file, hint=self._why.hint) from self._why.__cause__

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if writable or create:
            self.check_writable()
        return self._files.open(path)

    def exists(self, path: str) -> bool:
        return self._files.exists(path)

    def stat(self, path: str) -> FileStat:
        return self._files.stat(path)

    def listdir(self, path: str) -> list[str]:
        return self._files.listdir(path)

    def mkdir(self, path: str) -> None:
        self.check_writable()

    def rename(self, source: str, target: str) -> None:
        self.check_writable()

    def link(self, source: str, target: str) -> None:
        self.check_writable()

    def unlink(self, path: str) -> None:
        self.check_writable()

    def rmdir(self, path: str) -> None:
        self.check_writable()

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self.check_writable()

    def fsync_dir(self, path: str) -> None:
        """Nothing to do: this process changed no name."""


def is_read_only(files: FileSystem) -> bool:
    return isinstance(files, ReadOnlyFiles)


def check_writable(files: FileSystem) -> None:
    """Raises ReadOnlyStore where nothing can be written."""
    if isinstance(files, ReadOnlyFiles):
        files.check_writable()
