"""The `.txnindex` of one segment: the transactions whose ABORT marker lies in it.

Owns the file, which is created with its first entry and is never preallocated. It never decides which
transactions were aborted (producer state does) nor which a reader must skip (the reader does).

    entry (34 bytes, big-endian)
      int16 version = 0 · int64 producerId · int64 firstOffset · int64 lastOffset · int64 lastStableOffset
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from logstore.errors import CorruptIndex, OffsetsOutOfOrder
from logstore.files import File, FileSystem
from logstore.limits import RELATIVE_OFFSET_MAX

_ENTRY = struct.Struct(">hqqqq")
ENTRY_BYTES = _ENTRY.size
ENTRY_VERSION = 0
#: Entries read at a time, so that a large index never lies in memory as a whole.
_ENTRIES_PER_READ = 4096


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """`last_offset` is the ABORT marker's; `last_stable_offset` is what it was once that marker was in."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode_entry(aborted: AbortedTransaction) -> bytes:
    return _ENTRY.pack(
        ENTRY_VERSION, aborted.producer_id, aborted.first_offset, aborted.last_offset, aborted.last_stable_offset
    )


def decode_entries(data: bytes, *, file: str | None = None, position: int = 0) -> Iterator[AbortedTransaction]:
    """The entries of `data`, whose length is a multiple of ENTRY_BYTES and which begins at `position` of the file.

    Raises CorruptIndex for an entry that cannot have been written.
    """
    for version, producer_id, first_offset, last_offset, last_stable_offset in _ENTRY.iter_unpack(data):
        if version != ENTRY_VERSION:
            raise CorruptIndex(f"transaction index entry of version {version}", file=file, position=position)
        # no upper bound on the last stable offset: Kafka may take it from a transaction begun later in the same append
        if producer_id < 0 or not 0 <= first_offset < last_offset or last_stable_offset < 0:
            raise CorruptIndex(
                f"invalid transaction index entry: producer {producer_id}, offsets {first_offset} to "
                f"{last_offset}, last stable offset {last_stable_offset}",
                file=file,
                position=position,
            )
        yield AbortedTransaction(producer_id, first_offset, last_offset, last_stable_offset)
        position += ENTRY_BYTES


class TxnIndex:
    """The transaction index of the segment that starts at `base_offset`; its file may not exist.

    Trailing bytes that make no whole entry are ignored, and overwritten by the next append.
    """

    def __init__(self, fs: FileSystem, path: str, base_offset: int, *, writable: bool = True) -> None:
        self._fs = fs
        self._path = path
        self._base_offset = base_offset
        self._writable = writable
        self._file: File | None = None
        self._last_offset: int | None = None
        self._last_known = False

    @property
    def path(self) -> str:
        return self._path

    def _opened(self) -> File | None:
        """The file, None while there is none; looked for each time, as another process may be its writer."""
        if self._file is None:
            try:
                self._file = self._fs.open(self._path, writable=self._writable)
            except FileNotFoundError:
                return None
        return self._file

    def _whole_bytes(self, file: File) -> int:
        size = file.size()
        return size - size % ENTRY_BYTES

    @property
    def last_offset(self) -> int | None:
        """Last offset of the last entry, None when there is no entry."""
        if not self._last_known:
            file = self._opened()
            end = self._whole_bytes(file) if file else 0
            self._last_offset = None
            if file and end:
                data = file.pread(ENTRY_BYTES, end - ENTRY_BYTES)
                for entry in decode_entries(data, file=self._path, position=end - ENTRY_BYTES):
                    self._last_offset = entry.last_offset
            self._last_known = self._writable  # a reader looks again: the writer goes on
        return self._last_offset

    def append(self, aborted: AbortedTransaction) -> None:
        """Add an entry; markers come in the order of their offsets. Raises OffsetsOutOfOrder."""
        last_offset = self.last_offset
        if last_offset is not None and aborted.last_offset <= last_offset:
            raise OffsetsOutOfOrder(
                f"aborted transaction that ends at {aborted.last_offset}, not above the last entry's {last_offset}",
                file=self._path,
                offset=aborted.last_offset,
            )
        file = self._opened()
        if file is None:
            file = self._file = self._fs.open(self._path, create=True)
        file.pwrite(encode_entry(aborted), self._whole_bytes(file))
        self._last_offset, self._last_known = aborted.last_offset, True

    def entries(self) -> Iterator[AbortedTransaction]:
        """All entries in order. Raises CorruptIndex at the first bad one."""
        for _, entry in self._located():
            yield entry

    def _located(self) -> Iterator[tuple[int, AbortedTransaction]]:
        file = self._opened()
        if file is None:
            return
        position, previous = 0, -1
        while True:
            size = min(self._whole_bytes(file) - position, _ENTRIES_PER_READ * ENTRY_BYTES)
            data = file.pread(size, position) if size > 0 else b""
            data = data[: len(data) - len(data) % ENTRY_BYTES]
            if not data:
                return
            for entry in decode_entries(data, file=self._path, position=position):
                if entry.last_offset <= previous:
                    raise CorruptIndex(
                        f"transaction index entry that ends at {entry.last_offset} after one that ends at {previous}",
                        file=self._path,
                        position=position,
                    )
                yield position, entry
                previous = entry.last_offset
                position += ENTRY_BYTES

    def collect_aborted(self, fetch_offset: int, upper_bound: int) -> tuple[list[AbortedTransaction], bool]:
        """Aborted transactions that overlap [fetch_offset, upper_bound), and whether the search is complete.

        Incomplete means that later segments may hold markers of transactions that began in the range.
        """
        found: list[AbortedTransaction] = []
        for entry in self.entries():
            if entry.last_offset >= fetch_offset and entry.first_offset < upper_bound:
                found.append(entry)
            if entry.last_stable_offset >= upper_bound:
                return found, True
        return found, False

    def truncate_to(self, offset: int) -> None:
        """Drop the entries whose marker is at or above `offset`."""
        kept: int | None = None
        for position, entry in self._located():
            if entry.last_offset >= offset:
                assert self._file is not None
                self._file.truncate(position)
                self._last_offset, self._last_known = kept, True
                return
            kept = entry.last_offset

    def reset(self) -> None:
        """Drop all entries; a file that is there stays, empty."""
        file = self._opened()
        if file is not None:
            file.truncate(0)
        self._last_offset, self._last_known = None, True

    def sanity_check(self) -> None:
        """Raise CorruptIndex when the file cannot be this segment's: the segment must then be rebuilt."""
        file = self._opened()
        if file is None:
            return
        for position, entry in self._located():
            if not 0 <= entry.last_offset - self._base_offset <= RELATIVE_OFFSET_MAX:
                raise CorruptIndex(
                    f"aborted transaction that ends at {entry.last_offset}, outside the segment at {self._base_offset}",
                    file=self._path,
                    position=position,
                )
        size = file.size()
        if size % ENTRY_BYTES:
            raise CorruptIndex(
                f"transaction index of {size} bytes, not a multiple of {ENTRY_BYTES}",
                file=self._path,
                position=size - size % ENTRY_BYTES,
            )

    def flush(self) -> None:
        """fsync the file, if there is one."""
        file = self._opened()
        if file is not None:
            file.fsync()

    def rename(self, path: str) -> None:
        """Follow the segment to a new name; the open file stays the same."""
        if self._fs.exists(self._path):
            self._fs.rename(self._path, path)
        self._path = path

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._last_known = False
