"""Operations on one partition's log, drawn from a seed.

An operation is small and plain, so that it can be written down before it is carried out: what it appends follows from
its own seed. Owns how operations are drawn and carried out, on any file system, and where a log and the recovery point
its caller keeps lie. What a log must hold after them is `oracle`'s.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from logstore.clock import Clock
from logstore.config import LogConfig
from logstore.files import File, FileSystem, OsFile, OsFileSystem, read_whole, replace_file
from logstore.records.arrow import HEADERS_TYPE
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.partition_writer import PartitionWriter

PARTITION = TopicPartition("orders", 0)
PRODUCER_IDS = (11, 12, 13)
#: no operation appends more records than this
RECORDS_MAX = 8


class _UnsyncedFile(OsFile):
    def fsync(self) -> None:
        pass


class UnsyncedFiles(OsFileSystem):
    """The operating system's files without waiting for the disk: a killed process cannot tell the difference."""

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _UnsyncedFile(os.dup(file.fileno()), path)

    def fsync_dir(self, path: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a log, its state file and the recovery point kept by its caller lie."""

    root: str

    @property
    def directory(self) -> str:
        return os.path.join(self.root, "logs", str(PARTITION))

    @property
    def state_path(self) -> str:
        return os.path.join(self.root, "state", str(PARTITION))

    @property
    def recovery_point_path(self) -> str:
        return os.path.join(self.root, "recovery-point")

    def recovery_point(self, fs: FileSystem) -> int:
        try:
            return int(read_whole(fs, self.recovery_point_path, limit=100))
        except FileNotFoundError:
            return 0

    def open(self, fs: FileSystem, settings: Settings, clock: Clock, *, clean: bool = False) -> PartitionWriter:
        """As the owner of a partition opens it: with the recovery point it wrote down."""
        return PartitionWriter.open(
            self.directory,
            partition=PARTITION,
            config=settings.config,
            clean=clean,
            state_path=self.state_path,
            recovery_point=self.recovery_point(fs),
            clock=clock,
            fs=fs,
            long_lived=settings.long_lived,
            background_flush=settings.background_flush,
            randomness=random.Random(7),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The topic's settings, and how its log is opened."""

    topic: dict[str, str] = field(default_factory=dict)
    long_lived: bool = True
    background_flush: bool = False

    @property
    def config(self) -> LogConfig:
        return LogConfig.from_mapping(self.topic)


def draw_settings(rng: random.Random, **given: str) -> Settings:
    """Small segments and indexes, so that a few operations meet every roll, and now and then a limit on loss."""
    topic = {
        "segment.bytes": str(rng.choice((400, 900, 2500))),
        "index.interval.bytes": str(rng.choice((0, 120, 4096))),
        "segment.index.bytes": str(rng.choice((36, 120, 1200))),
        "file.delete.delay.ms": rng.choice(("0", "60000")),
        "preallocate": rng.choice(("true", "false", "false")),
        "retention.bytes": rng.choice(("-1", "1500", "4000")),
        "retention.ms": rng.choice(("-1", "40")),
        "max.message.bytes": "4000",
    }
    return Settings(topic | given, long_lived=rng.random() < 0.7)


@dataclass(frozen=True, slots=True)
class Operation:
    """`seed` decides the records; `now_ms` is when it was drawn, which their timestamps follow."""

    kind: str
    seed: int = 0
    now_ms: int = 0
    count: int = 0
    offset: int = 0
    codec_id: int = 0
    leader_epoch: int = 0
    producer_id: int = -1
    sequence: int = -1
    transactional: bool = False
    commit: bool = False

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def appends(self) -> bool:
        return self.kind in ("append", "columns", "batch", "marker")


def records_of(operation: Operation) -> list[Record]:
    """What the operation appends; nothing in it repeats."""
    rng = random.Random(operation.seed)
    made = []
    for number in range(operation.count):
        size = rng.choice((0, 5, 20, 120))
        value = None if rng.random() < 0.1 else f"{operation.seed}/{number}:".encode() + rng.randbytes(size)
        key = f"k{rng.randrange(20)}".encode()
        headers = (("h", rng.randbytes(3)),) if rng.random() < 0.2 else ()
        made.append(Record(key, value, operation.now_ms + rng.randrange(-20, 20), headers))
    return made


def batch_of(operation: Operation) -> bytes:
    return encode_batch(
        columns_of(records_of(operation)),
        BatchOptions(
            codec_id=operation.codec_id,
            producer_id=operation.producer_id,
            producer_epoch=0,
            base_sequence=operation.sequence,
            transactional=operation.transactional,
        ),
    )


def leader_epoch(now_ms: int) -> int:
    """A leader's epoch never goes back, even when the log forgets that there was one."""
    return (now_ms >> 6) & 0x0FFFFFFF


def draw_operation(rng: random.Random, log: PartitionWriter, now_ms: int) -> Operation:
    """The next thing to do with `log`; only what it would accept is drawn."""
    kinds = {
        "append": 10,
        "columns": 4,
        "batch": 8,
        "roll": 2,
        "flush": 4,
        "truncate": 2,
        "advance": 2,
        "retain": 2,
        "reopen": 1,
        "anew": 0.3,
    }
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    start, end = log.log_start_offset, log.log_end_offset
    epoch = leader_epoch(now_ms)
    seed = rng.getrandbits(40)
    count = rng.randint(1, RECORDS_MAX)
    if kind in ("append", "columns"):
        return Operation(kind, seed, now_ms, count, codec_id=rng.choice((0, 0, 0, 1, 3, 4)), leader_epoch=epoch)
    if kind == "batch":
        return _draw_batch(rng, log, seed, now_ms, count, epoch)
    if kind == "truncate" and end > start:
        near = max(start, end - 10)
        return Operation(kind, offset=rng.randint(near if rng.random() < 0.7 else start, end - 1))
    if kind == "advance" and log.high_watermark > start:
        return Operation(kind, offset=rng.randint(start + 1, min(start + 15, log.high_watermark)))
    if kind == "flush":
        return Operation(kind, offset=end if rng.random() < 0.7 else rng.randint(start, end))
    if kind == "anew":
        return Operation(kind, offset=rng.choice((end, end + 5, max(start - 3, 0), rng.randint(start, end))))
    if kind in ("truncate", "advance"):
        kind = "roll"
    return Operation(kind)


def _draw_batch(rng: random.Random, log: PartitionWriter, seed: int, now_ms: int, count: int, epoch: int) -> Operation:
    producer_id = rng.choice(PRODUCER_IDS)
    state = log.producers.producers.get(producer_id)
    in_transaction = state is not None and state.current_txn_first_offset is not None
    if in_transaction and rng.random() < 0.4:
        return Operation(
            "marker",
            now_ms=now_ms,
            count=1,
            leader_epoch=epoch,
            producer_id=producer_id,
            commit=rng.random() < 0.5,
        )
    return Operation(
        "batch",
        seed,
        now_ms,
        min(count, log.config.segment_bytes // 200),  # a producer's batch is not divided among segments
        codec_id=rng.choice((0, 0, 1)),
        leader_epoch=epoch,
        producer_id=producer_id,
        # a producer that is not known begins where none has been: it would come with another epoch else
        sequence=rng.randrange(1 << 30) if state is None else state.last_sequence + 1,
        transactional=in_transaction or rng.random() < 0.4,
    )


class Writer:
    """A log under work. `log` is another one after a "reopen"."""

    def __init__(self, place: Place, fs: FileSystem, settings: Settings, clock: Clock, *, clean: bool = False) -> None:
        self._place = place
        self._fs = fs
        self._settings = settings
        self._clock = clock
        self.log = place.open(fs, settings, clock, clean=clean)

    def carry_out(self, operation: Operation) -> None:
        log = self.log
        if operation.kind == "append":
            log.append(
                records_of(operation),
                codec_id=operation.codec_id,
                batch_bytes=200,
                leader_epoch=operation.leader_epoch,
            )
        elif operation.kind == "columns":
            log.append_columns(
                _table(records_of(operation)),
                codec_id=operation.codec_id,
                batch_bytes=300,
                leader_epoch=operation.leader_epoch,
            )
        elif operation.kind == "batch":
            log.append_batches(batch_of(operation), leader_epoch=operation.leader_epoch)
        elif operation.kind == "marker":
            log.append_marker(
                commit=operation.commit,
                producer_id=operation.producer_id,
                producer_epoch=0,
                leader_epoch=operation.leader_epoch,
            )
        elif operation.kind == "roll":
            log.roll()
        elif operation.kind == "truncate":
            log.truncate_to(operation.offset)
        elif operation.kind == "advance":
            log.advance_log_start(operation.offset)
        elif operation.kind == "retain":
            log.apply_retention()
        elif operation.kind == "anew":
            log.truncate_fully_and_start_at(operation.offset)
        elif operation.kind == "flush":
            log.flush(operation.offset)
            self._write_recovery_point()
        elif operation.kind == "reopen":
            log.close()
            self._write_recovery_point()
            self.log = self._place.open(self._fs, self._settings, self._clock, clean=True)
        else:
            raise ValueError(operation.kind)

    def _write_recovery_point(self) -> None:
        replace_file(self._fs, self._place.recovery_point_path, str(self.log.recovery_point).encode())

    def content_end(self) -> int:
        """One past the last offset that a batch on disk has; a truncation in a batch leaves the log end above it."""
        for segment in reversed(self.log.segments):
            if segment.size_bytes:
                return segment.next_offset()
        return self.log.log_start_offset


def _table(records: list[Record]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([record.key for record in records], pa.binary()),
            "value": pa.array([record.value for record in records], pa.binary()),
            "timestamp": pa.array([record.timestamp_ms for record in records], pa.int64()),
            "headers": pa.array(
                [[{"key": key, "value": value} for key, value in record.headers] for record in records], HEADERS_TYPE
            ),
        }
    )
