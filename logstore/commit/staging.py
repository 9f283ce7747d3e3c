"""Staged files: encoded batches of one task, durable before anything is decided about them.

A staged file holds pieces (whole batches of one topic partition) in the order of the rows, then a directory of the
pieces, then a trailer. It is written once by one task attempt under a name nobody else uses, fsynced and closed; only
its summary travels. Until its plan is flushed it is the redo log.

    piece* directory(JSON) trailer = directoryPosition:8 directorySize:4 crc32c(directory):4 "DSTG0001"
"""

from __future__ import annotations

import json
import socket
import struct
import uuid
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from logstore.commit.staged_output import StagedOutput
from logstore.config import LogConfig
from logstore.errors import AppendTooLarge, InvalidRecord, InvalidTimestamp, UnknownTopic
from logstore.limits import DEFAULT_LIMITS
from logstore.partition.validation import check_columns, check_rows, check_sizes, codec_level, topic_codec_id
from logstore.records.arrow import columns_of_batch
from logstore.records.columns import Columns
from logstore.records.compression import codec_by_name
from logstore.records.encoder import BATCH_BYTES, BatchOptions, Encoder
from logstore.records.encoder import check_columns as check_encodable
from logstore.records.partitioner import Routed, route
from logstore.records.table import COUNT, SIZE, BatchTable

TRAILER = struct.Struct(">qII8s")
TRAILER_MAGIC = b"DSTG0001"
#: encoded batches of a partition are held until they are a piece of this size: each piece is read and appended alone
_PIECE_BYTES, _PIECE_BYTES_MIN = 2 << 20, 64 << 10
_HELD_BYTES_MAX = 32 << 20
#: of topics with more partitions than this, batches are held in one block together
_BLOCKS_MAX = _HELD_BYTES_MAX // _PIECE_BYTES_MIN


@dataclass(frozen=True, slots=True)
class TopicTarget:
    """A topic as a task needs it: where rows go and which rules they meet. Travels to executors."""

    name: str
    id: str
    partitions: int
    config: LogConfig
    config_version: int
    #: the largest batch, before compression, that can be appended, read and compacted
    batch_bytes_max: int = DEFAULT_LIMITS.written_batch_bytes


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """Producer settings under Kafka's names: compression.type, batch.size."""

    compression_type: str = "none"
    batch_size: int = BATCH_BYTES


@dataclass(slots=True)
class _Held:
    """Encoded batches of one partition that were not written yet."""

    block: npt.NDArray[np.uint8]
    size: int = 0
    records: int = 0


class _Shared:
    """Encoded batches of many partitions in one block, however many there are, until it is full."""

    def __init__(self, size: int) -> None:
        self.block = np.empty(size, dtype=np.uint8)
        self.used = 0
        self.pieces: list[tuple[tuple[str, int], int, int, int]] = []  # key, begin, size, records

    def add(self, key: tuple[str, int], size: int, records: int) -> None:
        self.pieces.append((key, self.used, size, records))
        self.used += size

    def sorted(self) -> tuple[npt.NDArray[np.uint8], list[tuple[tuple[str, int], int, int]]]:
        """The bytes by partition, and of each its size and records; the block is free again."""
        gathered = np.empty(self.used, dtype=np.uint8)
        found: list[tuple[tuple[str, int], int, int]] = []
        position = 0
        for key, begin, size, records in sorted(self.pieces, key=lambda piece: piece[0]):  # stable
            gathered[position : position + size] = self.block[begin : begin + size]
            position += size
            if found and found[-1][0] == key:
                found[-1] = (key, found[-1][1] + size, found[-1][2] + records)
            else:
                found.append((key, size, records))
        self.pieces, self.used = [], 0
        return gathered, found


