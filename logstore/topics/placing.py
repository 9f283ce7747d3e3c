"""Placing the partitions of a topic: an empty state file and a directory with the topic's id for each.

What is certainly new, partitions with neither a state file nor a directory, is made many at a time: the files are
synced side by side and each directory once, so that ten thousand partitions take seconds. All others go one by one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from logstore.directory.checkpoint import write_partition_metadata
from logstore.directory.state import PartitionState, SegmentEntry, encode_state, owner_of, read_state, write_state
from logstore.directory.trees import is_directory, remove_tree
from logstore.errors import DamagedLog, StrayDirectory
from logstore.files import FileSystem
from logstore.records.record import NO_TIMESTAMP
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, PARTITION_METADATA, FileKind, file_name
from logstore.syncing import replace_files, sync_directories, sync_files
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore
from logstore.topics.places import is_log_of
from logstore.topics.registry import Topic

_PARTITIONS_AT_ONCE = 1024
#: The list a partition is made with names its first segment, whose empty file is made with the directory, as a broker
#: does: the first append need not write a list.
EMPTY = PartitionState(segments=(SegmentEntry(0, 0, NO_TIMESTAMP),), producers=False, transactions=False)


def place_partitions(
    store: OpenStore, topic: Topic, numbers: Sequence[int], *, wait_ms: int | None = None, is_new: bool = False
) -> None:
    """Make what is missing of these partitions, durably. Raises what `place_partition` raises."""
    fresh = [number for number in numbers if _is_fresh(store, topic, number)]
    if fresh and not is_new:
        written = store.ends(topic).high_watermarks
        fresh = [number for number in fresh if not written[number]]
    others = set(numbers).difference(fresh)
    for number in numbers:
        if number in others:
            place_partition(store, topic, topic.partition(number), wait_ms=wait_ms, is_new=is_new)
    for first in range(0, len(fresh), _PARTITIONS_AT_ONCE):
        some = fresh[first : first + _PARTITIONS_AT_ONCE]
        with store.locks.partitions(topic.id, some, what=f"make {topic.name}-{some[0]} to {some[-1]}"):
            store.check_exists(topic)
            _make(store, topic, [number for number in some if _is_fresh(store, topic, number)])


def _is_fresh(store: OpenStore, topic: Topic, number: int) -> bool:
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


def _make(store: OpenStore, topic: Topic, numbers: Sequence[int]) -> None:
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


def place_partition(
    store: OpenStore, topic: Topic, partition: TopicPartition, *, wait_ms: int | None = None, is_new: bool = False
) -> str:
    """The partition's directory, made when the partition was never written; never one of another topic.

    A directory that lost its `partition.metadata` gets it back when it holds the log of the partition's segment list. A
    caller that holds a lease passes a `wait_ms` of 0: the lease of the topic that was here before can only be tried.
    Raises StrayDirectory when it may be another's, DamagedLog when the partition's directory is gone.
    """
    directory = store.layout.partition(partition)
    if store.topic_id_at(directory) == topic.id:
        return directory
    clear_deleted(store, partition, wait_ms=wait_ms)
    number = partition.partition
    with store.locks.partition(topic.id, number, what=f"make {partition}"):
        store.check_exists(topic)
        carried = store.topic_id_at(directory)
        if carried == topic.id:
            return directory
        state_path = store.layout.partition_state(topic.id, number)
        state = read_state(store.fs, state_path, limits=store.limits)
        if is_directory(store.fs, directory):
            if carried is not None or not is_log_of(store.fs, directory, state):
                raise _stray(store, partition, carried)
            write_partition_metadata(store.fs, os.path.join(directory, PARTITION_METADATA), topic.id)
            return directory
        written = state is not None and not state.is_as_made
        if not is_new and (written or store.ends(topic).high_watermarks[number]):
            raise DamagedLog(
                "the partition's directory is gone",
                partition=partition,
                file=directory,
                hint="Bring it back, or run `duramen recover`, which continues after the loss.",
            )
        make_partition(store, topic, partition, state)
    return directory


def make_partition(store: OpenStore, topic: Topic, partition: TopicPartition, state: PartitionState | None) -> None:
    """An empty directory for the partition; the caller holds its lock, and knows that there is none."""
    store.fs.mkdir(store.layout.topic_state(topic.id))
    store.fs.fsync_dir(store.layout.state)
    if state is None:
        path = store.layout.partition_state(topic.id, partition.partition)
        write_state(store.fs, path, EMPTY)
    draft = store.layout.work("partition")
    begin_directory(store.fs, draft, topic.id)
    sync_files(store.fs, [os.path.join(draft, PARTITION_METADATA)])
    store.fs.fsync_dir(draft)
    store.fs.rename(draft, store.layout.partition(partition))
    store.fs.fsync_dir(store.layout.logs)


def check_place(store: OpenStore, topic: Topic, first: int = 0, *, clear: bool = True) -> None:
    """Nothing lies where the partitions from `first` on belong. Raises StrayDirectory.

    What deleted topics left is removed first if `clear`, and does not count in any case.
    """
    names = set(store.fs.listdir(store.layout.logs))
    for partition in topic.partition_list()[first:]:
        directory = store.layout.partition(partition)
        if str(partition) not in names:
            continue
        if clear:
            clear_deleted(store, partition)
            if not store.fs.exists(directory):
                continue
        carried = store.topic_id_at(directory)
        if carried is None or not store.marks.is_deleted(carried):
            raise _stray(store, partition, carried)


def _stray(store: OpenStore, partition: TopicPartition, carried: str | None) -> StrayDirectory:
    whose = f"belongs to topic id {carried}" if carried else "does not say whose it is"
    return StrayDirectory(
        f"the directory at the place of {partition} {whose}; it is left as it is",
        partition=partition,
        file=store.layout.partition(partition),
        hint="`duramen recover --dry-run` says what can be done about it.",
    )


def clear_deleted(store: OpenStore, partition: TopicPartition, *, wait_ms: int | None = None) -> None:
    """Remove a directory that a deleted topic left in the partition's place."""
    directory = store.layout.partition(partition)
    left_by = store.topic_id_at(directory)
    if left_by is None or not store.marks.is_deleted(left_by):
        return
    with store.locks.lease(left_by, what=f"clear {partition}", wait_ms=wait_ms):
        if store.marks.is_deleted(left_by) and store.topic_id_at(directory) == left_by:
            discard(store, directory)


def discard(store: OpenStore, directory: str) -> None:
    """Renamed away in one step, then removed; a crash in between leaves it to `sweep`."""
    grave = store.layout.work("delete")
    try:
        store.fs.rename(directory, grave)
    except FileNotFoundError:
        return
    store.fs.fsync_dir(store.layout.logs)
    remove_tree(store.fs, grave)
