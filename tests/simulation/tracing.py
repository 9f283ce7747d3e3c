"""A file system that passes everything on to another, keeps a trace of it, and fails where a test says so.

Unlike the simulated one it can stand above the operating system's files. With `sync=False` an fsync is noted but not
waited for, which is most of the time such a test would take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.files import OS_FILES, File, FileStat, FileSystem

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class Call:
    """One call that changes the disk, or a listing; `name` is the last part of the path."""

    kind: str
    path: str
    target: str = ""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" -> {os.path.basename(self.target)}" if self.target else "")


class TracingFileSystem:
    """A `FileSystem`. `before` is asked before every call and raises to make it fail."""

    def __init__(self, inner: FileSystem = OS_FILES, *, sync: bool = False) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self.before: Callable[[Call], None] | None = None
        self._sync = sync

    def note(self, kind: str, path: str, target: str = "") -> None:
        call = Call(kind, path, target)
        self.calls.append(call)
        if self.before is not None:
            self.before(call)

    def texts(self) -> list[str]:
        """The trace as short lines."""
        return [str(call) for call in self.calls]

    def sync(self, action: Callable[[], None]) -> None:
        if self._sync:
            action()

    # ----- FileSystem

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if create:
            self.note("create", path)
        return _TracedFile(self, self.inner.open(path, writable=writable, create=create, exclusive=exclusive))

    def exists(self, path: str) -> bool:
        return self.inner.exists(path)

    def stat(self, path: str) -> FileStat:
        return self.inner.stat(path)

    def listdir(self, path: str) -> list[str]:
        self.note("listdir", path)
        return self.inner.listdir(path)

    def mkdir(self, path: str) -> None:
        self.inner.mkdir(path)

    def rename(self, source: str, target: str) -> None:
        self.note("rename", source, target)
        self.inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        self.note("link", source, target)
        self.inner.link(source, target)

    def unlink(self, path: str) -> None:
        self.note("unlink", path)
        self.inner.unlink(path)

    def rmdir(self, path: str) -> None:
        self.note("rmdir", path)
        self.inner.rmdir(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self.note("set_mtime", path)
        self.inner.set_mtime(path, mtime_ms)

    def fsync_dir(self, path: str) -> None:
        self.note("fsync_dir", path)
        self.sync(lambda: self.inner.fsync_dir(path))


class _TracedFile:
    def __init__(self, fs: TracingFileSystem, inner: File) -> None:
        self._fs = fs
        self._inner = inner

    @property
    def path(self) -> str:
        return self._inner.path

    def pread(self, size: int, position: int) -> bytes:
        return self._inner.pread(size, position)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        return self._inner.pread_into(buffer, position)

    def pwrite(self, data: Buffer, position: int) -> None:
        """A write that fails gets half way, as one that meets a full disk does."""
        try:
            self._fs.note("pwrite", self.path)
        except OSError:
            self._inner.pwrite(memoryview(data).cast("B")[: memoryview(data).nbytes // 2], position)
            raise
        self._inner.pwrite(data, position)

    def size(self) -> int:
        return self._inner.size()

    def truncate(self, size: int) -> None:
        self._fs.note("truncate", self.path)
        self._inner.truncate(size)

    def fsync(self) -> None:
        self._fs.note("fsync", self.path)
        self._fs.sync(self._inner.fsync)

    def start_writeback(self, position: int, size: int) -> None:
        self._inner.start_writeback(position, size)

    def drop_cached(self, position: int, size: int) -> None:
        self._inner.drop_cached(position, size)

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()
