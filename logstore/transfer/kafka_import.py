"""Adopting the partition directories of a stopped broker, or bare `topic-N` folders.

Everything is copied (or linked) and recovered under `staging/` first; a topic appears in the store in one step, when
its file gets its name. Until then a mark in `topics/` says what belongs to the import, and the lock of its folder that
it is at work. The source is never changed. All records found are taken as committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from logstore.commit.writing import published
from logstore.directory.checkpoint import write_partition_metadata
from logstore.directory.ends import TopicEnds
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.directory.trees import copy_file
from logstore.errors import ImportRefused, LockHeld, TopicExists
from logstore.files import FileSystem
from logstore.partition.density import thinned_below
from logstore.partition.recovery_report import Cut
from logstore.partition.salvage import Damage, Partition
from logstore.partition.salvage_planning import plan_salvage, with_found_end
from logstore.partition.salvage_writing import carry_out
from logstore.segment.names import (
    LEADER_EPOCH_CHECKPOINT,
    PARTITION_METADATA,
    FileKind,
    NumberedFile,
    Transient,
    parse_file_name,
)
from logstore.topic import TopicPartition, new_topic_id
from logstore.topics.deleting import take_back_import
from logstore.topics.import_folder import ImportFolder
from logstore.topics.opened import OpenStore
from logstore.topics.placing import check_place, place_partition
from logstore.topics.registry import Topic, spelled
from logstore.transfer.import_settings import TopicSettings
from logstore.transfer.kafka_source import Source, SourcePartition, SourceTopic, check_links, only_regular_files


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


def plan_import(
    store: OpenStore, source: Source, configs: Mapping[str, object], *, defaults: bool = False
) -> list[Topic]:
    """The topics as they would be. Raises TopicExists, ImportRefused, UnknownConfig, InvalidConfig.

    Their settings are those of their cluster, overridden by `configs`. Where neither has enough they are unknown,
    unless `defaults` says that the store's are right.
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

    `progress` is called with the bytes taken since last time.
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
    """The topic's directories in the import's folder, recovered, and its state files, which are not read yet."""
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
    fs: FileSystem, source: Source, origin: SourcePartition, target: str, link: bool, progress: Callable[[int], None]
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
            progress(size_bytes)
        else:
            counted = progress if parsed.kind is FileKind.LOG else _uncounted
            copied += copy_file(fs, path, os.path.join(target, name), progress=counted)
    epochs = os.path.join(origin.directory, LEADER_EPOCH_CHECKPOINT)
    if fs.exists(epochs):
        copied += copy_file(fs, epochs, os.path.join(target, LEADER_EPOCH_CHECKPOINT))
    return linked, copied


def _uncounted(size_bytes: int) -> None:
    """Indexes and snapshots do not count in a log's size."""


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
    if thinned_offset:  # a broker's cleaner may have been stopped in the middle of a pass; no file of it says how far
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
    """Before the log's own recovery cuts at the first damage, as a broker would: keep the intact batches after it.

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
