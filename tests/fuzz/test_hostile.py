"""Hostile bytes in every format: a typed error that says where, or exactly what the bytes mean; bounded memory always.

Batches are built field by field with values nobody sane writes and a checksum that holds, and read against a plain
reader of the format written here from its description. Side files are damaged at random; files of absurd sizes and
payloads that explode are refused before anything is allocated for them.
"""

from __future__ import annotations

import itertools
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from fuzz.directories import NOW_MS, PARTITION, open_log, sound
from fuzz.mutation import WORDS, mutate
from fuzz.targets import FILE, Target, all_targets, vectors
from logstore.config import LogConfig
from logstore.directory.checkpoint import read_meta_properties, read_offset_checkpoint, read_partition_metadata
from logstore.directory.ends import read_ends
from logstore.directory.state import read_state
from logstore.errors import (
    CorruptBatch,
    CorruptCheckpoint,
    CorruptIndex,
    CorruptSnapshot,
    CorruptState,
    DecompressionLimit,
    DuramenError,
)
from logstore.files import OS_FILES
from logstore.limits import MIB, Limits
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.snapshot import read_snapshot
from logstore.records.compression import CODECS
from logstore.records.control import parse_control_record
from logstore.records.iterate import iter_records
from logstore.records.legacy import decode_legacy
from logstore.records.record import Record, TimestampType
from logstore.segment.offset_index import OffsetIndex
from logstore.segment.segment import LogSegment
from logstore.segment.time_index import TimeIndex
from logstore.segment.txn_index import TxnIndex
from reference.partition_writer import PartitionWriter

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
LIMITS = Limits(batch_bytes=1 * MIB, decompressed_bytes=MIB // 4, read_buffer_bytes=1 * MIB, side_file_bytes=1 * MIB)
HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_FIELDS = [
    "base_offset",
    "batch_length",
    "leader_epoch",
    "magic",
    "crc",
    "attributes",
    "last_offset_delta",
    "base_timestamp",
    "max_timestamp",
    "producer_id",
    "producer_epoch",
    "base_sequence",
    "count",
]

EDGES = [0, 1, -1, 2, 7, 48, 49, 61, 127, 128, -128, 255, 256, 32767, -32768, 65535]
EDGES += [sign * (1 << bits) + more for bits in (31, 32, 62) for sign in (1, -1) for more in (-1, 0, 1)]
EDGES += [(1 << 63) - 1, (1 << 63) - 2, -(1 << 63)]
edges = st.one_of(st.sampled_from(EDGES), st.integers(-300, 300), st.integers(-(1 << 63), (1 << 63) - 1))


def wrapped(number: int, bits: int) -> int:
    """`number` as an integer of so many bits takes it."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def check_place(error: DuramenError, first: int, last: int, *, file: str | None = FILE) -> None:
    """The error knows its file and a position of [first, last]."""
    assert error.file == file
    assert error.position is not None
    assert first <= error.position <= last


# --- a plain reader of format 2, from its description -----------------------------------------------------------------


class Malformed(Exception):
    pass


class Reading:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size < 0 or size > len(self.data) - self.at:
            raise Malformed
        self.at += size
        return self.data[self.at - size : self.at]

    def varint(self, bits: int) -> int:
        value = 0
        for number in range(5 if bits == 32 else 10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * number)
            if byte < 0x80:
                value &= (1 << bits) - 1
                return (value >> 1) ^ -(value & 1)
        raise Malformed

    def field(self) -> bytes | None:
        length = self.varint(32)
        return None if length < 0 else self.take(length)


def plain_records(batch: bytes) -> list[Record] | None:
    """The records of one batch with a sound checksum; None when it is cut off. Raises Malformed."""
    base, length, _, magic, _, attributes, delta, base_ts, max_ts, _, _, _, count = HEADER.unpack_from(batch)
    if length < 14 or magic != 2 or length + 12 < HEADER.size:
        raise Malformed
    if length + 12 > len(batch):
        return None
    if base < 0 or delta < 0 or base + delta >= (1 << 63) - 1 or count < 0 or attributes & 7 >= len(CODECS):
        raise Malformed
    payload = batch[HEADER.size : 12 + length]
    codec_id = attributes & 7
    if codec_id and (payload or count):
        try:
            payload = CODECS[codec_id].decompress(payload, limit=LIMITS.decompressed_bytes)
        except DuramenError:
            raise Malformed from None
    reading, previous, records = Reading(payload), -1, []
    if count * 7 > len(payload):
        raise Malformed
    for _ in range(count):
        size = reading.varint(32)
        body = Reading(reading.take(size))
        body.take(1)
        timestamp_delta, offset_delta = body.varint(64), body.varint(32)
        key, value = body.field(), body.field()
        headers = []
        header_count = body.varint(32)
        if header_count < 0:
            raise Malformed
        for _ in range(header_count):
            name = body.field()
            if name is None:
                raise Malformed
            headers.append((name.decode("utf-8", "replace"), body.field()))
        if body.at != size or not previous < offset_delta <= delta:
            raise Malformed
        previous = offset_delta
        append_time = bool(attributes & 8)
        timestamp = max_ts if append_time else wrapped(base_ts + timestamp_delta, 64)
        kind = TimestampType.LOG_APPEND_TIME if append_time else TimestampType.CREATE_TIME
        records.append(Record(key, value, timestamp, tuple(headers), base + offset_delta, kind))
    if reading.at != len(payload):
        raise Malformed
    return records


# --- batches of format 2 with hostile fields --------------------------------------------------------------------------


def varint(value: int) -> bytes:
    bits = ((value << 1) ^ (value >> 63)) & ((1 << 64) - 1)
    out = bytearray()
    while bits > 0x7F:
        out.append(bits & 0x7F | 0x80)
        bits >>= 7
    return bytes((*out, bits))


@st.composite
def numbers(draw: st.DrawFn, right: int) -> bytes:
    """The varint of `right`; now and then of something else, or one that never ends."""
    how = draw(st.integers(0, 19))
    if how == 0:
        return varint(draw(edges))
    if how == 1:
        return b"\xff" * draw(st.integers(1, 11))
    return varint(right)


@st.composite
def hostile_records(draw: st.DrawFn, number: int) -> bytes:
    def field(value: bytes | None) -> bytes:
        return draw(numbers(-1 if value is None else len(value))) + (value or b"")

    content = st.none() | st.binary(max_size=12)
    headers = draw(st.lists(st.tuples(st.binary(max_size=4), content), max_size=3))
    body = bytes((draw(st.sampled_from([0, 0, 0, 255])),)) + draw(numbers(number)) + draw(numbers(number))
    body += field(draw(content)) + field(draw(content)) + draw(numbers(len(headers)))
    for name, value in headers:
        body += field(name) + field(value)
    body += draw(st.sampled_from([b"", b"", b"", b"", b"\0"]))
    return draw(numbers(len(body))) + body


@st.composite
def hostile_batches(draw: st.DrawFn) -> bytes:
    """One batch, sound but for what was drawn; the checksum always holds."""
    count = draw(st.integers(0, 5))
    payload = b"".join(draw(hostile_records(number)) for number in range(count))
    codec_id = draw(st.sampled_from([0, 0, 0, GZIP, SNAPPY, LZ4, ZSTD, 5, 7]))
    if codec_id in range(1, 5) and draw(st.integers(0, 5)):
        payload = CODECS[codec_id].compress(payload)
    last_delta = max(count - 1, 0)
    fields = [100, HEADER.size + len(payload) - 12, 0, 2, 0, codec_id, last_delta, NOW_MS, NOW_MS, -1, -1, -1, count]
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        fields[draw(st.integers(0, len(fields) - 1))] = draw(edges)
    widths = (64, 32, 32, 8, 0, 16, 32, 64, 64, 64, 16, 32, 32)
    packed = [wrapped(value, bits) if bits else 0 for value, bits in zip(fields, widths, strict=True)]
    batch = bytearray(HEADER.pack(*packed) + payload)
    end = min(max(packed[1] + 12, HEADER.size), len(batch))
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:end]))
    return bytes(batch[:end] if packed[1] + 12 <= len(batch) else batch)


@given(batch=hostile_batches())
def test_a_batch_of_hostile_fields_is_refused_or_means_what_it_says(batch: bytes) -> None:
    try:
        expected = plain_records(batch)
    except Malformed:
        with pytest.raises(DuramenError) as caught:
            list(iter_records(batch, limits=LIMITS, control=True, file=FILE))
        assert caught.value.file == FILE
        assert caught.value.position == 0
        return
    assert list(iter_records(batch, limits=LIMITS, control=True, file=FILE)) == (expected or [])


@pytest.mark.parametrize("field", [name for name in HEADER_FIELDS if name != "crc"])
@given(value=edges, codec_id=st.sampled_from([0, GZIP, SNAPPY, LZ4, ZSTD]))
def test_each_header_field_with_each_hostile_value(field: str, value: int, codec_id: int) -> None:
    at = HEADER_FIELDS.index(field)
    batch = bytearray(_three_records(codec_id))
    fields = list(HEADER.unpack_from(batch))
    bits = 8 * struct.calcsize(">" + "qiibIhiqqqhii"[at])
    fields[at] = wrapped(value, bits)
    HEADER.pack_into(batch, 0, *fields)
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    length = fields[1]
    end = min(max(length + 12, HEADER.size), len(batch))
    if length + 12 < len(batch):  # the checksum of the batch as it now ends
        struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:end]))
    batch = batch[:end]
    try:
        expected = plain_records(bytes(batch))
    except Malformed:
        with pytest.raises(DuramenError) as caught:
            list(iter_records(batch, limits=LIMITS, control=True, file=FILE))
        assert caught.value.where()["file"] == FILE
        assert caught.value.position == 0
    else:
        assert list(iter_records(batch, limits=LIMITS, control=True, file=FILE)) == (expected or [])


@cache
def _three_records(codec_id: int) -> bytes:
    body = b"".join(
        varint(len(record)) + record
        for record in (
            b"\0" + varint(i) + varint(i) + varint(2) + b"k%d" % i + varint(5) + b"value" + varint(1) + b"\2h\2x"
            for i in range(3)
        )
    )
    payload = CODECS[codec_id].compress(body)
    fields = (100, HEADER.size + len(payload) - 12, 0, 2, 0, codec_id, 2, NOW_MS, NOW_MS + 2, -1, -1, -1, 3)
    return HEADER.pack(*fields) + payload


@given(batches=st.lists(hostile_batches(), min_size=1, max_size=2))
def test_damage_behind_sound_batches_is_found_at_its_place(batches: list[bytes]) -> None:
    """What lies in front of the damage is delivered; the error has the position and the offset it happened at."""
    good = _three_records(0)
    good = good[:17] + struct.pack(">I", crc32c(good[21:])) + good[21:]
    data = good + b"".join(batches)
    got: list[Record] = []
    try:
        for record in iter_records(data, limits=LIMITS, control=True, file=FILE):
            got.append(record)
    except DuramenError as error:
        check_place(error, len(good), len(data) - 1)
        assert error.offset is not None  # noqa: PT017 (there may be none)
    assert [record.offset for record in got[:3]] == [100, 101, 102][: len(got)]


# --- messages of the old formats --------------------------------------------------------------------------------------


@st.composite
def hostile_messages(draw: st.DrawFn, offset: int, magic: int, *, wrapper: bool) -> bytes:
    """One message; a checksum that holds, and most other fields that do."""

    def number(right: int, bits: int) -> int:
        return wrapped(draw(edges) if draw(st.integers(0, 24)) == 0 else right, bits)

    def field(value: bytes | None) -> bytes:
        return struct.pack(">i", number(-1 if value is None else len(value), 32)) + (value or b"")

    key = draw(st.none() | st.binary(max_size=8))
    value = draw(st.none() | st.binary(max_size=20))
    codec_id = 0
    if wrapper:
        codec_id = draw(st.sampled_from([GZIP, SNAPPY, LZ4, LZ4, ZSTD, 6]))
        first = 0 if magic else offset
        count = draw(st.integers(0, 3))
        inner = b"".join(draw(hostile_messages(first + i, magic, wrapper=False)) for i in range(count))
        value = CODECS[codec_id].compress(inner) if codec_id < 5 else inner
    attributes = number(codec_id | draw(st.sampled_from([0, 0, 8])), 8)
    body = struct.pack(">bb", number(magic, 8), attributes)
    if magic:
        body += struct.pack(">q", number(NOW_MS, 64))
    body += field(key) + field(value)
    size = number(len(body) + 4, 32)
    return struct.pack(">qiI", number(offset, 64), size, zlib.crc32(body)) + body


@given(data=st.data(), magic=st.sampled_from([0, 1]), wrapper=st.booleans())
def test_old_messages_with_hostile_fields_are_refused_or_make_sense(
    data: st.DataObject, magic: int, wrapper: bool
) -> None:
    message = data.draw(hostile_messages(7, magic, wrapper=wrapper))
    try:
        batch = decode_legacy(message, limits=LIMITS)
    except DuramenError as error:
        check_place(error, 0, len(message), file=None)
    else:
        offsets = [record.offset for record in batch.records]
        assert offsets
        assert offsets == sorted(set(offsets))
        assert min(offsets) >= 0
        assert batch.size_bytes <= len(message)
    previous = -1
    try:
        for record in iter_records(message, limits=LIMITS, file=FILE):
            assert record.offset > previous
            previous = record.offset
    except DuramenError as error:
        check_place(error, 0, len(message))


# --- control records --------------------------------------------------------------------------------------------------


@given(key=st.none() | st.binary(max_size=8), value=st.none() | st.binary(max_size=10))
def test_control_records_are_parsed_or_refused_with_their_offset(key: bytes | None, value: bytes | None) -> None:
    record = Record(key, value, offset=42)
    sound_key = key is not None and len(key) >= 4 and key[0] < 0x80
    kind = int.from_bytes(key[2:4], "big", signed=True) if sound_key and key is not None else None
    sound_value = kind not in (0, 1) or (value is not None and len(value) >= 6 and value[0] < 0x80)
    if sound_key and sound_value:
        parsed = parse_control_record(record)
        assert parsed.kind == (kind if kind in range(7) else -1)
        if kind in (0, 1) and value is not None:
            assert parsed.coordinator_epoch == int.from_bytes(value[2:6], "big", signed=True)
    else:
        with pytest.raises(CorruptBatch) as caught:
            parse_control_record(record)
        assert caught.value.offset == 42


@given(
    key=st.one_of(st.none(), st.binary(max_size=6), st.sampled_from([b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\2"])),
    value=st.one_of(st.none(), st.binary(max_size=8), st.just(b"\0\0\0\0\0\5")),
    codec_id=st.sampled_from([0, 0, ZSTD, 6]),
    count=st.sampled_from([1, 1, 1, 0, 2, -1, 1 << 30]),
)
def test_hostile_markers_are_refused_or_the_log_stays_sound(
    key: bytes | None, value: bytes | None, codec_id: int, count: int
) -> None:
    body = b"\0\0\0" + (varint(-1) if key is None else varint(len(key)) + key)
    body += (varint(-1) if value is None else varint(len(value)) + value) + b"\0"
    payload = varint(len(body)) + body
    if codec_id in range(1, 5):
        payload = CODECS[codec_id].compress(payload)
    base = sound("transactions-0")
    attributes = 0x30 | codec_id
    fields = (base.log_end_offset, HEADER.size + len(payload) - 12, 6, 2, 0, attributes, 0, NOW_MS, NOW_MS, 2, 0, -1)
    marker = bytearray(HEADER.pack(*fields, count) + payload)
    struct.pack_into(">I", marker, 17, crc32c(memoryview(marker)[21:]))
    from fuzz.directories import on_disk

    for origin in (AppendOrigin.REPLICATION, AppendOrigin.COORDINATOR):
        with on_disk(base.files) as root, open_log(root, base.config, clean=True) as log:
            try:
                log.append_batches(bytes(marker), origin=origin)
            except DuramenError:
                assert log.log_end_offset == base.log_end_offset
            assert {record.offset: record for record in log.records()} == base.records
            log.close()
            with open_log(root, base.config, clean=False) as again:
                assert not again.recovery.found_damage
                assert again.log_end_offset == log.log_end_offset


# --- payloads that explode --------------------------------------------------------------------------------------------


@contextmanager
def memory_within(limit_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= limit_bytes
    finally:
        tracemalloc.stop()


#: an LZ4 block may have 4 MiB whatever it holds, and one is decompressed at a time
BOMB_MEMORY_BYTES = 16 * MIB


@cache
def zeros(codec_id: int, size: int, pieces: int) -> bytes:
    """`size` zeros, compressed; in `pieces` frames or members end to end where the format has such."""
    if pieces > 1 and codec_id in (GZIP, SNAPPY, ZSTD):
        return CODECS[codec_id].compress(bytes(-(-size // pieces))) * pieces
    return CODECS[codec_id].compress(bytes(size))


@cache
def bomb(codec_id: int, size: int, pieces: int, count: int) -> bytes:
    payload = zeros(codec_id, size, pieces)
    fields = (5, HEADER.size + len(payload) - 12, 0, 2, 0, codec_id, max(count - 1, 0), NOW_MS, NOW_MS, -1, -1, -1)
    batch = bytearray(HEADER.pack(*fields, count) + payload)
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    return bytes(batch)


sizes = st.sampled_from([LIMITS.decompressed_bytes + 1, 1 * MIB, 5 * MIB, 16 * MIB])


@pytest.mark.parametrize("codec_id", [GZIP, SNAPPY, LZ4, ZSTD])
@given(size=sizes, pieces=st.sampled_from([1, 3, 64]), count=st.sampled_from([0, 1, 3, 1 << 30, (1 << 31) - 1]))
def test_a_bomb_in_a_batch_is_refused_within_the_limit(codec_id: int, size: int, pieces: int, count: int) -> None:
    batch = bomb(codec_id, size, pieces, count)
    with memory_within(BOMB_MEMORY_BYTES), pytest.raises(DecompressionLimit) as caught:
        list(iter_records(batch, limits=LIMITS, file=FILE))
    assert caught.value.where() == {"file": FILE, "position": 0, "offset": 5}


@pytest.mark.parametrize("codec_id", [GZIP, SNAPPY, LZ4])
@given(size=sizes, magic=st.sampled_from([0, 1]), pieces=st.sampled_from([1, 3]))
def test_a_bomb_in_a_wrapper_is_refused_within_the_limit(codec_id: int, size: int, magic: int, pieces: int) -> None:
    value = zeros(codec_id, size, pieces)
    body = struct.pack(">bb", magic, codec_id) + (struct.pack(">q", NOW_MS) if magic else b"")
    body += struct.pack(">ii", -1, len(value)) + value
    message = struct.pack(">qiI", 9, len(body) + 4, zlib.crc32(body)) + body
    with memory_within(BOMB_MEMORY_BYTES), pytest.raises(DecompressionLimit) as caught:
        decode_legacy(message, limits=LIMITS)
    assert caught.value.offset == 9
    with memory_within(BOMB_MEMORY_BYTES), pytest.raises(DecompressionLimit) as caught:
        list(iter_records(message, limits=LIMITS, file=FILE))
    assert caught.value.where() == {"file": FILE, "position": 0, "offset": 9}


def test_a_wrapper_of_very_many_small_messages_is_refused() -> None:
    """26 bytes each, but objects of many times that: the limit is on what they take."""
    message = struct.Struct(">qiIbbii")
    count = LIMITS.decompressed_bytes // message.size
    inner = b"".join(message.pack(i, message.size - 12, 0, 0, 0, -1, -1) for i in range(count))
    value = CODECS[GZIP].compress(inner)
    body = struct.pack(">bbii", 0, GZIP, -1, len(value)) + value
    wrapper = struct.pack(">qiI", count - 1, len(body) + 4, zlib.crc32(body)) + body
    with memory_within(4 * LIMITS.decompressed_bytes), pytest.raises(DecompressionLimit) as caught:
        decode_legacy(wrapper, limits=LIMITS)
    assert caught.value.offset == count - 1


def test_very_many_small_records_become_objects_a_few_at_a_time() -> None:
    limits = Limits(decompressed_bytes=2 * MIB)
    count = limits.decompressed_bytes // 16
    records = b"".join(
        varint(len(body)) + body
        for body in (b"\0\0" + varint(i) + varint(-1) + varint(-1) + b"\0" for i in range(count))
    )
    payload = CODECS[ZSTD].compress(records)
    fields = (0, HEADER.size + len(payload) - 12, 0, 2, 0, ZSTD, count - 1, NOW_MS, NOW_MS, -1, -1, -1, count)
    batch = bytearray(HEADER.pack(*fields) + payload)
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    with memory_within(8 * limits.decompressed_bytes):
        assert sum(1 for _ in iter_records(batch, limits=limits)) == count


def test_a_record_of_nothing_but_headers_is_refused_as_an_object(tmp_path: Path) -> None:
    count = (1 << 20) + 1
    body = b"\0\0\0" + varint(-1) + varint(-1) + varint(count) + b"\0\1" * count
    payload = varint(len(body)) + body
    fields = (3, HEADER.size + len(payload) - 12, 0, 2, 0, 0, 0, NOW_MS, NOW_MS, -1, -1, -1, 1)
    batch = bytearray(HEADER.pack(*fields) + payload)
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    with memory_within(64 * MIB), pytest.raises(DuramenError, match="headers") as caught:
        list(iter_records(batch, file=FILE))
    assert caught.value.offset == 3


@pytest.mark.parametrize("codec_id", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_bomb_is_refused_by_an_append_and_by_readers_of_a_log_that_has_one(codec_id: int, tmp_path: Path) -> None:
    batch = bytearray(bomb(codec_id, 5 * MIB, 1, 1))
    batch[:8] = bytes(8)

    def opened(name: str, limits: Limits) -> PartitionWriter:
        config = LogConfig.from_mapping({"max.message.bytes": str(4 * MIB)})
        return PartitionWriter.open(
            str(tmp_path / name), partition=PARTITION, config=config, clean=True, limits=limits, long_lived=False
        )

    with opened("a", LIMITS) as log:
        with memory_within(BOMB_MEMORY_BYTES), pytest.raises(DecompressionLimit):
            log.append_batches(bytes(batch))
        assert log.log_end_offset == log.size_bytes == 0
        log.append_batches(bytes(batch), origin=AppendOrigin.REPLICATION)  # whose batches are not opened
        with memory_within(BOMB_MEMORY_BYTES), pytest.raises(DecompressionLimit) as caught:
            list(log.records())
        assert caught.value.file == log.segments[0].log.path
        assert (caught.value.position, caught.value.offset) == (0, 0)
        with memory_within(BOMB_MEMORY_BYTES), pytest.raises(DecompressionLimit):
            log.offset_for_timestamp(0)


# --- side files -------------------------------------------------------------------------------------------------------

SIDE_FILES = [
    "offset-index",
    "time-index",
    "txn-index",
    "snapshot",
    "state",
    "ends",
    "topic",
    "offset-checkpoint",
    "leader-epochs",
    "partition-metadata",
    "meta-properties",
]
CODEC_TARGETS = ["gzip", "snappy", "lz4", "lz4-v0", "zstd"]


@cache
def target(name: str) -> Target:
    return next(each for each in all_targets() if each.name == name)


@pytest.mark.parametrize("name", [*SIDE_FILES, *CODEC_TARGETS, "control", "legacy", "records", "kernels", "compaction"])
@given(data=st.data())
def test_damaged_input_gives_a_plausible_result_or_a_typed_error(name: str, data: st.DataObject) -> None:
    words = st.lists(st.integers(0, (1 << 32) - 1), min_size=WORDS, max_size=WORDS)
    mutants = words.map(lambda drawn: bytes(mutate(target(name), drawn)))
    target(name).run(data.draw(st.one_of(mutants, mutants, st.binary(max_size=120))))


HUGE_BYTES = 1 << 36  # sparse: it takes no room

READERS: dict[str, tuple[Callable[[str], object], type[DuramenError]]] = {
    "snapshot": (lambda path: read_snapshot(OS_FILES, path), CorruptSnapshot),
    "state": (lambda path: read_state(OS_FILES, path), CorruptState),
    "ends": (lambda path: read_ends(OS_FILES, path, partitions=1), CorruptState),
    "offset checkpoint": (lambda path: read_offset_checkpoint(OS_FILES, path), CorruptCheckpoint),
    "partition metadata": (lambda path: read_partition_metadata(OS_FILES, path), CorruptCheckpoint),
    "meta properties": (lambda path: read_meta_properties(OS_FILES, path), CorruptCheckpoint),
    "leader epochs": (lambda path: LeaderEpochs.load(OS_FILES, os.path.dirname(path)), CorruptCheckpoint),
    "log": (lambda path: LogSegment(OS_FILES, os.path.dirname(path), 0), CorruptBatch),
    "transaction index": (lambda path: TxnIndex(OS_FILES, path, 0, writable=False).sanity_check(), CorruptIndex),
    "offset index": (lambda path: OffsetIndex(OS_FILES, path, 0, 1, writable=True).sanity_check(MIB), CorruptIndex),
    "time index": (lambda path: TimeIndex(OS_FILES, path, 0, 1, writable=True).sanity_check(), CorruptIndex),
}
FILE_NAMES = {"leader epochs": "leader-epoch-checkpoint", "log": "00000000000000000000.log"}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_absurd_size_is_refused_unread(kind: str, tmp_path: Path) -> None:
    read, error = READERS[kind]
    path = tmp_path / FILE_NAMES.get(kind, "file")
    with path.open("wb") as file:
        try:
            file.truncate(HUGE_BYTES)
        except OSError:
            pytest.skip("this file system has no sparse files of 64 GiB")
    with memory_within(2 * MIB), pytest.raises(error) as caught:
        read(str(path))
    assert caught.value.file == str(path)


def test_an_index_of_absurd_size_is_a_hint_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000.index"
    with path.open("wb") as file:
        file.write(struct.pack(">ii", 5, 100))
        file.truncate(HUGE_BYTES)
    with memory_within(2 * MIB):
        index = OffsetIndex(OS_FILES, str(path), 0, 1)
        assert index.entries == 1
        assert index.lookup(7).position == 100


# --- what the format cannot show --------------------------------------------------------------------------------------


def test_only_the_offset_and_the_epoch_of_a_batch_can_change_unnoticed() -> None:
    """Every single bit of a batch, flipped: an error, unless it lies in a field no checksum covers."""
    batch = next(iter(vectors(2)))
    original = list(iter_records(batch))
    unnoticed = set()
    for bit in range(8 * len(batch)):
        damaged = bytearray(batch)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            got = list(iter_records(damaged))
        except DuramenError:
            continue
        if got:  # a length beyond the end makes it a batch that is cut off
            unnoticed.add(bit // 8)
            moved = [record.offset for record in got]
            assert [b - a for a, b in itertools.pairwise(moved)] == [1] * (len(original) - 1)
    assert unnoticed == {*range(8), *range(12, 16)}
