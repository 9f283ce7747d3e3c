"""Replacements of segments that a crash interrupted: finished where they are complete, undone where they are not."""

from __future__ import annotations

import os

from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.segment.names import TEMPORARY_SUFFIX, FileKind, NumberedFile, Transient, file_name, parse_file_name
from logstore.segment.segment import LogSegment


def numbered_files(fs: FileSystem, directory: str) -> list[NumberedFile]:
    """The files of the directory that are named for an offset."""
    parsed = (parse_file_name(name) for name in fs.listdir(directory))
    return [file for file in parsed if file is not None]


def finish_replacements(fs: FileSystem, directory: str, limits: Limits) -> tuple[list[str], bool]:
    """The paths that were removed, and whether a replacement was under way."""
    removed: list[str] = []

    def unlink(name: str) -> None:
        fs.unlink(os.path.join(directory, name))
        removed.append(os.path.join(directory, name))

    for name in fs.listdir(directory):
        if name.endswith(TEMPORARY_SUFFIX):  # a small file whose replacement was never finished
            unlink(name)
    files = numbered_files(fs, directory)
    cleaned = [file for file in files if file.transient is Transient.CLEANED]
    if cleaned:
        # Renaming to .swap goes from the highest base down: a .cleaned left means that from its base on nothing
        # is complete.
        incomplete_from = min(file.base_offset for file in cleaned)
        for file in files:
            if file.transient is Transient.SWAP and file.base_offset >= incomplete_from:
                unlink(file.name)
        for file in cleaned:
            unlink(file.name)
        files = numbered_files(fs, directory)
    swaps = [file for file in files if file.transient is Transient.SWAP]
    logs = [file for file in swaps if file.kind is FileKind.LOG]
    if logs:
        low = min(file.base_offset for file in logs)
        high = max(_swap_end(fs, directory, file, limits) for file in logs)
        for file in files:
            if file.transient is Transient.NONE and low <= file.base_offset < high:
                unlink(file.name)
    for file in swaps:
        plain = file_name(file.base_offset, file.kind)
        fs.rename(os.path.join(directory, file.name), os.path.join(directory, plain))
    if cleaned or swaps:
        fs.fsync_dir(directory)
    return removed, bool(cleaned or swaps)


def _swap_end(fs: FileSystem, directory: str, file: NumberedFile, limits: Limits) -> int:
    """One past the last offset of a complete replacement; a 0-byte one covers its own base only."""
    segment = LogSegment(fs, directory, file.base_offset, suffix=Transient.SWAP, limits=limits)
    try:
        return max(segment.next_offset(), file.base_offset + 1 if segment.size_bytes == 0 else 0)
    finally:
        segment.close(clean=False)
