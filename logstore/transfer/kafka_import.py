"""Adopting the partition directories of a stopped broker, or bare `topic-N` folders.

Everything is copied (or linked) and recovered under `staging/` first; a topic appears in the store in one step, when
its file gets its name. Until then a mark in `topics/` says what belongs to the import, and the lock of its folder that
it is at work. The source is never changed. All records found are taken as committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from logstore.commit.writing import published
from logstore.directory.checkpoint import (
    read_offset_checkpoint,
    read_partition_metadata,
    write_partition_metadata,
)
from logstore.directory.ends import TopicEnds
from logstore.directory.layout import BROKER_GUARD
from logstore.directory.locks import FileLock, holder
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.directory.trees import copy_file, is_directory
from logstore.errors import DuramenError, ImportRefused, LockHeld, StoreInUse, TopicExists
from logstore.files import FileSystem, NotRegularFile
from logstore.limits import Limits
from logstore.partition.density import thinned_below
from logstore.partition.recovery import Cut
from logstore.partition.salvage import Damage, Partition, carry_out, plan_salvage, with_found_end
from logstore.segment.names import (
    CLEAN_SHUTDOWN,
    CLEANER_OFFSET_CHECKPOINT,
    CLUSTER_METADATA_DIRECTORY,
    LEADER_EPOCH_CHECKPOINT,
    LOCK,
    LOG_START_OFFSET_CHECKPOINT,
    META_PROPERTIES,
    PARTITION_METADATA,
    RECOVERY_POINT_CHECKPOINT,
    REMOTE_LOG_INDEX_CACHE_DIRECTORY,
    DirectoryState,
    FileKind,
    NumberedFile,
    Transient,
    parse_file_name,
    parse_partition_directory,
)
from logstore.topic import TopicPartition, new_topic_id
from logstore.topics.deleting import take_back_import
from logstore.topics.import_folder import ImportFolder
from logstore.topics.opened import OpenStore
from logstore.topics.placing import check_place, place_partition
from logstore.topics.registry import Topic, check_partitions, spelled
from logstore.transfer.import_settings import TopicSettings, read_settings

#: Kafka's own topics mean nothing without their cluster; they come only when asked for by name
_INTERNAL_PREFIX = "__"
#: files of a log directory that are read
_READ_AT_THE_TOP = frozenset(
    {
        RECOVERY_POINT_CHECKPOINT,
        LOG_START_OFFSET_CHECKPOINT,
        CLEANER_OFFSET_CHECKPOINT,
        META_PROPERTIES,
        LOCK,
    }
)


@dataclass(frozen=True, slots=True)
class SourcePartition:
    partition: TopicPartition
    directory: str
    size_bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class SourceTopic:
    name: str
    #: the id its partitions carry, None when none does
    topic_id: str | None
    partitions: tuple[SourcePartition, ...]

    @property
    def partition_count(self) -> int:
        return max(each.partition.partition for each in self.partitions) + 1


@dataclass(frozen=True, slots=True)
class Source:
    """What a directory offers, and what was passed by with the reason."""

    directory: str
    clean: bool
    topics: tuple[SourceTopic, ...]
    skipped: Mapping[str, str]
    recovery_points: Mapping[TopicPartition, int] = field(default_factory=dict)
    log_starts: Mapping[TopicPartition, int] = field(default_factory=dict)
    first_dirty: Mapping[TopicPartition, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    #: what the cluster tells of the topics' settings
    settings: Mapping[str, TopicSettings] = field(default_factory=dict)
    follow_links: bool = False


@dataclass(slots=True)
class ImportedPartition:
    partition: TopicPartition
    log_start_offset: int
    log_end_offset: int
    size_bytes: int
    segments: int
    linked_bytes: int = 0
    copied_bytes: int = 0
    dropped_bytes: int = 0
    cuts: list[dict[str, object]] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)

    @property
    def found_damage(self) -> bool:
        return bool(self.cuts or self.quarantined)


@dataclass(frozen=True, slots=True)
class ImportedTopic:
    topic: Topic
    partitions: tuple[ImportedPartition, ...]


# --- looking at the source -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped_source(fs: FileSystem, directory: str) -> Iterator[None]:
    """Keeps a broker from starting on the directory meanwhile. Raises StoreInUse when one is running."""
    path = os.path.join(_log_directory(fs, directory)[0], LOCK)
    if not fs.exists(path):
        yield  # a broker that runs has made it
        return
    lock = FileLock(fs, path, exclusive=False, create=False)
    with only_regular_files():
        is_stopped = lock.acquire(0)
    if not is_stopped:
        raise StoreInUse(f"{holder(fs, path)} is using the directory", file=path, hint="Stop the broker first.")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def only_regular_files() -> Iterator[None]:
    """Turns what a FIFO or a directory in the place of a file gives into ImportRefused."""
    try:
        yield
    except (NotRegularFile, IsADirectoryError) as error:
        raise ImportRefused(
            "there is something here that is not a regular file", file=error.filename, hint="Remove it."
        ) from error


def check_links(directory: str, path: str, *, follow_links: bool) -> None:
    """Raises ImportRefused for a path that symbolic links lead out of `directory`."""
    root = os.path.realpath(directory)
    if not follow_links and not (os.path.realpath(path) + os.sep).startswith(os.path.join(root, "")):
        raise ImportRefused(
            "a symbolic link leads out of the directory",
            file=path,
            hint="Give the directory it leads to, or take what it leads to with --follow-links.",
        )


def _log_directory(fs: FileSystem, directory: str) -> tuple[str, list[str]]:
    """The log directory and the names in it to look at: all, or the one partition folder that was given."""
    if not is_directory(fs, directory):
        raise ImportRefused("there is no such directory", file=directory, hint="Check the path.")
    names = fs.listdir(directory)
    if any((parsed := parse_file_name(name)) and parsed.kind is FileKind.LOG for name in names):
        parent, name = os.path.split(os.path.abspath(directory))
        return parent, [name]
    return directory, names


def examine(
    fs: FileSystem,
    directory: str,
    *,
    only: list[str] | None = None,
    limits: Limits,
    metadata_directory: str | None = None,
    server_properties: str | None = None,
    follow_links: bool = False,
) -> Source:
    """What there is to import; the metadata log lies in `metadata_directory` if not here. Raises ImportRefused."""
    with only_regular_files():
        return _examine(fs, directory, only, limits, metadata_directory, server_properties, follow_links)


def _examine(
    fs: FileSystem,
    directory: str,
    only: list[str] | None,
    limits: Limits,
    metadata_directory: str | None,
    server_properties: str | None,
    follow_links: bool,
) -> Source:
    directory, names = _log_directory(fs, directory)
    if fs.exists(os.path.join(directory, BROKER_GUARD)):
        raise ImportRefused(
            "these are the logs of a live store", file=directory, hint="Export it first, and import what comes out."
        )
    found: dict[str, list[SourcePartition]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        path = os.path.join(directory, name)
        if not is_directory(fs, path):
            if name in _READ_AT_THE_TOP:
                check_links(directory, path, follow_links=follow_links)
            continue
        reason, partition = _partition_of(name, only)
        if partition is None and name != CLUSTER_METADATA_DIRECTORY:
            skipped[name] = reason
            continue
        for each in ("", *fs.listdir(path)):
            check_links(directory, os.path.join(path, each), follow_links=follow_links)
        if partition is None:
            skipped[name] = reason
        else:
            found.setdefault(partition.topic, []).append(_source_partition(fs, path, partition))
    for topic in only or ():
        if topic not in found:
            raise ImportRefused(f"there is no partition of topic {topic}", file=directory)
    if not found:
        raise ImportRefused(
            "there are no topic-N directories", file=directory, hint="Give the directory that holds them."
        )
    offsets, notes = {}, []
    for name in (RECOVERY_POINT_CHECKPOINT, LOG_START_OFFSET_CHECKPOINT, CLEANER_OFFSET_CHECKPOINT):
        try:
            offsets[name] = read_offset_checkpoint(fs, os.path.join(directory, name), limits=limits)
        except DuramenError as error:
            # As a broker does: without recovery points everything is checked, without log starts all files count.
            offsets[name] = {}
            notes.append(f"{name} is not used: {error}")
    topics = tuple(_source_topic(fs, name, found[name], limits) for name in sorted(found))
    settings, more = read_settings(
        fs,
        directory,
        [(topic.name, topic.topic_id) for topic in topics],
        metadata_directory=metadata_directory,
        server_properties=server_properties,
        limits=limits,
    )
    return Source(
        directory=directory,
        clean=fs.exists(os.path.join(directory, CLEAN_SHUTDOWN)),
        topics=topics,
        skipped=skipped,
        recovery_points=offsets[RECOVERY_POINT_CHECKPOINT],
        log_starts=offsets[LOG_START_OFFSET_CHECKPOINT],
        first_dirty=offsets[CLEANER_OFFSET_CHECKPOINT],
        notes=(*notes, *more),
        settings=settings,
        follow_links=follow_links,
    )


def _partition_of(name: str, only: list[str] | None) -> tuple[str, TopicPartition | None]:
    """The partition to take from a directory of that name, or why none is."""
    if name in (CLUSTER_METADATA_DIRECTORY, REMOTE_LOG_INDEX_CACHE_DIRECTORY):
        return "a broker's own", None
    try:
        parsed = parse_partition_directory(name)
    except DuramenError as error:
        return error.what, None
    if parsed.state is not DirectoryState.LIVE:
        return {
            DirectoryState.DELETE: "awaits its deletion",
            DirectoryState.FUTURE: "an unfinished copy",
            DirectoryState.STRAY: "set aside by a broker",
        }[parsed.state], None
    if only is not None:
        return "not asked for", parsed.partition if parsed.partition.topic in only else None
    if parsed.partition.topic.startswith(_INTERNAL_PREFIX):
        return "Kafka's internal topic; name it to import it", None
    return "", parsed.partition


def _source_partition(fs: FileSystem, directory: str, partition: TopicPartition) -> SourcePartition:
    logs = [
        name
        for name in fs.listdir(directory)
        if (parsed := parse_file_name(name)) and parsed.kind is FileKind.LOG and parsed.transient is Transient.NONE
    ]
    size_bytes = sum(fs.stat(os.path.join(directory, name)).size_bytes for name in logs)
    return SourcePartition(partition, directory, size_bytes, len(logs))


def _source_topic(fs: FileSystem, name: str, partitions: list[SourcePartition], limits: Limits) -> SourceTopic:
    seen: dict[str, str] = {}
    for each in partitions:
        path = os.path.join(each.directory, PARTITION_METADATA)
        metadata = read_partition_metadata(fs, path, limits=limits)
        if metadata is not None:
            seen.setdefault(metadata.topic_id, str(each.partition))
    if len(seen) > 1:
        (first, one), (second, other) = list(seen.items())[:2]
        raise ImportRefused(
            f"the partitions of {name} belong to different topics: {one} to id {first}, {other} to id {second}",
            hint="Import them one at a time from folders of their own.",
        )
    partitions.sort(key=lambda each: each.partition)
    check_partitions(partitions[-1].partition.partition + 1)
    return SourceTopic(name, next(iter(seen), None), tuple(partitions))


# --- taking it in --------------------------------------------------------------------------------------------------


def plan_import(
    store: OpenStore, source: Source, configs: Mapping[str, object], *, defaults: bool = False
) -> list[Topic]:
    """The topics as they would be. Raises TopicExists, ImportRefused, UnknownConfig, InvalidConfig.

    Their settings are those their cluster tells of, and `configs` over them. Where neither tells enough they are
    unknown, unless `defaults` says that the store's are right.
    """
    store.resolve(configs)
    ids = {topic.export_id: topic.name for topic in store.topics()}
    planned = []
    for each in source.topics:
        if store.fs.exists(store.layout.topic(each.name)):
            raise TopicExists(
                f"there is a topic {each.name} already", hint="Delete it first, or import the others with --topic."
            )
        if each.topic_id in ids:
            raise ImportRefused(f"topics {ids[each.topic_id]} and {each.name} have the same id: {each.topic_id}")
        known = source.settings.get(each.name, TopicSettings())
        topic = Topic(
            name=each.name,
            # Never the one it had: a topic that was deleted and is imported again inherits nothing.
            id=new_topic_id(),
            partitions=each.partition_count,
            configs=spelled({**known.configs, **configs}),
            config_version=1,
            created_ms=store.clock.now_ms(),
            kafka_id=each.topic_id,
            settings_unknown=known.unknown is not None and not configs and not defaults,
        )
        check_place(store, topic, clear=False)
        ids[topic.export_id] = topic.name
        planned.append(topic)
    return planned


def import_topics(
    store: OpenStore,
    source: Source,
    configs: Mapping[str, object],
    *,
    link: bool = False,
    defaults: bool = False,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> list[ImportedTopic]:
    """Take every topic of the source in. The caller holds `stopped_source`. Raises what `plan_import` raises.

    `progress` is told the bytes taken since last time.
    """
    planned = plan_import(store, source, configs, defaults=defaults)
    with only_regular_files(), ImportFolder(store) as folder:
        begun: list[Topic] = []
        try:
            built = []
            for topic, origin in zip(planned, source.topics, strict=True):
                begun.append(topic)
                store.marks.begin_import(store.registry, topic)
                built.append(_build(store, source, topic, origin, folder, link, progress))
            return [_publish(store, folder, *each) for each in built]
        except BaseException:
            for topic in begun:
                with contextlib.suppress(LockHeld):
                    take_back_import(store, topic.id, topic)
            raise


def _build(
    store: OpenStore,
    source: Source,
    topic: Topic,
    origin: SourceTopic,
    folder: str,
    link: bool,
    progress: Callable[[int], None],
) -> tuple[Topic, list[ImportedPartition], TopicEnds]:
    """The topic's directories in the import's folder, recovered, and its state files, which nobody reads yet."""
    store.fs.mkdir(store.layout.topic_state(topic.id))
    store.registry.write_copy(topic)
    ends = TopicEnds.empty(topic.partitions)
    reports = []
    for each in origin.partitions:
        directory = os.path.join(folder, str(each.partition))
        store.fs.mkdir(directory)
        linked, copied = _take_files(store.fs, source, each, directory, link, progress)
        write_partition_metadata(store.fs, os.path.join(directory, PARTITION_METADATA), topic.id)
        report, ends = _recover(store, source, topic, each, directory, ends)
        report.linked_bytes, report.copied_bytes = linked, copied
        reports.append(report)
        store.fs.fsync_dir(directory)
    store.fs.fsync_dir(folder)
    return topic, reports, ends


def _take_files(
    fs: FileSystem,
    source: Source,
    origin: SourcePartition,
    target: str,
    link: bool,
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Bytes linked and copied."""
    numbered = {name: parsed for name in fs.listdir(origin.directory) if (parsed := parse_file_name(name)) is not None}
    linkable = _linkable(source, origin, list(numbered.values())) if link else set()
    linked = copied = 0
    for name, parsed in numbered.items():
        if parsed.transient is Transient.DELETED:
            continue
        path = os.path.join(origin.directory, name)
        check_links(source.directory, path, follow_links=source.follow_links)
        if parsed in linkable:
            try:
                fs.link(path, os.path.join(target, name))
            except OSError as error:
                if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise ImportRefused(
                        f"cannot make a hard link: {error.strerror}", file=path, hint="Leave out --link to copy."
                    ) from error
                raise
            size_bytes = fs.stat(path).size_bytes
            linked += size_bytes
        else:
            size_bytes = copy_file(fs, path, os.path.join(target, name))
            copied += size_bytes
        if parsed.kind is FileKind.LOG:
            progress(size_bytes)
    epochs = os.path.join(origin.directory, LEADER_EPOCH_CHECKPOINT)
    if fs.exists(epochs):
        copied += copy_file(fs, epochs, os.path.join(target, LEADER_EPOCH_CHECKPOINT))
    return linked, copied


