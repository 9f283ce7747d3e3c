"""The plain face: records one by one, equal to Kafka's, up to the first damage."""

from __future__ import annotations

import golden
import numpy as np
import pytest
import wire

from logstore.errors import CorruptBatch
from logstore.records.iterate import iter_records
from logstore.records.record import Record

BATCH = wire.batch(wire.record(b"k", b"v"), count=1, base_offset=5)


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: case.name)
def test_records_of_kafkas_batches(case: golden.Case) -> None:
    assert list(iter_records(case.data, control=True)) == case.records()
    control = {record.offset for batch in case.batches if batch["control"] for record in golden.records_of(batch)}
    assert [record.offset for record in iter_records(case.data)] == [
        record.offset for record in case.records() if record.offset not in control
    ]


@pytest.mark.parametrize("codec", golden.TWO)
def test_the_two_records_of_every_codec(codec: str) -> None:
    assert tuple(iter_records(bytes.fromhex(golden.TWO[codec]))) == golden.TWO_RECORDS


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_will_do(kind: type) -> None:
    assert [record.offset for record in iter_records(kind(BATCH))] == [5]


def test_nothing_has_no_records() -> None:
    assert list(iter_records(b"")) == []


def test_formats_may_follow_each_other() -> None:
    data = wire.message(1, b"a", None, magic=0) + wire.message(2, None, b"b", timestamp=9) + BATCH
    assert list(iter_records(data)) == [
        Record(b"a", None, -1, (), 1),
        Record(None, b"b", 9, (), 2),
        Record(b"k", b"v", 0, (), 5),
    ]


def test_a_batch_cut_off_at_the_end_is_left_out() -> None:
    assert [record.offset for record in iter_records(BATCH + BATCH[:-1])] == [5]


def test_what_comes_before_damage_is_given_first() -> None:
    damaged = bytearray(BATCH)
    damaged[-1] ^= 1
    records = iter_records(BATCH + bytes(damaged), file="00.log")
    assert next(records).offset == 5
    with pytest.raises(CorruptBatch, match="checksum") as caught:
        next(records)
    assert (caught.value.file, caught.value.position, caught.value.offset) == ("00.log", len(BATCH), 6)


def test_checksums_can_be_left_alone() -> None:
    damaged = BATCH[:17] + bytes(4) + BATCH[21:]
    assert [record.key for record in iter_records(damaged, verify_crc=False)] == [b"k"]
