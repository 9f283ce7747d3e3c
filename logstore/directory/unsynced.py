"""A mark that an fsync failed. The system may have dropped the pages and called them clean, so that the next fsync
succeeds and proves nothing.

While a partition has the mark, its recovery point does not move and its redo log stays. The next to open the log checks
what lies above the recovery point, writes those bytes again (which makes the pages dirty again), and only the fsync
after that is believed. The mark is a file beside the state file. Where even that cannot be written, this process
remembers it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from logstore.files import File, FileSystem, replace_file

_SUFFIX = ".unsynced"
_BLOCK_BYTES = 1 << 20
_REMEMBERED: set[str] = set()


def mark_unsynced(fs: FileSystem, state_path: str, reason: str) -> None:
    """Never raises: the caller is already raising the error that matters."""
    _REMEMBERED.add(state_path)
    with contextlib.suppress(OSError):
        replace_file(fs, state_path + _SUFFIX, reason.encode() + b"\n")


@contextlib.contextmanager
def marking_unsynced(fs: FileSystem, state_path: str | None) -> Iterator[None]:
    """Mark the partition if an fsync in here fails."""
    try:
        yield
    except OSError as error:
        if state_path is not None:
            mark_unsynced(fs, state_path, str(error))
        raise


def is_unsynced(fs: FileSystem, state_path: str) -> bool:
    return state_path in _REMEMBERED or fs.exists(state_path + _SUFFIX)


def clear_unsynced(fs: FileSystem, state_path: str) -> None:
    """After everything above the recovery point was written again and synced."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(state_path + _SUFFIX)
    _REMEMBERED.discard(state_path)


def rewrite(file: File, position: int, end: int) -> None:
    """Write the bytes of [position, end) once more, as they are."""
    while position < end:
        block = file.pread(min(_BLOCK_BYTES, end - position), position)
        if not block:
            return
        file.pwrite(block, position)
        position += len(block)