def _linkable(source: Source, origin: SourcePartition, files: list[NumberedFile]) -> set[NumberedFile]:
    """The `.log` files recovery will never write to: sealed and, after an unclean stop, below the recovery point.

    A file that is linked is the source's file too, and the source is never changed.
    """
    bases = sorted(each.base_offset for each in files if each.kind is FileKind.LOG and each.transient is Transient.NONE)
    if any(each.transient is Transient.SWAP for each in files):
        return set()
    point = source.recovery_points.get(origin.partition, 0)
    return {
        NumberedFile(base, FileKind.LOG) for base, following in pairwise(bases) if source.clean or following <= point
    }


def _recover(
    store: OpenStore, source: Source, topic: Topic, origin: SourcePartition, directory: str, ends: TopicEnds
) -> tuple[ImportedPartition, TopicEnds]:
    from logstore.partition.environment import LastKnown
    from logstore.partition.log import PartitionLog

    number = origin.partition.partition
    state_path = store.layout.partition_state(topic.id, number)
    log_start = source.log_starts.get(origin.partition, 0)
    # The log's own opening takes the rest from here, and keeps first dirty within the log.
    first_dirty = source.first_dirty.get(origin.partition, 0)
    initial = replace(PartitionState(), log_start_offset=log_start, first_dirty_offset=first_dirty)
    write_state(store.fs, state_path, initial)
    damages, aside = ([], []) if source.clean else _salvage(store, topic, origin, directory, initial, state_path)
    log = PartitionLog.open(
        directory,
        partition=origin.partition,
        config=store.log_config(topic),
        known=LastKnown(source.clean, source.recovery_points.get(origin.partition, 0), log_start_offset=log_start),
        environment=store.log_environment(),
        state_path=state_path,
    )
    thinned_offset = thinned_below(log.segments) if log.config.compact else 0
    log.close()
    if thinned_offset:  # a broker's cleaner may have been stopped in the middle of a pass; nothing of its says how far
        state = read_state(store.fs, state_path, limits=store.limits)
        assert state is not None
        write_state(store.fs, state_path, replace(state, thinned_offset=thinned_offset))
    found = log.recovery
    report = ImportedPartition(
        partition=origin.partition,
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        size_bytes=log.size_bytes,
        segments=len(log.segments),
        dropped_bytes=found.dropped_bytes + sum(each.size_bytes for each in damages),
        cuts=[
            {
                "file": os.path.basename(cut.file),
                "position": cut.position,
                "dropped_bytes": cut.dropped_bytes,
                "reason": cut.reason,
            }
            for cut in [*(Cut(each.file, each.position, each.size_bytes, each.reason) for each in damages), *found.cuts]
        ],
        quarantined=[
            os.path.join(store.layout.partition(origin.partition), os.path.relpath(path, directory))
            for path in [*aside, *found.quarantined]
        ],
    )
    return report, published(ends, number, log)


