"""The LZ4 frame: Kafka's bytes, everything Kafka's reader takes or refuses, and the checksum it rests on."""

from __future__ import annotations

import struct

import cramjam
import lz4.block
import lz4.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch
from logstore.records.compression import codec_by_name
from logstore.records.compression.xxhash32 import xxhash32

LZ4 = codec_by_name("lz4")
RECORDS = bytes.fromhex("22000000046b310476310402680278026e0110000a02046b320100")
HEADER = bytes.fromhex("04224d18604082")
END_MARK = bytes(4)
#: Kafka's own; the block is stored because it would not shrink
GOLDEN = HEADER + bytes.fromhex("1b000080") + RECORDS + END_MARK
#: the value of Kafka's own magic 0 and magic 1 wrappers
GOLDEN_V0 = bytes.fromhex(
    "04224d1860401a"
    "330000001200010091640000001257e7496e0f0080026b31000000027606000002009065000000108b23e3da0d008000026b32ffffffff"
    "00000000"
)
GOLDEN_V1 = bytes.fromhex(
    "04224d18604082"
    "3d00000016000100e01aa5da6a6201000000018bcfe568180080026b3100000002760600000200001d005018dcbe14a10900012600b0"
    "05000000026b32ffffffff"
    "00000000"
)
WORDS = b"".join(b"the %d quick brown %d foxes " % (i * 7919 % 1000, i) for i in range(12_000))


def block(data: bytes, *, stored: bool = False) -> bytes:
    return struct.pack("<I", len(data) | stored << 31) + data


def frame(flg: int, bd: int, *rest: bytes, extra: bytes = b"") -> bytes:
    """A frame with a right header checksum, whatever its flags."""
    descriptor = bytes((flg, bd)) + extra
    return HEADER[:4] + descriptor + bytes((xxhash32(descriptor) >> 8 & 0xFF,)) + b"".join(rest)


def test_kafkas_bytes_are_read_and_written() -> None:
    assert LZ4.decompress(GOLDEN, limit=100) == RECORDS
    assert LZ4.compress(RECORDS) == GOLDEN


def test_no_records_are_a_header_and_an_end_mark() -> None:
    assert LZ4.compress(b"") == HEADER + END_MARK


def test_the_wrong_header_checksum_of_magic_0_passes_there_only() -> None:
    inner = LZ4.decompress(GOLDEN_V0, limit=1000, magic=0)
    assert inner.endswith(bytes.fromhex("026b32ffffffff"))
    for magic in (1, 2):
        with pytest.raises(CorruptBatch, match="header checksum") as caught:
            LZ4.decompress(GOLDEN_V0, limit=1000, magic=magic)
        assert caught.value.position == 6
    for magic in (0, 1, 2):
        assert LZ4.decompress(GOLDEN_V1, limit=1000, magic=magic).endswith(bytes.fromhex("026b32ffffffff"))


def test_the_quirk_is_a_checksum_over_the_magic_as_well() -> None:
    assert xxhash32(HEADER[4:6]) >> 8 & 0xFF == 0x82
    assert xxhash32(HEADER[:6]) >> 8 & 0xFF == 0x1A


@pytest.mark.parametrize("level", [None, 1, 9, 12])
@pytest.mark.parametrize("payload", [WORDS, bytes(200_000), RECORDS], ids=len)
def test_frames_are_independent_blocks_of_64_kib(payload: bytes, level: int | None) -> None:
    compressed = LZ4.compress(payload, level)
    assert compressed[:7] == HEADER
    position = 7
    for start in range(0, len(payload), 65536):
        (word,) = struct.unpack_from("<I", compressed, position)
        length = word & 0x7FFFFFFF
        data = compressed[position + 4 : position + 4 + length]
        expected = payload[start : start + 65536]
        if word >> 31:
            assert data == expected
        else:
            assert length < len(expected)
            assert lz4.block.decompress(data, uncompressed_size=len(expected)) == expected
        position += 4 + length
    assert compressed[position:] == END_MARK


@given(payload=st.binary(max_size=1_000), times=st.integers(0, 200), level=st.sampled_from([None, 1, 3, 17]))
def test_another_library_reads_our_frames(payload: bytes, times: int, level: int | None) -> None:
    assert lz4.frame.decompress(LZ4.compress(payload * times, level)) == payload * times


@given(
    payload=st.binary(max_size=1_000),
    times=st.integers(0, 200),
    block_size=st.sampled_from([4, 5, 6, 7]),
    content_checksum=st.booleans(),
    block_checksum=st.booleans(),
    store_size=st.booleans(),
)
def test_another_librarys_frames_with_independent_blocks_are_read(
    payload: bytes, times: int, block_size: int, content_checksum: bool, block_checksum: bool, store_size: bool
) -> None:
    payload *= times
    compressed = lz4.frame.compress(
        payload,
        block_size=block_size,
        block_linked=False,
        content_checksum=content_checksum,
        block_checksum=block_checksum,
        store_size=store_size,
    )
    if compressed[5] >> 4 == block_size:  # the library takes a smaller one for a short payload
        assert LZ4.decompress(compressed, limit=len(payload)) == payload


@pytest.mark.parametrize(("block_size", "bd"), [(4, 0x40), (5, 0x50), (6, 0x60), (7, 0x70)])
def test_every_block_size_is_read(block_size: int, bd: int) -> None:
    payload = WORDS * 30
    compressed = lz4.frame.compress(payload, block_size=block_size, block_linked=False)
    assert compressed[5] == bd
    assert LZ4.decompress(compressed, limit=len(payload)) == payload


