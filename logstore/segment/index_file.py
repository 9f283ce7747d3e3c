"""Entries of fixed size in a file, sorted: what the offset index and the time index share.

A broker preallocates the file of its active segment with zeros to its full size; ours grow. A file is cut to its real
entries when the segment stops being active or is closed. On opening, all bytes count as entries: a zero tail left by a
crash is found by the sanity check and repaired by a rebuild, never trusted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from logstore.errors import CorruptIndex
from logstore.files import File, FileSystem

if TYPE_CHECKING:
    from typing_extensions import Buffer


_ENTRIES_PER_READ = 1 << 16


class IndexFile:
    entry_bytes: ClassVar[int]

    def __init__(self, fs: FileSystem, path: str, base_offset: int, max_bytes: int, *, writable: bool = False) -> None:
        """`max_bytes` is segment.index.bytes. A missing file is an empty index; a writable one is created at once."""
        self._fs = fs
        self.path = path
        self.base_offset = base_offset
        self.max_entries = max_bytes // self.entry_bytes
        self._file: File | None = None
        size = 0
        if writable:
            self._file = fs.open(path, create=True)
            size = self._file.size()
        elif fs.exists(path):
            self._file = fs.open(path)
            size = self._file.size()
        # Bytes after the last whole entry are for the sanity check: a live index may be read while it grows.
        self.entries = size // self.entry_bytes
        if not writable:
            self.entries = self._real_entries()

    def _real_entries(self) -> int:
        """Where the zero tail of another process's live index begins: no entry but the first is all zeros."""
        low, high = 1, self.entries
        while low < high:
            middle = (low + high) // 2
            if self.raw(middle, middle + 1).strip(b"\0"):
                low = middle + 1
            else:
                high = middle
        if self.entries and low == 1 and not self.raw(0, 1).strip(b"\0"):
            return 0
        return min(low, self.entries)

    def raw(self, first: int = 0, last: int | None = None) -> bytes:
        """Bytes of entries [first, last)."""
        last = self.entries if last is None else last
        if self._file is None or last <= first:
            return b""
        return self._file.pread((last - first) * self.entry_bytes, first * self.entry_bytes)

    def _unpacked(self, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        """All entries, some at a time: a file that is not an index may have any size."""
        for first in range(0, self.entries, _ENTRIES_PER_READ):
            data = self.raw(first, min(first + _ENTRIES_PER_READ, self.entries))
            yield from form.iter_unpack(data[: len(data) - len(data) % form.size])

    def _one(self, number: int) -> bytes:
        data = self.raw(number, number + 1)
        if len(data) < self.entry_bytes:
            raise CorruptIndex(
                f"entry {number} of {self.entries} is gone", file=self.path, position=number * self.entry_bytes
            )
        return data

    def _check_size(self) -> None:
        size = 0 if self._file is None else self._file.size()
        if size % self.entry_bytes:
            raise CorruptIndex(
                f"{size} bytes are not a multiple of {self.entry_bytes}",
                file=self.path,
                position=size - size % self.entry_bytes,
            )

    def append_raw(self, data: Buffer, count: int) -> None:
        """Append `count` entries already encoded and checked (the place kernel's output)."""
        assert self._file is not None, "the index was opened for reading"
        if count:
            self._file.pwrite(data, self.entries * self.entry_bytes)
            self.entries += count

    def trim(self) -> None:
        """Cut to the real entries."""
        if self._file is not None and self._file.size() != self.entries * self.entry_bytes:
            self._file.truncate(self.entries * self.entry_bytes)

    def keep(self, entries: int) -> None:
        """Forget all entries from number `entries` on, and cut the file."""
        assert self._file is not None
        assert 0 <= entries <= self.entries
        self.entries = entries
        self._file.truncate(entries * self.entry_bytes)

    def flush(self) -> None:
        if self._file is not None:
            self._file.fsync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _largest_at_most(self, target: int, first_field: str) -> int:
        """Number of the last entry whose first field is <= target, or -1."""
        low, high = 0, self.entries - 1
        while low <= high:
            middle = (low + high) // 2
            if getattr(self, first_field)(middle) <= target:
                low = middle + 1
            else:
                high = middle - 1
        return high

    @property
    def size_bytes(self) -> int:
        return self.entries * self.entry_bytes

    @property
    def name(self) -> str:
        return os.path.basename(self.path)
