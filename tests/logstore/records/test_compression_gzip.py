"""gzip members: the header a JDK writes, several members, and what the trailer protects."""

from __future__ import annotations

import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch
from logstore.records.compression import codec_by_name

GZIP = codec_by_name("gzip")
RECORDS = bytes.fromhex("22000000046b310476310402680278026e0110000a02046b320100")
#: Kafka's own, on JDK 17
GOLDEN = bytes.fromhex("1f8b08000000000000ff5362606060c9366429336461ca60aa60ca631460e06262c9366264000009cc75d61b000000")


def test_kafkas_bytes_are_read() -> None:
    assert GZIP.decompress(GOLDEN, limit=100) == RECORDS


def test_the_header_is_the_one_a_jdk_writes() -> None:
    for level in (None, 1, 9):
        compressed = GZIP.compress(RECORDS, level)
        assert compressed[:10].hex() == "1f8b08000000000000ff"
        assert compressed[-8:] == GOLDEN[-8:]


@given(payload=st.binary(max_size=2_000), times=st.integers(0, 100))
def test_the_standard_librarys_reader_agrees(payload: bytes, times: int) -> None:
    assert gzip.decompress(GZIP.compress(payload * times)) == payload * times


def test_any_member_is_read() -> None:
    named = io.BytesIO()
    with gzip.GzipFile("a name", "wb", fileobj=named) as file:
        file.write(RECORDS * 1000)
    assert GZIP.decompress(named.getvalue(), limit=1 << 20) == RECORDS * 1000
    assert GZIP.decompress(gzip.compress(RECORDS, 0), limit=100) == RECORDS


def test_members_end_to_end_are_one_payload() -> None:
    members = GZIP.compress(RECORDS) + GZIP.compress(b"") + GZIP.compress(b"more" * 100_000)
    assert GZIP.decompress(members, limit=1 << 20) == RECORDS + b"more" * 100_000


@pytest.mark.parametrize("tail", [b"\x00", b"garbage", GOLDEN[:5], GOLDEN[:-1]])
def test_bytes_after_the_last_member_are_corrupt(tail: bytes) -> None:
    with pytest.raises(CorruptBatch) as caught:
        GZIP.decompress(GOLDEN + tail, limit=1000)
    assert caught.value.position is not None
    assert caught.value.position >= len(GOLDEN)


@pytest.mark.parametrize("place", range(-8, 0))
def test_checksum_and_length_are_verified(place: int) -> None:
    damaged = bytearray(GOLDEN)
    damaged[place] ^= 0x10
    with pytest.raises(CorruptBatch, match="gzip"):
        GZIP.decompress(damaged, limit=100)
