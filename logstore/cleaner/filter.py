"""The filter of compaction: which batches and records of a chunk stay, and the chunk as it is written then.

The rules are Kafka's, in its order: transactions, then batches, then records, then the form of what is written.
Batches are judged by kernels; only transactional and control batches are looked at one by one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logstore.cleaner.transactions import Transactions
from logstore.cleaner.verdicts import Judged, RecordRules, judge
from logstore.errors import BufferLimit, CorruptBatch
from logstore.limits import INT32_MAX, INT64_MAX, INT64_MIN, Limits
from logstore.records import slots
from logstore.records.codes import EXPLAINED, OK
from logstore.records.compression import CODECS
from logstore.records.decoder import Decoder
from logstore.records.encoder import EncodedBatches
from logstore.records.marks import (
    DELETE,
    KEEP_RECORD,
    MARK_ACTION,
    MARK_CODEC,
    MARK_HORIZON,
    MARK_JOIN,
    MARK_KEPT,
    MARK_MAY_GO,
    MARK_STAYS,
    REBUILD,
    Marks,
    new_marks,
)
from logstore.records.memory import Memory
from logstore.records.native import address_of, kernels
from logstore.records.offset_map import OffsetMap
from logstore.records.survivors import Survivors
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    CODEC_MASK,
    CONTROL_BIT,
    COUNT,
    CRC,
    HEADER_BYTES,
    LAST_OFFSET,
    LEADER_EPOCH,
    MAGIC,
    PAYLOAD_SIZE,
    POSITION,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    SIZE,
    SKIP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchTable,
    new_table,
)
from logstore.segment.batches import Chunk
from logstore.segment.txn_index import AbortedTransaction

#: why records go; the names appear in receipts and metrics
SUPERSEDED = "superseded"
KEYLESS = "keyless"
TOMBSTONE = "tombstone"
ABORTED = "aborted"
MARKER = "marker"
EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class LastRecord:
    """A producer's last data offset, None when it has written nothing but markers, and its epoch."""

    last_data_offset: int | None
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """What the filter decides by. The defaults give Kafka's rules."""

    now_ms: int
    delete_retention_ms: int
    #: one past the last offset the map knows about
    end_offset: int
    first_uncleanable_offset: int
    last_records: Mapping[int, LastRecord] = field(default_factory=dict)
    #: records older than this lose their value; 0: never
    expired_before_ms: int = 0
    #: thinned neighbours are joined up to this size; 0: never
    merge_bytes: int = 0
    #: codec of all that is written; None: as it was
    codec_id: int | None = None
    #: codec that all batches should get at some point; batches of another one are counted. None: any
    wanted_codec_id: int | None = None
    survivors: Survivors | None = None


@dataclass(slots=True)
class Counts:
    """What a filter has counted so far."""

    records_read: int = 0
    records: int = 0
    tombstones: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    #: the earliest delete horizon among what stays; INT64_MAX: none
    next_horizon_ms: int = INT64_MAX
    #: the earliest timestamp of a record that stays with its value; kept only where records expire. INT64_MAX: none
    oldest_value_ms: int = INT64_MAX
    #: batches that stay and have another codec than is wanted
    other_codec: int = 0

    def remove(self, reason: str, count: int) -> None:
        if count:
            self.removed[reason] = self.removed.get(reason, 0) + count

    def add(self, other: Counts) -> None:
        self.records_read += other.records_read
        self.records += other.records
        self.tombstones += other.tombstones
        self.next_horizon_ms = min(self.next_horizon_ms, other.next_horizon_ms)
        self.oldest_value_ms = min(self.oldest_value_ms, other.oldest_value_ms)
        self.other_codec += other.other_codec
        for reason, count in other.removed.items():
            self.remove(reason, count)


@dataclass(frozen=True, slots=True)
class Filtered:
    """A part of a chunk as it is to be written; `changed` when it is not what it was. Valid until the next one."""

    position: int
    end_position: int
    changed: bool
    marks: Marks
    table: BatchTable
    first: int
    last: int
    keep: npt.NDArray[np.uint8]


