"""Maintenance of a store in a directory: under its locks, with its ledger. Implements `Maintenance`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property

from logstore.commit.committer import Committer
from logstore.compaction.failures import SetAside, failures_of, still_set_aside
from logstore.compaction.maintenance import Context, Counts, Job, Prepared
from logstore.compaction.passes import PassRoom, compact_partition
from logstore.compaction.planning import PartitionPlan
from logstore.compaction.receipts import Run
from logstore.compaction.run_folders import abandon_runs, sweep_runs
from logstore.compaction.segment_counts import SegmentCounts
from logstore.config import BrokerConfig
from logstore.directory.locks import FileLock, holder
from logstore.directory.shared_clock import clock_warning
from logstore.errors import DuramenError, LockHeld
from logstore.ledger import Ledger, RunRow
from logstore.limits import INT64_MAX
from logstore.partition.retention import Retention
from logstore.topics import checkpoints, sweeping
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic
from logstore.upkeep.ledger_figures import LedgerFigures, read_counts
from logstore.upkeep.ledger_tables import LedgerTables
from logstore.upkeep.retention import flush_before_retention, retain

#: partitions whose counts are recorded together
_COUNTS_EVERY = 64
_DAEMON_LOCK = "schedule"
#: Kafka's default is never, as its replicas are its durability; here staged files wait for the flush
FLUSH_INTERVAL_MS = 60_000
LEDGER_INTERVAL_MS = 3_600_000


class DirectoryMaintenance:
    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._counts: SegmentCounts | None = None
        self._known: tuple[int, Counts] = (-1, {})
        self._beside = FileLock(store.fs, os.path.join(store.layout.locks, _DAEMON_LOCK))
        self._identity: tuple[int, int] | None = None
        with contextlib.suppress(OSError):
            self._identity = self._found_identity()
        #: of topics, when FLUSH last looked
        self._sequences: dict[str, int] = {}

    @cached_property
    def _ledger(self) -> Ledger:
        return self._store.ledger()

    # --- looking ----------------------------------------------------------------------------------------------------

    def now_ms(self, *, working: bool = False) -> int:
        return self._store.clock.now_ms()

    def clock_doubt(self) -> str | None:
        return clock_warning(self._store.clock)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()

    def total_bytes(self) -> int | None:
        try:
            found = os.statvfs(self._store.layout.logs)
        except OSError:
            return None
        return found.f_blocks * found.f_frsize

    @property
    def fresh_s(self) -> float:
        return 0

    def set_aside(self, now_ms: int) -> dict[tuple[str, int], SetAside]:
        return still_set_aside(self.failures(), now_ms)

    def failures(self) -> dict[tuple[str, int], SetAside]:
        """A store without a ledger has none, and is not given one by looking."""
        return failures_of(self._store, self._ledger) if self._store.has_ledger else {}

    def runs(self) -> list[RunRow]:
        """Looking does not make a ledger where nothing was ever committed."""
        return self._ledger.runs() if self._store.has_ledger else []

    def counts(self) -> Counts:
        if not self._store.has_ledger:
            return {}
        self._known = read_counts(self._ledger, known=self._known)
        return self._known[1]

    def figures(self) -> LedgerFigures:
        return LedgerFigures(self._store, self._ledger)

    def tables(self) -> LedgerTables:
        return LedgerTables(self._store)

    def history_path(self, topic_id: str | None) -> str | None:
        return self._store.layout.history(topic_id)

    @property
    def activity_folder(self) -> str | None:
        return self._store.layout.locks

    def is_same(self) -> bool:
        try:
            return self._found_identity() == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _found_identity(self) -> tuple[int, int]:
        found = os.stat(self._store.layout.version)
        return found.st_dev, found.st_ino

    # --- a run ------------------------------------------------------------------------------------------------------

    def prepare(self, topics: Sequence[Topic], stopping: Callable[[], bool]) -> Prepared:
        """Close killed runs; settle and flush: only what is committed and durable is compacted or deleted."""
        done = Prepared(abandoned=abandon_runs(self._ledger, self._store))
        sweep_runs(self._store)
        committer = Committer(self._store)
        for topic in topics:
            if stopping():
                break
            try:
                committer.flush(topic)
            except DuramenError as error:
                done.problems.append(f"{topic.name} could not be flushed first: {error}")
        return done

    def compact(self, context: Context, plan: PartitionPlan) -> Run:
        if self._counts is None:
            self._counts = SegmentCounts(self._ledger, every=_COUNTS_EVERY)
        return compact_partition(PassRoom(self._store, self._ledger, self._counts), context, plan)

    def end_passes(self) -> list[str]:
        problems = []
        counts, self._counts = self._counts, None
        try:
            if counts is not None:
                counts.write()
        except (DuramenError, OSError) as error:
            problems.append(f"the counts of segments could not be recorded: {error}")
        sweep_runs(self._store)
        return problems

    def prepare_retention(self, topic: Topic) -> None:
        """Only what is on disk in the logs may go, and a flush removes what is staged."""
        flush_before_retention(self._store, topic)

    def retain(self, topic: Topic, number: int, *, now_ms: int, dry_run: bool = False) -> Retention:
        found = retain(self._store, topic, number, now_ms=now_ms, dry_run=True)
        if dry_run:
            return found
        if found.passes:
            return retain(self._store, topic, number, now_ms=now_ms, wait_ms=0)
        self._store.sweep_deleted(topic, number, now_ms=now_ms)
        return found

    def publish(self) -> list[str]:
        try:
            checkpoints.project_checkpoints(self._store)
        except (DuramenError, OSError) as error:
            return [f"Kafka's checkpoint files could not be written: {error}"]
        return []

    # --- the daemon -------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (Job.FLUSH, Job.COMPACTION, Job.RETENTION, Job.LEDGER)

    def intervals_ms(self) -> dict[Job, int]:
        return directory_intervals(self._store.broker_config)

    def tidy(self, job: Job, stopping: Callable[[], bool], *, wait_for_idle: bool) -> Prepared:
        return self._flush(stopping, wait_for_idle) if job is Job.FLUSH else self._upkeep()

    def _flush(self, stopping: Callable[[], bool], wait_for_idle: bool) -> Prepared:
        """Settle and flush topics that were not written to since the last look; unlink what has lain long enough."""
        done = Prepared()
        committer = Committer(self._store)
        for topic in self._store.topics():
            if stopping():
                break
            try:
                sequence = self._ledger.sequence(topic.id)
                idle = not wait_for_idle or self._sequences.get(topic.id) == sequence
                self._sequences[topic.id] = sequence
                ends = self._store.ends(topic)
                if idle and (ends.flushed_sequence != sequence or ends.recovery_points != ends.high_watermarks):
                    committer.flush(topic)
                    done.notes.append(f"{topic.name}: flushed")
                for number in range(topic.partitions):
                    self._store.sweep_deleted(topic, number, now_ms=self.now_ms())
            except LockHeld as error:
                done.notes.append(f"{topic.name} is left to another process: {error.what}")
            except DuramenError as error:
                done.problems.append(f"{topic.name}: {error}")
        return done

    def _upkeep(self) -> Prepared:
        """Merge the ledger's files; remove what killed processes left behind."""
        done = Prepared()
        try:
            self._ledger.maintain()
            Committer(self._store).sweep()
            sweeping.sweep(self._store)
        except LockHeld as error:
            done.notes.append(f"upkeep is left for the next time: {error.what}")
        return done

    def hold_schedule(self) -> str | None:
        if not self._beside.try_acquire():
            return str(holder(self._store.fs, self._beside.path))
        self._beside.sign(self._store.clock, "schedule")
        return None

    def release_schedule(self) -> None:
        self._beside.release()


def directory_intervals(config: BrokerConfig) -> dict[Job, int]:
    flush_ms = config.log_flush_scheduler_interval_ms
    return {
        Job.FLUSH: FLUSH_INTERVAL_MS if flush_ms == INT64_MAX else flush_ms,
        Job.COMPACTION: max(config.log_cleaner_backoff_ms, 1_000),  # 0 is allowed, and means at once
        Job.RETENTION: config.log_retention_check_interval_ms,
        Job.LEDGER: LEDGER_INTERVAL_MS,
    }
