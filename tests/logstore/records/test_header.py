"""One header at a time: Kafka's fields, agreement with the scan, and headers that cannot be."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path

import golden
import numpy as np
import pytest
import wire
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch
from logstore.files import OsFileSystem
from logstore.records import codes, table
from logstore.records.header import BatchHeader, parse_header, read_header
from logstore.records.record import TimestampType
from logstore.records.scan import is_damage, scan_batches

BATCH = wire.batch(wire.record(b"k", b"v"), count=1)


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: case.name)
def test_fields_of_kafkas_headers(case: golden.Case) -> None:
    for batch in case.batches:
        header = parse_header(case.data[batch["position"] :][:61], batch["position"], len(case.data))
        assert header is not None
        found = {name: getattr(header, name) for name in batch if hasattr(header, name)}
        kind = found.pop("timestamp_type")
        assert str(kind) == batch["timestamp_type"]
        assert found == {name: batch[name] for name in found}
        assert len(found) == 17
        assert header.next_offset == batch["last_offset"] + 1
        assert header.end_position == batch["position"] + batch["size_bytes"]


def test_an_attribute_byte_of_a_legacy_message_is_no_transaction() -> None:
    data = bytearray(wire.message(9, b"k", b"v", timestamp=5))
    data[17] = 0x7B
    header = parse_header(bytes(data), 0, len(data))
    assert header is not None
    assert (header.codec_id, header.timestamp_type) == (3, TimestampType.LOG_APPEND_TIME)
    assert (header.transactional, header.control, header.delete_horizon_ms) == (False, False, None)
    assert (header.base_offset, header.last_offset, header.count, header.last_sequence) == (None, 9, None, -1)


@pytest.mark.parametrize(
    ("sequence", "delta", "last"), [(-1, 5, -1), (0, 0, 0), (40, 4, 44), ((1 << 31) - 1, 0, (1 << 31) - 1)]
)
def test_the_last_sequence(sequence: int, delta: int, last: int) -> None:
    data = wire.batch(b"", count=0, base_offset=7, last_offset_delta=delta, base_sequence=sequence)
    header = parse_header(data, 0, len(data))
    assert header is not None
    assert header.last_sequence == last


def test_a_sequence_goes_on_at_zero_after_the_largest() -> None:
    data = wire.batch(b"", count=0, last_offset_delta=4, base_sequence=(1 << 31) - 2)
    header = parse_header(data, 0, len(data))
    assert header is not None
    assert header.last_sequence == 2


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (8, struct.pack(">i", 13), "length 13"),
        (8, struct.pack(">i", 48), "length 48"),
        (8, struct.pack(">i", -1), "length -1"),
        (16, b"\x03", "magic byte is 3"),
        (16, b"\xff", "magic byte is -1"),
        (0, struct.pack(">q", -9), "offset is -9"),
        (0, b"\x7f" + b"\xff" * 7, f"offset is {(1 << 63) - 1}"),
        (23, struct.pack(">i", -1), "offsets or record count"),
        (57, struct.pack(">i", -1), "offsets or record count"),
        (0, b"\x7f" + b"\xff" * 6 + b"\xfe" + BATCH[8:23] + struct.pack(">i", 1), "offsets or record count"),
    ],
)
def test_a_header_that_cannot_be_is_named_with_its_place(at: int, content: bytes, message: str) -> None:
    data = BATCH[:at] + content + BATCH[at + len(content) :]
    with pytest.raises(CorruptBatch, match=message) as caught:
        parse_header(data[:61], 5000, 5000 + len(data), file="00.log")
    assert (caught.value.file, caught.value.position) == ("00.log", 5000)


def test_read_header_at_positions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "00.log"
    path.write_bytes(BATCH + wire.message(3, b"k", b"v") + BATCH[:-1])
    with closing(OsFileSystem().open(str(path))) as file:
        end = path.stat().st_size
        first = read_header(file, 0, end)
        assert first is not None
        second = read_header(file, first.end_position, end)
        assert second is not None
        assert (first.magic, second.magic) == (2, 1)
        assert read_header(file, second.end_position, end) is None
        assert read_header(file, end - 17, end) is None
        assert read_header(file, 0, len(BATCH) - 1) is None


@pytest.mark.parametrize("size", [18, 25, 30, 60])
def test_a_file_that_is_shorter_than_believed_has_no_header_there(tmp_path: Path, size: int) -> None:
    """Another process may have cut it since its size was looked at."""
    for data in (BATCH, wire.message(3, b"key", bytes(60))):
        path = tmp_path / "00.log"
        path.write_bytes(data[:size])
        with closing(OsFileSystem().open(str(path))) as file:
            header = read_header(file, 0, len(data))
        assert header is None or (header.magic == 1 and size >= 26)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Headers near the edge of what is allowed, followed by what they need or by less."""
    offset = draw(st.sampled_from([0, 5, -1, (1 << 63) - 1, (1 << 63) - 2, 1 << 62]))
    length = draw(st.sampled_from([13, 14, 21, 22, 48, 49, 60, -1, (1 << 31) - 1]))
    magic = draw(st.sampled_from([0, 1, 2, 2, 3, -1]))
    delta = draw(st.sampled_from([0, 1, -1, (1 << 31) - 1]))
    count = draw(st.sampled_from([0, 1, -1]))
    head = wire.HEADER.pack(offset, length, 0, magic, 0, 0, delta, 1, 2, -1, -1, -1, count)
    return wire.resealed(head + bytes(draw(st.sampled_from([0, 11, 12, 100]))))[: draw(st.sampled_from([61, 40, 200]))]


@given(heads())
def test_a_seek_and_a_scan_agree_on_what_a_batch_is(data: bytes) -> None:
    scan = scan_batches(np.frombuffer(data, np.uint8), verify_crc=False, rows_max=1)
    parsed: BatchHeader | CorruptBatch | None
    try:
        parsed = parse_header(data[:61], 0, len(data))
    except CorruptBatch as error:
        parsed = error
    if len(scan.table):
        assert isinstance(parsed, BatchHeader)
        row = scan.table[0]
        assert (parsed.size_bytes, parsed.magic) == (row[table.SIZE], row[table.MAGIC])
        assert (parsed.last_offset, parsed.max_timestamp_ms) == (row[table.LAST_OFFSET], row[table.MAX_TIMESTAMP])
        assert parsed.crc == row[table.CRC]
    elif scan.code == codes.BAD_COUNT:  # the scan also knows how many records fit
        assert isinstance(parsed, BatchHeader | CorruptBatch)
    elif is_damage(scan.code):
        assert isinstance(parsed, CorruptBatch)
    else:
        assert parsed is None
