"""Removal of segment files in two steps: out of sight at once, off the disk after a delay.

Readers that hold a file, or are about to open it by name, finish in the meantime. The delay counts from the rename
(the file's change time), so the next process can finish what a killed one began.
"""

from __future__ import annotations

import os

from logstore.files import FileSystem
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name


def mark_deleted(fs: FileSystem, directory: str, base_offset: int, *, snapshot: bool = False) -> list[str]:
    """Rename a segment's files to `.deleted`, the `.log` first; returns the new paths."""
    renamed = []
    for kind in (*SEGMENT_KINDS, FileKind.SNAPSHOT) if snapshot else SEGMENT_KINDS:
        source = os.path.join(directory, file_name(base_offset, kind))
        target = os.path.join(directory, file_name(base_offset, kind, Transient.DELETED))
        try:
            fs.rename(source, target)
        except FileNotFoundError:
            continue
        renamed.append(target)
    return renamed


def sweep_deleted(fs: FileSystem, directory: str, *, delay_ms: int, now_ms: int) -> list[str]:
    """Unlink `.deleted` files whose change time is older than `delay_ms`; returns their paths."""
    swept = []
    for name in fs.listdir(directory):
        if not name.endswith(Transient.DELETED.value):
            continue
        path = os.path.join(directory, name)
        try:
            if now_ms - fs.stat(path).ctime_ms < delay_ms:
                continue
            fs.unlink(path)
        except FileNotFoundError:  # another sweeper was faster
            continue
        swept.append(path)
    return swept
