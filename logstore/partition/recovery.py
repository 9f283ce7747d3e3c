"""Opening a partition directory: finish or undo what was interrupted, and after an unclean stop check what was not
yet durable.

Follows Kafka's loader step by step, with two differences that lose less: what is cut off and intact segments behind a
cut are set aside in `quarantine/` with the reason, and index contents are checked, not only their presence.
Everything done is in the report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from logstore.config import LogConfig
from logstore.directory.deletion import mark_deleted, sweep_deleted
from logstore.directory.state import SegmentEntry
from logstore.directory.swap import replace_segments
from logstore.errors import (
    BufferLimit,
    CorruptBatch,
    CorruptCheckpoint,
    CorruptIndex,
    DamagedLog,
    DamageError,
    OffsetOverflow,
)
from logstore.files import make_directory
from logstore.limits import INT64_MAX, RELATIVE_OFFSET_MAX
from logstore.partition.environment import LastKnown, LogEnvironment
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.producer_state import AppendOrigin, ProducerStateManager
from logstore.partition.producers import producer_entries, replay
from logstore.partition.quarantine import copy_range, new_folder, write_reason
from logstore.partition.soundness import MALFORMED, in_order, well_formed
from logstore.records.table import (
    BASE_OFFSET,
    LAST_OFFSET,
    LEADER_EPOCH,
    POSITION,
    SIZE,
    BatchTable,
)
from logstore.segment.batches import Chunk
from logstore.segment.names import (
    LEADER_EPOCH_CHECKPOINT,
    SEGMENT_KINDS,
    TEMPORARY_SUFFIX,
    FileKind,
    NumberedFile,
    Transient,
    file_name,
    parse_file_name,
)
from logstore.segment.resync import intact_at
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that left a segment, and why."""

    file: str
    position: int
    dropped_bytes: int
    reason: str


@dataclass(slots=True)
class RecoveryReport:
    """What opening the partition did; everything empty after a clean stop."""

    clean: bool
    segments_scanned: int = 0
    bytes_scanned: int = 0
    cuts: list[Cut] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dropped_bytes(self) -> int:
        return sum(cut.dropped_bytes for cut in self.cuts)

    @property
    def found_damage(self) -> bool:
        return bool(self.cuts or self.quarantined)


@dataclass(slots=True)
class Loaded:
    segments: list[LogSegment]
    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    epochs: LeaderEpochs
    producers: ProducerStateManager
    report: RecoveryReport


