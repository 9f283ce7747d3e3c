"""Copies of files, which share blocks where the file system can."""

from __future__ import annotations

import os
from collections.abc import Callable

from logstore.files import File, FileSystem, OsFile

_FICLONE = 0x40049409
_COPY_BYTES = 1 << 20


def copy_bytes(
    source: File, target: File, size_bytes: int, progress: Callable[[int], None] = lambda size_bytes: None
) -> int:
    """Copy the first bytes of a file into an empty one, sharing blocks where the file system can; returns how many.

    `progress` is told the bytes copied since last time.
    """
    if size_bytes == source.size() and _reflink(source, target):
        progress(size_bytes)
        return size_bytes
    done = 0
    while done < size_bytes:
        data = source.pread(min(size_bytes - done, _COPY_BYTES), done)
        if not data:
            break
        target.pwrite(data, done)
        done += len(data)
        progress(len(data))
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
    when it has only this name. A process that has the file open keeps the old one.
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
