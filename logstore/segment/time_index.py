"""The time index: from a timestamp to an offset before which nothing newer lies.

Entry, 12 bytes big endian: largest timestamp so far:8, relative LAST offset of the batch that carries it:4. Both
increase; one slot is reserved for the final entry written on roll or close.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from logstore.errors import CorruptIndex
from logstore.records.record import NO_TIMESTAMP
from logstore.segment.index_file import IndexFile

_ENTRY = struct.Struct(">qi")


@dataclass(frozen=True, slots=True)
class TimestampOffset:
    timestamp_ms: int
    offset: int


class TimeIndex(IndexFile):
    entry_bytes = _ENTRY.size

    def entry(self, number: int) -> TimestampOffset:
        timestamp_ms, relative = _ENTRY.unpack(self._one(number))
        return TimestampOffset(timestamp_ms, self.base_offset + relative)

    def _timestamp(self, number: int) -> int:
        return self.entry(number).timestamp_ms

    def _offset(self, number: int) -> int:
        return self.entry(number).offset

    @property
    def is_full(self) -> bool:
        return self.entries >= self.max_entries - 1

    def last_entry(self) -> TimestampOffset:
        return self.entry(self.entries - 1) if self.entries else TimestampOffset(NO_TIMESTAMP, self.base_offset)

    def last_below(self, end_offset: int) -> TimestampOffset:
        """The last entry of an offset below `end_offset`, or (-1, base offset)."""
        number = self._largest_at_most(end_offset - 1, "_offset")
        return self.entry(number) if number >= 0 else TimestampOffset(NO_TIMESTAMP, self.base_offset)

    def maybe_append(self, timestamp_ms: int, offset: int) -> bool:
        """Append when the timestamp is new, ignoring fullness: the final entry of a segment."""
        last = self.last_entry()
        if timestamp_ms <= last.timestamp_ms:
            return False
        if self.entries and offset < last.offset:
            raise CorruptIndex(
                f"offset {offset} is below the last entry's {last.offset}", file=self.path, offset=offset
            )
        self.append_raw(_ENTRY.pack(timestamp_ms, offset - self.base_offset), 1)
        return True

    def lookup(self, timestamp_ms: int) -> TimestampOffset:
        """The entry with the greatest timestamp at or below `timestamp_ms`, or (-1, base offset)."""
        number = self._largest_at_most(timestamp_ms, "_timestamp")
        return self.entry(number) if number >= 0 else TimestampOffset(NO_TIMESTAMP, self.base_offset)

    def truncate_to(self, offset: int) -> None:
        """Keep entries of offsets below `offset`."""
        self.keep(self._largest_at_most(offset - 1, "_offset") + 1)

    def sanity_check(self) -> None:
        """Raises CorruptIndex for entries out of order, or a size no index has."""
        self._check_size()
        previous_ts, previous_offset = NO_TIMESTAMP, -1
        for number, (timestamp_ms, relative) in enumerate(self._unpacked(_ENTRY)):
            if timestamp_ms <= previous_ts or relative < previous_offset or relative < 0:
                raise CorruptIndex(
                    f"entry {number} ({timestamp_ms}, {relative}) does not follow ({previous_ts}, {previous_offset})",
                    file=self.path,
                    position=number * self.entry_bytes,
                    offset=self.base_offset + relative,
                )
            previous_ts, previous_offset = timestamp_ms, relative

    def items(self) -> list[TimestampOffset]:
        return [TimestampOffset(ts, self.base_offset + r) for ts, r in _ENTRY.iter_unpack(self.raw())]
