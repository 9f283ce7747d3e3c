"""A directory a broker can mount, made from the committed part of a store's partitions.

Sealed `.log` files are hard-linked where they can be, the rest is copied; indexes are trimmed, topic ids and checkpoint
files are as the broker wants them. Partitions are built under a name no broker accepts and renamed when all are ready.
`.kafka_cleanshutdown` comes last: it switches off every check, so it is written only when all the rest is on disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from logstore.config import LogConfig
from logstore.directory.checkpoint import (
    MetaProperties,
    delete_clean_shutdown,
    read_offset_checkpoint,
    write_clean_shutdown,
    write_meta_properties,
    write_partition_metadata,
)
from logstore.directory.layout import BROKER_GUARD
from logstore.directory.locks import FileLock, holder
from logstore.directory.projection import PartitionFacts, checkpoint_entries, write_checkpoints
from logstore.directory.state import Loss, PartitionState, SegmentEntry
from logstore.directory.trees import copy_file, is_directory, remove_tree
from logstore.errors import ExportRefused, StoreInUse
from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.partition.environment import LogEnvironment
from logstore.segment.names import (
    CLEAN_SHUTDOWN,
    LEADER_EPOCH_CHECKPOINT,
    LOCK,
    META_PROPERTIES,
    PARTITION_METADATA,
    RECOVERY_POINT_CHECKPOINT,
    FileKind,
    Transient,
    file_name,
    parse_file_name,
    parse_partition_directory,
)
from logstore.topic import TopicPartition, parse_uuid
from logstore.topics.moving import Take, Taken
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic

#: not named like a partition: a broker that finds one left by a crash refuses to start
_DRAFT_PREFIX = ".duramen-export-"


@dataclass(frozen=True, slots=True)
class ExportedPartition:
    partition: TopicPartition
    topic_id: str
    log_start_offset: int
    log_end_offset: int
    segments: int
    linked_bytes: int
    copied_bytes: int
    #: gaps that damage left; a broker cannot record them
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    directory: str
    partitions: tuple[ExportedPartition, ...]
    clean: bool
    skipped: tuple[TopicPartition, ...] = ()


class Exportable(Protocol):
    """What is asked of a store, whatever its kind, to make a directory of its partitions."""

    @property
    def fs(self) -> FileSystem:
        """Of the target."""

    @property
    def path(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    def log_config(self, topic: Topic) -> LogConfig: ...

    def log_environment(self) -> LogEnvironment: ...

    def exports(self, topics: Sequence[Topic]) -> contextlib.AbstractContextManager[Take]:
        """How to get at their partitions; of a bucket, as of one moment."""


def check_topic_ids(topics: list[Topic], topic_ids: Mapping[str, str]) -> None:
    """Raises ExportRefused for a malformed id, or one of a topic that is not exported."""
    names = {topic.name for topic in topics}
    for name, topic_id in topic_ids.items():
        if name not in names:
            raise ExportRefused(f"an id is given for {name}, which is not exported")
        try:
            sound = parse_uuid(topic_id).int != 0
        except ValueError:
            sound = False
        if not sound:
            raise ExportRefused(
                f"{topic_id!r} is not a topic id",
                hint="`kafka-topics.sh --describe` shows it: 22 letters, digits, - and _.",
            )


def check_target(store: Exportable, directory: str, topics: list[Topic]) -> None:
    """Raises ExportRefused when an export would harm what is in the directory."""
    fs = store.fs
    if (os.path.realpath(directory) + os.sep).startswith(os.path.realpath(store.path) + os.sep):
        raise ExportRefused("the target lies inside the store", file=directory, hint="Give a directory elsewhere.")
    if not fs.exists(directory):
        return
    if not is_directory(fs, directory):
        raise ExportRefused("the target is not a directory", file=directory, hint="Give a new directory.")
    names = fs.listdir(directory)
    if BROKER_GUARD in names:
        raise ExportRefused("these are the logs of a live store", file=directory, hint="Give a directory elsewhere.")
    if {"version", "topics", "state"} <= {*names}:
        raise ExportRefused("the target is another store", file=directory, hint="Give a directory elsewhere.")
    for name in names:
        if name.startswith(_DRAFT_PREFIX):
            raise ExportRefused("an export was interrupted here", file=os.path.join(directory, name), hint="Remove it.")
    for topic in topics:
        for partition in topic.partition_list():
            path = os.path.join(directory, str(partition))
            if fs.exists(path) and not _is_empty_log(fs, path):
                raise ExportRefused(
                    f"{partition} is there already and holds records",
                    file=path,
                    hint="Remove it, or give another directory.",
                )


def _is_empty_log(fs: FileSystem, directory: str) -> bool:
    """As a broker leaves a topic that was just created."""
    return all(
        parsed is None or parsed.kind is not FileKind.LOG or fs.stat(os.path.join(directory, name)).size_bytes == 0
        for name in fs.listdir(directory)
        for parsed in [parse_file_name(name)]
    )


def export_topics(
    store: Exportable,
    directory: str,
    topics: list[Topic],
    *,
    topic_ids: Mapping[str, str] | None = None,
    unclean: bool = False,
    identity: MetaProperties | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Export:
    """Export the topics up to their high watermarks.

    `topic_ids` are the ids the broker knows the topics by; without, they keep the id they were imported with, or the
    store's. `unclean` leaves out the marker of a clean stop, so that the broker checks everything. `identity` becomes
    meta.properties.
    Raises ExportRefused, StoreInUse.
    """
    fs, topic_ids = store.fs, topic_ids or {}
    check_topic_ids(topics, topic_ids)
    check_target(store, directory, topics)
    fs.mkdir(directory)
    lock = FileLock(fs, os.path.join(directory, LOCK))
    if not lock.acquire(0):
        raise StoreInUse(
            f"{holder(fs, lock.path)} is using the directory", file=lock.path, hint="Stop the broker first."
        )
    draft = os.path.join(directory, _DRAFT_PREFIX + uuid.uuid4().hex)
    try:
        # What other partitions are there was left clean, or must be checked by the broker.
        others = _holds_other_partitions(fs, directory, topics)
        was_clean = delete_clean_shutdown(fs, os.path.join(directory, CLEAN_SHUTDOWN))
        fs.mkdir(draft)
        with store.exports(topics) as take:
            brings = partial(take, progress=progress, link=True)
            done = [
                _build(store, topic, number, draft, topic_ids.get(topic.name, topic.export_id), brings)
                for topic in topics
                for number in range(topic.partitions)
            ]
        fs.fsync_dir(draft)
        for exported, _ in done:
            target = os.path.join(directory, str(exported.partition))
            remove_tree(fs, target)
            fs.rename(os.path.join(draft, str(exported.partition)), target)
        fs.fsync_dir(directory)
        facts = [each for _, each in done]
        _merge_checkpoints(store, directory, facts, unclean)
        if identity is not None:
            write_meta_properties(fs, os.path.join(directory, META_PROPERTIES), identity)
        fs.fsync_dir(directory)
        clean = not unclean and (was_clean or not others)
        fs.rmdir(draft)
        if clean:
            write_clean_shutdown(fs, os.path.join(directory, CLEAN_SHUTDOWN))
        fs.fsync_dir(directory)
    finally:
        remove_tree(fs, draft)
        lock.release()
    return Export(directory, tuple(exported for exported, _ in done), clean)


def _holds_other_partitions(fs: FileSystem, directory: str, topics: list[Topic]) -> bool:
    ours = {str(partition) for topic in topics for partition in topic.partition_list()}
    for name in fs.listdir(directory):
        if name in ours or not is_directory(fs, os.path.join(directory, name)):
            continue
        with contextlib.suppress(Exception):
            parse_partition_directory(name)
            return True
    return False


def take_from_directory(
    store: OpenStore,
    topic: Topic,
    number: int,
    directory: str,
    progress: Callable[[int], None],
    *,
    link: bool = False,
) -> Taken:
    """Implements `Take` for a store in a directory."""
    partition = topic.partition(number)
    # No compaction and no retention meanwhile; appends go on, above the high watermark read here.
    with store.locks.maintenance(topic.id, number, what=f"export {partition}"):
        high_watermark = store.high_watermark(topic, number)
        state = store.partition_state(topic, number)
        return Taken(
            state, high_watermark, *take_files(store, partition, state, high_watermark, directory, progress, link=link)
        )


def _build(
    store: Exportable, topic: Topic, number: int, draft: str, topic_id: str, take: Callable[[Topic, int, str], Taken]
) -> tuple[ExportedPartition, PartitionFacts]:
    partition = topic.partition(number)
    directory = os.path.join(draft, str(partition))
    store.fs.mkdir(directory)
    taken = take(topic, number, directory)
    state, high_watermark = taken.state, taken.high_watermark
    write_partition_metadata(store.fs, os.path.join(directory, PARTITION_METADATA), topic_id)
    config = store.log_config(topic)
    start, end, segments = _finish(store, partition, config, directory, state, high_watermark)
    store.fs.fsync_dir(directory)
    exported = ExportedPartition(
        partition, topic_id, start, end, segments, taken.linked_bytes, taken.copied_bytes, state.losses
    )
    facts = PartitionFacts(
        partition=partition,
        high_watermark=end,
        recovery_point=end,
        log_start_offset=start,
        first_base_offset=state.segments[0].base_offset if state.segments else 0,
        first_dirty_offset=min(state.first_dirty_offset, end),
        compacted=config.compact,
    )
    return exported, facts


def take_files(
    store: OpenStore,
    partition: TopicPartition,
    state: PartitionState,
    high_watermark: int,
    target: str,
    progress: Callable[[int], None],
    *,
    link: bool = True,
) -> tuple[int, int]:
    """Bytes linked and copied. The last segment comes without indexes: they may be written to this moment."""
    fs, source = store.fs, store.layout.partition(partition)
    linked = copied = 0
    # An empty segment at the high watermark counts: after a loss it is all that says where the log goes on.
    committed = [entry for entry in state.segments if entry.base_offset <= high_watermark]
    for at, entry in enumerate(committed):
        path = os.path.join(source, file_name(entry.base_offset, FileKind.LOG))
        to = os.path.join(target, os.path.basename(path))
        if at + 1 < len(committed):
            if link and _link(fs, path, to):
                linked += entry.size_bytes
                progress(entry.size_bytes)
            else:
                copied += copy_file(fs, path, to, progress=progress)
            for kind in (FileKind.INDEX, FileKind.TIME_INDEX, FileKind.TXN_INDEX):
                copied += _copy_if_there(fs, source, target, file_name(entry.base_offset, kind))
        else:
            committed_bytes = _committed_bytes(store, partition, entry, high_watermark)
            copied += copy_file(fs, path, to, size_bytes=committed_bytes, progress=progress)
    bases = {entry.base_offset for entry in committed}
    for name in fs.listdir(source):
        parsed = parse_file_name(name)
        if parsed is None or parsed.kind is not FileKind.SNAPSHOT or parsed.transient is not Transient.NONE:
            continue
        if parsed.base_offset in bases or parsed.base_offset == high_watermark:
            copied += _copy_if_there(fs, source, target, name)
    copied += _copy_if_there(fs, source, target, LEADER_EPOCH_CHECKPOINT)
    return linked, copied


def _committed_bytes(store: OpenStore, partition: TopicPartition, entry: SegmentEntry, high_watermark: int) -> int:
    """How much of the segment's file lies below the high watermark."""
    from logstore.segment.segment import LogSegment

    segment = LogSegment(store.fs, store.layout.partition(partition), entry.base_offset, limits=store.limits)
    try:
        if high_watermark <= entry.base_offset:
            return 0
        # The last committed batch is found without a look at what follows it, which may be half written.
        header = segment.find_batch(high_watermark - 1)
        if header is None:
            return segment.size_bytes
        return header.end_position if header.next_offset <= high_watermark else header.position
    finally:
        segment.close(clean=False)


