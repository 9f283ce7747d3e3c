"""Control records: Kafka's markers byte for byte, types from the future, and what is malformed."""

from __future__ import annotations

import struct

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch
from logstore.records.control import ControlRecord, ControlType, encode_marker, parse_control_record
from logstore.records.iterate import iter_records
from logstore.records.record import Record


@pytest.mark.parametrize(
    ("commit", "kafkas", "kind"),
    [(False, golden.ABORT_MARKER, ControlType.ABORT), (True, golden.COMMIT_MARKER, ControlType.COMMIT)],
)
def test_markers_are_kafkas(commit: bool, kafkas: bytes, kind: ControlType) -> None:
    written = encode_marker(
        commit=commit, producer_id=9, producer_epoch=3, coordinator_epoch=11, timestamp_ms=golden.T, leader_epoch=7
    )
    assert struct.pack(">q", 200) + written[8:] == kafkas  # the log gives it its offset
    (record,) = iter_records(kafkas, control=True)
    assert parse_control_record(record) == ControlRecord(kind, 11)
    assert record.offset == 200


@pytest.mark.parametrize("case", [case for case in golden.cases() if "marker" in case.name], ids=lambda case: case.name)
def test_markers_of_the_vectors_are_hidden_unless_asked_for(case: golden.Case) -> None:
    assert list(iter_records(case.data)) == []
    expected = ControlType.ABORT if "abort" in case.name else ControlType.COMMIT
    for record in iter_records(case.data, control=True):
        assert parse_control_record(record).kind is expected


def test_other_control_records_have_a_kind_and_no_coordinator() -> None:
    (case,) = (case for case in golden.cases() if case.name == "control_leader_change")
    (record,) = iter_records(case.data, control=True)
    assert parse_control_record(record) == ControlRecord(ControlType.LEADER_CHANGE, -1)


@pytest.mark.parametrize(("number", "kind"), [(2, 2), (6, 6), (7, -1), (-1, -1), (32767, -1), (-32768, -1)])
def test_types_from_the_future_are_unknown(number: int, kind: int) -> None:
    assert parse_control_record(Record(struct.pack(">hh", 0, number), b"")).kind == ControlType(kind)


def test_later_versions_may_add_fields_at_the_end() -> None:
    record = Record(struct.pack(">hhq", 3, 1, 99), struct.pack(">hiq", 2, 8, 99))
    assert parse_control_record(record) == ControlRecord(ControlType.COMMIT, 8)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (None, b"", "without a whole key"),
        (b"\0\0\0", b"", "without a whole key"),
        (struct.pack(">hh", -1, 0), struct.pack(">hi", 0, 1), "version -1"),
        (struct.pack(">hh", 0, 0), None, "without a whole value"),
        (struct.pack(">hh", 0, 1), b"\0\0\0\0\0", "without a whole value"),
        (struct.pack(">hh", 0, 1), struct.pack(">hi", -2, 1), "version -2"),
    ],
)
def test_a_malformed_control_record_is_named_with_its_offset(
    key: bytes | None, value: bytes | None, message: str
) -> None:
    with pytest.raises(CorruptBatch, match=message) as caught:
        parse_control_record(Record(key, value, offset=77))
    assert caught.value.offset == 77


@given(st.none() | st.binary(max_size=10), st.none() | st.binary(max_size=10))
def test_any_bytes_are_a_control_record_or_corrupt(key: bytes | None, value: bytes | None) -> None:
    try:
        found: ControlRecord | CorruptBatch = parse_control_record(Record(key, value, offset=5))
    except CorruptBatch as error:
        found = error
    if isinstance(found, CorruptBatch):
        assert found.offset == 5
    else:
        assert key is not None
        assert found.kind in ControlType
