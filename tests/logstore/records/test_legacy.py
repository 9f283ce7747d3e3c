"""Messages of magic 0 and 1: Kafka's own bytes, the rules for offsets and times, and everything that is refused."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import BufferLimit, CorruptBatch, DecompressionLimit, DuramenError, UnsupportedFormat
from logstore.limits import DEFAULT_LIMITS, MIB, Limits
from logstore.records.compression import CODECS, codec_by_name
from logstore.records.legacy import LegacyBatch, absolute_base_offset, decode_legacy
from logstore.records.record import Record, TimestampType

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
CREATE, APPEND = TimestampType.CREATE_TIME, TimestampType.LOG_APPEND_TIME
T = 1_700_000_000_000
GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
LOG_APPEND_TIME = 0x08

# Kafka's own: (k1, v1) at offset 100 and (k2, null) at 101, five milliseconds later.
V0_NONE = bytes.fromhex(
    "00000000000000640000001257e7496e0000000000026b31000000027631"
    "0000000000000065000000108b23e3da0000000000026b32ffffffff"
)
V1_NONE = bytes.fromhex(
    "00000000000000640000001aa5da6a6201000000018bcfe56800000000026b31000000027631"
    "000000000000006500000018dcbe14a101000000018bcfe56805000000026b32ffffffff"
)
V0_LZ4 = bytes.fromhex(
    "0000000000000065000000501d8b5eb80003ffffffff0000004204224d1860401a"
    "330000001200010091640000001257e7496e0f0080026b31000000027606000002009065000000108b23e3da0d008000026b32ffffffff"
    "00000000"
)
V1_LZ4 = bytes.fromhex(
    "0000000000000065000000622e14f37601030000018bcfe56805ffffffff0000004c04224d18604082"
    "3d00000016000100e01aa5da6a6201000000018bcfe568180080026b3100000002760600000200001d005018dcbe14a1"
    "0900012600b005000000026b32ffffffff00000000"
)


def field(data: bytes | None) -> bytes:
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


def message(
    offset: int,
    key: bytes | None,
    value: bytes | None,
    *,
    magic: int = 1,
    attributes: int = 0,
    timestamp: int = T,
    crc: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """A message by the layout, with a right checksum unless asked otherwise."""
    stamp = struct.pack(">q", timestamp) if magic else b""
    body = struct.pack(">bB", magic, attributes) + stamp + field(key) + field(value) + tail
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body) if crc is None else crc) + body


def wrapper(offset: int, inner: bytes, *, codec: int = GZIP, attributes: int = 0, **fields: Any) -> bytes:
    return message(offset, None, CODECS[codec].compress(inner), attributes=attributes | codec, **fields)


def decode(data: bytes, limits: Limits = DEFAULT_LIMITS, **options: bool) -> LegacyBatch:
    return decode_legacy(data, limits=limits, **options)


def messages(data: bytes) -> Iterator[tuple[int, LegacyBatch]]:
    position = 0
    while position < len(data):
        batch = decode(data[position:], verify_inner_crc=True)
        yield position, batch
        position += batch.size_bytes


# --- Kafka's bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "magic", "times", "sizes"),
    [(V0_NONE, 0, (-1, -1), (30, 28)), (V1_NONE, 1, (T, T + 5), (38, 36))],
    ids=["v0", "v1"],
)
def test_plain_messages(data: bytes, magic: int, times: tuple[int, int], sizes: tuple[int, int]) -> None:
    (first_at, first), (second_at, second) = messages(data)
    assert (first_at, second_at) == (0, sizes[0])
    assert (first.size_bytes, second.size_bytes) == sizes
    assert first.records == (Record(b"k1", b"v1", times[0], (), 100, CREATE),)
    assert second.records == (Record(b"k2", None, times[1], (), 101, CREATE),)
    assert (second.magic, second.codec_id, second.timestamp_type) == (magic, 0, CREATE)
    assert (second.first_offset, second.last_offset, second.max_timestamp_ms) == (101, 101, times[1])
    assert second.crc == int.from_bytes(data[sizes[0] + 12 : sizes[0] + 16], "big")


@pytest.mark.parametrize(("data", "magic", "times"), [(V0_LZ4, 0, (-1, -1)), (V1_LZ4, 1, (T, T + 5))], ids=["v0", "v1"])
def test_wrappers_and_the_header_checksum_of_lz4_in_magic_0(data: bytes, magic: int, times: tuple[int, int]) -> None:
    batch = decode(data + b"whatever follows", verify_inner_crc=True)
    assert batch == LegacyBatch(
        size_bytes=len(data),
        magic=magic,
        codec_id=LZ4,
        timestamp_type=CREATE,
        first_offset=100,
        last_offset=101,
        max_timestamp_ms=times[1],
        crc=int.from_bytes(data[12:16], "big"),
        records=(Record(b"k1", b"v1", times[0], (), 100, CREATE), Record(b"k2", None, times[1], (), 101, CREATE)),
    )


def cases(stem: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / f"{stem}.json").read_text())["cases"]
    return found


LEGACY_CASES = {f"{stem}-{case['name']}": case for stem in ("batches_v0", "batches_v1") for case in cases(stem)}
FORMATS_DIRECTORY = next(case for case in cases("directories") if case["name"] == "formats-0")


def unpacked(data: Any) -> bytes | None:
    """A key or value of a vector: base64, null, or a repetition of one."""
    if isinstance(data, dict):
        piece, times = data["repeat"]
        return base64.b64decode(piece) * int(times)
    return None if data is None else base64.b64decode(data)


def read_by_kafka(batch: dict[str, Any]) -> LegacyBatch:
    kind = APPEND if batch["timestamp_type"] == "LogAppendTime" else CREATE
    return LegacyBatch(
        size_bytes=batch["size_bytes"],
        magic=batch["magic"],
        codec_id=codec_by_name(batch["codec"]).id,
        timestamp_type=kind,
        first_offset=batch["base_offset"],
        last_offset=batch["last_offset"],
        max_timestamp_ms=batch["max_timestamp_ms"],
        crc=batch["crc"],
        records=tuple(
            Record(unpacked(key), unpacked(value), timestamp_ms, (), offset, kind)
            for offset, timestamp_ms, key, value, _ in batch["records"]
        ),
    )


@pytest.mark.parametrize("case", LEGACY_CASES.values(), ids=LEGACY_CASES.keys())
def test_what_kafka_wrote_is_read_as_kafka_reads_it(case: dict[str, Any]) -> None:
    found = list(messages(bytes.fromhex(case["hex"])))
    assert found == [(batch["position"], read_by_kafka(batch)) for batch in case["batches"]]


def test_kafkas_cases_cover_every_codec_and_both_formats() -> None:
    seen = {(batch["magic"], batch["codec"]) for case in LEGACY_CASES.values() for batch in case["batches"]}
    assert seen == {(magic, codec) for magic in (0, 1) for codec in ("none", "gzip", "snappy", "lz4")}


@pytest.mark.parametrize("case", cases("upconverted"), ids=lambda case: case["name"])
def test_what_kafka_converts_to_batches_has_the_records_we_read(case: dict[str, Any]) -> None:
    ours = [record for _, batch in messages(bytes.fromhex(case["source_hex"])) for record in batch.records]
    kafkas = [record for batch in case["batches"] for record in batch["records"]]
    assert [(r.offset, r.key, r.value) for r in ours] == [(o, unpacked(k), unpacked(v)) for o, _, k, v, _ in kafkas]
    if not case["config"].get("message.timestamp.type"):
        assert [r.timestamp_ms for r in ours] == [timestamp_ms for _, timestamp_ms, *_ in kafkas]


def test_the_old_messages_of_a_directory_kafka_closed() -> None:
    magics = set()
    for name, batches in FORMATS_DIRECTORY["batches"].items():
        data = bytes.fromhex(FORMATS_DIRECTORY["files"][name])
        for batch in batches:
            if batch["magic"] < 2:
                assert decode(data[batch["position"] :], verify_inner_crc=True) == read_by_kafka(batch)
                magics.add(batch["magic"])
    assert magics == {0, 1}


# --- the header --------------------------------------------------------------------------------------------------


def test_the_timestamp_type_bit_means_nothing_in_magic_0() -> None:
    batch = decode(message(7, b"k", b"v", magic=0, attributes=LOG_APPEND_TIME))
    assert (batch.timestamp_type, batch.records[0].timestamp_type) == (CREATE, CREATE)
    assert batch.records[0].timestamp_ms == -1


@pytest.mark.parametrize("magic", [2, 3, -1])
def test_another_format_is_unsupported(magic: int) -> None:
    data = bytearray(V1_NONE)
    data[16] = magic & 0xFF
    with pytest.raises(UnsupportedFormat, match=str(magic)):
        decode(bytes(data))


@pytest.mark.parametrize("data", [V0_NONE[:30], V1_NONE[:38], V0_LZ4, V1_LZ4], ids=["v0", "v1", "v0-lz4", "v1-lz4"])
def test_a_message_cut_at_every_byte_is_corrupt(data: bytes) -> None:
    for cut in range(len(data)):
        with pytest.raises(CorruptBatch) as caught:
            decode(data[:cut])
        assert caught.value.position == 0
    for cut in range(26 if data[16] else 18):
        with pytest.raises(CorruptBatch, match="header"):
            decode(data[:cut])


@pytest.mark.parametrize(("magic", "least"), [(0, 14), (1, 22)])
@pytest.mark.parametrize("size", [-(2**31), -1, 0, 13, "one below"])
def test_a_size_below_the_formats_overhead_is_corrupt(magic: int, least: int, size: int | str) -> None:
    data = bytearray(message(5, None, None, magic=magic))
    assert struct.unpack_from(">i", data, 8) == (least,)
    struct.pack_into(">i", data, 8, least - 1 if isinstance(size, str) else size)
    with pytest.raises(CorruptBatch, match="size") as caught:
        decode(bytes(data))
    assert (caught.value.position, caught.value.offset) == (0, 5)


# --- one message -------------------------------------------------------------------------------------------------


def test_a_wrong_checksum_is_corrupt_unless_it_is_not_asked_for() -> None:
    data = message(9, b"k", b"v", crc=1)
    with pytest.raises(CorruptBatch, match="checksum 0x00000001") as caught:
        decode(data)
    assert (caught.value.position, caught.value.offset) == (0, 9)
    assert decode(data, verify_crc=False).records[0].value == b"v"


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("length", [-2, -(2**31), 2, 2**31 - 1])
def test_a_length_that_does_not_fit_is_corrupt(magic: int, length: int) -> None:
    for key_at in (True, False):
        data = bytearray(message(9, b"k", b"v", magic=magic))
        place = (26 if magic else 18) + (0 if key_at else 5)
        struct.pack_into(">i", data, place, length)
        with pytest.raises(CorruptBatch) as caught:
            decode(bytes(data), verify_crc=False)
        assert caught.value.offset == 9
        assert caught.value.position is not None
        assert caught.value.position >= place


def test_bytes_after_the_value_are_corrupt() -> None:
    with pytest.raises(CorruptBatch, match="3 bytes after"):
        decode(message(9, b"k", b"v", tail=b"abc"))


def test_negative_offsets_and_timestamps_are_corrupt() -> None:
    with pytest.raises(CorruptBatch, match="offset -1"):
        decode(message(-1, b"k", b"v"))
    with pytest.raises(CorruptBatch, match="timestamp -2"):
        decode(message(1, b"k", b"v", timestamp=-2))
    assert decode(message(1, b"k", b"v", timestamp=-1)).max_timestamp_ms == -1


def test_a_message_above_the_limit_is_not_decoded() -> None:
    data = message(9, b"k", bytes(1000))
    with pytest.raises(BufferLimit) as caught:
        decode(data, Limits(batch_bytes=len(data) - 1))
    assert caught.value.offset == 9
    assert decode(data, Limits(batch_bytes=len(data))).size_bytes == len(data)


# --- wrappers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("magic", "wrapper_offset", "last_inner", "base"),
    [
        (0, 101, 101, 0),
        (0, 0, 0, 0),
        (1, 101, 1, 100),
        (1, 101, 101, 0),
        (1, 107, 4, 103),  # compacted: the inner offsets have gaps
        (1, 0, 0, 0),
        (1, 0, 5, 0),  # never assigned by the client
        (1, 2**63 - 1, 0, 2**63 - 1),
    ],
)
def test_where_the_inner_offsets_count_from(magic: int, wrapper_offset: int, last_inner: int, base: int) -> None:
    assert absolute_base_offset(magic, wrapper_offset, last_inner) == base


def test_a_wrapper_offset_below_its_last_message_is_corrupt() -> None:
    inner = message(0, b"a", b"1") + message(5, b"b", b"2")
    with pytest.raises(CorruptBatch, match="below the offset 5") as caught:
        decode(wrapper(4, inner))
    assert caught.value.offset == 4
    assert [record.offset for record in decode(wrapper(5, inner)).records] == [0, 5]


def test_a_compacted_wrapper_keeps_its_gaps() -> None:
    inner = message(1, b"a", b"1") + message(3, b"b", b"2") + message(4, b"c", b"3")
    batch = decode(wrapper(44, inner))
    assert [record.offset for record in batch.records] == [41, 43, 44]
    assert (batch.first_offset, batch.last_offset) == (41, 44)


def test_a_wrapper_offset_that_was_never_assigned() -> None:
    inner = b"".join(message(i, b"k", b"%d" % i) for i in range(3))
    batch = decode(wrapper(0, inner))
    assert [record.offset for record in batch.records] == [0, 1, 2]
    assert (batch.first_offset, batch.last_offset) == (0, 0)


def test_absolute_offsets_of_magic_0_are_taken_as_they_are() -> None:
    inner = message(40, b"a", b"1", magic=0) + message(42, b"b", None, magic=0)
    batch = decode(wrapper(42, inner, magic=0))
    assert batch.records == (Record(b"a", b"1", -1, (), 40, CREATE), Record(b"b", None, -1, (), 42, CREATE))
    assert batch.max_timestamp_ms == -1


def test_log_append_time_is_the_wrappers() -> None:
    inner = message(0, b"a", b"1", timestamp=5) + message(1, b"b", b"2", timestamp=7)
    stamped = decode(wrapper(11, inner, attributes=LOG_APPEND_TIME, timestamp=99))
    assert [(r.timestamp_ms, r.timestamp_type) for r in stamped.records] == [(99, APPEND), (99, APPEND)]
    assert (stamped.timestamp_type, stamped.max_timestamp_ms) == (APPEND, 99)
    created = decode(wrapper(11, inner, timestamp=7))
    assert [(r.timestamp_ms, r.timestamp_type) for r in created.records] == [(5, CREATE), (7, CREATE)]


def test_messages_of_magic_0_inside_magic_1_have_no_time() -> None:
    batch = decode(wrapper(11, message(0, b"a", b"1", magic=0), attributes=LOG_APPEND_TIME, timestamp=99))
    assert [(r.offset, r.timestamp_ms) for r in batch.records] == [(11, -1)]


def test_a_wrappers_own_key_is_ignored() -> None:
    value = CODECS[GZIP].compress(message(0, b"a", b"1"))
    assert decode(message(3, b"odd", value, attributes=GZIP)).records[0].key == b"a"


def test_inner_checksums_are_verified_on_request() -> None:
    data = wrapper(1, message(0, b"a", b"1") + message(1, b"b", b"2", crc=5))
    assert len(decode(data).records) == 2
    with pytest.raises(CorruptBatch, match=r"checksum 0x00000005.*byte 36 of the decompressed") as caught:
        decode(data, verify_inner_crc=True)
    assert (caught.value.position, caught.value.offset) == (34, 1)


BROKEN_WRAPPERS = {
    "compressed message inside": (wrapper(1, wrapper(1, message(0, b"k", b"v"))), "inside a compressed"),
    "no value": (message(1, None, None, attributes=GZIP), "without a value"),
    "empty value": (message(1, None, b"", attributes=GZIP), "gzip"),
    "no messages": (wrapper(1, b""), "no messages"),
    "zstd in magic 0": (wrapper(1, message(1, b"k", b"v", magic=0), codec=ZSTD, magic=0), "zstd"),
    "zstd in magic 1": (wrapper(1, message(0, b"k", b"v"), codec=ZSTD), "zstd"),
    "not compressed": (message(1, None, message(0, b"k", b"v"), attributes=GZIP), "gzip"),
    "the wrong codec": (message(1, None, gzip.compress(message(0, b"k", b"v")), attributes=LZ4), "lz4"),
    "a message cut short": (wrapper(1, message(0, b"k", b"v")[:-1]), "bytes where"),
    "a header cut short": (wrapper(1, message(0, b"k", b"v") + bytes(5)), "header"),
    "zeros after the messages": (wrapper(1, message(0, b"k", b"v") + bytes(40)), "size 0"),
    "a batch of magic 2 inside": (wrapper(1, message(0, b"k", b"v", magic=2)), "format 2"),
    "offsets that stand still": (wrapper(1, message(0, b"k", b"v") * 2), "offset 0 follows 0"),
    "offsets that fall": (wrapper(1, message(1, b"k", b"v") + message(0, b"k", b"v")), "offset 0 follows 1"),
    "a negative inner offset": (wrapper(1, message(-3, b"k", b"v")), "offset -3"),
    "a negative inner timestamp": (wrapper(1, message(0, b"k", b"v", timestamp=-9)), "timestamp -9"),
}


@pytest.mark.parametrize(("data", "what"), BROKEN_WRAPPERS.values(), ids=BROKEN_WRAPPERS.keys())
def test_a_broken_wrapper_is_corrupt(data: bytes, what: str) -> None:
    with pytest.raises(CorruptBatch, match=what) as caught:
        decode(data)
    assert caught.value.offset == 1
    assert caught.value.position is not None
    assert caught.value.position >= (34 if data[16] else 26)


@pytest.mark.parametrize("codec_id", [5, 6, 7])
def test_a_codec_without_meaning_is_unsupported(codec_id: int) -> None:
    with pytest.raises(UnsupportedFormat, match=str(codec_id)) as caught:
        decode(message(8, None, b"value", attributes=codec_id))
    assert (caught.value.position, caught.value.offset) == (34, 8)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_a_wrapper_that_grows_beyond_the_limit_is_refused(codec: int) -> None:
    data = wrapper(8, message(0, b"k", bytes(3 * MIB)), codec=codec)
    with pytest.raises(DecompressionLimit, match=str(2 * MIB)) as caught:
        decode(data, Limits(decompressed_bytes=2 * MIB))
    assert caught.value.offset == 8
    assert len(decode(data).records[0].value or b"") == 3 * MIB


# --- properties --------------------------------------------------------------------------------------------------

fields = st.none() | st.binary(max_size=40)
contents = st.lists(st.tuples(fields, fields, st.integers(-1, 2**62), st.integers(1, 5)), min_size=1, max_size=12)


@given(
    rows=contents,
    magic=st.sampled_from([0, 1]),
    codec=st.sampled_from([0, GZIP, SNAPPY, LZ4]),
    stamped=st.booleans(),
    base=st.integers(0, 2**62),
)
def test_what_is_laid_out_by_the_rules_is_read_back(
    rows: list[tuple[bytes | None, bytes | None, int, int]], magic: int, codec: int, stamped: bool, base: int
) -> None:
    attributes = LOG_APPEND_TIME if stamped and magic else 0
    kind = APPEND if attributes else CREATE
    append_time = 2**62
    relative, expected, inner = -1, [], []
    for key, value, timestamp, step in rows:
        relative += step
        stored = relative if magic and codec else base + relative
        own_time = append_time if attributes and not codec else timestamp
        inner.append(
            message(stored, key, value, magic=magic, timestamp=own_time, attributes=0 if codec else attributes)
        )
        seen = (append_time if attributes else timestamp) if magic else -1
        expected.append(Record(key, value, seen, (), base + relative, kind))
    if codec and (base + relative or not magic):
        top = append_time if attributes else max(timestamp for _, _, timestamp, _ in rows)
        data = wrapper(base + relative, b"".join(inner), codec=codec, magic=magic, attributes=attributes, timestamp=top)
        batch = decode(data, verify_inner_crc=True)
        assert batch.records == tuple(expected)
        assert (batch.first_offset, batch.last_offset) == (expected[0].offset, expected[-1].offset)
        assert batch.max_timestamp_ms == (top if magic else -1)
    elif not codec:
        assert [record for _, batch in messages(b"".join(inner)) for record in batch.records] == expected


SAMPLE_BYTES = [
    bytes.fromhex(case["hex"])[: case["batches"][0]["size_bytes"]]
    for case in LEGACY_CASES.values()
    if case["batches"][0]["size_bytes"] < 1000
]
SAMPLE_BYTES += [V0_LZ4, V1_LZ4, *(data for data, _ in BROKEN_WRAPPERS.values())]
TIGHT = Limits(batch_bytes=MIB, decompressed_bytes=MIB)
REFUSALS = (CorruptBatch, UnsupportedFormat, DecompressionLimit, BufferLimit)


def outcome(data: bytes, **options: bool) -> LegacyBatch | DuramenError:
    try:
        return decode(data, TIGHT, **options)
    except REFUSALS as error:
        return error


@given(data=st.data(), sample=st.sampled_from(SAMPLE_BYTES))
def test_flipped_bits_are_refused_or_change_nothing(data: st.DataObject, sample: bytes) -> None:
    damaged = bytearray(sample)
    # The offset in front is not covered by the checksum.
    flips = st.tuples(st.integers(8, len(damaged) - 1), st.integers(0, 7))
    for place, bit in data.draw(st.lists(flips, min_size=1, max_size=5)):
        damaged[place] ^= 1 << bit
    before, after = outcome(sample), outcome(bytes(damaged))
    if isinstance(after, LegacyBatch):
        assert after == before
    else:
        assert after.position is not None
        assert 0 <= after.position <= len(sample)


@given(
    data=st.data(),
    sample=st.sampled_from(SAMPLE_BYTES),
    piece=st.binary(max_size=10) | st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80" + bytes(3), bytes(8)]),
    verify_inner_crc=st.booleans(),
)
def test_forged_messages_with_a_right_checksum_are_refused_or_consistent(
    data: st.DataObject, sample: bytes, piece: bytes, verify_inner_crc: bool
) -> None:
    start = data.draw(st.integers(17, len(sample)))
    end = data.draw(st.integers(start, min(len(sample), start + 10)))
    forged = bytearray(sample[:start] + piece + sample[end:])
    struct.pack_into(">i", forged, 8, len(forged) - 12)
    struct.pack_into(">I", forged, 12, zlib.crc32(forged[16:]))
    after = outcome(bytes(forged), verify_inner_crc=verify_inner_crc)
    if isinstance(after, LegacyBatch):
        offsets = [record.offset for record in after.records]
        assert offsets == sorted(set(offsets))
        assert after.first_offset == offsets[0] >= 0
        assert all(record.timestamp_ms >= -1 for record in after.records)
        assert after.size_bytes == len(forged)


@given(
    inner=st.binary(max_size=120),
    magic=st.sampled_from([0, 1]),
    codec=st.sampled_from([GZIP, SNAPPY, LZ4]),
    whole=st.booleans(),
)
def test_noise_inside_a_wrapper_is_corrupt(inner: bytes, magic: int, codec: int, whole: bool) -> None:
    good = message(0, b"k", b"v", magic=magic) if whole else b""
    after = outcome(wrapper(1, good + inner, codec=codec, magic=magic))
    if isinstance(after, LegacyBatch):
        assert sum(26 + 8 * magic + len(r.key or b"") + len(r.value or b"") for r in after.records) == len(good + inner)
    else:
        assert isinstance(after, CorruptBatch)


@given(noise=st.binary(max_size=200), verify_crc=st.booleans())
def test_noise_is_refused_or_read_within_its_bounds(noise: bytes, verify_crc: bool) -> None:
    after = outcome(noise, verify_crc=verify_crc)
    if isinstance(after, LegacyBatch):
        assert after.size_bytes <= len(noise)


def test_every_way_to_refuse_names_a_place() -> None:
    for data, _ in BROKEN_WRAPPERS.values():
        after = outcome(data)
        assert isinstance(after, CorruptBatch)
        assert f"offset {after.offset}" in str(after)
        assert f"position {after.position}" in str(after)


@pytest.mark.parametrize("messages", [2000, 40_000])
def test_a_wrapper_of_tiny_messages_takes_no_more_memory_than_its_limit(messages: int) -> None:
    """Its limit counts 512 bytes a message, so 40,000 are refused before anything is kept of the first."""
    body = struct.pack(">bBii", 0, 0, -1, -1)
    rest = struct.pack(">iI", len(body) + 4, zlib.crc32(body)) + body
    inner = b"".join(struct.pack(">q", offset) + rest for offset in range(messages))
    value = gzip.compress(inner)
    wrapper = struct.pack(">bBii", 0, 1, -1, len(value)) + value
    data = struct.pack(">qiI", messages - 1, len(wrapper) + 4, zlib.crc32(wrapper)) + wrapper
    limits = Limits(decompressed_bytes=2 * MIB)
    tracemalloc.start()
    try:
        if messages * 512 > limits.decompressed_bytes:
            with pytest.raises(DecompressionLimit, match="more than 4096 messages"):
                decode_legacy(data, limits=limits)
        else:
            assert len(decode_legacy(data, limits=limits).records) == messages
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limits.decompressed_bytes + 2 * len(inner)
