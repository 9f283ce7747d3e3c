"""Kafka's four checkpoint files as a projection of the store's state, for tools that look for them.

Duramen never reads them back; `state/` is the truth. Written as whole files under the checkpoint lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from logstore.directory.checkpoint import read_offset_checkpoint, write_offset_checkpoint
from logstore.errors import CorruptCheckpoint
from logstore.files import FileSystem
from logstore.segment.names import (
    CLEANER_OFFSET_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    LOG_START_OFFSET_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
)
from logstore.topic import TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """What Kafka's checkpoint files say of one partition."""

    partition: TopicPartition
    high_watermark: int
    recovery_point: int
    log_start_offset: int = 0
    #: base of the oldest segment; the log start is written only where it is above it
    first_base_offset: int = 0
    first_dirty_offset: int = 0
    #: whether the topic is compacted
    compacted: bool = True


def checkpoint_entries(facts: Iterable[PartitionFacts]) -> dict[str, dict[TopicPartition, int]]:
    """The entries of each file, by its name."""
    listed = list(facts)
    return {
        RECOVERY_POINT_CHECKPOINT: {each.partition: each.recovery_point for each in listed},
        HIGH_WATERMARK_CHECKPOINT: {each.partition: each.high_watermark for each in listed},
        LOG_START_OFFSET_CHECKPOINT: {
            each.partition: each.log_start_offset for each in listed if each.log_start_offset > each.first_base_offset
        },
        CLEANER_OFFSET_CHECKPOINT: {
            each.partition: each.first_dirty_offset for each in listed if each.compacted and each.first_dirty_offset > 0
        },
    }


def write_checkpoints(fs: FileSystem, directory: str, entries: dict[str, dict[TopicPartition, int]]) -> None:
    """Only files whose content changes are written."""
    for name, offsets in entries.items():
        path = os.path.join(directory, name)
        if not _says(fs, path, offsets):
            write_offset_checkpoint(fs, path, offsets)


def _says(fs: FileSystem, path: str, offsets: dict[TopicPartition, int]) -> bool:
    try:
        return fs.exists(path) and read_offset_checkpoint(fs, path) == offsets
    except CorruptCheckpoint:
        return False
