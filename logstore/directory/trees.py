"""Whole directories through the file-system seam: removing one, copying a file into one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from logstore.copying import copy_bytes
from logstore.files import FileSystem


def remove_tree(fs: FileSystem, path: str) -> None:
    """Remove a file or directory and all in it; fine when it is gone, or going, already."""
    try:
        names = fs.listdir(path)
    except NotADirectoryError:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
        return
    except FileNotFoundError:
        return
    for name in names:
        remove_tree(fs, os.path.join(path, name))
    with contextlib.suppress(FileNotFoundError):
        fs.rmdir(path)


def is_directory(fs: FileSystem, path: str) -> bool:
    try:
        fs.listdir(path)
    except (NotADirectoryError, FileNotFoundError):
        return False
    return True


def copy_file(
    fs: FileSystem,
    source: str,
    target: str,
    *,
    size_bytes: int | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> int:
    """A durable copy of the file, or of its first `size_bytes`, with its mtime; returns the bytes copied.

    `progress` is told the bytes copied since last time.
    The mtime matters: it stands for the largest timestamp of a segment whose records have none.
    """
    mtime_ms = fs.stat(source).mtime_ms
    reader = fs.open(source)
    try:
        writer = fs.open(target, create=True, exclusive=True)
        try:
            done = copy_bytes(reader, writer, reader.size() if size_bytes is None else size_bytes, progress)
            writer.fsync()
        finally:
            writer.close()
    finally:
        reader.close()
    fs.set_mtime(target, mtime_ms)
    return done
