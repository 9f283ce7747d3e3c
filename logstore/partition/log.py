"""One partition's log, for the one process that writes it.

Append and roll, flush, truncate, raise the log start, retain; reads within the process go through `reading`, other
processes use `reader`. All methods may be called from several threads. Failures in the middle of an append take back
what they wrote; if that fails too the log refuses further writes until it is opened again with recovery.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.config import LogConfig
from logstore.directory.deletion import mark_deleted, sweep_deleted
from logstore.directory.few_files import FewFiles
from logstore.directory.state import PartitionState, SegmentEntry, read_state, write_state
from logstore.directory.swap import finish_swap
from logstore.directory.unsynced import clear_unsynced, is_unsynced, marking_unsynced, rewrite
from logstore.errors import (
    AppendTooLarge,
    CorruptState,
    DamagedLog,
    DuramenError,
    InvalidRecord,
    OffsetOutOfRange,
    OffsetOverflow,
    OffsetsOutOfOrder,
)
from logstore.files import OS_FILES, FileSystem, make_directory
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, RELATIVE_OFFSET_MAX, Limits
from logstore.partition.flusher import Flusher
from logstore.partition.losses import clipped
from logstore.partition.producer_state import DEFAULT_EXPIRATION_MS, AppendOrigin, ProducerState
from logstore.partition.producers import producer_entries, producer_entry
from logstore.partition.reading import Fetched, Isolation, LogView, fetch, offset_for_timestamp, read_chunks
from logstore.partition.recovery import Loader, RecoveryReport
from logstore.partition.retention import LogFacts, RetentionPolicy, SegmentFacts, policies_of, retention_passes
from logstore.partition.roll import (
    ActiveSegment,
    NextAppend,
    RollReason,
    draw_jitter_ms,
    max_segment_ms,
    roll_reason,
)
from logstore.partition.validation import (
    check_columns,
    check_readable,
    check_sizes,
    client_batches,
    codec_level,
    topic_codec_id,
    whole_batches,
)
from logstore.records.codes import OK, ROLL_APPEND_TOO_LARGE
from logstore.records.columns import Columns, columns_of
from logstore.records.control import encode_marker
from logstore.records.decoder import Decoder
from logstore.records.encoder import BATCH_BYTES, BatchOptions, EncodedBatches, Encoder
from logstore.records.memory import Memory
from logstore.records.native import address_of, kernels
from logstore.records.record import Record
from logstore.records.table import (
    BASE_OFFSET,
    COUNT,
    LAST_OFFSET,
    LEADER_EPOCH,
    MAGIC,
    MAX_TIMESTAMP,
    PRODUCER_ID,
    SIZE,
    BatchTable,
)
from logstore.segment.names import FileKind, parse_file_name
from logstore.segment.segment import LogSegment, RollLimits
from logstore.segment.time_index import TimestampOffset
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Buffer


_BUFFER_BYTES = 4 << 20  # the system takes few large writes in much less time than many small ones


class _Buffers(threading.local):
    """What the calling thread converts and encodes into, kept from one append to the next."""

    def __init__(self) -> None:
        self.columns = Memory(blocks=10)
        self.batches = Memory(blocks=2)  # what is encoded, and the same compressed


_BUFFERS = _Buffers()


@dataclass(frozen=True, slots=True)
class AppendInfo:
    """What an append did; `duplicate` means that a producer's repeat was recognised and nothing was written."""

    first_offset: int
    last_offset: int
    records: int
    bytes: int
    rolls: int = 0
    duplicate: bool = False
    log_append_time_ms: int = -1


@dataclass(frozen=True, slots=True)
class DeletedSegments:
    policy: str
    base_offsets: tuple[int, ...]
    bytes: int