class Loader:
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
        self._fs = environment.fs
        self._directory = directory
        self._partition = partition
        self._config = config
        self._clock = environment.clock
        self._limits = environment.limits
        self._clean = known.clean
        # Below the log start nothing is read, so nothing there can be missed.
        self._recovery_point = max(known.recovery_point, known.log_start_offset)
        self._log_start = known.log_start_offset
        self._listed = {entry.base_offset: entry.size_bytes for entry in listed}
        self._keep_offset = known.keep_offset
        self._expiration_ms = environment.producer_expiration_ms
        self._segments: list[LogSegment] = []
        self._folder: str | None = None
        self.report = RecoveryReport(known.clean)

    def load(self) -> Loaded:
        """Raises DuramenError only for what cannot be repaired from the directory itself."""
        if not self._clean or not self._fs.exists(self._directory):
            make_directory(self._fs, self._directory)
        self._finish_replacements()
        self._repair_overflow(self._open_segments)
        epochs, epochs_lost = self._load_epochs()
        producers = ProducerStateManager(self._directory, self._fs, self._partition, self._expiration_ms, self._limits)
        if self._clean:
            self._doubt()
        if not self._clean:
            self._repair_overflow(lambda: self._recover(epochs, producers))
        if self._segments:
            self._log_start = max(self._log_start, self._segments[0].base_offset)
        end = self._segments[-1].next_offset() if self._segments else self._log_start
        if self._segments and end < self._log_start:
            self.report.notes.append(f"the log ends at {end}, below its start {self._log_start}: begun anew there")
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
            self._fs.fsync_dir(self._directory)  # before the state file says so, and before anything is written anew
        producers.take_snapshot()
        recovery_point = end if self._clean else min(self._recovery_point, end)
        return Loaded(self._segments, self._log_start, end, recovery_point, epochs, producers, self.report)

    def _doubt(self) -> None:
        """Take a stop for unclean after all where a segment is shorter than it was, or the last one ends in a batch."""
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

    # --- interrupted replacements -----------------------------------------------------------------------------------

    def _numbered(self) -> list[NumberedFile]:
        parsed = (parse_file_name(name) for name in self._fs.listdir(self._directory))
        return [file for file in parsed if file is not None]

    def _unlink(self, file: NumberedFile) -> None:
        path = os.path.join(self._directory, file.name)
        self._fs.unlink(path)
        self.report.removed.append(path)

    def _finish_replacements(self) -> None:
        now_ms = self._clock.now_ms()
        delay_ms = self._config.file_delete_delay_ms
        self.report.removed += sweep_deleted(self._fs, self._directory, delay_ms=delay_ms, now_ms=now_ms)
        for name in self._fs.listdir(self._directory):
            if name.endswith(TEMPORARY_SUFFIX):  # a small file whose replacement was never finished
                self._fs.unlink(os.path.join(self._directory, name))
                self.report.removed.append(os.path.join(self._directory, name))
        files = self._numbered()
        cleaned = [file for file in files if file.transient is Transient.CLEANED]
        if cleaned:
            # Renaming to .swap goes from the highest base down: a .cleaned left means that from its base on nothing
            # is complete.
            incomplete_from = min(file.base_offset for file in cleaned)
            for file in files:
                if file.transient is Transient.SWAP and file.base_offset >= incomplete_from:
                    self._unlink(file)
            for file in cleaned:
                self._unlink(file)
            files = self._numbered()
        swaps = [file for file in files if file.transient is Transient.SWAP]
        logs = [file for file in swaps if file.kind is FileKind.LOG]
        if logs:
            low = min(file.base_offset for file in logs)
            high = max(self._swap_end(file) for file in logs)
            for file in files:
                if file.transient is Transient.NONE and low <= file.base_offset < high:
                    self._unlink(file)
        for file in swaps:
            plain = file_name(file.base_offset, file.kind)
            self._fs.rename(os.path.join(self._directory, file.name), os.path.join(self._directory, plain))
        if cleaned or swaps:
            self._listed.clear()  # made before the replacement, or before it was undone
            self._fs.fsync_dir(self._directory)

    def _swap_end(self, file: NumberedFile) -> int:
        """One past the last offset of a complete replacement; a 0-byte one covers its own base only."""
        segment = LogSegment(self._fs, self._directory, file.base_offset, suffix=Transient.SWAP, limits=self._limits)
        try:
            return max(segment.next_offset(), file.base_offset + 1 if segment.size_bytes == 0 else 0)
        finally:
            segment.close(clean=False)

    # --- opening segments -------------------------------------------------------------------------------------------

    def _segment(self, base_offset: int) -> LogSegment:
        return LogSegment(
            self._fs,
            self._directory,
            base_offset,
            index_interval_bytes=self._config.index_interval_bytes,
            index_bytes=self._config.segment_index_bytes,
            created_ms=self._clock.now_ms(),
            writable=True,
            limits=self._limits,
        )

    def _open_segments(self) -> None:
        files = self._numbered()
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
            # since. After an unclean one those that recovery will not make anew.
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

    def _rebuild_indexes(self, segment: LogSegment, reason: str) -> None:
        """Indexes from the log; stops quietly at damage, which recovery or a reader deals with."""
        segment.reset_indexes()
        producers = ProducerStateManager(self._directory, self._fs, self._partition, self._expiration_ms, self._limits)
        self._rebuild_producers(producers, segment.base_offset)
        producers.take_snapshot()
        try:
            for chunk in segment.chunks():
                segment.index_batches(chunk)
                self._apply_producers(producers, segment, chunk)
                producers.update_map_end_offset(int(chunk.table[-1, LAST_OFFSET]) + 1)
        except (BufferLimit, *MALFORMED) as error:
            self.report.notes.append(f"index of {segment.path(FileKind.LOG)} rebuilt up to damage only: {error}")
        segment.seal()
        segment.flush()  # no recovery point will have this done
        producers.take_snapshot()  # those above the segment's base have been dropped
        self.report.rebuilt.append(f"{segment.offset_index.path}: {reason}")

    def _apply_producers(self, producers: ProducerStateManager, segment: LogSegment, chunk: Chunk) -> None:
        for entry in producer_entries(chunk.data, chunk.table, self._limits):
            prepared = producers.prepare([entry], AppendOrigin.RECOVERY)
            for aborted in producers.apply(prepared):
                segment.txn_index.append(aborted)

    # --- leader epochs ----------------------------------------------------------------------------------------------

    def _load_epochs(self) -> tuple[LeaderEpochs, bool]:
        """The epochs, and whether they were lost and must be found in the log again."""
        try:
            return LeaderEpochs.load(self._fs, self._directory, limits=self._limits), False
        except CorruptCheckpoint as error:
            self.report.notes.append(f"leader epochs read from the log: {error}")
            epochs = LeaderEpochs(self._fs, os.path.join(self._directory, LEADER_EPOCH_CHECKPOINT))
            return epochs, True

    def _find_epochs(self, epochs: LeaderEpochs) -> None:
        epochs.clear(store=False)
        for segment in self._segments:
            try:
                for chunk in segment.chunks(verify_crc=False):
                    self._note_epochs(epochs, chunk.table, store=False)
            except (CorruptBatch, BufferLimit) as error:
                self.report.notes.append(f"leader epochs of {segment.path(FileKind.LOG)} up to damage only: {error}")
        epochs.store()

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
        producers.update_map_end_offset(segment.base_offset)  # behind a gap the last segment ended lower
        producers.take_snapshot()
        segment.reset_indexes()
        self.report.segments_scanned += 1
        upper = self._segments[at + 1].base_offset if at + 1 < len(self._segments) else None
        valid = 0
        last_offset = segment.base_offset - 1
        reason = ""
        try:
            for chunk in segment.chunks():
                sound, reason = _in_order(segment, chunk, last_offset, upper)
                sound, reason = well_formed(chunk, last_offset, sound, reason, self._limits)
                good = Chunk(chunk.data, chunk.table[:sound], chunk.position, chunk.file)
                if sound:
                    try:
                        segment.index_batches(good)
                    except OffsetOverflow as error:
                        if error.position is None or _is_whole(segment, upper):
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
            self._keep(segment.path(FileKind.LOG), valid, last_offset + 1, reason)
            self._end_log(at, valid, reason)
        producers.update_map_end_offset(last_offset + 1)
        segment.seal()
        producers.take_snapshot()
        return bool(cut or missing)

    def _missing_behind(self, at: int, size_bytes: int, next_offset: int) -> str:
        """Why the segment behind this one does not continue it; '' when it does, or there is none.

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

    def _end_log(self, at: int, size_bytes: int, reason: str) -> None:
        """Let the log end in this segment. The damage goes last: found again, it leads here again."""
        segment = self._segments[at]
        path = segment.path(FileKind.LOG)
        dropped = max(segment.log.size(), self._listed.get(segment.base_offset, 0)) - size_bytes
        self.report.cuts.append(Cut(path, size_bytes, dropped, reason))
        end = _data_end(segment, size_bytes)
        if end > size_bytes:
            target = os.path.join(self._quarantine_folder(), f"{os.path.basename(path)}.from-{size_bytes}")
            copy_range(self._fs, segment.log, size_bytes, end, target)
            self.report.quarantined.append(target)
        self._quarantine(at + 1)
        segment.cut_bytes(size_bytes)
        segment.log.fsync()

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

        A preallocated file of which nothing is missing: it is the last one, or the next goes on right behind it.
        """
        whole = upper is None or upper == next_offset
        if not (self._config.preallocate and whole and _data_end(segment, size_bytes) == size_bytes):
            return False
        self.report.notes.append(
            f"{segment.path(FileKind.LOG)}: preallocated tail of {segment.log.size() - size_bytes} bytes cut"
        )
        segment.cut_bytes(size_bytes)
        return True

    def _note_epochs(self, epochs: LeaderEpochs, table: BatchTable, *, store: bool = True) -> None:
        latest = epochs.latest.epoch if epochs.latest else -1
        for row in np.nonzero(table[:, LEADER_EPOCH] > latest)[0].tolist():
            epoch = int(table[row, LEADER_EPOCH])
            if epoch > latest:
                base = int(table[row, BASE_OFFSET])
                epochs.assign(epoch, base if base >= 0 else int(table[row, LAST_OFFSET]), store=store)
                latest = epoch

    def _quarantine_folder(self) -> str:
        if self._folder is None:
            self._folder = new_folder(self._fs, self._directory)
        return self._folder

    def _quarantine(self, from_segment: int) -> None:
        """Move the segments behind a cut out of the log: their offsets will be given anew."""
        for segment in self._segments[from_segment:]:
            keep = _data_end(segment, 0) > 0
            segment.close(clean=False)
            for kind in (*SEGMENT_KINDS, FileKind.SNAPSHOT):
                source = segment.path(kind)
                if not self._fs.exists(source):
                    continue
                if not keep:
                    self._fs.unlink(source)
                    self.report.removed.append(source)
                    continue
                target = os.path.join(self._quarantine_folder(), os.path.basename(source))
                self._fs.rename(source, target)
                if kind is FileKind.LOG:
                    self.report.quarantined.append(target)
        del self._segments[from_segment:]
        if self._folder is not None:
            self._write_reason(self._folder)
            self._fs.fsync_dir(self._folder)
        self._fs.fsync_dir(self._directory)

    def _write_reason(self, folder: str) -> None:
        cuts = [
            {
                "file": os.path.basename(cut.file),
                "position": cut.position,
                "dropped_bytes": cut.dropped_bytes,
                "reason": cut.reason,
            }
            for cut in self.report.cuts
        ]
        text = {"partition": str(self._partition), "time_ms": self._clock.now_ms(), "cuts": cuts}
        write_reason(self._fs, folder, text)

    # --- producer state ---------------------------------------------------------------------------------------------

    def _rebuild_producers(self, producers: ProducerStateManager, end_offset: int) -> None:
        """Producer state as of `end_offset`: the newest usable snapshot, then the headers behind it."""
        for error in producers.truncate_and_reload(self._log_start, end_offset, self._clock.now_ms()):
            self.report.notes.append(f"snapshot dropped: {error}")
        start = max(producers.map_end_offset, self._log_start)
        for at, segment in enumerate(self._segments):
            following = self._segments[at + 1].base_offset if at + 1 < len(self._segments) else None
            if segment.base_offset >= end_offset or (following is not None and following <= start):
                continue
            producers.update_map_end_offset(max(segment.base_offset, start))
            if at + 2 >= len(self._segments):  # so that the next start, or a truncation, need not come this way again
                producers.take_snapshot()
            try:
                replay(producers, segment, start, end_offset, self._limits)
            except MALFORMED as error:  # below the recovery point, which is a reader's to find
                self.report.notes.append(f"producer state is incomplete: {error}")
        producers.update_map_end_offset(end_offset)

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
                self._split(str(error.file))
                self._open_segments_again()

    def _open_segments_again(self) -> None:
        self._repair_overflow(self._open_segments)

    def _split(self, path: str) -> None:
        """Copy a segment into several whose offsets fit, and swap them in (old releases left such segments)."""
        parsed = parse_file_name(os.path.basename(path))
        assert parsed is not None
        self._close_segments()
        source = LogSegment(self._fs, self._directory, parsed.base_offset, limits=self._limits)
        outputs: list[LogSegment] = []
        for chunk in source.chunks(verify_crc=False):
            for row in range(len(chunk.table)):
                base = int(chunk.table[row, BASE_OFFSET])
                last = int(chunk.table[row, LAST_OFFSET])
                if not outputs or last - outputs[-1].base_offset > RELATIVE_OFFSET_MAX:
                    legacy_base = last if outputs else parsed.base_offset  # where it begins is known only inside
                    outputs.append(self._split_output(base if base >= 0 else legacy_base))
                outputs[-1].place(
                    chunk.data, chunk.table[: row + 1], row, next_offset=0, assign=False, indexes_may_fill=True
                )
        total = sum(output.size_bytes for output in outputs)
        size = source.size_bytes
        source.close(clean=False)
        bases = [output.base_offset for output in outputs]
        for output in outputs:
            output.seal()
            output.flush()
            output.close(clean=False)
            self._fs.unlink(output.offset_index.path)  # so that all three indexes are made anew, with transactions
        if total != size:
            raise DamageError(f"splitting gave {total} bytes of {size}", file=path, partition=self._partition)
        replace_segments(self._fs, self._directory, bases, [parsed.base_offset])
        self._listed.clear()
        self.report.split.append(f"{path} into {len(bases)}")

    def _split_output(self, base_offset: int) -> LogSegment:
        for kind in SEGMENT_KINDS:
            leftover = os.path.join(self._directory, file_name(base_offset, kind, Transient.CLEANED))
            if self._fs.exists(leftover):
                self._fs.unlink(leftover)
        return LogSegment(
            self._fs,
            self._directory,
            base_offset,
            index_interval_bytes=self._config.index_interval_bytes,
            index_bytes=self._config.segment_index_bytes,
            writable=True,
            suffix=Transient.CLEANED,
            limits=self._limits,
        )


