"""The xerial framing around snappy blocks."""

from __future__ import annotations

import struct

import cramjam
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch, DecompressionLimit
from logstore.records.compression import codec_by_name

SNAPPY = codec_by_name("snappy")
RECORDS = bytes.fromhex("22000000046b310476310402680278026e0110000a02046b320100")
HEADER = bytes.fromhex("82534e41505059000000000100000001")
#: Kafka's own
GOLDEN = HEADER + bytes.fromhex("0000001d1b68") + RECORDS
RAW = GOLDEN[20:]


def test_kafkas_bytes_are_read_and_written() -> None:
    assert SNAPPY.decompress(GOLDEN, limit=100) == RECORDS
    assert SNAPPY.compress(RECORDS) == GOLDEN


def test_no_records_are_a_bare_header() -> None:
    assert SNAPPY.compress(b"") == HEADER


@given(payload=st.binary(max_size=1_000), times=st.integers(0, 200))
def test_blocks_hold_32_kib_and_another_library_reads_them(payload: bytes, times: int) -> None:
    payload *= times
    compressed = SNAPPY.compress(payload)
    assert compressed[:16] == HEADER
    position, blocks = 16, []
    other = pa.Codec("snappy")
    for start in range(0, len(payload), 32 * 1024):
        expected = payload[start : start + 32 * 1024]
        (length,) = struct.unpack_from(">i", compressed, position)
        block = compressed[position + 4 : position + 4 + length]
        blocks.append(other.decompress(block, decompressed_size=len(expected), asbytes=True))
        assert blocks[-1] == expected
        position += 4 + length
    assert position == len(compressed)


def test_streams_end_to_end_are_one_payload() -> None:
    assert SNAPPY.decompress(GOLDEN + GOLDEN + HEADER + GOLDEN, limit=1000) == RECORDS * 3


@pytest.mark.parametrize("payload", [b"", b"k", RECORDS, bytes(200_000)], ids=len)
def test_a_bare_block_is_read(payload: bytes) -> None:
    block = pa.Codec("snappy").compress(payload, asbytes=True)
    assert SNAPPY.decompress(block, limit=1 << 20) == payload


def test_a_block_may_be_larger_than_ours() -> None:
    block = pa.Codec("snappy").compress(bytes(300_000), asbytes=True)
    assert SNAPPY.decompress(HEADER + struct.pack(">i", len(block)) + block, limit=300_000) == bytes(300_000)


def test_googles_framing_is_refused() -> None:
    with pytest.raises(CorruptBatch):
        SNAPPY.decompress(bytes(cramjam.snappy.compress(RECORDS * 10)), limit=10_000)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        GOLDEN + b"\x00",
        GOLDEN + b"\x00\x00\x00",
        GOLDEN + struct.pack(">i", 0),
        GOLDEN + struct.pack(">i", -1),
        GOLDEN + struct.pack(">i", 0x7FFFFFFF) + RAW,
        GOLDEN + HEADER[:15],
        GOLDEN + HEADER[:7] + b"\x01" + HEADER[8:],
        GOLDEN + HEADER[:8] + struct.pack(">ii", 0, 0),
        HEADER + struct.pack(">i", len(RAW) + 1) + RAW,
        HEADER + struct.pack(">i", len(RAW) - 1) + RAW[:-1],
        HEADER + struct.pack(">i", len(RAW) + 1) + RAW + b"\x00",
    ],
    ids=lambda data: data[-24:].hex() or "empty",
)
def test_a_broken_stream_is_corrupt(broken: bytes) -> None:
    with pytest.raises(CorruptBatch, match="snappy"):
        SNAPPY.decompress(broken, limit=1 << 20)


def test_a_length_the_block_cannot_reach_is_corrupt_however_large_the_limit() -> None:
    # 4 GiB announced by seven bytes: nothing is allocated for it.
    liar = b"\xff\xff\xff\xff\x0f" + b"\x00k"
    with pytest.raises(CorruptBatch, match="more than it can"):
        SNAPPY.decompress(liar, limit=1 << 40)


def test_a_length_above_the_limit_is_not_tried() -> None:
    with pytest.raises(DecompressionLimit):
        SNAPPY.decompress(pa.Codec("snappy").compress(bytes(2_000_000), asbytes=True), limit=1_999_999)
