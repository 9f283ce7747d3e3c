"""What a pass would remove, without writing anything: the map and the filter over the log, or over a part of it.

Up to a limit of bytes the answer is exact for the log as it is; beyond it, a part is read and the rest is taken to be
like it, and the answer says so.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

from logstore.cleaner.cleaner import wanted_buffer
from logstore.cleaner.filter import Counts, Filter, FilterSettings, Workshop
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import aborted_between, build_map, open_source
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import PassWork
from logstore.compaction.budget import Budget, budget_of, map_advice
from logstore.compaction.planning import PartitionPlan, pass_work
from logstore.config import LogConfig
from logstore.errors import DuramenError
from logstore.records.marks import MARK_ACTION, MARK_KEPT, REBUILD, VERBATIM, Marks
from logstore.records.table import COUNT, HEADER_BYTES, SIZE, BatchTable
from logstore.store import LogStore
from logstore.topics.registry import Topic

READ_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Estimate:
    before_bytes: int
    after_bytes: int
    records: int
    removed: dict[str, int] = field(default_factory=dict)
    keys: int = 0
    map_full: bool = False
    map_buffer_wanted: int | None = None
    map_threads_wanted: int | None = None
    #: only a part was read
    rough: bool = False

    @property
    def removed_bytes(self) -> int:
        return self.before_bytes - self.after_bytes

    @property
    def removed_records(self) -> int:
        return sum(self.removed.values())


def estimate_partition(
    store: LogStore,
    topic: Topic,
    number: int,
    found: PartitionPlan,
    *,
    config: LogConfig,
    now_ms: int,
    budget: Budget | None = None,
    read_bytes_max: int = READ_BYTES_MAX,
) -> Estimate | None:
    """None when it cannot be told: the log changes under it, or is damaged (the pass would say so)."""
    budget = budget or budget_of(store)
    work = pass_work(store, topic, number, config, found.cleanable, now_ms, budget, rolled=found.rolls_active)
    total = sum(s.size_bytes for s in work.segments)
    sampled = _sampled(work, read_bytes_max)
    share = sum(s.size_bytes for s in sampled.segments) / total if total else 1.0
    with contextlib.suppress(DuramenError, OSError):
        guess = _measure(store, sampled)
        if guess.map_buffer_wanted is not None:
            advice = map_advice(guess.map_buffer_wanted, budget)
            guess.map_buffer_wanted, guess.map_threads_wanted = advice.buffer_bytes, advice.threads
        if share < 1.0:
            guess = _scaled(guess, share, total)
        return guess
    return None


def _sampled(work: PassWork, read_bytes_max: int) -> PassWork:
    """The newest segments that fit: most of what goes is superseded by something near."""
    taken: list[SourceSegment] = []
    size = 0
    for segment in reversed(work.segments):
        if taken and size + segment.size_bytes > read_bytes_max:
            break
        taken.append(segment)
        size += segment.size_bytes
    segments = tuple(reversed(taken))
    if len(segments) == len(work.segments):
        return work
    return replace(work, segments=segments, first_dirty_offset=max(work.first_dirty_offset, segments[0].base_offset))


def _measure(store: LogStore, work: PassWork) -> Estimate:
    offset_map, indexed = build_map(store.fs, work)
    transactions = Transactions()
    rules = Filter(
        Workshop(offset_map, limits=work.limits),
        FilterSettings(
            now_ms=work.now_ms,
            delete_retention_ms=work.delete_retention_ms,
            end_offset=indexed.end_offset,
            first_uncleanable_offset=work.first_uncleanable_offset,
            last_records=work.last_records,
            expired_before_ms=work.expired_before_ms,
        ),
        transactions,
    )
    before = after = 0
    for source in work.segments:
        if source.base_offset >= indexed.end_offset:
            break
        transactions.add(aborted_between(store.fs, work, source.base_offset, work.following(source)))
        before += source.size_bytes
        segment = open_source(store.fs, work, source.base_offset)
        try:
            for chunk in segment.chunks(0, source.size_bytes, verify_crc=False):
                for part in rules.parts(chunk, keep_legacy_tombstones=True):
                    after += _size_after(part.table[part.first : part.last], part.marks[part.first : part.last])
        finally:
            segment.close(clean=False)
    wanted = wanted_buffer(work, indexed) if indexed.is_full else None
    counts: Counts = rules.counts
    return Estimate(before, after, counts.records_read, dict(counts.removed), indexed.keys, indexed.is_full, wanted)


def _size_after(table: BatchTable, marks: Marks) -> int:
    """A batch shrinks as its records do; those written anew keep their header."""
    verbatim = int(table[marks[:, MARK_ACTION] == VERBATIM, SIZE].sum())
    rebuilt = marks[:, MARK_ACTION] == REBUILD
    payload = (table[rebuilt, SIZE] - HEADER_BYTES) * marks[rebuilt, MARK_KEPT] // table[rebuilt, COUNT].clip(1)
    return verbatim + int(payload.sum()) + HEADER_BYTES * int(rebuilt.sum())


def _scaled(guess: Estimate, share: float, total: int) -> Estimate:
    return Estimate(
        total,
        int(guess.after_bytes / share),
        int(guess.records / share),
        {reason: int(count / share) for reason, count in guess.removed.items()},
        guess.keys,
        guess.map_full,
        guess.map_buffer_wanted,
        guess.map_threads_wanted,
        rough=True,
    )
