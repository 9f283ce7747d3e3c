"""Arrow columns in and out.

In: `key` and `value` (binary, string or their large and view forms), `timestamp` (int64 milliseconds or an Arrow
timestamp), `headers` (list of struct of key and value). Out: the same with `offset` and `timestamp_type`; binary
columns with int32 offsets, because Spark takes no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from logstore.errors import InvalidRecord
from logstore.records.columns import BytesColumn, Columns, DecodedBytes, DecodedColumns, HeadersColumn

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


def columns_from_arrow(table: pa.Table | pa.RecordBatch) -> Iterator[Columns]:
    """Slices of at most 65,536 rows, so that nothing is converted for the whole table at once. Raises InvalidRecord."""
    known = ("key", "value", "timestamp", "headers")
    for name in table.schema.names:
        if name not in known:
            raise InvalidRecord(f"column {name!r} is none of {', '.join(known)}")
    if "value" not in table.schema.names:
        raise InvalidRecord("there is no column 'value'")
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield _columns(batch.slice(start, _ROWS_AT_ONCE))


def _columns(batch: pa.RecordBatch) -> Columns:
    count = batch.num_rows
    names = batch.schema.names
    keys = _bytes(batch.column("key"), "key") if "key" in names else _bytes(pa.nulls(count, pa.binary()), "key")
    timestamps = None
    valid_address, valid_bit, keep = 0, 0, None
    if "timestamp" in names:
        column = _milliseconds(batch.column("timestamp"))
        _, data = column.buffers()
        timestamps = np.frombuffer(data, dtype=np.int64)[column.offset : column.offset + count]
        valid_address, valid_bit = _validity(column)
        keep = column
    headers = _headers(batch.column("headers")) if "headers" in names else None
    return Columns(
        count,
        keys,
        _bytes(batch.column("value"), "value"),
        timestamps,
        valid_address,
        valid_bit,
        headers,
        None,
        (batch, keep),
    )


def _milliseconds(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind):
        # Spark's timestamps are microseconds; anything finer than a millisecond is cut, as Spark's own Kafka sink
        # cuts it.
        return column.cast(pa.timestamp("ms", tz=kind.tz), safe=False).cast(pa.int64())
    if not pa.types.is_integer(kind):
        raise InvalidRecord(f"column 'timestamp' is {kind}; expected int64 milliseconds or a timestamp")
    return column.cast(pa.int64())


def _bytes(column: pa.Array, name: str) -> BytesColumn:
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
        column, wide = column.cast(pa.large_binary()), True
    _, offsets_buffer, data = column.buffers()
    dtype = np.int64 if wide else np.int32
    if offsets_buffer is None or offsets_buffer.size == 0:
        offsets = np.zeros(len(column) + 1, dtype=np.int64)
    else:
        narrow = np.frombuffer(offsets_buffer, dtype=dtype)[column.offset : column.offset + len(column) + 1]
        offsets = narrow.astype(np.int64, copy=False)
    valid_address, valid_bit = _validity(column)
    return BytesColumn(offsets, data.address if data is not None else 0, valid_address, valid_bit, (column, offsets))


def _validity(column: pa.Array) -> tuple[int, int]:
    buffer = column.buffers()[0]
    if buffer is None or column.null_count == 0:
        return 0, 0
    return buffer.address, column.offset


def _headers(column: pa.Array) -> HeadersColumn:
    kind = column.type
    if pa.types.is_map(kind):
        column = column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        raise InvalidRecord(f"column 'headers' is {kind}; expected a list of structs of key and value")
    fields = [kind.value_type.field(i).name for i in range(kind.value_type.num_fields)]
    if fields != ["key", "value"]:
        raise InvalidRecord(f"a header is a struct of key and value, not of {', '.join(fields)}")
    entries = column.values  # all of them: the list's offsets are absolute
    keys = entries.field("key")
    if keys.null_count or entries.null_count:
        raise InvalidRecord("a header without a key")
    start = column.offsets.offset
    dtype = np.int64 if pa.types.is_large_list(kind) else np.int32
    raw = np.frombuffer(column.offsets.buffers()[1], dtype=dtype)
    offsets = raw[start : start + len(column) + 1].astype(np.int64)
    valid_address, valid_bit = _validity(column)
    return HeadersColumn(
        offsets,
        _bytes(keys, "headers.key"),
        _bytes(entries.field("value"), "headers.value"),
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
        offsets = np.zeros(count + 1, dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array([], HEADERS_TYPE.value_type), type=HEADERS_TYPE)
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