class PartitionLog:
    """Open with `PartitionLog.open`; use as a context manager or `close` it."""

    def __init__(
        self,
        directory: str,
        loader: Loader,
        *,
        partition: TopicPartition,
        config: LogConfig,
        state_path: str | None,
        state: PartitionState,
        high_watermark: int | None,
        clock: Clock,
        fs: FileSystem,
        limits: Limits,
        long_lived: bool,
        background_flush: bool,
        manual_high_watermark: bool,
        randomness: random.Random,
        told_recovery_point: int,
        unsynced: bool = False,
    ) -> None:
        self.directory = directory
        self.partition = partition
        self.config = config
        self._clock = clock
        self._fs = fs
        self._limits = limits
        self._long_lived = long_lived
        self._manual = manual_high_watermark
        self._randomness = randomness
        self._state_path = state_path
        self._state = replace(state, swap=None)  # loading finishes a replacement, or undoes it
        self._lock = threading.RLock()
        self._broken: str | None = None
        self._placing = False  # an append has begun to write
        self._unsaved = False  # the state file lacks a segment
        self._new_names = True  # the directory has names that may not be on disk
        self._closed = False
        loaded = loader.load()
        self.recovery: RecoveryReport = loaded.report
        self._segments = loaded.segments
        self._check_timestamps(state.segments)
        self._epochs = loaded.epochs
        self._producers = loaded.producers
        self._log_start = loaded.log_start_offset
        self._log_end = loaded.log_end_offset
        self._tail_gap = (self._log_end, self._log_end)  # between the last record and the end the log had then
        self._recovery_point = loaded.recovery_point
        # the highest that may stand in a caller's file: it is written there after a flush, and stays when we truncate
        self._told_recovery_point = max(told_recovery_point, loaded.recovery_point)
        wanted = self._log_end if high_watermark is None and not manual_high_watermark else high_watermark
        self._high_watermark = min(max(wanted if wanted is not None else 0, self._log_start), self._log_end)
        self._producers.on_high_watermark_updated(self._high_watermark)
        self._unflushed_since_ms: int | None = None  # monotonic time of the oldest append not yet on disk
        self._active.jitter_ms = draw_jitter_ms(config, randomness)
        if long_lived:
            self._active.activate(preallocate_bytes=config.segment_bytes if config.preallocate else 0)
        if unsynced:
            self._write_again()
        self._flush_what_was_found()
        self._place_state(clean=loaded.report.clean)
        self._save_state()
        self._flusher: Flusher | None = None
        if background_flush and config.flush_ms < INT64_MAX:
            self._flusher = Flusher(self, config.flush_ms)

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        partition: TopicPartition,
        config: LogConfig = LogConfig(),  # noqa: B008 (frozen)
        clean: bool,
        state_path: str | None = None,
        recovery_point: int = 0,
        log_start_offset: int = 0,
        high_watermark: int | None = None,
        manual_high_watermark: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        fs: FileSystem = OS_FILES,
        limits: Limits = DEFAULT_LIMITS,
        long_lived: bool = True,
        background_flush: bool = True,
        producer_expiration_ms: int = DEFAULT_EXPIRATION_MS,
        randomness: random.Random | None = None,
        keep_offset: int = 0,
    ) -> PartitionLog:
        """Open, or create, the log in `directory`; `.recovery` says what was found and repaired.

        Raises DamagedLog, with nothing given up, when damage below `keep_offset` would cost records.

        `clean` says that the last writer closed the log; otherwise everything from `recovery_point` on is checked.
        Without `manual_high_watermark` the high watermark follows the log end, as on a broker that is its only
        replica.
        """
        if not long_lived:
            fs = FewFiles(fs)  # a log of many segments has more files than a process may open
        state = None
        notes = []
        if state_path is not None:
            try:
                state = read_state(fs, state_path, limits=limits)
            except CorruptState as error:
                notes.append(f"state file rebuilt: {error}")
        if state is not None and state_path is not None and not clean:
            fs.fsync_dir(os.path.dirname(state_path))  # a killed process may not have: all that follows goes by it
        state = state or _unknown_state(fs, directory, log_start_offset)
        if state.swap is not None and state_path is not None:
            state = finish_swap(fs, directory, state_path, state)
        unsynced = state_path is not None and is_unsynced(fs, state_path)
        told_recovery_point = recovery_point
        if state.recovery_point_max is not None:
            recovery_point = min(recovery_point, state.recovery_point_max)
        loader = Loader(
            fs,
            directory,
            partition=partition,
            config=config,
            clock=clock,
            limits=limits,
            clean=clean and not unsynced,
            recovery_point=recovery_point,
            log_start_offset=max(log_start_offset, state.log_start_offset),
            producer_expiration_ms=producer_expiration_ms,
            listed=state.segments if state.swap is None else (),
            keep_offset=keep_offset,
        )
        loader.report.notes += notes
        return cls(
            directory,
            loader,
            partition=partition,
            config=config,
            state_path=state_path,
            state=state,
            high_watermark=high_watermark,
            clock=clock,
            fs=fs,
            limits=limits,
            long_lived=long_lived,
            background_flush=background_flush,
            manual_high_watermark=manual_high_watermark,
            randomness=randomness or random.Random(),
            told_recovery_point=told_recovery_point,
            unsynced=unsynced,
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
        unstable = self._producers.first_unstable_offset()
        if unstable is None:
            return self._high_watermark
        return min(max(unstable, self._log_start), self._high_watermark)  # it may have begun below the log start

    @property
    def open_transactions(self) -> list[ProducerState]:
        """Producers whose transaction has no end yet, by its first offset."""
        with self._lock:
            found = [s for s in self._producers.producers.values() if s.current_txn_first_offset is not None]
        return sorted(found, key=lambda state: state.current_txn_first_offset or 0)

    @property
    def last_records(self) -> dict[int, tuple[int | None, int]]:
        """Of every active producer the offset of its last data, if there was any, and its epoch."""
        with self._lock:
            return {
                producer_id: (state.last_data_offset if state.last_data_offset >= 0 else None, state.producer_epoch)
                for producer_id, state in self._producers.producers.items()
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
    def _active(self) -> LogSegment:
        return self._segments[-1]

    def _view(self, isolation: Isolation) -> LogView:
        with self._lock:
            end = {
                Isolation.LOG_END: self._data_end,
                Isolation.READ_UNCOMMITTED: self._high_watermark,
                Isolation.READ_COMMITTED: self.last_stable_offset,
            }[isolation]
            segments = {segment.base_offset: segment for segment in self._segments}
            return LogView(self.partition, tuple(segments), segments.__getitem__, self._log_start, end, self._log_end)

    # --- appending --------------------------------------------------------------------------------------------------

    def append(
        self,
        records: Iterable[Record],
        *,
        codec_id: int = 0,
        batch_bytes: int = BATCH_BYTES,
        leader_epoch: int = 0,
    ) -> AppendInfo:
        """Append plain records. Raises InvalidRecord and its kind, RecordTooLarge, InvalidTimestamp; then nothing is
        written.
        """
        return self._append_columns([columns_of(records)], codec_id, batch_bytes, leader_epoch)

    def append_columns(
        self,
        table: pa.Table | pa.RecordBatch,
        *,
        codec_id: int = 0,
        batch_bytes: int = BATCH_BYTES,
        leader_epoch: int = 0,
    ) -> AppendInfo:
        """Append an Arrow table of key, value, timestamp?, headers?; all of it or, when an error is raised, nothing."""
        from logstore.records.arrow import columns_from_arrow

        return self._append_columns(columns_from_arrow(table, _BUFFERS.columns), codec_id, batch_bytes, leader_epoch)

    def append_batches(
        self,
        data: Buffer,
        *,
        origin: AppendOrigin = AppendOrigin.CLIENT,
        leader_epoch: int = 0,
        transaction_version: int = 0,
    ) -> AppendInfo:
        """Append ready-made batches.

        From a CLIENT or COORDINATOR offsets are assigned and the topic's rules applied; from REPLICATION batches keep
        their offsets, which must increase from the log's end on.
        """
        array = np.frombuffer(bytearray(memoryview(data).cast("B")), dtype=np.uint8)
        given = whole_batches(array, self.config, self.partition, sized=origin is not AppendOrigin.REPLICATION)
        now_ms = self._clock.now_ms()
        with self._lock, self._all_or_nothing():
            if origin is AppendOrigin.REPLICATION:
                self._check_replicated(given.table)
                return self._append_prepared([given], origin, None, now_ms, transaction_version)
            parts: Iterable[EncodedBatches] = [given]
            if origin is AppendOrigin.CLIENT:
                parts = list(client_batches(given, self.config, now_ms, self._limits, self.partition))
            else:
                if bool((given.table[:, MAGIC] < 2).any()):
                    raise InvalidRecord("a coordinator writes batches of format 2 only", partition=self.partition)
                if self.config.message_timestamp_type == "LogAppendTime":
                    kernels().stamp_append_time(
                        address_of(given.data), address_of(given.table), len(given.table), now_ms
                    )
                parts = [EncodedBatches(given.data, given.table[row : row + 1]) for row in range(len(given.table))]
            return self._append_prepared(parts, origin, leader_epoch, now_ms, transaction_version)

    def append_marker(
        self,
        *,
        commit: bool,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int = 0,
        leader_epoch: int = 0,
        transaction_version: int = 0,
    ) -> AppendInfo:
        """End a producer's transaction, as its coordinator does."""
        marker = encode_marker(
            commit=commit,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=self._clock.now_ms(),
        )
        return self.append_batches(
            marker, origin=AppendOrigin.COORDINATOR, leader_epoch=leader_epoch, transaction_version=transaction_version
        )

    def _append_columns(
        self, parts: Iterable[Columns], codec_id: int, batch_bytes: int, leader_epoch: int
    ) -> AppendInfo:
        now_ms = self._clock.now_ms()
        codec_id = topic_codec_id(self.config, codec_id)
        options = BatchOptions(
            codec_id=codec_id,
            level=codec_level(self.config, codec_id) if codec_id else None,
            batch_bytes=min(
                batch_bytes,
                self.config.max_message_bytes,
                self.config.segment_bytes,
                self._limits.written_batch_bytes,
            ),
            batch_bytes_max=self._limits.written_batch_bytes,
            default_timestamp_ms=now_ms,
        )
        buffer_bytes = max(_BUFFER_BYTES, 4 * options.batch_bytes)
        encoder = Encoder(options, buffer_bytes=buffer_bytes, memory=_BUFFERS.batches)
        append_time = self.config.message_timestamp_type == "LogAppendTime"

        def encoded() -> Iterator[EncodedBatches]:
            for columns in parts:
                check_columns(columns, self.config, now_ms, codec_id, self.partition)
                for batches in encoder.encode(columns):
                    check_sizes(batches.table, self.config, self.partition)
                    if append_time:
                        kernels().stamp_append_time(
                            address_of(batches.data), address_of(batches.table), len(batches.table), now_ms
                        )
                    yield batches

        with self._lock, self._all_or_nothing():
            return self._append_prepared(encoded(), AppendOrigin.CLIENT, leader_epoch, now_ms, 0)

    def _check_replicated(self, table: BatchTable) -> None:
        begins = np.where(table[:, BASE_OFFSET] >= 0, table[:, BASE_OFFSET], table[:, LAST_OFFSET])
        ends = np.concatenate(([self._log_end - 1], table[:-1, LAST_OFFSET]))
        wrong = np.nonzero(begins <= ends)[0]
        if len(wrong):
            raise OffsetsOutOfOrder(
                f"a batch begins at {int(begins[wrong[0]])}, the log ends at {int(ends[wrong[0]]) + 1}",
                partition=self.partition,
                offset=int(begins[wrong[0]]),
            )

    def _append_prepared(
        self,
        parts: Iterable[EncodedBatches],
        origin: AppendOrigin,
        leader_epoch: int | None,
        now_ms: int,
        transaction_version: int,
    ) -> AppendInfo:
        """Place batches, rolling where due. `leader_epoch` None keeps the batches' own offsets and epochs."""
        self._check_writable()
        first_offset = self._log_end if leader_epoch is not None else -1
        records = written = rolls = 0
        duplicate: AppendInfo | None = None
        for batches in parts:
            table = batches.table
            if not len(table):
                continue
            check_readable(table, self._limits, self.partition)
            if first_offset < 0:
                base = int(table[0, BASE_OFFSET])
                first_offset = base if base >= 0 else int(table[0, LAST_OFFSET])
            if leader_epoch is not None:
                self._check_offsets_left(table)
            self._note_epochs(table, leader_epoch)
            if leader_epoch is None or bool((table[:, PRODUCER_ID] >= 0).any()):
                done = self._append_as_one(batches, origin, leader_epoch, now_ms, transaction_version)
                rolls += done.rolls
                if done.duplicate:
                    duplicate = done
                    continue
                written += done.bytes
                records += done.records
            else:
                rolls += self._append_one_by_one(batches, leader_epoch, now_ms, placing=written > 0)
                written += int(table[:, SIZE].sum())
                records += int(np.maximum(table[:, COUNT], 0).sum())
            if self._unflushed_since_ms is None:
                self._unflushed_since_ms = self._clock.monotonic_ms()
            self._flush_by_count()
        self.flush_if_due()
        if self._unsaved:
            self._save_state()
        if duplicate is not None and not written:
            return replace(duplicate, rolls=rolls)
        if not self._manual:
            self._set_high_watermark(self._log_end)
        append_time_ms = now_ms if self.config.message_timestamp_type == "LogAppendTime" else -1
        last_offset = self._log_end - 1
        return AppendInfo(max(first_offset, 0), last_offset, records, written, rolls, False, append_time_ms)

    def _check_offsets_left(self, table: BatchTable) -> None:
        spans = table[:, LAST_OFFSET] - table[:, BASE_OFFSET] + 1
        if int(spans.sum()) >= INT64_MAX - self._log_end:
            raise OffsetOverflow(
                f"no offsets are left for {int(spans.sum())} records behind {self._log_end}",
                partition=self.partition,
                offset=self._log_end,
            )

    def _append_one_by_one(self, batches: EncodedBatches, leader_epoch: int, now_ms: int, *, placing: bool) -> int:
        """Batches without a producer, each an append of its own; returns how many times the log rolled."""
        table = batches.table
        first = rolls = 0
        fresh = False
        while first < len(table):
            segment = self._active
            self._placing = True
            placed, reason = segment.place(
                batches.data,
                table,
                first,
                next_offset=self._log_end,
                leader_epoch=leader_epoch,
                now_ms=now_ms,
                roll_limits=RollLimits(self.config.segment_bytes, max_segment_ms(self.config) - segment.jitter_ms),
                fresh=fresh,
            )
            fresh = False
            first += placed
            self._placing = placing = placing or first > 0
            if placed:
                self._log_end = int(table[first - 1, LAST_OFFSET]) + 1
                self._producers.update_map_end_offset(self._log_end)
            if reason == ROLL_APPEND_TOO_LARGE:
                raise self._too_large(int(table[first, SIZE]))
            if reason != OK:
                self._roll(self._log_end, RollReason(reason))
                rolls += 1
                fresh = True
        return rolls

    def _append_as_one(
        self,
        batches: EncodedBatches,
        origin: AppendOrigin,
        leader_epoch: int | None,
        now_ms: int,
        transaction_version: int,
    ) -> AppendInfo:
        """Batches of a producer, a coordinator or another replica: in one segment, all or none.

        As in Kafka the roll comes before the producers are asked, so even a batch that is then refused can cause one.
        """
        data, table = batches.data, batches.table
        size = int(table[:, SIZE].sum())
        if size > self.config.segment_bytes:
            raise self._too_large(size)
        assigned = table if leader_epoch is None else _with_offsets(table, self._log_end)
        last_offset = int(assigned[-1, LAST_OFFSET])
        reason = roll_reason(
            self.config,
            self._active_facts(),
            NextAppend(size, last_offset, int(table[:, MAX_TIMESTAMP].max())),
            now_ms,
        )
        if reason is not None:
            base = int(assigned[0, BASE_OFFSET])
            if base < 0:  # a legacy set: where it begins is known only after opening it
                base = last_offset - RELATIVE_OFFSET_MAX
            self._roll(max(base, self._log_end), reason)
        try:
            entries = producer_entries(data, assigned.copy(), self._limits)
            prepared = self._producers.prepare(entries, origin, transaction_version=transaction_version)
        except DuramenError:
            if self._unsaved:
                self._save_state()
            raise
        rolls = int(reason is not None)
        if prepared.duplicate is not None:
            again = prepared.duplicate
            return AppendInfo(again.first_offset, again.last_offset, 0, 0, rolls, duplicate=True)
        segment = self._active
        self._placing = True
        placed, _ = segment.place(
            data,
            table,
            0,
            next_offset=self._log_end,
            leader_epoch=-1 if leader_epoch is None else leader_epoch,
            now_ms=now_ms,
            assign=leader_epoch is not None,
            indexes_may_fill=True,
        )
        if placed < len(table):
            raise OffsetOverflow(
                f"an append from {int(assigned[0, BASE_OFFSET])} to {last_offset} does not fit one segment",
                partition=self.partition,
                offset=last_offset,
            )
        self._log_end = last_offset + 1
        for aborted in self._producers.apply(prepared):
            segment.txn_index.append(aborted)
            self._new_names = True
        self._producers.update_map_end_offset(self._log_end)
        count = int(np.maximum(table[:, COUNT], 0).sum())
        return AppendInfo(int(assigned[0, BASE_OFFSET]), last_offset, count, size, rolls)

    def _active_facts(self) -> ActiveSegment:
        segment = self._active
        return ActiveSegment(
            base_offset=segment.base_offset,
            size_bytes=segment.size_bytes,
            first_timestamp_ms=segment.first_timestamp_ms,
            created_ms=segment.created_ms,
            jitter_ms=segment.jitter_ms,
            index_entries=segment.offset_index.entries,
            index_entries_max=segment.offset_index.max_entries,
            time_index_entries=segment.time_index.entries,
            time_index_entries_max=segment.time_index.max_entries,
        )

    def _too_large(self, size_bytes: int) -> AppendTooLarge:
        return AppendTooLarge(
            f"an append of {size_bytes} bytes; segment.bytes is {self.config.segment_bytes}",
            partition=self.partition,
            offset=self._log_end,
        )

    def _note_epochs(self, table: BatchTable, leader_epoch: int | None) -> None:
        if leader_epoch is not None:
            if leader_epoch >= 0:
                self._epochs.assign(leader_epoch, self._log_end)
            return
        for row in table.tolist():
            if row[MAGIC] < 2:  # without epochs in the log, what is known of them would mislead
                self._epochs.clear()
            elif row[LEADER_EPOCH] >= 0:
                self._epochs.assign(row[LEADER_EPOCH], row[BASE_OFFSET])

    # --- rolling ----------------------------------------------------------------------------------------------------

    def roll(self) -> int:
        """Close the active segment and begin a new one at the log end; returns its base offset. Nothing happens when
        it is empty.
        """
        with self._lock:
            self._check_writable()
            if self._active.size_bytes:
                self._roll(self._log_end, None)
                self._save_state()
            return self._active.base_offset

    def _roll(self, base_offset: int, reason: RollReason | None) -> None:
        old = self._active
        if old.base_offset == base_offset:
            # Only an index without any room rolls an empty segment; it is made anew.
            assert old.size_bytes == 0, f"roll to {base_offset} ({reason}) of a segment that begins there"
        else:
            old.seal()
            if self._recovery_point >= base_offset:
                with marking_unsynced(self._fs, self._state_path):
                    old.flush()  # no flush to come looks below the recovery point, nor does recovery
            self._producers.update_map_end_offset(base_offset)
            # Written before the data it describes is synced; a power cut leaves it unreadable at worst, and the log is
            # replayed.
            self._producers.take_snapshot(sync=False)
        try:
            new = self._new_segment(base_offset)
        except OSError as error:
            # Half a segment must not stay: the next to open the log would take its end from it.
            try:
                self._remove_stale(base_offset)
                self._producers.update_map_end_offset(self._log_end)
                if base_offset > self._log_end:
                    self._producers.delete_snapshot(base_offset)
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
        return LogSegment(
            self._fs,
            self.directory,
            base_offset,
            index_interval_bytes=self.config.index_interval_bytes,
            index_bytes=self.config.segment_index_bytes,
            created_ms=self._clock.now_ms(),
            jitter_ms=draw_jitter_ms(self.config, self._randomness),
            writable=True,
            long_lived=self._long_lived,
            preallocate_bytes=self.config.segment_bytes if self.config.preallocate and self._long_lived else 0,
            limits=self._limits,
        )

    def _remove_stale(self, base_offset: int) -> None:
        for path in mark_deleted(self._fs, self.directory, base_offset):
            self._fs.unlink(path)

    # --- flushing ---------------------------------------------------------------------------------------------------

    def flush(self, up_to: int | None = None) -> None:
        """Fsync everything below `up_to` (default: the log end); then the recovery point moves there.

        Raises OSError; the log then refuses further writes, because what the system failed to write it may have
        forgotten, and the next fsync would not say so.
        """
        with self._lock:
            self._check_writable()
            self._flush(self._log_end if up_to is None else min(up_to, self._log_end))

    def _flush(self, up_to: int) -> None:
        try:
            with marking_unsynced(self._fs, self._state_path):
                self._sync(up_to)
        except OSError as error:
            self._broken = self._broken or f"flush: {error}"
            raise

    def _write_again(self) -> None:
        """After a failed fsync: what was just checked is written once more, and only then a sync is believed.

        Indexes above the recovery point were rebuilt already.
        """
        assert self._state_path is not None
        for at, segment in enumerate(self._segments):
            following = self._segments[at + 1].base_offset if at + 1 < len(self._segments) else INT64_MAX
            if following > self._recovery_point:
                first = segment.find_batch(self._recovery_point)
                if first is not None:
                    rewrite(segment.log, first.position, segment.size_bytes)
                with marking_unsynced(self._fs, self._state_path):
                    segment.flush()
        self._flush(self._log_end)
        clear_unsynced(self._fs, self._state_path)

    def _sync(self, up_to: int) -> None:
        if up_to > self._recovery_point:
            for at, segment in enumerate(self._segments):
                end = self._segments[at + 1].base_offset if at + 1 < len(self._segments) else INT64_MAX
                if end > self._recovery_point and segment.base_offset < up_to:
                    segment.flush()
            self._sync_names()
            self._recovery_point = up_to
        if self._recovery_point >= self._log_end:
            self._unflushed_since_ms = None

    def _sync_names(self) -> None:
        if self._new_names:
            self._sync_snapshots()
            self._fs.fsync_dir(self.directory)
            self._new_names = False

    def _flush_what_was_found(self) -> None:
        """What an earlier process left unflushed is of unknown age: where there is a limit, it has reached it."""
        if self._recovery_point < self._log_end:
            self._unflushed_since_ms = self._clock.monotonic_ms()
            self._flush_by_count()
            if self.config.flush_ms < INT64_MAX:
                self._flush(self._log_end)

    def _sync_snapshots(self) -> None:
        for offset in self._producers.snapshot_offsets:
            if offset >= self._recovery_point:
                file = self._fs.open(self._producers.snapshot_path(offset))
                try:
                    file.fsync()
                finally:
                    file.close()

    def _flush_by_count(self) -> None:
        if self._log_end - self._recovery_point >= self.config.flush_messages:
            self._flush(self._log_end)

    def flush_if_due(self, *, within_ms: int = 0) -> bool:
        """Flush when the oldest unflushed record is, or `within_ms` from now would be, older than flush.ms."""
        with self._lock:
            if self._closed or self._broken is not None or self._unflushed_since_ms is None:
                return False
            if self._clock.monotonic_ms() + within_ms - self._unflushed_since_ms < self.config.flush_ms:
                return False
            self._flush(self._log_end)
            return True

    # --- high watermark, log start ----------------------------------------------------------------------------------

    def set_high_watermark(self, offset: int) -> int:
        """Let readers see everything below `offset`, clamped to the log; returns what it became."""
        with self._lock:
            self._set_high_watermark(min(max(offset, self._log_start), self._data_end))
            return self._high_watermark

    def _set_high_watermark(self, offset: int) -> None:
        self._high_watermark = offset
        self._producers.on_high_watermark_updated(offset)

    def advance_log_start(self, offset: int) -> bool:
        """Hide everything below `offset`; the files go with the next retention pass. False when it is no advance.

        Raises OffsetOutOfRange beyond the high watermark.
        """
        with self._lock:
            self._check_writable()
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
            self._epochs.truncate_from_start(offset)
            return True

    def _raise_log_start(self, offset: int) -> None:
        self._log_start = offset
        self._recovery_point = max(self._recovery_point, offset)
        self._producers.on_log_start_offset_incremented(offset)

    # --- truncating -------------------------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> bool:
        """Drop everything from `offset` on (the whole batch that holds it); False when the log ends there already."""
        with self._lock:
            self._check_writable()
            if offset < 0:
                raise OffsetOutOfRange(f"cannot truncate to {offset}", partition=self.partition, offset=offset)
            if offset >= self._log_end:
                self._epochs.truncate_from_end(self._log_end)  # an epoch may have been noted without a record
                return False
            try:
                if offset < self._segments[0].base_offset:
                    self._start_anew(offset)
                else:
                    self._truncate(offset)
            except OSError as error:
                self._broken = self._broken or f"truncation: {error}"
                raise
            return True

    def _truncate(self, offset: int) -> None:
        """Each step is on disk before the next: what is cut off must not come back behind what is written then."""
        gone = []
        while len(self._segments) > 1 and self._active.base_offset > offset:
            gone.append(self._segments.pop())
        if self._lower_recovery_point(offset) or gone:
            self._save_state()  # readers stop asking for files before these lose their names
        if gone:
            for segment in gone:
                mark_deleted(self._fs, self.directory, segment.base_offset, snapshot=True)
            self._fs.fsync_dir(self.directory)
        self._active.truncate_to(offset)
        self._active.trim_log()
        with marking_unsynced(self._fs, self._state_path):
            self._active.log.fsync()
        if not self._active.size_bytes:
            self._active.created_ms = self._clock.now_ms()
        if self._long_lived:
            self._active.activate()
        self._after_truncation(offset)

    def _after_truncation(self, offset: int) -> None:
        self._log_end = offset
        self._tail_gap = (self._active.next_offset(), offset)
        self._log_start = min(self._log_start, offset)
        self._epochs.truncate_from_end(offset)
        self._reload_producers(offset)
        # also when it stays: the producers come anew from the log and do not know which markers it has passed
        self._set_high_watermark(min(self._high_watermark, self._data_end))
        self._save_state()

    def _lower_recovery_point(self, offset: int) -> bool:
        """True when it was above: the state file must say so before new bytes come where synced ones were."""
        if offset >= self._recovery_point:
            return False
        self._told_recovery_point = max(self._told_recovery_point, self._recovery_point)
        self._recovery_point = offset
        return True

    def _start_anew(self, offset: int) -> None:
        """Remove everything and go on at `offset` with one empty segment.

        A log start that rises is on disk first; one that falls comes last. Segments go from the highest down, so that a
        log that is half removed is a shorter one, never one whose start moved by itself.
        """
        self._lower_recovery_point(offset)
        self._log_start = max(self._log_start, offset)
        self._save_state()
        for segment in reversed(self._segments):
            mark_deleted(self._fs, self.directory, segment.base_offset, snapshot=True)
        self._fs.fsync_dir(self.directory)
        self._segments = [self._new_segment(offset)]
        self._epochs.clear()
        self._producers.truncate_fully_and_start_at(offset)
        self._producers.on_log_start_offset_incremented(offset)
        self._log_start = self._log_end = self._recovery_point = offset
        self._set_high_watermark(offset)
        self._save_state()

    def start_anew_at(self, offset: int) -> None:
        with self._lock:
            self._check_writable()
            try:
                self._start_anew(offset)
            except OSError as error:
                self._broken = self._broken or f"beginning anew: {error}"
                raise

    def _reload_producers(self, end_offset: int) -> None:
        self._producers.truncate_and_reload(self._log_start, end_offset, self._clock.now_ms())
        start = max(self._producers.map_end_offset, self._log_start)
        for segment in self._segments:
            first = segment.find_batch(start)
            if first is None:
                continue
            for header in segment.headers(first.position):
                entry = producer_entry(segment, header, self._limits)
                if entry is not None and start <= header.last_offset < end_offset:
                    self._producers.apply(self._producers.prepare([entry], AppendOrigin.RECOVERY))
        self._producers.update_map_end_offset(end_offset)
        self._producers.take_snapshot()

    # --- retention --------------------------------------------------------------------------------------------------

    def apply_retention(
        self, *, policies: tuple[RetentionPolicy, ...] | None = None, dry_run: bool = False
    ) -> list[DeletedSegments]:
        """Run the passes in order and sweep `.deleted` files; returns what each pass removed (or would remove)."""
        now_ms = self._clock.now_ms()
        done = []
        with self._lock:
            self._check_writable()
            chosen = policies_of(self.config) if policies is None else policies
            for each in retention_passes(chosen, self._facts(), now_ms):
                done.append(DeletedSegments(each.policy, each.base_offsets, each.size_bytes))
                if not dry_run:
                    self._delete_prefix(len(each.segments))
            if not dry_run:
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
            self._roll(self._log_end, None)
        gone = self._segments[:count]
        self._segments = self._segments[count:]
        if self._segments[0].base_offset > self._log_start:
            self._raise_log_start(self._segments[0].base_offset)
        self._save_state()
        for segment in gone:  # not closed: a reader of this process may still be at work in it
            mark_deleted(self._fs, self.directory, segment.base_offset, snapshot=True)
            self._producers.forget_snapshot(segment.base_offset)
        self._epochs.truncate_from_start(self._log_start)

    # --- reading ----------------------------------------------------------------------------------------------------

    def fetch(
        self,
        offset: int,
        max_bytes: int,
        *,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        min_one_batch: bool = True,
    ) -> Fetched:
        """Where the bytes from `offset` on lie, as Kafka's read answers it; see `reading.fetch`."""
        committed = isolation is Isolation.READ_COMMITTED
        return fetch(self._view(isolation), offset, max_bytes, min_one_batch=min_one_batch, committed=committed)

    def records(
        self, offset: int | None = None, *, isolation: Isolation = Isolation.READ_UNCOMMITTED
    ) -> Iterator[Record]:
        """Plain records from `offset` (default: the log start) to the end the isolation allows."""
        view = self._view(isolation)
        decoder = Decoder(limits=self._limits)
        start = view.log_start_offset if offset is None else offset
        after = -1  # the first batch may begin below the start
        for chunk in read_chunks(view, start, limits=self._limits, committed=isolation is Isolation.READ_COMMITTED):
            columns = decoder.columns(
                chunk.data,
                chunk.table,
                min_offset=start,
                max_offset=view.end_offset,
                file=chunk.file,
                base_position=chunk.position,
                after=after,
            )
            for part in columns:
                yield from part.records()
            after = int(chunk.table[-1, LAST_OFFSET])

    def offset_for_timestamp(
        self, timestamp_ms: int, *, isolation: Isolation = Isolation.READ_UNCOMMITTED
    ) -> TimestampOffset | None:
        """The first record at or after a time; -1 latest, -2 earliest, -3 largest timestamp. None: there is none."""
        return offset_for_timestamp(self._view(isolation), timestamp_ms, self._limits)

    # --- state, failure, close --------------------------------------------------------------------------------------

    def _check_timestamps(self, listed: tuple[SegmentEntry, ...]) -> None:
        """Believe a segment's largest timestamp where list and time index agree; else look into the log.

        Nothing protects an index, and what is taken from it here goes into the list.
        """
        known = {(entry.base_offset, entry.size_bytes, entry.largest_timestamp_ms) for entry in listed}
        for segment in self._segments:
            if (segment.base_offset, segment.size_bytes, segment.largest.timestamp_ms) not in known:
                segment.confirm_largest()

    def _place_state(self, *, clean: bool) -> None:
        folder = None if self._state_path is None else os.path.dirname(self._state_path)
        if folder and not (clean and self._fs.exists(folder)):
            make_directory(self._fs, folder)

    def _save_state(self, *, closed: bool = False) -> None:
        if self._state_path is None:
            self._unsaved = False
            return
        segments = tuple(SegmentEntry(s.base_offset, s.size_bytes, s.largest.timestamp_ms) for s in self._segments)
        self._state = self._state.with_segments(segments, log_start_offset=self._log_start)
        first_dirty = min(max(self._state.first_dirty_offset, self._log_start), self._log_end)
        believable = self._recovery_point >= self._told_recovery_point
        self._state = replace(
            self._state,
            first_dirty_offset=first_dirty,
            producers=bool(self._producers.producers),
            transactions=self._state.transactions or bool(self._producers.producers),
            recovery_point_max=None if believable else self._recovery_point,
            closed=closed,
            losses=clipped(self._state.losses, self._log_start, self._log_end),
        )
        write_state(self._fs, self._state_path, self._state)
        self._unsaved = False

    def _check_writable(self) -> None:
        if self._closed:
            raise InvalidRecord("the log is closed", partition=self.partition)
        if self._broken is not None:
            raise DamagedLog(
                f"an earlier write failed and could not be taken back: {self._broken}",
                partition=self.partition,
                hint="Close the log and open it with recovery",
            )

    def _all_or_nothing(self) -> _Rollback:
        return _Rollback(self)

    def close(self, *, clean: bool = True) -> None:
        """Seal and close; a clean close flushes everything and leaves a producer snapshot at the log end."""
        try:
            if self._flusher is not None:
                self._flusher.stop()
        finally:
            with self._lock:
                if not self._closed:
                    self._close(clean and self._broken is None)

    def _close(self, clean: bool) -> None:
        try:
            if clean:
                self._active.seal()
                self._producers.update_map_end_offset(self._log_end)
                self._producers.take_snapshot()
                with marking_unsynced(self._fs, self._state_path):
                    self._active.flush()
                self._flush(self._log_end)
                self._fs.fsync_dir(self.directory)
                self._save_state(closed=True)
        finally:
            self._closed = True
            for segment in self._segments:
                segment.close(clean=False)

    def __enter__(self) -> PartitionLog:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _unknown_state(fs: FileSystem, directory: str, log_start_offset: int) -> PartitionState:
    """Of a log without a state file: anything may have been written to it, and compacted, unless it is new."""
    names = fs.listdir(directory) if fs.exists(directory) else []
    logs = [found for name in names if (found := parse_file_name(name)) is not None and found.kind is FileKind.LOG]
    # Compaction never touches the last segment.
    last_base = max((found.base_offset for found in logs), default=0)
    return PartitionState(log_start_offset=log_start_offset, transactions=bool(logs), thinned_offset=last_base)


def _with_offsets(table: BatchTable, next_offset: int) -> BatchTable:
    """The rows as they will be once offsets are assigned from `next_offset` on."""
    assigned = table.copy()
    spans = table[:, LAST_OFFSET] - table[:, BASE_OFFSET]
    assigned[:, LAST_OFFSET] = next_offset + np.cumsum(spans + 1) - 1
    assigned[:, BASE_OFFSET] = assigned[:, LAST_OFFSET] - spans
    return assigned


class _Rollback:
    """Takes back what an append wrote when it raises."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._end = log.log_end_offset
        self._epochs = log._epochs.entries

    def __enter__(self) -> None:
        self._log._placing = False
        self._log._producers.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        log = self._log
        if error is None or log._broken is not None or log._closed:
            return
        try:
            if log._placing:
                log._producers.take_back()
                log._truncate(self._end)
                log._active.trim_log()
            # A refused append has told its epoch all the same, as in Kafka; one that failed has not.
            if log._placing or not isinstance(error, DuramenError):
                log._epochs.restore(self._epochs)
        except BaseException as second:
            log._broken = f"{error}; then {second}"
            if not isinstance(second, Exception):
                raise
