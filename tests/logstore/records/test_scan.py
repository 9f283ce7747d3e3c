"""Where batches begin and end, how a scan stops, and what it says about what stopped it."""

from __future__ import annotations

import struct

import golden
import numpy as np
import pytest
import wire
from hypothesis import given
from hypothesis import strategies as st

from logstore.records import codes, table
from logstore.records.scan import is_damage, scan_batches

INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
BATCH = wire.batch(wire.record(b"k", b"v"), count=1)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: case.name)
def test_headers_of_kafkas_batches(case: golden.Case) -> None:
    scan = scan_batches(array(case.data))
    assert (scan.code, scan.next_position) == (codes.OK, len(case.data))
    names = {
        "position": table.POSITION,
        "size_bytes": table.SIZE,
        "base_offset": table.BASE_OFFSET,
        "last_offset": table.LAST_OFFSET,
        "leader_epoch": table.LEADER_EPOCH,
        "magic": table.MAGIC,
        "attributes": table.ATTRIBUTES,
        "base_timestamp_ms": table.BASE_TIMESTAMP,
        "max_timestamp_ms": table.MAX_TIMESTAMP,
        "producer_id": table.PRODUCER_ID,
        "producer_epoch": table.PRODUCER_EPOCH,
        "base_sequence": table.BASE_SEQUENCE,
        "count": table.COUNT,
        "crc": table.CRC,
    }
    found = [{name: int(row[column]) for name, column in names.items()} for row in scan.table]
    assert found == [{name: batch[name] for name in names} for batch in case.batches]


def changed(at: int, content: bytes, *, sealed: bool = True) -> bytes:
    data = BATCH[:at] + content + BATCH[at + len(content) :]
    return wire.resealed(data) if sealed else data


