"""The offset index: from an offset to a position in the `.log` at or before it.

Entry, 8 bytes big endian: relative offset of the batch's LAST record:4, position of the batch's start:4. Offsets
strictly increase.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from logstore.errors import CorruptIndex
from logstore.segment.index_file import IndexFile

_ENTRY = struct.Struct(">ii")


@dataclass(frozen=True, slots=True)
class OffsetPosition:
    offset: int
    position: int


class OffsetIndex(IndexFile):
    entry_bytes = _ENTRY.size

    def entry(self, number: int) -> OffsetPosition:
        relative, position = _ENTRY.unpack(self._one(number))
        return OffsetPosition(self.base_offset + relative, position)

    def _offset(self, number: int) -> int:
        return self.entry(number).offset

    def _position(self, number: int) -> int:
        return self.entry(number).position

    @property
    def is_full(self) -> bool:
        return self.entries >= self.max_entries

    def last_offset(self) -> int:
        return self.entry(self.entries - 1).offset if self.entries else self.base_offset

    def lookup(self, target_offset: int) -> OffsetPosition:
        """The greatest entry at or below `target_offset`, or the segment's start."""
        number = self._largest_at_most(target_offset, "_offset")
        return self.entry(number) if number >= 0 else OffsetPosition(self.base_offset, 0)

    def each_beyond(self, positions: Iterable[int]) -> list[OffsetPosition]:
        """The first entries positioned at or after each of these, which increase; fewer where there are none."""
        raw = self.raw(0, min(self.entries, self.max_entries))
        entries = np.frombuffer(raw[: len(raw) - len(raw) % self.entry_bytes], dtype=">i4").reshape(-1, 2)
        found = np.unique(np.searchsorted(entries[:, 1], np.fromiter(positions, dtype=np.int64)))
        return [
            OffsetPosition(self.base_offset + relative, position)
            for relative, position in entries[found[found < len(entries)]].tolist()
        ]

    def truncate_to(self, offset: int) -> None:
        """Keep entries of offsets below `offset`."""
        self.keep(self._largest_at_most(offset - 1, "_offset") + 1)

    def sanity_check(self, log_bytes: int) -> None:
        """Raises CorruptIndex for entries out of order or positions beyond the log, or a size no index has."""
        self._check_size()
        previous_offset, previous_position = -1, -1
        for number, (relative, position) in enumerate(self._unpacked(_ENTRY)):
            if relative <= previous_offset or position <= previous_position or position >= log_bytes:
                raise CorruptIndex(
                    f"entry {number} ({relative}, {position}) does not follow ({previous_offset}, {previous_position})",
                    file=self.path,
                    position=number * self.entry_bytes,
                    offset=self.base_offset + relative,
                )
            previous_offset, previous_position = relative, position

    def items(self) -> list[OffsetPosition]:
        return [OffsetPosition(self.base_offset + r, p) for r, p in _ENTRY.iter_unpack(self.raw())]
