"""Checking every committed byte of a partition in a bucket: manifest against ledger, segments, tail. Changes nothing.

Others may seal and compact meanwhile, so an object that is gone is damage only if a fresh manifest still names it.
What cannot be asked for is an error, never a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.bucket.files import BlockCache, CacheLimits, SegmentFiles
from logstore.bucket.manifest import Segment
from logstore.bucket.reader import Looked, PartitionSource, leader_epoch, look
from logstore.bucket.segment_object import content_of
from logstore.bucket.tail import TailCommit, read_placed
from logstore.directory.state import Loss
from logstore.errors import (
    CorruptBatch,
    CorruptState,
    DamageError,
    DuramenError,
    LedgerError,
    ObjectMissing,
    SegmentsChanged,
)
from logstore.limits import MIB
from logstore.segment.batches import OrderCheck
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_LOOKS_MAX = 20
#: what is read once is not kept
_CACHE = CacheLimits(memory_bytes=32 * MIB)


@dataclass(frozen=True, slots=True)
class VerifiedPartition:
    partition: TopicPartition
    log_start_offset: int = 0
    sealed_offset: int = 0
    high_watermark: int = 0
    segments: int = 0
    tail_commits: int = 0
    records: int = 0
    size_bytes: int = 0
    findings: tuple[DuramenError, ...] = ()
    #: what damage cost before, as the manifest keeps it
    losses: tuple[Loss, ...] = ()


def verify_partition(store: BucketStore, source: PartitionSource) -> VerifiedPartition:
    """Raises SegmentsChanged when others replace segments faster than they can be read."""
    with store.pins.held():
        return _verify_pinned(store, source)


def _verify_pinned(store: BucketStore, source: PartitionSource) -> VerifiedPartition:
    before: list[str] = []
    for _ in range(_LOOKS_MAX):
        try:
            looked = look(source)
        except (LedgerError, CorruptState) as error:
            return VerifiedPartition(source.partition, findings=(error,))
        found, gone = _verify(store, source, looked)
        if not gone or gone == before:  # named by two manifests, the second of which was read after it was missed
            return found
        before = gone
    raise SegmentsChanged("segments were replaced each time they were checked", partition=source.partition)


def _verify(store: BucketStore, source: PartitionSource, looked: Looked) -> tuple[VerifiedPartition, list[str]]:
    """What was found, and the objects that were not there."""
    cache = BlockCache(store.objects, limits=_CACHE)
    findings: list[DuramenError] = []
    gone: list[str] = []
    records = size_bytes = 0
    for segment in looked.view.segments:
        size_bytes += segment.log_bytes
        try:
            records += verify_segment(store, cache, source, segment)
        except FileNotFoundError:
            gone.append(segment.key)
            findings.append(ObjectMissing("a segment that the manifest names is gone", file=segment.key))
        except DamageError as error:
            findings.append(error.at(file=segment.key))
    for row in looked.view.tail:
        assert row.plan is not None
        try:
            plan = store.shelf.plans.get(row.plan)
            commit = TailCommit.of(plan, row, source.number, leader_epoch(looked.manifest))
            for piece, base_offset in commit.pieces():
                read_placed(cache, commit, piece, base_offset)
                records += piece.records
                size_bytes += piece.size_bytes
        except ObjectMissing as error:
            gone.append(error.file or row.plan.key)
            findings.append(error)
        except DamageError as error:
            findings.append(error)
    view = looked.view
    return VerifiedPartition(
        source.partition,
        view.log_start_offset,
        view.sealed_offset,
        view.high_watermark,
        len(view.segments),
        len(view.tail),
        records,
        size_bytes,
        tuple(findings),
        looked.state().losses,
    ), gone


def verify_segment(store: BucketStore, cache: BlockCache, source: PartitionSource, entry: Segment) -> int:
    """Returns its records. Raises FileNotFoundError, CorruptBatch, CorruptIndex, ObjectTruncated."""
    files = SegmentFiles(cache, source.directory, [entry])
    segment = LogSegment(files, source.directory, entry.base_offset, limits=store.limits)
    records, largest_ms = content_of(segment, store.limits, OrderCheck(entry.base_offset, entry.next_offset))
    if records != entry.records:
        raise CorruptBatch(f"{records} records, where the manifest says {entry.records}", file=entry.key)
    if largest_ms != entry.largest_timestamp_ms:
        raise CorruptBatch(
            f"the newest record is of {largest_ms}, where the manifest says {entry.largest_timestamp_ms}",
            file=entry.key,
        )
    segment.sanity_check()
    return records