@dataclass(frozen=True, slots=True)
class PartitionCount:
    topic_id: str
    partition: int
    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A staged file that is an object: its size and checksum, and its pieces in order."""

    size_bytes: int
    crc: int
    #: topic id, partition, size, records
    pieces: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StagedFile:
    """What a task reports about its file."""

    name: str
    counts: tuple[PartitionCount, ...]
    host: str
    encode_ms: int = 0
    #: topics in which some rows went where a `partition` column said, not where their key belongs
    placed: tuple[str, ...] = ()
    #: rows that went to the dead-letter topic instead
    dead_letters: int = 0
    #: of an object: what a plan says of it, so that nobody has to look
    stored: Stored | None = None

    @property
    def records(self) -> int:
        return sum(count.records for count in self.counts)


class StagedWriter:
    """Writes one staged file. `write` takes rows in order; `finish` makes it durable; `abandon` removes it."""

    def __init__(self, output: StagedOutput, *, options: EncodeOptions, now_ms: int) -> None:
        self._output = output
        self._options = options
        #: the timestamp of rows that have none
        self.now_ms = now_ms
        self.name = output.name
        self._position = 0
        self._pieces: list[tuple[str, int, int, int, int]] = []  # topic id, partition, position, size, records
        self._held: dict[tuple[str, int], _Held] = {}
        self._shared: _Shared | None = None
        self._encoders: dict[str, Encoder] = {}
        self._sticky = uuid.uuid4().int
        self._placed: set[str] = set()

    def write(self, target: TopicTarget, rows: pa.RecordBatch, partitions: pa.Array | None = None) -> None:
        """Encode rows of one topic: columns key, value, timestamp?, headers?; `partitions` wins over the key's hash.

        Raises InvalidRecord and its kind, RecordTooLarge, InvalidTimestamp; the file is of no use then.
        """
        _check_times(rows, target.name)
        columns = columns_of_batch(rows)
        codec_id = topic_codec_id(target.config, codec_by_name(self._options.compression_type).id)
        check_columns(columns, target.config, self.now_ms, codec_id, target.name)
        check_rows(columns, target.batch_bytes_max, target.name)
        # Rows without key keep to one partition for a while, as Kafka's producers do, so that batches fill.
        self._sticky += 1
        given = _given(partitions)
        if given is not None:
            self._placed.add(target.id)
        routed = _route(columns, target.partitions, given, self._sticky % target.partitions)
        encoder = self._encoder(target, codec_id)
        check_encodable(columns)
        for partition in np.flatnonzero(np.diff(routed.starts)).tolist():
            if target.partitions > _BLOCKS_MAX:
                self._share(target, partition, encoder, columns, routed.rows(partition))
            else:
                self._hold(target, partition, encoder, columns, routed.rows(partition))

    def write_batch(self, target: TopicTarget, partition: int, batch: bytes) -> None:
        """Take one ready-made batch, of one record: a transaction marker."""
        key = (target.id, partition)
        held = self._held.setdefault(key, _Held(np.empty(_PIECE_BYTES_MIN, dtype=np.uint8)))
        self._room(key, held, len(batch))[: len(batch)] = np.frombuffer(batch, dtype=np.uint8)
        held.size += len(batch)
        held.records += 1

    def _encoder(self, target: TopicTarget, codec_id: int) -> Encoder:
        encoder = self._encoders.get(target.id)
        if encoder is None:
            config = target.config
            encoder = self._encoders[target.id] = Encoder(
                BatchOptions(
                    codec_id=codec_id,
                    level=codec_level(config, codec_id) if codec_id else None,
                    batch_bytes=min(
                        self._options.batch_size, config.max_message_bytes, config.segment_bytes, target.batch_bytes_max
                    ),
                    batch_bytes_max=target.batch_bytes_max,
                    default_timestamp_ms=self.now_ms,
                )
            )
        return encoder

    def _hold(
        self, target: TopicTarget, partition: int, encoder: Encoder, columns: Columns, selection: npt.NDArray[np.int64]
    ) -> None:
        key = (target.id, partition)
        held = self._held.get(key)
        if held is None:
            size = max(min(_PIECE_BYTES, _HELD_BYTES_MAX // target.partitions), _PIECE_BYTES_MIN)
            held = self._held[key] = _Held(np.empty(size, dtype=np.uint8))
        for batches in encoder.encode(columns, selection, partial(self._room, key, held), checked=True):
            check_sizes(batches.table, target.config, target.name)
            _check_fits(batches.table, target)
            size = len(batches.data)
            if encoder.compresses:
                self._room(key, held, size)[:size] = batches.data
            held.size += size
            held.records += int(batches.table[:, COUNT].sum())

    def _share(
        self, target: TopicTarget, partition: int, encoder: Encoder, columns: Columns, selection: npt.NDArray[np.int64]
    ) -> None:
        shared = self._shared = self._shared or _Shared(_HELD_BYTES_MAX)
        for batches in encoder.encode(columns, selection, self._shared_room, checked=True):
            check_sizes(batches.table, target.config, target.name)
            _check_fits(batches.table, target)
            size = len(batches.data)
            if encoder.compresses:
                self._shared_room(size)[:size] = batches.data
            shared.add((target.id, partition), size, int(batches.table[:, COUNT].sum()))

    def _shared_room(self, least: int) -> npt.NDArray[np.uint8]:
        shared = self._shared
        assert shared is not None
        if len(shared.block) - shared.used < max(least, self._options.batch_size):
            self._write_shared()
            self._output.start_writing()
        if len(shared.block) < least:
            shared.block = np.empty(least, dtype=np.uint8)
        return shared.block[shared.used :]

    def _write_shared(self) -> None:
        if self._shared is None or not self._shared.used:
            return
        data, pieces = self._shared.sorted()
        self._output.write(data.data)
        for key, size, records in pieces:
            self._pieces.append((*key, self._position, size, records))
            self._position += size

    def _room(self, key: tuple[str, int], held: _Held, least: int) -> npt.NDArray[np.uint8]:
        """Where the next batches of a partition go; what is held is written out when there is too little."""
        if len(held.block) - held.size < max(least, self._options.batch_size):
            self._write_piece(key, held)
            self._output.start_writing()
        if len(held.block) < least:
            held.block = np.empty(least, dtype=np.uint8)
        return held.block[held.size :]

    def _write_piece(self, key: tuple[str, int], held: _Held) -> None:
        if not held.size:
            return
        self._output.write(held.block[: held.size].data)
        self._pieces.append((*key, self._position, held.size, held.records))
        self._position += held.size
        held.size = held.records = 0

    def finish(self, *, encode_ms: int = 0) -> StagedFile:
        """What is held, directory and trailer; durable when this returns."""
        for key, held in self._held.items():
            self._write_piece(key, held)
        self._write_shared()
        topics = sorted({piece[0] for piece in self._pieces})
        numbers = {topic_id: number for number, topic_id in enumerate(topics)}
        pieces = [[numbers[piece[0]], *piece[1:]] for piece in self._pieces]
        directory = json.dumps({"topics": topics, "pieces": pieces}, separators=(",", ":")).encode()
        trailer = TRAILER.pack(self._position, len(directory), crc32c(directory), TRAILER_MAGIC)
        self._output.write(directory + trailer)
        checksum = self._output.finish()
        totals: dict[tuple[str, int], list[int]] = {}
        for topic_id, partition, _, size, records in self._pieces:
            total = totals.setdefault((topic_id, partition), [0, 0])
            total[0] += records
            total[1] += size
        counts = tuple(PartitionCount(*key, *total) for key, total in sorted(totals.items()))
        stored = None
        if checksum is not None:
            size_bytes = self._position + len(directory) + len(trailer)
            stored = Stored(
                size_bytes, checksum, tuple((piece[0], piece[1], piece[3], piece[4]) for piece in self._pieces)
            )
        placed = tuple(sorted(self._placed))
        return StagedFile(self.name, counts, socket.gethostname(), encode_ms, placed, stored=stored)

    def abandon(self) -> None:
        self._output.abandon()


def _check_times(rows: pa.RecordBatch, topic: str) -> None:
    """Raises InvalidTimestamp below zero, as Kafka's producers do; no timestamp at all is a null."""
    if "timestamp" not in rows.schema.names or not rows.num_rows:
        return
    times = rows.column("timestamp")
    if not (pa.types.is_timestamp(times.type) or pa.types.is_integer(times.type)):
        return
    earliest = pc.min(times.cast(pa.int64())).as_py()
    if earliest is not None and earliest < 0:
        row = pc.index(times.cast(pa.int64()), earliest).as_py()
        raise InvalidTimestamp(
            f"row {row} has the timestamp {earliest}; a timestamp is at least 0",
            partition=topic,
            row=row,
            hint="Leave it null for the time of encoding",
        )


