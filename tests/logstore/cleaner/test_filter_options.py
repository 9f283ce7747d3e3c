"""What compaction can do beyond Kafka's rules, when a topic asks for it: each against a model in plain Python."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.work import CleaningOptions
from logstore.records.marks import ORDER_HEADER, ORDER_TIMESTAMP
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record
from logstore.records.table import CODEC_MASK

DAY_MS = 86_400_000
BIG = 1 << 20
LOSES = -(1 << 63)


def version_of(record: Record) -> int:
    for key, value in reversed(record.headers):
        if key == "version" and value is not None and len(value) == 8:
            return int(struct.unpack(">q", value)[0])
    return LOSES


def winners(records: list[Record], end: int, order: int) -> list[Record]:
    """Below `end` the greatest (version, offset) of each key stays."""
    best: dict[bytes | None, tuple[int, int]] = {}
    for r in records:
        if r.offset < end:
            rank = (r.timestamp_ms if order == ORDER_TIMESTAMP else version_of(r), r.offset)
            best[r.key] = max(best.get(r.key, rank), rank)
    return [r for r in records if r.offset >= end or best[r.key][1] == r.offset]


def drawn(rng: random.Random) -> Record:
    headers = []
    if rng.random() < 0.8:
        headers.append(("version", struct.pack(">q", rng.randrange(-3, 6))))
    if rng.random() < 0.2:
        headers.append(("version", rng.choice([None, b"7", b"123456789"])))  # not a version: does not count
    if rng.random() < 0.3:
        headers.insert(0, ("other", b"\0" * 8))
    value = None if rng.random() < 0.15 else rng.randbytes(rng.randrange(25))
    return Record(b"k%d" % rng.randrange(8), value, NOW_MS + rng.randrange(50), tuple(headers))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), order=st.sampled_from([ORDER_TIMESTAMP, ORDER_HEADER]), threads=st.integers(1, 2))
def test_the_greatest_version_wins_and_the_offset_decides_ties(
    tmp_path_factory: pytest.TempPathFactory, seed: int, order: int, threads: int
) -> None:
    rng = random.Random(seed)
    lab = Lab(tmp_path_factory.mktemp("lab"), segment_bytes=rng.choice([400, 4000]))
    chosen = MapSettings(buffer_bytes=BIG, order=order, header=b"version")
    for _ in range(3):
        lab.append(*[[drawn(rng) for _ in range(rng.randrange(1, 6))] for _ in range(12)], codec_id=rng.choice([0, 4]))
        everything = lab.records()
        report = lab.compact(map_settings=chosen, threads=threads)
        assert lab.records() == winners(everything, report.end_offset, order)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), codec=st.sampled_from([0, 3]))
def test_expired_records_become_tombstones_at_their_offset_and_leave_by_their_horizon(
    tmp_path_factory: pytest.TempPathFactory, seed: int, codec: int
) -> None:
    rng = random.Random(seed)
    lab = Lab(tmp_path_factory.mktemp("lab"))
    records = [
        Record(b"k%d" % rng.randrange(20), rng.randbytes(10), NOW_MS - rng.randrange(2000), (("h", b"1"),))
        for _ in range(60)
    ]
    lab.append(*[records[at : at + 4] for at in range(0, 60, 4)], roll=True, codec_id=codec)
    everything = lab.records()
    last = {r.key: r for r in everything}
    report = lab.compact(NOW_MS, options=CleaningOptions(key_ttl_ms=1000))
    expired = [r for r in last.values() if r.timestamp_ms < NOW_MS - 1000]
    assert report.removed.get("expired", 0) == len(expired)
    left = {r.offset: r for r in lab.records()}
    assert sorted(left) == sorted(r.offset for r in last.values())
    for r in last.values():
        found = left[r.offset]
        assert (found.key, found.timestamp_ms, found.headers) == (r.key, r.timestamp_ms, r.headers)
        assert found.value == (None if r in expired else r.value)
    lab.compact(NOW_MS + DAY_MS, options=CleaningOptions(key_ttl_ms=1000 + DAY_MS))
    assert {r.key for r in lab.records()} == {r.key for r in last.values() if r not in expired}


def batches(lab: Lab) -> list[tuple[int, int, int]]:
    """Base offset, last offset and codec of each batch below the active segment."""
    found = []
    with lab.open() as log:
        for segment in log.segments[:-1]:
            for header in segment.headers():
                assert header.base_offset is not None
                found.append((header.base_offset, header.last_offset, header.attributes & CODEC_MASK))
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), codec=st.sampled_from([0, 2, 4]), merge=st.sampled_from([100, 1000, 100_000]))
def test_thinned_neighbours_are_joined_and_no_record_changes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, codec: int, merge: int
) -> None:
    rng = random.Random(seed)
    lab = Lab(tmp_path_factory.mktemp("lab"), segment_bytes=3000)
    plain = Lab(tmp_path_factory.mktemp("plain"), segment_bytes=3000)
    rounds = [[[drawn(rng) for _ in range(rng.randrange(1, 9))] for _ in range(20)] for _ in range(2)]
    for each in rounds:
        for one in (lab, plain):
            one.append(*each, codec_id=codec, roll=True)
        lab.compact(options=CleaningOptions(merge_bytes=merge))
        plain.compact()
        assert lab.records() == plain.records()
    joined, apart = batches(lab), batches(plain)
    assert len(joined) <= len(apart)
    assert {last for _, last, _ in joined} <= {last for _, last, _ in apart}
    if merge == 100_000 and len(apart) > 2 * len(lab.state.segments):
        assert len(joined) < len(apart)
    for (_, before, _), (after, _, _) in itertools.pairwise(joined):
        assert before < after


@pytest.mark.parametrize(("codec_id", "target"), [(0, 4), (4, 0), (2, 3), (1, 4)])
def test_cold_data_is_compressed_anew(lab: Lab, codec_id: int, target: int) -> None:
    rng = random.Random(3)
    lab.append(*[[drawn(rng) for _ in range(9)] for _ in range(20)], codec_id=codec_id, roll=True)
    plain_records = lab.records()
    options = CleaningOptions(recompress_codec_id=target, recompress_after_ms=DAY_MS)
    import time

    now_ms = time.time_ns() // 1_000_000
    lab.compact(now_ms, options=options)
    assert {codec for _, _, codec in batches(lab)} == {codec_id}, "what is young stays as it is"
    survivors = lab.records()
    lab.compact(now_ms + 2 * DAY_MS, options=options)
    assert {codec for _, _, codec in batches(lab)} == {target}
    assert [r for r in lab.records() if r.value is not None] == [r for r in survivors if r.value is not None]
    assert len(survivors) < len(plain_records)
