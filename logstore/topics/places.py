"""Whose a partition directory is: by its `partition.metadata`, or, where that is lost, by its segments.

Rules only; nothing here changes a file. An error of the system is passed on, never taken for an answer.
"""

from __future__ import annotations

import os

from logstore.directory.checkpoint import read_partition_metadata
from logstore.directory.state import PartitionState
from logstore.errors import CorruptCheckpoint
from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.segment.names import PARTITION_METADATA, FileKind, Transient, parse_file_name


def topic_id_at(fs: FileSystem, directory: str, *, limits: Limits) -> str | None:
    """The topic id a directory carries; None when it has none that can be read, or there is no directory."""
    try:
        metadata = read_partition_metadata(fs, os.path.join(directory, PARTITION_METADATA), limits=limits)
    except (CorruptCheckpoint, NotADirectoryError):
        return None
    return metadata.topic_id if metadata else None


def segments_at(fs: FileSystem, directory: str) -> dict[int, int]:
    """Sizes of the `.log` files by base offset."""
    found = {}
    for name in fs.listdir(directory):
        parsed = parse_file_name(name)
        if parsed is not None and parsed.kind is FileKind.LOG and parsed.transient is Transient.NONE:
            found[parsed.base_offset] = fs.stat(os.path.join(directory, name)).size_bytes
    return found


def is_log_of(fs: FileSystem, directory: str, state: PartitionState | None) -> bool:
    """Whether the directory holds the log that the segment list is about.

    Every listed segment is there; the sealed ones have the listed size, the active one at least that. A list without
    segments (a partition nobody has written to) fits a directory without records.
    """
    if state is None:
        return False
    found = segments_at(fs, directory)
    if not state.segments:
        return not any(found.values())
    if state.swap is not None:
        # Between two lists: some of the old files may have gone, and some of the new ones come.
        return any(base in found for base in (*state.swap.new_bases, *(each.base_offset for each in state.segments)))
    *sealed, active = state.segments
    return all(found.get(each.base_offset) == each.size_bytes for each in sealed) and (
        found.get(active.base_offset, -1) >= active.size_bytes
    )
