from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptSnapshot
from logstore.files import OS_FILES
from logstore.limits import Limits
from logstore.partition.snapshot import (
    ENTRY_BYTES,
    SnapshotEntry,
    decode_snapshot,
    encode_snapshot,
    read_snapshot,
    write_snapshot,
)

EMPTY = bytes.fromhex("000148674bc700000000")
GOLDEN = bytes.fromhex(
    "0001edba8926000000030000000000000063000000000000000000000000001c00000000000001a1e255000d00000002ffffffffffffffff"
    "0000000000000058000000000000000000000000001a00000000000001a1e255000b00000002ffffffffffffffff"
    "000000000000004d000100000001000000000000001900000000000001a1e2550001ffffffffffffffffffffffff"
)
GOLDEN_ENTRIES = [
    SnapshotEntry(99, 0, 0, 28, 0, 0x1A1E255000D, 2, -1),
    SnapshotEntry(88, 0, 0, 26, 0, 0x1A1E255000B, 2, -1),
    SnapshotEntry(77, 1, 1, 25, 0, 0x1A1E2550001, -1, -1),
]


def entries() -> st.SearchStrategy[SnapshotEntry]:
    def build(last_offset: int, delta: int, rest: tuple[int, int, int, int, int, int]) -> SnapshotEntry:
        producer_id, epoch, sequence, timestamp, coordinator, txn = rest
        delta = min(delta, last_offset) if last_offset >= 0 else 0
        return SnapshotEntry(producer_id, epoch, sequence, last_offset, delta, timestamp, coordinator, txn)

    int31, int63 = st.integers(-1, 2**31 - 1), st.integers(-1, 2**63 - 1)
    rest = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), int31, int63, int31, int63)
    return st.builds(build, int63, st.integers(0, 2**31 - 1), rest)


def sealed(body: bytes, version: int = 1) -> bytes:
    """Any body under a checksum that fits: what a checksum does not protect against."""
    return struct.pack(">hI", version, crc32c(body)) + body


def test_kafkas_own_snapshot_reads_back() -> None:
    assert decode_snapshot(GOLDEN) == GOLDEN_ENTRIES
    assert encode_snapshot(GOLDEN_ENTRIES) == GOLDEN


def test_no_producers_are_ten_bytes() -> None:
    assert encode_snapshot([]) == EMPTY
    assert decode_snapshot(EMPTY) == []


@given(st.lists(entries(), max_size=8, unique_by=lambda entry: entry.producer_id))
def test_every_snapshot_comes_back(producers: list[SnapshotEntry]) -> None:
    assert decode_snapshot(encode_snapshot(producers)) == producers


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(at: int, flip: int) -> None:
    data = bytearray(GOLDEN)
    data[at] ^= flip
    with pytest.raises(CorruptSnapshot) as caught:
        decode_snapshot(bytes(data), file="x.snapshot")
    assert caught.value.file == "x.snapshot"
    assert caught.value.position is not None


@given(st.integers(0, len(GOLDEN) - 1))
def test_every_truncation_is_noticed(size: int) -> None:
    with pytest.raises(CorruptSnapshot):
        decode_snapshot(GOLDEN[:size])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 10,
        b"\x00" * 4096,
        GOLDEN + b"\x00",
        sealed(GOLDEN[6:], version=0),
        sealed(GOLDEN[6:], version=2),
        sealed(struct.pack(">i", -1)),
        sealed(struct.pack(">i", 2**31 - 1)),
        sealed(struct.pack(">i", 4) + GOLDEN[10:]),
        sealed(struct.pack(">i", 2) + GOLDEN[10:]),
        sealed(GOLDEN[6:] + b"\x00"),
        sealed(struct.pack(">i", 2) + GOLDEN[10 : 10 + ENTRY_BYTES] * 2),
    ],
    ids=[
        "empty", "zeros", "page of zeros", "byte behind", "version 0", "version 2", "negative count", "huge count",
        "count too high", "count too low", "sealed byte behind", "producer twice",
    ],
)  # fmt: skip
def test_a_malformed_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        decode_snapshot(data)


@pytest.mark.parametrize(
    "entry",
    [
        SnapshotEntry(-1, 0, 0, 0, 0, 0, 0, 0),
        SnapshotEntry(1, -1, 0, 0, 0, 0, 0, 0),
        SnapshotEntry(1, 0, -2, 0, 0, 0, 0, 0),
        SnapshotEntry(1, 0, 0, -2, 0, 0, 0, 0),
        SnapshotEntry(1, 0, 0, 5, 6, 0, 0, 0),
        SnapshotEntry(1, 0, 0, 5, -1, 0, 0, 0),
        SnapshotEntry(1, 0, -1, -1, 1, 0, 0, 0),
        SnapshotEntry(1, 0, 0, 0, 0, 0, -2, 0),
        SnapshotEntry(1, 0, 0, 0, 0, 0, 0, -2),
    ],
)
def test_an_entry_no_log_can_have_is_refused_despite_its_checksum(entry: SnapshotEntry) -> None:
    with pytest.raises(CorruptSnapshot, match="invalid snapshot entry") as caught:
        decode_snapshot(encode_snapshot([GOLDEN_ENTRIES[0], entry]))
    assert caught.value.position == 10 + ENTRY_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_give_producers_or_a_typed_error(body: bytes) -> None:
    for data in (body, sealed(body)):
        try:
            producers = decode_snapshot(data)
        except CorruptSnapshot:
            continue
        assert encode_snapshot(producers) == data


def test_a_shorter_snapshot_replaces_a_longer_one(tmp_path: Path) -> None:
    path = str(tmp_path / "00000000000000000030.snapshot")
    write_snapshot(OS_FILES, path, GOLDEN_ENTRIES)
    write_snapshot(OS_FILES, path, [], sync=False)
    assert read_snapshot(OS_FILES, path) == []
    assert os.listdir(tmp_path) == [os.path.basename(path)]


def test_a_snapshot_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000030.snapshot"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a sparse file: reading it would not end well
    with pytest.raises(CorruptSnapshot, match="limit") as caught:
        read_snapshot(OS_FILES, str(path), limits=Limits(side_file_bytes=1 << 20))
    assert caught.value.file == str(path)


def test_an_absent_snapshot_is_the_callers_business(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_snapshot(OS_FILES, str(tmp_path / "00000000000000000030.snapshot"))
