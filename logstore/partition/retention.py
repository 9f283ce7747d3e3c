"""Which segments may go: pure rules over a list of segments, oldest first.

A pass removes a prefix of whole segments and stops at the first that does not qualify. Kafka's order is log start,
size, time, each computed from what the one before left; another policy is one more object in the list. A dry run and
a run decide by the same function, `retention_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from logstore.config import LogConfig
from logstore.topic import TopicPartition


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    base_offset: int
    size_bytes: int
    #: from the segment list or the time index, which has no checksum: enough to keep a segment, not to delete it
    largest_timestamp_ms: int
    #: the same from the log itself, asked only for a segment that would go
    confirm_ms: Callable[[], int] | None = field(default=None, compare=False)

    def is_older(self, before_ms: int) -> bool:
        """Whether its newest record is older, by the segment list or time index and then by its batches."""
        if self.largest_timestamp_ms >= before_ms:
            return False
        return self.confirm_ms is None or self.confirm_ms() < before_ms


@dataclass(frozen=True, slots=True)
class LogFacts:
    segments: tuple[SegmentFacts, ...]
    log_start_offset: int
    high_watermark: int
    log_end_offset: int


class RetentionPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def deletable(self, log: LogFacts, now_ms: int) -> int:
        """How many of the oldest segments this policy gives up, before the guards of `deletable_prefix`."""
        ...


@dataclass(frozen=True, slots=True)
class LogStartRetention:
    """Segments that lie wholly below the log start."""

    name: str = "log start"

    def deletable(self, log: LogFacts, now_ms: int) -> int:
        count = 0
        while count + 1 < len(log.segments) and log.segments[count + 1].base_offset <= log.log_start_offset:
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class SizeRetention:
    """The oldest segments beyond retention.bytes; the log never drops below the limit."""

    retention_bytes: int
    name: str = "size"

    def deletable(self, log: LogFacts, now_ms: int) -> int:
        excess = sum(segment.size_bytes for segment in log.segments) - self.retention_bytes
        count = 0
        for segment in log.segments:
            if excess - segment.size_bytes < 0:
                break
            excess -= segment.size_bytes
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class TimeRetention:
    """Segments whose newest record is older than retention.ms."""

    retention_ms: int
    name: str = "time"

    def deletable(self, log: LogFacts, now_ms: int) -> int:
        count = 0
        for segment in log.segments:
            if not segment.is_older(now_ms - self.retention_ms):
                break
            count += 1
        return count


def policies_of(config: LogConfig) -> tuple[RetentionPolicy, ...]:
    """The passes a topic's settings ask for, in Kafka's order."""
    passes: list[RetentionPolicy] = [LogStartRetention()]
    if config.delete and config.retention_bytes >= 0:
        passes.append(SizeRetention(config.retention_bytes))
    if config.delete and config.retention_ms >= 0:
        passes.append(TimeRetention(config.retention_ms))
    return tuple(passes)


def deletable_prefix(policy: RetentionPolicy, log: LogFacts, now_ms: int) -> int:
    """How many segments really may go: nothing above the high watermark, and never an empty last segment."""
    count = min(policy.deletable(log, now_ms), len(log.segments))
    for at in range(count):
        is_last = at + 1 == len(log.segments)
        end_offset = log.log_end_offset if is_last else log.segments[at + 1].base_offset
        if log.high_watermark < end_offset or (is_last and log.segments[at].size_bytes == 0):
            return at
    return count


@dataclass(frozen=True, slots=True)
class RetentionPass:
    """What one policy gives up."""

    policy: str
    segments: tuple[SegmentFacts, ...]

    @property
    def base_offsets(self) -> tuple[int, ...]:
        return tuple(segment.base_offset for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Retention:
    """What a run did to a partition, or would do."""

    partition: TopicPartition
    log_start_offset: int
    #: what each policy removed, or would remove
    passes: tuple[RetentionPass, ...]


@dataclass(frozen=True, slots=True)
class DeletedRecords:
    partition: TopicPartition
    log_start_offset_before: int
    log_start_offset: int


def retention_passes(policies: Sequence[RetentionPolicy], log: LogFacts, now_ms: int) -> Iterator[RetentionPass]:
    """What each policy in turn removes from what the ones before left; those that remove nothing are left out.

    Raises CorruptBatch where the age of a segment that would go cannot be read from its log.
    """
    for policy in policies:
        count = deletable_prefix(policy, log, now_ms)
        if count:
            yield RetentionPass(policy.name, log.segments[:count])
            left = log.segments[count:]
            start = left[0].base_offset if left else log.log_end_offset
            log = replace(log, segments=left, log_start_offset=max(start, log.log_start_offset))