@pytest.mark.parametrize(
    ("what", "second", "code"),
    [
        ("nothing", b"", codes.OK),
        ("a batch", BATCH, codes.OK),
        ("17 bytes", BATCH[:17], codes.PARTIAL),
        ("all but one byte", BATCH[:-1], codes.PARTIAL),
        ("17 zeros", bytes(17), codes.PARTIAL),
        ("18 zeros, as preallocation leaves", bytes(18), codes.BAD_LENGTH),
        ("length 13", changed(8, struct.pack(">i", 13)), codes.BAD_LENGTH),
        ("length 48", changed(8, struct.pack(">i", 48)), codes.BAD_LENGTH),
        ("length -1", changed(8, struct.pack(">i", -1)), codes.BAD_LENGTH),
        ("length -2^31", changed(8, struct.pack(">i", -(1 << 31))), codes.BAD_LENGTH),
        ("length 2^31-1", changed(8, struct.pack(">i", INT32_MAX)), codes.PARTIAL),
        ("magic 3", changed(16, b"\x03"), codes.BAD_MAGIC),
        ("magic -1", changed(16, b"\xff"), codes.BAD_MAGIC),
        ("magic 1 of 33 bytes", wire.message(0, None, None)[:8] + b"\0\0\0\x15" + bytes(4) + b"\1" + bytes(16), 3),
        ("one flipped bit", changed(65, b"\xff", sealed=False), codes.BAD_CRC),
        ("offset -1", changed(0, struct.pack(">q", -1)), codes.BAD_OFFSET),
        ("offset 2^63-1", changed(0, struct.pack(">q", INT64_MAX)), codes.BAD_OFFSET),
        ("last offset beyond 2^63", wire.batch(b"", count=0, base_offset=INT64_MAX - 1, last_offset_delta=1), 6),
        ("last offset far beyond 2^63", wire.batch(b"", count=0, base_offset=1 << 62, last_offset_delta=-5), 6),
        ("last offset before the first", changed(23, struct.pack(">i", -1)), codes.BAD_OFFSET),
        ("count -1", changed(57, struct.pack(">i", -1)), codes.BAD_COUNT),
        ("count 2 for one record", changed(57, struct.pack(">i", 2)), codes.BAD_COUNT),
        ("count 2^31-1", changed(57, struct.pack(">i", INT32_MAX)), codes.BAD_COUNT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_way_a_scan_stops(what: str, second: bytes, code: int) -> None:
    scan = scan_batches(array(BATCH + second))
    assert scan.code == code
    whole = code == codes.OK
    assert scan.next_position == (len(BATCH + second) if whole else len(BATCH))
    assert len(scan.table) == (2 if whole and second else 1)
    assert is_damage(code) == (code not in (codes.OK, codes.PARTIAL))
    if is_damage(code):
        error = scan.error(file="00.log", base_position=1000, partition="t-0")
        assert (error.file, error.position, error.offset) == ("00.log", 1000 + len(BATCH), 1)
        assert error.what == codes.EXPLAINED[code]


def test_damage_in_the_first_batch_has_no_offset_to_name() -> None:
    scan = scan_batches(array(bytes(30)))
    assert scan.error(file="f").where() == {"file": "f", "position": 0}


def test_the_highest_offset_that_leaves_room_for_a_next_one() -> None:
    scan = scan_batches(array(wire.batch(b"", count=0, base_offset=INT64_MAX - 6, last_offset_delta=5)))
    assert scan.code == codes.OK
    assert scan.table[0, table.LAST_OFFSET] == INT64_MAX - 1


def test_checksums_are_left_alone_when_not_asked_for() -> None:
    damaged = changed(65, b"\xff", sealed=False)
    message = bytearray(wire.message(5, b"k", b"v"))
    message[-1] ^= 1
    data = array(damaged + bytes(message))
    assert scan_batches(data).code == codes.BAD_CRC
    assert scan_batches(data, verify_crc=False).code == codes.OK


@pytest.mark.parametrize("magic", [0, 1])
def test_a_legacy_message_with_a_wrong_checksum_stops_the_scan_at_it(magic: int) -> None:
    good = wire.message(5, b"k", b"v", magic=magic, timestamp=77)
    bad = good[:-1] + b"x"
    scan = scan_batches(array(good + bad + good))
    assert (scan.code, scan.next_position, len(scan.table)) == (codes.BAD_CRC, len(good), 1)
    assert scan.table[0, table.LAST_OFFSET] == 5
    assert scan.table[0, table.MAX_TIMESTAMP] == (77 if magic else -1)


def test_tables_are_joined_when_there_are_more_batches_than_rows_in_one() -> None:
    data = array(BATCH * 9000)
    scan = scan_batches(data)
    assert (scan.code, len(scan.table)) == (codes.OK, 9000)
    assert (scan.table[:, table.POSITION] == np.arange(9000) * len(BATCH)).all()


@pytest.mark.parametrize("rows_max", [0, 1, 7, 4097])
def test_a_scan_stops_after_the_rows_asked_for(rows_max: int) -> None:
    scan = scan_batches(array(BATCH * 5000), rows_max=rows_max)
    assert (scan.code, len(scan.table), scan.next_position) == (codes.FULL, rows_max, rows_max * len(BATCH))
    assert not is_damage(scan.code)


def test_a_table_given_is_filled_and_the_scan_goes_on_from_where_it_stopped() -> None:
    data = array(BATCH * 5)
    into = table.new_table(3)
    first = scan_batches(data, into=into)
    assert (first.code, len(first.table)) == (codes.FULL, 3)
    assert np.shares_memory(first.table, into)
    rest = scan_batches(data, start=first.next_position, into=into)
    assert (rest.code, len(rest.table), rest.next_position) == (codes.OK, 2, len(data))


def test_a_scan_from_the_end_finds_nothing_and_one_from_before_the_beginning_is_refused() -> None:
    scan = scan_batches(array(BATCH), start=len(BATCH))
    assert (scan.code, len(scan.table)) == (codes.OK, 0)
    with pytest.raises(ValueError, match="-1"):
        scan_batches(array(BATCH), start=-1)


@given(st.integers(0, 3), st.data())
def test_a_log_cut_anywhere_ends_with_its_last_whole_batch(before: int, data: st.DataObject) -> None:
    log = BATCH * before + BATCH[: data.draw(st.integers(0, len(BATCH) - 1))]
    scan = scan_batches(array(log))
    assert scan.code == (codes.OK if len(log) == before * len(BATCH) else codes.PARTIAL)
    assert (len(scan.table), scan.next_position) == (before, before * len(BATCH))


@given(st.integers(0, 8 * len(BATCH) - 1))
def test_no_flipped_bit_goes_unseen_except_where_the_format_has_no_checksum(bit: int) -> None:
    damaged = bytearray(BATCH)
    damaged[bit // 8] ^= 1 << bit % 8
    scan = scan_batches(array(bytes(damaged)))
    # Base offset and leader epoch are set by whoever appends, after the checksum was made.
    unprotected = bit // 8 < 8 or 12 <= bit // 8 < 16
    assert (scan.code == codes.OK) == (unprotected and damaged[0] < 0x80)


@given(st.binary(max_size=200))
def test_noise_is_never_taken_for_a_batch(noise: bytes) -> None:
    scan = scan_batches(array(BATCH + noise))
    assert len(scan.table) == 1
    assert scan.next_position == len(BATCH)
