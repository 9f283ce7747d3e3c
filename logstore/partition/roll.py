"""When the active segment is closed and a new one begun: settings and reasons; the `place` kernel applies the rule.

A batch begins a new segment, in this order of reasons, when the segment
- has no room for it below segment.bytes;
- is not empty and too old by segment.ms: in record time since the first batch where that has a timestamp, else by the
  clock since the segment was made;
- has a full offset index, or a time index with one entry left, which is kept for the last;
- begins 2^31 or more offsets below it.
"""

from __future__ import annotations

from enum import Enum

from crc32c import crc32c

from logstore.config import LogConfig
from logstore.records import codes
from logstore.segment.segment import RollLimits


class RollReason(Enum):
    SIZE = codes.ROLL_SIZE
    TIME = codes.ROLL_TIME
    OFFSET_INDEX_FULL = codes.ROLL_INDEX_FULL
    TIME_INDEX_FULL = codes.ROLL_TIME_INDEX_FULL
    OFFSET_OVERFLOW = codes.ROLL_OFFSET_OVERFLOW


def roll_limits(config: LogConfig, jitter_ms: int, *, now_ms: int, fresh: bool) -> RollLimits:
    """What the topic's settings allow a segment that has this jitter."""
    return RollLimits(config.segment_bytes, max_segment_ms(config) - jitter_ms, now_ms, fresh)


def max_segment_ms(config: LogConfig) -> int:
    """segment.ms, capped by the compaction lag: what never rolls can never be compacted."""
    return min(config.segment_ms, config.max_compaction_lag_ms) if config.compact else config.segment_ms


def jitter_ms(config: LogConfig, partition: str, base_offset: int) -> int:
    """Taken off a segment's age, so that many partitions do not roll in the same moment. Not random: every process that
    opens the segment must come to the same.
    """
    bound = min(config.segment_jitter_ms, config.segment_ms)
    return crc32c(f"{partition}@{base_offset}".encode()) % bound if bound > 0 else 0
