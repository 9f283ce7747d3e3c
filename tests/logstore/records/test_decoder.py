"""Batches to columns: ranges, groups, what is skipped, every lie a batch can tell, and the memory that costs."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
import wire
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch, DecompressionLimit, DuramenError, UnsupportedFormat
from logstore.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX, MIB, Limits
from logstore.records import codes, decoder, table
from logstore.records.columns import columns_of
from logstore.records.compression import CODECS, codec_by_name
from logstore.records.decoder import Decoder, upconvert
from logstore.records.encoder import BatchOptions, Encoder
from logstore.records.legacy import decode_legacy
from logstore.records.record import Record, TimestampType
from logstore.records.scan import is_damage, scan_batches

T = golden.T
FILE = "00000000000000000000.log"
CODEC_IDS = [0, 1, 2, 3, 4]


def rows(count: int) -> list[Record]:
    return [
        Record(
            b"key%d" % i if i % 5 else None,
            b"v" * (i % 50) if i % 7 else None,
            T + i,
            ((f"h{i}", b"x"), ("n", None)) if i % 3 == 0 else (),
            i,
        )
        for i in range(count)
    ]


def log_of(records: list[Record], **options: Any) -> bytes:
    encoder = Encoder(BatchOptions(**options))
    return b"".join(chunk.data.tobytes() for chunk in encoder.encode(columns_of(records)))


def compressed(payload: bytes, codec_id: int, **fields: Any) -> bytes:
    codec = CODECS[codec_id]
    return wire.batch(codec.compress(payload), attributes=fields.pop("attributes", 0) | codec_id, **fields)


def decoded(data: bytes, *, decoder: Decoder | None = None, verify_crc: bool = True, **how: Any) -> list[Record]:
    array = np.frombuffer(data, np.uint8)
    scan = scan_batches(array, verify_crc=verify_crc)
    assert not is_damage(scan.code), codes.EXPLAINED[scan.code]
    columns = (decoder or Decoder()).columns(array, scan.table, file=FILE, **how)
    return [record for part in columns for record in part.records()]


# --- ranges, groups, skipping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec_id", CODEC_IDS)
@pytest.mark.parametrize(("low", "high"), [(0, INT64_MAX), (0, 0), (17, 18), (99, 230), (295, INT64_MAX), (400, 500)])
def test_a_range_of_offsets(codec_id: int, low: int, high: int) -> None:
    records = rows(300)
    data = log_of(records, codec_id=codec_id, batch_bytes=700)
    assert decoded(data, min_offset=low, max_offset=high) == records[low:high]


@pytest.mark.parametrize("codec_id", CODEC_IDS)
@pytest.mark.parametrize("group_bytes", [1, 1000, 5000])
def test_groups_do_not_change_what_is_read(monkeypatch: pytest.MonkeyPatch, codec_id: int, group_bytes: int) -> None:
    monkeypatch.setattr(decoder, "_GROUP_BYTES", group_bytes)
    monkeypatch.setattr(decoder, "_ARENA_BYTES", group_bytes)
    records = rows(500)
    data = log_of(records, codec_id=codec_id, batch_bytes=700)
    array = np.frombuffer(data, np.uint8)
    parts = list(Decoder().columns(array, scan_batches(array).table))
    assert len(parts) > 2
    assert [record for part in parts for record in part.records()] == records


def test_plain_batches_are_grouped_up_to_the_groups_size_and_not_beyond() -> None:
    size = 10 * MIB
    batch = wire.batch(wire.record(b"k", bytes(size)), count=1)
    array = np.frombuffer(batch * 7, np.uint8)
    parts = list(Decoder().columns(array, scan_batches(array).table))
    assert [len(part) for part in parts] == [3, 3, 1]


def test_batches_of_different_codecs_and_formats_in_one_group() -> None:
    records = rows(10)
    data = b"".join(log_of(records[i : i + 2], codec_id=i // 2, base_offset=i) for i in range(0, 10, 2))
    data += wire.message(10, b"a", b"b", timestamp=T, magic=1)
    assert decoded(data) == [*records, Record(b"a", b"b", T, (), 10)]


def test_control_batches_are_skipped_unless_asked_for() -> None:
    data = log_of(rows(2)) + golden.COMMIT_MARKER
    assert [record.offset for record in decoded(data)] == [0, 1]
    assert [record.offset for record in decoded(data, decoder=Decoder(control=True))] == [0, 1, 200]


def test_batches_marked_to_be_skipped_are_not_even_opened() -> None:
    good, bad = log_of(rows(2)), wire.batch(b"no lz4 frame", count=1, attributes=3, base_offset=2)
    array = np.frombuffer(good + bad, np.uint8)
    found = scan_batches(array).table
    found[1, table.SKIP] = 1
    assert [len(part) for part in Decoder().columns(array, found)] == [2]


def test_headers_are_read_only_when_wanted_but_always_checked() -> None:
    records = rows(9)
    data = log_of(records)
    array = np.frombuffer(data, np.uint8)
    (part,) = Decoder(headers=False).columns(array, scan_batches(array).table)
    assert part.headers is None
    assert [record.headers for record in part.records()] == [()] * 9
    body = b"\0\0\0\1\1" + wire.varint(1) + wire.varint(5) + b"ab"
    broken = wire.batch(wire.varint(len(body)) + body, count=1)
    for headers in (True, False):
        with pytest.raises(CorruptBatch, match="record inside the batch"):
            decoded(broken, decoder=Decoder(headers=headers))
        with pytest.raises(CorruptBatch):  # nor does a range hide them
            decoded(broken, decoder=Decoder(headers=headers), min_offset=0, max_offset=0 + 1)


def test_empty_batches_have_no_records_whatever_their_codec_bits() -> None:
    empty = wire.batch(b"", count=0, last_offset_delta=4)
    bare = [wire.batch(b"", count=0, last_offset_delta=4, attributes=codec_id) for codec_id in (1, 2, 3, 4)]
    framed = [compressed(b"", codec_id, count=0) for codec_id in (1, 2, 3, 4)]
    for batch in (golden.EMPTY, empty, *bare, *framed):
        assert decoded(batch + log_of(rows(1))) == rows(1)


def test_log_append_time_hides_the_records_own_times() -> None:
    assert [(record.timestamp_ms, record.timestamp_type) for record in decoded(golden.APPENDED)] == [
        (golden.APPENDED_MS, TimestampType.LOG_APPEND_TIME)
    ] * 2
    assert decoded(golden.CLEANED) == decoded(golden.APPENDED)


def test_header_names_that_are_not_utf8_survive_in_the_columns() -> None:
    names = [b"\xff\xfe", b"ok", b"\xed\xa0\x80"]
    data = wire.batch(wire.record(b"k", b"v", headers=[(name, b"x") for name in names]), count=1)
    array = np.frombuffer(data, np.uint8)
    (part,) = Decoder().columns(array, scan_batches(array).table)
    assert part.headers is not None
    assert part.headers.keys.tolist() == names
    (record,) = part.records()
    assert record.headers[0] == ("��", b"x")
    assert record.headers[1] == ("ok", b"x")


# --- lies -------------------------------------------------------------------------------------------------------------

THREE = b"".join(wire.record(b"k%d" % i, b"v" * 20, offset_delta=i) for i in range(3))


def hostile(payload: bytes, codec_id: int, **fields: Any) -> bytes:
    """A good batch, then the hostile one at offset 1000."""
    return log_of(rows(3)) + compressed(payload, codec_id, base_offset=1000, **{"last_offset_delta": 9, **fields})


@pytest.mark.parametrize("codec_id", CODEC_IDS)
@pytest.mark.parametrize(
    ("payload", "fields"),
    [
        (THREE, {"count": 2}),
        (THREE, {"count": 4}),
        (THREE, {"count": len(THREE) // 7}),
        (THREE + b"\0", {"count": 3}),
        (THREE[:-1], {"count": 3}),
        (THREE, {"count": 3, "last_offset_delta": 1}),
        (wire.record(b"a", b"b", offset_delta=2) + wire.record(b"a", b"b", offset_delta=2), {"count": 2}),
        (wire.record(b"a", b"b", offset_delta=2) + wire.record(b"a", b"b", offset_delta=1), {"count": 2}),
        (wire.record(b"a", b"b", offset_delta=-1), {"count": 1}),
        (bytes(70), {"count": 10}),
        (b"\xff" * 70, {"count": 10}),
        (wire.varint(-5) + THREE, {"count": 4}),
        (wire.varint(INT32_MAX) + THREE, {"count": 4}),
        # a header count as large as what is left of the record
        (wire.varint(106) + b"\0\0\0\1\1" + wire.varint(51) + bytes(100), {"count": 1}),
        (wire.varint(107) + b"\0\0\0\1\1" + wire.varint(100) + bytes(100), {"count": 1}),
    ],
    ids=[
        "count below",
        "count above",
        "count as large as fits",
        "trailing byte",
        "last byte missing",
        "offset beyond the batch",
        "offset twice",
        "offsets backwards",
        "offset before the batch",
        "zeros",
        "ones",
        "negative record length",
        "record length 2^31-1",
        "header count of more than half",
        "header count of all",
    ],
)
def test_a_lie_below_the_checksum_is_corrupt_at_its_place(
    codec_id: int, payload: bytes, fields: dict[str, Any]
) -> None:
    data = hostile(payload, codec_id, **fields)
    array = np.frombuffer(data, np.uint8)
    scan = scan_batches(array)
    assert (scan.code, len(scan.table)) == (codes.OK, 2)
    columns = Decoder().columns(array, scan.table, file=FILE, base_position=5000)
    with pytest.raises(CorruptBatch) as caught:
        for _ in columns:
            pass
    position = 5000 + len(log_of(rows(3)))
    assert (caught.value.file, caught.value.position, caught.value.offset) == (FILE, position, 1000)


@pytest.mark.parametrize("codec_id", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [len(THREE) // 7 + 1, INT32_MAX])
def test_a_compressed_batch_cannot_claim_more_records_than_fit(codec_id: int, count: int) -> None:
    with pytest.raises(CorruptBatch, match="record count") as caught:
        decoded(hostile(THREE, codec_id, count=count))
    assert (caught.value.file, caught.value.offset) == (FILE, 1000)


@pytest.mark.parametrize("codec_id", [5, 6, 7])
def test_codecs_that_do_not_exist_are_unsupported(codec_id: int) -> None:
    data = wire.batch(THREE, count=3, attributes=codec_id, base_offset=77)
    with pytest.raises(UnsupportedFormat, match=f"codec {codec_id}") as caught:
        decoded(data)
    assert caught.value.where() == {"file": FILE, "position": 0, "offset": 77}


@pytest.mark.parametrize("codec_id", [1, 2, 3, 4])
def test_a_payload_that_is_no_compressed_stream_is_corrupt(codec_id: int) -> None:
    data = log_of(rows(3)) + wire.batch(THREE, count=3, attributes=codec_id, base_offset=77)
    with pytest.raises(CorruptBatch) as caught:
        decoded(data)
    where = {"file": FILE, "position": len(log_of(rows(3))), "offset": 77}
    assert caught.value.where() == where
    assert caught.value.__cause__ is not caught.value


#: bytes around, or instead of, a sound payload
payloads = st.one_of(
    st.binary(max_size=80),
    st.tuples(st.integers(0, len(THREE)), st.binary(max_size=4)).map(lambda c: THREE[: c[0]] + c[1] + THREE[c[0] :]),
    st.tuples(st.integers(0, len(THREE) - 1), st.integers(0, 255)).map(
        lambda c: THREE[: c[0]] + bytes([c[1]]) + THREE[c[0] + 1 :]
    ),
)


@given(
    payload=payloads,
    codec_id=st.integers(0, 7),
    count=st.integers(0, 6) | st.sampled_from([INT32_MAX, 1 << 20]),
    delta=st.sampled_from([2, 2, 0, 9, INT32_MAX]),
    attributes=st.sampled_from([0, 8, 0x10, 0x40]),
    squeezed=st.booleans(),
    headers=st.booleans(),
)
def test_a_batch_with_a_right_checksum_gives_records_or_a_typed_error(
    payload: bytes, codec_id: int, count: int, delta: int, attributes: int, squeezed: bool, headers: bool
) -> None:
    stored = CODECS[codec_id].compress(payload) if squeezed and codec_id in (1, 2, 3, 4) else payload
    batch = wire.batch(
        stored, count=count, last_offset_delta=delta, attributes=attributes | codec_id, base_offset=50, base_timestamp=T
    )
    array = np.frombuffer(batch, np.uint8)
    scan = scan_batches(array)
    if is_damage(scan.code):
        assert scan.code == codes.BAD_COUNT
        return
    try:
        parts = list(Decoder(headers=headers).columns(array, scan.table, file=FILE))
    except (CorruptBatch, UnsupportedFormat, DecompressionLimit) as error:
        found = error.where()
    else:
        found = {"file": FILE, "position": 0, "offset": 50}
        records = [record for part in parts for record in part.records()]
        assert len(records) == count
        assert all(50 <= record.offset <= 50 + delta for record in records)
    assert found == {"file": FILE, "position": 0, "offset": 50}


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec_id", [1, 2, 3, 4])
def test_a_batch_may_decompress_to_exactly_the_limit_and_no_further(codec_id: int) -> None:
    payload = wire.record(b"k", bytes(100_000))
    data = log_of(rows(2)) + compressed(payload, codec_id, count=1, base_offset=9)
    exact = Decoder(limits=Limits(decompressed_bytes=len(payload)))
    assert [record.offset for record in decoded(data, decoder=exact)] == [0, 1, 9]
    with pytest.raises(DecompressionLimit, match=f"more than {len(payload) - 1} bytes") as caught:
        decoded(data, decoder=Decoder(limits=Limits(decompressed_bytes=len(payload) - 1)))
    assert (caught.value.file, caught.value.position, caught.value.offset) == (FILE, len(log_of(rows(2))), 9)


@pytest.mark.parametrize("codec_id", [1, 2, 3, 4])
def test_the_arena_grows_for_one_large_batch_among_small_ones(codec_id: int) -> None:
    big = bytes(30 * MIB)
    data = log_of(rows(3), codec_id=codec_id)
    data += compressed(wire.record(b"big", big), codec_id, count=1, base_offset=3)
    data += log_of(rows(2), codec_id=codec_id, base_offset=4)
    records = decoded(data)
    assert [record.offset for record in records] == [0, 1, 2, 3, 4, 5]
    assert records[3].value == big


PROGRAM = """
    import resource, sys
    import numpy as np
    from logstore.errors import DuramenError
    from logstore.limits import MIB, Limits
    from logstore.records.decoder import Decoder
    from logstore.records.scan import scan_batches

    def rss_anon():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

    def size():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * 4096

    warm = np.fromfile(sys.argv[1], np.uint8)
    for part in Decoder().columns(warm, scan_batches(warm).table):
        len(part)
    data = np.fromfile(sys.argv[2], np.uint8)
    limit = 8 * MIB
    room = int(sys.argv[3]) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (size() + room, size() + room))
    try:
        for part in Decoder(limits=Limits(decompressed_bytes=limit)).columns(data, scan_batches(data).table, file="f"):
            print("records", len(part))
    except DuramenError as error:
        print(type(error).__name__, error.file, error.position, error.offset)
