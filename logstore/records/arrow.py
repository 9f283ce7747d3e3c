"""Arrow columns in and out.

In: `key` and `value` (binary or string in any of their forms, dictionaries of them, or all null), `timestamp` (integer
milliseconds or an Arrow timestamp), `headers` (list of struct of key and value, or a map). Out: the same with `offset`
and `timestamp_type`; binary columns with int32 offsets, because Spark takes no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from logstore.errors import InvalidRecord
from logstore.records.columns import BytesColumn, Columns, DecodedBytes, DecodedColumns, HeadersColumn
from logstore.records.memory import Memory

HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())]))
RECORD_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("timestamp_type", pa.int8(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
_ROWS_AT_ONCE = 1 << 16
_NO_HEADERS = pa.array([], HEADERS_TYPE.value_type)
_NO_OFFSETS = pa.py_buffer(bytes(4 * _ROWS_AT_ONCE))  # of up to so many empty lists, less one


def columns_of_batch(batch: pa.RecordBatch, memory: Memory | None = None) -> Columns:
    memory = Memory(blocks=0) if memory is None else memory
    count = batch.num_rows
    names = batch.schema.names
    keys = batch.column("key") if "key" in names else pa.nulls(count, pa.binary())
    timestamps = None
    valid_address, valid_bit, keep = 0, 0, None
    if "timestamp" in names:
        column, timestamps = _milliseconds(batch.column("timestamp"))
        valid_address, valid_bit = _validity(column)
        keep = column
    headers = None
    if "headers" in names and not pa.types.is_null(batch.column("headers").type):
        headers = _headers(batch.column("headers"), memory)
    return Columns(
        count,
        _bytes(keys, "key", memory),
        _bytes(batch.column("value"), "value", memory),
        timestamps,
        valid_address,
        valid_bit,
        headers,
        None,
        (batch, keep),
    )


def _milliseconds(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """The times, and the array that owns them and says which are null."""
    kind = column.type
    per_ms = 1
    if pa.types.is_timestamp(kind):
        # Spark's timestamps are microseconds; anything finer than a millisecond is cut towards the past, as Spark's own
        # Kafka sink cuts it.
        per_ms = {"us": 1000, "ns": 1_000_000}.get(kind.unit, 1)
        if kind.unit == "s":
            column = _cast(column, pa.timestamp("ms"), "timestamp")
    elif pa.types.is_integer(kind) or pa.types.is_null(kind):
        column = _cast(column, pa.int64(), "timestamp")
    else:
        raise InvalidRecord(f"column 'timestamp' is {kind}; expected int64 milliseconds or a timestamp")
    values = np.frombuffer(column.buffers()[1], dtype=np.int64, count=len(column), offset=column.offset * 8)
    return column, values if per_ms == 1 else values // per_ms


def _cast(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidRecord(f"column {name!r} is {column.type} and cannot be taken as {kind}: {error}") from None


def _bytes(column: pa.Array, name: str, memory: Memory) -> BytesColumn:
    kind = column.type
    wide = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    if pa.types.is_null(kind):
        column, wide = pa.nulls(len(column), pa.binary()), False
    elif not (wide or pa.types.is_binary(kind) or pa.types.is_string(kind)):
        if not (
            pa.types.is_fixed_size_binary(kind)
            or pa.types.is_dictionary(kind)
            or kind in (pa.binary_view(), pa.string_view())
        ):
            raise InvalidRecord(f"column {name!r} is {kind}; expected binary or string")
        column, wide = _cast(column, pa.large_binary(), name), True
    _, offsets_buffer, data = column.buffers()
    if offsets_buffer is None or offsets_buffer.size == 0:
        offsets = np.zeros(len(column) + 1, dtype=np.int64)
    else:
        offsets = _offsets(offsets_buffer, column.offset, len(column), wide, memory)
    valid_address, valid_bit = _validity(column)
    return BytesColumn(offsets, data.address if data is not None else 0, valid_address, valid_bit, (column, offsets))


def _offsets(buffer: pa.Buffer, start: int, count: int, wide: bool, memory: Memory) -> npt.NDArray[np.int64]:
    dtype = np.dtype(np.int64 if wide else np.int32)
    entries = np.frombuffer(buffer, dtype=dtype, count=count + 1, offset=start * dtype.itemsize)
    if wide:
        return entries
    offsets = memory.array(count + 1)
    offsets[:] = entries
    return offsets


def _validity(column: pa.Array) -> tuple[int, int]:
    buffer = column.buffers()[0]
    if buffer is None or column.null_count == 0:
        return 0, 0
    return buffer.address, column.offset


def _headers(column: pa.Array, memory: Memory) -> HeadersColumn:
    kind = column.type
    if pa.types.is_map(kind):
        column = _cast(column, pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])), "headers")
        kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        raise InvalidRecord(f"column 'headers' is {kind}; expected a list of structs of key and value")
    fields = [kind.value_type.field(i).name for i in range(kind.value_type.num_fields)]
    if fields != ["key", "value"]:
        raise InvalidRecord(f"column 'headers': a header is a struct of key and value, not of {', '.join(fields)}")
    offsets = _offsets(column.buffers()[1], column.offset, len(column), pa.types.is_large_list(kind), memory)
    first, last = int(offsets[0]), int(offsets[-1])
    entries = column.values.slice(first, last - first)  # a slice of rows must not look at, or convert, those of others
    keys = entries.field("key")
    if keys.null_count or entries.null_count:
        raise InvalidRecord("column 'headers': a header without a key")
    valid_address, valid_bit = _validity(column)
    return HeadersColumn(
        offsets - first,
        _bytes(keys, "headers.key", memory),
        _bytes(entries.field("value"), "headers.value", memory),
        valid_address,
        valid_bit,
        column,
    )


def to_arrow(columns: DecodedColumns) -> pa.RecordBatch:
    """Decoded columns as an Arrow batch of RECORD_SCHEMA, without copying keys or values."""
    count = len(columns)
    arrays = [
        _fixed(columns.offsets, pa.int64()),
        _fixed(columns.timestamps_ms, pa.int64()),
        _fixed(columns.timestamp_types, pa.int8()),
        _binary(columns.keys),
        _binary(columns.values),
        _arrow_headers(columns, count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)


def _fixed(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _binary(column: DecodedBytes, kind: pa.DataType | None = None) -> pa.Array:
    valid = None
    if column.null_count:
        valid = pa.py_buffer(np.packbits(column.valid, bitorder="little"))
    buffers = [valid, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind or pa.binary(), len(column.offsets) - 1, buffers, column.null_count)


def _arrow_headers(columns: DecodedColumns, count: int) -> pa.Array:
    if columns.headers is None:
        offsets = _NO_OFFSETS if count < _ROWS_AT_ONCE else pa.py_buffer(bytes(4 * (count + 1)))
        return pa.Array.from_buffers(HEADERS_TYPE, count, [None, offsets], children=[_NO_HEADERS], null_count=0)
    headers = columns.headers
    keys = _binary(headers.keys, pa.string())
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:  # not UTF-8: shown as Kafka's clients show it
        keys = pa.array([(key or b"").decode("utf-8", "replace") for key in headers.keys.tolist()], pa.string())
    entries = pa.StructArray.from_arrays(
        [keys, _binary(headers.values)], fields=[HEADERS_TYPE.value_type.field(0), HEADERS_TYPE.value_type.field(1)]
    )
    return pa.ListArray.from_arrays(pa.array(headers.list_offsets), entries, type=HEADERS_TYPE)
