"""Topics that come into a store in a directory: built under `staging/`, visible when their files get their names.

Until then a mark in `topics/` says what belongs to the import, and the lock of its folder that it is at work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from logstore.directory.checkpoint import write_partition_metadata
from logstore.directory.ends import TopicEnds
from logstore.errors import LockHeld
from logstore.files import FileSystem
from logstore.segment.names import PARTITION_METADATA
from logstore.topic import TopicPartition
from logstore.topics.checkpoints import project_checkpoints
from logstore.topics.deleting import take_back_import
from logstore.topics.import_folder import ImportFolder
from logstore.topics.moving import Moved
from logstore.topics.opened import OpenStore
from logstore.topics.placing import check_place, place_partition
from logstore.topics.registry import Topic


@contextlib.contextmanager
def directory_arrivals(store: OpenStore) -> Iterator[DirectoryArrivals]:
    """What was begun and is not published is taken back; what a killed process leaves, by the next sweep."""
    with ImportFolder(store) as folder:
        arrivals = DirectoryArrivals(store, folder)
        try:
            yield arrivals
        except BaseException:
            for topic in arrivals.topics:
                with contextlib.suppress(LockHeld):
                    take_back_import(store, topic.id, topic)
            raise


@dataclass(slots=True)
class DirectoryArrivals:
    """Implements `Arrivals`."""

    store: OpenStore
    folder: str
    topics: list[Topic] = field(default_factory=list)
    #: of each topic its ends, and the partitions that have come
    _ends: dict[str, TopicEnds] = field(default_factory=dict)
    _placed: dict[str, list[TopicPartition]] = field(default_factory=dict)

    @property
    def fs(self) -> FileSystem:
        return self.store.fs

    def begin(self, topic: Topic) -> None:
        self.topics.append(topic)
        self.store.marks.begin_import(self.store.registry, topic)
        self.fs.mkdir(self.store.layout.topic_state(topic.id))
        self.store.registry.write_copy(topic)
        self._ends[topic.id], self._placed[topic.id] = TopicEnds.empty(topic.partitions), []

    def directory(self, topic: Topic, number: int) -> str:
        directory = os.path.join(self.folder, str(topic.partition(number)))
        self.fs.mkdir(directory)
        write_partition_metadata(self.fs, os.path.join(directory, PARTITION_METADATA), topic.id)
        return directory

    def state_path(self, topic: Topic, number: int) -> str:
        return self.store.layout.partition_state(topic.id, number)

    def place(self, topic: Topic, number: int, moved: Moved) -> tuple[str, ...]:
        partition = topic.partition(number)
        directory = os.path.join(self.folder, str(partition))
        self._ends[topic.id] = self._ends[topic.id].with_partition(
            number,
            high_watermark=moved.high_watermark,
            last_stable_offset=moved.last_stable_offset,
            recovery_point=moved.high_watermark,
        )
        self._placed[topic.id].append(partition)
        self.fs.fsync_dir(directory)
        kept = self.store.layout.partition(partition)
        return tuple(os.path.join(kept, os.path.relpath(path, directory)) for path in moved.aside)

    def publish(self) -> None:
        """Directories into place, then the ends, then each topic's file, which makes it visible."""
        self.fs.fsync_dir(self.folder)
        for topic in self.topics:
            self._publish(topic)
        project_checkpoints(self.store)

    def _publish(self, topic: Topic) -> None:
        store = self.store
        check_place(store, topic)
        with store.locks.lease(topic.id, what=f"import {topic.name}"):
            for partition in self._placed[topic.id]:
                self.fs.rename(os.path.join(self.folder, str(partition)), store.layout.partition(partition))
            self.fs.fsync_dir(store.layout.logs)
            store.write_ends(topic, self._ends[topic.id])
            store.marks.complete_import(store.registry, topic)
        for partition in topic.partition_list():  # those that did not come
            place_partition(store, topic, partition)
