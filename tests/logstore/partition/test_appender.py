"""The appenders against a log that was never closed: the same bytes in every file, however it is opened in between."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from descriptors import open_files
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.directory.tail import Tail
from logstore.directory.tails import PartitionTail
from logstore.errors import AppendTooLarge, DamagedLog, DuramenError
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.partition.appender import Appender, tail_of
from logstore.partition.producer_append import ProducerAppender
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.control import encode_marker
from logstore.records.encoder import BatchOptions, Encoder, encode_batch
from logstore.records.record import Record
from logstore.records.scan import scan_batches
from logstore.segment.batches import Chunk
from logstore.topic import TopicPartition
from reference.partition_writer import PartitionWriter

PARTITION = TopicPartition("orders", 0)
BASE_MS = 1_700_000_000_000


def encoded(records: list[Record], *, batch_bytes: int) -> bytes:
    encoder = Encoder(BatchOptions(codec_id=0, batch_bytes=batch_bytes, default_timestamp_ms=BASE_MS))
    return b"".join(bytes(part.data) for part in encoder.encode(columns_of(records)))


def chunk_of(data: bytes) -> Chunk:
    array = np.frombuffer(bytearray(data), dtype=np.uint8)
    return Chunk(array, scan_batches(array).table, 0, "staged")


class Twins:
    """One directory written by a log that stays open, one by an appender that is opened for every append."""

    def __init__(self, folder: Path, settings: dict[str, object], now_ms: int = BASE_MS) -> None:
        self.config = LogConfig.from_mapping({name: str(value) for name, value in settings.items()})
        self.clock = ManualClock(now_ms)
        self.plain, self.fast = folder / "plain", folder / "fast"
        self.state_path = str(folder / "fast.state")
        self.log = self._open(self.plain, str(folder / "plain.state"))
        other = self._open(self.fast, self.state_path)
        self.tail, self.end = tail_of(other.segments[-1]), other.log_end_offset
        other.close(clean=False)

    def _open(self, directory: Path, state_path: str) -> PartitionWriter:
        return PartitionWriter.open(
            str(directory),
            partition=PARTITION,
            config=self.config,
            clean=True,
            state_path=state_path,
            clock=self.clock,
            long_lived=False,
        )

    def replicate(self, data: bytes) -> None:
        """Batches with offsets of their own, into both, by the long way."""
        self.log.append_batches(data, origin=AppendOrigin.REPLICATION)
        other = self._open(self.fast, self.state_path)
        other.append_batches(data, origin=AppendOrigin.REPLICATION)
        self.tail, self.end = tail_of(other.segments[-1]), other.log_end_offset
        other.close(clean=False)

    def appender(self, tail: Tail | None = None, end: int | None = None) -> Appender:
        return Appender(
            OS_FILES,
            PartitionPlace(str(self.fast), PARTITION, self.state_path),
            PartitionTail.of_now(0, self.end if end is None else end, tail or self.tail),
            state=read_state(OS_FILES, self.state_path) or PartitionState(),
            config=self.config,
            now_ms=self.clock.now_ms(),
            limits=DEFAULT_LIMITS,
        )

    def append(self, data: bytes) -> None:
        self.log.append_batches(data, origin=AppendOrigin.COORDINATOR)
        appender = self.appender()
        appender.append([chunk_of(data)])
        self.tail, self.end = self.finish(appender), appender.end_offset

    def finish(self, appender: Appender) -> Tail:
        """As the store does it: the list is written before anybody is told of the tail."""
        tail, state = appender.finish()
        if state is not None:
            write_state(OS_FILES, self.state_path, state)
        return tail

    def check(self) -> int:
        """Both directories hold the same; returns the number of segments."""
        assert contents(self.plain) == contents(self.fast)
        assert self.end == self.log.log_end_offset
        listed = read_state(OS_FILES, self.state_path)
        assert listed is not None
        assert [each.base_offset for each in listed.segments] == [each.base_offset for each in self.log.segments]
        sealed = [(each.base_offset, each.size_bytes) for each in self.log.segments[:-1]]
        assert [(each.base_offset, each.size_bytes) for each in listed.segments[:-1]] == sealed
        return len(listed.segments)


def contents(directory: Path) -> dict[str, bytes]:
    """All files, but for the snapshots that opening a log leaves at its end."""
    bases = {path.stem for path in directory.glob("*.log")}
    files = [path for path in directory.iterdir() if path.suffix != ".snapshot" or path.stem in bases]
    return {path.name: path.read_bytes() for path in files if path.is_file()}


def some(rng: random.Random, count: int, at_ms: int, spread_ms: int = 1000) -> list[Record]:
    return [
        Record(b"k%d" % rng.randrange(20), rng.randbytes(rng.randrange(120)), max(0, at_ms + rng.randrange(spread_ms)))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"segment.bytes": 2000, "index.interval.bytes": 300}, id="size"),
        pytest.param({"segment.bytes": 1 << 20, "segment.ms": 2000, "index.interval.bytes": 0}, id="time"),
        pytest.param({"segment.bytes": 1 << 20, "segment.index.bytes": 36, "index.interval.bytes": 100}, id="index"),
        pytest.param({"segment.bytes": 1 << 20, "segment.index.bytes": 12, "index.interval.bytes": 0}, id="no index"),
        pytest.param({"segment.bytes": 3000, "message.timestamp.type": "LogAppendTime", "segment.ms": 700}, id="stamp"),
        pytest.param(
            {"cleanup.policy": "compact", "max.compaction.lag.ms": 900, "segment.ms": 10_000_000}, id="compaction lag"
        ),
    ],
)
def test_random_appends_equal_those_of_a_log_that_stays_open(
    tmp_path: Path, settings: dict[str, object], seed: int
) -> None:
    rng = random.Random(seed)
    twins = Twins(tmp_path, settings)
    at_ms = BASE_MS
    rolls = 0
    for _ in range(40):
        at_ms += rng.randrange(-200, 900)  # also backwards: segments age by record time
        twins.clock.advance(rng.randrange(300))
        twins.append(encoded(some(rng, rng.randrange(1, 30), at_ms), batch_bytes=rng.choice([150, 400, 1500])))
        rolls = twins.check() - 1
    assert rolls >= 2, "the rule was never reached"


def test_a_gap_of_offsets_rolls_where_the_open_log_does(tmp_path: Path) -> None:
    twins = Twins(tmp_path, {"segment.bytes": 1 << 20})
    twins.replicate(with_base(encoded([Record(b"a", b"far", BASE_MS)], batch_bytes=400), (1 << 31) - 3))
    assert twins.check() == 1
    twins.append(encoded([Record(b"b%d" % n, b"x" * 200, BASE_MS) for n in range(6)], batch_bytes=150))
    assert twins.check() == 2
    assert twins.log.segments[-1].base_offset == 1 << 31


def with_base(data: bytes, base_offset: int) -> bytes:
    return base_offset.to_bytes(8, "big") + data[8:]


@pytest.mark.parametrize("left_after", range(0, 60, 7))
def test_what_an_interrupted_append_left_is_cut_first(tmp_path: Path, left_after: int, seed: int) -> None:
    """Half of an append that rolls several times lies there; the next try makes of it what the open log has."""
    rng = random.Random(seed)
    twins = Twins(tmp_path, {"segment.bytes": 900, "index.interval.bytes": 100})
    twins.append(encoded(some(rng, 12, BASE_MS), batch_bytes=300))
    records = some(rng, 60, BASE_MS + 5000)
    whole = encoded(records, batch_bytes=250)
    half = encoded(records[: max(left_after, 1)], batch_bytes=250)
    broken = twins.appender()
    broken.append([chunk_of(half)])
    if left_after % 2:
        twins.finish(broken)  # the list is written, but not the tail
    else:
        broken.close()
    active = sorted(twins.fast.glob("*.log"))[-1]
    with open(active, "ab") as file:
        file.write(b"torn")
    twins.append(whole)
    twins.check()


def test_a_log_shorter_than_its_tail_is_refused(tmp_path: Path) -> None:
    twins = Twins(tmp_path, {"segment.bytes": 1 << 20})
    twins.append(encoded(some(random.Random(2), 5, BASE_MS), batch_bytes=400))
    path = next(twins.fast.glob("*.log"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamagedLog, match="were committed"):
        twins.appender()


def test_a_batch_larger_than_a_segment_is_refused(tmp_path: Path) -> None:
    twins = Twins(tmp_path, {"segment.bytes": 300})
    appender = twins.appender()
    with pytest.raises(AppendTooLarge, match=r"segment\.bytes is 300"):
        appender.append([chunk_of(encoded([Record(b"k", b"x" * 400, BASE_MS)], batch_bytes=100))])
    appender.close()


def test_a_thousand_rolls_need_no_more_open_files_than_one(tmp_path: Path) -> None:
    twins = Twins(tmp_path, {"segment.bytes": 200})
    data = encoded([Record(b"k", b"x" * 90, BASE_MS) for _ in range(300)], batch_bytes=100)
    appender = twins.appender()
    before = open_files()
    appender.append([chunk_of(data)])
    assert open_files() <= before + 4
    appender.finish()
    assert len(list(twins.fast.glob("*.log"))) == 300


# --- logs that know producers -----------------------------------------------------------------------------------------


class ProducerTwins:
    """The same transactions in two logs that stay open; one is appended to by the reference, one by the product."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        config = LogConfig.from_mapping({name: str(value) for name, value in settings.items()})
        self.clock = ManualClock(BASE_MS)
        self.folders = folder / "plain", folder / "fast"
        self.logs = [
            PartitionWriter.open(
                str(directory),
                partition=PARTITION,
                config=config,
                clean=True,
                state_path=f"{directory}.state",
                clock=self.clock,
                long_lived=False,
            )
            for directory in self.folders
        ]
        self.sequences = dict.fromkeys(range(4), 0)

    def begin(self, rng: random.Random, producer_id: int) -> None:
        records = some(rng, rng.randrange(1, 4), self.clock.now_ms())
        options = BatchOptions(
            transactional=True, producer_id=producer_id, producer_epoch=0, base_sequence=self.sequences[producer_id]
        )
        self.sequences[producer_id] += len(records)
        for log in self.logs:
            log.append_batches(encode_batch(columns_of(records), options))

    def append(self, data: bytes) -> None:
        plain, fast = self.logs
        plain.append_batches(data, origin=AppendOrigin.COORDINATOR)
        ProducerAppender(fast, leader_epoch=0).append([chunk_of(data)])

    def check(self) -> int:
        plain, fast = self.logs
        assert contents(self.folders[0]) == contents(self.folders[1])
        assert plain.log_end_offset == fast.log_end_offset
        assert plain.producers.producers == fast.producers.producers
        assert plain.open_transactions == fast.open_transactions
        lists = [read_state(OS_FILES, f"{directory}.state") for directory in self.folders]
        assert lists[0] == lists[1]
        return len(fast.segments)


