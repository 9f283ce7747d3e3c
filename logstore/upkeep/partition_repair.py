"""Giving a partition back its small files: `partition.metadata`, its directory, segment list and leader epochs.

Damaged files are kept under another name; nothing that can be read is removed.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

from logstore.directory.checkpoint import read_offset_checkpoint, write_partition_metadata
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.directory.trees import is_directory
from logstore.errors import CorruptCheckpoint, CorruptState
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.quarantine import folders, read_reason, reasons, tombstones_beyond_reasons
from logstore.partition.salvage import Partition
from logstore.partition.salvage_planning import has_wrong_list
from logstore.segment.names import (
    CLEANER_OFFSET_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_OFFSET_CHECKPOINT,
    PARTITION_METADATA,
    RECOVERY_POINT_CHECKPOINT,
    DirectoryState,
    partition_directory_name,
)
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore
from logstore.topics.places import is_log_of, segments_at
from logstore.topics.placing import make_partition
from logstore.topics.registry import Topic
from logstore.upkeep.strays import readable_topics

#: an id that differs from a topic's in no more characters is that topic's, damaged
_DAMAGED_CHARS = 2


def repair_partition(
    store: OpenStore, topic: Topic, number: int, *, end_offset: int, dry_run: bool = False
) -> list[str]:
    """Give a partition back its `partition.metadata`, directory and segment list where they are lost or damaged.

    `end_offset` is how far it was committed, by the topic's ends or the ledger; 0: no record is known.
    Returns what was done, or with `dry_run` what would be. A directory that is not the partition's own is set aside as
    a broker does. What the log itself lacks is for its recovery to find out.
    """
    partition = topic.partition(number)
    directory = store.layout.partition(partition)
    done: list[str] = []
    with store.locks.partition(topic.id, number, what=f"repair {partition}"):
        store.check_exists(topic)
        state = _repair_state(store, topic, partition, end_offset, done, dry_run)
        _repair_epochs(store, directory, done, dry_run)
        carried = store.topic_id_at(directory)
        if carried == topic.id:
            return done
        if is_directory(store.fs, directory):
            if carried is None and _may_be_log_of(store, directory, state):
                done.append("partition.metadata was missing or damaged, and is written again")
            elif carried is not None and _is_log_after_all(store, topic, directory, state, carried):
                done.append(f"partition.metadata named topic id {carried}, but the log is this topic's: written again")
            else:
                aside = os.path.join(
                    store.layout.logs, partition_directory_name(partition, DirectoryState.STRAY, uuid.uuid4().hex)
                )
                if not dry_run:
                    store.fs.rename(directory, aside)
                    store.fs.fsync_dir(store.layout.logs)
                done.append(f"a directory of another topic lay in its place; it is set aside as {aside}")
        if dry_run:
            if state is not None and not state.is_as_made and not is_directory(store.fs, directory):
                done.append("its directory is gone; an empty one takes its place")
            return done
        if is_directory(store.fs, directory):
            write_partition_metadata(store.fs, os.path.join(directory, PARTITION_METADATA), topic.id)
            return done
        if state is not None and not state.is_as_made:
            done.append("its directory is gone; an empty one takes its place")
        make_partition(store, topic, partition, state)
    return done


def _repair_epochs(store: OpenStore, directory: str, done: list[str], dry_run: bool) -> None:
    """A checkpoint of leader epochs that cannot be read goes: the log's recovery finds them in the batches."""
    try:
        LeaderEpochs.load(store.fs, directory, limits=store.limits)
    except CorruptCheckpoint as error:
        if not dry_run:
            set_aside_file(store, os.path.join(directory, LEADER_EPOCH_CHECKPOINT))
        done.append(f"{LEADER_EPOCH_CHECKPOINT} is damaged ({error.what}), and made again")


def _may_be_log_of(store: OpenStore, directory: str, state: PartitionState | None) -> bool:
    """Whether a directory of the right name and without an owner can be the partition's, damaged perhaps."""
    if state is None or not state.segments:
        return True
    found = segments_at(store.fs, directory)
    *sealed, active = state.segments
    return any(found.get(each.base_offset) == each.size_bytes for each in sealed) or active.base_offset in found


