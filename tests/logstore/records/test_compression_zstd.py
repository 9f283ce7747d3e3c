"""Zstandard frames: Kafka's, other writers', and frames that are not what they say."""

from __future__ import annotations

import cramjam
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch, DecompressionLimit
from logstore.records.compression import OutputTooSmall, codec_by_name

ZSTD = codec_by_name("zstd")
RECORDS = bytes.fromhex("22000000046b310476310402680278026e0110000a02046b320100")
#: Kafka's own: no content size, flushed once, then an empty last block
GOLDEN = bytes.fromhex("28b52ffd0058d80000") + RECORDS + bytes.fromhex("010000")
SKIPPABLE = bytes.fromhex("502a4d18") + (5).to_bytes(4, "little") + b"hello"
WORDS = b"".join(b"the %d quick brown %d foxes " % (i * 7919 % 1000, i) for i in range(12_000))


def test_kafkas_bytes_are_read() -> None:
    assert ZSTD.decompress(GOLDEN, limit=100) == RECORDS


@given(payload=st.binary(max_size=1_000), times=st.integers(0, 400), level=st.sampled_from([None, -7, 1, 12]))
def test_another_binding_reads_our_frames(payload: bytes, times: int, level: int | None) -> None:
    assert bytes(cramjam.zstd.decompress(ZSTD.compress(payload * times, level))) == payload * times


@given(
    payload=st.binary(max_size=1_000),
    times=st.integers(0, 400),
    content_size=st.booleans(),
    checksum=st.booleans(),
    level=st.sampled_from([1, 3, 19]),
)
def test_any_frame_is_read(payload: bytes, times: int, content_size: bool, checksum: bool, level: int) -> None:
    payload *= times
    writer = zstandard.ZstdCompressor(level=level, write_content_size=content_size, write_checksum=checksum)
    for compressed in (writer.compress(payload), bytes(cramjam.zstd.compress(payload, level))):
        assert ZSTD.decompress(compressed, limit=len(payload)) == payload
        out = bytearray(len(payload) + 10)
        assert ZSTD.decompress_into(compressed, memoryview(out)) == len(payload)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_791, 65_792, 400_000])
def test_every_width_of_the_content_size_is_understood(size: int) -> None:
    payload = (WORDS * 2)[:size]
    compressed = ZSTD.compress(payload)
    assert zstandard.get_frame_parameters(compressed).content_size == size
    assert ZSTD.decompress(compressed, limit=size) == payload
    if size:
        with pytest.raises(OutputTooSmall):
            ZSTD.decompress_into(compressed, memoryview(bytearray(size - 1)))


def test_frames_end_to_end_and_skippable_ones_are_one_payload() -> None:
    data = SKIPPABLE + GOLDEN + ZSTD.compress(WORDS) + SKIPPABLE + ZSTD.compress(b"") + GOLDEN
    assert ZSTD.decompress(data, limit=1 << 20) == RECORDS + WORDS + RECORDS


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x28\xb5\x2f",
        GOLDEN + b"\x00",
        GOLDEN + b"garbage!",
        GOLDEN + GOLDEN[:10],
        SKIPPABLE[:-1],
        SKIPPABLE[:6],
        # a reserved block type, a reserved bit of the descriptor, a dictionary nobody has
        bytes.fromhex("28b52ffd0058070000"),
        bytes.fromhex("28b52ffd0858010000"),
        bytes.fromhex("28b52ffd015807010000"),
    ],
    ids=lambda data: data[-10:].hex() or "empty",
)
def test_a_broken_frame_is_corrupt(broken: bytes) -> None:
    with pytest.raises(CorruptBatch, match="zstd"):
        ZSTD.decompress(broken, limit=1 << 20)


def test_a_content_checksum_is_verified_even_when_the_buffer_fits_exactly() -> None:
    checked = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(WORDS))
    assert ZSTD.decompress(checked, limit=len(WORDS)) == WORDS
    checked[-1] ^= 1
    for room in (len(WORDS), len(WORDS) + 1):
        with pytest.raises(CorruptBatch, match="checksum"):
            ZSTD.decompress_into(checked, memoryview(bytearray(room)))


def test_a_content_size_the_blocks_cannot_reach_is_corrupt_however_large_the_limit() -> None:
    # A frame of one empty block that announces an exbibyte.
    liar = bytes.fromhex("28b52ffdc058") + (1 << 60).to_bytes(8, "little") + bytes.fromhex("010000")
    with pytest.raises(CorruptBatch, match="more than it can"):
        ZSTD.decompress(liar, limit=1 << 62)


def test_a_content_size_that_is_wrong_is_corrupt() -> None:
    compressed = bytearray(ZSTD.compress(RECORDS))
    assert compressed[5] == len(RECORDS)
    compressed[5] -= 1
    with pytest.raises(CorruptBatch):
        ZSTD.decompress(compressed, limit=100)


def test_a_declared_size_above_the_limit_is_not_tried() -> None:
    with pytest.raises(DecompressionLimit):
        ZSTD.decompress(ZSTD.compress(bytes(2_000_000)), limit=1_999_999)


def test_a_window_larger_than_kafkas_reader_takes_is_corrupt() -> None:
    # 256 MiB; the library would have to allocate it.
    with pytest.raises(CorruptBatch, match="zstd"):
        ZSTD.decompress(bytes.fromhex("28b52ffd0090") + GOLDEN[6:], limit=1 << 20)
