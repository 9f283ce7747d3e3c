"""Plain values laid out in memory as the kernels take them: Arrow's offsets, data and validity bits, and the blocks.

Every array is made by `place`, which is `guarded.at_end` or `guarded.at_start`; `keep` holds what a block points at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import twins
from guarded import Place

from logstore.records import slots, table
from logstore.records.native import address_of

Int64s = npt.NDArray[np.int64]


def bitmap(flags: Sequence[bool], shift: int) -> bytes:
    """One bit a row, the first at bit `shift`; the bits around them are noise."""
    bits = [True] * shift + list(flags)
    bits += [True] * (-len(bits) % 8)
    return np.packbits(np.array(bits, bool), bitorder="little").tobytes()


class ByteStrings:
    """Offsets, data and validity of byte strings. What stands behind a null is `hidden`, data that must not be seen."""

    def __init__(
        self, values: Sequence[bytes | None], place: Place, *, shift: int = 0, prefix: bytes = b"", hidden: bytes = b""
    ) -> None:
        data = prefix + b"".join(hidden if value is None else value for value in values)
        ends = np.cumsum([len(prefix), *(len(hidden if value is None else value) for value in values)], dtype=np.int64)
        self.offsets = place(ends, np.int64)
        self.data = place(data)
        self.valid = None
        if any(value is None for value in values):
            self.valid = place(bitmap([value is not None for value in values], shift))
        self.shift = shift if self.valid is not None else 0

    def put(self, block: Int64s, offsets: int, data: int, valid: int | None, valid_at: int | None) -> None:
        block[offsets] = address_of(self.offsets)
        block[data] = address_of(self.data)
        if valid is not None and valid_at is not None and self.valid is not None:
            block[valid] = address_of(self.valid)
            block[valid_at] = self.shift


def encode_block(given: twins.Rows, place: Place, *, shift: int, prefix: bytes, hidden: bytes) -> tuple[Int64s, Any]:
    """(block, what it points at); the output and the table are the two last of these."""
    block = place(np.zeros(slots.E_SLOTS, np.int64), np.int64)
    layout = {"shift": shift, "prefix": prefix, "hidden": hidden}
    keys = ByteStrings(given.keys, place, **layout)
    values = ByteStrings(given.values, place, **layout)
    keys.put(block, slots.E_KEY_OFFSETS, slots.E_KEY_DATA, slots.E_KEY_VALID, slots.E_KEY_VALID_AT)
    values.put(block, slots.E_VALUE_OFFSETS, slots.E_VALUE_DATA, slots.E_VALUE_VALID, slots.E_VALUE_VALID_AT)
    keep: list[Any] = [keys, values]
    if given.timestamps is not None:
        times = place(np.array([-(1 << 63) if t is None else t for t in given.timestamps], np.int64), np.int64)
        block[slots.E_TIMESTAMPS] = address_of(times)
        keep.append(times)
        if None in given.timestamps:
            valid = place(bitmap([t is not None for t in given.timestamps], shift))
            block[slots.E_TIMESTAMP_VALID] = address_of(valid)
            block[slots.E_TIMESTAMP_VALID_AT] = shift
            keep.append(valid)
    if given.headers is not None:
        # A null list hides one entry, which must not be written.
        shown = [[(b"hidden", b"hidden")] if entry is None else entry for entry in given.headers]
        flat = [header for entry in shown for header in entry]
        ends = place(np.cumsum([0, *map(len, shown)], dtype=np.int64), np.int64)
        valid = place(bitmap([entry is not None for entry in given.headers], shift))
        names = ByteStrings([name for name, _ in flat], place, prefix=prefix)
        contents = ByteStrings([content for _, content in flat], place, **layout)
        block[slots.E_HEADER_LIST] = address_of(ends)
        block[slots.E_HEADER_LIST_VALID] = address_of(valid)
        block[slots.E_HEADER_LIST_VALID_AT] = shift
        names.put(block, slots.E_HEADER_KEY_OFFSETS, slots.E_HEADER_KEY_DATA, None, None)
        contents.put(
            block,
            slots.E_HEADER_VALUE_OFFSETS,
            slots.E_HEADER_VALUE_DATA,
            slots.E_HEADER_VALUE_VALID,
            slots.E_HEADER_VALUE_VALID_AT,
        )
        keep += [ends, valid, names, contents]
    for slot, numbers in ((slots.E_OFFSET_DELTAS, given.offset_deltas), (slots.E_SELECTION, given.selection)):
        if numbers is not None:
            array = place(np.array(numbers, np.int64), np.int64)
            block[slot] = address_of(array)
            keep.append(array)
    out = place(given.out_capacity)
    rows = place(given.table_capacity * table.ROW_BYTES, np.int64).reshape(-1, table.COLUMNS)
    block[slots.E_ROW] = given.start
    block[slots.E_ROWS] = len(given.keys) if given.selection is None else len(given.selection)
    block[slots.E_DEFAULT_TIMESTAMP] = given.default_timestamp
    block[slots.E_BATCH_BYTES] = given.batch_bytes
    block[slots.E_BATCH_RECORDS] = given.batch_records
    block[slots.E_OUT] = address_of(out)
    block[slots.E_OUT_CAPACITY] = given.out_capacity
    block[slots.E_TABLE] = address_of(rows)
    block[slots.E_TABLE_CAPACITY] = given.table_capacity
    block[slots.E_ATTRIBUTES] = given.attributes
    block[slots.E_EPOCH] = given.leader_epoch
    block[slots.E_PRODUCER_ID] = given.producer_id
    block[slots.E_PRODUCER_EPOCH] = given.producer_epoch
    block[slots.E_BASE_SEQUENCE] = given.base_sequence
    block[slots.E_BASE_OFFSET] = given.base_offset
    block[slots.E_DELETE_HORIZON] = given.delete_horizon
    return block, [*keep, out, rows]


def batch_table(rows: Sequence[twins.Row], place: Place, addresses: Sequence[int] = ()) -> Int64s:
    """The rows in memory; with `addresses`, their payloads lie there."""
    array = np.array(rows, np.int64).reshape(-1, table.COLUMNS)
    if addresses:
        array[:, table.PAYLOAD_ADDRESS] = addresses
    return place(array, np.int64).reshape(-1, table.COLUMNS)


class Outputs:
    """What decode writes into, each array with exactly the room that is promised to be enough."""

    def __init__(self, records: int, payload_bytes: int, header_capacity: int, place: Place, block: Int64s) -> None:
        self.kept_headers = header_capacity >= 0
        headers = max(header_capacity, 0)
        room: list[tuple[str, int, int, npt.DTypeLike]] = [
            ("offsets", slots.D_OFFSETS, records * 8, np.int64),
            ("timestamps", slots.D_TIMESTAMPS, records * 8, np.int64),
            ("timestamp_types", slots.D_TIMESTAMP_TYPES, records, np.uint8),
            ("key_offsets", slots.D_KEY_OFFSETS, records * 4 + 4, np.int32),
            ("key_data", slots.D_KEY_DATA, payload_bytes, np.uint8),
            ("key_valid", slots.D_KEY_VALID, records, np.uint8),
            ("value_offsets", slots.D_VALUE_OFFSETS, records * 4 + 4, np.int32),
            ("value_data", slots.D_VALUE_DATA, payload_bytes, np.uint8),
            ("value_valid", slots.D_VALUE_VALID, records, np.uint8),
        ]
        if self.kept_headers:
            room += [
                ("header_offsets", slots.D_HEADER_OFFSETS, records * 4 + 4, np.int32),
                ("header_key_offsets", slots.D_HEADER_KEY_OFFSETS, headers * 4 + 4, np.int32),
                ("header_key_data", slots.D_HEADER_KEY_DATA, payload_bytes, np.uint8),
                ("header_value_offsets", slots.D_HEADER_VALUE_OFFSETS, headers * 4 + 4, np.int32),
                ("header_value_data", slots.D_HEADER_VALUE_DATA, payload_bytes, np.uint8),
                ("header_value_valid", slots.D_HEADER_VALUE_VALID, headers, np.uint8),
            ]
        self.arrays = {}
        for name, slot, size, dtype in room:
            self.arrays[name] = place(size, dtype)
            block[slot] = address_of(self.arrays[name])
        block[slots.D_HEADER_CAPACITY] = header_capacity

    def strings(self, name: str, n: int) -> list[bytes | None]:
        data = self.arrays[f"{name}_data"].tobytes()
        ends = self.arrays[f"{name}_offsets"][: n + 1].tolist()
        valid = self.arrays[f"{name}_valid"] if f"{name}_valid" in self.arrays else [1] * n
        assert ends[0] == 0
        assert all(valid[i] in (0, 1) for i in range(n))
        return [data[ends[i] : ends[i + 1]] if valid[i] else None for i in range(n)]

    def headers(self, n: int) -> list[list[tuple[bytes | None, bytes | None]]]:
        ends = self.arrays["header_offsets"][: n + 1].tolist()
        names = self.strings("header_key", ends[-1])
        contents = self.strings("header_value", ends[-1])
        entries = list(zip(names, contents, strict=True))
        return [entries[ends[i] : ends[i + 1]] for i in range(n)]