def marker(producer_id: int, at_ms: int, *, commit: bool = False, epoch: int = 0) -> bytes:
    return encode_marker(
        commit=commit, producer_id=producer_id, producer_epoch=epoch, coordinator_epoch=0, timestamp_ms=at_ms
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"segment.bytes": 1500, "index.interval.bytes": 200}, id="size"),
        pytest.param({"segment.ms": 1500, "index.interval.bytes": 0}, id="time"),
        pytest.param({"segment.index.bytes": 36, "index.interval.bytes": 100}, id="index"),
        pytest.param({"segment.bytes": 1500, "message.timestamp.type": "LogAppendTime"}, id="stamp"),
    ],
)
def test_batches_and_markers_equal_those_of_the_reference(
    tmp_path: Path, settings: dict[str, object], seed: int
) -> None:
    rng = random.Random(seed)
    twins = ProducerTwins(tmp_path, settings)
    for _ in range(25):
        twins.clock.advance(rng.randrange(400))
        for producer_id in rng.sample(range(4), rng.randrange(3)):
            twins.begin(rng, producer_id)
        parts = [encoded(some(rng, rng.randrange(1, 12), twins.clock.now_ms()), batch_bytes=300)]
        open_now = [state.producer_id for state in twins.logs[0].open_transactions]
        for producer_id in rng.sample(open_now, rng.randrange(len(open_now) + 1)):
            parts.insert(
                rng.randrange(len(parts) + 1), marker(producer_id, twins.clock.now_ms(), commit=rng.random() < 0.5)
            )
        twins.append(b"".join(parts))
        twins.check()
    assert twins.check() > 2, "the rule was never reached"


def test_an_append_that_a_producer_refuses_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    rng = random.Random(5)
    twins = ProducerTwins(tmp_path, {"segment.bytes": 1 << 20})
    twins.begin(rng, 1)
    log = twins.logs[1]
    data = encoded(some(rng, 9, BASE_MS), batch_bytes=200) + marker(1, BASE_MS, epoch=-2)
    with pytest.raises(DuramenError):
        ProducerAppender(log, leader_epoch=3).append([chunk_of(data)])
    assert log.epochs.latest is not None
    assert log.epochs.latest.epoch == 0
    assert [state.producer_id for state in log.open_transactions] == [1]
    assert log.producers.producers == twins.logs[0].producers.producers
    twins.append(encoded(some(rng, 9, BASE_MS), batch_bytes=200) + marker(1, BASE_MS))
    files = [next(directory.glob("*.log")) for directory in twins.folders]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not log.open_transactions
