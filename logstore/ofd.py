"""Open-file-description locks (`F_OFD_SETLK`): they belong to an open file, not to a process. All locks of a store are
made of these calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from logstore.errors import UnsuitableFileSystem

FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length, pid (0 for open-file-description locks)


T = TypeVar("T")
_PAUSE_S_MIN = 0.001


def wait_for(take: Callable[[], T], deadline: float, *, pause_s_max: float = 0.05) -> T:
    """What `take` returns once it is true, or what it returned last when the (monotonic) deadline passed."""
    pause_s = _PAUSE_S_MIN
    while not (taken := take()):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, pause_s_max)
    return taken


def set_lock(fd: int, kind: int, start: int = 0, length: int = 0) -> bool:
    """Lock or unlock a range, without a length all of the file; False when another lock conflicts."""
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
