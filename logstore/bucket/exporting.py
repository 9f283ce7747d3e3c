"""A partition of a bucket as the files of a directory: sealed segments fetched, the tail placed behind them.

The same append loop that seals makes the tail's files, so the `.log` bytes are those of a store in a directory. What is
taken is one moment of the partition, under a pin; where an object is gone all the same, the partition is taken again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.bucket.reader import Looked, PartitionSource, look
from logstore.bucket.sealing import SealedLog
from logstore.bucket.segment_object import fetch_segment
from logstore.bucket.tail import TailCommit, read_placed
from logstore.config import LogConfig
from logstore.directory.state import PartitionState
from logstore.directory.trees import remove_tree
from logstore.errors import ObjectMissing, SegmentsChanged
from logstore.files import OS_FILES, FileSystem
from logstore.limits import Limits
from logstore.partition.appender import place_batches
from logstore.partition.environment import LogEnvironment
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.topics.registry import Topic

_TRIES_MAX = 3


@dataclass(frozen=True, slots=True)
class ExportFromBucket:
    """Implements `Exportable`; `take` brings the files."""

    store: BucketStore

    @property
    def fs(self) -> FileSystem:
        return OS_FILES

    @property
    def path(self) -> str:
        return self.store.path

    @property
    def limits(self) -> Limits:
        return self.store.limits

    def log_config(self, topic: Topic) -> LogConfig:
        return self.store.log_config(topic)

    def log_environment(self) -> LogEnvironment:
        return LogEnvironment(OS_FILES, self.store.clock, self.store.limits)

    def take(
        self, topic: Topic, number: int, directory: str, progress: Callable[[int], None]
    ) -> tuple[PartitionState, int, int]:
        """The partition's state, its high watermark, and the bytes that were copied. Raises DamageError."""
        source = self.store.source(topic, number)
        with self.store.pins.held():
            for attempt in range(_TRIES_MAX):
                looked = look(source)
                try:
                    copied = self._copy(source, looked, directory, progress)
                    return looked.state(), looked.view.high_watermark, copied
                except ObjectMissing:
                    if attempt + 1 == _TRIES_MAX:
                        raise
                    remove_tree(OS_FILES, directory)
                    OS_FILES.mkdir(directory)
        raise SegmentsChanged("segments were replaced each time they were fetched", partition=source.partition)

    def _copy(self, source: PartitionSource, looked: Looked, directory: str, progress: Callable[[int], None]) -> int:
        copied = 0
        for segment in looked.view.segments:
            fetch_segment(self.store.objects, segment, OS_FILES, directory)
            copied += segment.log_bytes
            progress(segment.log_bytes)
        manifest = looked.manifest
        epochs = manifest.leader_epochs if manifest and manifest.leader_epochs else ((0, 0),)
        checkpoint = LeaderEpochs(OS_FILES, os.path.join(directory, LEADER_EPOCH_CHECKPOINT))
        for epoch, start_offset in epochs:
            checkpoint.assign(epoch, start_offset)
        log = SealedLog(OS_FILES, directory, source.partition, looked.view.sealed_offset, self.store.limits)
        log.leader_epoch = looked.leader_epoch
        for row in looked.view.tail:
            assert row.plan is not None
            commit = TailCommit.of(self.store.shelf.plans.get(row.plan), row, source.number, looked.leader_epoch)
            log.begin(commit)
            for piece, base_offset in commit.pieces():
                chunk = read_placed(self.store.shelf.cache, commit, piece, base_offset)
                place_batches(log, chunk.data, chunk.table)
                copied += piece.size_bytes
                progress(piece.size_bytes)
        log.close()
        return copied
