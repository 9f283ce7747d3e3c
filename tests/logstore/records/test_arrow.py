"""Arrow in and out: every type a column may have, slices and nulls everywhere, and errors that name the column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import wire
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import InvalidRecord
from logstore.records import arrow
from logstore.records.arrow import RECORD_SCHEMA, to_arrow
from logstore.records.decoder import Decoder
from logstore.records.encoder import BatchOptions, Encoder
from logstore.records.record import Record
from logstore.records.scan import scan_batches
from reference.arrow_columns import columns_from_arrow

T = 1_700_000_000_000
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


def written(table: pa.Table | pa.RecordBatch, **options: Any) -> bytes:
    encoder = Encoder(BatchOptions(**options))
    return b"".join(chunk.data.tobytes() for columns in columns_from_arrow(table) for chunk in encoder.encode(columns))


def read(data: bytes) -> pa.Table:
    array = np.frombuffer(data, np.uint8)
    scan = scan_batches(array)
    assert scan.next_position == len(data)
    batches = [to_arrow(columns) for columns in Decoder().columns(array, scan.table)]
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, RECORD_SCHEMA)


def round_trip(table: pa.Table | pa.RecordBatch, **options: Any) -> pa.Table:
    return read(written(table, **options))


def values_back(array: pa.Array) -> list[bytes | None]:
    return round_trip(pa.table({"value": array}))["value"].to_pylist()


# --- keys and values --------------------------------------------------------------------------------------------------

BYTES = [b"a", None, b"", b"long enough to live outside of a view", None, b"zz"]
TEXTS = [None if value is None else value.decode() for value in BYTES]
ARRAYS = {
    "binary": pa.array(BYTES, pa.binary()),
    "large_binary": pa.array(BYTES, pa.large_binary()),
    "binary_view": pa.array(BYTES, pa.binary_view()),
    "string": pa.array(TEXTS, pa.string()),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "string_view": pa.array(TEXTS, pa.string_view()),
    "dictionary of binary": pa.array(BYTES, pa.binary()).dictionary_encode(),
    "dictionary of string": pa.array(TEXTS, pa.string()).dictionary_encode(),
    "dictionary of large string": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_type_of_bytes_whole_and_sliced(name: str) -> None:
    array = ARRAYS[name]
    assert values_back(array) == BYTES
    for start in range(len(BYTES)):
        for end in range(start + 1, len(BYTES) + 1):
            assert values_back(array[start:end]) == BYTES[start:end], (start, end)


def test_fixed_size_binary_whole_and_sliced() -> None:
    values = [b"aaa", None, b"ccc", b"ddd", None]
    array = pa.array(values, pa.binary(3))
    assert values_back(array) == values
    assert values_back(array[1:4]) == values[1:4]


@pytest.mark.parametrize("array", [pa.nulls(3), pa.nulls(3, pa.binary()), pa.nulls(3, pa.large_string())])
def test_a_column_of_nulls(array: pa.Array) -> None:
    assert values_back(array) == [None] * 3


def test_without_a_key_column_all_keys_are_null() -> None:
    assert round_trip(pa.table({"value": [b"x", b"y"]}))["key"].to_pylist() == [None, None]


def test_a_dictionary_with_null_among_its_values() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], pa.int8()), pa.array([b"a", None]))
    assert values_back(array) == [b"a", None, None, b"a"]


def test_a_long_sliced_column_with_validity_bits_that_begin_inside_a_byte() -> None:
    values = [None if i % 3 == 0 else b"%d" % i for i in range(300)]
    array = pa.array(values)
    for start in range(20):
        assert values_back(array[start : start + 100]) == values[start : start + 100]


def test_what_stands_behind_a_null_is_not_written() -> None:
    offsets, data = pa.py_buffer(np.array([0, 3, 6], np.int32)), pa.py_buffer(b"foobar")
    array = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x02"), offsets, data], 1)
    stored = written(pa.table({"value": array}))
    assert b"foo" not in stored
    assert read(stored)["value"].to_pylist() == [None, b"bar"]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, 2]),
        pa.array([1.5, 2]),
        pa.array([True, False]),
        pa.array([[b"a"], [b"b"]]),
        pa.array([1, 2]).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays([2], pa.array(["a"])),
    ],
    ids=lambda array: str(array.type),
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_other_types_are_refused_by_the_columns_name(array: pa.Array, name: str) -> None:
    table = pa.table({"value": pa.array([b"a", b"b"])} | {name: array})
    with pytest.raises(InvalidRecord, match=f"column '{name}' is"):
        written(table)


# --- timestamps -------------------------------------------------------------------------------------------------------


def times_back(array: pa.Array) -> list[int]:
    table = pa.table({"value": pa.nulls(len(array), pa.binary()), "timestamp": array})
    return round_trip(table, default_timestamp_ms=7)["timestamp"].to_pylist()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([T, -1, None, 0], pa.int64()), [T, -1, 7, 0]),
        (pa.array([5, None, 2**31 - 1], pa.int32()), [5, 7, 2**31 - 1]),
        (pa.array([5, None, 2**32 - 1], pa.uint32()), [5, 7, 2**32 - 1]),
        (pa.array([T, None], pa.uint64()), [T, 7]),
        (pa.nulls(2), [7, 7]),
        (pa.array([1, None, 3], pa.timestamp("s")), [1000, 7, 3000]),
        (pa.array([T, None], pa.timestamp("ms")), [T, 7]),
        (pa.array([T * 1000 + 999, None, 1], pa.timestamp("us")), [T, 7, 0]),
        (pa.array([T * 1000 + 999, None], pa.timestamp("us", tz="UTC")), [T, 7]),
        (pa.array([T * 1000 + 999], pa.timestamp("us", tz="Europe/Berlin")), [T]),
        (pa.array([T * 10**6 + 999_999, None, -1], pa.timestamp("ns", tz="America/New_York")), [T, 7, -1]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_every_type_of_timestamp_whole_and_sliced(array: pa.Array, expected: list[int]) -> None:
    assert times_back(array) == expected
    assert times_back(array[1:]) == expected[1:]
    assert times_back(array[:-1]) == expected[:-1]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([0, -2]),
        pa.array([None, -2], pa.int32()),
        pa.array([-1], pa.timestamp("s")),
        # Cut towards the past: towards zero it would become -1, which means "no timestamp".
        pa.array([-1001], pa.timestamp("us")),
        pa.array([-(10**6) - 1], pa.timestamp("ns")),
    ],
)
def test_times_before_the_epoch_are_refused(array: pa.Array) -> None:
    with pytest.raises(InvalidRecord, match="timestamp"):
        times_back(array)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1.5]),
        pa.array(["now"]),
        pa.array([5], pa.date32()),
        pa.array([5], pa.duration("ms")),
        pa.array([1 << 63], pa.uint64()),
        pa.array([1 << 60]).cast(pa.timestamp("s")),
    ],
    ids=lambda array: str(array.type),
)
def test_what_is_no_time_is_refused_by_the_columns_name(array: pa.Array) -> None:
    with pytest.raises(InvalidRecord, match="column 'timestamp' is"):
        times_back(array)


def test_without_a_timestamp_column_the_default_is_taken() -> None:
    assert round_trip(pa.table({"value": [b"x"]}), default_timestamp_ms=5)["timestamp"].to_pylist() == [5]


# --- headers ----------------------------------------------------------------------------------------------------------

HEADERS: list[list[tuple[str, bytes | None]] | None] = [
    [("a", b"1"), ("b", None), ("a", b"again")],
    None,
    [],
    [("", b"")],
    [("ü", b"\xff")],
    None,
]


def as_structs(lists: list[list[tuple[str, bytes | None]] | None]) -> list[list[dict[str, Any]] | None]:
    return [None if entries is None else [{"key": key, "value": value} for key, value in entries] for entries in lists]


def headers_back(array: pa.Array) -> list[list[dict[str, Any]]]:
    table = pa.table({"value": pa.nulls(len(array), pa.binary()), "headers": array})
    return round_trip(table)["headers"].to_pylist()


def shown(lists: list[list[tuple[str, bytes | None]] | None]) -> list[list[dict[str, Any]] | None]:
    return [entries or [] for entries in as_structs(lists)]


SWAPPED = pa.list_(pa.struct([("value", pa.binary()), ("key", pa.string())]))
HEADER_TYPES = {
    "list": pa.list_(HEADER),
    "large_list": pa.large_list(HEADER),
    "list of binary keys": pa.list_(pa.struct([("key", pa.binary()), ("value", pa.large_binary())])),
    "list of views": pa.list_(pa.struct([("key", pa.string_view()), ("value", pa.binary_view())])),
    "map": pa.map_(pa.string(), pa.binary()),
}


@pytest.mark.parametrize("name", HEADER_TYPES)
def test_every_type_of_headers_whole_and_sliced(name: str) -> None:
    kind = HEADER_TYPES[name]
    lists = HEADERS
    if name == "list of binary keys":
        array = pa.array(
            [None if row is None else [{"key": k.encode(), "value": v} for k, v in row] for row in lists], kind
        )
    else:
        array = pa.array(lists if name == "map" else as_structs(lists), kind)
    assert headers_back(array) == shown(lists)
    for start in range(len(lists)):
        for end in range(start + 1, len(lists) + 1):
            assert headers_back(array[start:end]) == shown(lists[start:end])


def test_a_column_of_null_headers() -> None:
    assert headers_back(pa.nulls(2)) == [[], []]
    assert headers_back(pa.nulls(2, pa.list_(HEADER))) == [[], []]


def test_headers_whose_values_are_all_null_by_type() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.null())]))
    assert headers_back(pa.array([[{"key": "a", "value": None}]], kind)) == [[{"key": "a", "value": None}]]


def test_a_header_list_over_entries_that_are_a_slice_themselves() -> None:
    entries = pa.array([{"key": f"k{i}", "value": b"%d" % i} for i in range(10)], HEADER)[3:]
    lists = pa.ListArray.from_arrays(pa.array([1, 3, 3, 5], pa.int32()), entries)
    expected = [[{"key": f"k{i}", "value": b"%d" % i} for i in numbers] for numbers in ([4, 5], [], [6, 7])]
    assert headers_back(lists) == expected
    assert headers_back(lists[2:]) == expected[2:]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([["a"]]), "expected a list of structs"),
        (pa.array([b"a"]), "expected a list of structs"),
        (pa.array([[{"key": "a"}]]), "not of key"),
        (pa.array([[{"value": b"x", "key": "a"}]], SWAPPED), "not of value, key"),
        (pa.array([[{"key": "a", "value": b"x", "more": 1}]]), "not of key, value, more"),
        (pa.array([[{"key": None, "value": b"x"}]], pa.list_(HEADER)), "without a key"),
        (pa.array([[None]], pa.list_(HEADER)), "without a key"),
    ],
)
def test_what_is_no_header_is_refused_by_the_columns_name(array: pa.Array, message: str) -> None:
    with pytest.raises(InvalidRecord, match=f"column 'headers'.*{message}"):
        headers_back(array)


@pytest.mark.parametrize("name", ["key", "value"])
def test_the_part_of_a_header_with_a_wrong_type_is_named(name: str) -> None:
    kind = {"key": pa.string(), "value": pa.binary()} | {name: pa.int64()}
    entry = {"key": "a", "value": b"x"} | {name: 5}
    array = pa.array([[entry]], pa.list_(pa.struct(list(kind.items()))))
    with pytest.raises(InvalidRecord, match=f"column 'headers.{name}' is int64"):
        headers_back(array)


def test_a_bad_header_outside_of_the_slice_does_no_harm() -> None:
    array = pa.array([[{"key": None, "value": b"x"}], [{"key": "a", "value": b"y"}]], pa.list_(HEADER))
    assert headers_back(array[1:]) == [[{"key": "a", "value": b"y"}]]


def test_header_names_that_are_not_utf8_go_in_as_binary_and_come_out_as_kafkas_clients_show_them() -> None:
    kind = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
    names = [b"\xff\xfe", "ü".encode(), b"\x80"]
    array = pa.array([[{"key": name, "value": b"x"} for name in names]], kind)
    table = pa.table({"value": pa.array([b"v"]), "headers": array})
    stored = written(table)
    assert wire.headers_bytes([(name, b"x") for name in names]) in stored  # kept as they were
    assert [entry["key"] for entry in read(stored)["headers"].to_pylist()[0]] == ["��", "ü", "�"]


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "names", "message"),
    [
        ([[b"a"], [1]], ["value", "partition"], "column 'partition' is none of"),
        ([[b"a"]], ["key"], "no column 'value'"),
        ([[b"a"], [b"b"], [b"c"]], ["key", "value", "key"], "column 'key' is there 2 times"),
    ],
)
def test_columns_that_do_not_make_records(columns: list[Any], names: list[str], message: str) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(column) for column in columns], names=names)
    for table in (batch, pa.Table.from_batches([batch])):
        with pytest.raises(InvalidRecord, match=message):
            written(table)


def test_empty_tables_and_chunks_give_nothing() -> None:
    table = pa.table({"value": pa.array([], pa.binary())})
    assert written(table) == b""
    chunked = pa.table({"value": pa.chunked_array([pa.array([], pa.binary()), pa.array([b"x"])])})
    assert round_trip(chunked)["value"].to_pylist() == [b"x"]


def test_columns_chunked_differently() -> None:
    table = pa.table(
        {
            "key": pa.chunked_array([[b"a", b"b"], [b"c"]]),
            "value": pa.chunked_array([[b"1"], [b"2", None]]),
        }
    )
    back = round_trip(table)
    assert (back["key"].to_pylist(), back["value"].to_pylist()) == ([b"a", b"b", b"c"], [b"1", b"2", None])


def test_large_tables_are_taken_in_slices_and_come_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_ROWS_AT_ONCE", 64)
    count = 1000
    table = pa.table(
        {
            "key": pa.array([None if i % 11 == 0 else f"k{i}" for i in range(count)]),
            "value": pa.array([None if i % 7 == 0 else b"v%d" % i for i in range(count)]),
            "timestamp": pa.array([None if i % 5 == 0 else T + i for i in range(count)]),
            "headers": pa.array(
                [None if i % 3 == 0 else [{"key": f"h{j}", "value": None} for j in range(i % 4)] for i in range(count)],
                pa.list_(HEADER),
            ),
        }
    )
    assert len(list(columns_from_arrow(table))) == 16
    back = round_trip(table, default_timestamp_ms=3)
    assert back["offset"].to_pylist() == list(range(count))
    assert back["key"].to_pylist() == [key and key.encode() for key in table["key"].to_pylist()]
    assert back["value"].to_pylist() == table["value"].to_pylist()
    assert back["timestamp"].to_pylist() == [3 if time is None else time for time in table["timestamp"].to_pylist()]
    assert back["headers"].to_pylist() == [entries or [] for entries in table["headers"].to_pylist()]


def test_columns_stay_readable_after_the_table_and_the_slices_before_them_are_gone() -> None:
    table = pa.table({"value": pa.array([b"%d" % i for i in range(200_000)]), "key": pa.array(["k"] * 200_000)})
    slices = columns_from_arrow(table)
    del table
    encoder = Encoder(BatchOptions(batch_bytes=1 << 20))
    data = b"".join(chunk.data.tobytes() for columns in slices for chunk in encoder.encode(columns))
    assert read(data)["value"].to_pylist() == [b"%d" % i for i in range(200_000)]


def test_batches_read_earlier_keep_their_content_while_later_ones_are_decoded() -> None:
    data = written(pa.table({"value": pa.array([b"%d" % i for i in range(3000)])}), batch_bytes=500, codec_id=3)
    array = np.frombuffer(data, np.uint8)
    decoder = Decoder()
    kept = []
    for start in range(0, 3000, 100):
        table = scan_batches(array).table
        kept += [
            (start, to_arrow(part)) for part in decoder.columns(array, table, min_offset=start, max_offset=start + 100)
        ]
    for start, batch in kept:
        assert batch["value"].to_pylist() == [b"%d" % i for i in range(start, start + 100)]


def test_the_schema_of_what_is_read() -> None:
    back = round_trip(pa.table({"value": [b"x"]}), log_append_time=True)
    assert back.schema == RECORD_SCHEMA
    assert back["timestamp_type"].to_pylist() == [1]
    assert read(b"").schema == RECORD_SCHEMA


strings = st.none() | st.binary(max_size=8)
rows = st.builds(
    Record,
    key=strings,
    value=strings,
    timestamp_ms=st.integers(-1, 1 << 50),
    headers=st.lists(st.tuples(st.text(max_size=3), strings), max_size=3).map(tuple),
)


@given(
    records=st.lists(rows, min_size=1, max_size=40),
    kinds=st.tuples(*[st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()])] * 2),
    codec_id=st.integers(0, 4),
    cut=st.tuples(st.integers(0, 10), st.integers(0, 40)),
)
def test_any_records_come_back_equal_from_any_slice(
    records: list[Record], kinds: tuple[Any, Any], codec_id: int, cut: tuple[int, int]
) -> None:
    table = pa.table(
        {
            "headers": pa.array(
                [[{"key": key, "value": value} for key, value in record.headers] for record in records],
                pa.list_(HEADER),
            ),
            "timestamp": pa.array([record.timestamp_ms for record in records]),
            "value": pa.array([record.value for record in records], kinds[0]),
            "key": pa.array([record.key for record in records], kinds[1]),
        }
    )
    start, end = cut
    back = round_trip(table.slice(start, max(end - start, 0)), codec_id=codec_id, batch_bytes=200)
    expected = records[start : max(end, start)]
    assert back["key"].to_pylist() == [record.key for record in expected]
    assert back["value"].to_pylist() == [record.value for record in expected]
    assert back["timestamp"].to_pylist() == [record.timestamp_ms for record in expected]
    assert [[(entry["key"], entry["value"]) for entry in row] for row in back["headers"].to_pylist()] == [
        list(record.headers) for record in expected
    ]
