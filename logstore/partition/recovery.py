"""Opening a partition directory: finish or undo what was interrupted, and after an unclean stop check what was not
yet durable.

Follows Kafka's loader step by step, with two differences that lose less: what is cut off and intact segments after a
cut are set aside in `quarantine/` with the reason, and index contents are checked, not only their presence.
Everything done is in the report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from logstore.config import LogConfig
from logstore.directory.deletion import mark_deleted, sweep_deleted
from logstore.directory.state import SegmentEntry
from logstore.errors import BufferLimit, CorruptBatch, CorruptIndex, DamagedLog, OffsetOverflow
from logstore.files import make_directory
from logstore.limits import INT64_MAX, RELATIVE_OFFSET_MAX
from logstore.partition.cutting import LogCutter, data_end
from logstore.partition.derived_files import DerivedFiles, in_order_in, is_whole
from logstore.partition.environment import LastKnown, LogEnvironment
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.overflow import split_segment
from logstore.partition.producer_state_manager import ProducerStateManager
from logstore.partition.recovery_report import Cut, RecoveryReport
from logstore.partition.replacements import finish_replacements, numbered_files
from logstore.partition.soundness import well_formed
from logstore.records.table import ATTRIBUTES, CONTROL_BIT, LAST_OFFSET, POSITION, SIZE
from logstore.segment.batches import Chunk
from logstore.segment.names import SEGMENT_KINDS, FileKind, NumberedFile, Transient, file_name
from logstore.segment.resync import intact_at
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings
from logstore.topic import TopicPartition


@dataclass(slots=True)
class Loaded:
    segments: list[LogSegment]
    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    epochs: LeaderEpochs
    producers: ProducerStateManager
    report: RecoveryReport
    #: sealed segments that were flushed and lack bytes: base -> size that is there, size they had
    short: dict[int, tuple[int, int]]


class Loader(DerivedFiles):
    """One opening of one partition directory."""

    def __init__(
        self,
        directory: str,
        *,
        partition: TopicPartition,
        config: LogConfig,
        known: LastKnown,
        environment: LogEnvironment,
        listed: Sequence[SegmentEntry] = (),
    ) -> None:
        """`listed` are the segments the state file knows; none where it cannot be relied on. Records below
        `keep_offset` are never given up here: damage among them is an error, and `recover` asks before it costs any.
        """
        super().__init__(directory, partition, environment, known.log_start_offset, RecoveryReport(known.clean))
        self._config = config
        self._clean = known.clean
        # Below the log start nothing is read, so nothing there can be missed.
        self._recovery_point = self._flushed = max(known.recovery_point, known.log_start_offset)
        self._listed = {entry.base_offset: entry.size_bytes for entry in listed}
        self._keep_offset = known.keep_offset
        self._cutter = LogCutter(self._fs, directory, partition, self.report, self._clock)

    def load(self) -> Loaded:
        """Raises DuramenError only for what cannot be repaired from the directory itself."""
        if not self._clean or not self._fs.exists(self._directory):
            make_directory(self._fs, self._directory)
        delay_ms = self._config.file_delete_delay_ms
        now_ms = self._clock.now_ms()
        self.report.removed += sweep_deleted(self._fs, self._directory, delay_ms=delay_ms, now_ms=now_ms)
        removed, replaced = finish_replacements(self._fs, self._directory, self._limits)
        self.report.removed += removed
        if replaced:
            self._listed.clear()  # made before the replacement, or before it was undone
        self._repair_overflow(self._open_segments)
        epochs, epochs_lost = self._load_epochs()
        producers = ProducerStateManager(self._directory, self._fs, self._partition, self._expiration_ms, self._limits)
        if self._clean:
            self._check_clean_stop()
        if not self._clean:
            self._repair_overflow(lambda: self._recover(epochs, producers))
        if self._segments:
            self._log_start = max(self._log_start, self._segments[0].base_offset)
        end = self._segments[-1].next_offset() if self._segments else self._log_start
        if self._segments and end < self._log_start:
            self.report.notes.append(f"the log ends at {end}, below its start {self._log_start}: started again there")
            self._drop_all(epochs, producers)
            end = self._log_start
        if not self._segments:
            self._segments.append(self._segment(self._log_start))
        if epochs_lost:
            self._find_epochs(epochs)
        epochs.truncate_from_end(end)
        epochs.truncate_from_start(self._log_start)
        strays = producers.remove_stray_snapshots([segment.base_offset for segment in self._segments])
        self._rebuild_producers(producers, end)
        if not self._clean or strays or self.report.removed or self.report.rebuilt:
            self._fs.fsync_dir(self._directory)  # before the state file says so, and before anything is written again
        producers.take_snapshot()
        recovery_point = end if self._clean else min(self._recovery_point, end)
        return Loaded(
            self._segments, self._log_start, end, recovery_point, epochs, producers, self.report, self._short()
        )

    def _short(self) -> dict[int, tuple[int, int]]:
        return {
            segment.base_offset: (segment.size_bytes, self._listed[segment.base_offset])
            for segment, following in pairwise(self._segments)
            if following.base_offset <= self._flushed and segment.size_bytes < self._listed.get(segment.base_offset, 0)
        }

    def _check_clean_stop(self) -> None:
        """Treat the stop as unclean if a segment is shorter than it was, or the last one ends inside a batch."""
        for at, segment in enumerate(self._segments):
            reason = ""
            if segment.size_bytes < self._listed.get(segment.base_offset, 0):
                reason = f"{self._listed[segment.base_offset] - segment.size_bytes} bytes are missing"
            elif at + 1 == len(self._segments):
                try:
                    next_offset, end = segment.tail()
                    if end != segment.size_bytes:
                        reason = "it does not end with a whole batch"
                    elif segment.last_indexed_offset() >= next_offset > segment.base_offset:
                        reason = f"its indexes know of offset {segment.last_indexed_offset()}"
                except CorruptBatch as error:
                    reason = str(error)
            if reason:
                self.report.notes.append(f"checked from {segment.path(FileKind.LOG)} on: {reason}")
                self._clean = self.report.clean = False
                self._recovery_point = max(segment.base_offset, self._log_start)
                return

    def _unlink(self, file: NumberedFile) -> None:
        path = os.path.join(self._directory, file.name)
        self._fs.unlink(path)
        self.report.removed.append(path)

    # --- opening segments -------------------------------------------------------------------------------------------

    def _segment(self, base_offset: int) -> LogSegment:
        settings = SegmentSettings.under(self._config, created_ms=self._clock.now_ms())
        return LogSegment(self._fs, self._directory, base_offset, settings=settings, writable=True, limits=self._limits)

    def _open_segments(self) -> None:
        files = numbered_files(self._fs, self._directory)
        logs = {file.base_offset for file in files if file.kind is FileKind.LOG and file.transient is Transient.NONE}
        for file in files:
            orphan = file.kind in SEGMENT_KINDS and file.transient is Transient.NONE and file.base_offset not in logs
            if orphan:
                self._unlink(file)
        plain = {(file.base_offset, file.kind) for file in files if file.transient is Transient.NONE}
        indexed = {base for base in logs if {(base, FileKind.INDEX), (base, FileKind.TIME_INDEX)} <= plain}
        self._close_segments()
        bases = sorted(logs)
        self._keep_listed(logs)
        if not self._clean:
            # What lies wholly below the log start may never have been synced; nobody reads it, so it is not checked but
            # removed, as the next retention pass would.
            while len(bases) > 1 and bases[1] <= self._log_start:
                self.report.removed += mark_deleted(self._fs, self._directory, bases.pop(0), snapshot=True)
        for base in bases:
            segment = self._segment(base)
            self._segments.append(segment)
        unflushed = 0 if self._clean else self._first_unflushed()
        for at, segment in enumerate(self._segments):
            # After a clean stop only the active segment's index is looked through: the others have not been written
            # since. After an unclean one those that recovery will not rebuild.
            if not self._clean and at >= unflushed:
                continue
            suspicious = not self._clean or at == len(self._segments) - 1
            unindexed = not {(segment.base_offset, FileKind.INDEX), (segment.base_offset, FileKind.TIME_INDEX)} & plain
            if unindexed and at == len(self._segments) - 1 and _needs_no_index(segment):
                continue  # a small append to many partitions makes no index without entries
            if segment.base_offset not in indexed:
                self._rebuild_indexes(segment, "it was missing, or the time index was")
                continue
            try:
                if suspicious:
                    segment.sanity_check()
                else:
                    segment.txn_index.sanity_check()
            except CorruptIndex as error:
                self._rebuild_indexes(segment, str(error))

    def _keep_listed(self, there: set[int]) -> None:
        """A segment that the list has and the directory lacks is lost: its gap must not be taken for compaction."""
        listed = sorted(self._listed)
        for at, base in enumerate(listed):
            end = listed[at + 1] if at + 1 < len(listed) else INT64_MAX
            if base not in there and end > self._log_start:
                path = os.path.join(self._directory, file_name(base, FileKind.LOG))
                self._keep(path, 0, base, "a segment of the list is missing")

    def _close_segments(self) -> None:
        for segment in self._segments:
            segment.close(clean=False)
        self._segments = []

    # --- unclean stop -----------------------------------------------------------------------------------------------

    def _recover(self, epochs: LeaderEpochs, producers: ProducerStateManager) -> None:
        """Check every batch from the recovery point on; cut at the first damage and set the rest aside."""
        if not self._segments:
            return
        first = self._first_unflushed()
        self._rebuild_producers(producers, self._segments[first].base_offset)
        for at in range(first, len(self._segments)):
            if self._recover_segment(self._segments[at], at, epochs, producers):
                break

    def _first_unflushed(self) -> int:
        bases = [segment.base_offset for segment in self._segments]
        return max(int(np.searchsorted(bases, self._recovery_point, side="right")) - 1, 0)

    def _recover_segment(
        self, segment: LogSegment, at: int, epochs: LeaderEpochs, producers: ProducerStateManager
    ) -> bool:
        """Scan one segment and rebuild its indexes; True when bytes were cut or are missing: the log ends here."""
        producers.update_map_end_offset(segment.base_offset)  # after a gap the last segment ended lower
        producers.take_snapshot()
        segment.reset_indexes()
        self.report.segments_scanned += 1
        upper = self._segments[at + 1].base_offset if at + 1 < len(self._segments) else None
        valid = 0
        last_offset = segment.base_offset - 1
        reason = ""
        try:
            for chunk in segment.chunks():
                sound, reason = in_order_in(segment, chunk, last_offset, upper)
                sound, reason = well_formed(chunk, last_offset, sound, reason, self._limits)
                good = Chunk(chunk.data, chunk.table[:sound], chunk.position, chunk.file)
                if sound:
                    try:
                        segment.index_batches(good)
                    except OffsetOverflow as error:
                        if error.position is None or is_whole(segment, upper):
                            raise  # old releases left such segments; it is split
                        ends = good.position + good.table[:, POSITION] + good.table[:, SIZE]
                        good = Chunk(good.data, good.table[ends <= error.position], good.position, good.file)
                        reason = error.what
                if len(good.table):
                    self._apply_producers(producers, segment, good)
                    self._note_epochs(epochs, good.table)
                    last_offset = int(good.table[-1, LAST_OFFSET])
                    valid = good.position + int(good.table[-1, POSITION] + good.table[-1, SIZE])
                if reason:
                    break
        except CorruptBatch as error:
            reason = error.what
        except BufferLimit as error:
            if error.position is not None and intact_at(segment.log, error.position, segment.log.size()) is not None:
                raise  # nothing is wrong with the log: the limit is too low for it
            reason = error.what
        self.report.bytes_scanned += valid
        cut = valid < segment.log.size() and not self._trim_preallocated(segment, valid, last_offset + 1, upper)
        missing = "" if cut else self._missing_behind(at, valid, last_offset + 1)
        if cut or missing:
            reason = missing or reason or "the file ends inside a batch"
            path = segment.path(FileKind.LOG)
            self._keep(path, valid, last_offset + 1, reason)
            dropped = max(segment.log.size(), self._listed.get(segment.base_offset, 0)) - valid
            self._cutter.end_log(self._segments, at, Cut(path, valid, dropped, reason))
        producers.update_map_end_offset(last_offset + 1)
        segment.seal()
        producers.take_snapshot()
        return bool(cut or missing)

    def _missing_behind(self, at: int, size_bytes: int, next_offset: int) -> str:
        """Why the segment after this one does not continue it; '' when it does, or there is none.

        A power cut may take whole batches off the end of one segment and leave the next. A gap is believed (compaction
        makes them) where the state file has both segments and this one is as long as it was: a segment is listed before
        anything in it is acknowledged.
        """
        if at + 1 == len(self._segments) or not self._listed:
            return ""
        base, following = self._segments[at].base_offset, self._segments[at + 1].base_offset
        if next_offset == following:
            return ""
        if size_bytes < self._listed.get(base, 0):
            return f"{self._listed[base] - size_bytes} bytes are missing at the end"
        if base not in self._listed or following not in self._listed:
            return f"the segment at {following} was never a part of the log"
        return ""

    def _keep(self, path: str, position: int, end_offset: int, reason: str) -> None:
        """Raises DamagedLog when ending the log at `end_offset` would cost records that must stay."""
        if max(end_offset, self._log_start) < self._keep_offset:
            raise DamagedLog(
                f"{reason}; records up to {self._keep_offset} are committed",
                partition=self._partition,
                file=path,
                position=position,
                offset=end_offset,
                hint="`duramen recover --dry-run` names what is lost; `duramen recover` goes on without it",
            )

    def _trim_preallocated(self, segment: LogSegment, size_bytes: int, next_offset: int, upper: int | None) -> bool:
        """Cut a tail of zeros that was never written to; False when it may stand where records were.

        A preallocated file of which nothing is missing: it is the last one, or the next goes on right after it.
        """
        whole = upper is None or upper == next_offset
        if not (self._config.preallocate and whole and data_end(segment, size_bytes) == size_bytes):
            return False
        self.report.notes.append(
            f"{segment.path(FileKind.LOG)}: preallocated tail of {segment.log.size() - size_bytes} bytes cut"
        )
        segment.cut_bytes(size_bytes)
        return True

    def _drop_all(self, epochs: LeaderEpochs, producers: ProducerStateManager) -> None:
        for segment in self._segments:
            segment.close(clean=False)
            for kind in SEGMENT_KINDS:
                path = segment.path(kind)
                if self._fs.exists(path):
                    self._fs.unlink(path)
                    self.report.removed.append(path)
        self._segments = []
        epochs.clear()
        producers.truncate_fully_and_start_at(self._log_start)

    # --- offset overflow --------------------------------------------------------------------------------------------

    def _repair_overflow(self, step: Callable[[], None]) -> None:
        """Run a step; a segment whose offsets do not fit its base is split and the step begun again."""
        while True:
            try:
                step()
                return
            except OffsetOverflow as error:
                path = str(error.file)
                self._close_segments()
                count = split_segment(self._fs, path, self._config, self._limits)
                self._listed.clear()
                self.report.split.append(f"{path} into {count}")
                self._open_segments_again()

    def _open_segments_again(self) -> None:
        self._repair_overflow(self._open_segments)


def _needs_no_index(segment: LogSegment) -> bool:
    """Whether an index would have no entry, and rebuilding it would find nothing wrong."""
    if segment.size_bytes > segment.index_interval_bytes:
        return False
    try:
        tables = [chunk.table for chunk in segment.chunks()]
    except (CorruptBatch, BufferLimit):
        return False
    if any((table[:, ATTRIBUTES] & CONTROL_BIT).any() for table in tables):
        return False  # markers make a transaction index, which a copy may have come without
    return all(int(table[:, LAST_OFFSET].max()) - segment.base_offset <= RELATIVE_OFFSET_MAX for table in tables)
