"""`recover --readmit` of a partition in a bucket: intact batches under `quarantine/` go back where they are missing.

What a seal kept is a piece of a staged object, whose batches have offsets from 0 on: the object's name says where the
piece began. Everything else has its offsets. Segments with losses are written again, and the manifest takes all of it
at once. Below the first dirty offset nothing comes back: an old record could bring a deleted key back there, and what a
pass found out about the rest would not hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import check_age
from logstore.bucket.manifest import Segment
from logstore.bucket.mending import Mended, Repair
from logstore.bucket.reader import Looked, PartitionSource, look
from logstore.bucket.replacing import mend_segments
from logstore.bucket.scratch import scratch_folder
from logstore.directory.state import Loss
from logstore.files import OS_FILES
from logstore.limits import MIB
from logstore.partition.damage import intact_batches
from logstore.partition.losses import clipped
from logstore.partition.salvage import Piece

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.topics.registry import Topic

_NAME = re.compile(r"quarantine/[^/]+/[0-9]+/([0-9]{20})-(staged-)?")
_PART_BYTES = 8 * MIB
_COMPACTED = "compaction has been there since, so a deleted key could come back"


def readmit_partition(store: BucketStore, topic: Topic, number: int, done: Mended, *, dry_run: bool) -> None:
    """`done` gets what came back. Raises SegmentsChanged when others replaced what was looked at."""
    source = store.source(topic, number)
    looked = look(source)
    losses = looked.manifest.losses if looked.manifest is not None else ()
    if not losses:
        return
    made = Elapsed()
    with scratch_folder(None) as scratch:
        found = Quarantine.fetched(store, topic, number, looked, scratch)
        mended = dict(_repaired(store, topic, source, looked, found, done, dry_run=dry_run))
    done.held_back += found.held_back
    if not mended or dry_run:
        return
    back = [(first, end) for _, first, end in done.readmitted]
    store.manifests.change(
        topic.id,
        number,
        lambda seen, now_ms, nonce: mend_segments(seen, mended, (), now_ms=now_ms, nonce=nonce, found=back),
        outputs=[output.key for outputs in mended.values() for output in outputs],
        check=lambda: check_age(made.ms()),
    )


def _repaired(
    store: BucketStore,
    topic: Topic,
    source: PartitionSource,
    looked: Looked,
    found: Quarantine,
    done: Mended,
    *,
    dry_run: bool,
) -> Iterator[tuple[str, Sequence[Segment]]]:
    """Each segment that gets batches back, by its key, and what it becomes."""
    start = looked.view.log_start_offset
    for segment in looked.view.segments:
        missing = clipped(found.losses, max(segment.base_offset, start), segment.next_offset)
        wanted = [piece for loss in missing for piece in found.pieces(loss.base_offset, loss.end_offset)]
        if not wanted:
            continue
        config, state = store.log_config(topic), replace(looked.state(), losses=found.losses)
        repair = Repair(store, topic, source, segment, config, start, state, (found,))
        outputs, _, _ = repair.run("", dry_run=dry_run)
        if repair.refilled:
            done.readmitted += [(found.name, first, end) for _, first, end in repair.refilled]
            yield segment.key, outputs


@dataclass(slots=True)
class Quarantine:
    """Implements `Source`: intact batches that were kept, in local files."""

    losses: tuple[Loss, ...]
    first_dirty_offset: int
    name: str = "quarantine"
    batches: list[Piece] = field(default_factory=list)
    held_back: list[tuple[int, int, str]] = field(default_factory=list)

    @classmethod
    def fetched(cls, store: BucketStore, topic: Topic, number: int, looked: Looked, scratch: str) -> Quarantine:
        assert looked.manifest is not None
        manifest = looked.manifest
        found = cls(manifest.losses, max(manifest.first_dirty_offset, manifest.thinned_offset))
        epoch = looked.leader_epoch
        is_stamped = topic.configs.get("message.timestamp.type") == "LogAppendTime"
        for head in store.objects.list(f"quarantine/{topic.id}/{number}"):
            match = _NAME.match(head.key)
            if match is None:
                continue
            path = os.path.join(scratch, f"{len(os.listdir(scratch))}.log")
            _fetch(store, head.key, head.size_bytes, path)
            base = int(match[1])
            file = OS_FILES.open(path)
            try:
                batches = intact_batches(file, limits=store.limits)
                if match[2]:
                    stamp = _stamp(manifest.segments, base) if is_stamped else None
                    for e in batches:
                        first, end = base + e.first_offset, base + e.end_offset
                        found.batches.append(Piece(path, e.position, e.end, first, end, epoch, stamp))
                else:
                    found.batches += [Piece(path, e.position, e.end, e.first_offset, e.end_offset) for e in batches]
            finally:
                file.close()
        return found

    def pieces(self, low: int, high: int) -> Iterator[Piece]:
        for each in self.batches:
            if not (low <= each.first_offset and each.end_offset <= high):
                continue
            if each.first_offset >= self.first_dirty_offset:
                yield each
            elif (held := (each.first_offset, each.end_offset, _COMPACTED)) not in self.held_back:
                self.held_back.append(held)


def _stamp(segments: Sequence[Segment], offset: int) -> int | None:
    """When its neighbours were appended."""
    return next((each.appended_ms for each in segments if each.base_offset <= offset < each.next_offset), None)


def _fetch(store: BucketStore, key: str, size_bytes: int, path: str) -> None:
    file = OS_FILES.open(path, create=True)
    try:
        for at in range(0, size_bytes, _PART_BYTES):
            stop = min(at + _PART_BYTES, size_bytes)
            file.pwrite(store.objects.ranges(key, [(at, stop)])[0], at)
    finally:
        file.close()
