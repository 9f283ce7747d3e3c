"""An open store: what all rooms work on. To the topics it adds the small files that say where each partition begins and
ends, and the partitions' logs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from logstore.clock import Clock
from logstore.config import LogConfig
from logstore.directory.deletion import sweep_deleted
from logstore.directory.ends import TopicEnds, read_ends, write_ends
from logstore.directory.locks import FileLock
from logstore.directory.state import PartitionState, SegmentEntry, read_state
from logstore.directory.tails import PartitionTail, TopicTails, remove_old_tail
from logstore.errors import (
    CorruptState,
    DamagedLog,
    InvalidTopic,
    LockHeld,
)
from logstore.files import make_directory
from logstore.segment.names import FileKind, file_name
from logstore.topic import TopicPartition
from logstore.topics.open_topics import OpenTopics
from logstore.topics.places import segments_at, topic_id_at
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.partition.environment import LastKnown, LogEnvironment
    from logstore.partition.log import PartitionLog
    from logstore.partition.reader import PartitionReader
    from logstore.topics.looking import PartitionLook


class OpenStore(OpenTopics):
    """Close it, or use it as a context manager."""

    poll_s = 0.1

    # --- ends ---------------------------------------------------------------------------------------------------

    def ends(self, topic: Topic) -> TopicEnds:
        """Raises CorruptState, also when they are gone although there are records."""
        path = self.layout.ends(topic.id)
        ends = read_ends(self.fs, path, partitions=topic.partitions, limits=self.limits, parsed=self._ends)
        if not ends.applied_sequence and not any(ends.high_watermarks) and not self.fs.exists(path):
            for number in range(topic.partitions):
                sizes = [segment.size_bytes for segment in self.partition_state(topic, number).segments]
                directory = self.layout.partition(topic.partition(number))
                if not any(sizes) and self.fs.exists(directory):  # the list may be as the partition was made with it
                    sizes = list(segments_at(self.fs, directory).values())
                if any(sizes):
                    raise CorruptState(
                        "the topic has records but nothing says which are committed",
                        file=path,
                        partition=topic.partition(number),
                        hint="`duramen recover` treats all of them as committed.",
                    )
        return ends

    def ends_at_once(self, topics: Sequence[Topic]) -> None:
        """Each topic has a file of its own: `visibility` looks until they agree."""

    def write_ends(self, topic: Topic, ends: TopicEnds) -> None:
        """Durable when this returns. The caller holds the topic's lease."""
        make_directory(self.fs, self.layout.topic_state(topic.id))
        write_ends(self.fs, self.layout.ends(topic.id), ends)

    def replace_ends(self, topic: Topic, seen: TopicEnds, ends: TopicEnds) -> bool:
        """The same, if the ends are still as `seen`; False when another process moved them: the lease was lost.

        A lock of its own makes looking and writing one step, also after the lease was lost.
        """
        lock = FileLock(self.fs, self.locks.ends_path(topic.id))
        if not self.locks.with_folder(lambda: lock.acquire(self.locks.wait_ms)):
            raise LockHeld(f"waited {self.locks.wait_ms} ms for the ends of {topic.name}", file=lock.path)
        try:
            if self.ends(topic) != seen:
                return False
            self.write_ends(topic, ends)
            return True
        finally:
            lock.release()

    # --- partitions ----------------------------------------------------------------------------------------------

    def partition_state(self, topic: Topic, number: int) -> PartitionState:
        """The partition's segment list; empty before its first write. Raises UnknownTopic, CorruptState."""
        partition = topic.partition(number)
        path = self.layout.partition_state(topic.id, number)
        state = read_state(self.fs, path, limits=self.limits)
        if state is None and self._is_placed(topic, partition):  # the list is there before the directory is
            raise CorruptState(
                "the partition's segment list is gone", file=path, partition=partition, hint="Run `duramen recover`."
            )
        return state or PartitionState()

    def partition_states(self, topic: Topic) -> list[PartitionState]:
        """Of all partitions, each as of now."""
        return [self.partition_state(topic, number) for number in range(topic.partitions)]

    def look(self, topic: Topic, number: int) -> PartitionLook:
        """The partition as planning sees it, by its small files. Raises UnknownTopic, CorruptState."""
        from logstore.partition.roll import max_segment_ms
        from logstore.topics.looking import PartitionLook, first_header

        partition, state, ends = topic.partition(number), self.partition_state(topic, number), self.ends(topic)
        directory, end = self.layout.partition(partition), ends.high_watermarks[number]

        def active_bytes() -> int:
            return (self.active_bytes(topic, number, state) or 0) if state.segments else 0

        def closed() -> tuple[SegmentEntry, ...]:
            active = replace(state.segments[-1], size_bytes=active_bytes())
            return (active, SegmentEntry(end, 0, -1))

        def closes(config: LogConfig, now_ms: int) -> bool:
            if not active_bytes():
                return False
            path = os.path.join(directory, file_name(state.segments[-1].base_offset, FileKind.LOG))
            first = first_header(self.fs, path)
            first_ms = -1 if first is None else first.max_timestamp_ms
            return first_ms >= 0 and now_ms - first_ms > max_segment_ms(config)

        def newest_ms() -> int:
            tail = self.tail(topic, number)
            return tail.tail.largest_timestamp_ms if tail else -1

        return PartitionLook(
            partition,
            directory,
            self.fs,
            state,
            high_watermark=end,
            last_stable_offset=ends.last_stable_offsets[number],
            recovery_point=ends.recovery_points[number],
            limits=self.limits,
            active_bytes=active_bytes,
            closed=closed,
            newest_ms=newest_ms,
            closes=closes,
        )

    def high_watermark(self, topic: Topic, number: int) -> int:
        """Where readers must stop, as of now."""
        topic.partition(number)
        return self.ends(topic).high_watermarks[number]

    def stamp(self, topic: Topic) -> tuple[int, ...]:
        """Changes whenever the topic's ends or one of its segment lists do; cheap. For caches that also expire."""
        found: list[int] = [topic.config_version, topic.partitions]
        paths = [self.layout.partition_state(topic.id, number) for number in range(topic.partitions)]
        for path in (self.layout.ends(topic.id), *paths):
            try:
                stat = self.fs.stat(path)
            except FileNotFoundError:
                found += (-1, -1)
            else:
                found += (stat.mtime_ms, stat.size_bytes)
        return tuple(found)

    def is_in_tail(self, topic: Topic, number: int, offset: int) -> bool:
        return False  # a look at the partition is cheap

    @contextlib.contextmanager
    def snapshot(
        self, topic: Topic, number: int, *, end_offset: int = 0, again: tuple[int, int] | None = None
    ) -> Iterator[PartitionReader]:
        """A reader whose files are open when it begins: deleting their names does not matter."""
        reader = self.reader(topic, number, end_offset=end_offset)
        try:
            yield reader
        finally:
            reader.close()

    def reader(self, topic: Topic | str, number: int, *, end_offset: int = 0) -> PartitionReader:
        """A reader of the partition, for as long as the store is open; it blocks no writer.

        `end_offset` is how far it may read in any case, as `visibility.visible_ends` said of several topics.

            for record in store.reader("orders", 0).records(0): …
        """
        from logstore.partition.reader import PartitionReader

        topic = self.topic(topic) if isinstance(topic, str) else topic
        partition = topic.partition(number)
        return PartitionReader(
            self.layout.place(topic.id, partition),
            high_watermark=lambda: max(self.high_watermark(topic, number), end_offset),
            last_stable_offset=lambda: max(self.ends(topic).last_stable_offsets[number], end_offset),
            recovery_point=lambda: self.ends(topic).recovery_points[number],
            check_exists=lambda: self.check_exists(topic),
            is_placed=lambda: self._is_placed(topic, partition),
            fs=self.fs,
            limits=self.limits,
        )

    def _is_placed(self, topic: Topic, partition: TopicPartition) -> bool:
        """Whether a directory lies where the partition's belongs that is not known to be another topic's."""
        directory = self.layout.partition(partition)
        return self.fs.exists(directory) and self.topic_id_at(directory) in (None, topic.id)

    def last_known(self, topic: Topic, number: int, ends: TopicEnds) -> LastKnown:
        """What the partition's ends and files say of its log, before it is opened."""
        from logstore.partition.environment import LastKnown

        recovery_point = ends.recovery_points[number]
        return LastKnown(
            self.closed_cleanly(topic, number, ends),
            recovery_point,
            high_watermark=ends.high_watermarks[number],
            unsynced_offset=recovery_point,
        )

    def open_log(
        self,
        topic: Topic,
        number: int,
        known: LastKnown,
        *,
        clock: Clock | None = None,
        config: LogConfig | None = None,
    ) -> PartitionLog:
        """The bare log, recovered unless it is clean; the caller holds lease and partition lock, and publishes its end.

        Damage below `keep_offset` (default: the high watermark, if one is given) is a DamagedLog, never cut off.
        Where another host appended last, its memory may hold what lies above `unsynced_offset`: if one is given, that
        is written again, and is on disk when this returns.
        """
        from logstore.partition.log import PartitionLog

        partition = topic.partition(number)
        tail = self.forget_tail(topic, number)  # it describes the log as it was before it was opened
        is_own = known.clean or (tail is not None and tail.is_current)
        unsynced_offset = None if is_own else known.unsynced_offset
        keep_offset = known.keep_offset or known.high_watermark or 0
        return PartitionLog.open(
            self.layout.partition(partition),
            partition=partition,
            config=config or self.log_config(topic),
            known=replace(known, keep_offset=keep_offset, unsynced_offset=unsynced_offset),
            environment=self.log_environment(clock),
            state_path=self.layout.partition_state(topic.id, number),
        )

    def log_environment(self, clock: Clock | None = None) -> LogEnvironment:
        """For one log that is opened whole."""
        from logstore.directory.few_files import FewFiles
        from logstore.partition.environment import LogEnvironment

        expiration_ms = self.broker_config.producer_id_expiration_ms
        return LogEnvironment(FewFiles(self.fs), clock or self.clock, self.limits, expiration_ms)

    def forget_tail(self, topic: Topic, number: int) -> PartitionTail | None:
        """Make the next append look for the log's end itself; returns what was known of it."""
        with self.tails(topic) as tails:
            known = tails.forget(number)
        remove_old_tail(self.fs, self.layout.tails(topic.id), number)
        return known

    def tails(self, topic: Topic) -> TopicTails:
        """Where the topic's logs end; close it."""
        return TopicTails(self.fs, self.layout.tails(topic.id))

    def tail(self, topic: Topic, number: int) -> PartitionTail | None:
        """Where the log ends, if it is written down."""
        with self.tails(topic) as tails:
            return tails.read(number)

    def closed_cleanly(self, topic: Topic, number: int, ends: TopicEnds) -> bool:
        """Whether the last writer closed the log: all it published is durable, and no byte came after."""
        try:
            state = self.partition_state(topic, number)
        except CorruptState:
            return False
        if not state.closed or not state.segments or ends.recovery_points[number] != ends.high_watermarks[number]:
            return False
        active = state.segments[-1]
        committed = active.size_bytes
        tail = self.tail(topic, number)
        if tail is not None and tail.tail.base_offset == active.base_offset:
            committed = tail.tail.size_bytes  # appends do not touch the list unless they roll
        return self.active_bytes(topic, number, state) == committed

    def sweep_deleted(self, topic: Topic, number: int, *, now_ms: int) -> list[str]:
        """Unlink what was replaced or retained and has lain long enough; returns the paths."""
        directory = self.layout.partition(topic.partition(number))
        if not self.fs.exists(directory):
            return []
        delay_ms = self.log_config(topic).file_delete_delay_ms
        return sweep_deleted(self.fs, directory, delay_ms=delay_ms, now_ms=now_ms)

    def active_bytes(self, topic: Topic, number: int, state: PartitionState) -> int | None:
        """Size of the active segment's file; None when it is missing."""
        directory = self.layout.partition(topic.partition(number))
        try:
            return self.fs.stat(
                os.path.join(directory, file_name(state.segments[-1].base_offset, FileKind.LOG))
            ).size_bytes
        except FileNotFoundError:
            return None

    def largest_timestamp_ms(self, topic: Topic, number: int) -> int:
        """The newest record's time as far as it is written down, -1 when there is none."""
        tail = self.tail(topic, number)
        known = [each.largest_timestamp_ms for each in self.partition_state(topic, number).segments]
        return max([*known, tail.tail.largest_timestamp_ms if tail else -1], default=-1)

    def log_bytes(self, topic: Topic, number: int) -> int:
        """Size of the partition's `.log` files."""
        state = self.partition_state(topic, number)
        if not state.segments:
            return 0
        return sum(each.size_bytes for each in state.segments[:-1]) + (self.active_bytes(topic, number, state) or 0)

    def cut_unpublished(self, log: PartitionLog, topic: Topic, high_watermark: int) -> None:
        """Cut what was never published. Raises CorruptState when nothing says what was, DamagedLog when some of it is
        missing.
        """
        if log.log_end_offset < high_watermark:
            raise DamagedLog(
                f"committed up to {high_watermark}, but the log ends at {log.log_end_offset}",
                partition=log.partition,
                offset=log.log_end_offset,
                hint="`duramen recover` continues after the loss",
            )
        if log.log_end_offset > high_watermark:
            if not self.fs.exists(self.layout.ends(topic.id)):
                raise CorruptState(
                    "the topic has records but nothing says which are committed",
                    file=self.layout.ends(topic.id),
                    partition=log.partition,
                    hint="`duramen recover` treats all of them as committed.",
                )
            log.truncate_to(high_watermark)

    # --- partition directories -----------------------------------------------------------------------------------

    def topic_id_at(self, directory: str) -> str | None:
        return topic_id_at(self.fs, directory, limits=self.limits)

    def is_gone(self, topic_id: str) -> bool:
        """Whether the topic was certainly deleted: a mark says so, or a finished deletion has left nothing of it."""
        return self.marks.is_deleted(topic_id) or not (
            self.fs.exists(self.layout.topic_state(topic_id))
            or topic_id in self.marks.ids()
            or any(
                self.topic_id_at(self.layout.partition(partition)) == topic_id
                for partition in self.existing_partitions(None)
            )
        )

    # --- sweeping ------------------------------------------------------------------------------------------------

    def existing_partitions(self, topic: Topic | None) -> list[TopicPartition]:
        """Partitions that have a directory: of the topic, or all when the topic is not known."""
        names = self.fs.listdir(self.layout.logs)
        if topic is not None:
            known = set(names)
            return [partition for partition in topic.partition_list() if str(partition) in known]
        found = []
        for name in names:
            with contextlib.suppress(InvalidTopic):
                found.append(TopicPartition.parse(name))
        return found
