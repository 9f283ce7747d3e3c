"""Records as columns in memory, by address: what the encoder takes and the decoder gives.

These are thin views (offsets, data, validity) over memory that Arrow or NumPy owns; `keepalive` holds the owners.
Nothing here knows Arrow: `arrow.py` does, so that plain readers need not import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from logstore.errors import BufferLimit, InvalidRecord
from logstore.records.native import address_of
from logstore.records.record import Record, TimestampType

Int64Array = npt.NDArray[np.int64]

_PLAIN_ROWS = 4096
_PLAIN_HEADERS = 1 << 16
_PLAIN_HEADERS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class BytesColumn:
    """Byte strings: `offsets` has one more entry than there are rows; a clear bit in the bitmap is a null."""

    offsets: Int64Array
    data_address: int
    valid_address: int = 0  # 0: no nulls
    valid_bit: int = 0  # position of the first row's bit
    keepalive: object = None


@dataclass(frozen=True, slots=True)
class HeadersColumn:
    """Headers of each row: entries [list_offsets[i], list_offsets[i + 1]) of `keys` and `values`."""

    list_offsets: Int64Array
    keys: BytesColumn
    values: BytesColumn
    valid_address: int = 0
    valid_bit: int = 0
    keepalive: object = None


@dataclass(frozen=True, slots=True)
class Columns:
    """`count` records to encode. Without timestamps, or where one is null, the encoder's default is taken."""

    count: int
    keys: BytesColumn
    values: BytesColumn
    timestamps_ms: Int64Array | None = None
    timestamps_valid_address: int = 0
    timestamps_valid_bit: int = 0
    headers: HeadersColumn | None = None
    offset_deltas: Int64Array | None = None
    keepalive: object = None


def bytes_column(values: Sequence[bytes | None]) -> BytesColumn:
    data = b"".join([value for value in values if value is not None])
    lengths = np.fromiter((0 if value is None else len(value) for value in values), dtype=np.int64, count=len(values))
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    bits = np.packbits(
        np.fromiter((value is not None for value in values), dtype=np.uint8, count=len(values)), bitorder="little"
    )
    holder = np.frombuffer(data + b"\0", dtype=np.uint8)
    return BytesColumn(offsets, address_of(holder), address_of(bits) if len(bits) else 0, 0, (holder, bits))


def columns_of(records: Iterable[Record], *, first_offset: int | None = None) -> Columns:
    """Plain records as columns. With `first_offset` the records keep their offsets, as distances from it."""
    rows = list(records)
    headers = None
    if any(row.headers for row in rows):
        flat = [header for row in rows for header in row.headers]
        counts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row.headers) for row in rows], out=counts[1:])
        headers = HeadersColumn(
            counts,
            bytes_column([_header_name(name) for name, _ in flat]),
            bytes_column([value for _, value in flat]),
        )
    deltas = None
    if first_offset is not None:
        deltas = np.array([row.offset - first_offset for row in rows], dtype=np.int64)
    return Columns(
        count=len(rows),
        keys=bytes_column([row.key for row in rows]),
        values=bytes_column([row.value for row in rows]),
        timestamps_ms=np.array([row.timestamp_ms for row in rows], dtype=np.int64),
        headers=headers,
        offset_deltas=deltas,
    )


def _header_name(name: str) -> bytes:
    try:
        return name.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRecord(f"the header name {name!r} has no UTF-8 form") from None


@dataclass(frozen=True, slots=True)
class DecodedBytes:
    """Byte strings that were read: int32 offsets as Arrow's binary has them, one validity byte a row."""

    offsets: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]
    valid: npt.NDArray[np.uint8]
    null_count: int

    def slice(self, first: int, last: int) -> DecodedBytes:
        offsets = self.offsets[first : last + 1]
        data = self.data[int(offsets[0]) : int(offsets[-1])]
        valid = self.valid[first:last]
        nulls = int((valid == 0).sum()) if self.null_count else 0
        return DecodedBytes(offsets - offsets[0], data, valid, nulls)

    def tolist(self) -> list[bytes | None]:
        data = self.data.tobytes()
        ends = self.offsets.tolist()
        if self.null_count == 0:
            return [data[start:end] for start, end in pairwise(ends)]
        valid = self.valid.tolist()
        return [data[ends[i] : ends[i + 1]] if ok else None for i, ok in enumerate(valid)]