def test_high_compression_is_every_level_but_nine() -> None:
    sizes = {level: len(LZ4.compress(WORDS, level)) for level in range(1, 18)}
    fast = sizes.pop(9)
    assert len(LZ4.compress(WORDS)) == fast
    assert max(sizes.values()) < fast
    assert sizes[12] <= sizes[1]


@pytest.mark.parametrize("block_linked", [True, False])
def test_linked_blocks_are_refused(block_linked: bool) -> None:
    compressed = lz4.frame.compress(WORDS, block_linked=block_linked)
    if not block_linked:
        assert LZ4.decompress(compressed, limit=1 << 20) == WORDS
        return
    with pytest.raises(CorruptBatch, match="linked") as caught:
        LZ4.decompress(compressed, limit=1 << 20)
    assert caught.value.position == 4


def test_reading_stops_at_the_first_end_mark() -> None:
    for tail in (b"garbage", GOLDEN):
        assert LZ4.decompress(GOLDEN + tail, limit=1000) == RECORDS
    # A stored block of no bytes is an end mark to Kafka as well.
    assert LZ4.decompress(GOLDEN[:-4] + block(b"", stored=True), limit=1000) == RECORDS


def test_block_checksums_are_verified_and_content_checksums_are_not() -> None:
    checked = lz4.frame.compress(WORDS[:1000], block_linked=False, block_checksum=True, content_checksum=True)
    assert LZ4.decompress(checked, limit=1000) == WORDS[:1000]
    wrong_content = checked[:-4] + bytes(4)
    assert LZ4.decompress(wrong_content, limit=1000) == WORDS[:1000]
    with pytest.raises(CorruptBatch, match="cut short"):
        LZ4.decompress(checked[:-1], limit=1000)
    wrong_block = bytearray(checked)
    wrong_block[-9] ^= 1
    with pytest.raises(CorruptBatch, match="block checksum"):
        LZ4.decompress(wrong_block, limit=1000)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (b"", "header"),
        (HEADER, "cut short"),
        (HEADER[:6], "header"),
        (b"\x05" + GOLDEN[1:], "begins with"),
        (frame(0x61, 0x40, END_MARK), "flags"),
        (frame(0x62, 0x40, END_MARK), "flags"),
        (frame(0x20, 0x40, END_MARK), "flags"),
        (frame(0xA0, 0x40, END_MARK), "flags"),
        (frame(0x40, 0x40, END_MARK), "linked"),
        (frame(0x60, 0x30, END_MARK), "block size"),
        (frame(0x60, 0x41, END_MARK), "block size"),
        (frame(0x60, 0xC0, END_MARK), "block size"),
        (frame(0x68, 0x40, extra=bytes(8))[:14], "header"),
        (GOLDEN[:6] + b"\x83" + GOLDEN[7:], "header checksum"),
        (HEADER + block(bytes(65537), stored=True) + END_MARK, "65537"),
        (HEADER + struct.pack("<I", 10) + b"short", "10 bytes where 5"),
        (frame(0x70, 0x40, block(b"abc", stored=True)), "3 bytes where 3"),
        (HEADER + block(b"\x10a\x00\x00\x00") + END_MARK, "decoded"),
        (HEADER + block(b"\xff") + END_MARK, "decoded"),
    ],
)
def test_a_broken_frame_is_corrupt(broken: bytes, what: str) -> None:
    with pytest.raises(CorruptBatch, match=what):
        LZ4.decompress(broken, limit=1 << 20)


def test_a_content_size_is_skipped_and_may_lie() -> None:
    for claimed in (0, len(RECORDS), 2**64 - 1):
        data = frame(0x68, 0x40, GOLDEN[7:], extra=claimed.to_bytes(8, "little"))
        assert LZ4.decompress(data, limit=100) == RECORDS


def test_a_block_in_front_of_its_size_is_not_taken_for_a_block() -> None:
    # The library, asked for a bare block, silently tries one with its size in front when that fails.
    sized = bytes(cramjam.lz4.compress_block(WORDS[:600], store_size=True))
    out = bytearray(65536)
    assert cramjam.lz4.decompress_block_into(sized, out, output_len=len(out)) == 600
    for room in (65536, 700):
        with pytest.raises(CorruptBatch, match="decoded"):
            LZ4.decompress_into(HEADER + block(sized) + END_MARK, memoryview(bytearray(room)))


def test_a_block_that_decodes_beyond_the_frames_block_size_is_corrupt() -> None:
    data = lz4.block.compress(bytes(65537), store_size=False)
    with pytest.raises(CorruptBatch, match="decoded"):
        LZ4.decompress(HEADER + block(data) + END_MARK, limit=1 << 20)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0x02CC5D05),
        (b"a", 0x550D7456),
        (b"abc", 0x32D153FF),
        (b"Nobody inspects the spammish repetition", 0xE2293B2F),
    ],
)
def test_xxhash32_has_the_published_values(data: bytes, expected: int) -> None:
    assert xxhash32(data) == expected


@given(payload=st.binary(min_size=1, max_size=200))
def test_xxhash32_agrees_with_the_checksums_of_another_library(payload: bytes) -> None:
    compressed = lz4.frame.compress(payload, content_checksum=True)
    assert xxhash32(payload) == int.from_bytes(compressed[-4:], "little")