def _is_log_after_all(
    store: OpenStore, topic: Topic, directory: str, state: PartitionState | None, carried: str
) -> bool:
    """Whether a directory that names another topic is the partition's all the same, damaged perhaps.

    A directory keeps its name as long as its topic lives. So the id of one that lives under another name is in the
    wrong file, unless the whole directory was moved: then the log fits that topic.
    """
    if state is not None and is_log_of(store.fs, directory, state):
        return True
    others, _ = readable_topics(store)
    other = next((each for each in others if each.id == carried and each.name != topic.name), None)
    if not _may_be_log_of(store, directory, state):
        return False
    if (
        other is None
    ):  # the id of no topic: a damaged one, unless the directory is left over from a topic, or came from elsewhere
        return _differ(carried, topic.id) <= _DAMAGED_CHARS and not store.marks.is_deleted(carried)
    theirs = [state_of(store, other.id, number) for number in range(other.partitions)]
    ours_fitting = _fitting(store, directory, state)
    theirs_fitting = max(_fitting(store, directory, each) for each in theirs)
    if ours_fitting != theirs_fitting:
        return ours_fitting > theirs_fitting
    return not any(is_log_of(store.fs, directory, each) for each in theirs)


def _differ(one: str, other: str) -> int:
    """In how many characters two ids differ; they are random, so that those of two topics differ in nearly all."""
    return sum(left != right for left, right in zip(one, other, strict=True))


def _fitting(store: OpenStore, directory: str, state: PartitionState | None) -> int:
    """How many sealed segments of the list are there, to the byte."""
    found = segments_at(store.fs, directory)
    return sum(found.get(each.base_offset) == each.size_bytes for each in state.segments[:-1]) if state else 0


def _repair_state(
    store: OpenStore, topic: Topic, partition: TopicPartition, end_offset: int, done: list[str], dry_run: bool
) -> PartitionState | None:
    """The partition's segment list, made again where it is lost; None for a partition that was never written to."""
    path = store.layout.partition_state(topic.id, partition.partition)
    try:
        state = read_state(store.fs, path, limits=store.limits)
    except CorruptState as error:
        done.append(f"the segment list is damaged: {error.what}")
        if not dry_run:
            set_aside_file(store, path)
        state = None
    if state is not None and _is_of_another(store, topic, partition, state):
        done.append("the segment list is another partition's")
        if not dry_run:
            set_aside_file(store, path)
        state = None
    if state is not None and (made_again := without_older_list(store, topic, partition, state)) is not None:
        done.append("the segment list is older than the log, and is made again from the directory")
        if not dry_run:
            write_state(store.fs, path, made_again)
        return made_again
    is_there = store.fs.exists(store.layout.partition(partition))
    if state is not None or not (is_there or end_offset):
        return state  # it is there, or the partition was never written
    state = rebuilt_state(store, topic, partition, end_offset)
    if state.log_start_offset:
        done.append(
            f"the log start {state.log_start_offset} is from Kafka's checkpoint; what was deleted since may be back"
        )
    elif is_there and segments_at(store.fs, store.layout.partition(partition)):
        done.append("the log start is not known; what was deleted in front of it may be back")
    if not dry_run:
        store.fs.mkdir(store.layout.topic_state(topic.id))
        write_state(store.fs, path, state)
    source = "the directory" if is_there else "what is known of its end: its directory is gone, too"
    done.append(f"the segment list was missing or damaged, and is made again from {source}")
    return state


def rebuilt_state(store: OpenStore, topic: Topic, partition: TopicPartition, end_offset: int) -> PartitionState:
    """What is known of a partition whose list is lost, without segments: the log's own opening finds those."""
    directory = store.layout.partition(partition)
    log_start, first_dirty = _checkpointed(store, topic, partition)
    # Of all but its last segment anything may have been compacted away; without one, of all there was.
    found = segments_at(store.fs, directory) if store.fs.exists(directory) else ()
    last_base = max(found) if found else end_offset
    noted = (read_reason(store.fs, folder) for folder in folders(store.fs, directory))
    return PartitionState(
        log_start_offset=log_start,
        first_dirty_offset=first_dirty,
        dropped_tombstones=tombstones_beyond_reasons(store.fs, directory),
        thinned_offset=max(first_dirty, last_base),
        losses=reasons(data for data in noted if data is not None),
    )


