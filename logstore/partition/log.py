"""One partition's log, opened whole by the one process that may change it.

It is recovered where that is needed, and then looked at, rolled, truncated, retained, its start raised; closing it
makes everything durable. Appends use `appender`; only where the log knows producers they come here, by
`producer_append`. Readers use `reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from logstore.config import LogConfig
from logstore.directory.deletion import mark_deleted, sweep_deleted
from logstore.directory.unsynced import clear_unsynced, marking_unsynced, rewrite
from logstore.errors import DamagedLog, InvalidRecord, OffsetOutOfRange
from logstore.limits import INT64_MAX
from logstore.partition.environment import LastKnown, LogEnvironment
from logstore.partition.leader_epochs import EpochEntry
from logstore.partition.producer_state import ProducerState
from logstore.partition.producers import replay
from logstore.partition.recovery import Loaded, Loader
from logstore.partition.recovery_report import RecoveryReport
from logstore.partition.retention import LogFacts, RetentionPass, SegmentFacts, policies_of, retention_passes
from logstore.partition.roll import RollReason, jitter_ms
from logstore.partition.state_file import StateFile
from logstore.segment.segment import LogSegment, SegmentSettings
from logstore.segment.txn_index import AbortedTransaction
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


class PartitionLog:
    """Open with `PartitionLog.open`; use as a context manager or `close` it."""

    def __init__(
        self,
        directory: str,
        loaded: Loaded,
        *,
        partition: TopicPartition,
        config: LogConfig,
        state_file: StateFile,
        known: LastKnown,
        environment: LogEnvironment,
    ) -> None:
        self.directory = directory
        self.partition = partition
        self.config = config
        self.clock = environment.clock
        self.limits = environment.limits
        self._fs = environment.fs
        self._state_file = state_file
        self._broken: str | None = None
        self._unsaved = False  # the state file lacks a segment
        self._new_names = True  # the directory has names that may not be on disk
        self._closed = False
        self.recovery: RecoveryReport = loaded.report
        self._segments = loaded.segments
        state_file.check_timestamps(loaded.segments)
        self.epochs = loaded.epochs
        self.producers = loaded.producers
        self._log_start = loaded.log_start_offset
        self._log_end = loaded.log_end_offset
        self._tail_gap = (self._log_end, self._log_end)  # between the last record and the end the log had then
        self._recovery_point = loaded.recovery_point
        state_file.note_recovery_point(loaded.recovery_point)
        wanted = self._log_end if known.high_watermark is None else known.high_watermark
        self._set_high_watermark(min(max(wanted, self._log_start), self._log_end))
        self.active.jitter_ms = jitter_ms(config, str(partition), self.active.base_offset)
        if state_file.is_unsynced:
            self.write_again(self._recovery_point)
            clear_unsynced(self._fs, state_file.path or "")
        elif known.unsynced_offset is not None:
            self.write_again(max(known.unsynced_offset, self._recovery_point))
        state_file.place(clean=loaded.report.clean)
        self._save_state()

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        partition: TopicPartition,
        known: LastKnown,
        config: LogConfig = LogConfig(),  # noqa: B008 (frozen)
        environment: LogEnvironment = LogEnvironment(),  # noqa: B008 (frozen)
        state_path: str | None = None,
    ) -> Self:
        """Open, or create, the log in `directory`; `.recovery` says what was found and repaired. Raises DamagedLog."""
        state_file = StateFile(directory, state_path, known, environment)
        loader = Loader(
            directory,
            partition=partition,
            config=config,
            known=state_file.corrected(known),
            environment=environment,
            listed=state_file.listed,
        )
        loader.report.notes += state_file.notes
        return cls(
            directory,
            loader.load(),
            partition=partition,
            config=config,
            state_file=state_file,
            known=known,
            environment=environment,
        )

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self._log_start

    @property
    def log_end_offset(self) -> int:
        return self._log_end

    @property
    def _data_end(self) -> int:
        """Where records end: the log end, but for offsets a truncation cut off together with the batch they were in."""
        gap_start, gap_end = self._tail_gap
        return max(gap_start, self._log_start) if gap_end == self._log_end else self._log_end

    @property
    def high_watermark(self) -> int:
        return self._high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Where a read_committed reader must stop: no transaction below is open, or ended above the high watermark."""
        unstable = self.producers.first_unstable_offset()
        if unstable is None:
            return self._high_watermark
        return min(max(unstable, self._log_start), self._high_watermark)  # it may have begun below the log start

    @property
    def open_transactions(self) -> list[ProducerState]:
        """Producers whose transaction has no end yet, by its first offset."""
        found = [s for s in self.producers.producers.values() if s.current_txn_first_offset is not None]
        return sorted(found, key=lambda state: state.current_txn_first_offset or 0)

    @property
    def last_records(self) -> dict[int, tuple[int | None, int]]:
        """Of every active producer the offset of its last data, if there was any, and its epoch."""
        return {
            producer_id: (state.last_data_offset if state.last_data_offset >= 0 else None, state.producer_epoch)
            for producer_id, state in self.producers.producers.items()
        }

    @property
    def recovery_point(self) -> int:
        """Everything below is known to be on disk."""
        return self._recovery_point

    @property
    def segments(self) -> tuple[LogSegment, ...]:
        """Oldest first; the last one is active."""
        return tuple(self._segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def active(self) -> LogSegment:
        return self._segments[-1]

    # --- growing ----------------------------------------------------------------------------------------------------

    def extend_to(self, end_offset: int) -> None:
        """Batches up to `end_offset` were placed into the active segment."""
        self._log_end = end_offset
        self.producers.update_map_end_offset(end_offset)

    def note_aborted(self, aborted: AbortedTransaction) -> None:
        self.active.txn_index.append(aborted)
        self._new_names = True

    def take_back(self, end_offset: int, epochs: Sequence[EpochEntry], error: BaseException) -> None:
        """After an append that failed: cut it off. If that fails too, the log takes no more writes."""
        if self._broken is not None or self._closed:
            return
        try:
            self.producers.take_back()
            self._truncate(end_offset)
            self.active.trim_log()
            self.epochs.restore(epochs)
        except BaseException as second:
            self._broken = f"{error}; then {second}"
            if not isinstance(second, Exception):
                raise

    def save_new_segments(self) -> None:
        """Write the list if the log has rolled since."""
        if self._unsaved:
            self._save_state()

    def roll(self) -> int:
        """Close the active segment and begin a new one at the log end; returns its base offset. Nothing happens when
        it is empty.
        """
        self.check_writable()
        if self.active.size_bytes:
            self.roll_at(self._log_end, None)
            self._save_state()
        return self.active.base_offset

    def roll_at(self, base_offset: int, reason: RollReason | None) -> None:
        """Begin a segment; the list is not written."""
        old = self.active
        if old.base_offset == base_offset:
            # Only an index without any room rolls an empty segment; it is rebuilt.
            assert old.size_bytes == 0, f"roll to {base_offset} ({reason}) of a segment that begins there"
        else:
            old.seal()
            if self._recovery_point >= base_offset:
                with marking_unsynced(self._fs, self._state_file.path):
                    old.flush()  # no later flush looks below the recovery point, nor does recovery
            self.producers.update_map_end_offset(base_offset)
            # Written before the data it describes is synced; a power cut leaves it unreadable at worst, and the log is
            # replayed.
            self.producers.take_snapshot(sync=False)
        try:
            new = self._new_segment(base_offset)
        except OSError as error:
            # Half a segment must not stay: whoever opens the log next would take the log's end from it.
            try:
                self._remove_stale(base_offset)
                self.producers.update_map_end_offset(self._log_end)
                if base_offset > self._log_end:
                    self.producers.delete_snapshot(base_offset)
                if old.base_offset == base_offset:
                    self._segments[-1] = self._new_segment(base_offset)
            except OSError as second:
                self._broken = f"{error}; then {second}"
            raise
        if old.base_offset == base_offset:
            self._segments[-1] = new
        else:
            self._segments.append(new)
            self._unsaved = True

    def _new_segment(self, base_offset: int) -> LogSegment:
        self._remove_stale(base_offset)
        self._new_names = True
        jitter = jitter_ms(self.config, str(self.partition), base_offset)
        settings = SegmentSettings.under(self.config, created_ms=self.clock.now_ms(), jitter_ms=jitter)
        return LogSegment(self._fs, self.directory, base_offset, settings=settings, writable=True, limits=self.limits)

    def _remove_stale(self, base_offset: int) -> None:
        for path in mark_deleted(self._fs, self.directory, base_offset):
            self._fs.unlink(path)

    # --- flushing ---------------------------------------------------------------------------------------------------

    def _flush(self, up_to: int) -> None:
        """Fsync everything below `up_to`; then the recovery point moves there.

        Raises OSError; the log then refuses further writes, because what the system failed to write it may have
        forgotten, and the next fsync would not say so.
        """
        try:
            with marking_unsynced(self._fs, self._state_file.path):
                self._sync(up_to)
        except OSError as error:
            self._broken = self._broken or f"flush: {error}"
            raise

    def write_again(self, offset: int) -> None:
        """After a failed fsync, or after another host: what was just checked from `offset` on is written once more,
        and only then a sync of ours is believed.

        Indexes above the recovery point were rebuilt already.
        """
        for segment in self._unflushed(INT64_MAX):
            first = segment.find_batch(offset)
            if first is not None:
                rewrite(segment.log, first.position, segment.size_bytes)
            with marking_unsynced(self._fs, self._state_file.path):
                segment.flush()
        if self.epochs.entries:
            self.epochs.store()
        self._flush(self._log_end)

    def _unflushed(self, up_to: int) -> Iterator[LogSegment]:
        """The segments that may hold something between the recovery point and `up_to`."""
        ends = [*(segment.base_offset for segment in self._segments[1:]), INT64_MAX]
        for segment, end in zip(self._segments, ends, strict=True):
            if end > self._recovery_point and segment.base_offset < up_to:
                yield segment

    def _sync(self, up_to: int) -> None:
        if up_to > self._recovery_point:
            for segment in self._unflushed(up_to):
                segment.flush()
            if self._new_names:
                self.producers.sync_snapshots(self._recovery_point)
                self._fs.fsync_dir(self.directory)
                self._new_names = False
            self._recovery_point = up_to

    # --- high watermark, log start ----------------------------------------------------------------------------------

    def _set_high_watermark(self, offset: int) -> None:
        self._high_watermark = offset
        self.producers.on_high_watermark_updated(offset)

    def advance_log_start(self, offset: int) -> bool:
        """Hide everything below `offset`; the files go with the next retention pass. False when it does not advance.

        Raises OffsetOutOfRange beyond the high watermark.
        """
        self.check_writable()
        if offset > self._high_watermark:
            raise OffsetOutOfRange(
                f"cannot move the log start to {offset}: the high watermark is {self._high_watermark}",
                partition=self.partition,
                offset=offset,
            )
        if offset <= self._log_start:
            return False
        self._raise_log_start(offset)
        self._save_state()
        self.epochs.truncate_from_start(offset)
        return True

    def _raise_log_start(self, offset: int) -> None:
        self._log_start = offset
        self._recovery_point = max(self._recovery_point, offset)
        self.producers.on_log_start_offset_incremented(offset)

    # --- truncating -------------------------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> bool:
        """Drop everything from `offset` on (the whole batch that holds it); False when the log ends there already."""
        self.check_writable()
        if offset < 0:
            raise OffsetOutOfRange(f"cannot truncate to {offset}", partition=self.partition, offset=offset)
        if offset >= self._log_end:
            self.epochs.truncate_from_end(self._log_end)  # an epoch may have been noted without a record
            return False
        try:
            if offset < self._segments[0].base_offset:
                self._truncate_fully_and_start_at(offset)
            else:
                self._truncate(offset)
        except OSError as error:
            self._broken = self._broken or f"truncation: {error}"
            raise
        return True

    def _truncate(self, offset: int) -> None:
        """Each step is on disk before the next: what is cut off must not come back after what is written then."""
        gone = []
        while len(self._segments) > 1 and self.active.base_offset > offset:
            gone.append(self._segments.pop())
        if self._lower_recovery_point(offset) or gone:
            self._save_state()  # readers stop asking for files before these lose their names
        if gone:
            for segment in gone:
                mark_deleted(self._fs, self.directory, segment.base_offset, snapshot=True)
            self._fs.fsync_dir(self.directory)
        self.active.truncate_to(offset)
        self.active.trim_log()
        with marking_unsynced(self._fs, self._state_file.path):
            self.active.log.fsync()
        if not self.active.size_bytes:
            self.active.created_ms = self.clock.now_ms()
        self._after_truncation(offset)

    def _after_truncation(self, offset: int) -> None:
        self._log_end = offset
        self._tail_gap = (self.active.next_offset(), offset)
        self._log_start = min(self._log_start, offset)
        self.epochs.truncate_from_end(offset)
        self._reload_producers(offset)
        # also when it stays: the producers are loaded again and do not know which markers it has passed
        self._set_high_watermark(min(self._high_watermark, self._data_end))
        self._save_state()

    def _lower_recovery_point(self, offset: int) -> bool:
        """True when it was above: the state file must say so before new bytes come where synced ones were."""
        if offset >= self._recovery_point:
            return False
        self._state_file.note_recovery_point(self._recovery_point)
        self._recovery_point = offset
        return True

    def _truncate_fully_and_start_at(self, offset: int) -> None:
        """Remove everything and continue at `offset` with one empty segment.

        A log start that rises is on disk first; one that falls comes last. Segments go from the highest down, so that a
        log that is half removed is a shorter one, never one whose start moved.
        """
        self._lower_recovery_point(offset)
        self._log_start = max(self._log_start, offset)
        self._save_state()
        for segment in reversed(self._segments):
            mark_deleted(self._fs, self.directory, segment.base_offset, snapshot=True)
        self._fs.fsync_dir(self.directory)
        self._segments = [self._new_segment(offset)]
        self.epochs.clear()
        self.producers.truncate_fully_and_start_at(offset)
        self.producers.on_log_start_offset_incremented(offset)
        self._log_start = self._log_end = self._recovery_point = offset
        self._set_high_watermark(offset)
        self._save_state()

    def _reload_producers(self, end_offset: int) -> None:
        self.producers.truncate_and_reload(self._log_start, end_offset, self.clock.now_ms())
        start = max(self.producers.map_end_offset, self._log_start)
        for segment in self._segments:
            replay(self.producers, segment, start, end_offset, self.limits)
        self.producers.update_map_end_offset(end_offset)
        self.producers.take_snapshot()

    # --- retention --------------------------------------------------------------------------------------------------

    def apply_retention(self) -> list[RetentionPass]:
        """Run the passes in order and sweep `.deleted` files; returns what each pass removed."""
        now_ms = self.clock.now_ms()
        self.check_writable()
        done = []
        for each in retention_passes(policies_of(self.config), self._facts(), now_ms):
            self._delete_prefix(len(each.segments))
            done.append(each)
        sweep_deleted(self._fs, self.directory, delay_ms=self.config.file_delete_delay_ms, now_ms=now_ms)
        return done

    def _facts(self) -> LogFacts:
        segments = tuple(
            SegmentFacts(s.base_offset, s.size_bytes, s.largest_timestamp_ms, s.newest_timestamp_ms)
            for s in self._segments
        )
        return LogFacts(segments, self._log_start, self._high_watermark, self._log_end)

    def _delete_prefix(self, count: int) -> None:
        """The log start is raised and durable before any file loses its name."""
        if count == len(self._segments):
            self.roll_at(self._log_end, None)
        gone = self._segments[:count]
        self._segments = self._segments[count:]
        if self._segments[0].base_offset > self._log_start:
            self._raise_log_start(self._segments[0].base_offset)
        self._save_state()
        for segment in gone:  # not closed: a reader of this process may still use it
            mark_deleted(self._fs, self.directory, segment.base_offset, snapshot=True)
            self.producers.forget_snapshot(segment.base_offset)
        self.epochs.truncate_from_start(self._log_start)

    # --- state, failure, close --------------------------------------------------------------------------------------

    def _save_state(self, *, closed: bool = False) -> None:
        self._state_file.save(
            self._segments,
            log_start_offset=self._log_start,
            log_end_offset=self._log_end,
            recovery_point=self._recovery_point,
            producers=bool(self.producers.producers),
            closed=closed,
        )
        self._unsaved = False

    def check_writable(self) -> None:
        """Raises InvalidRecord once it is closed, DamagedLog after a failure that could not be taken back."""
        if self._closed:
            raise InvalidRecord("the log is closed", partition=self.partition)
        if self._broken is not None:
            raise DamagedLog(
                f"an earlier write failed and could not be taken back: {self._broken}",
                partition=self.partition,
                hint="Close the log and open it with recovery",
            )

    def close(self, *, clean: bool = True) -> None:
        """Seal and close; a clean close flushes everything and leaves a producer snapshot at the log end."""
        if not self._closed:
            self._close(clean and self._broken is None)

    def _close(self, clean: bool) -> None:
        try:
            if clean:
                self.active.seal()
                self.producers.update_map_end_offset(self._log_end)
                self.producers.take_snapshot()
                with marking_unsynced(self._fs, self._state_file.path):
                    self.active.flush()
                self._flush(self._log_end)
                self._fs.fsync_dir(self.directory)
                self._save_state(closed=True)
        finally:
            self._closed = True
            for segment in self._segments:
                segment.close(clean=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
