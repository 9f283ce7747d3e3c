"""A consistent copy of a live store: all that was committed at one moment, and nothing of what came after.

    maintenance locks of all partitions → flush → leases of all topics: note ends and lists, copy the ledger → leases
    back, appends go on → copy the logs up to the noted ends → version file last

While the leases are held nothing can be committed, so ledger, topics and ends agree; that takes moments. Committed
bytes are never written again, so the logs can be copied while they grow; only compaction, retention and deletion have
to wait for the end. A copy that is not finished has no version file, says so in `unfinished`, and is not a store. A
finished one records in `origin` what it is a copy of, and since when it is written to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from logstore.commit.committer import Committer
from logstore.directory.checkpoint import write_partition_metadata
from logstore.directory.ends import write_ends
from logstore.directory.layout import BROKER_GUARD, Layout
from logstore.directory.origin import Origin, write_origin
from logstore.directory.state import write_state
from logstore.directory.trees import copy_file, is_directory, remove_tree
from logstore.directory.version import write_version
from logstore.errors import BackupRefused, DamagedLog
from logstore.files import FileSystem, replace_file
from logstore.ledger import Ledger
from logstore.partition.environment import LastKnown
from logstore.partition.log import PartitionLog
from logstore.segment.names import META_PROPERTIES, PARTITION_METADATA
from logstore.topic import TopicPartition
from logstore.topics.checkpoints import project_checkpoints
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic, TopicRegistry
from logstore.transfer.directory_departures import TopicMoment, directory_departures
from logstore.transfer.kafka_export import take_files

#: partitions copied side by side; each has a few files open
_THREADS = 4
_DELTA_LOG = "_delta_log"
_LAST_CHECKPOINT = "_last_checkpoint"


@dataclass(frozen=True, slots=True)
class BackedUpPartition:
    partition: TopicPartition
    log_start_offset: int
    log_end_offset: int
    linked_bytes: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class Backup:
    directory: str
    partitions: tuple[BackedUpPartition, ...]
    ledger_bytes: int


def check_target(store: OpenStore, directory: str) -> None:
    """Raises BackupRefused unless the target is missing or empty, and outside the store."""
    inside = os.path.realpath(store.path) + os.sep
    if (os.path.realpath(directory) + os.sep).startswith(inside):
        raise BackupRefused("the target lies inside the store", file=directory, hint="Give a directory elsewhere.")
    if not store.fs.exists(directory):
        return
    if not is_directory(store.fs, directory):
        raise BackupRefused("the target is not a directory", file=directory, hint="Give a new directory.")
    names = store.fs.listdir(directory)
    if names:
        raise BackupRefused(f"the target is not empty ({names[0]})", file=directory, hint="Give a new directory.")


def backup(
    store: OpenStore,
    directory: str,
    *,
    link: bool = True,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Backup:
    """Copy the store into `directory`. With `link`, sealed segments are hard links where the file system allows it.

    Raises BackupRefused, LockHeld (compaction is at work), DamagedLog, CorruptState.
    """
    directory = os.path.abspath(directory)
    check_target(store, directory)
    existed = store.fs.exists(directory)
    target = Layout(directory)
    fs = store.fs
    try:
        fs.mkdir(target.root)
        replace_file(fs, target.unfinished, f"a copy of {store.path} that is not finished\n".encode())
        for each in target.directories:
            fs.mkdir(each)
        result = _copy(store, target, link, progress)
    except BaseException:
        for name in fs.listdir(directory) if existed else ():
            remove_tree(fs, os.path.join(directory, name))
        if not existed:
            remove_tree(fs, directory)
        raise
    return result


def _copy(store: OpenStore, target: Layout, link: bool, progress: Callable[[int], None]) -> Backup:
    fs, ledger_bytes = store.fs, 0

    def copy_ledger(committer: Committer) -> None:
        nonlocal ledger_bytes
        ledger_bytes = _copy_ledger(fs, committer.ledger, target.ledger)

    what = f"backup to {target.root}"
    with directory_departures(store, store.topics(), what=what, at_that_moment=copy_ledger) as leaving:
        moments, taken_ms = leaving.moments, leaving.taken_ms
        wanted = [(moment, number) for moment in moments for number in range(moment.topic.partitions)]
        with ThreadPoolExecutor(_THREADS) as pool:  # a copy waits for the disk most of the time
            partitions = list(
                pool.map(lambda each: _copy_partition(store, target, each[0], each[1], link, progress), wanted)
            )
    registry = TopicRegistry(fs, target)
    for moment in moments:
        # Every copied byte is on disk: nothing is left to flush, and no staged file is needed.
        ends = replace(
            moment.ends,
            recovery_points=moment.ends.high_watermarks,
            flushed_sequence=moment.ends.applied_sequence,
        )
        fs.mkdir(target.topic_state(moment.topic.id))
        write_ends(fs, target.ends(moment.topic.id), ends)
        registry.write_copy(moment.topic)
        registry.create(moment.topic)
    for path in (store.layout.settings, os.path.join(store.layout.logs, META_PROPERTIES)):
        if fs.exists(path):
            copy_file(fs, path, os.path.join(target.root, os.path.relpath(path, store.path)))
    fs.mkdir(os.path.join(target.logs, BROKER_GUARD))
    _sync_directories(fs, target.root)
    write_origin(fs, target, Origin(store.path, taken_ms))
    write_version(fs, target.version)
    fs.unlink(target.unfinished)
    fs.fsync_dir(target.root)
    with OpenStore(target.root, fs=fs, clock=store.clock, limits=store.limits) as copy:
        project_checkpoints(copy)
    return Backup(target.root, tuple(partitions), ledger_bytes)


def _copy_ledger(fs: FileSystem, ledger: Ledger, target: str) -> int:
    """The tables' files, which stay in place while they are copied: the logs first, and then all that they can name."""
    copied = 0
    for table in (ledger.commits_table, ledger.runs_table, ledger.segments_table):
        path = os.path.join(target, os.path.basename(table.path))
        for folder in (_DELTA_LOG, ""):
            fs.mkdir(os.path.join(path, folder))
            copied += table.run(partial(_copy_files, fs, os.path.join(table.path, folder), os.path.join(path, folder)))
    return copied