def _link(fs: FileSystem, source: str, target: str) -> bool:
    """A hard link whose content is on disk; False where the file systems do not allow one."""
    try:
        fs.link(source, target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            return False
        raise
    file = fs.open(target)
    try:
        file.fsync()
    finally:
        file.close()
    return True


def _copy_if_there(fs: FileSystem, source: str, target: str, name: str) -> int:
    try:
        return copy_file(fs, os.path.join(source, name), os.path.join(target, name))
    except FileNotFoundError:
        return 0


def _finish(
    store: Exportable,
    partition: TopicPartition,
    config: LogConfig,
    directory: str,
    state: PartitionState,
    high_watermark: int,
) -> tuple[int, int, int]:
    """Let the log itself rebuild the last segment's indexes, cut epochs and leave a producer snapshot at its end."""
    from logstore.partition.environment import LastKnown
    from logstore.partition.log import PartitionLog

    log = PartitionLog.open(
        directory,
        partition=partition,
        config=config,
        known=LastKnown(clean=True, log_start_offset=state.log_start_offset),
        environment=store.log_environment(),
    )
    try:
        if log.log_end_offset < high_watermark:
            raise ExportRefused(
                f"committed up to {high_watermark}, but the log ends at {log.log_end_offset}",
                partition=partition,
                hint="Run `duramen verify`, then `duramen recover`.",
            )
    except BaseException:
        log.close(clean=False)
        raise
    log.close()
    return log.log_start_offset, log.log_end_offset, len(log.segments)


def _merge_checkpoints(store: Exportable, directory: str, facts: list[PartitionFacts], unclean: bool) -> None:
    """Our partitions' entries among those of partitions that were there before."""
    ours = {each.partition for each in facts}
    merged = {}
    for name, entries in checkpoint_entries(facts).items():
        kept = read_offset_checkpoint(store.fs, os.path.join(directory, name), limits=store.limits)
        merged[name] = {key: offset for key, offset in kept.items() if key not in ours} | entries
    if unclean:
        merged[RECOVERY_POINT_CHECKPOINT].update(dict.fromkeys(ours, 0))
    write_checkpoints(store.fs, directory, merged)
