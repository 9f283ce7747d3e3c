"""Logs with more keys than a map begins with: it grows, is filled by several threads, or ends the pass early.

The oracle is a dict. Whatever the map went through, what stays and why the rest went must be the same.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import logstore.cleaner.index as index_module
from compaction.lab import NOW_MS, Lab
from logstore.records.offset_map import MapSettings, distinct_keys
from logstore.records.record import Record

RECORDS = 150_000
BATCH = 3_000


def told(tmp_path: Path, rng: random.Random, keys: int, keyless: float) -> tuple[Lab, list[Record]]:
    lab = Lab(tmp_path, segment_bytes=400_000, cleanup_policy=frozenset({"delete"}))
    records = [
        Record(None if rng.random() < keyless else b"%d" % rng.randrange(keys), b"%d" % number, NOW_MS)
        for number in range(RECORDS)
    ]
    lab.append(*(records[at : at + BATCH] for at in range(0, RECORDS, BATCH)), roll=True)
    lab.reconfigure(cleanup_policy=frozenset({"compact"}))
    return lab, records


def kept_of(records: list[Record]) -> list[tuple[bytes, bytes]]:
    last = {record.key: number for number, record in enumerate(records) if record.key is not None}
    return [(r.key, r.value) for number, r in enumerate(records) if r.key is not None and last[r.key] == number]  # type: ignore[misc]


@pytest.mark.parametrize("keyless", [0.0, 0.1])
@pytest.mark.parametrize("partial_bytes", [64 << 20, 240_000], ids=["merged", "part of a range merged"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_map_that_grew(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, keyless: float, partial_bytes: int, threads: int
) -> None:
    monkeypatch.setattr(index_module, "_PARTIAL_BYTES", partial_bytes)
    lab, records = told(tmp_path, random.Random(seed), keys=90_000, keyless=keyless)
    expected = kept_of(records)
    report = lab.compact(threads=threads, map_settings=MapSettings(buffer_bytes=8 << 20))
    without = sum(record.key is None for record in records)
    removed = {"keyless": without, "superseded": RECORDS - without - len(expected)}
    assert report.removed == {reason: count for reason, count in removed.items() if count}
    assert report.map_keys == len(expected)
    assert not report.map_full
    assert report.read_bytes >= 2 * report.before_bytes, "once for the map, once to rewrite"
    assert [(r.key, r.value) for r in lab.records()] == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_a_map_that_was_full(tmp_path: Path, seed: int, threads: int) -> None:
    lab, records = told(tmp_path, random.Random(seed), keys=60_000, keyless=0.1)
    settings = MapSettings(buffer_bytes=24 * 20_000, load_factor=1.0)
    removed: dict[str, int] = {}
    ends = []
    while not ends or ends[-1] < lab.end:
        report = lab.compact(threads=threads, map_settings=settings)
        assert report.map_full == (report.end_offset < lab.end)
        ends.append(report.end_offset)
        for reason, count in report.removed.items():
            removed[reason] = removed.get(reason, 0) + count
    assert len(ends) > 3
    assert ends == sorted(set(ends))
    expected = kept_of(records)
    without = sum(record.key is None for record in records)
    assert removed == {"keyless": without, "superseded": RECORDS - without - len(expected)}
    assert [(r.key, r.value) for r in lab.records()] == expected


def test_how_many_keys_are_to_come() -> None:
    rng = random.Random(1)
    for keys in (1_000, 60_000, 1_000_000):
        seen = {rng.randrange(keys) for _ in range(50_000)}
        whole = len(seen | {rng.randrange(keys) for _ in range(450_000)})
        assert 0.9 * whole < distinct_keys(len(seen), 50_000, 500_000) < 1.1 * whole
    assert distinct_keys(10, 10, 500) == 500
    assert distinct_keys(10, 20, 0) == 10