"""


def in_little_memory(tmp_path: Path, batch: bytes, room_mib: int) -> str:
    """What a process says that may map only so much more than it had, with a limit of 8 MiB on what is decompressed."""
    warm, data = tmp_path / "warm", tmp_path / "data"
    warm.write_bytes(log_of(rows(3)))
    data.write_bytes(batch)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(warm), str(data), str(room_mib)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_a_decompression_bomb_costs_no_more_than_the_limit(tmp_path: Path, name: str) -> None:
    codec = codec_by_name(name)
    stream = codec.compress(bytes(256 * MIB))
    batch = wire.batch(stream, count=1, attributes=codec.id, base_offset=7)
    # Twice the limit while the arena grows, and what the process needs anyway.
    assert in_little_memory(tmp_path, batch, 64) == "DecompressionLimit f 0 7"


def test_a_record_count_of_two_thousand_million_costs_nothing(tmp_path: Path) -> None:
    batch = compressed(wire.record(b"k", b"v"), 4, count=INT32_MAX, base_offset=7)
    assert in_little_memory(tmp_path, batch, 32) == "CorruptBatch f 0 7"


def test_a_payload_of_zeros_up_to_the_limit_costs_a_small_multiple_of_it(tmp_path: Path) -> None:
    batch = compressed(bytes(8 * MIB), 4, count=8 * MIB // 7, base_offset=7)
    assert in_little_memory(tmp_path, batch, 24 * 8) == "CorruptBatch f 0 7"


# --- legacy -----------------------------------------------------------------------------------------------------------


def wrapper(offset: int, inner: bytes, *, magic: int = 1) -> bytes:
    codec = codec_by_name("gzip")
    plain = bytearray(wire.message(offset, None, codec.compress(inner), magic=magic, timestamp=T))
    plain[17] = codec.id
    import zlib

    plain[12:16] = struct.pack(">I", zlib.crc32(bytes(plain[16:])))
    return bytes(plain)


def test_a_wrapper_whose_offset_a_client_left_unset_is_read_all_the_same() -> None:
    inner = b"".join(wire.message(i, b"k%d" % i, b"v", timestamp=T) for i in range(3))
    assert [record.offset for record in decoded(wrapper(0, inner))] == [0, 1, 2]
    assert [record.offset for record in decoded(wrapper(12, inner))] == [10, 11, 12]


@pytest.mark.parametrize("last", [5 + (1 << 31), INT64_MAX])
def test_messages_of_one_set_too_far_apart_are_corrupt(last: int) -> None:
    inner = wire.message(5, b"k", b"v", magic=0) + wire.message(last, b"k", b"v", magic=0)
    data = wrapper(last - 1, inner, magic=0)
    with pytest.raises(CorruptBatch, match=f"offsets 5 to {last}") as caught:
        decoded(data)
    assert caught.value.where() == {"file": FILE, "position": 0, "offset": last - 1}


def test_a_set_is_upconverted_to_one_batch_at_its_offsets() -> None:
    inner = b"".join(wire.message(i, b"k%d" % i, None, timestamp=T + i) for i in (0, 2, 3))
    legacy = decode_legacy(wrapper(103, inner), limits=DEFAULT_LIMITS)
    for codec_id in (0, 3):
        batch = upconvert(legacy, codec_id=codec_id)
        assert decoded(batch) == [Record(b"k%d" % i, None, T + i, (), 100 + i) for i in (0, 2, 3)]
        assert batch[21:23] == bytes([0, codec_id])


def test_every_error_of_a_decoder_is_one_of_ours() -> None:
    assert issubclass(CorruptBatch, DuramenError)
    assert not is_damage(codes.FULL)