def _copy_files(fs: FileSystem, source: str, target: str) -> int:
    copied = 0
    for name in fs.listdir(source):
        if name.endswith((".json", ".parquet")) or name == _LAST_CHECKPOINT:
            # The data of a commit that lost its race may be removed at any time.
            with contextlib.suppress(FileNotFoundError):
                copied += copy_file(fs, os.path.join(source, name), os.path.join(target, name))
    return copied


def _copy_partition(
    store: OpenStore, target: Layout, moment: TopicMoment, number: int, link: bool, progress: Callable[[int], None]
) -> BackedUpPartition:
    fs, topic = store.fs, moment.topic
    partition, state, end = topic.partition(number), moment.states[number], moment.ends.high_watermarks[number]
    directory = target.partition(partition)
    fs.mkdir(directory)
    linked, copied = take_files(store, partition, state, end, directory, progress, link=link)
    write_partition_metadata(fs, os.path.join(directory, PARTITION_METADATA), topic.id)
    state_path = target.partition_state(topic.id, number)
    fs.mkdir(target.topic_state(topic.id))
    committed = tuple(entry for entry in state.segments if entry.base_offset <= end)
    write_state(fs, state_path, replace(state, segments=committed, closed=False))
    if committed and (end or not state.is_as_made):
        _settle_copy(store, topic, number, directory, state_path, end)
    fs.fsync_dir(directory)
    return BackedUpPartition(partition, state.log_start_offset, end, linked, copied)


def _settle_copy(store: OpenStore, topic: Topic, number: int, directory: str, state_path: str, end: int) -> None:
    """Let the log itself rebuild what the last segment came without, and write its list."""
    log = PartitionLog.open(
        directory,
        partition=topic.partition(number),
        config=store.log_config(topic),
        known=LastKnown(clean=True, recovery_point=end, high_watermark=end),
        environment=store.log_environment(),
        state_path=state_path,
    )
    if log.log_end_offset != end:
        reached = log.log_end_offset
        log.close(clean=False)
        raise DamagedLog(
            f"committed up to {end}, but the log ends at {reached}",
            partition=topic.partition(number),
            offset=reached,
            hint="Run `duramen verify`, then `duramen recover`",
        )
    log.close()


def _sync_directories(fs: FileSystem, path: str) -> None:
    for name in fs.listdir(path):
        if is_directory(fs, os.path.join(path, name)):
            _sync_directories(fs, os.path.join(path, name))
    fs.fsync_dir(path)
