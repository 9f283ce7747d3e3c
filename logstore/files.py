"""The file-system seam: every file access of the engine goes through a `FileSystem`.

The engine gets the operating system's; crash tests put a simulated one in its place that forgets what was not synced.
Positions are explicit (pread/pwrite), so one descriptor serves many threads. Errors of the operating system travel up
as they are (OSError); what they mean for the log is said by the caller.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer  # collections.abc has it only from Python 3.12


#: whatever the umask: what others may write, they may destroy
DIRECTORY_MODE = 0o775


@dataclass(frozen=True, slots=True)
class FileStat:
    size_bytes: int
    mtime_ms: int
    ctime_ms: int
    #: names the file has; with more than one, its bytes may belong to another directory too
    links: int = 1


class NotRegularFile(OSError):
    """A FIFO, socket or device where a file belongs. Nothing was read from it: that could wait forever."""


class File(Protocol):
    path: str

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes at `position`; fewer only at the end of the file."""
        ...

    def pread_into(self, buffer: Buffer, position: int) -> int:
        """Fill `buffer` from `position`; returns how many bytes there were, fewer only at the end of the file."""
        ...

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data` at `position`, extending the file where needed."""
        ...

    def size(self) -> int: ...

    def truncate(self, size: int) -> None:
        """Cut, or extend with zeros, to exactly `size` bytes."""
        ...

    def fsync(self) -> None: ...

    def start_writeback(self, position: int, size: int) -> None:
        """Start writing these bytes to the device, so that less is left for fsync. Promises nothing."""
        ...

    def drop_cached(self, position: int, size: int) -> None:
        """These bytes are not expected to be read soon: their memory may be reused. Promises nothing."""
        ...

    def fileno(self) -> int:
        """A real descriptor, for sendfile and locks."""
        ...

    def close(self) -> None: ...


class FileSystem(Protocol):
    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        """`create` makes the file when missing (implies writable); with `exclusive` it must be missing.

        Raises NotRegularFile for a FIFO and its like, IsADirectoryError; it never waits.
        """
        ...

    def exists(self, path: str) -> bool: ...

    def stat(self, path: str) -> FileStat: ...

    def listdir(self, path: str) -> list[str]:
        """Sorted names."""
        ...

    def mkdir(self, path: str) -> None:
        """Make the directory and its parents; fine when it is there."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces `target`."""
        ...

    def link(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def set_mtime(self, path: str, mtime_ms: int) -> None: ...

    def fsync_dir(self, path: str) -> None: ...


class OsFile:
    """A file of the operating system, by descriptor."""

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path

    def pread(self, size: int, position: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]  # a signal or the 2 GiB limit of one call can cut a read short
        got = len(data)
        while got < size:
            data = os.pread(self._fd, size - got, position + got)
            if not data:
                break
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        view = memoryview(buffer).cast("B")
        got = 0
        while got < len(view):
            count = os.preadv(self._fd, [view[got:]], position + got)
            if count == 0:
                break
            got += count
        return got

    def pwrite(self, data: Buffer, position: int) -> None:
        view = memoryview(data).cast("B")
        if len(view) >= _LARGE_WRITE_BYTES:
            _reserve(self._fd, position, len(view))
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], position + done)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def fsync(self) -> None:
        os.fsync(self._fd)

    def start_writeback(self, position: int, size: int) -> None:
        function = _system_call("sync_file_range", 3)
        if function is not None:
            function(self._fd, position, size, _SYNC_FILE_RANGE_WRITE)

    def drop_cached(self, position: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, position, size, os.POSIX_FADV_DONTNEED)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


_LARGE_WRITE_BYTES = 1 << 20
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_SYNC_FILE_RANGE_WRITE = 2


def _reserve(fd: int, position: int, size: int) -> None:
    """Have the blocks of the write that follows allocated in one go, which the system otherwise does page by page: a
    quarter of a write's time on ext4. The size of the file stays. Where this is not supported, or there is no room,
    nothing happens here: the write itself raises then.
    """
    # os.posix_fallocate would change the size, and write zeros where it is not supported
    fallocate = _system_call("fallocate", 1)
    if fallocate is not None:
        fallocate(fd, _KEEP_SIZE, position, size)


@functools.lru_cache(maxsize=2)
def _system_call(name: str, flags_at: int) -> Callable[[int, int, int, int], int] | None:
    """A call over (descriptor, position, size) that Python lacks, with its flags as argument number `flags_at`; None
    where the system lacks it.
    """
    import ctypes  # commands that write nothing start without it

    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    types = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    types.insert(flags_at, ctypes.c_uint)
    function.argtypes = types
    return cast("Callable[[int, int, int, int], int]", function) if sys.maxsize > 1 << 32 else None


class OsFileSystem:
    """The operating system's files."""

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        # Without O_NONBLOCK the opening of a FIFO waits for its other end; regular files do not mind.
        flags = os.O_CLOEXEC | os.O_NONBLOCK | (os.O_RDWR if writable or create else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        file = OsFile(os.open(path, flags, 0o644), path)
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            file.close()
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise NotRegularFile(errno.EINVAL, "not a regular file", path)
        return file

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False  # anything else is an error: what cannot be looked at may well be there
        return True

    def stat(self, path: str) -> FileStat:
        found = os.stat(path)
        return FileStat(found.st_size, found.st_mtime_ns // 1_000_000, found.st_ctime_ns // 1_000_000, found.st_nlink)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: str) -> None:
        try:
            _make_directory(path)
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if parent in ("", path):
                raise
            self.mkdir(parent)
            _make_directory(path)  # below /proc it is not found all the same

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        os.utime(path, ns=(mtime_ms * 1_000_000, mtime_ms * 1_000_000))

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


OS_FILES: FileSystem = OsFileSystem()


def read_whole(fs: FileSystem, path: str, *, limit: int) -> bytes:
    """All bytes of a small file; refuses one larger than `limit` with OSError(EFBIG).

    A short read is an OSError too: bytes that were not read say nothing about the file.
    """
    file = fs.open(path)
    try:
        size = file.size()
        if size > limit:
            raise OSError(errno.EFBIG, f"larger than the limit of {limit} bytes", path)
        data = file.pread(size, 0)
        if len(data) < size:
            raise OSError(errno.EIO, f"short read: {len(data)} of {size} bytes", path)
        return data
    finally:
        file.close()


def take_from_others(fd: int) -> None:
    """Only owner and group may write the open file."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & stat.S_IWOTH:
        os.fchmod(fd, mode & ~stat.S_IWOTH)


def make_directory(fs: FileSystem, path: str) -> None:
    """Make the directory, and parents that are missing. Its name is on disk when this returns, also when another
    process made it and died.
    """
    parent = os.path.dirname(path) or "."
    if not fs.exists(parent):
        make_directory(fs, parent)
    fs.mkdir(path)
    fs.fsync_dir(parent)


def replace_file(fs: FileSystem, path: str, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` as a whole: temporary file, fsync, rename, directory fsync.

    Without `durable` nothing is synced: readers still see the old or the new content, but after a power cut the
    content is unknown, so the caller's format must carry a checksum and have another source.
    """
    temporary = path + ".tmp"
    file = fs.open(temporary, create=True)
    try:
        file.truncate(0)
        file.pwrite(data, 0)
        if durable:
            file.fsync()
    finally:
        file.close()
    fs.rename(temporary, path)
    if durable:
        fs.fsync_dir(os.path.dirname(path) or ".")


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def spark_local_dir() -> str | None:
    """Where Spark keeps its own files, in one of its tasks; None elsewhere: the system's folder for temporary files."""
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return next((each for each in folders if os.path.isdir(each)), None)
