"""Which partition a record goes to: Kafka's own numbers, and rows grouped without changing their order."""

from __future__ import annotations

import numpy as np
import pytest
import twins

from logstore.errors import InvalidPartition
from logstore.records.columns import bytes_column
from logstore.records.native import address_of, kernels
from logstore.records.partitioner import partition_for_key, route

# What Kafka's Utils.murmur2 gives, as signed numbers.
KAFKAS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", KAFKAS)
def test_the_hash_is_kafkas(key: bytes) -> None:
    data = np.frombuffer(key, np.uint8)
    expected = KAFKAS[key] & 0xFFFFFFFF
    assert kernels().murmur2(address_of(data), len(key)) == expected == twins.murmur2(key)
    assert partition_for_key(key, 12) == (expected & 0x7FFFFFFF) % 12


def test_an_empty_key_has_a_partition() -> None:
    assert partition_for_key(b"", 7) == (twins.murmur2(b"") & 0x7FFFFFFF) % 7


def test_rows_of_a_partition_keep_their_order() -> None:
    keys = [b"k%d" % (i % 10) if i % 4 else None for i in range(200)]
    routed = route(bytes_column(keys), len(keys), 5, sticky=3)
    for partition in range(5):
        expected = [i for i, key in enumerate(keys) if (3 if key is None else partition_for_key(key, 5)) == partition]
        assert routed.rows(partition).tolist() == expected


def test_a_partition_that_is_given_wins_over_the_key() -> None:
    routed = route(bytes_column([b"a", b"b"]), 2, 4, given=np.array([2, 0], np.int64))
    assert [routed.rows(p).tolist() for p in range(4)] == [[1], [], [0], []]


@pytest.mark.parametrize("asked", [-1, 4, 1 << 40])
def test_a_partition_that_is_not_there_is_refused_by_its_row(asked: int) -> None:
    with pytest.raises(InvalidPartition, match=f"row 1 asks for partition {asked}"):
        route(bytes_column([b"a", b"b"]), 2, 4, given=np.array([0, asked], np.int64))


@pytest.mark.parametrize("sticky", [-1, 3])
def test_rows_without_key_need_a_partition_that_is_there(sticky: int) -> None:
    with pytest.raises(InvalidPartition, match=f"partition {sticky}; the topic has 3"):
        route(bytes_column([None]), 1, 3, sticky=sticky)


def test_no_rows() -> None:
    routed = route(bytes_column([]), 0, 3)
    assert routed.starts.tolist() == [0, 0, 0, 0]
