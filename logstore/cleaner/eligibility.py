"""Which part of a log can be compacted, and whether it is due: pure rules over facts, with an answer for people.

The range and the ratio are Kafka's. Beyond it, a passed delete horizon makes a log due although nothing new came, and
nothing above the recovery point is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from logstore.limits import INT64_MAX


@dataclass(frozen=True, slots=True)
class SegmentAge:
    """A segment as these rules see it."""

    base_offset: int
    size_bytes: int
    largest_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class CleanerFacts:
    """A log at one moment; the last of `segments` is active."""

    segments: tuple[SegmentAge, ...]
    log_start_offset: int
    log_end_offset: int
    #: nothing at or above it is decided
    last_stable_offset: int
    #: where the last pass ended; None: there was none
    first_dirty_offset: int | None
    #: nothing above it is known to be on disk
    recovery_point: int = INT64_MAX
    #: first tombstone or marker that may go; None: there is none, or it is not known
    next_horizon_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CleanerRules:
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = INT64_MAX


class Due(Enum):
    """Why a log is to be compacted; the value is for people."""

    RATIO = "its dirty ratio is above the threshold"
    MAX_LAG = "records are older than max.compaction.lag.ms"
    HORIZON = "a delete horizon has passed"
    FORCED = "it was asked for"


class NotDue(Enum):
    EMPTY = "the log is empty"
    NOTHING_NEW = "there is nothing to clean: everything below the active segment was compacted"
    RATIO = "its dirty ratio is not above min.cleanable.dirty.ratio"
    MIN_LAG = "its records are younger than min.compaction.lag.ms"
    OPEN_TRANSACTION = "an open transaction holds it back"
    NOT_FLUSHED = "it is not on disk yet"
    ACTIVE_ONLY = "everything new is in the active segment"


@dataclass(frozen=True, slots=True)
class Cleanable:
    first_dirty_offset: int
    first_uncleanable_offset: int
    clean_bytes: int
    cleanable_bytes: int
    due: Due | None
    not_due: NotDue | None
    #: the earliest moment at which one of the rules can make it due by time alone; None: only new records can
    next_ms: int | None = None
    #: for how long it has been due by max.compaction.lag.ms
    late_ms: int = 0
    #: the checkpoint was outside the log and does not count
    checkpoint_reset: bool = False

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0


def first_dirty(facts: CleanerFacts) -> tuple[int, bool]:
    """Where cleaning goes on, and whether the checkpoint had to be thrown away for it."""
    offset = facts.log_start_offset if facts.first_dirty_offset is None else facts.first_dirty_offset
    if not facts.log_start_offset <= offset <= facts.log_end_offset:
        return facts.log_start_offset, True
    return offset, False


def uncleanable(facts: CleanerFacts, rules: CleanerRules, dirty: int, now_ms: int) -> tuple[int, NotDue | None]:
    """The first offset that must not be touched, and what holds it there (None: the active segment)."""
    active = facts.segments[-1].base_offset
    limit, held = active, None
    if facts.last_stable_offset < limit:
        limit, held = facts.last_stable_offset, NotDue.OPEN_TRANSACTION
    if facts.recovery_point < limit:
        limit, held = facts.recovery_point, NotDue.NOT_FLUSHED
    if rules.min_compaction_lag_ms > 0:
        for number in range(_at(facts.segments, dirty), len(facts.segments) - 1):
            segment = facts.segments[number]
            if segment.largest_timestamp_ms > now_ms - rules.min_compaction_lag_ms:
                if segment.base_offset < limit:
                    limit, held = segment.base_offset, NotDue.MIN_LAG
                break
    limit = max(limit, dirty)
    if limit >= active:
        return active, None
    return facts.segments[_at(facts.segments, limit)].base_offset, held


def cleanable(
    facts: CleanerFacts,
    rules: CleanerRules,
    *,
    now_ms: int,
    first_batch_timestamp_ms: Callable[[int], int] = lambda base_offset: -1,
    forced: bool = False,
) -> Cleanable:
    """What can be compacted now, whether it is due and why, or why not and when next.

    `first_batch_timestamp_ms` gives the largest timestamp of a segment's first batch, which max.compaction.lag.ms
    counts from; it is asked only where that is set.
    """
    dirty, reset = first_dirty(facts)
    if not facts.segments or not any(segment.size_bytes for segment in facts.segments):
        return Cleanable(dirty, dirty, 0, 0, None, NotDue.EMPTY, checkpoint_reset=reset)
    end, held = uncleanable(facts, rules, dirty, now_ms)
    sealed = facts.segments[:-1]
    clean_bytes = sum(s.size_bytes for s in facts.segments if s.base_offset < dirty)
    begin = _at(facts.segments, dirty)
    cleanable_bytes = sum(s.size_bytes for s in facts.segments[begin:] if s.base_offset < end)
    earliest = INT64_MAX
    if rules.max_compaction_lag_ms < INT64_MAX:
        times = [first_batch_timestamp_ms(s.base_offset) for s in sealed[begin:] if s.size_bytes]
        earliest = min((t for t in times if t > 0), default=INT64_MAX)
    due_by_lag_ms = INT64_MAX if earliest == INT64_MAX else earliest + rules.max_compaction_lag_ms
    result = Cleanable(dirty, end, clean_bytes, cleanable_bytes, None, None, checkpoint_reset=reset)
    ratio = result.ratio
    late_ms = max(now_ms - due_by_lag_ms, 0)
    horizon = facts.next_horizon_ms
    due: Due | None = None
    if late_ms > 0 and cleanable_bytes > 0:
        due = Due.MAX_LAG
    elif ratio > rules.min_cleanable_dirty_ratio and cleanable_bytes > 0:
        due = Due.RATIO
    elif horizon is not None and 0 <= horizon <= now_ms:
        due = Due.HORIZON
    elif forced and (cleanable_bytes > 0 or clean_bytes > 0):
        due = Due.FORCED
    not_due = None if due is not None else _why_not(facts, dirty, cleanable_bytes, held)
    times = [horizon if horizon is not None and horizon > now_ms else INT64_MAX]
    times.append(due_by_lag_ms if due_by_lag_ms > now_ms else INT64_MAX)
    if held is NotDue.MIN_LAG:
        held_by = facts.segments[_at(facts.segments, end)]
        times.append(held_by.largest_timestamp_ms + rules.min_compaction_lag_ms)
    next_ms = min(times)
    return Cleanable(
        dirty,
        end,
        clean_bytes,
        cleanable_bytes,
        due,
        not_due,
        None if due is not None or next_ms == INT64_MAX else next_ms,
        late_ms if due is Due.MAX_LAG else 0,
        reset,
    )


def _why_not(facts: CleanerFacts, dirty: int, cleanable_bytes: int, held: NotDue | None) -> NotDue:
    if cleanable_bytes > 0:
        return NotDue.RATIO
    if held is not None:
        return held
    return NotDue.ACTIVE_ONLY if facts.segments[-1].size_bytes else NotDue.NOTHING_NEW


def _at(segments: Sequence[SegmentAge], offset: int) -> int:
    """Which segment holds `offset`, or would."""
    at = 0
    for number, segment in enumerate(segments):
        if segment.base_offset > offset:
            break
        at = number
    return at
