"""One workload given to two logs: our `PartitionWriter` performs it, Kafka's own log class repeats it, both compared.

`Twins` performs an operation on our log at once and notes it for Kafka, which gets all of them in one request at the
next `check`. What was asked can therefore depend on our log's state; whether Kafka agrees is judged afterwards. Owns
the correspondence of records, settings and errors between the two. Never decides what a workload consists of.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.kafka import Kafka, KafkaBatch, KafkaRecord, LogRun, LogState, Op, OpResult, batch, record
from logstore.cleaner.eligibility import CleanerFacts, CleanerRules, SegmentAge
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.errors import DuramenError
from logstore.files import File, OsFile, OsFileSystem
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.roll import RollReason
from logstore.partition.snapshot import decode_snapshot
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.partition_writer import AppendInfo, PartitionWriter

NOW_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LEGACY_CODECS = CODECS[:4]
PARTITION = TopicPartition("topic", 0)

#: what Kafka throws (the cause, where it has one) and what we raise
ERRORS = {
    "CorruptRecordException": {"CorruptBatch"},
    "InvalidRecordException": {"InvalidRecord", "NullKey"},
    "InvalidTimestampException": {"InvalidTimestamp"},
    "RecordTooLargeException": {"RecordTooLarge"},
    "RecordBatchTooLargeException": {"AppendTooLarge"},
    "OffsetOutOfRangeException": {"OffsetOutOfRange"},
    "OutOfOrderSequenceException": {"OutOfOrderSequence"},
    "InvalidProducerEpochException": {"InvalidProducerEpoch"},
    "InvalidTxnStateException": {"InvalidTransactionState"},
    "TransactionCoordinatorFencedException": {"TransactionCoordinatorFenced"},
    "UnexpectedAppendOffsetException": {"OffsetsOutOfOrder"},
    "OffsetsOutOfOrderException": {"OffsetsOutOfOrder"},
    "IllegalArgumentException": {"OffsetOutOfRange"},
}


class _UnsyncedFile(OsFile):
    def fsync(self) -> None:
        pass


class UnsyncedFiles(OsFileSystem):
    """The operating system's files, without waiting for the disk: bytes are judged here, not durability."""

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        flags = os.O_CLOEXEC | (os.O_RDWR if writable or create else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        return _UnsyncedFile(os.open(path, flags, 0o644), path)

    def fsync_dir(self, path: str) -> None:
        pass


class FixedJitter(random.Random):
    """The jitter a request to Kafka states, in place of a random one."""

    def __init__(self, jitter_ms: int) -> None:
        super().__init__(0)
        self.jitter_ms = jitter_ms

    def randrange(self, *args: Any, **kwargs: Any) -> int:
        return self.jitter_ms


class ObservedLog(PartitionWriter):
    """Our log, counting why it rolled."""

    rolls: Counter[str]

    def roll_at(self, base_offset: int, reason: RollReason | None) -> None:
        name = "explicit" if reason is None else reason.name
        if reason is RollReason.TIME:
            name += " by record" if self.active.first_timestamp_ms >= 0 else " by clock"
        self.rolls[name] += 1
        super().roll_at(base_offset, reason)


# --- records on both sides --------------------------------------------------------------------------------------------


def for_kafka(records: Iterable[Record]) -> list[dict[str, Any]]:
    return [record(r.key, r.value, r.timestamp_ms, r.headers) for r in records]


def as_kafka(found: Record) -> KafkaRecord:
    return KafkaRecord(found.offset, found.timestamp_ms, found.key, found.value, found.headers)


def random_bytes(rng: random.Random, longest: int) -> bytes:
    """Half of it compressible."""
    size = rng.randrange(longest + 1)
    return rng.randbytes(size) if rng.random() < 0.5 else bytes(rng.choices(b"abcd", k=1)) * size


def random_records(
    rng: random.Random,
    now_ms: int,
    *,
    most: int = 5,
    longest: int = 60,
    null_keys: bool = True,
    no_timestamp: float = 0.1,
    headers: bool = True,
) -> list[Record]:
    """Records around a time, now and then without timestamp, key, value, or with headers."""
    untimed = rng.random() < no_timestamp
    spread_ms = rng.choice((0, 3, 40, 3000))
    out = []
    for _ in range(rng.randint(1, most)):
        key = None if null_keys and rng.random() < 0.1 else b"k%d" % rng.randrange(8) if rng.random() < 0.9 else b""
        value = None if rng.random() < 0.1 else random_bytes(rng, longest)
        timestamp_ms = -1 if untimed or rng.random() < no_timestamp / 10 else max(now_ms - rng.randint(0, spread_ms), 0)
        pairs: tuple[tuple[str, bytes | None], ...] = ()
        if headers and rng.random() < 0.1:
            pairs = tuple(
                (rng.choice(("", "h", "grüße-✓")), None if rng.random() < 0.3 else rng.randbytes(rng.randrange(9)))
                for _ in range(rng.randint(1, 3))
            )
        out.append(Record(key, value, timestamp_ms, pairs))
    return out


# --- the two logs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What our log answered, to be held against Kafka's `OpResult`; None where there is nothing to compare."""

    what: str
    error: str | None
    message: str | None
    offsets: tuple[int, int] | None
    count: int | None
    log_end_offset: int
    active_segment: int


class Twins:
    """Our log in `root/ours/topic-0` and Kafka's in `root/kafka/topic-0`, both opened cleanly again at every check."""

    def __init__(
        self,
        kafka: Kafka,
        root: Path,
        config: Mapping[str, Any],
        *,
        now_ms: int = NOW_MS,
        jitter_ms: int = 0,
        hold_high_watermark: bool = False,
    ) -> None:
        self.kafka = kafka
        self.directory = root / "ours" / str(PARTITION)
        self.kafka_directory = root / "kafka" / str(PARTITION)
        self.config = dict(config)
        self.clock = ManualClock(now_ms)
        self.jitter_ms = jitter_ms
        self.rolls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.duplicates = 0
        self.held = hold_high_watermark
        self._begin()

    def _begin(self) -> None:
        self._ops: list[dict[str, Any]] = []
        self._outcomes: list[Outcome] = []
        self._opened_ms = self.clock.now_ms()
        self._opened_jitter_ms = self.jitter_ms
        self._jitter = FixedJitter(self.jitter_ms)
        self.log: ObservedLog = ObservedLog.open(  # type: ignore[assignment]
            str(self.directory),
            partition=PARTITION,
            config=LogConfig.from_mapping(self.config),
            clean=True,
            state_path=str(self.directory.parent / "state"),
            clock=self.clock,
            fs=UnsyncedFiles(),
            randomness=self._jitter,
            background_flush=False,
            manual_high_watermark=self.held,
        )
        self.log.rolls = self.rolls
        self._log_start_offset = self.log.log_start_offset
        self.opened_sizes = {segment.base_offset: segment.size_bytes for segment in self.log.segments}

    # ----- operations

    def _do(self, op: dict[str, Any], what: str, act: Any) -> AppendInfo | None:
        error = message = None
        answer: Any = None
        try:
            answer = act()
        except DuramenError as refused:
            error, message = type(refused).__name__, str(refused)
            self.errors[error] += 1
        offsets = None
        if isinstance(answer, AppendInfo):
            offsets = (answer.first_offset, answer.last_offset)
            self.duplicates += answer.duplicate
        count = len(answer) if isinstance(answer, list) else int(answer) if isinstance(answer, bool) else None
        self._ops.append(op)
        active = self.log.segments[-1].base_offset
        self._outcomes.append(Outcome(what, error, message, offsets, count, self.log.log_end_offset, active))
        return answer if isinstance(answer, AppendInfo) else None

    def append_records(self, records: Sequence[Record], leader_epoch: int = 0, codec: str = "none") -> None:
        """Our encoder on one side, Kafka's builder on the other."""
        op = Op.append_records(for_kafka(records), leader_epoch, codec=codec)
        codec_id = CODECS.index(codec)
        self._do(
            op,
            "append_records",
            lambda: self.log.append(records, leader_epoch=leader_epoch, codec_id=codec_id, batch_bytes=1 << 30),
        )

    def build(self, records: Iterable[Record] = (), **fields: Any) -> bytes:
        """A batch from Kafka's builder."""
        return self.kafka.build_batches([batch(for_kafka(records), **fields)])[0]

    def append_batch(self, data: bytes, leader_epoch: int = 0, transaction_version: int = 1) -> AppendInfo | None:
        """A client's ready-made batch."""
        return self._do(
            Op.append(data, leader_epoch=leader_epoch, transaction_version=transaction_version),
            "append_batch",
            lambda: self.log.append_batches(data, leader_epoch=leader_epoch, transaction_version=transaction_version),
        )

    def replicate(self, data: bytes) -> None:
        """A batch as a follower gets it, offsets and leader epoch its own."""
        self._do(
            Op.append(data, origin="replication", leader_epoch=2**31 - 1),
            "replicate",
            lambda: self.log.append_batches(data, origin=AppendOrigin.REPLICATION),
        )

    def marker(
        self,
        kind: str,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int = 0,
        leader_epoch: int = 0,
        transaction_version: int = 1,
    ) -> None:
        self._do(
            Op.marker(kind, producer_id, producer_epoch, coordinator_epoch, None, leader_epoch, transaction_version),
            f"{kind} marker",
            lambda: self.log.append_marker(
                commit=kind == "commit",
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                coordinator_epoch=coordinator_epoch,
                leader_epoch=leader_epoch,
                transaction_version=transaction_version,
            ),
        )

    def set_clock(self, now_ms: int) -> None:
        self._do(Op.clock(now_ms), "clock", lambda: self.clock.set(now_ms))

    def set_jitter(self, jitter_ms: int) -> None:
        def act() -> None:
            self._jitter.jitter_ms = jitter_ms

        self.jitter_ms = jitter_ms
        self._do(Op.jitter(jitter_ms), "jitter", act)

    def set_high_watermark(self, offset: int) -> None:
        self._do(Op.high_watermark(offset), "high watermark", lambda: self.log.set_high_watermark(offset) and None)

    def roll(self) -> None:
        self._do(Op.roll(), "roll", lambda: self.log.roll() and None)

    def truncate(self, offset: int) -> None:
        self._do(Op.truncate(offset), f"truncate to {offset}", lambda: self.log.truncate_to(offset))

    def start_anew(self, offset: int) -> None:
        self._do(
            Op.truncate_fully(offset), f"start anew at {offset}", lambda: self.log.truncate_fully_and_start_at(offset)
        )

    def advance_log_start(self, offset: int) -> None:
        self._do(Op.log_start(offset), f"log start {offset}", lambda: self.log.advance_log_start(offset))

    def retain(self) -> None:
        def act() -> list[int]:
            return [base for done in self.log.apply_retention() for base in done.base_offsets]

        self._do(Op.retain(), "retain", act)

    # ----- judging

    def check(self, *, same_bytes: bool = True, config: Mapping[str, Any] | None = None) -> LogRun:
        """Kafka repeats what was done since the last check; both are closed, compared and opened again."""
        run = self.kafka.append(
            self.kafka_directory,
            self._ops,
            self.config,
            now_ms=self._opened_ms,
            jitter_ms=self._opened_jitter_ms,
            log_start_offset=self._log_start_offset,
            hold_high_watermark=self.held,
        )
        ours = state_of(self.log)
        self.log.close()
        for at, (outcome, result) in enumerate(zip(self._outcomes, run.results, strict=True)):
            self._compare(at, outcome, result)
        if same_bytes:
            assert_same_state(ours, run.closed)
            assert_same_files(self.directory, self.kafka_directory)
        else:
            assert (ours.log_start_offset, ours.log_end_offset) == (
                run.closed.log_start_offset,
                run.closed.log_end_offset,
            )
            assert ours.last_stable_offset == run.closed.last_stable_offset
            assert_same_but_for_compression(self.kafka, self.directory, self.kafka_directory)
        if config is not None:
            self.config = dict(config)
        self._begin()
        return run

    def _compare(self, at: int, ours: Outcome, theirs: OpResult) -> None:
        where = f"operation {at}, {ours}, {theirs}\nbefore it: {self._outcomes[max(at - 3, 0) : at]}"
        if theirs.error is None:
            assert ours.error is None, where
        else:
            assert ours.error in ERRORS[theirs.cause or theirs.error], where
        if ours.offsets is not None and theirs["first_offset"] >= 0:
            assert ours.offsets == (theirs.first_offset, theirs.last_offset), where
        counted = {"retain": "deleted", "truncate": "truncated", "log start": "advanced"}
        if ours.count is not None and theirs.error is None:
            for what, field in counted.items():
                if ours.what.startswith(what):
                    assert ours.count == theirs[field], where
        assert (ours.log_end_offset, ours.active_segment) == (theirs.log_end_offset, theirs.active_segment), where

    def close(self) -> None:
        self.log.close()


def state_of(log: PartitionWriter) -> LogState:
    """Our log as Kafka's driver describes its own; the recovery point depends on background work and is left out."""
    producers = [
        {
            "producer_id": p.producer_id,
            "producer_epoch": p.producer_epoch,
            "coordinator_epoch": p.coordinator_epoch,
            "last_timestamp_ms": p.last_timestamp_ms,
            "current_txn_first_offset": p.current_txn_first_offset,
            "batches": [
                {
                    "last_sequence": b.last_sequence,
                    "last_offset": b.last_offset,
                    "offset_delta": b.offset_delta,
                    "timestamp_ms": b.timestamp_ms,
                }
                for b in p.batches
            ],
        }
        for _, p in sorted(log.producers.producers.items())
    ]
    return LogState(
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        high_watermark=log.high_watermark,
        last_stable_offset=log.last_stable_offset,
        recovery_point=0,
        segments=tuple((s.base_offset, s.size_bytes) for s in log.segments),
        producers=tuple(producers),
        leader_epochs=tuple((e.epoch, e.start_offset) for e in log.epochs.entries),
    )


def assert_same_state(ours: LogState, theirs: LogState, *, restored_at_ms: int | None = None) -> None:
    """Where a transaction began below the log start Kafka answers with the batch it finds there, we with the log start:
    no reader can tell. After a recovery (`restored_at_ms`) only what a snapshot holds of the producers is compared.
    """
    if ours.last_stable_offset == ours.log_start_offset:
        theirs = dataclasses.replace(theirs, last_stable_offset=ours.last_stable_offset)
    if restored_at_ms is not None:
        ours, theirs = (
            dataclasses.replace(state, producers=_remembered(state, restored_at_ms)) for state in (ours, theirs)
        )
    for field in dataclasses.fields(LogState):
        mine, kafkas = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name != "recovery_point":
            assert mine == kafkas, f"{field.name}: ours {mine}, Kafka's {kafkas}"


def _remembered(state: LogState, now_ms: int) -> tuple[dict[str, Any], ...]:
    """Producers as a snapshot gives them back: the last batch of each, those that have expired left out."""
    out = []
    for producer in state.producers:
        last = [{k: v for k, v in b.items() if k != "timestamp_ms"} for b in producer["batches"][-1:]]
        open_since = producer["current_txn_first_offset"]
        if open_since is not None or now_ms - producer["last_timestamp_ms"] < 86_400_000:
            out.append({**producer, "batches": last})
    return tuple(out)


def cleaner_facts(log: PartitionWriter, first_dirty_offset: int | None) -> CleanerFacts:
    """What decides whether our log is cleaned."""
    return CleanerFacts(
        segments=tuple(SegmentAge(s.base_offset, s.size_bytes, s.largest_timestamp_ms) for s in log.segments),
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        last_stable_offset=log.last_stable_offset,
        first_dirty_offset=first_dirty_offset,
    )


def cleaner_rules(config: LogConfig) -> CleanerRules:
    return CleanerRules(config.min_cleanable_dirty_ratio, config.min_compaction_lag_ms, config.max_compaction_lag_ms)


# --- the two directories ----------------------------------------------------------------------------------------------


def partition_files(directory: Path) -> dict[str, bytes]:
    """Log, index and snapshot files by name. An index that is not there is as good as an empty one."""
    kinds = (".log", ".index", ".timeindex", ".txnindex", ".snapshot")
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.suffix in kinds}
    return {name: data for name, data in files.items() if data or name.endswith(".log")}


