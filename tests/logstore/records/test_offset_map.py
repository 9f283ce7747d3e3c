"""The map of keys to last offsets: what it keeps, where it stops when it is full, and how it grows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import wire

from logstore.errors import CorruptBatch
from logstore.limits import INT64_MAX
from logstore.records import offset_map
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, Encoder
from logstore.records.offset_map import MapSettings, OffsetMap
from logstore.records.record import Record
from logstore.records.scan import scan_batches
from logstore.records.table import BatchTable

KEYS = [b"k%d" % (i % 7) for i in range(30)]
VALUES = [None if i in (28, 29) else b"v" for i in range(30)]
SETTINGS = MapSettings(buffer_bytes=24 * 400, load_factor=0.75)
EVERYTHING = {"min_offset": 0, "max_offset": INT64_MAX}


def batches(keys: list[bytes | None], values: list[bytes | None]) -> tuple[np.ndarray, BatchTable]:
    records = [Record(key, value, 1) for key, value in zip(keys, values, strict=True)]
    chunks = Encoder(BatchOptions(batch_records=4)).encode(columns_of(records))
    data = np.frombuffer(b"".join(chunk.data.tobytes() for chunk in chunks), np.uint8)
    return data, scan_batches(data).table


def test_the_last_record_of_each_key_is_kept_and_tombstones_on_request() -> None:
    data, table = batches(list(KEYS), VALUES)
    offsets = OffsetMap(SETTINGS)
    assert offsets.put(table, 0, len(table), **EVERYTHING).stopped_at is None
    assert offsets.used == 7
    flags, kept = offsets.keep(table, 0, len(table), **EVERYTHING, tombstones=True)
    assert (np.nonzero(flags)[0].tolist(), kept) == (list(range(23, 30)), 7)
    flags, kept = offsets.keep(table, 0, len(table), **EVERYTHING)
    assert (np.nonzero(flags)[0].tolist(), kept) == (list(range(23, 28)), 5)
    assert len(data)


def test_records_without_key_are_never_a_keys_last() -> None:
    _data, table = batches([None, b"a", None], [b"x", b"y", b"z"])
    offsets = OffsetMap(SETTINGS)
    offsets.put(table, 0, 1, **EVERYTHING)
    assert offsets.keep(table, 0, 1, **EVERYTHING)[0].tolist() == [0, 1, 0]


def test_a_full_map_says_where_it_stopped() -> None:
    keys: list[bytes | None] = [b"%d" % (i % 150) for i in range(400)]
    _data, table = batches(keys, [b"v"] * 400)
    offsets = OffsetMap(MapSettings(buffer_bytes=24 * 112, load_factor=0.9))
    put = offsets.put(table, 0, len(table), **EVERYTHING)
    assert (put.stopped_at, put.last_offset, offsets.used) == (100, 99, 100)


def test_a_map_that_grew_has_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_map, "_SLOTS_MIN", 16)
    keys: list[bytes | None] = [b"%d" % (i % 150) for i in range(400)]
    _data, table = batches(keys, [b"v"] * 400)
    offsets = OffsetMap(SETTINGS)
    assert offsets.slots == 16
    assert offsets.put(table, 0, len(table), **EVERYTHING).stopped_at is None
    assert (offsets.slots > 150, offsets.used) == (True, 150)
    flags, kept = offsets.keep(table, 0, len(table), **EVERYTHING)
    assert (np.nonzero(flags)[0].tolist(), kept) == (list(range(250, 400)), 150)


def test_buckets_share_the_keys_between_them() -> None:
    keys: list[bytes | None] = [b"%d" % i for i in range(300)]
    _data, table = batches(keys, [b"v"] * 300)
    total = np.zeros(300, np.int64)
    secret = (5, 7)
    for bucket in range(3):
        offsets = OffsetMap(replace(SETTINGS, secret=secret), bucket=bucket, buckets=3)
        assert offsets.put(table, 0, len(table), **EVERYTHING).records == offsets.used
        assert 50 < offsets.used < 150
        total += offsets.keep(table, 0, len(table), **EVERYTHING)[0]
    assert total.tolist() == [1] * 300


def test_one_slot_stays_empty_so_that_looking_for_a_key_ends() -> None:
    offsets = OffsetMap(MapSettings(buffer_bytes=24 * 10, load_factor=1.0))
    assert (offsets.keys_max, offsets.slots) == (10, 11)


def test_a_malformed_record_is_corrupt_at_its_place() -> None:
    good, bad = wire.batch(wire.record(b"k", b"v"), count=1), wire.batch(bytes(9), count=1, base_offset=40)
    data = np.frombuffer(good + bad, np.uint8)
    table = scan_batches(data).table
    offsets = OffsetMap(SETTINGS)
    with pytest.raises(CorruptBatch) as caught:
        offsets.put(table, 0, 2, **EVERYTHING, file="00.log")
    assert caught.value.where() == {"file": "00.log", "position": len(good), "offset": 40}
    with pytest.raises(CorruptBatch):
        offsets.keep(table, 0, 2, **EVERYTHING)
