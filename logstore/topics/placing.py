"""Placing the partitions of a topic, many at once: an empty state file and a directory with the topic's id for each.

Only what is certainly new is made here, partitions with neither a state file nor a directory; all others are left to
`LogStore.place_partition`. The files are synced side by side and each directory once, so that ten thousand partitions
take seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from logstore.files import FileSystem, replace_files, sync_directories, sync_files
from logstore.directory.checkpoint import write_partition_metadata
from logstore.directory.state import PartitionState, SegmentEntry, encode_state, owner_of
from logstore.records.record import NO_TIMESTAMP
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, PARTITION_METADATA, FileKind, file_name
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.store import LogStore

_PARTITIONS_AT_ONCE = 1024
#: The list a partition is made with names its first segment, whose empty file is made with the directory, as a broker
#: does: the first append need not write a list.
EMPTY = PartitionState(segments=(SegmentEntry(0, 0, NO_TIMESTAMP),), producers=False, transactions=False)


def place_partitions(
    store: LogStore, topic: Topic, numbers: Sequence[int], *, wait_ms: int | None = None, is_new: bool = False
) -> None:
    """Make what is missing of these partitions, durably. Raises what `place_partition` raises."""
    fresh = [number for number in numbers if _is_fresh(store, topic, number)]
    if fresh and not is_new:
        written = store.ends(topic).high_watermarks
        fresh = [number for number in fresh if not written[number]]
    others = set(numbers).difference(fresh)
    for number in numbers:
        if number in others:
            store.place_partition(topic, topic.partition(number), wait_ms=wait_ms, is_new=is_new)
    for first in range(0, len(fresh), _PARTITIONS_AT_ONCE):
        some = fresh[first : first + _PARTITIONS_AT_ONCE]
        with store.locks.partitions(topic.id, some, what=f"make {topic.name}-{some[0]} to {some[-1]}"):
            store.check_exists(topic)
            _make(store, topic, [number for number in some if _is_fresh(store, topic, number)])


def _is_fresh(store: LogStore, topic: Topic, number: int) -> bool:
    fs, layout = store.fs, store.layout
    return not fs.exists(layout.partition_state(topic.id, number)) and not fs.exists(
        layout.partition(topic.partition(number))
    )


def begin_directory(fs: FileSystem, draft: str, topic_id: str) -> None:
    """A partition's directory with its id, its first segment and no leader epoch yet; nothing is synced."""
    fs.mkdir(draft)
    write_partition_metadata(fs, os.path.join(draft, PARTITION_METADATA), topic_id, durable=False)
    for name in (file_name(0, FileKind.LOG), LEADER_EPOCH_CHECKPOINT):
        fs.open(os.path.join(draft, name), create=True).close()


def _make(store: LogStore, topic: Topic, numbers: Sequence[int]) -> None:
    fs, layout = store.fs, store.layout
    fs.mkdir(layout.topic_state(topic.id))
    fs.fsync_dir(layout.state)
    paths = [layout.partition_state(topic.id, number) for number in numbers]
    replace_files(fs, {path: encode_state(EMPTY, owner_of(path)) for path in paths})
    drafts = {layout.work("partition"): layout.partition(topic.partition(number)) for number in numbers}
    for draft in drafts:
        begin_directory(fs, draft, topic.id)
    sync_files(fs, [os.path.join(draft, PARTITION_METADATA) for draft in drafts])
    sync_directories(fs, list(drafts))
    for draft, directory in drafts.items():
        fs.rename(draft, directory)
    fs.fsync_dir(layout.logs)
