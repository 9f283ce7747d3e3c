"""Files that are opened when they are used: a log of ten thousand segments needs no more descriptors than a short one.

A `FileSystem` in front of another. What it opens counts as open; its descriptor may be closed when others
are needed more, and is opened again by its path. So it is for those who keep names in place while they work: the
writer of a partition, under the partition's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from logstore.files import File, FileStat, FileSystem

if TYPE_CHECKING:
    from typing_extensions import Buffer

OPEN_MAX = 24


class FewFiles:
    """At most `open_max` descriptors at a time, the most recently used ones."""

    def __init__(self, fs: FileSystem, open_max: int = OPEN_MAX) -> None:
        self._fs = fs
        self._open_max = open_max
        self._lock = threading.RLock()
        self._opened: OrderedDict[_Reopened, File] = OrderedDict()

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        file = self._fs.open(path, writable=writable, create=create, exclusive=exclusive)
        with self._lock:
            reopened = _Reopened(self, path, writable or create)
            self._keep(reopened, file)
            return reopened

    def use(self, file: _Reopened) -> File:
        """The open file itself; the caller holds the lock while it works with it."""
        found = self._opened.get(file)
        if found is None:
            found = self._fs.open(file.path, writable=file.writable)
            self._keep(file, found)
        else:
            self._opened.move_to_end(file)
        return found

    def _keep(self, file: _Reopened, opened: File) -> None:
        self._opened[file] = opened
        while len(self._opened) > self._open_max:
            _, oldest = self._opened.popitem(last=False)
            oldest.close()

    def release(self, file: _Reopened) -> None:
        with self._lock:
            found = self._opened.pop(file, None)
            if found is not None:
                found.close()

    @property
    def lock(self) -> threading.RLock:
        return self._lock

    # --- the rest is the other file system's ------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        return self._fs.exists(path)

    def stat(self, path: str) -> FileStat:
        return self._fs.stat(path)

    def listdir(self, path: str) -> list[str]:
        return self._fs.listdir(path)

    def mkdir(self, path: str) -> None:
        self._fs.mkdir(path)

    def rename(self, source: str, target: str) -> None:
        self._fs.rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._fs.link(source, target)

    def unlink(self, path: str) -> None:
        self._fs.unlink(path)

    def rmdir(self, path: str) -> None:
        self._fs.rmdir(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self._fs.set_mtime(path, mtime_ms)

    def fsync_dir(self, path: str) -> None:
        self._fs.fsync_dir(path)


class _Reopened:
    """A file by its path; see `FewFiles`."""

    __slots__ = ("_files", "path", "writable")

    def __init__(self, files: FewFiles, path: str, writable: bool) -> None:
        self._files = files
        self.path = path
        self.writable = writable

    def pread(self, size: int, position: int) -> bytes:
        with self._files.lock:
            return self._files.use(self).pread(size, position)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        with self._files.lock:
            return self._files.use(self).pread_into(buffer, position)

    def pwrite(self, data: Buffer, position: int) -> None:
        with self._files.lock:
            self._files.use(self).pwrite(data, position)

    def size(self) -> int:
        with self._files.lock:
            return self._files.use(self).size()

    def truncate(self, size: int) -> None:
        with self._files.lock:
            self._files.use(self).truncate(size)

    def fsync(self) -> None:
        with self._files.lock:
            self._files.use(self).fsync()

    def start_writeback(self, position: int, size: int) -> None:
        with self._files.lock:
            self._files.use(self).start_writeback(position, size)

    def drop_cached(self, position: int, size: int) -> None:
        with self._files.lock:
            self._files.use(self).drop_cached(position, size)

    def fileno(self) -> int:
        """Good until another file is used."""
        with self._files.lock:
            return self._files.use(self).fileno()

    def close(self) -> None:
        self._files.release(self)
