"""One partition's log, opened whole by the one process that may change it: what it holds, rolling, flushing, closing.

It is recovered where that is needed; closing it makes everything durable. `log.py` has what takes records away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore.config import LogConfig
from logstore.directory.deletion import mark_deleted
from logstore.directory.unsynced import clear_unsynced, marking_unsynced, rewrite
from logstore.errors import DamagedLog, InvalidRecord
from logstore.limits import INT64_MAX
from logstore.partition.environment import LastKnown, LogEnvironment
from logstore.partition.producer_state import ProducerState
from logstore.partition.recovery import Loaded, Loader
from logstore.partition.recovery_report import RecoveryReport
from logstore.partition.roll import RollReason, jitter_ms
from logstore.partition.state_file import StateFile
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings
from logstore.segment.txn_index import AbortedTransaction
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


class OpenLog:
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
        state_file.keep_sizes(loaded.short)
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
