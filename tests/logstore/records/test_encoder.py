"""Columns to batches: Kafka's own bytes, where batches end, the fields of their headers, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import golden
import numpy as np
import pytest
import twins
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import InvalidRecord, RecordTooLarge
from logstore.limits import INT32_MAX
from logstore.records import table
from logstore.records.columns import BytesColumn, Columns, columns_of
from logstore.records.compression import CODECS
from logstore.records.encoder import BatchOptions, Encoder, encode_batch
from logstore.records.iterate import iter_records
from logstore.records.native import address_of, kernels
from logstore.records.record import Record
from logstore.records.scan import scan_batches
from reference.empty_batch import encode_empty_batch

T = golden.T
WRITTEN_BY_COMPACTION = {"gaps_after_compaction"}  # a last offset no record has


def rows(count: int, *, size: int = 100) -> list[Record]:
    return [Record(b"key%06d" % i, bytes([i % 251]) * size, T + i, offset=i) for i in range(count)]


def batches_of(encoder: Encoder, columns: Columns, selection: Any = None) -> bytes:
    return b"".join(chunk.data.tobytes() for chunk in encoder.encode(columns, selection))


def table_of(data: bytes) -> Any:
    scan = scan_batches(np.frombuffer(data, np.uint8))
    assert scan.code == 0
    return scan.table


# --- Kafka's bytes ----------------------------------------------------------------------------------------------------


def created_times(batch: dict[str, Any], data: bytes) -> list[int]:
    """What the producer wrote: the append time hides it from readers, but the bytes keep it."""
    cursor = twins.Cursor(data[batch["position"] + 61 : batch["position"] + batch["size_bytes"]])
    return [
        twins.int64(batch["base_timestamp_ms"] + twins.parse_record(cursor).timestamp_delta)
        for _ in range(batch["count"])
    ]


UNCOMPRESSED = [
    pytest.param(case.data, batch, id=f"{case.name}-{i}")
    for case in golden.cases()
    for i, batch in enumerate(case.batches)
    if batch["codec"] == "none" and case.name not in WRITTEN_BY_COMPACTION
]


@pytest.mark.parametrize(("data", "batch"), UNCOMPRESSED)
def test_an_uncompressed_batch_is_kafkas_byte_for_byte(data: bytes, batch: dict[str, Any]) -> None:
    expected = data[batch["position"] : batch["position"] + batch["size_bytes"]]
    options = BatchOptions(
        log_append_time=batch["timestamp_type"] == "LogAppendTime" and batch["count"] == 0,
        transactional=batch["transactional"],
        control=batch["control"],
        delete_horizon_ms=batch["delete_horizon_ms"],
        leader_epoch=batch["leader_epoch"],
        producer_id=batch["producer_id"],
        producer_epoch=batch["producer_epoch"],
        base_sequence=batch["base_sequence"],
        base_offset=batch["base_offset"],
    )
    if batch["count"] == 0:
        written = encode_empty_batch(
            options, last_offset=batch["last_offset"], max_timestamp_ms=batch["max_timestamp_ms"]
        )
        assert written == expected
        return
    records = [
        Record(record.key, record.value, time, record.headers, record.offset)
        for record, time in zip(golden.records_of(batch), created_times(batch, data), strict=True)
    ]
    written = encode_batch(columns_of(records, first_offset=batch["base_offset"]), options)
    if batch["timestamp_type"] == "LogAppendTime":  # as a log does it: written with create times, then stamped
        stamped = np.frombuffer(bytearray(written), np.uint8)
        found = scan_batches(stamped).table
        kernels().stamp_append_time(address_of(stamped), address_of(found), 1, batch["max_timestamp_ms"])
        written = stamped.tobytes()
    assert written.hex() == expected.hex()


def test_vectors_of_every_attribute_bit_are_there() -> None:
    bits = 0
    for case in golden.cases():
        for batch in case.batches:
            bits |= batch["attributes"]
    assert bits == 0x7F
    assert len(UNCOMPRESSED) >= 25


def test_the_plain_vector_of_two_records() -> None:
    options = BatchOptions(base_offset=100)
    assert encode_batch(columns_of(golden.TWO_RECORDS), options).hex() == golden.TWO["none"]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_compressed_batch_has_kafkas_header_and_the_same_records(codec: Any) -> None:
    kafkas = bytes.fromhex(golden.TWO[codec.name])
    written = encode_batch(columns_of(golden.TWO_RECORDS), BatchOptions(codec_id=codec.id, base_offset=100))
    # The compressor's own choices may differ, and with them length and checksum; nothing else may.
    assert written[:8] == kafkas[:8]
    assert written[12:17] == kafkas[12:17]
    assert written[21:61] == kafkas[21:61]
    assert codec.decompress(written[61:], limit=1000).hex() == golden._RECORDS
    assert list(iter_records(written)) == list(golden.TWO_RECORDS)


def test_a_batch_appended_at_log_append_time_and_later_cleaned() -> None:
    records = [Record(b"a", None, 1000), Record(b"b", b"x", 2000)]
    data = np.frombuffer(bytearray(encode_batch(columns_of(records), BatchOptions(leader_epoch=0))), np.uint8)
    found = scan_batches(data).table
    kernels().stamp_append_time(address_of(data), address_of(found), 1, golden.APPENDED_MS)
    assert data.tobytes() == golden.APPENDED

    read = list(iter_records(golden.APPENDED))
    options = BatchOptions(leader_epoch=0, log_append_time=True, delete_horizon_ms=golden.HORIZON_MS)
    assert encode_batch(columns_of(read), options) == golden.CLEANED


def test_an_empty_batch_keeps_offsets_and_producer() -> None:
    options = BatchOptions(base_offset=100, leader_epoch=7, producer_id=9, producer_epoch=3, base_sequence=40)
    assert encode_empty_batch(options, last_offset=104, max_timestamp_ms=T + 5) == golden.EMPTY


@pytest.mark.parametrize("last_offset", [99, 100 + (1 << 31)])
def test_an_empty_batch_must_reach_forward_and_not_too_far(last_offset: int) -> None:
    with pytest.raises(InvalidRecord, match=f"100 to {last_offset}"):
        encode_empty_batch(BatchOptions(base_offset=100), last_offset=last_offset, max_timestamp_ms=0)


@pytest.mark.parametrize(
    ("options", "attributes"),
    [
        (BatchOptions(), 0x00),
        (BatchOptions(codec_id=1), 0x01),
        (BatchOptions(codec_id=4), 0x04),
        (BatchOptions(log_append_time=True), 0x08),
        (BatchOptions(transactional=True), 0x10),
        (BatchOptions(control=True), 0x20),
        (BatchOptions(delete_horizon_ms=0), 0x40),
        (BatchOptions(3, transactional=True, control=True, delete_horizon_ms=9, log_append_time=True), 0x7B),
    ],
)
def test_each_attribute_bit_is_written_and_read(options: BatchOptions, attributes: int) -> None:
    data = encode_batch(columns_of(rows(2)), options)
    assert int.from_bytes(data[21:23], "big") == attributes
    assert table_of(data)[0, table.ATTRIBUTES] == attributes


# --- where batches end ------------------------------------------------------------------------------------------------


def test_a_batch_ends_before_it_grows_beyond_its_size() -> None:
    data = batches_of(Encoder(BatchOptions(batch_bytes=1000)), columns_of(rows(100)))
    sizes = table_of(data)[:, table.SIZE]
    record = int(sizes[0] - 61) // int(table_of(data)[0, table.COUNT])
    assert all(size <= 1000 for size in sizes)
    assert all(size > 1000 - record - 5 for size in sizes[:-1])


def test_a_record_larger_than_the_batch_size_gets_a_batch_of_its_own() -> None:
    data = batches_of(Encoder(BatchOptions(batch_bytes=50)), columns_of(rows(5)))
    assert table_of(data)[:, table.COUNT].tolist() == [1] * 5


def test_a_batch_ends_at_its_number_of_records() -> None:
    data = batches_of(Encoder(BatchOptions(batch_records=7)), columns_of(rows(20)))
    assert table_of(data)[:, table.COUNT].tolist() == [7, 7, 6]


@pytest.mark.parametrize("codec_id", [0, 3])
def test_batches_do_not_depend_on_the_size_of_the_buffer(codec_id: int) -> None:
    columns = columns_of(rows(3000))
    options = BatchOptions(codec_id=codec_id, batch_bytes=5000)
    whole = Encoder(options)
    small = Encoder(options)
    small._buffer = np.empty(700, np.uint8)
    small._table = table.new_table(2)
    assert batches_of(small, columns) == batches_of(whole, columns)


def test_offsets_and_sequences_go_on_from_batch_to_batch_and_call_to_call() -> None:
    encoder = Encoder(BatchOptions(batch_records=10, base_offset=1000, producer_id=5, base_sequence=INT32_MAX - 14))
    data = batches_of(encoder, columns_of(rows(15))) + batches_of(encoder, columns_of(rows(3)))
    found = table_of(data)
    assert found[:, table.BASE_OFFSET].tolist() == [1000, 1010, 1015]
    assert found[:, table.LAST_OFFSET].tolist() == [1009, 1014, 1017]
    assert found[:, table.BASE_SEQUENCE].tolist() == [INT32_MAX - 14, INT32_MAX - 4, 0]


def test_the_table_of_the_encoder_is_the_scans() -> None:
    for codec_id in (0, 4):
        chunks = Encoder(BatchOptions(codec_id=codec_id, batch_bytes=3000)).encode(columns_of(rows(500)))
        for chunk in chunks:
            mine, scanned = chunk.table.copy(), scan_batches(chunk.data).table
            if codec_id:  # their payloads are to be opened first
                scanned[:, (table.PAYLOAD_ADDRESS, table.PAYLOAD_SIZE)] = 0
            assert mine.tolist() == scanned.tolist()


def test_a_selection_is_encoded_in_its_order_with_repeats() -> None:
    records = rows(50)
    chosen = np.array([7, 7, 3, 49, 0], dtype=np.int64)
    data = batches_of(Encoder(), columns_of(records), chosen)
    assert [record.key for record in iter_records(data)] == [records[i].key for i in chosen]
    assert batches_of(Encoder(), columns_of(records), chosen[:0]) == b""


def test_no_rows_give_no_batches() -> None:
    assert batches_of(Encoder(), columns_of([])) == b""


def test_records_without_a_timestamp_get_the_default() -> None:
    columns = columns_of(rows(3))
    plain = Columns(columns.count, columns.keys, columns.values)
    data = encode_batch(plain, BatchOptions(default_timestamp_ms=T))
    assert [record.timestamp_ms for record in iter_records(data)] == [T] * 3


def test_a_record_above_the_first_buffer_makes_it_grow() -> None:
    big = Record(b"k", random.Random(5).randbytes(5 << 20), T, offset=0)
    for codec_id in (0, 4):
        data = batches_of(Encoder(BatchOptions(codec_id=codec_id)), columns_of([big, *rows(3)]))
        assert next(iter_records(data)) == big
        assert len(list(iter_records(data))) == 4


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timestamp", [-2, -(1 << 63)])
def test_a_timestamp_below_minus_one_is_refused(timestamp: int) -> None:
    records = [*rows(3), Record(b"k", b"v", timestamp)]
    with pytest.raises(InvalidRecord, match=f"row 3 has the timestamp {timestamp}"):
        encode_batch(columns_of(records), BatchOptions())


def test_a_bad_timestamp_is_found_among_nulls_but_not_behind_one() -> None:
    plain = columns_of(rows(4))
    times = np.array([T, -77, -5, T], np.int64)
    for bits, refused in ((0b1101 << 3, True), (0b1001 << 3, False)):
        bitmap = np.array([bits & 0xFF, bits >> 8], np.uint8)
        columns = Columns(4, plain.keys, plain.values, times, address_of(bitmap), 3)
        if refused:
            with pytest.raises(InvalidRecord, match="row 2 has the timestamp -5"):
                encode_batch(columns, BatchOptions(default_timestamp_ms=T))
        else:
            data = encode_batch(columns, BatchOptions(default_timestamp_ms=T))
            assert [record.timestamp_ms for record in iter_records(data)] == [T] * 4


@pytest.mark.parametrize("offset", [9, 11 + (1 << 31)])
def test_offsets_that_do_not_fit_a_batch_are_refused(offset: int) -> None:
    records = [Record(b"a", None, 1, (), 10), Record(b"b", None, 1, (), offset)]
    with pytest.raises(InvalidRecord, match="a batch spans"):
        encode_batch(columns_of(records, first_offset=10), BatchOptions(base_offset=10))


@pytest.mark.parametrize("selection", [[-1], [0, 3], [1 << 62]])
def test_a_selection_of_rows_that_are_not_there_is_refused(selection: list[int]) -> None:
    with pytest.raises(IndexError, match="of 3"):
        list(Encoder().encode(columns_of(rows(3)), np.array(selection, np.int64)))


def test_a_header_name_without_utf8_form_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="header name"):
        columns_of([Record(b"k", b"v", 1, (("\ud800", b""),))])


def test_a_record_beyond_two_gibibytes_is_refused_before_it_is_read() -> None:
    # The data is never there: only its length is looked at.
    offsets = np.array([0, (1 << 31) - 70], np.int64)
    nothing = np.zeros(1, np.uint8)
    column = BytesColumn(offsets, address_of(nothing))
    encoder = Encoder()
    with pytest.raises(RecordTooLarge):
        list(encoder.encode(Columns(1, column, column)))


def test_records_that_do_not_fit_one_batch_are_refused_as_one() -> None:
    with pytest.raises(RecordTooLarge):
        encode_batch(columns_of([]), BatchOptions())


# --- round trip -------------------------------------------------------------------------------------------------------

texts = st.text(max_size=5)
records = st.builds(
    Record,
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=200),
    timestamp_ms=st.integers(-1, (1 << 63) - 1),
    headers=st.lists(st.tuples(texts, st.none() | st.binary(max_size=9)), max_size=3).map(tuple),
)


@given(st.lists(records, max_size=30), st.integers(0, 4), st.sampled_from([70, 500, 16384]))
def test_records_come_back_as_they_went_in(written: list[Record], codec_id: int, batch_bytes: int) -> None:
    data = batches_of(Encoder(BatchOptions(codec_id=codec_id, batch_bytes=batch_bytes)), columns_of(written))
    read = list(iter_records(data))
    assert [record.offset for record in read] == list(range(len(written)))
    assert [(r.key, r.value, r.timestamp_ms, r.headers) for r in read] == [
        (r.key, r.value, r.timestamp_ms, r.headers) for r in written
    ]
