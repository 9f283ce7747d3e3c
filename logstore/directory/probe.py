"""Tries, on the store's own file system, what the store relies on, and refuses one that lacks it.

Once a process and store: a network mount that ignores locks must be found before data is trusted to it, not after.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid

from logstore.directory.locks import FileLock
from logstore.errors import UnsuitableFileSystem
from logstore.files import FileSystem, replace_file

#: errors of a file system that lacks something; others, of a full or a failing disk, say nothing about it
_CANNOT = (
    errno.EPERM,  # hard links
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EMLINK,
    errno.ENOLCK,
)

_passed: set[tuple[int, str]] = set()


def probe_file_system(fs: FileSystem, directory: str) -> None:
    """Raises UnsuitableFileSystem naming what is missing; the system's own error where it cannot be tried."""
    key = (id(fs), os.path.realpath(directory))
    if key in _passed:
        return
    base = os.path.join(directory, f"probe-{os.getpid()}-{uuid.uuid4().hex}")
    try:
        for failed, attempt in (
            ("create a file exclusively", _creates_exclusively),
            ("replace a file by an atomic rename", _renames),
            ("make hard links that exclude each other", _links),
            ("keep two open files from holding one lock", _locks_exclude),
            ("sync a directory", _syncs_directory),
        ):
            try:
                sound = attempt(fs, base)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                sound = False
            if not sound:
                raise UnsuitableFileSystem(
                    f"the file system cannot {failed}",
                    file=directory,
                    hint="Put the store on a local or POSIX shared file system.",
                )
    finally:
        for suffix in ("", ".tmp", ".2", ".lock"):
            with contextlib.suppress(OSError):
                fs.unlink(base + suffix)
    _passed.add(key)


def _creates_exclusively(fs: FileSystem, base: str) -> bool:
    fs.open(base, create=True, exclusive=True).close()
    try:
        fs.open(base, create=True, exclusive=True).close()
    except FileExistsError:
        return True
    return False


def _renames(fs: FileSystem, base: str) -> bool:
    replace_file(fs, base, b"new")
    return not fs.exists(base + ".tmp") and fs.stat(base).size_bytes == 3


def _links(fs: FileSystem, base: str) -> bool:
    fs.link(base, base + ".2")
    try:
        fs.link(base, base + ".2")
    except FileExistsError:
        return fs.stat(base + ".2").size_bytes == 3
    return False


def _locks_exclude(fs: FileSystem, base: str) -> bool:
    first, second, third = (FileLock(fs, base + ".lock", exclusive=exclusive) for exclusive in (True, True, False))
    try:
        if not first.try_acquire() or second.try_acquire() or third.try_acquire():
            return False
        first.release()
        return second.try_acquire()
    finally:
        for lock in (first, second, third):
            lock.release()


def _syncs_directory(fs: FileSystem, base: str) -> bool:
    fs.fsync_dir(os.path.dirname(base))
    return True
