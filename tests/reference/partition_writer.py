"""A writer of partition logs as a broker is one: the reference that the product's appends are held to.

`PartitionWriter` is a `PartitionLog` that stays open and takes appends of every kind: plain records, Arrow columns, a
client's batches, a replica's, a coordinator's markers. It reads its own log, keeps flush.messages and flush.ms, lets
its high watermark be set, preallocates its files. Nothing of the product appends this way: a store's appends go through
staging, commit and `Appender`. Tests write logs with it, and compare.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.config import LogConfig
from logstore.directory.deletion import sweep_deleted
from logstore.directory.few_files import FewFiles
from logstore.errors import AppendTooLarge, DuramenError, InvalidRecord, OffsetOverflow, OffsetsOutOfOrder
from logstore.files import OS_FILES, FileSystem
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, RELATIVE_OFFSET_MAX, Limits
from logstore.partition.environment import LastKnown, LogEnvironment
from logstore.partition.log import PartitionLog
from logstore.partition.producer_state import DEFAULT_EXPIRATION_MS, AppendOrigin
from logstore.partition.producers import producer_entries
from logstore.partition.reading import LogView, offset_for_timestamp, read_chunks
from logstore.partition.retention import RetentionPolicy, policies_of, retention_passes
from logstore.partition.roll import RollReason, roll_limits
from logstore.partition.validation import check_columns, check_sizes, codec_level, topic_codec_id
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
from logstore.segment.segment import LogSegment, Numbering
from logstore.segment.time_index import TimestampOffset
from logstore.topic import TopicPartition
from reference.client_batches import check_readable, client_batches, whole_batches
from reference.fetching import Fetched, Isolation, fetch
from reference.flusher import Flusher
from reference.preallocation import preallocate
from reference.roll_rule import ActiveSegment, NextAppend, draw_jitter_ms, roll_reason

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Buffer

    from logstore.store import LogStore
    from logstore.topics.registry import Topic


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


@contextlib.contextmanager
def writing(
    store: LogStore, topic: Topic, number: int, *, what: str = "test", clock: Clock | None = None
) -> Iterator[PartitionWriter]:
    """`store.writing`, with a log that takes appends: its end is published when all went well."""
    with store.writing(topic, number, what=what, clock=clock) as log:
        yield PartitionWriter.of(log)


class PartitionWriter(PartitionLog):
    """Open with `PartitionWriter.open`, or take an open log with `PartitionWriter.of`."""

    @classmethod
    def open(  # type: ignore[override]
        cls,
        directory: str,
        *,
        partition: TopicPartition,
        clean: bool,
        config: LogConfig = LogConfig(),  # noqa: B008 (frozen)
        state_path: str | None = None,
        recovery_point: int = 0,
        log_start_offset: int = 0,
        high_watermark: int | None = None,
        keep_offset: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        fs: FileSystem = OS_FILES,
        limits: Limits = DEFAULT_LIMITS,
        producer_expiration_ms: int = DEFAULT_EXPIRATION_MS,
        long_lived: bool = True,
        manual_high_watermark: bool = False,
        **habits: Any,
    ) -> PartitionWriter:
        """As `PartitionLog.open`.

        Without `manual_high_watermark` the high watermark follows the log end, as on a broker that is its only replica.
        `long_lived` preallocates files. `background_flush` false lets nobody keep flush.ms while nothing is appended.
        """
        if manual_high_watermark and high_watermark is None:
            high_watermark = 0
        log = super().open(
            directory,
            partition=partition,
            config=config,
            known=LastKnown(clean, recovery_point, log_start_offset, high_watermark, keep_offset),
            environment=LogEnvironment(fs if long_lived else FewFiles(fs), clock, limits, producer_expiration_ms),
            state_path=state_path,
        )
        log._begin(long_lived=long_lived, manual_high_watermark=manual_high_watermark, **habits)
        return log

    @staticmethod
    def of(log: PartitionLog) -> PartitionWriter:
        """The same open log, which from now on takes appends; as short-lived as a store opens it."""
        log.__class__ = PartitionWriter
        assert isinstance(log, PartitionWriter)
        log._begin(long_lived=False, background_flush=False)
        return log

    def _begin(
        self,
        *,
        long_lived: bool,
        manual_high_watermark: bool = False,
        background_flush: bool = True,
        randomness: random.Random | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._placing = False  # an append has begun to write
        self._long_lived = long_lived
        self._manual = manual_high_watermark
        self._randomness = randomness or random.Random()
        self._unflushed_since_ms: int | None = None  # monotonic time of the oldest append not yet on disk
        self._flusher: Flusher | None = None
        self.active.jitter_ms = draw_jitter_ms(self.config, self._randomness)
        if long_lived:
            preallocate(self.active, self.config.segment_bytes if self.config.preallocate else 0)
        self._flush_what_was_found()
        if background_flush and self.config.flush_ms < INT64_MAX:
            self._flusher = Flusher(self, self.config.flush_ms)

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
        from reference.arrow_columns import columns_from_arrow

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
        now_ms = self.clock.now_ms()
        with self._lock, self._all_or_nothing():
            if origin is AppendOrigin.REPLICATION:
                self._check_replicated(given.table)
                return self._append_prepared([given], origin, None, now_ms, transaction_version)
            parts: Iterable[EncodedBatches] = [given]
            if origin is AppendOrigin.CLIENT:
                parts = list(client_batches(given, self.config, now_ms, self.limits, self.partition))
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
            timestamp_ms=self.clock.now_ms(),
        )
        return self.append_batches(
            marker, origin=AppendOrigin.COORDINATOR, leader_epoch=leader_epoch, transaction_version=transaction_version
        )

    def _append_columns(
        self, parts: Iterable[Columns], codec_id: int, batch_bytes: int, leader_epoch: int
    ) -> AppendInfo:
        now_ms = self.clock.now_ms()
        codec_id = topic_codec_id(self.config, codec_id)
        options = BatchOptions(
            codec_id=codec_id,
            level=codec_level(self.config, codec_id) if codec_id else None,
            batch_bytes=min(
                batch_bytes,
                self.config.max_message_bytes,
                self.config.segment_bytes,
                self.limits.written_batch_bytes,
            ),
            batch_bytes_max=self.limits.written_batch_bytes,
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
        self.check_writable()
        first_offset = self._log_end if leader_epoch is not None else -1
        records = written = rolls = 0
        duplicate: AppendInfo | None = None
        for batches in parts:
            table = batches.table
            if not len(table):
                continue
            check_readable(table, self.limits, self.partition)
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
                self._unflushed_since_ms = self.clock.monotonic_ms()
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
            segment = self.active
            self._placing = True
            roll = roll_limits(self.config, segment.jitter_ms, now_ms=now_ms, fresh=fresh)
            placed, reason = segment.place(batches.data, table, first, Numbering(self._log_end, leader_epoch), roll)
            fresh = False
            first += placed
            self._placing = placing = placing or first > 0
            if placed:
                self._log_end = int(table[first - 1, LAST_OFFSET]) + 1
                self.producers.update_map_end_offset(self._log_end)
            if reason == ROLL_APPEND_TOO_LARGE:
                raise self._too_large(int(table[first, SIZE]))
            if reason != OK:
                self.roll_at(self._log_end, RollReason(reason))
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
            self.roll_at(max(base, self._log_end), reason)
        try:
            entries = producer_entries(data, assigned.copy(), self.limits)
            prepared = self.producers.prepare(entries, origin, transaction_version=transaction_version)
        except DuramenError:
            if self._unsaved:
                self._save_state()
            raise
        rolls = int(reason is not None)
        if prepared.duplicate is not None:
            again = prepared.duplicate
            return AppendInfo(again.first_offset, again.last_offset, 0, 0, rolls, duplicate=True)
        segment = self.active
        self._placing = True
        numbering = None if leader_epoch is None else Numbering(self._log_end, leader_epoch)
        placed, _ = segment.place(data, table, 0, numbering)
        if placed < len(table):
            raise OffsetOverflow(
                f"an append from {int(assigned[0, BASE_OFFSET])} to {last_offset} does not fit one segment",
                partition=self.partition,
                offset=last_offset,
            )
        self._log_end = last_offset + 1
        for aborted in self.producers.apply(prepared):
            segment.txn_index.append(aborted)
            self._new_names = True
        self.producers.update_map_end_offset(self._log_end)
        count = int(np.maximum(table[:, COUNT], 0).sum())
        return AppendInfo(int(assigned[0, BASE_OFFSET]), last_offset, count, size, rolls)

    def _active_facts(self) -> ActiveSegment:
        segment = self.active
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
                self.epochs.assign(leader_epoch, self._log_end)
            return
        for row in table.tolist():
            if row[MAGIC] < 2:  # without epochs in the log, what is known of them would mislead
                self.epochs.clear()
            elif row[LEADER_EPOCH] >= 0:
                self.epochs.assign(row[LEADER_EPOCH], row[BASE_OFFSET])

    # --- rolling, truncating, retaining -----------------------------------------------------------------------------

    def roll(self) -> int:
        with self._lock:
            return super().roll()

    def _new_segment(self, base_offset: int) -> LogSegment:
        segment = super()._new_segment(base_offset)
        segment.jitter_ms = draw_jitter_ms(self.config, self._randomness)
        if self._long_lived:
            preallocate(segment, self.config.segment_bytes if self.config.preallocate else 0)
        return segment

    def truncate_to(self, offset: int) -> bool:
        with self._lock:
            return super().truncate_to(offset)

    def _after_truncation(self, offset: int) -> None:
        if self._long_lived:
            preallocate(self.active)
        super()._after_truncation(offset)

    def truncate_fully_and_start_at(self, offset: int) -> None:
        with self._lock:
            self.check_writable()
            try:
                self._truncate_fully_and_start_at(offset)
            except OSError as error:
                self._broken = self._broken or f"starting again: {error}"
                raise

    def advance_log_start(self, offset: int) -> bool:
        with self._lock:
            return super().advance_log_start(offset)

    def apply_retention(  # type: ignore[override]
        self, *, policies: tuple[RetentionPolicy, ...] | None = None, dry_run: bool = False
    ) -> list[DeletedSegments]:
        """With policies of one's own; of a dry run what would be removed."""
        now_ms = self.clock.now_ms()
        done = []
        with self._lock:
            self.check_writable()
            chosen = policies_of(self.config) if policies is None else policies
            if policies is None and not dry_run:
                return [DeletedSegments(e.policy, e.base_offsets, e.size_bytes) for e in super().apply_retention()]
            for each in retention_passes(chosen, self._facts(), now_ms):
                done.append(DeletedSegments(each.policy, each.base_offsets, each.size_bytes))
                if not dry_run:
                    self._delete_prefix(len(each.segments))
            if not dry_run:
                sweep_deleted(self._fs, self.directory, delay_ms=self.config.file_delete_delay_ms, now_ms=now_ms)
        return done

    # --- flushing ---------------------------------------------------------------------------------------------------

    def flush(self, up_to: int | None = None) -> None:
        """Fsync everything below `up_to` (default: the log end); then the recovery point moves there.

        Raises OSError; the log then refuses further writes, because what the system failed to write it may have
        forgotten, and the next fsync would not say so.
        """
        with self._lock:
            self.check_writable()
            self._flush(self._log_end if up_to is None else min(up_to, self._log_end))

    def _sync(self, up_to: int) -> None:
        super()._sync(up_to)
        if self._recovery_point >= self._log_end:
            self._unflushed_since_ms = None

    def _flush_what_was_found(self) -> None:
        """What an earlier process left unflushed is of unknown age: where there is a limit, it has reached it."""
        if self._recovery_point < self._log_end:
            self._unflushed_since_ms = self.clock.monotonic_ms()
            self._flush_by_count()
            if self.config.flush_ms < INT64_MAX:
                self._flush(self._log_end)

    def _flush_by_count(self) -> None:
        if self._log_end - self._recovery_point >= self.config.flush_messages:
            self._flush(self._log_end)

    def flush_if_due(self, *, within_ms: int = 0) -> bool:
        """Flush when the oldest unflushed record is, or `within_ms` from now would be, older than flush.ms."""
        with self._lock:
            if self._closed or self._broken is not None or self._unflushed_since_ms is None:
                return False
            if self.clock.monotonic_ms() + within_ms - self._unflushed_since_ms < self.config.flush_ms:
                return False
            self._flush(self._log_end)
            return True

    # --- high watermark ---------------------------------------------------------------------------------------------

    def set_high_watermark(self, offset: int) -> int:
        """Let readers see everything below `offset`, clamped to the log; returns what it became."""
        with self._lock:
            self._set_high_watermark(min(max(offset, self._log_start), self._data_end))
            return self._high_watermark

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
        decoder = Decoder(limits=self.limits)
        start = view.log_start_offset if offset is None else offset
        after = -1  # the first batch may begin below the start
        for chunk in read_chunks(view, start, limits=self.limits, committed=isolation is Isolation.READ_COMMITTED):
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
        return offset_for_timestamp(self._view(isolation), timestamp_ms, self.limits)

    # --- failure, close ---------------------------------------------------------------------------------------------

    def _all_or_nothing(self) -> _Rollback:
        return _Rollback(self)

    def close(self, *, clean: bool = True) -> None:
        try:
            if self._flusher is not None:
                self._flusher.stop()
        finally:
            with self._lock:
                super().close(clean=clean)


def _with_offsets(table: BatchTable, next_offset: int) -> BatchTable:
    """The rows as they will be once offsets are assigned from `next_offset` on."""
    assigned = table.copy()
    spans = table[:, LAST_OFFSET] - table[:, BASE_OFFSET]
    assigned[:, LAST_OFFSET] = next_offset + np.cumsum(spans + 1) - 1
    assigned[:, BASE_OFFSET] = assigned[:, LAST_OFFSET] - spans
    return assigned


class _Rollback:
    """Takes back what an append wrote when it raises."""

    def __init__(self, log: PartitionWriter) -> None:
        self._log = log
        self._end = log.log_end_offset
        self._epochs = log.epochs.entries

    def __enter__(self) -> None:
        self._log._placing = False
        self._log.producers.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        log = self._log
        if error is None or log._broken is not None or log._closed:
            return
        try:
            if log._placing:
                log.producers.take_back()
                log._truncate(self._end)
                log.active.trim_log()
            # A refused append has told its epoch all the same, as in Kafka; one that failed has not.
            if log._placing or not isinstance(error, DuramenError):
                log.epochs.restore(self._epochs)
        except BaseException as second:
            log._broken = f"{error}; then {second}"
            if not isinstance(second, Exception):
                raise
