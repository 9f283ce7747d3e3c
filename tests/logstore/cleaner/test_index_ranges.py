"""What is dirty, split into ranges: also inside a segment, always between batches, and together all of it once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.index import index_range, merge_ranges, split_dirty
from logstore.files import OS_FILES
from logstore.records.offset_map import MapSettings, OffsetMap
from logstore.records.record import Record

SETTINGS = MapSettings(buffer_bytes=1 << 20)


def appended(lab: Lab, rng: random.Random, records: int, keys: int, codec_id: int = 0) -> None:
    left = records
    while left:
        size = min(rng.randint(1, 40), left)
        left -= size
        batch = [Record(b"%d" % rng.randrange(keys), b"v" * rng.randint(0, 60), NOW_MS) for _ in range(size)]
        lab.append(batch, codec_id=codec_id)
    lab.append([], roll=True)


@pytest.mark.parametrize("segment_bytes", [1 << 30, 4_000], ids=["one segment", "many segments"])
@pytest.mark.parametrize("codec_id", [0, 4], ids=["plain", "zstd"])
@pytest.mark.parametrize("compacted_before", [False, True])
def test_ranges_hold_every_record_once(
    tmp_path: Path, seed: int, segment_bytes: int, codec_id: int, compacted_before: bool
) -> None:
    rng = random.Random(seed)
    lab = Lab(tmp_path, segment_bytes=segment_bytes)
    appended(lab, rng, 500, 60, codec_id)
    if compacted_before:
        lab.compact()
        appended(lab, rng, 500, 60, codec_id)
    work = lab.work(SETTINGS)
    dirty = [record for record in lab.records() if record.offset >= work.first_dirty_offset]
    last = {record.key: record.offset for record in dirty}
    batches = {record.offset for record in dirty}
    for parts in range(1, 6):
        ranges = split_dirty(OS_FILES, work, parts)
        assert len(ranges) == (parts if len(dirty) > 100 else len(ranges))
        assert [ranges[0].start_offset, ranges[-1].end_offset] == [work.first_dirty_offset, lab.end]
        assert [r.end_offset for r in ranges[:-1]] == [r.start_offset for r in ranges[1:]]
        maps = [OffsetMap(SETTINGS) for _ in ranges]
        found = [index_range(OS_FILES, work, each, part) for each, part in zip(maps, ranges, strict=True)]
        for part, indexed in zip(ranges, found, strict=True):
            inside = [offset for offset in batches if part.start_offset <= offset < part.end_offset]
            assert (indexed.records, indexed.end_offset) == (len(inside), part.end_offset)
        sizes = [indexed.read_bytes for indexed in found]
        if segment_bytes > 1 << 20 and not codec_id:
            assert max(sizes) < sum(sizes) / parts + 8_000  # a batch or two more
        whole = merge_ranges(OS_FILES, work, maps, found)
        assert (whole.records, whole.keys, whole.end_offset) == (len(dirty), len(last), lab.end)


def test_a_pass_with_threads_leaves_what_one_without_leaves(tmp_path: Path, seed: int) -> None:
    left = []
    for threads in (1, 4):
        folder = tmp_path / str(threads)
        folder.mkdir()
        lab = Lab(folder, segment_bytes=1 << 30)
        appended(lab, random.Random(seed), 2_000, 300)
        report = lab.compact(threads=threads)
        left.append(([(r.offset, r.key, r.value) for r in lab.records()], report.removed, report.map_keys))
    assert left[0] == left[1]
