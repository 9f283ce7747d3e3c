"""Batches to columns: opens what is compressed or legacy, then decodes everything in one pass of a kernel.

Whatever the stored form, records end up as uncompressed v2 records at an address; a legacy message set is read by
`legacy` and re-encoded into the arena first. The arena is bounded: batches are decoded in groups that fit it, and one
batch may at most grow it to the configured limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from logstore.errors import CorruptBatch, DecompressionLimit, DuramenError
from logstore.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX, Limits
from logstore.records import slots
from logstore.records.codes import EXPLAINED, FULL, OK
from logstore.records.columns import Columns, DecodedBytes, DecodedColumns, DecodedHeaders, columns_of
from logstore.records.compression import OutputTooSmall, codec_by_id
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.legacy import LegacyBatch, decode_legacy
from logstore.records.memory import Memory
from logstore.records.native import address_of, kernels
from logstore.records.record import TimestampType
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_TIMESTAMP,
    CODEC_MASK,
    CONTROL_BIT,
    COUNT,
    HEADER_BYTES,
    LAST_OFFSET,
    MAGIC,
    MAX_TIMESTAMP,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    POSITION,
    RECORD_BYTES_MIN,
    SIZE,
    SKIP,
    TIMESTAMP_TYPE_BIT,
    BatchTable,
)

_ARENA_BYTES = 8 << 20
_GROUP_BYTES = 32 << 20  # payload decoded into one set of columns
_ALIGNMENT = 64  # what Arrow recommends

_Number = TypeVar("_Number", bound=np.generic)


class Decoder:
    """Decodes batches; reuses its arena, so payload addresses are valid until the next step. Not for several threads
    at once.
    """

    def __init__(self, *, limits: Limits = DEFAULT_LIMITS, headers: bool = True, control: bool = False) -> None:
        self._limits = limits
        self._headers = headers
        self._control = control
        self._arena = np.empty(0, dtype=np.uint8)
        self._used = 0
        self._memory = Memory(block_bytes_max=24 << 20)  # what a full arena decodes to
        self._headers_seen = False

    def columns(
        self,
        data: npt.NDArray[np.uint8],
        table: BatchTable,
        *,
        min_offset: int = 0,
        max_offset: int = INT64_MAX,
        file: str | None = None,
        base_position: int = 0,
        after: int | None = None,
    ) -> Iterator[DecodedColumns]:
        """Records with min_offset <= offset < max_offset; raises CorruptBatch, DecompressionLimit.

        With `after`, the last offset in front of the first batch, legacy batches must not overlap: only opening one
        tells where it begins.
        """
        table[:, SKIP] |= (table[:, LAST_OFFSET] < min_offset) | (table[:, BASE_OFFSET] >= max_offset)
        for first, last in self.opened(data, table, file=file, base_position=base_position):
            if after is not None:
                _check_legacy_order(table, first, last, after, file, base_position)
            yield self.decode(table, first, last, min_offset, max_offset, file, base_position)

    def opened(
        self, data: npt.NDArray[np.uint8], table: BatchTable, *, file: str | None = None, base_position: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Groups of batches [first, last) whose payloads are in memory until the next step; none of only skipped
        ones."""
        if not self._control:
            table[:, SKIP] |= (table[:, ATTRIBUTES] & CONTROL_BIT) != 0
        first = 0
        while first < len(table):
            last = self.open(data, table, first, file=file, base_position=base_position)
            if (table[first:last, SKIP] == 0).any():
                yield first, last
            first = last

    def open(
        self,
        data: npt.NDArray[np.uint8],
        table: BatchTable,
        first: int,
        *,
        file: str | None = None,
        base_position: int = 0,
    ) -> int:
        """Set payload addresses of batches [first, n); returns n, short of the end when the arena is full."""
        plain = (table[first:, MAGIC] == 2) & ((table[first:, ATTRIBUTES] & CODEC_MASK) == 0)
        self._used = 0
        if plain.all() and int(table[first:, PAYLOAD_SIZE].sum()) <= _GROUP_BYTES:
            return len(table)
        view = data.data
        payload_bytes = 0
        facts = table[first:, (SKIP, POSITION, SIZE, PAYLOAD_SIZE)].tolist()
        for i, (skip, position, size, payload_size) in enumerate(facts, first):
            if skip:
                continue
            if payload_bytes >= _GROUP_BYTES:
                return i
            if plain[i - first]:
                if payload_bytes and payload_bytes + payload_size > _GROUP_BYTES:
                    return i
                payload_bytes += payload_size
                continue
            row = table[i]
            try:
                opened = self._open_one(view[position : position + size], row, alone=self._used == 0)
            except DuramenError as error:
                offset = int(row[BASE_OFFSET if row[MAGIC] == 2 else LAST_OFFSET])
                offset = offset if error.offset is None else error.offset
                error.at(file=error.file or file, position=base_position + position, offset=offset)
                raise
            if opened is None:
                return i
            payload_bytes += opened
        return len(table)

    def _open_one(self, batch: memoryview, row: npt.NDArray[np.int64], *, alone: bool) -> int | None:
        """The payload's size; None when the arena has no room left and is in use: the caller comes back with an empty
        one.
        """
        if row[MAGIC] == 2:
            return self._decompress(batch[HEADER_BYTES:], row, alone)
        legacy = decode_legacy(batch, limits=self._limits)
        payload = memoryview(upconvert(legacy))[HEADER_BYTES:]
        if not self._reserve(len(payload), alone):
            return None
        self._arena[self._used : self._used + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        self._take(row, len(payload))
        append_time = legacy.timestamp_type is TimestampType.LOG_APPEND_TIME
        row[BASE_OFFSET] = legacy.first_offset
        if row[LAST_OFFSET] == 0:  # some clients leave a wrapper's offset unset
            row[LAST_OFFSET] = legacy.records[-1].offset
        row[ATTRIBUTES] = TIMESTAMP_TYPE_BIT if append_time else 0
        row[BASE_TIMESTAMP] = legacy.records[0].timestamp_ms
        row[MAX_TIMESTAMP] = legacy.max_timestamp_ms
        row[COUNT] = len(legacy.records)
        return len(payload)

    def _decompress(self, payload: memoryview, row: npt.NDArray[np.int64], alone: bool) -> int | None:
        codec = codec_by_id(int(row[ATTRIBUTES]) & CODEC_MASK)
        if not len(payload) and row[COUNT] == 0:  # nothing was compressed: no framing either
            return self._take(row, 0)
        wanted = max(_ARENA_BYTES, 4 * len(payload))
        if not self._reserve(min(4 * len(payload), self._limits.decompressed_bytes), alone, at_least=wanted):
            return None
        while True:
            room = min(len(self._arena) - self._used, self._limits.decompressed_bytes)
            try:
                size = codec.decompress_into(payload, self._arena.data[self._used : self._used + room])
                break
            except OutputTooSmall:
                if self._used > 0:
                    return None
                if room >= self._limits.decompressed_bytes:
                    raise DecompressionLimit(
                        f"a batch decompresses to more than {self._limits.decompressed_bytes} bytes",
                        hint="Raise the reader's decompressed_bytes limit if the data is trusted",
                    ) from None
                self._arena = np.empty(min(2 * len(self._arena), self._limits.decompressed_bytes), dtype=np.uint8)
        if int(row[COUNT]) * RECORD_BYTES_MIN > size:
            raise CorruptBatch("the record count does not fit the batch")
        return self._take(row, size)

    def _reserve(self, size: int, alone: bool, at_least: int = 0) -> bool:
        if len(self._arena) - self._used >= size and len(self._arena) >= min(at_least, _ARENA_BYTES):
            return True
        if not alone:
            return False
        self._arena = np.empty(
            min(max(size, at_least, _ARENA_BYTES), max(size, self._limits.decompressed_bytes)), dtype=np.uint8
        )
        return True

    def _take(self, row: npt.NDArray[np.int64], size: int) -> int:
        row[PAYLOAD_ADDRESS] = address_of(self._arena) + self._used
        row[PAYLOAD_SIZE] = size
        self._used += size
        return size

    def decode(
        self,
        table: BatchTable,
        first: int,
        last: int,
        min_offset: int,
        max_offset: int,
        file: str | None,
        base_position: int,
        *,
        keep: npt.NDArray[np.uint8] | None = None,
    ) -> DecodedColumns:
        """Records of opened batches [first, last); with `keep` (a byte for each of them) only those it names."""
        live = table[first:last, SKIP] == 0
        count = int(table[first:last, COUNT][live].sum())
        payload = int(table[first:last, PAYLOAD_SIZE][live].sum())
        if payload > INT32_MAX:
            raise DecompressionLimit(f"{payload} bytes of records in one step; columns hold at most 2 GiB", file=file)
        block = np.zeros(slots.D_SLOTS, dtype=np.int64)
        block[slots.D_MIN_OFFSET] = min_offset
        block[slots.D_MAX_OFFSET] = max_offset
        if keep is not None:
            assert len(keep) == count
            block[slots.D_KEEP] = address_of(keep)
        room = _Room(self._memory, (2 * 8 + 3 * 4 + 3) * (count + 1) + 2 * payload, arrays=10)
        offsets = room.take(count, 8, block, slots.D_OFFSETS)
        timestamps = room.take(count, 8, block, slots.D_TIMESTAMPS)
        types = room.take(count, 1, block, slots.D_TIMESTAMP_TYPES)
        keys = _Output(room, count, payload, block, slots.D_KEY_OFFSETS, slots.D_KEY_DATA, slots.D_KEY_VALID)
        values = _Output(room, count, payload, block, slots.D_VALUE_OFFSETS, slots.D_VALUE_DATA, slots.D_VALUE_VALID)
        lists = room.take(count + 1, 4, block, slots.D_HEADER_OFFSETS)
        # Few records have headers, so at first there is no room for any: the kernel says when that was wrong.
        block[slots.D_HEADER_CAPACITY] = 0 if self._headers else -1
        outputs = _header_outputs(payload, block) if self._headers_seen else None
        code = kernels().decode(address_of(table), first, last, address_of(block))
        if code == FULL and outputs is None:
            outputs = _header_outputs(payload, block)
            code = kernels().decode(address_of(table), first, last, address_of(block))
        if code != OK:
            blamed = table[int(block[slots.D_BATCH])]
            raise CorruptBatch(
                EXPLAINED.get(code, f"code {code}"),
                file=file,
                position=base_position + int(blamed[POSITION]),
                offset=int(blamed[BASE_OFFSET]),
            )
        n = int(block[slots.D_N])
        headers = None
        header_count = int(block[slots.D_HEADER_N])
        self._headers_seen = header_count > 0
        if outputs is not None and header_count:
            list_offsets = room.array(lists, n + 1, np.int32)
            list_offsets[0] = 0
            headers = DecodedHeaders(
                list_offsets,
                outputs[0].taken(header_count, 0),
                outputs[1].taken(header_count, int(block[slots.D_HEADER_VALUE_NULLS])),
            )
        return DecodedColumns(
            room.array(offsets, n, np.int64),
            room.array(timestamps, n, np.int64),
            room.array(types, n, np.uint8),
            keys.taken(n, int(block[slots.D_KEY_NULLS])),
            values.taken(n, int(block[slots.D_VALUE_NULLS])),
            headers,
        )


class _Room:
    """Arrays one after the other in a block of memory."""

    def __init__(self, memory: Memory, size: int, arrays: int) -> None:
        size += (arrays + 1) * _ALIGNMENT
        self._block = memory.block(size)
        self._address = address_of(self._block)
        self._at = -self._address % _ALIGNMENT

    def take(self, count: int, item_bytes: int, block: npt.NDArray[np.int64], slot: int) -> int:
        """Set room aside for `count` items, its address put into the kernel's block; returns where it lies."""
        at = self._at
        block[slot] = self._address + at
        end = at + count * item_bytes
        assert end <= len(self._block)
        self._at = end + -end % _ALIGNMENT
        return at

    def array(self, at: int, count: int, kind: type[_Number]) -> npt.NDArray[_Number]:
        end = at + count * np.dtype(kind).itemsize
        return self._block[at:end].view(kind)


class _Output:
    """Room for `count` byte strings of at most `data_bytes` together."""

    def __init__(
        self,
        room: _Room,
        count: int,
        data_bytes: int,
        block: npt.NDArray[np.int64],
        offsets_slot: int,
        data_slot: int,
        valid_slot: int | None,
    ) -> None:
        self._room = room
        self._offsets = room.take(count + 1, 4, block, offsets_slot)
        self._data = room.take(data_bytes, 1, block, data_slot)
        self._valid = -1 if valid_slot is None else room.take(count, 1, block, valid_slot)

    def taken(self, n: int, null_count: int) -> DecodedBytes:
        offsets = self._room.array(self._offsets, n + 1, np.int32)
        offsets[0] = 0
        data = self._room.array(self._data, int(offsets[n]), np.uint8)
        valid = self._room.array(max(self._valid, 0), n if self._valid >= 0 else 0, np.uint8)
        return DecodedBytes(offsets, data, valid, null_count)


def _header_outputs(payload: int, block: npt.NDArray[np.int64]) -> tuple[_Output, _Output]:
    """Room for the names and values of headers. It is made for the worst case and not kept: the system allocates no
    pages that are never written.
    """
    capacity = payload // 2  # a header takes two bytes at least
    block[slots.D_HEADER_CAPACITY] = capacity
    room = _Room(Memory(), 2 * (5 * (capacity + 1) + payload), arrays=6)
    names = _Output(room, capacity, payload, block, slots.D_HEADER_KEY_OFFSETS, slots.D_HEADER_KEY_DATA, None)
    values = _Output(
        room,
        capacity,
        payload,
        block,
        slots.D_HEADER_VALUE_OFFSETS,
        slots.D_HEADER_VALUE_DATA,
        slots.D_HEADER_VALUE_VALID,
    )
    return names, values


def _check_legacy_order(
    table: BatchTable, first: int, last: int, after: int, file: str | None, base_position: int
) -> None:
    for i in first + np.nonzero((table[first:last, MAGIC] < 2) & (table[first:last, SKIP] == 0))[0]:
        previous = int(table[i - 1, LAST_OFFSET]) if i else after
        if int(table[i, BASE_OFFSET]) <= previous:
            raise CorruptBatch(
                f"messages from offset {int(table[i, BASE_OFFSET])} on do not follow offset {previous}",
                file=file,
                position=base_position + int(table[i, POSITION]),
                offset=int(table[i, LAST_OFFSET]),
            )


def upconvert(legacy: LegacyBatch, *, codec_id: int = 0) -> bytes:
    """A legacy message set as one v2 batch with the same records at the same offsets; leader epoch -1, no producer.

    Raises CorruptBatch when its offsets do not fit one batch.
    """
    last_offset = legacy.records[-1].offset
    if last_offset - legacy.first_offset > INT32_MAX or last_offset >= INT64_MAX:
        raise CorruptBatch(f"the messages of one set have the offsets {legacy.first_offset} to {last_offset}")
    columns: Columns = columns_of(legacy.records, first_offset=legacy.first_offset)
    append_time = legacy.timestamp_type is TimestampType.LOG_APPEND_TIME
    options = BatchOptions(codec_id=codec_id, base_offset=legacy.first_offset, log_append_time=append_time)
    return encode_batch(columns, options)
