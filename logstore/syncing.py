"""Makes many files durable: syncs side by side, or one for the whole file system where there are very many."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from logstore.files import FileSystem, OsFileSystem, replace_file

_T = TypeVar("_T")
SYNC_THREADS = 8
#: from this many files on, one sync of the whole file system is cheaper than a journal commit for every few files
MANY_FILES = 128
_DIRTY_BYTES_MAX = 256 << 20
_SYNC_FILE_RANGE_ALL = 1 | 2 | 4  # wait, write, wait
#: file systems whose `syncfs` commits the journal and has the device write its cache
_SYNCED_AS_A_WHOLE = ("ext4", "xfs")


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
