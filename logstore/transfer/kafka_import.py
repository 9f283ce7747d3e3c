"""Adopting the partition directories of a stopped broker, or bare `topic-N` folders.

Everything is copied (or linked) and recovered beside the store first; how it becomes visible, in one step, is the
store's own (`Arrivals`). The source is never changed. All records found are taken as committed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from logstore.directory.state import PartitionState, read_state, write_state
from logstore.directory.trees import copy_file
from logstore.errors import ImportRefused
from logstore.files import FileSystem
from logstore.partition.density import thinned_below
from logstore.partition.recovery_report import Cut
from logstore.partition.salvage import Damage, Partition
from logstore.partition.salvage_planning import plan_salvage, with_found_end
from logstore.partition.salvage_writing import carry_out
from logstore.segment.names import (
    LEADER_EPOCH_CHECKPOINT,
    FileKind,
    NumberedFile,
    Transient,
    parse_file_name,
)
from logstore.topic import TopicPartition, new_topic_id
from logstore.topics.moving import Arrivals, Moved, Receiving
from logstore.topics.registry import Topic, spelled
from logstore.transfer.import_settings import TopicSettings
from logstore.transfer.kafka_source import Source, SourcePartition, check_links, only_regular_files


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
    store: Receiving, source: Source, configs: Mapping[str, object], *, defaults: bool = False
) -> list[Topic]:
    """The topics as they would be. Raises TopicExists, ImportRefused, UnknownConfig, InvalidConfig.

    Their settings are those of their cluster, overridden by `configs`. Where neither has enough they are unknown,
    unless `defaults` says that the store's are right.
    """
    store.resolve(configs)
    ids = {topic.export_id: topic.name for topic in store.topics()}
    planned = []
    for each in source.topics:
        if each.topic_id in ids and ids[each.topic_id] != each.name:
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
        store.check_free(topic)
        ids[topic.export_id] = topic.name
        planned.append(topic)
    return planned


def import_topics(
    store: Receiving,
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
    with only_regular_files(), store.arrivals() as arrivals:
        imported = []
        for topic, origin in zip(planned, source.topics, strict=True):
            arrivals.begin(topic)
            reports = [_take(store, arrivals, source, topic, each, link, progress) for each in origin.partitions]
            imported.append(ImportedTopic(topic, tuple(reports)))
        arrivals.publish()
    return imported


def _take(
    store: Receiving,
    arrivals: Arrivals,
    source: Source,
    topic: Topic,
    origin: SourcePartition,
    link: bool,
    progress: Callable[[int], None],
) -> ImportedPartition:
    """Copy a partition, recover it, and hand it over."""
    number = origin.partition.partition
    directory = arrivals.directory(topic, number)
    linked, copied = _take_files(arrivals.fs, source, origin, directory, link, progress)
    report, moved = _recover(store, arrivals, source, topic, origin, directory)
    report.quarantined = list(arrivals.place(topic, number, moved))
    report.linked_bytes, report.copied_bytes = linked, copied
    return report


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
    store: Receiving, arrivals: Arrivals, source: Source, topic: Topic, origin: SourcePartition, directory: str
) -> tuple[ImportedPartition, Moved]:
    from logstore.partition.environment import LastKnown
    from logstore.partition.log import PartitionLog

    fs, state_path = arrivals.fs, arrivals.state_path(topic, origin.partition.partition)
    log_start = source.log_starts.get(origin.partition, 0)
    # The log's own opening takes the rest from here, and keeps first dirty within the log.
    first_dirty = source.first_dirty.get(origin.partition, 0)
    initial = replace(PartitionState(), log_start_offset=log_start, first_dirty_offset=first_dirty)
    write_state(fs, state_path, initial)
    given = Partition(
        fs,
        directory,
        str(origin.partition),
        initial,
        None,
        store.log_config(topic),
        store.limits,
        store.clock.now_ms(),
        imported=True,
    )
    damages, aside = ([], []) if source.clean else _salvage(given, state_path)
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
    state = read_state(fs, state_path, limits=store.limits)
    assert state is not None
    if thinned_offset:  # a broker's cleaner may have been stopped in the middle of a pass; no file of it says how far
        state = replace(state, thinned_offset=thinned_offset)
        write_state(fs, state_path, state)
    found = log.recovery
    cuts = [*(Cut(each.file, each.position, each.size_bytes, each.reason) for each in damages), *found.cuts]
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
            for cut in cuts
        ],
    )
    return report, Moved(state, log.high_watermark, log.last_stable_offset, (*aside, *found.quarantined))


def _salvage(given: Partition, state_path: str) -> tuple[list[Damage], list[str]]:
    """Before the log's own recovery cuts at the first damage, as a broker would: keep the intact batches after it.

    A torn tail is left to it. So is a directory in which a broker's cleaner was interrupted.
    """
    names = [parse_file_name(name) for name in given.fs.listdir(given.directory)]
    if any(each is not None and each.transient in (Transient.SWAP, Transient.CLEANED) for each in names):
        return [], []
    given = with_found_end(given)
    plan = plan_salvage(given)
    if not plan.changes:
        return [], []
    _, aside = carry_out(given, plan, state_path)
    return plan.damages, aside
