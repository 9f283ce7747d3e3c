"""The filter of compaction: which batches and records of a chunk stay, and the chunk as it is written then.

The rules are Kafka's, in its order: transactions, then batches, then records, then the form of what is written.
Batches are judged in columns; only transactional and control batches are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logstore.cleaner.dedupe_map import DedupeMap
from logstore.cleaner.transactions import Transactions
from logstore.errors import CorruptBatch
from logstore.limits import INT32_MAX, INT64_MAX, Limits
from logstore.records import slots
from logstore.records.codes import EXPLAINED, OK
from logstore.records.compression import CODECS
from logstore.records.decoder import Decoder
from logstore.records.encoder import EncodedBatches
from logstore.records.marks import (
    DELETE,
    EMPTY,
    MARK_ACTION,
    MARK_CODEC,
    MARK_HORIZON,
    MARK_JOIN,
    MARK_KEPT,
    MARK_NULLED,
    MARK_TOMBSTONES,
    REBUILD,
    VERBATIM,
    Marks,
    new_marks,
)
from logstore.records.memory import Memory
from logstore.records.native import address_of, kernels
from logstore.records.survivors import Survivors
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_TIMESTAMP,
    CODEC_MASK,
    CONTROL_BIT,
    COUNT,
    CRC,
    DELETE_HORIZON_BIT,
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

_RECORD_GROWTH = 16  # a record written anew: its deltas and length may take that many bytes more

#: why records go; the names stand in receipts and metrics
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
    """What the filter goes by. Kafka's rules are those with nothing else given."""

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
    survivors: Survivors | None = None


@dataclass(slots=True)
class Counts:
    """What a filter has met so far."""

    records_read: int = 0
    records: int = 0
    tombstones: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    #: the earliest delete horizon among what stays; INT64_MAX: none
    next_horizon_ms: int = INT64_MAX

    def remove(self, reason: str, count: int) -> None:
        if count:
            self.removed[reason] = self.removed.get(reason, 0) + count

    def add(self, other: Counts) -> None:
        self.records_read += other.records_read
        self.records += other.records
        self.tombstones += other.tombstones
        self.next_horizon_ms = min(self.next_horizon_ms, other.next_horizon_ms)
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