def _salvage(
    store: OpenStore, topic: Topic, origin: SourcePartition, directory: str, state: PartitionState, state_path: str
) -> tuple[list[Damage], list[str]]:
    """Before the log's own recovery cuts at the first damage, as a broker would: keep the intact batches behind it.

    A torn tail is left to it. So is a directory in which a broker's cleaner was interrupted.
    """
    names = [parse_file_name(name) for name in store.fs.listdir(directory)]
    if any(each is not None and each.transient in (Transient.SWAP, Transient.CLEANED) for each in names):
        return [], []
    given = Partition(
        store.fs,
        directory,
        str(origin.partition),
        state,
        None,
        store.log_config(topic),
        store.limits,
        store.clock.now_ms(),
        imported=True,
    )
    given = with_found_end(given)
    plan = plan_salvage(given)
    if not plan.changes:
        return [], []
    _, aside = carry_out(given, plan, state_path)
    return plan.damages, aside


def _publish(
    store: OpenStore, folder: str, topic: Topic, reports: list[ImportedPartition], ends: TopicEnds
) -> ImportedTopic:
    """Directories into place, then the ends, then the topic's file, which makes it all visible."""
    check_place(store, topic)
    with store.locks.lease(topic.id, what=f"import {topic.name}"):
        for report in reports:
            store.fs.rename(os.path.join(folder, str(report.partition)), store.layout.partition(report.partition))
        store.fs.fsync_dir(store.layout.logs)
        store.write_ends(topic, ends)
        store.marks.complete_import(store.registry, topic)
    for partition in topic.partition_list():  # those the source did not have
        place_partition(store, topic, partition)
    return ImportedTopic(topic, tuple(reports))
