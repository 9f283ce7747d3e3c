"""Files of an active segment as a broker has them: at their full size, with zeros behind what they hold."""

from __future__ import annotations

from logstore.segment.index_file import IndexFile
from logstore.segment.segment import LogSegment


def preallocate_index(index: IndexFile) -> None:
    assert index._file is not None
    index._file.truncate(max(index.max_entries, index.entries) * index.entry_bytes)


def preallocate(segment: LogSegment, log_bytes: int = 0) -> None:
    """Both indexes, and an empty `.log` if a size is given."""
    preallocate_index(segment.offset_index)
    preallocate_index(segment.time_index)
    if log_bytes and not segment.size_bytes:
        segment._unshare_log()
        segment.log.truncate(log_bytes)
