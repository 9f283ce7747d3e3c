"""Which part of a log can be compacted, and whether it is due: pure rules over facts, with an answer for people.

The range and the ratio are Kafka's. Beyond it, a passed delete horizon, keys past their time to live and segments that
are to be recompressed make a log due although nothing new came, and nothing above the recovery point is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from logstore.limits import INT64_MAX

_SLACK_MS_MAX = 86_400_000


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
    #: oldest record with a value in the compacted part; -1: there is none, None: not known
    oldest_value_ms: int | None = None
    #: file time of the oldest segment of the compacted part that is yet to be recompressed; -1 and None likewise
    oldest_other_codec_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CleanerRules:
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = INT64_MAX
    #: 0: keys live forever
    key_ttl_ms: int = 0
    #: None: nothing is recompressed
    recompress_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Lookups:
    """What is asked of a segment's file, by its base offset, only where a rule needs it."""

    #: largest timestamp of its first batch, -1 where there is none
    first_batch_timestamp_ms: Callable[[int], int] = lambda base_offset: -1
    #: its file time, None where its first batch has the codec that compaction would give it
    other_codec_ms: Callable[[int], int | None] = lambda base_offset: None


NO_LOOKUPS = Lookups()


class Due(Enum):
    """Why a log is to be compacted; the value is for people."""

    RATIO = "its dirty ratio is above the threshold"
    MAX_LAG = "records are older than max.compaction.lag.ms"
    HORIZON = "a delete horizon has passed"
    EXPIRED = "records are older than duramen.key.ttl.ms"
    RECOMPRESS = "segments are older than duramen.compaction.recompress.after.ms"
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
    #: the rule of that moment; None: min.compaction.lag.ms lets go of it then
    next_due: Due | None = None
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
    looks: Lookups = NO_LOOKUPS,
    forced: bool = False,
) -> Cleanable:
    """What can be compacted now, whether it is due and why, or why not and when next."""
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
        firsts = [looks.first_batch_timestamp_ms(s.base_offset) for s in sealed[begin:] if s.size_bytes]
        earliest = min((t for t in firsts if t > 0), default=INT64_MAX)
    due_by_lag_ms = INT64_MAX if earliest == INT64_MAX else earliest + rules.max_compaction_lag_ms
    result = Cleanable(dirty, end, clean_bytes, cleanable_bytes, None, None, checkpoint_reset=reset)
    ratio = result.ratio
    late_ms = max(now_ms - due_by_lag_ms, 0)
    horizon_ms = INT64_MAX if facts.next_horizon_ms is None else facts.next_horizon_ms
    clean = [s for s in sealed if s.base_offset < dirty and s.size_bytes]
    fresh = [s for s in sealed[begin:] if s.base_offset < end and s.size_bytes]
    expired_ms = expiry_ms(facts, rules, clean, fresh, looks)
    recompress_ms = recompression_ms(facts, rules, clean, fresh, looks)
    due: Due | None = None
    if late_ms > 0 and cleanable_bytes > 0:
        due = Due.MAX_LAG
    elif ratio > rules.min_cleanable_dirty_ratio and cleanable_bytes > 0:
        due = Due.RATIO
    elif 0 <= horizon_ms <= now_ms:
        due = Due.HORIZON
    elif expired_ms <= now_ms:
        due = Due.EXPIRED
    elif recompress_ms <= now_ms:
        due = Due.RECOMPRESS
    elif forced and (cleanable_bytes > 0 or clean_bytes > 0):
        due = Due.FORCED
    not_due = None if due is not None else _why_not(facts, dirty, cleanable_bytes, held)
    times: list[tuple[int, Due | None]] = [
        (horizon_ms, Due.HORIZON),
        (due_by_lag_ms, Due.MAX_LAG),
        (expired_ms, Due.EXPIRED),
        (recompress_ms, Due.RECOMPRESS),
    ]
    times = [each for each in times if each[0] > now_ms]
    if held is NotDue.MIN_LAG:
        held_by = facts.segments[_at(facts.segments, end)]
        times.append((held_by.largest_timestamp_ms + rules.min_compaction_lag_ms, None))
    next_ms, next_due = min(times, key=lambda each: each[0], default=(INT64_MAX, None))
    waits = due is None and next_ms < INT64_MAX
    return Cleanable(
        dirty,
        end,
        clean_bytes,
        cleanable_bytes,
        due,
        not_due,
        next_ms if waits else None,
        next_due if waits else None,
        late_ms if due is Due.MAX_LAG else 0,
        reset,
    )


def expiry_ms(
    facts: CleanerFacts,
    rules: CleanerRules,
    clean: Sequence[SegmentAge],
    fresh: Sequence[SegmentAge],
    looks: Lookups = NO_LOOKUPS,
) -> int:
    """When the log is due because of keys past their time to live; INT64_MAX: never.

    A little after the first of them, so that a log is not rewritten for every record that expires.
    """
    if not rules.key_ttl_ms:
        return INT64_MAX
    times = [-1 if facts.oldest_value_ms is None else facts.oldest_value_ms]
    if facts.oldest_value_ms is None and clean:  # the pass it leads to finds out
        times.append(looks.first_batch_timestamp_ms(clean[0].base_offset))
    if fresh:
        times.append(looks.first_batch_timestamp_ms(fresh[0].base_offset))
        times += [segment.largest_timestamp_ms for segment in fresh]
    oldest_ms = min((time for time in times if time >= 0), default=INT64_MAX)
    return min(oldest_ms + rules.key_ttl_ms + slack_ms(rules.key_ttl_ms) + 1, INT64_MAX)


def recompression_ms(
    facts: CleanerFacts,
    rules: CleanerRules,
    clean: Sequence[SegmentAge],
    fresh: Sequence[SegmentAge],
    looks: Lookups = NO_LOOKUPS,
) -> int:
    """When the log is due because of segments that are to be recompressed; INT64_MAX: never."""
    after_ms = rules.recompress_after_ms
    if after_ms is None:
        return INT64_MAX
    times = [-1 if facts.oldest_other_codec_ms is None else facts.oldest_other_codec_ms]
    if facts.oldest_other_codec_ms is None:
        found = (looks.other_codec_ms(segment.base_offset) for segment in clean)
        times.append(next((time for time in found if time is not None), -1))
    if fresh and (time := looks.other_codec_ms(fresh[0].base_offset)) is not None:
        times.append(time)
    oldest_ms = min((time for time in times if time >= 0), default=INT64_MAX)
    return min(oldest_ms + after_ms + slack_ms(after_ms), INT64_MAX)


def slack_ms(age_ms: int) -> int:
    """How long what reaches an age waits for more: a tenth of it, at most a day."""
    return min(age_ms // 10, _SLACK_MS_MAX)


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