@dataclass(frozen=True, slots=True)
class DecodedHeaders:
    list_offsets: npt.NDArray[np.int32]
    keys: DecodedBytes
    values: DecodedBytes


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Records that were read, in offset order."""

    offsets: Int64Array
    timestamps_ms: Int64Array
    timestamp_types: npt.NDArray[np.uint8]
    keys: DecodedBytes
    values: DecodedBytes
    headers: DecodedHeaders | None

    def __len__(self) -> int:
        return len(self.offsets)

    def having_key(self, key: bytes) -> Iterator[Record]:
        """The records with this key; only those become objects."""
        lengths = np.diff(self.keys.offsets)
        for row in np.nonzero(lengths == len(key))[0].tolist():
            start = int(self.keys.offsets[row])
            if self.keys.data[start : start + len(key)].tobytes() == key and self.keys.valid[row]:
                yield next(self.slice(row, row + 1).records())

    def slice(self, first: int, last: int) -> DecodedColumns:
        """Rows [first, last) alone."""
        headers = self.headers
        if headers is not None:
            low, high = int(headers.list_offsets[first]), int(headers.list_offsets[last])
            headers = DecodedHeaders(
                headers.list_offsets[first : last + 1] - headers.list_offsets[first],
                headers.keys.slice(low, high),
                headers.values.slice(low, high),
            )
        return DecodedColumns(
            self.offsets[first:last],
            self.timestamps_ms[first:last],
            self.timestamp_types[first:last],
            self.keys.slice(first, last),
            self.values.slice(first, last),
            headers,
        )

    def records(self) -> Iterator[Record]:
        """The same as plain records; header names that are not UTF-8 are shown as Kafka's clients show them.

        Objects take many times the room of what they are made of, so only some rows are objects at a time. Raises
        BufferLimit for a record with more headers than can be meant.
        """
        first = 0
        while first < len(self):
            last = min(first + _PLAIN_ROWS, len(self))
            if self.headers is not None:
                ends = self.headers.list_offsets
                while last - first > 1 and ends[last] - ends[first] > _PLAIN_HEADERS:
                    last = first + (last - first) // 2
                if ends[last] - ends[first] > _PLAIN_HEADERS_MAX:
                    raise BufferLimit(
                        f"a record with {int(ends[last] - ends[first])} headers; as an object it has at most "
                        f"{_PLAIN_HEADERS_MAX}",
                        offset=int(self.offsets[first]),
                        hint="Read columns instead",
                    )
            yield from self.slice(first, last)._objects()
            first = last

    def _objects(self) -> Iterator[Record]:
        names: list[tuple[str, bytes | None]] = []
        counts: list[int] | None = None
        if self.headers is not None:
            keys = self.headers.keys.tolist()
            values = self.headers.values.tolist()
            names = [((key or b"").decode("utf-8", "replace"), value) for key, value in zip(keys, values, strict=True)]
            counts = self.headers.list_offsets.tolist()
        rows = zip(
            self.offsets.tolist(),
            self.timestamps_ms.tolist(),
            self.timestamp_types.tolist(),
            self.keys.tolist(),
            self.values.tolist(),
            strict=True,
        )
        for i, (offset, timestamp_ms, kind, key, value) in enumerate(rows):
            headers = () if counts is None else tuple(names[counts[i] : counts[i + 1]])
            yield Record(key, value, timestamp_ms, headers, offset, TimestampType(kind))
