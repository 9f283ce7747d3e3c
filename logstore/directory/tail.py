"""Where a log ends, exactly. Imports nothing heavy: commands that only look use it."""

from __future__ import annotations

from dataclasses import dataclass

from logstore.records.record import NO_TIMESTAMP


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a log, exactly: its active segment, how much of it counts, and the bookkeeping of its indexes."""

    base_offset: int = 0
    size_bytes: int = 0
    largest_timestamp_ms: int = NO_TIMESTAMP
    largest_timestamp_offset: int = 0
    bytes_since_index_entry: int = 0
    index_entries: int = 0
    time_index_entries: int = 0
