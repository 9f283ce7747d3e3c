"""Batches to columns: opens what is compressed or legacy, then decodes everything in one pass of a kernel.

Whatever the stored form, records end up as uncompressed v2 records at an address; a legacy message set is read by
`legacy` and re-encoded into the arena first. The arena is bounded: batches are decoded in groups that fit it, and one
batch may at most grow it to the configured limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from logstore.errors import CorruptBatch, DecompressionLimit, DuramenError
from logstore.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX, Limits
from logstore.records import slots
from logstore.records.codes import EXPLAINED, OK
from logstore.records.columns import Columns, DecodedBytes, DecodedColumns, DecodedHeaders, columns_of
from logstore.records.compression import OutputTooSmall, codec_by_id
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.legacy import LegacyBatch, decode_legacy
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

    def columns(
        self,
        data: npt.NDArray[np.uint8],
        table: BatchTable,
        *,
        min_offset: int = 0,
        max_offset: int = INT64_MAX,
        file: str | None = None,
        base_position: int = 0,
    ) -> Iterator[DecodedColumns]:
        """Records with min_offset <= offset < max_offset; raises CorruptBatch, DecompressionLimit."""
        if not self._control:
            table[:, SKIP] |= (table[:, ATTRIBUTES] & CONTROL_BIT) != 0
        table[:, SKIP] |= (table[:, LAST_OFFSET] < min_offset) | (table[:, BASE_OFFSET] >= max_offset)
        first = 0
        while first < len(table):
            last = self.open(data, table, first, file=file, base_position=base_position)
            if (table[first:last, SKIP] == 0).any():
                yield self._decode(table, first, last, min_offset, max_offset, file, base_position)
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
        view = data.data
        self._used = 0
        payload_bytes = 0
        for i in range(first, len(table)):
            row = table[i]
            if row[SKIP] != 0:
                continue
            if payload_bytes >= _GROUP_BYTES:
                return i
            if plain[i - first]:
                if payload_bytes and payload_bytes + int(row[PAYLOAD_SIZE]) > _GROUP_BYTES:
                    return i
                payload_bytes += int(row[PAYLOAD_SIZE])
                continue
            position, size = int(row[POSITION]), int(row[SIZE])
            try:
                done = self._open_one(view[position : position + size], row, alone=self._used == 0)
            except DuramenError as error:
                offset = int(row[BASE_OFFSET if row[MAGIC] == 2 else LAST_OFFSET])
                _locate(error, file, base_position + position, offset)
                raise
            if not done:
                return i
            payload_bytes += int(row[PAYLOAD_SIZE])
        return len(table)

    def _open_one(self, batch: memoryview, row: npt.NDArray[np.int64], *, alone: bool) -> bool:
        """False when the arena has no room left and is in use; the caller comes back with an empty one."""
        if row[MAGIC] == 2:
            return self._decompress(batch[HEADER_BYTES:], row, alone)
        legacy = decode_legacy(batch, limits=self._limits)
        payload = memoryview(upconvert(legacy))[HEADER_BYTES:]
        if not self._reserve(len(payload), alone):
            return False
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
        return True

    def _decompress(self, payload: memoryview, row: npt.NDArray[np.int64], alone: bool) -> bool:
        codec = codec_by_id(int(row[ATTRIBUTES]) & CODEC_MASK)
        if not len(payload) and row[COUNT] == 0:  # nothing was compressed: no framing either
            self._take(row, 0)
            return True
        wanted = max(_ARENA_BYTES, 4 * len(payload))
        if not self._reserve(min(4 * len(payload), self._limits.decompressed_bytes), alone, at_least=wanted):
            return False
        while True:
            room = min(len(self._arena) - self._used, self._limits.decompressed_bytes)
            try:
                size = codec.decompress_into(payload, self._arena.data[self._used : self._used + room])
                break
            except OutputTooSmall:
                if self._used > 0:
                    return False
                if room >= self._limits.decompressed_bytes:
                    raise DecompressionLimit(
                        f"a batch decompresses to more than {self._limits.decompressed_bytes} bytes",
                        hint="Raise the reader's decompressed_bytes limit if the data is trusted",
                    ) from None
                self._arena = np.empty(min(2 * len(self._arena), self._limits.decompressed_bytes), dtype=np.uint8)
        if int(row[COUNT]) * RECORD_BYTES_MIN > size:
            raise CorruptBatch("the record count does not fit the batch")
        self._take(row, size)
        return True

    def _reserve(self, size: int, alone: bool, at_least: int = 0) -> bool:
        if len(self._arena) - self._used >= size and len(self._arena) >= min(at_least, _ARENA_BYTES):
            return True
        if not alone:
            return False
        self._arena = np.empty(
            min(max(size, at_least, _ARENA_BYTES), max(size, self._limits.decompressed_bytes)), dtype=np.uint8
        )
        return True

    def _take(self, row: npt.NDArray[np.int64], size: int) -> None:
        row[PAYLOAD_ADDRESS] = address_of(self._arena) + self._used
        row[PAYLOAD_SIZE] = size
        self._used += size

    def _decode(
        self,
        table: BatchTable,
        first: int,
        last: int,
        min_offset: int,
        max_offset: int,
        file: str | None,
        base_position: int,
    ) -> DecodedColumns:
        live = table[first:last, SKIP] == 0
        count = int(table[first:last, COUNT][live].sum())
        payload = int(table[first:last, PAYLOAD_SIZE][live].sum())
        if payload > INT32_MAX:
            raise DecompressionLimit(f"{payload} bytes of records in one step; columns hold at most 2 GiB", file=file)
        block = np.zeros(slots.D_SLOTS, dtype=np.int64)
        block[slots.D_MIN_OFFSET] = min_offset
        block[slots.D_MAX_OFFSET] = max_offset
        offsets = np.empty(count, dtype=np.int64)
        timestamps = np.empty(count, dtype=np.int64)
        types = np.empty(count, dtype=np.uint8)
        block[slots.D_OFFSETS] = address_of(offsets)
        block[slots.D_TIMESTAMPS] = address_of(timestamps)
        block[slots.D_TIMESTAMP_TYPES] = address_of(types)
        keys = _Output(count, payload, block, slots.D_KEY_OFFSETS, slots.D_KEY_DATA, slots.D_KEY_VALID)
        values = _Output(count, payload, block, slots.D_VALUE_OFFSETS, slots.D_VALUE_DATA, slots.D_VALUE_VALID)
        block[slots.D_HEADER_CAPACITY] = -1
        if self._headers:
            # A header takes two bytes at least; memory that is never written is never given to us by the system.
            capacity = payload // 2
            block[slots.D_HEADER_CAPACITY] = capacity
            list_offsets = np.empty(count + 1, dtype=np.int32)
            list_offsets[0] = 0
            block[slots.D_HEADER_OFFSETS] = address_of(list_offsets)
            header_keys = _Output(capacity, payload, block, slots.D_HEADER_KEY_OFFSETS, slots.D_HEADER_KEY_DATA, None)
            header_values = _Output(
                capacity,
                payload,
                block,
                slots.D_HEADER_VALUE_OFFSETS,
                slots.D_HEADER_VALUE_DATA,
                slots.D_HEADER_VALUE_VALID,
            )
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
        if self._headers and header_count:
            headers = DecodedHeaders(
                list_offsets[: n + 1],
                header_keys.taken(header_count, 0),
                header_values.taken(header_count, int(block[slots.D_HEADER_VALUE_NULLS])),
            )
        return DecodedColumns(
            offsets[:n],
            timestamps[:n],
            types[:n],
            keys.taken(n, int(block[slots.D_KEY_NULLS])),
            values.taken(n, int(block[slots.D_VALUE_NULLS])),
            headers,
        )


class _Output:
    """Room for `count` byte strings of at most `data_bytes` together, its addresses put into the kernel's block."""

    def __init__(
        self,
        count: int,
        data_bytes: int,
        block: npt.NDArray[np.int64],
        offsets_slot: int,
        data_slot: int,
        valid_slot: int | None,
    ) -> None:
        self._offsets = np.empty(count + 1, dtype=np.int32)
        self._offsets[0] = 0
        self._data = np.empty(max(data_bytes, 1), dtype=np.uint8)
        self._valid = np.empty(count if valid_slot is not None else 0, dtype=np.uint8)
        block[offsets_slot] = address_of(self._offsets)
        block[data_slot] = address_of(self._data)
        if valid_slot is not None:
            block[valid_slot] = address_of(self._valid)

    def taken(self, n: int, null_count: int) -> DecodedBytes:
        return DecodedBytes(self._offsets[: n + 1], self._data[: int(self._offsets[n])], self._valid[:n], null_count)


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


def _locate(error: DuramenError, file: str | None, position: int, offset: int) -> None:
    """Tell the error the place it happened, where it did not know."""
    error.file = error.file or file
    error.position = position
    error.offset = offset if error.offset is None else error.offset
