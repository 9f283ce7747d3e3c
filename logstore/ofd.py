"""Open-file-description locks (`F_OFD_SETLK`): they belong to an open file, not to a process. The bare calls only."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from logstore.errors import UnsuitableFileSystem

FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length, pid (0 for open-file-description locks)


def set_lock(fd: int, kind: int, start: int = 0, length: int = 0) -> bool:
    """Lock or unlock a range, without a length all of the file; False when somebody stands against it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise UnsuitableFileSystem(
            f"the file system refuses open-file-description locks: {error.strerror}",
            hint="Put the store on a local or POSIX shared file system.",
        ) from error
    return True


def same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
