"""A map filled by several threads at once holds what one filled in order holds, or says that it is too small."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from compaction.lab import Lab
from logstore.cleaner.index import build_map, index_range, open_source, split_dirty
from logstore.cleaner.shared_map import Filler, SharedMap
from logstore.files import OS_FILES
from logstore.records.decoder import Decoder
from logstore.records.offset_map import MD5, SIPHASH, MapSettings, OffsetMap, Put
from logstore.records.table import BASE_OFFSET, SKIP


def filled(lab: Lab, ids: list[int]) -> None:
    columns = [[b"%d" % each for each in ids], [b"v"] * len(ids)]
    batch = pa.RecordBatch.from_arrays([pa.array(column, pa.binary()) for column in columns], names=["key", "value"])
    with lab.open() as log:
        for at in range(0, len(ids), 5_000):
            log.append_columns(batch.slice(at, 5_000))
        lab.end = log.roll()


def offsets_of(offset_map: OffsetMap, end: int) -> list[int]:
    survivors = offset_map.survivors(0, end)
    assert survivors is not None
    return np.nonzero(np.unpackbits(survivors.bits, bitorder="little")[:end])[0].tolist()  # type: ignore[no-any-return]


def last_offsets(ids: list[int]) -> list[int]:
    return sorted({each: offset for offset, each in enumerate(ids)}.values())


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("algorithm", [SIPHASH, MD5])
@pytest.mark.parametrize("keys", [3, 2_000, 120_000])
def test_all_keys_get_their_last_offset(tmp_path: Path, seed: int, threads: int, algorithm: str, keys: int) -> None:
    """Few keys, over which the threads fight, and more than the map begins with, so that it grows under them."""
    rng = random.Random(seed)
    ids = [rng.randrange(keys) for _ in range(300_000)]
    lab = Lab(tmp_path, segment_bytes=2 << 20)
    filled(lab, ids)
    work = lab.work(MapSettings(buffer_bytes=16 << 20, algorithm=algorithm))
    with ThreadPoolExecutor(threads) as pool:
        offset_map, indexed = build_map(OS_FILES, work, pool=pool, threads=threads)
    expected = last_offsets(ids)
    assert (indexed.keys, indexed.records, indexed.is_full) == (len(expected), len(ids), False)
    assert (indexed.end_offset, indexed.read_bytes) == (lab.end, sum(s.size_bytes for s in work.segments))
    assert offset_map.used == len(expected)
    assert offsets_of(offset_map, lab.end) == expected


@pytest.mark.parametrize("keys_max", [20_000, 59_999, 60_000, 60_001, 90_000])
@pytest.mark.parametrize("order", ["random", "each key twice", "new keys last"])
def test_a_map_that_is_too_small_ends_where_one_filled_in_order_does(
    tmp_path: Path, seed: int, keys_max: int, order: str
) -> None:
    rng = random.Random(seed)
    ids = {
        "random": list(range(60_000)) + [rng.randrange(60_000) for _ in range(100_000)],
        "each key twice": [each // 2 for each in range(120_000)],
        "new keys last": [rng.randrange(50) for _ in range(100_000)] + list(range(60_000)),
    }[order]
    if order == "random":
        rng.shuffle(ids)
    lab = Lab(tmp_path, segment_bytes=1 << 20)
    filled(lab, ids)
    settings = MapSettings(buffer_bytes=24 * keys_max, load_factor=1.0)
    work = lab.work(settings)
    end, known = 0, set[int]()
    while end < len(ids) and len(known) < keys_max:  # Kafka stops at any record then, even one of a key it knows
        known.add(ids[end])
        end += 1
    for threads in (1, 2, 3):
        with ThreadPoolExecutor(threads) as pool:
            offset_map, indexed = build_map(OS_FILES, work, pool=pool, threads=threads)
        assert (indexed.end_offset, indexed.keys, indexed.is_full) == (end, len(known), end < len(ids))
        assert offsets_of(offset_map, end) == last_offsets(ids[:end])


def test_one_that_will_not_do_is_given_up_early(tmp_path: Path) -> None:
    """Nearly each record has a key of its own: that is seen long before the budget is spent."""
    lab = Lab(tmp_path, segment_bytes=64 << 20)
    filled(lab, list(range(400_000)))
    work = lab.work(MapSettings(buffer_bytes=24 * 200_000))
    shared = SharedMap(OffsetMap(work.map_settings, records=400_000))
    filler = Filler(shared)
    ranges = split_dirty(OS_FILES, work, 1)
    stopped = index_range(OS_FILES, work, filler, ranges[0])
    assert stopped.is_full
    assert not shared.close()
    assert filler.used < 60_000
    assert stopped.read_bytes < work.segments[0].size_bytes


def test_the_greater_offset_wins_whoever_comes_first(tmp_path: Path) -> None:
    """Two threads come to the same keys at the same time, over and over; the older offset must never be the last."""
    count = 20_000
    lab = Lab(tmp_path, segment_bytes=64 << 20)
    filled(lab, 3 * list(range(count)))
    work = lab.work(MapSettings(buffer_bytes=4 << 20))
    segment = open_source(OS_FILES, work, 0)
    (chunk,) = segment.chunks(chunk_bytes=16 << 20)
    table = chunk.table
    table[:, SKIP] = 0
    Decoder().open(chunk.data, table, 0)
    bounds = np.searchsorted(table[:, BASE_OFFSET], [0, count, 2 * count, 3 * count]).tolist()
    known, older, newer = pairwise(bounds)
    assert [table[first, BASE_OFFSET] for first in bounds[:-1]] == [0, count, 2 * count]
    start = threading.Barrier(2)

    def put(filler: Filler, rows: tuple[int, int]) -> Put:
        start.wait(60)
        return filler.put(table, *rows, min_offset=0)

    with ThreadPoolExecutor(2) as pool:
        for number in range(300):
            shared = SharedMap(OffsetMap(work.map_settings, records=3 * count))
            if number % 2:
                Filler(shared).put(table, *known, min_offset=0)
            puts = list(pool.map(put, [Filler(shared), Filler(shared)], [older, newer]))
            assert [each.records for each in puts] == [count, count]
            assert shared.close()
            assert offsets_of(shared.map, 3 * count) == list(range(2 * count, 3 * count))
    segment.close(clean=False)


@pytest.mark.parametrize("keys_max", [1, 63, 64, 65, 1_000])
def test_records_that_found_no_room_are_not_counted(tmp_path: Path, keys_max: int) -> None:
    """How many keys are still to come is told by the few records that had a key twice: each one too many counts."""
    lab = Lab(tmp_path, segment_bytes=64 << 20)
    filled(lab, [*range(keys_max // 2), *range(3_000)])
    settings = MapSettings(buffer_bytes=4 << 20)
    segment = open_source(OS_FILES, lab.work(settings), 0)
    (chunk,) = segment.chunks(chunk_bytes=16 << 20)
    chunk.table[:, SKIP] = 0
    Decoder().open(chunk.data, chunk.table, 0)
    for used in (None, np.zeros(1, dtype=np.int64)):  # alone, and as one of several threads
        offset_map = OffsetMap(settings, keys_max=keys_max).view(used=used)
        put = offset_map.put_some(chunk.table, 0, len(chunk.table), min_offset=0)
        assert put.stopped_at is not None
        assert put.records == keys_max // 2 + keys_max
    segment.close(clean=False)
