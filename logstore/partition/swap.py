"""Replacement of segments by others, in an order that every crash can be finished from or undone.

outputs `.cleaned` (complete, synced) → `.swap`, highest base first → directory synced → old files to `.deleted` →
`.swap` to plain → directory synced

Until the last `.cleaned` is renamed the old segments stand; from then on the new ones do. `recovery` finishes either
way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from logstore.files import FileSystem
from logstore.partition.deletion import mark_deleted
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name


def replace_segments(fs: FileSystem, directory: str, new_bases: Sequence[int], old_bases: Sequence[int]) -> None:
    """Swap complete `.cleaned` outputs in for the segments they replace."""
    for base in sorted(new_bases, reverse=True):
        _rename(fs, directory, base, Transient.CLEANED, Transient.SWAP)
    fs.fsync_dir(directory)
    for base in sorted(old_bases):
        mark_deleted(fs, directory, base)
    for base in sorted(new_bases):
        _rename(fs, directory, base, Transient.SWAP, Transient.NONE)
    fs.fsync_dir(directory)
    for base in set(old_bases) - set(new_bases):
        path = os.path.join(directory, file_name(base, FileKind.SNAPSHOT))
        if fs.exists(path):
            fs.rename(path, path + Transient.DELETED.value)


def _rename(fs: FileSystem, directory: str, base_offset: int, source: Transient, target: Transient) -> None:
    for kind in SEGMENT_KINDS:
        path = os.path.join(directory, file_name(base_offset, kind, source))
        if fs.exists(path):
            fs.rename(path, os.path.join(directory, file_name(base_offset, kind, target)))
