"""Topics of a bucket as of one moment, each partition as the files of a directory.

Sealed segments are fetched; the tail is placed behind them by the append loop that seals, so the `.log` bytes are those
of a store in a directory. The moment is the manifests, and then one version of the ledger, under a pin: what they name
stays while the pin lives.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from logstore.bucket.manifest import Manifest
from logstore.bucket.reader import Looked, PartitionSource, aborted_by
from logstore.bucket.rows import Kind, LedgerView, view_partition
from logstore.bucket.sealing import SealedLog
from logstore.bucket.segment_object import fetch_segment
from logstore.bucket.tail import TailCommit, read_placed
from logstore.directory.state import SegmentEntry
from logstore.errors import BackupRefused, LedgerError, ObjectMissing, SegmentsChanged
from logstore.files import OS_FILES, replace_file
from logstore.ledger.rows import AppProgress
from logstore.partition.appender import place_batches
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, FileKind, file_name
from logstore.topics.moving import Taken
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_LOOKS_MAX = 20
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class BucketDepartures:
    """Implements `Departures`."""

    store: BucketStore
    view: LedgerView
    topics: Sequence[Topic]
    looked: Mapping[tuple[str, int], Looked]
    taken_ms: int

    @property
    def apps(self) -> list[AppProgress]:
        return apps_of(self.view)

    def log_bytes(self, topic: Topic, number: int) -> int:
        return self.store.log_bytes(topic, number)

    def take(
        self, topic: Topic, number: int, directory: str, progress: Callable[[int], None], *, link: bool = False
    ) -> Taken:
        """Raises SegmentsChanged where an object is gone although it was pinned, and what damage raises."""
        source, looked = self.store.source(topic, number), self.looked[topic.id, number]
        try:
            return _take(self.store, source, looked, directory, progress)
        except ObjectMissing as error:
            manifest = source.manifest()
            if manifest is not None and error.file in manifest.names:
                raise
            raise SegmentsChanged(
                "an object was deleted while it was copied",
                partition=source.partition,
                file=error.file,
                hint="Try again: the pin of this copy expired, or was removed",
            ) from error


@contextlib.contextmanager
def bucket_departures(store: BucketStore, topics: Sequence[Topic] | None, *, what: str) -> Iterator[BucketDepartures]:
    """Some topics, or all that there are at the moment (None); one that was read before may be another one by then.

    Raises BackupRefused, LedgerError. `what` is for stores that lock.
    """
    with store.pins.held():
        for attempt in range(_LOOKS_MAX):
            if attempt:
                time.sleep(_LOOK_AGAIN_S)
            chosen = store.topics() if topics is None else topics
            manifests = {
                (topic.id, number): store.manifests.read(topic.id, number).manifest
                for topic in chosen
                for number in range(topic.partitions)
            }
            taken_ms, view = store.clock.now_ms(), store.ledger.refresh()
            if topics is None and view.definitions != {topic.id: topic for topic in chosen}:
                continue  # one came, went or was altered since the manifests were read
            looked = _look(view, chosen, manifests)
            if looked is not None:
                yield BucketDepartures(store, view, chosen, looked, taken_ms)
                return
        raise LedgerError("the ledger lacks rows that no manifest has sealed", hint="Run `duramen verify`")


def apps_of(view: LedgerView) -> list[AppProgress]:
    """How far every app has come, by name."""
    names = sorted({row.app_id for row in view.rows if row.app_id is not None and row.batch_id is not None})
    return [each for name in names if (each := view.app(name)) is not None]


def _look(
    view: LedgerView, topics: Sequence[Topic], manifests: Mapping[tuple[str, int], Manifest | None]
) -> dict[tuple[str, int], Looked] | None:
    """None: rows were pruned since a manifest was read."""
    found = {}
    for topic in topics:
        rows = view.topic(topic.id)
        newest = view.definitions.get(topic.id)
        if not rows or rows[-1].kind is Kind.ENDED or newest is None or newest.partitions != topic.partitions:
            raise BackupRefused(f"topic {topic.name} was altered just now", hint="Try again.")
        for number in range(topic.partitions):
            manifest = manifests[topic.id, number]
            partition = view_partition(manifest, rows, number)
            if partition is None:
                return None
            found[topic.id, number] = Looked(manifest, partition, rows)
    return found


def _take(
    store: BucketStore, source: PartitionSource, looked: Looked, directory: str, progress: Callable[[int], None]
) -> Taken:
    copied = 0
    for segment in looked.view.segments:
        fetch_segment(store.objects, segment, OS_FILES, directory)
        copied += segment.log_bytes
        progress(segment.log_bytes)
    manifest, sealed_offset = looked.manifest, looked.view.sealed_offset
    epochs = manifest.leader_epochs if manifest and manifest.leader_epochs else ((0, 0),)
    checkpoint = LeaderEpochs(OS_FILES, os.path.join(directory, LEADER_EPOCH_CHECKPOINT))
    for epoch, start_offset in epochs:
        checkpoint.assign(epoch, start_offset)
    if manifest is not None and manifest.producer_snapshot:
        path = os.path.join(directory, file_name(sealed_offset, FileKind.SNAPSHOT))
        replace_file(OS_FILES, path, manifest.producer_snapshot)
    log = SealedLog(OS_FILES, directory, source.partition, sealed_offset, store.limits)
    log.leader_epoch = looked.leader_epoch
    for row in looked.view.tail:
        assert row.plan is not None
        commit = TailCommit.of(store.shelf.plans.get(row.plan), row, source.number, looked.leader_epoch)
        log.begin(commit)
        for piece, base_offset in commit.pieces():
            chunk = read_placed(store.shelf.cache, commit, piece, base_offset)
            place_batches(log, chunk.data, chunk.table)
            copied += piece.size_bytes
            progress(piece.size_bytes)
        for aborted in aborted_by(row, source.number):
            log.note_aborted(aborted)
    log.close()
    state = looked.state()
    listed = (*state.segments[:-1], *(SegmentEntry(base, 0, -1) for base in log.bases))
    return Taken(replace(state, segments=listed), looked.view.high_watermark, 0, copied)
