from __future__ import annotations

import random
from dataclasses import replace

import pytest

from logstore.config import LogConfig
from logstore.limits import RELATIVE_OFFSET_MAX
from logstore.partition.roll import RollReason, max_segment_ms
from reference.roll_rule import ActiveSegment, NextAppend, draw_jitter_ms, roll_reason

CONFIG = LogConfig(segment_bytes=1000, segment_ms=500)
#: half full, first batch at 10_000
SEGMENT = ActiveSegment(
    base_offset=100,
    size_bytes=600,
    first_timestamp_ms=10_000,
    created_ms=50_000,
    jitter_ms=0,
    index_entries=3,
    index_entries_max=8,
    time_index_entries=3,
    time_index_entries_max=8,
)
APPEND = NextAppend(size_bytes=100, last_offset=150, max_timestamp_ms=10_100)
NOW_MS = 50_000


def reason(
    segment: dict[str, int] | None = None,
    append: dict[str, int] | None = None,
    config: LogConfig = CONFIG,
    now_ms: int = NOW_MS,
) -> RollReason | None:
    return roll_reason(config, replace(SEGMENT, **(segment or {})), replace(APPEND, **(append or {})), now_ms)


def test_an_append_with_room_and_time_left_does_not_roll() -> None:
    assert reason() is None


@pytest.mark.parametrize(("size", "rolls"), [(400, None), (401, RollReason.SIZE)])
def test_size_rolls_when_the_append_would_not_fit(size: int, rolls: RollReason | None) -> None:
    assert reason(append={"size_bytes": size}) is rolls


def test_an_empty_segment_takes_an_append_of_exactly_segment_bytes() -> None:
    assert reason({"size_bytes": 0, "first_timestamp_ms": -1}, {"size_bytes": 1000}) is None


@pytest.mark.parametrize(("max_timestamp_ms", "rolls"), [(10_500, None), (10_501, RollReason.TIME)])
def test_time_is_record_time_and_must_be_exceeded(max_timestamp_ms: int, rolls: RollReason | None) -> None:
    assert reason(append={"max_timestamp_ms": max_timestamp_ms}, now_ms=10**9) is rolls


def test_records_from_the_past_never_roll_by_time() -> None:
    assert reason(append={"max_timestamp_ms": 3}, now_ms=10**9) is None


def test_a_first_batch_at_time_zero_counts_as_record_time() -> None:
    assert reason({"first_timestamp_ms": 0}, {"max_timestamp_ms": 501}) is RollReason.TIME


@pytest.mark.parametrize(("now_ms", "rolls"), [(50_500, None), (50_501, RollReason.TIME)])
def test_without_a_first_timestamp_the_wall_clock_since_creation_counts(now_ms: int, rolls: RollReason | None) -> None:
    assert reason({"first_timestamp_ms": -1}, {"max_timestamp_ms": 10**12}, now_ms=now_ms) is rolls


def test_an_empty_segment_never_rolls_by_time() -> None:
    assert reason({"size_bytes": 0, "first_timestamp_ms": -1}, now_ms=10**12) is None


@pytest.mark.parametrize(("max_timestamp_ms", "rolls"), [(10_380, None), (10_381, RollReason.TIME)])
def test_jitter_is_taken_off_the_age(max_timestamp_ms: int, rolls: RollReason | None) -> None:
    assert reason({"jitter_ms": 120}, {"max_timestamp_ms": max_timestamp_ms}) is rolls


@pytest.mark.parametrize(("policy", "rolls"), [({"compact"}, RollReason.TIME), ({"delete"}, None), (set(), None)])
def test_the_compaction_lag_caps_the_age_of_compacted_topics_only(policy: set[str], rolls: RollReason | None) -> None:
    config = replace(CONFIG, max_compaction_lag_ms=99, cleanup_policy=frozenset(policy))
    assert reason(config=config) is rolls


@pytest.mark.parametrize(
    ("entries", "rolls"), [(7, None), (8, RollReason.OFFSET_INDEX_FULL), (9, RollReason.OFFSET_INDEX_FULL)]
)
def test_a_full_offset_index_rolls(entries: int, rolls: RollReason | None) -> None:
    assert reason({"index_entries": entries}) is rolls


@pytest.mark.parametrize(("entries", "rolls"), [(6, None), (7, RollReason.TIME_INDEX_FULL)])
def test_a_time_index_is_full_one_entry_early(entries: int, rolls: RollReason | None) -> None:
    assert reason({"time_index_entries": entries}) is rolls


def test_an_index_without_any_room_rolls_even_an_empty_segment() -> None:
    empty = {"size_bytes": 0, "first_timestamp_ms": -1, "index_entries": 0, "time_index_entries": 0}
    assert reason({**empty, "index_entries_max": 0}) is RollReason.OFFSET_INDEX_FULL
    assert reason({**empty, "time_index_entries_max": 0}) is RollReason.TIME_INDEX_FULL
    assert reason({**empty, "time_index_entries_max": 1}) is RollReason.TIME_INDEX_FULL


@pytest.mark.parametrize(
    ("last_offset", "rolls"),
    [
        (100, None),
        (100 + RELATIVE_OFFSET_MAX, None),
        (101 + RELATIVE_OFFSET_MAX, RollReason.OFFSET_OVERFLOW),
        (99, RollReason.OFFSET_OVERFLOW),
    ],
)
def test_relative_offsets_have_31_bits(last_offset: int, rolls: RollReason | None) -> None:
    assert reason(append={"last_offset": last_offset}) is rolls


def test_the_reasons_come_in_kafkas_order() -> None:
    everything = {"index_entries": 8, "time_index_entries": 8}
    late = {"size_bytes": 500, "last_offset": 2**40, "max_timestamp_ms": 20_000}
    assert reason(everything, late) is RollReason.SIZE
    late["size_bytes"] = 1
    assert reason(everything, late) is RollReason.TIME
    late["max_timestamp_ms"] = 0
    assert reason(everything, late) is RollReason.OFFSET_INDEX_FULL
    assert reason({"time_index_entries": 8}, late) is RollReason.TIME_INDEX_FULL
    assert reason(None, late) is RollReason.OFFSET_OVERFLOW


def test_the_largest_segment_age_is_capped_by_the_compaction_lag() -> None:
    compacted = LogConfig(segment_ms=500, max_compaction_lag_ms=300, cleanup_policy=frozenset({"compact", "delete"}))
    assert max_segment_ms(compacted) == 300
    assert max_segment_ms(replace(compacted, max_compaction_lag_ms=700)) == 500
    assert max_segment_ms(replace(compacted, cleanup_policy=frozenset({"delete"}))) == 500


def test_jitter_lies_below_both_of_its_bounds() -> None:
    randomness = random.Random(1)
    for config, bound in [
        (LogConfig(segment_ms=500, segment_jitter_ms=20), 20),
        (LogConfig(segment_ms=7, segment_jitter_ms=20), 7),
    ]:
        drawn = {draw_jitter_ms(config, randomness) for _ in range(500)}
        assert drawn == set(range(bound))
    assert draw_jitter_ms(LogConfig(segment_jitter_ms=0), randomness) == 0
