"""What a stopped broker's directory, or a bare `topic-N` folder, offers for import. Changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from logstore.directory.checkpoint import read_offset_checkpoint, read_partition_metadata
from logstore.directory.layout import BROKER_GUARD
from logstore.directory.locks import FileLock, holder
from logstore.directory.trees import is_directory
from logstore.errors import DuramenError, ImportRefused, StoreInUse
from logstore.files import FileSystem, NotRegularFile
from logstore.limits import Limits
from logstore.segment.names import (
    CLEAN_SHUTDOWN,
    CLEANER_OFFSET_CHECKPOINT,
    CLUSTER_METADATA_DIRECTORY,
    LOCK,
    LOG_START_OFFSET_CHECKPOINT,
    META_PROPERTIES,
    PARTITION_METADATA,
    RECOVERY_POINT_CHECKPOINT,
    REMOTE_LOG_INDEX_CACHE_DIRECTORY,
    DirectoryState,
    FileKind,
    Transient,
    parse_file_name,
    parse_partition_directory,
)
from logstore.topic import TopicPartition
from logstore.topics.registry import check_partitions
from logstore.transfer.import_settings import TopicSettings, read_settings

#: Kafka's own topics mean nothing without their cluster; they come only when asked for by name
_INTERNAL_PREFIX = "__"
#: files of a log directory that are read
_READ_AT_THE_TOP = frozenset(
    {RECOVERY_POINT_CHECKPOINT, LOG_START_OFFSET_CHECKPOINT, CLEANER_OFFSET_CHECKPOINT, META_PROPERTIES, LOCK}
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
    """What a directory offers, and what was skipped, with the reason."""

    directory: str
    clean: bool
    topics: tuple[SourceTopic, ...]
    skipped: Mapping[str, str]
    recovery_points: Mapping[TopicPartition, int] = field(default_factory=dict)
    log_starts: Mapping[TopicPartition, int] = field(default_factory=dict)
    first_dirty: Mapping[TopicPartition, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    #: what the cluster says about the topics' settings
    settings: Mapping[str, TopicSettings] = field(default_factory=dict)
    follow_links: bool = False


@contextlib.contextmanager
def stopped_source(fs: FileSystem, directory: str) -> Iterator[None]:
    """Keeps a broker from starting on the directory meanwhile. Raises StoreInUse when one is running."""
    path = os.path.join(_log_directory(fs, directory)[0], LOCK)
    if not fs.exists(path):
        yield  # a running broker has made it
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
    """Turns what a FIFO or a directory in place of a file gives into ImportRefused."""
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


@only_regular_files()
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
    directory, names = _log_directory(fs, directory)
    if fs.exists(os.path.join(directory, BROKER_GUARD)):
        raise ImportRefused(
            "these are the logs of a live store", file=directory, hint="Export it first, and import what comes out."
        )
    found, skipped = _partitions(fs, directory, names, only, follow_links)
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


def _partitions(
    fs: FileSystem, directory: str, names: list[str], only: list[str] | None, follow_links: bool
) -> tuple[dict[str, list[SourcePartition]], dict[str, str]]:
    """The partitions of each topic, and why other directories are skipped."""
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
    return found, skipped


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
