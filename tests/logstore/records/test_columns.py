"""Columns of plain records, and parts of columns that were read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logstore.records.columns import DecodedColumns, bytes_column, columns_of
from logstore.records.decoder import Decoder
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.native import address_of
from logstore.records.record import Record
from logstore.records.scan import scan_batches

strings = st.none() | st.sampled_from([b"", b"a", b"ab", b"aba"])
records = st.builds(
    Record,
    key=strings,
    value=strings,
    timestamp_ms=st.integers(-1, 1 << 50),
    headers=st.lists(st.tuples(st.sampled_from(["", "h", "ü"]), strings), max_size=3).map(tuple),
)


def decoded(given_records: list[Record]) -> tuple[DecodedColumns, list[Record]]:
    data = np.frombuffer(encode_batch(columns_of(given_records), BatchOptions()), np.uint8)
    (columns,) = Decoder().columns(data, scan_batches(data).table)
    return columns, list(columns.records())


@given(st.lists(records, min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_a_slice_of_columns_is_a_slice_of_their_records(rows: list[Record], first: int, last: int) -> None:
    columns, whole = decoded(rows)
    first = min(first, len(rows))
    last = min(max(first, last), len(rows))
    part = columns.slice(first, last)
    assert len(part) == last - first
    assert list(part.records()) == whole[first:last]


@given(st.lists(records, min_size=1, max_size=12), st.sampled_from([b"", b"a", b"ab", b"aba", b"b"]))
def test_records_of_one_key_and_no_null_key_for_an_empty_one(rows: list[Record], key: bytes) -> None:
    columns, whole = decoded(rows)
    assert list(columns.having_key(key)) == [record for record in whole if record.key == key]


@given(st.lists(strings, max_size=20))
def test_byte_strings_as_a_column(values: list[bytes | None]) -> None:
    column = bytes_column(values)
    data, bits = column.keepalive  # type: ignore[misc]
    assert column.data_address == address_of(data)
    assert data[:-1].tobytes() == b"".join(value or b"" for value in values)
    ends = column.offsets.tolist()
    assert [b - a for a, b in pairwise(ends)] == [len(value or b"") for value in values]
    valid = np.unpackbits(bits, bitorder="little")[: len(values)].tolist()
    assert valid == [int(value is not None) for value in values]
