"""A partition's manifest made again from the segments that lie in the bucket.

An object says where its segment begins (its name), what it holds (its batches) and when it was put. It does not say
whether a manifest listed it, nor where its segment ends. So the youngest object that fits is taken first, since what
compaction made is younger than what it was made of; one that overlaps a younger one is left. Where nothing lies,
records are lost, or were compacted. Everything counts as dirty, so that the next pass compacts it as a whole.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from logstore.bucket.arriving import manifest_of
from logstore.bucket.examining import read_floor
from logstore.bucket.freeing import Floor
from logstore.bucket.keys import new_nonce
from logstore.bucket.manifest import Manifest
from logstore.bucket.rows import TopicRow
from logstore.directory.state import Loss, PartitionState, SegmentEntry, read_state, write_state
from logstore.errors import CorruptState
from logstore.files import OS_FILES
from logstore.limits import MIB
from logstore.objects.objects import Head
from logstore.partition.environment import LastKnown
from logstore.records.scan import scan_batches
from logstore.records.table import LAST_OFFSET
from logstore.segment.names import FileKind, file_name
from logstore.topics.moving import Moved

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.topics.registry import Topic

_NAME = re.compile(r"logs/[^/]+/[0-9]+/([0-9]{20})-")
_PART_BYTES = 8 * MIB
_REASON = "the manifest was lost, and no segment has these offsets"


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """An object whose batches reach from `base_offset` to below `end_offset`."""

    key: str
    base_offset: int
    end_offset: int
    log_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class FoundPartition:
    """What a manifest can be made of."""

    segments: tuple[FoundSegment, ...]
    sealed_offset: int
    losses: tuple[Loss, ...]


def find_partition(store: BucketStore, topic: Topic, number: int) -> FoundPartition:
    """Look at every object of the partition. Changes nothing."""
    found = [_looked_at(store, head) for head in store.objects.list(f"logs/{topic.id}/{number}")]
    chosen = choose([each for each in found if each is not None])
    reached = max((each.end_offset for each in chosen), default=0)
    rows = [row for row in store.ledger.refresh().topic(topic.id) if number < len(row.end_offsets)]
    freed = _floor(store, topic.id).freed
    reached = max([reached, *(row.end_offsets[number] for row in rows if row.sequence <= freed)])
    # A seal takes whole commits, and the ledger forgets only what is sealed.
    bounds = {rows[-1].end_offsets[number], *(row.base_offsets[number] for row in rows)}
    sealed_offset = min(bound for bound in bounds if bound >= reached)
    edges = [*((each.base_offset, each.end_offset) for each in chosen), (sealed_offset, sealed_offset)]
    is_compacted, now_ms = store.log_config(topic).compact, store.clock.now_ms()
    losses = tuple(
        Loss(before[1], after[0], _REASON, now_ms, is_compacted)
        for before, after in pairwise(edges)
        if before[1] < after[0]
    )
    return FoundPartition(tuple(chosen), sealed_offset, losses)


def choose(found: Sequence[FoundSegment]) -> list[FoundSegment]:
    """The youngest first; none overlaps another."""
    chosen: list[FoundSegment] = []
    for each in sorted(found, key=lambda each: each.modified_ms, reverse=True):
        if all(each.end_offset <= other.base_offset or other.end_offset <= each.base_offset for other in chosen):
            chosen.append(each)
    return sorted(chosen, key=lambda each: each.base_offset)


def rebuild_manifest(store: BucketStore, topic: Topic, number: int, found: FoundPartition) -> Manifest:
    """Fetch the segments, let a log make their indexes, producers and epochs again, and put them under new names."""
    from logstore.partition.log import PartitionLog

    end, partition = found.sealed_offset, topic.partition(number)
    with tempfile.TemporaryDirectory(prefix="duramen-") as scratch:
        directory, state_path = os.path.join(scratch, "log"), os.path.join(scratch, "state")
        OS_FILES.mkdir(directory)
        for each in found.segments:
            _fetch(store, each, os.path.join(directory, file_name(each.base_offset, FileKind.LOG)))
        OS_FILES.open(os.path.join(directory, file_name(end, FileKind.LOG)), create=True).close()
        start = found.segments[0].base_offset if found.segments else end
        listed = [SegmentEntry(each.base_offset, each.log_bytes, -1) for each in found.segments]
        state = PartitionState(
            log_start_offset=start, segments=(*listed, SegmentEntry(end, 0, -1)), losses=found.losses
        )
        write_state(OS_FILES, state_path, state)
        log = PartitionLog.open(
            directory,
            partition=partition,
            config=store.log_config(topic),
            known=LastKnown(clean=True, recovery_point=end, high_watermark=end),
            environment=store.log_environment(),
            state_path=state_path,
        )
        stable = log.last_stable_offset
        log.close()
        left = read_state(OS_FILES, state_path, limits=store.limits)
        assert left is not None
        manifest = manifest_of(store, topic, number, Moved(left, end, stable), directory)
    return manifest or Manifest(1, new_nonce(), sealed_offset=end, log_start_offset=end)


def sealed_once(store: BucketStore, topic: Topic, rows: Sequence[TopicRow], number: int) -> bool:
    """Whether records of the partition were sealed, by the topic's floor: then it had a manifest."""
    sealed = _floor(store, topic.id).sealed
    return any(row.end_offsets[number] for row in rows if row.sequence <= sealed and number < len(row.end_offsets))


def _floor(store: BucketStore, topic_id: str) -> Floor:
    try:
        return read_floor(store.objects, topic_id) or Floor()
    except CorruptState:
        return Floor()


def _looked_at(store: BucketStore, head: Head) -> FoundSegment | None:
    """None for an object that holds no batch."""
    match = _NAME.match(head.key)
    if match is None:
        return None
    log_bytes, end_offset = 0, -1
    for size, last_offset in _batches(store, head):
        log_bytes, end_offset = log_bytes + size, last_offset + 1
    return None if end_offset < 0 else FoundSegment(head.key, int(match[1]), end_offset, log_bytes, head.modified_ms)


def _batches(store: BucketStore, head: Head) -> Iterator[tuple[int, int]]:
    """Bytes and last offset of runs of sound batches, up to the indexes behind them."""
    at, wanted = 0, _PART_BYTES
    while at < head.size_bytes:
        stop = min(at + wanted, head.size_bytes)
        data = np.frombuffer(bytearray(store.objects.ranges(head.key, [(at, stop)])[0]), dtype=np.uint8)
        scan = scan_batches(data)
        if len(scan.table):
            yield scan.next_position, int(scan.table[-1, LAST_OFFSET])
            at, wanted = at + scan.next_position, _PART_BYTES
        elif stop < head.size_bytes and wanted < store.limits.read_buffer_bytes:
            wanted = min(4 * wanted, store.limits.read_buffer_bytes)  # a batch that is larger than this
        else:
            return


def _fetch(store: BucketStore, found: FoundSegment, path: str) -> None:
    file = OS_FILES.open(path, create=True)
    try:
        for at in range(0, found.log_bytes, _PART_BYTES):
            stop = min(at + _PART_BYTES, found.log_bytes)
            file.pwrite(store.objects.ranges(found.key, [(at, stop)])[0], at)
    finally:
        file.close()
