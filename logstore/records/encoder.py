"""Columns to v2 record batches.

An `Encoder` owns its buffers and reuses them: what it yields is valid until the next step. Batches are cut by size
exactly as asked, whatever the buffers' sizes; offsets start at 0 in every batch set unless asked otherwise, since a
log assigns them anyway.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.errors import InvalidRecord, RecordTooLarge
from logstore.limits import INT32_MAX
from logstore.records import slots
from logstore.records.codes import FULL
from logstore.records.columns import BytesColumn, Columns
from logstore.records.compression import CODECS
from logstore.records.memory import Memory
from logstore.records.native import address_of, kernels
from logstore.records.record import NO_TIMESTAMP
from logstore.records.table import (
    CONTROL_BIT,
    COUNT,
    CRC,
    DELETE_HORIZON_BIT,
    HEADER_BYTES,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    POSITION,
    SIZE,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchTable,
    new_table,
)

BATCH_BYTES = 16384  # Kafka's batch.size
_RECORD_OVERHEAD_MAX = 5 + 1 + 10 + 5 + 5 + 5 + 5  # length, attributes, two deltas, three lengths or counts
_BUFFER_BYTES = 1 << 20  # small enough to be written out while it is still in the processor's cache


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What goes into the headers, and where batches end."""

    codec_id: int = 0
    level: int | None = None
    batch_bytes: int = BATCH_BYTES
    batch_records: int = INT32_MAX
    #: no batch may be larger before compression: a reader could not hold it
    batch_bytes_max: int = INT32_MAX
    default_timestamp_ms: int = NO_TIMESTAMP
    log_append_time: bool = False
    transactional: bool = False
    control: bool = False
    delete_horizon_ms: int | None = None
    leader_epoch: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    base_offset: int = 0

    @property
    def attributes(self) -> int:
        return (
            self.codec_id
            | (TIMESTAMP_TYPE_BIT if self.log_append_time else 0)
            | (TRANSACTIONAL_BIT if self.transactional else 0)
            | (CONTROL_BIT if self.control else 0)
            | (DELETE_HORIZON_BIT if self.delete_horizon_ms is not None else 0)
        )


@dataclass(frozen=True, slots=True)
class EncodedBatches:
    """Finished batches side by side in `data`, described by `table`. Valid until the encoder's next step."""

    data: npt.NDArray[np.uint8]
    table: BatchTable