def _check_fits(table: BatchTable, target: TopicTarget) -> None:
    """Raises AppendTooLarge for a batch that no segment takes or no reader: once it is committed, it must be possible
    to append it.
    """
    largest = int(table[:, SIZE].max()) if len(table) else 0
    if largest > target.batch_bytes_max:  # as stored: packing can make it larger
        raise AppendTooLarge(
            f"a batch of {largest} bytes; the largest that can be read has {target.batch_bytes_max}",
            partition=target.name,
            hint="Send smaller records",
        )
    if largest > target.config.segment_bytes:
        raise AppendTooLarge(
            f"a batch of {largest} bytes; segment.bytes is {target.config.segment_bytes}",
            partition=target.name,
            hint="Send smaller records, or raise segment.bytes of the topic",
        )


def _given(partitions: pa.Array | None) -> pa.Array | None:
    """The partitions asked for, as int64; None when no row asks."""
    if partitions is None or partitions.null_count == len(partitions):
        return None
    if not pa.types.is_integer(partitions.type):
        raise InvalidRecord(f"column 'partition' is {partitions.type}; expected int")
    return partitions.cast(pa.int64())


def _route(columns: Columns, partitions: int, given: pa.Array | None, sticky: int) -> Routed:
    if given is None:
        return route(columns.keys, columns.count, partitions, sticky=sticky)
    valid, values = given.buffers()
    return route(
        columns.keys,
        columns.count,
        partitions,
        given=np.frombuffer(values, dtype=np.int64)[given.offset : given.offset + len(given)],
        # An address, so the array must outlive the call.
        given_valid_address=valid.address if given.null_count else 0,
        given_valid_bit=given.offset,
        sticky=sticky,
    )


def target_named(targets: dict[str, TopicTarget], name: str) -> TopicTarget:
    """Raises UnknownTopic."""
    target = targets.get(name)
    if target is None:
        hint = "Create it, or set the option that creates topics"
        raise UnknownTopic(f"there is no topic {name!r}", topic=name, hint=hint)
    return target
