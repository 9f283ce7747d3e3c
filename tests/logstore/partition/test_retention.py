from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.config import LogConfig
from logstore.partition.retention import (
    LogFacts,
    LogStartRetention,
    RetentionPolicy,
    SegmentFacts,
    SizeRetention,
    TimeRetention,
    deletable_prefix,
    policies_of,
)

NOW_MS = 10_000


def facts(*segments: tuple[int, int], log_start: int = 0, high_watermark: int = 1000, end: int = 1000) -> LogFacts:
    """Segments of (size, largest timestamp), ten offsets apart."""
    listed = tuple(SegmentFacts(10 * n, size, at_ms) for n, (size, at_ms) in enumerate(segments))
    return LogFacts(listed, log_start, high_watermark, end)


THREE = ((100, 1000), (100, 2000), (50, 3000))


@pytest.mark.parametrize(("log_start", "gone"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (500, 2)])
def test_segments_wholly_below_the_log_start_go_but_never_the_last(log_start: int, gone: int) -> None:
    assert deletable_prefix(LogStartRetention(), facts(*THREE, log_start=log_start), NOW_MS) == gone


@pytest.mark.parametrize(
    ("retention_bytes", "gone"), [(1000, 0), (250, 0), (151, 0), (150, 1), (51, 1), (50, 2), (1, 2), (0, 3)]
)
def test_the_log_never_drops_below_its_size_limit(retention_bytes: int, gone: int) -> None:
    assert deletable_prefix(SizeRetention(retention_bytes), facts(*THREE), NOW_MS) == gone


@pytest.mark.parametrize(("retention_ms", "gone"), [(9000, 0), (8999, 1), (8000, 1), (7999, 2), (7000, 2), (6999, 3)])
def test_a_segment_expires_once_it_is_older_than_the_limit(retention_ms: int, gone: int) -> None:
    assert deletable_prefix(TimeRetention(retention_ms), facts(*THREE), NOW_MS) == gone


def test_a_timestamp_in_the_future_pins_its_segment_and_all_behind_it() -> None:
    log = facts((100, 1000), (100, NOW_MS + 10**9), (100, 1000))
    assert deletable_prefix(TimeRetention(0), log, NOW_MS) == 1


@pytest.mark.parametrize(("high_watermark", "gone"), [(0, 0), (9, 0), (10, 1), (20, 2), (999, 2), (1000, 3)])
def test_nothing_above_the_high_watermark_goes(high_watermark: int, gone: int) -> None:
    assert deletable_prefix(TimeRetention(0), facts(*THREE, high_watermark=high_watermark), NOW_MS) == gone


def test_an_empty_last_segment_stays() -> None:
    assert deletable_prefix(TimeRetention(0), facts((100, 1000), (0, 1000)), NOW_MS) == 1
    assert deletable_prefix(SizeRetention(0), facts((0, 1000)), NOW_MS) == 0


def test_an_empty_segment_before_the_last_goes() -> None:
    assert deletable_prefix(TimeRetention(0), facts((0, 1000), (0, 1000), (5, 9999)), NOW_MS) == 3


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LogConfig(retention_bytes=5, retention_ms=5), ["log start", "size", "time"]),
        (LogConfig(retention_bytes=-1, retention_ms=5), ["log start", "time"]),
        (LogConfig(retention_bytes=0, retention_ms=-1), ["log start", "size"]),
        (LogConfig(retention_bytes=-1, retention_ms=-1), ["log start"]),
        (LogConfig(retention_bytes=5, cleanup_policy=frozenset({"compact"})), ["log start"]),
        (LogConfig(retention_bytes=5, cleanup_policy=frozenset()), ["log start"]),
        (
            LogConfig(retention_bytes=5, cleanup_policy=frozenset({"compact", "delete"})),
            ["log start", "size", "time"],
        ),
    ],
)
def test_the_passes_of_a_topic_come_in_kafkas_order(config: LogConfig, names: list[str]) -> None:
    assert [policy.name for policy in policies_of(config)] == names


@dataclass(frozen=True)
class Everything:
    name: str = "everything"

    def deletable(self, log: LogFacts, now_ms: int) -> int:
        return len(log.segments) + 5


def test_a_policy_that_wants_too_much_is_held_back_by_the_guards() -> None:
    policy: RetentionPolicy = Everything()
    assert deletable_prefix(policy, facts(*THREE), NOW_MS) == 3
    assert deletable_prefix(policy, facts((1, 1), (0, 0)), NOW_MS) == 1
    assert deletable_prefix(policy, facts(*THREE, high_watermark=15), NOW_MS) == 1


@given(
    segments=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2 * NOW_MS)), min_size=1, max_size=8),
    log_start=st.integers(0, 80),
    high_watermark=st.integers(0, 80),
    retention_bytes=st.integers(0, 600),
    retention_ms=st.integers(0, NOW_MS),
)
def test_every_pass_keeps_its_promise(
    segments: list[tuple[int, int]], log_start: int, high_watermark: int, retention_bytes: int, retention_ms: int
) -> None:
    end = 10 * len(segments)
    log = facts(*segments, log_start=min(log_start, end), high_watermark=min(high_watermark, end), end=end)
    for policy in (LogStartRetention(), SizeRetention(retention_bytes), TimeRetention(retention_ms)):
        count = deletable_prefix(policy, log, NOW_MS)
        gone, left = log.segments[:count], log.segments[count:]
        next_base = left[0].base_offset if left else end
        assert next_base <= log.high_watermark or not gone
        if isinstance(policy, LogStartRetention):
            assert next_base <= log.log_start_offset or not gone
        elif isinstance(policy, SizeRetention):
            assert not gone or sum(s.size_bytes for s in left) >= retention_bytes
        else:
            assert all(NOW_MS - s.largest_timestamp_ms > retention_ms for s in gone)