class Encoder:
    def __init__(
        self,
        options: BatchOptions = BatchOptions(),  # noqa: B008 (frozen)
        *,
        buffer_bytes: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Buffers come from `memory`, where there is one."""
        self._options = options
        self._codec = CODECS[options.codec_id]
        if buffer_bytes is None:
            buffer_bytes = max(_BUFFER_BYTES, 4 * min(options.batch_bytes, 1 << 26))
        self._memory = Memory(blocks=0) if memory is None else memory
        self._buffer = self._memory.block(buffer_bytes)
        self._packed = np.empty(0, dtype=np.uint8)
        self._table = new_table(max(64, len(self._buffer) // 512))
        self._next_offset = options.base_offset
        self._next_sequence = options.base_sequence

    @property
    def compresses(self) -> bool:
        return self._options.codec_id != 0

    def encode(
        self,
        columns: Columns,
        selection: npt.NDArray[np.int64] | None = None,
        room: Callable[[int], npt.NDArray[np.uint8]] | None = None,
        *,
        checked: bool = False,
    ) -> Iterator[EncodedBatches]:
        """All rows (or those of `selection`, in its order) as batches, a buffer at a time.

        A caller with many selections of the same rows calls `check_columns` once and passes `checked`.

        Uncompressed batches are put where `room` says, which is asked for at least so many bytes before each step.

        Raises InvalidRecord for a timestamp below -1 or an offset delta no batch can hold, RecordTooLarge for a record
        no batch can hold.
        """
        count = columns.count if selection is None else len(selection)
        if count:
            if not checked:
                check_columns(columns)
            _check_selection(columns, selection)
        block = self._block(columns, selection, count)
        address = address_of(block)
        encode = kernels().encode
        if self.compresses:
            room = None
        least = 0
        while (first_row := int(block[slots.E_ROW])) < count:
            out = self._buffer if room is None else room(least)
            block[slots.E_OUT] = address_of(out)
            block[slots.E_OUT_CAPACITY] = len(out)
            block[slots.E_TABLE] = address_of(self._table)
            block[slots.E_TABLE_CAPACITY] = len(self._table)
            code = encode(address)
            made = int(block[slots.E_TABLE_N])
            if made == 0 and code == FULL:
                least = _doubled(len(out))
                if room is None:
                    self._buffer = np.empty(least, dtype=np.uint8)
                continue
            least = 0
            size = int(block[slots.E_OUT_SIZE])
            table = self._table[:made]
            self._check_sizes(table, first_row, selection)
            yield self._compress(table) if self.compresses else EncodedBatches(out[:size], table)
        self._next_offset = int(block[slots.E_BASE_OFFSET])
        self._next_sequence = int(block[slots.E_BASE_SEQUENCE])

    def _check_sizes(self, table: BatchTable, first_row: int, selection: npt.NDArray[np.int64] | None) -> None:
        limit = self._options.batch_bytes_max
        if len(table) and int(table[:, SIZE].max()) > limit:
            number = int(np.argmax(table[:, SIZE]))
            row = first_row + int(table[:number, COUNT].sum())
            row = row if selection is None else int(selection[row])
            raise RecordTooLarge(
                f"row {row} needs a batch of "
                f"{int(table[number, SIZE])} bytes before compression; the largest that can be read is {limit}",
                row=row,
                hint="Send smaller records",
            )

    def _compress(self, table: BatchTable) -> EncodedBatches:
        """Same batches with compressed payloads, packed side by side."""
        compress, level = self._codec.compress, self._options.level
        finish = kernels().finish_batch
        batches = self._buffer.data
        self._make_room(0, len(self._buffer))
        packed, address = self._packed.data, address_of(self._packed)
        done = []
        at = 0
        for position, size in table[:, (POSITION, SIZE)].tolist():
            begin = position + HEADER_BYTES
            payload = compress(batches[begin : position + size], level)
            size = HEADER_BYTES + len(payload)
            if at + size > len(packed):
                self._make_room(at, at + size)
                packed, address = self._packed.data, address_of(self._packed)
            packed[at : at + HEADER_BYTES] = batches[position:begin]
            packed[at + HEADER_BYTES : at + size] = payload
            done.append((at, size, finish(address + at, size), 0, 0))
            at += size
        table[:, (POSITION, SIZE, CRC, PAYLOAD_ADDRESS, PAYLOAD_SIZE)] = done
        return EncodedBatches(self._packed[:at], table)

    def _make_room(self, used: int, size: int) -> None:
        """Make room for `size` bytes of packed batches, keeping the first `used`."""
        if len(self._packed) < size:
            larger = self._memory.block(max(size, 2 * used))
            larger[:used] = self._packed[:used]
            self._packed = larger

    def _block(self, columns: Columns, selection: npt.NDArray[np.int64] | None, count: int) -> npt.NDArray[np.int64]:
        block = np.zeros(slots.E_SLOTS, dtype=np.int64)
        options = self._options
        block[slots.E_ROWS] = count
        if selection is not None and count:
            block[slots.E_SELECTION] = address_of(selection)
        _put_bytes(block, columns.keys, slots.E_KEY_OFFSETS)
        _put_bytes(block, columns.values, slots.E_VALUE_OFFSETS)
        if columns.timestamps_ms is not None and len(columns.timestamps_ms):
            block[slots.E_TIMESTAMPS] = address_of(columns.timestamps_ms)
            block[slots.E_TIMESTAMP_VALID] = columns.timestamps_valid_address
            block[slots.E_TIMESTAMP_VALID_AT] = columns.timestamps_valid_bit
        if columns.offset_deltas is not None and len(columns.offset_deltas):
            block[slots.E_OFFSET_DELTAS] = address_of(columns.offset_deltas)
        if columns.headers is not None:
            headers = columns.headers
            block[slots.E_HEADER_LIST] = address_of(headers.list_offsets)
            block[slots.E_HEADER_LIST_VALID] = headers.valid_address
            block[slots.E_HEADER_LIST_VALID_AT] = headers.valid_bit
            block[slots.E_HEADER_KEY_OFFSETS] = address_of(headers.keys.offsets)
            block[slots.E_HEADER_KEY_DATA] = headers.keys.data_address
            block[slots.E_HEADER_VALUE_OFFSETS] = address_of(headers.values.offsets)
            block[slots.E_HEADER_VALUE_DATA] = headers.values.data_address
            block[slots.E_HEADER_VALUE_VALID] = headers.values.valid_address
            block[slots.E_HEADER_VALUE_VALID_AT] = headers.values.valid_bit
        block[slots.E_DEFAULT_TIMESTAMP] = options.default_timestamp_ms
        block[slots.E_BATCH_BYTES] = options.batch_bytes
        block[slots.E_BATCH_RECORDS] = options.batch_records
        block[slots.E_ATTRIBUTES] = options.attributes
        block[slots.E_EPOCH] = options.leader_epoch
        block[slots.E_PRODUCER_ID] = options.producer_id
        block[slots.E_PRODUCER_EPOCH] = options.producer_epoch
        block[slots.E_BASE_SEQUENCE] = self._next_sequence
        block[slots.E_BASE_OFFSET] = self._next_offset
        block[slots.E_DELETE_HORIZON] = options.delete_horizon_ms or 0
        return block


def _doubled(size: int) -> int:
    if size >= INT32_MAX:
        raise RecordTooLarge("a single record, or a batch that must not be cut, needs more than 2 GiB")
    return min(2 * size, INT32_MAX)


def _put_bytes(block: npt.NDArray[np.int64], column: BytesColumn, first_slot: int) -> None:
    # offsets, data, validity, first bit: four slots in this order for keys and values alike
    block[first_slot] = address_of(column.offsets)
    block[first_slot + 1] = column.data_address
    block[first_slot + 2] = column.valid_address
    block[first_slot + 3] = column.valid_bit


def check_columns(columns: Columns) -> None:
    """Raises InvalidRecord for a timestamp below -1 or an offset delta no batch can hold."""
    if columns.count:
        _check_timestamps(columns)
        _check_offset_deltas(columns)


def _check_timestamps(columns: Columns) -> None:
    times = columns.timestamps_ms
    if times is None or int(times.min()) >= NO_TIMESTAMP:
        return
    if columns.timestamps_valid_address:  # the bytes of a null may be anything
        first = columns.timestamps_valid_bit
        size = (first + len(times) + 7) // 8
        bitmap = np.frombuffer(ctypes.string_at(columns.timestamps_valid_address, size), dtype=np.uint8)
        valid = np.unpackbits(bitmap, bitorder="little")[first : first + len(times)] == 1
        times = np.where(valid, times, NO_TIMESTAMP)
    row = int(np.argmin(times))
    if int(times[row]) < NO_TIMESTAMP:
        raise InvalidRecord(
            f"row {row} has the timestamp {times[row]}; the smallest legal one is {NO_TIMESTAMP}", row=row
        )


def _check_offset_deltas(columns: Columns) -> None:
    deltas = columns.offset_deltas
    if deltas is not None and (int(deltas.min()) < 0 or int(deltas.max()) > INT32_MAX):
        raise InvalidRecord(f"offsets lie {deltas.min()} to {deltas.max()} from the base; a batch spans 2^31 at most")


def _check_selection(columns: Columns, selection: npt.NDArray[np.int64] | None) -> None:
    if selection is not None and (int(selection.min()) < 0 or int(selection.max()) >= columns.count):
        raise IndexError(f"rows {selection.min()} to {selection.max()} were selected, of {columns.count}")


def encode_batch(columns: Columns, options: BatchOptions) -> bytes:
    """All rows as exactly one batch; raises RecordTooLarge when they do not fit one."""
    whole = BatchOptions(
        **{name: getattr(options, name) for name in options.__slots__ if name not in ("batch_bytes", "batch_records")},
        batch_bytes=INT32_MAX,
    )
    encoder = Encoder(whole, buffer_bytes=min(_encoded_bytes_max(columns), INT32_MAX))
    encoded = [chunk.data.tobytes() for chunk in encoder.encode(columns)]
    if len(encoded) != 1:
        raise RecordTooLarge("the records do not fit one batch")
    return encoded[0]


def _encoded_bytes_max(columns: Columns) -> int:
    """What one batch of all rows takes at most: all bytes there are, and every varint at its longest."""
    n = columns.count
    data = int(columns.keys.offsets[n] - columns.keys.offsets[0]) + int(
        columns.values.offsets[n] - columns.values.offsets[0]
    )
    size = HEADER_BYTES + data + n * _RECORD_OVERHEAD_MAX
    if columns.headers is not None:
        first, last = int(columns.headers.list_offsets[0]), int(columns.headers.list_offsets[n])
        for column in (columns.headers.keys, columns.headers.values):
            size += int(column.offsets[last] - column.offsets[first]) + 5 * (last - first)
    return size