def _in_order(segment: LogSegment, chunk: Chunk, last_offset: int, upper: int | None) -> tuple[int, str]:
    high = INT64_MAX if upper is None else upper
    return in_order(segment.log, chunk, after=last_offset, low=segment.base_offset, high=high)


def _needs_no_index(segment: LogSegment) -> bool:
    """Whether an index would have no entry, and nothing is wrong that making one would tell."""
    if segment.size_bytes > segment.index_interval_bytes:
        return False
    try:
        tables = [chunk.table for chunk in segment.chunks()]
    except (CorruptBatch, BufferLimit):
        return False
    return all(int(table[:, LAST_OFFSET].max()) - segment.base_offset <= RELATIVE_OFFSET_MAX for table in tables)


def _is_whole(segment: LogSegment, upper: int | None) -> bool:
    """Whether every batch of the segment is sound and in order."""
    last_offset = segment.base_offset - 1
    try:
        for chunk in segment.chunks():
            if _in_order(segment, chunk, last_offset, upper)[1]:
                return False
            last_offset = int(chunk.table[-1, LAST_OFFSET])
    except (CorruptBatch, BufferLimit):
        return False
    return True


def _data_end(segment: LogSegment, position: int) -> int:
    """Where the zeros at the end of the file begin, `position` at the least: they are not worth keeping."""
    end = segment.log.size()
    while position < end:
        size = min(_BLOCK_BYTES, end - position)
        data = segment.log.pread(size, end - size).rstrip(b"\0")
        if data:
            return end - size + len(data)
        end -= size
    return position
