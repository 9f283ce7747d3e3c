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
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Buffer  # collections.abc has it only from Python 3.12


#: whatever the umask: what others may write, others may destroy
DIRECTORY_MODE = 0o775


@dataclass(frozen=True, slots=True)
class FileStat:
    size_bytes: int
    mtime_ms: int
    ctime_ms: int
    #: names the file has; with more than one, somebody else may own its bytes too
    links: int = 1


class NotRegularFile(OSError):
    """A FIFO, socket or device where a file belongs. Nothing was read from it: that could wait for ever."""


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
        """Have the device begin with these bytes, so that less is left for fsync. Promises nothing."""
        ...

    def drop_cached(self, position: int, size: int) -> None:
        """Nobody is expected to read these bytes soon: their memory may serve others. Promises nothing."""
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


_T = TypeVar("_T")
SYNC_THREADS = 8
#: from so many files on, one look at the whole file system is cheaper than a journal commit for every few of them
MANY_FILES = 128
_DIRTY_BYTES_MAX = 256 << 20
_LARGE_WRITE_BYTES = 1 << 20
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_ALL = 1 | 2 | 4  # wait, write, wait
#: file systems whose `syncfs` commits the journal and has the device write its cache
_SYNCED_AS_A_WHOLE = ("ext4", "xfs")


def _reserve(fd: int, position: int, size: int) -> None:
    """Have the blocks of the write that follows allocated in one go, which the system otherwise does page by page: a
    quarter of a write's time on ext4. The size of the file stays. Where this is not supported, or there is no room,
    nothing happens here: the write itself will tell.
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
            os.mkdir(path, DIRECTORY_MODE)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if parent in ("", path):
                raise
            self.mkdir(parent)
            self.mkdir(path)

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
    """Nobody but owner and group may write the open file."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & stat.S_IWOTH:
        os.fchmod(fd, mode & ~stat.S_IWOTH)


def make_directory(fs: FileSystem, path: str) -> None:
    """Make the directory, and parents that are missing. Its name is on disk when this returns, also when somebody else
    made it and died.
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


def replace_files(fs: FileSystem, files: Mapping[str, bytes]) -> None:
    """Replace each file as a whole, durably: temporary files, their fsyncs side by side, renames, then each directory
    once. A crash leaves each of them old or new.
    """
    if len(files) == 1:
        for path, data in files.items():
            replace_file(fs, path, data)
        return
    for path, data in files.items():
        file = fs.open(path + ".tmp", create=True)
        try:
            file.truncate(0)
            file.pwrite(data, 0)
        finally:
            file.close()
    sync_files(fs, [path + ".tmp" for path in files])
    for path in files:
        fs.rename(path + ".tmp", path)
    for directory in dict.fromkeys(os.path.dirname(path) or "." for path in files):
        fs.fsync_dir(directory)


def sync_files(fs: FileSystem, paths: Sequence[str]) -> None:
    """Make files durable: each by its fsync, several at once; where there are very many, all that the file system
    holds.
    """
    if len(paths) >= MANY_FILES and sync_everything(fs, paths[0]):
        for path in paths:
            check_written(fs, path)
    else:
        each_side_by_side(partial(_sync_file, fs), paths)


def sync_directories(fs: FileSystem, paths: Sequence[str]) -> None:
    """The same for directories."""
    if len(paths) < MANY_FILES or not sync_everything(fs, paths[0]):
        each_side_by_side(fs.fsync_dir, paths)


def sync_everything(fs: FileSystem, path: str) -> bool:
    """Make all that the file system of `path` holds durable, files and names, in one call; True when it is.

    Whether a certain file could not be written, `check_written` tells. False, and every file needs its own fsync: on
    other file systems than those known to keep this promise, where the call failed, and where others have left so
    much unwritten that waiting for it would take longer.
    """
    if not isinstance(fs, OsFileSystem) or _dirty_bytes() > _DIRTY_BYTES_MAX:
        return False
    calls = _whole_calls()
    if calls is None:
        return False
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if _file_system_type(os.fstat(fd).st_dev) not in _SYNCED_AS_A_WHOLE:
            return False
        return calls[0](fd) == 0
    finally:
        os.close(fd)


def check_written(fs: FileSystem, path: str) -> None:
    """After `sync_everything`: raises the error that the system met when it wrote this file, if it met one."""
    calls = _whole_calls()
    assert calls is not None, "only asked after `sync_everything`"
    file = fs.open(path)
    try:
        code = calls[1](file.fileno())
        if code:
            raise OSError(code, os.strerror(code), path)
    finally:
        file.close()


@functools.lru_cache(maxsize=1)
def _whole_calls() -> tuple[Callable[[int], int], Callable[[int], int]] | None:
    """`syncfs`, and a wait for one file's pages, which returns the error they met; None where the system lacks them."""
    import ctypes

    try:
        library = ctypes.CDLL(None, use_errno=True)
        syncfs, wait = library.syncfs, library.sync_file_range
    except (OSError, AttributeError):
        return None
    wait.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return (
        lambda fd: int(syncfs(fd)),
        lambda fd: ctypes.get_errno() if wait(fd, 0, 0, _SYNC_FILE_RANGE_ALL) else 0,
    )