def without_older_list(
    store: OpenStore, topic: Topic, partition: TopicPartition, state: PartitionState
) -> PartitionState | None:
    """The state without its segments where they are those of an older copy, as one made of a store in use; else None.

    A segment is listed, for good, before anything in it is published.
    """
    directory = store.layout.partition(partition)
    try:
        published = store.ends(topic).high_watermarks[partition.partition]
    except CorruptState:
        return None
    if not state.segments or state.swap is not None or not store.fs.exists(directory):
        return None
    last_base = max(segments_at(store.fs, directory), default=0)
    if not state.segments[-1].base_offset < last_base < published:
        return None
    return replace(
        state,
        generation=state.generation + 1,
        segments=(),
        thinned_offset=max(state.thinned_offset, last_base),  # it may have been compacted since, all but its end
        dropped_tombstones=max(state.dropped_tombstones + 1, tombstones_beyond_reasons(store.fs, directory)),
        closed=False,
        next_horizon_ms=None,
    )


def _is_of_another(store: OpenStore, topic: Topic, partition: TopicPartition, state: PartitionState) -> bool:
    directory = store.layout.partition(partition)
    if state.swap is not None or not store.fs.exists(directory):
        return False  # names change in the middle of a replacement
    config, now_ms = store.log_config(topic), store.clock.now_ms()
    return has_wrong_list(Partition(store.fs, directory, str(partition), state, None, config, store.limits, now_ms))


def _checkpointed(store: OpenStore, topic: Topic, partition: TopicPartition) -> tuple[int, int]:
    """Log start and first dirty offset from Kafka's checkpoint files; zeros where they do not agree with the rest."""
    log_starts = checkpointed_offsets(store, topic, LOG_START_OFFSET_CHECKPOINT)
    cleaned = checkpointed_offsets(store, topic, CLEANER_OFFSET_CHECKPOINT)
    synced = checkpointed_offsets(store, topic, RECOVERY_POINT_CHECKPOINT)
    start = log_starts.get(partition, 0)
    if start:
        # Nothing protects these files, and one kind looks like another: a wrong log start would hide records.
        is_compacted = store.log_config(topic).compact
        if log_starts in (cleaned, synced) or synced.get(partition, 0) < start:
            return 0, 0
        if (is_compacted and cleaned.get(partition, 0) < start) or not _agrees_with_lists(store, log_starts):
            return 0, 0
    return start, cleaned.get(partition, 0)


def _agrees_with_lists(store: OpenStore, log_starts: dict[TopicPartition, int]) -> bool:
    """Whether no list that can be read says that a log starts earlier: starts only grow."""
    topics, _ = readable_topics(store)
    for topic in topics:
        for number in range(topic.partitions):
            told = log_starts.get(topic.partition(number), 0)
            state = state_of(store, topic.id, number) if told else None
            if state is not None and state.log_start_offset < told:
                return False
    return True


def checkpointed_offsets(store: OpenStore, topic: Topic, name: str) -> dict[TopicPartition, int]:
    """Nothing if it cannot be read, or is older than the topic: it may speak of another one of the same name."""
    path = os.path.join(store.layout.logs, name)
    try:
        if store.fs.stat(path).mtime_ms >= topic.created_ms:
            return dict(read_offset_checkpoint(store.fs, path, limits=store.limits))
    except (FileNotFoundError, CorruptCheckpoint):
        pass
    return {}


def state_of(store: OpenStore, topic_id: str, number: int) -> PartitionState | None:
    try:
        return read_state(store.fs, store.layout.partition_state(topic_id, number), limits=store.limits)
    except CorruptState:
        return None


def set_aside_file(store: OpenStore, path: str) -> str:
    """Keep a damaged file in `staging/`, where it is not read and no sweep removes it."""
    kept = store.layout.work("damaged")
    store.fs.rename(path, kept)
    store.fs.fsync_dir(os.path.dirname(path))
    return kept
