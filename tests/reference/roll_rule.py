"""The rule of rolling as one pure function, which the place kernel is held to; and Kafka's random jitter."""

from __future__ import annotations

import random
from dataclasses import dataclass

from logstore.config import LogConfig
from logstore.limits import RELATIVE_OFFSET_MAX
from logstore.partition.roll import RollReason, max_segment_ms


@dataclass(frozen=True, slots=True)
class ActiveSegment:
    """The active segment as the rule sees it. `first_timestamp_ms` is the first batch's largest, -1 if it has none."""

    base_offset: int
    size_bytes: int
    first_timestamp_ms: int
    created_ms: int
    jitter_ms: int
    index_entries: int
    index_entries_max: int
    time_index_entries: int
    time_index_entries_max: int


@dataclass(frozen=True, slots=True)
class NextAppend:
    size_bytes: int
    last_offset: int
    max_timestamp_ms: int


def roll_reason(config: LogConfig, segment: ActiveSegment, append: NextAppend, now_ms: int) -> RollReason | None:
    """Why `append` must begin a new segment, or None. Age is record time wherever records have any."""
    if segment.size_bytes > config.segment_bytes - append.size_bytes:
        return RollReason.SIZE
    if segment.size_bytes > 0:
        waited_ms = now_ms - segment.created_ms
        if segment.first_timestamp_ms >= 0:
            waited_ms = append.max_timestamp_ms - segment.first_timestamp_ms
        if waited_ms > max_segment_ms(config) - segment.jitter_ms:
            return RollReason.TIME
    if segment.index_entries >= segment.index_entries_max:
        return RollReason.OFFSET_INDEX_FULL
    if segment.time_index_entries >= segment.time_index_entries_max - 1:  # one slot is kept for the final entry
        return RollReason.TIME_INDEX_FULL
    if not 0 <= append.last_offset - segment.base_offset <= RELATIVE_OFFSET_MAX:
        return RollReason.OFFSET_OVERFLOW
    return None


def draw_jitter_ms(config: LogConfig, randomness: random.Random) -> int:
    """Drawn once a segment, so that many partitions do not roll in the same moment."""
    bound = min(config.segment_jitter_ms, config.segment_ms)
    return randomness.randrange(bound) if bound > 0 else 0
