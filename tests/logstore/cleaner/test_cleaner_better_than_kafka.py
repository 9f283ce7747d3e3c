"""What compaction does better than Kafka's own, each with a test that shows it."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.eligibility import Due, Lookups
from logstore.errors import CorruptBatch, InvalidConfig
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record

# Two messages of 128 bytes with one MD5, published by Wang, Feng, Lai and Yu in 2004.
_ONE = bytes.fromhex(
    "d131dd02c5e6eec4693d9a0698aff95c2fcab58712467eab4004583eb8fb7f8955ad340609f4b30283e488832571415a"
    "085125e8f7cdc99fd91dbdf280373c5bd8823e3156348f5bae6dacd436c919c6dd53e2b487da03fd02396306d248cda0"
    "e99f33420f577ee8ce54b67080a80d1ec69821bcb6a8839396f9652b6ff72a70"
)
_TWO = bytes.fromhex(
    "d131dd02c5e6eec4693d9a0698aff95c2fcab50712467eab4004583eb8fb7f8955ad340609f4b30283e4888325f1415a"
    "085125e8f7cdc99fd91dbd7280373c5bd8823e3156348f5bae6dacd436c919c6dd53e23487da03fd02396306d248cda0"
    "e99f33420f577ee8ce54b67080280d1ec69821bcb6a8839396f965ab6ff72a70"
)


def test_two_keys_whose_md5_collide_are_both_kept(tmp_path: Path) -> None:
    import hashlib

    assert _ONE != _TWO
    assert hashlib.md5(_ONE).digest() == hashlib.md5(_TWO).digest()
    left = {}
    for algorithm in ("md5", "siphash"):
        lab = Lab(tmp_path / algorithm, segment_bytes=100_000)
        lab.append([Record(_ONE, b"one", NOW_MS)], [Record(_TWO, b"two", NOW_MS)], roll=True)
        lab.compact(map_settings=MapSettings(buffer_bytes=1 << 20, algorithm=algorithm))
        left[algorithm] = [r.value for r in lab.records()]
    assert left == {"md5": [b"two"], "siphash": [b"one", b"two"]}


def test_source_checksums_are_verified_before_anything_is_rewritten(lab: Lab) -> None:
    rng = random.Random(1)
    lab.append(*[[Record(b"k%d" % rng.randrange(5), rng.randbytes(20), NOW_MS)] for _ in range(60)], roll=True)
    path = sorted(Path(lab.directory).glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    before = {each.name: each.read_bytes() for each in Path(lab.directory).iterdir()}
    with pytest.raises(CorruptBatch, match="checksum"):
        lab.compact()
    assert {each.name: each.read_bytes() for each in Path(lab.directory).iterdir()} == before
    assert not os.path.exists(lab.folder)


def test_a_passed_delete_horizon_makes_an_idle_partition_due(lab: Lab) -> None:
    lab.append([Record(b"a", b"1", NOW_MS), Record(b"b", b"1", NOW_MS)], [Record(b"a", None, NOW_MS)], roll=True)
    assert lab.cleanable().due is Due.RATIO
    lab.compact(NOW_MS)
    waiting = lab.cleanable(NOW_MS + 1)
    assert waiting.due is None
    assert waiting.next_ms == NOW_MS + lab.config.delete_retention_ms
    assert lab.cleanable(waiting.next_ms).due is Due.HORIZON
    assert lab.compact(waiting.next_ms).removed == {"tombstone": 1}
    assert lab.cleanable(waiting.next_ms * 2).due is None
    assert [r.key for r in lab.records()] == [b"b"]


def test_groups_in_which_nothing_would_change_are_not_rewritten(lab: Lab) -> None:
    lab.append(*[[Record(b"k%d" % i, b"x" * 80, NOW_MS)] for i in range(100)], roll=True)
    lab.compact()
    stamps = {p.name: p.stat().st_ino for p in Path(lab.directory).glob("*.log")}
    assert len(stamps) > 8
    lab.append([Record(b"k95", b"new", NOW_MS)], roll=True)
    report = lab.compact()
    assert report.groups_changed <= 2
    left = {p.name: p.stat().st_ino for p in Path(lab.directory).glob("*.log")}
    changed = {name for name, inode in stamps.items() if left.get(name) != inode}
    assert changed
    assert changed <= {name for name in stamps if int(name[:20]) > 80}
    assert report.written_bytes < 3 * lab.config.segment_bytes


def test_many_passes_over_a_hot_topic_leave_few_segments(lab: Lab) -> None:
    """Kafka rewrites all each time; we leave what does not change, and must not end with many small files."""
    rng = random.Random(7)
    for step in range(200):
        lab.append([Record(b"k%d" % rng.randrange(50), rng.randbytes(30), NOW_MS + step) for _ in range(10)], roll=True)
        lab.compact(NOW_MS + step)
    sizes = [s.size_bytes for s in lab.state.segments[:-1]]
    # No two neighbours that would fit one segment are left, but for those the last pass thinned.
    fits = sum(1 for one, two in itertools.pairwise(sizes) if one + two <= lab.config.segment_bytes)
    assert fits <= 2, sizes
    assert len(lab.records()) <= 60


def test_keyless_records_are_counted_before_they_go(tmp_path: Path) -> None:
    lab = Lab(tmp_path, cleanup_policy=frozenset({"delete"}))
    lab.append([Record(None, b"x", NOW_MS), Record(b"k", b"1", NOW_MS), Record(None, b"y", NOW_MS)], roll=True)
    lab.reconfigure(cleanup_policy=frozenset({"compact"}))
    assert lab.compact().removed == {"keyless": 2}
    assert [r.key for r in lab.records()] == [b"k"]


def test_a_budget_that_holds_no_key_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidConfig, match="no room for a single key"):
        MapSettings(buffer_bytes=23)


def test_max_lag_has_priority_and_lateness_is_reported(lab: Lab) -> None:
    from logstore.cleaner.eligibility import CleanerRules, cleanable

    lab.append(*[[Record(b"k%d" % i, b"x" * 50, NOW_MS)] for i in range(40)], roll=True)
    rules = CleanerRules(1.0, max_compaction_lag_ms=1000)
    found = cleanable(lab.facts(), rules, now_ms=NOW_MS + 1700, looks=Lookups(lambda base: NOW_MS))
    assert found.due is Due.MAX_LAG
    assert found.late_ms == 700
    early = cleanable(lab.facts(), rules, now_ms=NOW_MS + 900, looks=Lookups(lambda base: NOW_MS))
    assert (early.due, early.next_ms) == (None, NOW_MS + 1000)