def assert_same_files(ours: Path, theirs: Path, *, fewer_snapshots: bool = False) -> None:
    """Byte for byte, but for the order of producers in a snapshot. With `fewer_snapshots` ours may lack some that are
    not at the log's end: they only spare a replay.
    """
    mine, kafkas = partition_files(ours), partition_files(theirs)
    last = max((name for name in kafkas if name.endswith(".snapshot")), default=None)
    for name in kafkas.keys() - mine.keys():
        # A clean log without any snapshot gets empty ones from Kafka at once, from us when there is something to note.
        if name.endswith(".snapshot") and (not decode_snapshot(kafkas[name]) or (fewer_snapshots and name != last)):
            del kafkas[name]
    assert mine.keys() == kafkas.keys(), (
        f"only ours: {mine.keys() - kafkas.keys()}, not ours: {kafkas.keys() - mine.keys()}"
    )
    for name, data in kafkas.items():
        if name.endswith(".snapshot") and mine[name] != data:
            assert set(decode_snapshot(mine[name])) == set(decode_snapshot(data)), name
        else:
            assert mine[name] == data, f"{name} differs from byte {_first_difference(mine[name], data)} on"
    mine_text, kafkas_text = _leader_epochs(ours), _leader_epochs(theirs)
    assert mine_text == kafkas_text, f"ours {mine_text!r}, Kafka's {kafkas_text!r}"


def _leader_epochs(directory: Path) -> str:
    path = directory / "leader-epoch-checkpoint"
    text = path.read_text() if path.exists() else ""
    return "" if text == "0\n0\n" else text


def _first_difference(a: bytes, b: bytes) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def without_sizes(found: KafkaBatch) -> dict[str, Any]:
    """All of a batch but what depends on how well it was compressed."""
    left_out = {"file", "position", "size_bytes", "crc"}
    return {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name not in left_out}


def assert_same_but_for_compression(kafka: Kafka, ours: Path, theirs: Path) -> None:
    mine, kafkas = list(kafka.read(ours)), list(kafka.read(theirs))
    assert [without_sizes(b) for b in mine] == [without_sizes(b) for b in kafkas]
