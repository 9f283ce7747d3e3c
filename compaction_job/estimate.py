"""What a pass would remove, without writing anything: the map and the filter over the log, or over a part of it.

Up to a limit of bytes the answer is exact for the log as it is; beyond it, a part is read and the rest is taken to be
like it, and the answer says so.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

from logstore.cleaner.cleaner import wanted_buffer
from logstore.cleaner.filter import Counts, Filter, FilterBuffers
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import aborted_between, build_map, open_source
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import PassWork
from logstore.compaction.budget import Budget, map_advice, with_budget
from logstore.compaction.planning import PartitionPlan
from logstore.errors import DuramenError
from logstore.files import FileSystem
from logstore.records.marks import MARK_ACTION, MARK_KEPT, REBUILD, VERBATIM, Marks
from logstore.records.table import COUNT, HEADER_BYTES, SIZE, BatchTable

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


def estimate_partition(
    found: PartitionPlan, budget: Budget, *, read_bytes_max: int = READ_BYTES_MAX
) -> Estimate | None:
    """None when nothing can be said: the log changes meanwhile, or is damaged (a pass would say so)."""
    if found.work is None:
        return Estimate(0, 0, 0)
    work = with_budget(found.work, budget)
    total = sum(s.size_bytes for s in work.segments)
    sampled = _sampled(work, read_bytes_max)
    share = sum(s.size_bytes for s in sampled.segments) / total if total else 1.0
    with contextlib.suppress(DuramenError, OSError):
        guess = _measure(found.fs, sampled)
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


def _measure(fs: FileSystem, work: PassWork) -> Estimate:
    offset_map, indexed = build_map(fs, work)
    transactions = Transactions()
    rules = Filter(
        FilterBuffers(offset_map, limits=work.limits),
        work.filter_settings(indexed.end_offset),
        transactions,
    )
    before = after = 0
    for source in work.segments:
        if source.base_offset >= indexed.end_offset:
            break
        transactions.add(aborted_between(fs, work, source.base_offset, work.following(source)))
        before += source.size_bytes
        segment = open_source(fs, work, source.base_offset)
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
    """A batch shrinks as its records do; those rewritten keep their header."""
    verbatim = int(table[marks[:, MARK_ACTION] == VERBATIM, SIZE].sum())
    rebuilt = marks[:, MARK_ACTION] == REBUILD
    payload = (table[rebuilt, SIZE] - HEADER_BYTES) * marks[rebuilt, MARK_KEPT] // table[rebuilt, COUNT].clip(1)
    return verbatim + int(payload.sum()) + HEADER_BYTES * int(rebuilt.sum())


def _scaled(guess: Estimate, share: float, total: int) -> Estimate:
    return replace(
        guess,
        before_bytes=total,
        after_bytes=int(guess.after_bytes / share),
        records=int(guess.records / share),
        removed={reason: int(count / share) for reason, count in guess.removed.items()},
        rough=True,
    )
