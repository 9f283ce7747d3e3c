"""One partition's log, opened whole by the one process that may change it: what it holds, and taking records away.

It is truncated, retained, its start raised. Appends use `appender`; only where the log knows producers they come here,
by `producer_append`. Readers use `reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from logstore.directory.deletion import mark_deleted, sweep_deleted
from logstore.directory.unsynced import marking_unsynced
from logstore.errors import OffsetOutOfRange
from logstore.partition.leader_epochs import EpochEntry
from logstore.partition.open_log import OpenLog
from logstore.partition.producers import replay
from logstore.partition.retention import LogFacts, RetentionPass, SegmentFacts, policies_of, retention_passes

if TYPE_CHECKING:
    pass


class PartitionLog(OpenLog):
    """The log with all that can be done to it."""

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