class FilterBuffers:
    """Memory and decoder that filters use one after the other. Not for several threads at once."""

    def __init__(self, offset_map: OffsetMap, *, limits: Limits) -> None:
        self.offset_map = offset_map
        self.limits = limits
        self.decoder = Decoder(limits=limits, headers=False, control=True)
        self.memory = Memory(blocks=3)


class Filter:
    """For chunks of one log, in order where it has transactions. Not for several threads at once."""

    def __init__(self, buffers: FilterBuffers, settings: FilterSettings, transactions: Transactions) -> None:
        self._map = buffers.offset_map
        self._settings = settings
        self._transactions = transactions
        self._decoder = buffers.decoder
        self._memory = buffers.memory
        self._limits = buffers.limits
        self.counts = Counts()
        #: index entries of markers that stay, since they were last taken
        self.aborted: list[AbortedTransaction] = []

    # --- judging ----------------------------------------------------------------------------------------------------

    def parts(self, chunk: Chunk, *, keep_legacy_tombstones: bool) -> Iterator[Filtered]:
        """The chunk in parts whose payloads are in memory, each judged. Raises CorruptBatch, DecompressionLimit."""
        table = chunk.table
        marks = new_marks(len(table))
        block = self._block(marks)
        self._mark_apart(chunk, table, marks)
        kernels().judge_batches(address_of(table), len(table), address_of(block))
        settings = self._settings
        rules = RecordRules(
            settings.end_offset,
            settings.now_ms,
            keep_legacy_tombstones,
            settings.expired_before_ms,
            settings.survivors,
        )
        first = 0
        while first < len(table):
            last = self._decoder.open(chunk.data, table, first, file=chunk.file, base_position=chunk.position)
            keep, judged = judge(self._map, chunk, first, last, marks, rules)
            wanted_codec_id = self._codec_of(table[first:last])
            block[slots.B_CODEC] = -1 if wanted_codec_id is None else wanted_codec_id
            kernels().choose_actions(address_of(table), first, last, address_of(block))
            changed = bool(block[slots.B_CHANGED])
            if settings.merge_bytes:
                changed |= self._join(table[first:last], marks[first:last])
            self._count(judged, block)
            self._look_ahead(chunk, table, marks, first, last, keep, recodes=wanted_codec_id == settings.codec_id)
            begin = chunk.position + int(table[first, POSITION])
            end = chunk.position + int(table[last - 1, POSITION] + table[last - 1, SIZE])
            yield Filtered(begin, end, changed, marks, table, first, last, keep)
            first = last

    def _block(self, marks: Marks) -> npt.NDArray[np.int64]:
        settings = self._settings
        block = np.zeros(slots.B_SLOTS, dtype=np.int64)
        block[slots.B_MARKS] = address_of(marks)
        block[slots.B_FIRST_UNCLEANABLE] = settings.first_uncleanable_offset
        block[slots.B_NOW_MS] = settings.now_ms
        block[slots.B_DELETE_RETENTION_MS] = settings.delete_retention_ms
        if settings.survivors is not None:
            block[slots.B_SURVIVORS] = address_of(settings.survivors.bits)
            block[slots.B_SURVIVORS_FIRST] = settings.survivors.first_offset
            block[slots.B_SURVIVORS_END] = settings.survivors.end_offset
        block[slots.B_NEXT_HORIZON] = INT64_MAX
        return block

    def _codec_of(self, table: BatchTable) -> int | None:
        """The codec the part is to get; None, as it was, where a batch could become larger than a reader holds.

        Only batches from elsewhere are so large: what this store encodes fits before it is compressed.
        """
        if self._settings.codec_id is None or int(table[:, PAYLOAD_SIZE].max()) > self._limits.written_batch_bytes:
            return None
        return self._settings.codec_id

    def _mark_apart(self, chunk: Chunk, table: BatchTable, marks: Marks) -> None:
        """Mark what transactions and producers decide, batch by batch."""
        may_go, entries = self._transactions.read(chunk, table, self._decoder)
        self.aborted += entries
        marks[:, MARK_MAY_GO] = may_go
        if self._settings.last_records:
            for row in np.nonzero(table[:, PRODUCER_ID] >= 0)[0].tolist():
                marks[row, MARK_STAYS] = self._is_last_of_producer(table[row])

    def _is_last_of_producer(self, batch: npt.NDArray[np.int64]) -> bool:
        last = self._settings.last_records.get(int(batch[PRODUCER_ID]))
        if last is None:
            return False
        if last.last_data_offset is not None:
            return last.last_data_offset == int(batch[LAST_OFFSET])
        control = batch[MAGIC] == 2 and int(batch[ATTRIBUTES]) & CONTROL_BIT != 0
        return control and last.producer_epoch == int(batch[PRODUCER_EPOCH])

    def _join(self, table: BatchTable, marks: Marks) -> bool:
        """Join neighbouring batches of the same kind that lost records; whether any were joined."""
        joinable = (
            (table[:, MAGIC] == 2)
            & (table[:, PRODUCER_ID] < 0)
            & ((table[:, ATTRIBUTES] & (CONTROL_BIT | TRANSACTIONAL_BIT | TIMESTAMP_TYPE_BIT)) == 0)
            & (marks[:, MARK_KEPT] > 0)
        )
        rows = np.nonzero(marks[:, MARK_KEPT] > 0)[0].tolist()
        sizes = table[:, PAYLOAD_SIZE] * marks[:, MARK_KEPT] // np.maximum(table[:, COUNT], 1)
        leader, previous, size = -1, -1, 0
        for row in rows:
            same = (
                leader >= 0
                and joinable[row]
                and table[row, LEADER_EPOCH] == table[leader, LEADER_EPOCH]
                and marks[row, MARK_HORIZON] == marks[leader, MARK_HORIZON]
                and marks[row, MARK_CODEC] == marks[leader, MARK_CODEC]
                and size + int(sizes[row]) <= self._settings.merge_bytes
                and int(table[row, LAST_OFFSET] - table[leader, BASE_OFFSET]) <= INT32_MAX
                # an emptied batch in between must stay where it is
                and not (marks[previous + 1 : row, MARK_ACTION] != DELETE).any()
            )
            if same:
                marks[row, MARK_JOIN] = 1
                marks[row, MARK_ACTION] = marks[leader, MARK_ACTION] = REBUILD
                size += int(sizes[row])
            else:
                leader, size = (row, int(sizes[row])) if joinable[row] else (-1, 0)
            previous = row
        return bool(marks[:, MARK_JOIN].any())

    def _count(self, judged: Judged, block: npt.NDArray[np.int64]) -> None:
        """Add up what was counted in a part, and reset the counters."""
        counts = self.counts
        counts.remove(SUPERSEDED, judged.superseded + int(block[slots.B_SUPERSEDED]))
        counts.remove(KEYLESS, judged.keyless)
        counts.remove(TOMBSTONE, judged.tombstones)
        counts.remove(EXPIRED, judged.nulled)
        counts.remove(ABORTED, int(block[slots.B_ABORTED]))
        counts.remove(MARKER, int(block[slots.B_MARKERS]))
        counts.records_read += int(block[slots.B_READ])
        counts.records += int(block[slots.B_KEPT])
        counts.tombstones += int(block[slots.B_TOMBSTONES])
        counts.next_horizon_ms = min(counts.next_horizon_ms, int(block[slots.B_NEXT_HORIZON]))
        block[slots.B_SUPERSEDED :] = 0
        block[slots.B_NEXT_HORIZON] = INT64_MAX

    def _look_ahead(
        self,
        chunk: Chunk,
        table: BatchTable,
        marks: Marks,
        first: int,
        last: int,
        keep: npt.NDArray[np.uint8],
        *,
        recodes: bool,
    ) -> None:
        """Note when a part must be looked at again even if nothing new comes."""
        settings, counts = self._settings, self.counts
        if (
            settings.wanted_codec_id is not None and recodes
        ):  # what cannot be recompressed must not make the log due again
            data = (table[first:last, ATTRIBUTES] & CONTROL_BIT) == 0
            other = (marks[first:last, MARK_KEPT] > 0) & (marks[first:last, MARK_CODEC] != settings.wanted_codec_id)
            counts.other_codec += int((data & other).sum())
        if settings.expired_before_ms:
            rows = table[first:last][table[first:last, SKIP] == 0]
            data = np.repeat((rows[:, ATTRIBUTES] & CONTROL_BIT) == 0, rows[:, COUNT])
            kept = (data & (keep[: len(data)] == KEEP_RECORD)).astype(np.uint8)
            found = self._decoder.decode(
                table, first, last, INT64_MIN, INT64_MAX, chunk.file, chunk.position, keep=kept
            )
            times = found.timestamps_ms[(found.values.valid != 0) & (found.timestamps_ms >= 0)]
            if len(times):
                counts.oldest_value_ms = min(counts.oldest_value_ms, int(times.min()))

    # --- writing ----------------------------------------------------------------------------------------------------

    def written(self, chunk: Chunk, part: Filtered) -> EncodedBatches | None:
        """The part as batches to append; None when nothing of it stays. Valid until the next one."""
        marks, table, first, last = part.marks, part.table, part.first, part.last
        room = kernels().rewrite_room(address_of(table), address_of(marks), first, last)
        out = self._memory.block(max(room, 1))
        made = new_table(last - first)
        block = np.zeros(slots.W_SLOTS, dtype=np.int64)
        block[slots.W_KEEP] = address_of(part.keep)
        block[slots.W_OUT] = address_of(out)
        block[slots.W_TABLE] = address_of(made)
        code = kernels().rewrite(
            address_of(chunk.data), address_of(table), address_of(marks), first, last, address_of(block)
        )
        if code != OK:
            blamed = table[int(block[slots.W_BATCH])]
            raise CorruptBatch(
                EXPLAINED[code],
                file=chunk.file,
                position=chunk.position + int(blamed[POSITION]),
                offset=int(blamed[BASE_OFFSET]),
            )
        size, count = int(block[slots.W_OUT_SIZE]), int(block[slots.W_TABLE_N])
        assert size <= room
        if not count:
            return None
        encoded = EncodedBatches(out[:size], made[:count])
        return self._compressed(encoded) if (made[:count, SKIP] == 0).any() else encoded

    def _compressed(self, batches: EncodedBatches) -> EncodedBatches:
        """Compress the payloads that still need it, side by side."""
        finish = kernels().finish_batch
        source = batches.data.data
        packed = bytearray()
        done = []
        for position, size, attributes, is_done in batches.table[:, (POSITION, SIZE, ATTRIBUTES, SKIP)].tolist():
            at = len(packed)
            if is_done:
                packed += source[position : position + size]
                done.append((at, size, 0))
                continue
            packed += source[position : position + HEADER_BYTES]
            packed += CODECS[attributes & CODEC_MASK].compress(source[position + HEADER_BYTES : position + size], None)
            if len(packed) - at > self._limits.read_buffer_bytes:
                raise BufferLimit(
                    f"a batch would have {len(packed) - at} bytes once it is rewritten; a read buffer may have "
                    f"{self._limits.read_buffer_bytes}",
                    hint="Nothing was changed; raise read_buffer_bytes of the limits",
                )
            done.append((at, len(packed) - at, 1))
        data = np.frombuffer(packed, dtype=np.uint8)
        address = address_of(data)
        for row, (at, size, fresh) in enumerate(done):
            batches.table[row, POSITION] = at
            batches.table[row, SIZE] = size
            if fresh:
                batches.table[row, CRC] = finish(address + at, size)
        return EncodedBatches(data, batches.table)