class Filter:
    """For the chunks of one log, in order. Not for several threads at once."""

    def __init__(
        self, offset_map: DedupeMap, settings: FilterSettings, transactions: Transactions, *, limits: Limits
    ) -> None:
        self._map = offset_map
        self._settings = settings
        self._transactions = transactions
        self._decoder = Decoder(limits=limits, headers=False, control=True)
        self._memory = Memory(blocks=3)
        self.counts = Counts()
        #: index entries of markers that stay, since they were last taken
        self.aborted: list[AbortedTransaction] = []

    # --- judging ----------------------------------------------------------------------------------------------------

    def parts(self, chunk: Chunk, *, keep_legacy_tombstones: bool) -> Iterator[Filtered]:
        """The chunk in parts whose payloads are at hand, each judged. Raises CorruptBatch, DecompressionLimit."""
        table = chunk.table
        marks = new_marks(len(table))
        table[:, SKIP] = 0
        retain_empty, discard = self._judge_batches(chunk, table, marks)
        settings = self._settings
        first = 0
        while first < len(table):
            last = self._decoder.open(chunk.data, table, first, file=chunk.file, base_position=chunk.position)
            keep, judged = self._map.judge(
                table,
                first,
                last,
                marks,
                max_offset=settings.end_offset,
                now_ms=settings.now_ms,
                keep_legacy_tombstones=keep_legacy_tombstones,
                expired_before_ms=settings.expired_before_ms,
                survivors=settings.survivors,
                file=chunk.file,
                base_position=chunk.position,
            )
            part = slice(first, last)
            self._choose_actions(table[part], marks[part], retain_empty[part], discard[part])
            if settings.merge_bytes:
                self._join(table[part], marks[part])
            for reason, count in (
                (SUPERSEDED, judged.superseded),
                (KEYLESS, judged.keyless),
                (TOMBSTONE, judged.tombstones),
                (EXPIRED, judged.nulled),
            ):
                self.counts.remove(reason, count)
            self._count(table[part], marks[part])
            begin = chunk.position + int(table[first, POSITION])
            end = chunk.position + int(table[last - 1, POSITION] + table[last - 1, SIZE])
            changed = bool((marks[part, MARK_ACTION] != VERBATIM).any())
            yield Filtered(begin, end, changed, marks, table, first, last, keep)
            first = last

    def _judge_batches(
        self, chunk: Chunk, table: BatchTable, marks: Marks
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Marks what is decided without looking at records; which batches must stay even empty, which may go."""
        settings = self._settings
        attributes = table[:, ATTRIBUTES]
        v2 = table[:, MAGIC] == 2
        retain_empty = table[:, LAST_OFFSET] + 1 == settings.first_uncleanable_offset
        control = v2 & ((attributes & CONTROL_BIT) != 0)
        discard, entries = self._transactions.read(chunk, table, self._decoder)
        self.aborted += entries
        if settings.last_records:
            for row in np.nonzero(table[:, PRODUCER_ID] >= 0)[0].tolist():
                retain_empty[row] |= self._is_last_of_producer(table[row], bool(control[row]))
        passed = ((attributes & DELETE_HORIZON_BIT) != 0) & (table[:, BASE_TIMESTAMP] <= settings.now_ms)
        drop = discard & (~control | passed)
        superseded = np.zeros(len(table), dtype=bool)
        if settings.survivors is not None:
            superseded = (
                v2 & ~control & ~drop & settings.survivors.none_in(table[:, BASE_OFFSET], table[:, LAST_OFFSET])
            )
            self.counts.remove(SUPERSEDED, int(table[superseded, COUNT].sum()))
        table[:, SKIP] = drop | control | superseded | (v2 & (table[:, COUNT] == 0))
        marks[:, MARK_KEPT] = np.where(control & ~drop, table[:, COUNT], 0)
        marks[:, MARK_CODEC] = attributes & CODEC_MASK  # opening a legacy set leaves none in the table
        self.counts.remove(ABORTED, int(table[drop & ~control, COUNT].sum()))
        self.counts.remove(MARKER, int(table[drop & control, COUNT].sum()))
        return retain_empty, discard

    def _is_last_of_producer(self, batch: npt.NDArray[np.int64], control: bool) -> bool:
        last = self._settings.last_records.get(int(batch[PRODUCER_ID]))
        if last is None:
            return False
        if last.last_data_offset is not None:
            return last.last_data_offset == int(batch[LAST_OFFSET])
        return control and last.producer_epoch == int(batch[PRODUCER_EPOCH])

    def _choose_actions(
        self, table: BatchTable, marks: Marks, retain_empty: npt.NDArray[np.bool_], discard: npt.NDArray[np.bool_]
    ) -> None:
        settings = self._settings
        attributes = table[:, ATTRIBUTES]
        v2 = table[:, MAGIC] == 2
        kept = marks[:, MARK_KEPT] > 0
        has_horizon = v2 & ((attributes & DELETE_HORIZON_BIT) != 0)
        control = (attributes & CONTROL_BIT) != 0
        sets_horizon = ~has_horizon & kept & ((marks[:, MARK_TOMBSTONES] > 0) | (control & discard))
        whole = v2 & (marks[:, MARK_KEPT] == table[:, COUNT]) & (marks[:, MARK_NULLED] == 0)
        codec = marks[:, MARK_CODEC].copy()
        new_codec = codec if settings.codec_id is None else np.where(control, codec, settings.codec_id)
        already_empty = (
            v2
            & (table[:, SIZE] == HEADER_BYTES)
            & (table[:, BASE_TIMESTAMP] == -1)
            & ((attributes & (CODEC_MASK | DELETE_HORIZON_BIT)) == 0)
        )
        action = np.where(whole & ~sets_horizon & (codec == new_codec), VERBATIM, REBUILD)
        empty = np.where(retain_empty, np.where(already_empty, VERBATIM, EMPTY), DELETE)
        marks[:, MARK_ACTION] = np.where(kept, action, empty)
        marks[:, MARK_CODEC] = new_codec
        marks[:, MARK_HORIZON] = np.where(
            sets_horizon,
            settings.now_ms + settings.delete_retention_ms,
            np.where(has_horizon, table[:, BASE_TIMESTAMP], -1),
        )

    def _join(self, table: BatchTable, marks: Marks) -> None:
        """Neighbours that nothing tells apart, and that were thinned, become one batch."""
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

    def _count(self, table: BatchTable, marks: Marks) -> None:
        counts = self.counts
        data = (table[:, ATTRIBUTES] & CONTROL_BIT) == 0
        counts.records_read += int(np.maximum(table[:, COUNT], 0)[data].sum())
        counts.records += int(marks[data, MARK_KEPT].sum())
        counts.tombstones += int(marks[data, MARK_TOMBSTONES].sum())
        awaited = (marks[:, MARK_TOMBSTONES] > 0) | (~data & (marks[:, MARK_KEPT] > 0))
        horizons = marks[awaited & (marks[:, MARK_HORIZON] >= 0), MARK_HORIZON]
        if len(horizons):
            counts.next_horizon_ms = min(counts.next_horizon_ms, int(horizons.min()))

    # --- writing ----------------------------------------------------------------------------------------------------

    def written(self, chunk: Chunk, part: Filtered) -> EncodedBatches | None:
        """The part as batches to append; None when nothing of it stays. Valid until the next one."""
        marks, table, first, last = part.marks, part.table, part.first, part.last
        rows = slice(first, last)
        action = marks[rows, MARK_ACTION]
        rebuilt = action == REBUILD
        room = int(table[rows, SIZE][action == VERBATIM].sum()) + HEADER_BYTES * (last - first)
        room += int(table[rows, PAYLOAD_SIZE][rebuilt].sum())
        room += _RECORD_GROWTH * int(marks[rows, MARK_KEPT][rebuilt].sum())
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
        """The same with the payloads compressed that are yet to be, side by side."""
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
            done.append((at, len(packed) - at, 1))
        data = np.frombuffer(packed, dtype=np.uint8)
        address = address_of(data)
        for row, (at, size, fresh) in enumerate(done):
            batches.table[row, POSITION] = at
            batches.table[row, SIZE] = size
            if fresh:
                batches.table[row, CRC] = finish(address + at, size)
        return EncodedBatches(data, batches.table)
