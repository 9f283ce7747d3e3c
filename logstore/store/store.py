"""A store: a directory of topics and their partition logs, with settings, state and locks.

Opening one holds a shared lock that keeps brokers out. Topics are created, altered and deleted here; a topic exists
from the moment its file in `topics/` has its name to the moment that file becomes a mark of its deletion. What no mark
names is never removed: that a file is missing proves nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.config import (
    BrokerConfig,
    LogConfig,
    Resolved,
    hold_back,
    load_toml,
    resolve_broker,
    resolve_topic,
    topic_setting,
)
from logstore.errors import (
    AccessDenied,
    CorruptState,
    DamagedLog,
    InvalidConfig,
    InvalidTopic,
    LockHeld,
    NotAStore,
    StrayDirectory,
    TopicExists,
    UnknownTopic,
    is_disk_full,
)
from logstore.files import OS_FILES, FileSystem, make_directory, sync_files
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.partition.checkpoint import (
    write_partition_metadata,
)
from logstore.partition.deletion import sweep_deleted
from logstore.partition.state import PartitionState, read_state, write_state
from logstore.read_only import ReadOnlyFiles, check_writable, is_refusal, refused
from logstore.segment.names import PARTITION_METADATA, FileKind, file_name
from logstore.store.ends import TopicEnds, read_ends, write_ends
from logstore.store.identity import make_identity
from logstore.store.import_folder import sweep_import_folders
from logstore.store.layout import BROKER_GUARD, TOP_NAMES, Layout
from logstore.store.locks import DEFAULT_WAIT_MS, FileLock, StoreLocks
from logstore.store.marks import DELETED, IMPORTED, IMPORTING, TopicMarks
from logstore.store.places import is_log_of, segments_at, topic_id_at
from logstore.store.placing import EMPTY, begin_directory, place_partitions
from logstore.store.probe import probe_file_system
from logstore.store.projection import PartitionFacts, checkpoint_entries, write_checkpoints
from logstore.store.registry import Topic, TopicRegistry, check_partitions, spelled
from logstore.store.sealed import Parsed
from logstore.store.shared_clock import shared_clock
from logstore.store.tails import PartitionTail, TopicTails, boot_id, remove_old_tail
from logstore.store.trees import is_directory, remove_tree
from logstore.store.version import looks_like_a_store, read_version, write_version
from logstore.topic import TopicPartition, check_topic_name, new_topic_id

if TYPE_CHECKING:
    import pyarrow as pa

    from logstore.partition.environment import LogEnvironment
    from logstore.partition.log import PartitionLog
    from logstore.partition.reader import PartitionReader
    from logstore.records.record import Record
    from logstore.store.apps import AppBatch
    from logstore.store.committer import Committed, Committer
    from logstore.store.follow import Followed
    from logstore.store.own_flush import OwnFlush

#: what a crashed process left in `topics/` or `staging/` is not touched before this age
_LEFTOVER_MS_MIN = 3_600_000


Given = ParamSpec("Given")


def _names_missing_rights(opens: Callable[Given, None]) -> Callable[Given, None]:
    """Makes a PermissionError while a store is opened say what is missing."""

    @functools.wraps(opens)
    def opening(*given: Given.args, **named: Given.kwargs) -> None:
        try:
            opens(*given, **named)
        except PermissionError as error:
            raise AccessDenied(
                "this user may not read the store",
                file=error.filename,
                hint="Use the owner's account, or give this user's group access to the store.",
            ) from error

    return opening


class LogStore:
    """An open store; close it, or use it as a context manager."""

    @_names_missing_rights
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        fs: FileSystem = OS_FILES,
        clock: Clock = SYSTEM_CLOCK,
        limits: Limits = DEFAULT_LIMITS,
        lock_wait_ms: int = DEFAULT_WAIT_MS,
    ) -> None:
        """Open the store at `path`; with `create`, make it when there is none.

        Where nothing can be written (a read-only mount, no right to write), it is open for reading: `is_read_only`.
        It then shows what is published, and whatever would write raises ReadOnlyStore.

        Raises NotAStore, AccessDenied, StoreVersionError, UnsuitableFileSystem, StoreInUse; for its settings file
        UnknownConfig and InvalidConfig.
        """
        self.layout = Layout(os.path.abspath(os.fspath(path)))
        self.fs: FileSystem = fs
        self.clock = shared_clock(fs, self.layout.locks, clock, boot_id())
        self.limits = limits
        if create:
            _make(fs, self.layout)
        read_version(fs, self.layout.version)
        self._settings = load_toml(self.layout.settings, fs=fs) if fs.exists(self.layout.settings) else {}
        self._broker = resolve_broker(self._settings, store_file=self.layout.settings)
        self.locks = StoreLocks(fs, self.layout, clock=self.clock, wait_ms=lock_wait_ms)
        try:
            for directory in (self.layout.locks, self.layout.staging):  # both may be gone: nothing in them is for ever
                fs.mkdir(directory)
            _probe(fs, self.layout.locks)
            fs.mkdir(os.path.join(self.layout.logs, BROKER_GUARD))
            self.locks.enter()
        except OSError as error:
            if not is_refusal(error):
                raise
            self.fs = ReadOnlyFiles(fs, refused(error, self.layout.root))
            self.locks = StoreLocks(self.fs, self.layout, clock=self.clock, wait_ms=lock_wait_ms)
            # Without the file a broker is not at work here; without the right to read it, nothing can be known.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self.locks.enter(create=False)
        self.registry = TopicRegistry(self.fs, self.layout)
        self.marks = TopicMarks(self.fs, self.layout)
        self._committer: Committer | None = None
        self._own_flush: OwnFlush | None = None
        self._settler: Committer | None = None
        self._ends: Parsed[TopicEnds] = Parsed()
        self._configs: dict[tuple[tuple[str, str], ...], LogConfig] = {}

    def close(self) -> None:
        """Flush what this process appended, as far as nobody else is at it, and give the store up. Idempotent."""
        own_flush, self._own_flush = self._own_flush, None
        try:
            if own_flush is not None:
                own_flush.rest()
        finally:
            self._committer = self._settler = None
            self.locks.leave()

    def __enter__(self) -> LogStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- settings ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.layout.root

    @property
    def is_read_only(self) -> bool:
        """Whether it could be opened for reading only."""
        return isinstance(self.fs, ReadOnlyFiles)

    def check_writable(self) -> None:
        """Raises ReadOnlyStore where nothing can be written, for those who would notice only after much work."""
        check_writable(self.fs)

    def broker_settings(self) -> dict[str, Resolved]:
        """The settings of the store as a whole, each with its source."""
        return self._broker

    @property
    def broker_config(self) -> BrokerConfig:
        return BrokerConfig.from_resolved(self._broker)

    def topic_settings(self, topic: Topic | None = None) -> dict[str, Resolved]:
        """Every topic setting with its source; without a topic, what a new one would get."""
        resolved = self.resolve(topic.configs if topic else {})
        return hold_back(resolved) if topic is not None and topic.settings_unknown else resolved

    def log_config(self, topic: Topic) -> LogConfig:
        key = tuple(sorted(topic.configs.items()))
        found = self._configs.get(key)
        if found is None:  # the store's own settings do not change while it is open
            found = self._configs[key] = LogConfig.from_resolved(self.topic_settings(topic))
        return found

    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]:
        """Every topic setting for a topic with these of its own. Raises UnknownConfig, InvalidConfig."""
        return resolve_topic(configs, broker=self._settings, store_file=self.layout.settings)

    # --- topics --------------------------------------------------------------------------------------------------

    def topic_names(self) -> list[str]:
        return self.registry.names()

    def topics(self) -> list[Topic]:
        """All topics by name. Raises CorruptState for one whose file is damaged."""
        found = []
        for name in self.registry.names():
            with contextlib.suppress(UnknownTopic):  # deleted since it was listed
                found.append(self.registry.read(name))
        return found

    def topic(self, name: str) -> Topic:
        """Raises InvalidTopic, UnknownTopic, CorruptState."""
        try:
            return self.registry.read(name)
        except UnknownTopic as error:
            if self.fs.exists(self.layout.partition(TopicPartition(name, 0))):
                error.what += ", but a directory in `logs/` is"
                error.hint = "`duramen recover --dry-run` says whether the topic can be brought back."
            raise

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        configs: Mapping[str, object] | None = None,
        dry_run: bool = False,
    ) -> Topic:
        """Raises InvalidTopic, TopicExists, UnknownConfig, InvalidConfig."""
        check_topic_name(name)
        self.resolve(configs or {})
        self._check_within_limits(configs or {})
        topic = Topic(
            name=name,
            id=new_topic_id(),
            partitions=check_partitions(partitions),
            configs=spelled(configs or {}),
            config_version=1,
            created_ms=self.clock.now_ms(),
            keyed=True,
        )
        if self.fs.exists(self.layout.topic(name)):
            raise TopicExists(f"there is a topic {name} already")
        try:
            self.check_place(topic, clear=not dry_run)
        except StrayDirectory:
            if self.fs.exists(self.layout.topic(name)):  # somebody creates it this moment
                raise TopicExists(f"there is a topic {name} already") from None
            raise
        if not dry_run:
            self.registry.create(topic)
            place_partitions(self, topic, range(topic.partitions), is_new=True)
            with self.locks.lease(topic.id, what=f"create {name}"):
                if not self.fs.exists(self.layout.ends(topic.id)):
                    self.write_ends(topic, TopicEnds.empty(topic.partitions))
                self._refresh_copy(name)
        return topic

    def alter_topic(
        self,
        name: str,
        *,
        configs: Mapping[str, object] | None = None,
        unset: Iterable[str] = (),
        partitions: int | None = None,
        defaults: bool = False,
        dry_run: bool = False,
    ) -> Topic:
        """Set and unset the topic's own settings, or widen it; returns it as it is then.

        Where they were not known, they are from now on: `defaults` says so without setting any.

        Raises UnknownTopic, UnknownConfig, InvalidConfig.
        """
        unset = list(unset)
        for key in unset:
            topic_setting(key)
        with self.locks.lease(self.registry.read(name).id, what=f"alter {name}"):
            topic = self.registry.read(name)
            wanted: dict[str, object] = {key: value for key, value in topic.configs.items() if key not in unset}
            wanted.update(configs or {})
            self.resolve(wanted)
            self._check_within_limits(configs or {})
            if partitions is not None and check_partitions(partitions) < topic.partitions:
                raise InvalidConfig(f"topic {name} has {topic.partitions} partitions; their number can only grow")
            if partitions is not None:
                self.check_place(replace(topic, partitions=partitions), topic.partitions, clear=False)
            altered = replace(
                topic,
                configs=spelled(wanted),
                partitions=partitions or topic.partitions,
                config_version=topic.config_version + 1,
                # With more partitions, keys move; what was written before stays where it is.
                keyed=topic.keyed and partitions in (None, topic.partitions),
                settings_unknown=topic.settings_unknown and not (configs or unset or defaults),
            )
            if not dry_run:
                self.registry.replace(altered)
        if not dry_run:
            place_partitions(self, altered, range(topic.partitions, altered.partitions), is_new=True)
        return altered

    def _check_within_limits(self, configs: Mapping[str, object]) -> None:
        """Refuse a setting that promises more than can be read back; one that came from elsewhere is capped."""
        most = self.limits.written_batch_bytes
        if "max.message.bytes" in configs and LogConfig.from_resolved(self.resolve(configs)).max_message_bytes > most:
            raise InvalidConfig(
                f"max.message.bytes={configs['max.message.bytes']}: the largest batch that can be read back has "
                f"{most} bytes",
                hint=f"Set {most} or less",
            )

    def delete_topic(self, name: str, *, dry_run: bool = False) -> Topic:
        """Remove the topic and all its records. Raises UnknownTopic, LockHeld."""
        topic = self.registry.read(name)
        if dry_run:
            return topic
        what = f"delete {name}"
        with contextlib.ExitStack() as held:
            held.enter_context(self.locks.maintenance_of(topic.id, what=what))
            held.enter_context(self.locks.lease(topic.id, what=what))
            self.check_exists(topic)
            self.marks.retire(topic)
            self._finish_deletion(topic.id, topic, what)
        self.locks.forget_topic(topic.id)
        return topic

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
                        hint="`duramen recover` takes them all.",
                    )
        return ends

    def write_ends(self, topic: Topic, ends: TopicEnds) -> None:
        """Durable when this returns. The caller holds the topic's lease."""
        make_directory(self.fs, self.layout.topic_state(topic.id))
        write_ends(self.fs, self.layout.ends(topic.id), ends)

    def replace_ends(self, topic: Topic, seen: TopicEnds, ends: TopicEnds) -> bool:
        """The same, if the ends are still as `seen`; False when somebody else moved them: the lease was lost.

        A lock of its own makes looking and writing one step, whoever holds the lease by now.
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
        if state is None and self.fs.exists(self.layout.partition(partition)):
            # It is there before the directory is.
            raise CorruptState(
                "the partition's segment list is gone", file=path, partition=partition, hint="Run `duramen recover`."
            )
        return state or PartitionState()

    def high_watermark(self, topic: Topic, number: int) -> int:
        """Where readers must stop, as of now."""
        topic.partition(number)
        return self.ends(topic).high_watermarks[number]

    def reader(self, topic: Topic | str, number: int, *, end_offset: int = 0) -> PartitionReader:
        """A reader of the partition, for as long as the store is open; it blocks nobody.

        `end_offset` is how far it may read in any case, as `visibility.visible_ends` said of several topics.

            for record in store.reader("orders", 0).records(0): …
        """
        from logstore.partition.reader import PartitionReader

        topic = self.topic(topic) if isinstance(topic, str) else topic
        partition = topic.partition(number)
        return PartitionReader(
            self.layout.partition(partition),
            partition=partition,
            state_path=self.layout.partition_state(topic.id, number),
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

    @contextlib.contextmanager
    def writing(self, topic: Topic, number: int, *, what: str, clock: Clock | None = None) -> Iterator[PartitionLog]:
        """The partition's log for its one writer, under the topic's lease; its end is published when all went well.

        What was committed and not published yet is settled first, because readers of several topics may see it already.
        Bytes above the high watermark that no commit names are cut off. Raises LockHeld, CorruptState, DamagedLog.
        """
        self.place_partition(topic, topic.partition(number))
        with contextlib.ExitStack() as held:
            held.enter_context(self.locks.lease(topic.id, what=what))
            self.check_exists(topic)
            self._settle_unpublished(topic, number)
            held.enter_context(self.locks.partition(topic.id, number, what=what))
            ends = self.ends(topic)
            self.partition_state(topic, number)  # log start and more are in it: a lost one is not made up here
            log = self.open_log(
                topic,
                number,
                clean=self.closed_cleanly(topic, number, ends),
                recovery_point=ends.recovery_points[number],
                high_watermark=ends.high_watermarks[number],
                clock=clock,
            )
            try:
                self._meet_high_watermark(log, topic, ends.high_watermarks[number])
                yield log
            except BaseException:
                log.close(clean=False)
                raise
            log.close()
            self.forget_tail(topic, number)  # before the ends: a tail that lags behind them would be believed
            self.write_ends(topic, published(ends, number, log))

    def open_log(
        self,
        topic: Topic,
        number: int,
        *,
        clean: bool,
        recovery_point: int = 0,
        high_watermark: int | None = None,
        clock: Clock | None = None,
        config: LogConfig | None = None,
        keep_offset: int | None = None,
    ) -> PartitionLog:
        """The bare log, recovered unless `clean`; the caller holds lease and partition lock, and publishes its end.

        Damage below `keep_offset` (default: the high watermark, if one is given) is a DamagedLog, never cut off.
        """
        from logstore.partition.environment import LastKnown
        from logstore.partition.log import PartitionLog

        partition = topic.partition(number)
        self.forget_tail(topic, number)  # it speaks of the log as it was before it was opened
        keep_offset = keep_offset if keep_offset is not None else high_watermark or 0
        return PartitionLog.open(
            self.layout.partition(partition),
            partition=partition,
            config=config or self.log_config(topic),
            known=LastKnown(clean, recovery_point, high_watermark=high_watermark, keep_offset=keep_offset),
            environment=self.log_environment(clock),
            state_path=self.layout.partition_state(topic.id, number),
        )

    def log_environment(self, clock: Clock | None = None) -> LogEnvironment:
        """For one log that is opened whole."""
        from logstore.partition.environment import LogEnvironment
        from logstore.partition.few_files import FewFiles

        expiration_ms = self.broker_config.producer_id_expiration_ms
        return LogEnvironment(FewFiles(self.fs), clock or self.clock, self.limits, expiration_ms)

    def forget_tail(self, topic: Topic, number: int) -> None:
        """Make the next append look for the log's end itself."""
        with self.tails(topic) as tails:
            tails.forget(number)
        remove_old_tail(self.fs, self.layout.tails(topic.id), number)

    def tails(self, topic: Topic) -> TopicTails:
        """Where the topic's logs end; close it."""
        return TopicTails(self.fs, self.layout.tails(topic.id))

    def tail(self, topic: Topic, number: int) -> PartitionTail | None:
        """Where the log ends, if it is written down."""
        with self.tails(topic) as tails:
            return tails.read(number)

    def check_exists(self, topic: Topic) -> None:
        """Raises UnknownTopic when the topic is another one by now."""
        if self.registry.read(topic.name).id != topic.id:
            raise UnknownTopic(f"topic {topic.name} was deleted and created again meanwhile")

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

    def _meet_high_watermark(self, log: PartitionLog, topic: Topic, high_watermark: int) -> None:
        if log.log_end_offset < high_watermark:
            raise DamagedLog(
                f"committed up to {high_watermark}, but the log ends at {log.log_end_offset}",
                partition=log.partition,
                offset=log.log_end_offset,
                hint="`duramen recover` goes on behind the loss.",
            )
        self.cut_unpublished(log, topic, high_watermark)

    def _settle_unpublished(self, topic: Topic, number: int) -> None:
        """Publish what the log may hold above its high watermark; the caller holds the topic's lease."""
        from logstore.store.committer import Committer

        ends, tail = self.ends(topic), self.tail(topic, number)
        if tail is not None and tail.is_current:
            if tail.sequence <= ends.applied_sequence:
                return
        elif self.closed_cleanly(topic, number, ends) or not self.log_bytes(topic, number):
            return
        if self.fs.exists(self.layout.ledger):
            if self._settler is None:
                self._settler = Committer(self)
            self._settler.settle(topic)

    def cut_unpublished(self, log: PartitionLog, topic: Topic, high_watermark: int) -> None:
        """Cut what was never published. Raises CorruptState when nothing says what was."""
        if log.log_end_offset > high_watermark:
            if not self.fs.exists(self.layout.ends(topic.id)):
                raise CorruptState(
                    "the topic has records but nothing says which are committed",
                    file=self.layout.ends(topic.id),
                    partition=log.partition,
                    hint="`duramen recover` takes them all.",
                )
            log.truncate_to(high_watermark)

    def free_bytes(self) -> int | None:
        """Room for logs; None where the file system does not tell, as a simulated one."""
        try:
            found = os.statvfs(self.layout.logs)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def project_checkpoints(self) -> None:
        """Bring Kafka's four checkpoint files up to date with the state; for tools, nothing of ours reads them.

        Every run that changes a store ends with it. A partition whose state cannot be read is left out.
        """
        with self.locks.checkpoint():
            facts: list[PartitionFacts] = []
            for topic in self.topics():
                with contextlib.suppress(CorruptState):
                    facts += self._topic_facts(topic)
            write_checkpoints(self.fs, self.layout.logs, checkpoint_entries(facts))

    def _topic_facts(self, topic: Topic) -> Iterator[PartitionFacts]:
        ends, compacted = self.ends(topic), self.log_config(topic).compact
        for number in range(topic.partitions):
            with contextlib.suppress(CorruptState):
                yield self._partition_facts(topic, number, ends, compacted)

    def _partition_facts(self, topic: Topic, number: int, ends: TopicEnds, compacted: bool) -> PartitionFacts:
        state = self.partition_state(topic, number)
        return PartitionFacts(
            compacted=compacted,
            partition=topic.partition(number),
            high_watermark=ends.high_watermarks[number],
            recovery_point=ends.recovery_points[number],
            log_start_offset=state.log_start_offset,
            first_base_offset=state.segments[0].base_offset if state.segments else 0,
            first_dirty_offset=state.first_dirty_offset,
        )

    # --- records -------------------------------------------------------------------------------------------------

    def append(
        self, topic: str, records: Iterable[Record] | pa.Table | pa.RecordBatch, *, app: AppBatch | None = None
    ) -> Committed:
        """Append records, or an Arrow table of key, value, timestamp?, headers?, partition?; all or none of them.

        With `app` a batch that is in the ledger already is not written again. Raises InvalidRecord and its kind,
        UnknownTopic, ReplayMismatch, LockHeld, DiskFull.
        """
        from logstore.store.committer import Committer
        from logstore.store.own_flush import OwnFlush
        from logstore.store.produce import append_table, table_of

        if self._committer is None:
            self._committer = Committer(self)
            self._own_flush = OwnFlush(self._committer)
        table = records if hasattr(records, "to_batches") or hasattr(records, "schema") else table_of(records)
        committed = append_table(self._committer, topic, table, app=app)
        assert self._own_flush is not None
        self._own_flush.appended(committed)
        return committed

    def restore(
        self,
        topic: str,
        *,
        as_of_offsets: Mapping[int, int] | None = None,
        as_of_timestamp_ms: int | None = None,
        since_offsets: Mapping[int, int] | None = None,
        tombstones: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The latest record of each key as Arrow batches: now, below some offsets, or as of a time.

        `restore_state` does the same with Spark, and says more of `since_offsets`.
        Raises UnknownTopic, InvalidConfig, OffsetOutOfRange, HistoryCompacted.

            for batch in store.restore("accounts", as_of_timestamp_ms=1_700_000_000_000): …
        """
        from logstore.store.restore import plan_restore, restore

        plan = plan_restore(
            self,
            topic,
            as_of_offsets=as_of_offsets,
            as_of_timestamp_ms=as_of_timestamp_ms,
            since_offsets=since_offsets,
        )
        return restore(self, plan, tombstones=tombstones)

    def follow(
        self,
        topic: str | Sequence[str],
        position: Mapping[str, object] | None = None,
        *,
        poll_s: float = 0.1,
        wait: bool = True,
        committed: bool = True,
    ) -> Iterator[Followed]:
        """Records of all partitions from `position` on, as they come; without one, from the beginning.

        A position is plain JSON that the caller keeps with what it made of the records; each delivery carries the next.
        Of several topics, each round ends where a commit is in all of them or in none. `committed` leaves out open and
        aborted transactions, as read_committed does.
        Raises UnknownTopic when the topic was deleted or created anew, OffsetOutOfRange when records are gone.
        """
        from logstore.store.follow import follow

        return follow(self, topic, position, poll_s=poll_s, wait=wait, committed=committed)

    # --- partition directories -----------------------------------------------------------------------------------

    def place_partition(
        self, topic: Topic, partition: TopicPartition, *, wait_ms: int | None = None, is_new: bool = False
    ) -> str:
        """The partition's directory, made when the partition was never written; never one of another topic.

        A directory that lost its `partition.metadata` gets it back when it holds the log of the partition's segment
        list. Who holds a lease gives a `wait_ms` of 0: the lease of the topic that was here before can only be tried.
        Raises StrayDirectory when it may be another's, DamagedLog when the partition's directory is gone.
        """
        directory = self.layout.partition(partition)
        if self.topic_id_at(directory) == topic.id:
            return directory
        self._clear_deleted(partition, wait_ms=wait_ms)
        number = partition.partition
        with self.locks.partition(topic.id, number, what=f"make {partition}"):
            self.check_exists(topic)
            carried = self.topic_id_at(directory)
            if carried == topic.id:
                return directory
            state_path = self.layout.partition_state(topic.id, number)
            state = read_state(self.fs, state_path, limits=self.limits)
            if is_directory(self.fs, directory):
                if carried is not None or not is_log_of(self.fs, directory, state):
                    raise self._stray(partition, carried)
                write_partition_metadata(self.fs, os.path.join(directory, PARTITION_METADATA), topic.id)
                return directory
            written = state is not None and not state.is_as_made
            if not is_new and (written or self.ends(topic).high_watermarks[number]):
                raise DamagedLog(
                    "the partition's directory is gone",
                    partition=partition,
                    file=directory,
                    hint="Bring it back, or run `duramen recover`, which goes on behind the loss.",
                )
            self.make_partition(topic, partition, state)
        return directory

    def make_partition(self, topic: Topic, partition: TopicPartition, state: PartitionState | None) -> None:
        """An empty directory for the partition; the caller holds its lock, and knows that there is none."""
        self.fs.mkdir(self.layout.topic_state(topic.id))
        self.fs.fsync_dir(self.layout.state)
        if state is None:
            path = self.layout.partition_state(topic.id, partition.partition)
            write_state(self.fs, path, EMPTY)
        draft = self.layout.work("partition")
        begin_directory(self.fs, draft, topic.id)
        sync_files(self.fs, [os.path.join(draft, PARTITION_METADATA)])
        self.fs.fsync_dir(draft)
        self.fs.rename(draft, self.layout.partition(partition))
        self.fs.fsync_dir(self.layout.logs)

    def check_place(self, topic: Topic, first: int = 0, *, clear: bool = True) -> None:
        """Nothing lies where the partitions from `first` on belong. Raises StrayDirectory.

        What deleted topics left is removed first if `clear`, and does not count in any case.
        """
        names = set(self.fs.listdir(self.layout.logs))
        for partition in topic.partition_list()[first:]:
            directory = self.layout.partition(partition)
            if str(partition) not in names:
                continue
            if clear:
                self._clear_deleted(partition)
                if not self.fs.exists(directory):
                    continue
            carried = self.topic_id_at(directory)
            if carried is None or not self.marks.is_deleted(carried):
                raise self._stray(partition, carried)

    def _stray(self, partition: TopicPartition, carried: str | None) -> StrayDirectory:
        whose = f"belongs to topic id {carried}" if carried else "does not say whose it is"
        return StrayDirectory(
            f"the directory in the place of {partition} {whose}; it is left as it is",
            partition=partition,
            file=self.layout.partition(partition),
            hint="`duramen recover --dry-run` says what can be done about it.",
        )

    def _clear_deleted(self, partition: TopicPartition, *, wait_ms: int | None = None) -> None:
        """Take a directory away that a deleted topic left where the partition's belongs."""
        directory = self.layout.partition(partition)
        left_by = self.topic_id_at(directory)
        if left_by is None or not self.marks.is_deleted(left_by):
            return
        with self.locks.lease(left_by, what=f"clear {partition}", wait_ms=wait_ms):
            if self.marks.is_deleted(left_by) and self.topic_id_at(directory) == left_by:
                self._discard(directory)

    def topic_id_at(self, directory: str) -> str | None:
        return topic_id_at(self.fs, directory, limits=self.limits)

    def _discard(self, directory: str) -> None:
        """Out of sight in one step, then gone; a crash in between leaves it to `sweep`."""
        grave = self.layout.work("delete")
        try:
            self.fs.rename(directory, grave)
        except FileNotFoundError:
            return
        self.fs.fsync_dir(self.layout.logs)
        remove_tree(self.fs, grave)

    def is_gone(self, topic_id: str) -> bool:
        """Whether the topic was deleted for certain: a mark says so, or a finished deletion has left nothing of it."""
        return self.marks.is_deleted(topic_id) or not (
            self.fs.exists(self.layout.topic_state(topic_id))
            or topic_id in self.marks.ids()
            or any(
                self.topic_id_at(self.layout.partition(partition)) == topic_id
                for partition in self._partitions_at_hand(None)
            )
        )

    # --- sweeping ------------------------------------------------------------------------------------------------

    def sweep(self) -> list[str]:
        """Remove what crashed processes left behind and a name or a mark says may go; returns the paths."""
        removed = []
        for name in self.fs.listdir(self.layout.staging):
            if name.endswith("-delete"):
                removed.append(os.path.join(self.layout.staging, name))
        oldest = self.clock.now_ms() - _LEFTOVER_MS_MIN
        for folder, suffixes in (
            (self.layout.topics, (".new", ".tmp")),
            (self.layout.staging, ("-partition", "-draft")),
        ):
            for name in self.fs.listdir(folder):
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    if name.endswith(suffixes) and self.fs.stat(path).mtime_ms < oldest:
                        removed.append(path)
        for path in removed:
            remove_tree(self.fs, path)
        removed += [*self._finish_imports(oldest), *self._finish_deletions()]
        for name in self.registry.names():  # of older releases' topics there is no copy yet
            self._refresh_copy_of(name)
        return removed

    def _refresh_copy_of(self, name: str) -> None:
        try:
            topic = self.registry.read(name)
            if self.registry.read_copy(topic.id) != topic:
                with self.locks.lease(topic.id, what="copy its definition", wait_ms=0):
                    self._refresh_copy(name)
        except (UnknownTopic, CorruptState, LockHeld):
            return  # gone, damaged (`recover` needs the copy there is), or being altered

    def _refresh_copy(self, name: str) -> None:
        """The caller holds the topic's lease."""
        topic = self.registry.read(name)
        if self.fs.exists(self.layout.topic_state(topic.id)) and self.registry.read_copy(topic.id) != topic:
            self.registry.write_copy(topic)

    def _finish_imports(self, oldest_ms: int) -> list[str]:
        """Remove what imports that died have begun, and give those that were complete their name."""
        begun, complete = self.marks.find(IMPORTING), self.marks.find(IMPORTED)
        # After the marks: an import holds its folder before it sets the first and until the last is gone.
        removed, at_work = sweep_import_folders(self, oldest_ms=oldest_ms)
        if at_work:
            return removed
        for mark in complete:
            if mark.topic is None or not self.fs.exists(mark.path):
                continue
            try:
                self.registry.link(mark.path, mark.topic)
            except TopicExists:
                if self.registry.read(mark.topic.name).id != mark.topic_id:
                    continue  # left, and reported: it is not known which is right
            self.marks.drop(mark.path)
        for mark in begun:
            with contextlib.suppress(LockHeld):
                removed += self.take_back_import(mark.topic_id, mark.topic)
        return removed

    def take_back_import(self, topic_id: str, topic: Topic | None) -> list[str]:
        """Remove what an import made of a topic that never came to be; returns the paths. Raises LockHeld."""
        mark = self.layout.topic_mark(topic_id, IMPORTING)
        with self.locks.lease(topic_id, what="take an import back", wait_ms=0):
            if not self.fs.exists(mark):
                return []  # it is complete
            removed = self._finish_deletion(topic_id, topic, "take an import back")
        self.locks.forget_topic(topic_id)
        return removed

    def _finish_deletions(self) -> list[str]:
        """What is left of topics that a mark says are deleted."""
        removed = []
        for mark in self.marks.find(DELETED):
            # Held by whoever deletes the topic this moment.
            with contextlib.suppress(LockHeld), self.locks.lease(mark.topic_id, what="sweep", wait_ms=0):
                removed += self._finish_deletion(mark.topic_id, mark.topic, "sweep")
                self.locks.forget_topic(mark.topic_id)
        return removed

    def _finish_deletion(self, topic_id: str, topic: Topic | None, what: str) -> list[str]:
        """Remove what belongs to a deleted topic, the mark last; the caller holds its lease."""
        removed = []
        for partition in self._partitions_at_hand(topic):
            directory = self.layout.partition(partition)
            carried = self.topic_id_at(directory)
            if carried == topic_id or (carried is None and self._is_log_of(topic, partition)):
                with self.locks.partition(topic_id, partition.partition, what=what):  # a late append may still run
                    self._discard(directory)
                removed.append(directory)
        state = self.layout.topic_state(topic_id)
        if self.fs.exists(state):
            remove_tree(self.fs, state)
            self.fs.fsync_dir(self.layout.state)
            removed.append(state)
        for kind in (IMPORTING, IMPORTED, DELETED):
            self.marks.drop(self.layout.topic_mark(topic_id, kind))
        return removed

    def _partitions_at_hand(self, topic: Topic | None) -> list[TopicPartition]:
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

    def _is_log_of(self, topic: Topic | None, partition: TopicPartition) -> bool:
        if topic is None or not is_directory(self.fs, self.layout.partition(partition)):
            return False
        try:
            state = read_state(self.fs, self.layout.partition_state(topic.id, partition.partition), limits=self.limits)
        except CorruptState:
            return False
        return is_log_of(self.fs, self.layout.partition(partition), state)


def published(ends: TopicEnds, number: int, log: PartitionLog) -> TopicEnds:
    """The ends once the log is closed, all of it durable."""
    return ends.with_partition(
        number,
        high_watermark=log.high_watermark,
        last_stable_offset=log.last_stable_offset,
        recovery_point=log.recovery_point,
    )


def _probe(fs: FileSystem, directory: str) -> None:
    """A full disk tells nothing: it was tried when the store was made, and reading needs no room."""
    try:
        probe_file_system(fs, directory)
    except OSError as error:
        if not is_disk_full(error):
            raise


def _make(fs: FileSystem, layout: Layout) -> None:
    """Make an empty store; the version file comes last, so a half-made one is simply made again."""
    if fs.exists(layout.version):
        return
    if looks_like_a_store(fs, layout):
        read_version(fs, layout.version)  # raises: a store that lost its version is not made again
    if fs.exists(layout.root):
        try:
            foreign = sorted(set(fs.listdir(layout.root)) - TOP_NAMES)
        except NotADirectoryError:
            raise NotAStore(
                "no store here: this is a file, and a store is a directory", file=layout.root, hint="Check the path."
            ) from None
        if foreign:
            raise NotAStore(
                f"the directory holds other things ({foreign[0]})", file=layout.root, hint="Give a new directory."
            )
    for directory in layout.directories:
        fs.mkdir(directory)
    probe_file_system(fs, layout.locks)
    fs.mkdir(os.path.join(layout.logs, BROKER_GUARD))
    make_identity(fs, layout)
    write_checkpoints(fs, layout.logs, checkpoint_entries([]))
    write_version(fs, layout.version)
    fs.fsync_dir(layout.root)