@functools.lru_cache(maxsize=16)
def _file_system_type(device: int) -> str:
    """As the system names it; empty where it does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                words = line.split()
                if words[2] == wanted:
                    return words[words.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return ""


def _dirty_bytes() -> int:
    """What the system has not written yet, as far as it tells."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"Dirty:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _sync_file(fs: FileSystem, path: str) -> None:
    file = fs.open(path)
    try:
        file.fsync()
    finally:
        file.close()


def each_side_by_side(work: Callable[[_T], None], items: Sequence[_T]) -> None:
    """`work` for every item, by a few threads; an error is raised after all of them ended."""
    if len(items) > 1:
        from concurrent.futures import Future, ThreadPoolExecutor

        futures: list[Future[None]] | None
        with ThreadPoolExecutor(min(SYNC_THREADS, len(items))) as pool:
            try:
                futures = [pool.submit(work, item) for item in items]
            except RuntimeError:  # while the interpreter ends, there are no new threads
                futures = None
        if futures is not None:
            for future in futures:
                future.result()
            return
    for item in items:
        work(item)


_FICLONE = 0x40049409
_COPY_BYTES = 1 << 20


def copy_bytes(source: File, target: File, size_bytes: int) -> int:
    """Copy the first bytes of a file into an empty one, sharing blocks where the file system can; returns how many."""
    if size_bytes == source.size() and _reflink(source, target):
        return size_bytes
    done = 0
    while done < size_bytes:
        data = source.pread(min(size_bytes - done, _COPY_BYTES), done)
        if not data:
            break
        target.pwrite(data, done)
        done += len(data)
    return done


def _reflink(source: File, target: File) -> bool:
    """Let `target` share the blocks of `source` until one of them is written to; False where that is not possible."""
    if not (isinstance(source, OsFile) and isinstance(target, OsFile)):
        return False
    import fcntl

    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False  # copying says what is wrong, if anything is
    return True


def make_own(fs: FileSystem, path: str) -> bool:
    """Give a file that has several names (a backup's, an export's) a copy of its own under this one, durably; False
    when it has only this name. Who has the file open keeps the old one.
    """
    found = fs.stat(path)
    if found.links < 2:
        return False
    temporary = path + ".tmp"
    source = fs.open(path)
    try:
        target = fs.open(temporary, create=True)
        try:
            target.truncate(0)
            copy_bytes(source, target, source.size())
            target.fsync()
        finally:
            target.close()
    finally:
        source.close()
    fs.set_mtime(temporary, found.mtime_ms)  # it stands for the time of records that have none
    fs.rename(temporary, path)
    fs.fsync_dir(os.path.dirname(path) or ".")
    return True
