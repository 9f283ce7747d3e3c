"""Fsync of a partition's files: by a flush, and by whoever appends for a driver on another host."""

from __future__ import annotations

import contextlib
import os

from logstore.directory.unsynced import marking_unsynced
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, SEGMENT_KINDS, FileKind, file_name
from logstore.syncing import check_written
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


def sync_partition(store: OpenStore, topic: Topic, number: int, offset: int, *, together: bool = False) -> None:
    """Make the segments that hold `offset` and what follows durable, with their names. The list of segments is.

    `together`: the whole file system was synced, and only errors are asked for. After an error the partition has a mark
    that its next sync proves nothing.
    """
    directory = store.layout.partition(topic.partition(number))
    state_path = store.layout.partition_state(topic.id, number)
    bases = [segment.base_offset for segment in store.partition_state(topic, number).segments]
    with marking_unsynced(store.fs, state_path):
        for at, base in enumerate(bases):
            if at + 1 < len(bases) and bases[at + 1] <= offset:
                continue
            for kind in (*SEGMENT_KINDS, FileKind.SNAPSHOT):
                _sync_file(store, os.path.join(directory, file_name(base, kind)), together)
        # the first append does not wait for it
        _sync_file(store, os.path.join(directory, LEADER_EPOCH_CHECKPOINT), together)
        if not together:
            store.fs.fsync_dir(directory)


def _sync_file(store: OpenStore, path: str, together: bool) -> None:
    with contextlib.suppress(FileNotFoundError):
        if together:
            check_written(store.fs, path)
            return
        file = store.fs.open(path)
        try:
            file.fsync()
        finally:
            file.close()
