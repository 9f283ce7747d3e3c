"""Rolls of segments reached through the sink: Kafka's own log class, given the very batches, makes the same segments.

The batches are read back from the logs the sink wrote and handed to Kafka one by one, as a producer sends them, under
the same settings and with the clock of their micro-batch. Compared are the base offsets and sizes of all segments, the
bytes of their logs, and the indexes of those that are closed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.kafka import Kafka, LogRun, Op, batch, record
from logstore.commit.committer import Committer
from logstore.files import OS_FILES
from logstore.partition.producer_state import AppendOrigin
from logstore.records.header import read_header
from logstore.store import LogStore
from reference.partition_writer import writing

Spark = Any
ROOT = Path(__file__).parents[2]
NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
RELATIVE_MAX = 2**31 - 1


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def as_sent(data: bytes) -> bytes:
    """The batch as its producer sent it: base offset 0, no leader epoch. Both lie outside the CRC."""
    return bytes(8) + data[8:12] + b"\xff" * 4 + data[16:]


class Topic:
    """A topic of one partition, written through the sink, and what Kafka makes of its batches."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.root = root
        self.store = LogStore(root / "store", create=True)
        self.topic = self.store.create_topic("orders", configs=config)
        self.folder = Path(self.store.layout.partition(self.topic.partition(0)))
        #: (first offset of a micro-batch, its clock)
        self.clocks: list[tuple[int, int]] = []
        #: operations on Kafka's log in place of those that were not the sink's
        self.before: list[dict[str, Any]] = []
        self.batches = 0

    def write(self, rows: Any, **options: Any) -> None:
        from streaming.options import SinkOptions
        from streaming.sink import LogSink

        first = self.end
        LogSink(self.store.path, "orders", app_id="app", options=SinkOptions(**options)).write(rows, self.batches)
        self.batches += 1
        # The plan's clock is the ledger's, to a few milliseconds; no rule of these tests is that fine.
        self.clocks.append((first, Committer(self.store).ledger.commits()[-1].committed_ms))

    def replicate(self, data: bytes) -> None:
        """A batch with offsets of its own, past the sink."""
        with writing(self.store, self.topic, 0, what="test") as log:
            log.append_batches(data, origin=AppendOrigin.REPLICATION)
        self.before.append(Op.append(data, origin="replication", leader_epoch=RELATIVE_MAX))

    @property
    def end(self) -> int:
        return self.store.ends(self.topic).high_watermarks[0]

    def segments(self) -> list[tuple[int, int]]:
        return [(int(path.stem), path.stat().st_size) for path in sorted(self.folder.glob("*.log"))]

    def batches_from(self, offset: int) -> list[tuple[int, bytes]]:
        found = []
        for path in sorted(self.folder.glob("*.log")):
            file = OS_FILES.open(str(path))
            position = 0
            while (header := read_header(file, position, file.size())) is not None:
                if header.begin_offset >= offset:
                    found.append((header.begin_offset, file.pread(header.end_position - position, position)))
                position = header.end_position
            file.close()
        return found

    def given_to(self, kafka: Kafka) -> LogRun:
        folder = self.root / f"kafka {self.batches}" / "orders-0"
        now_ms = self.clocks[0][1]
        if self.before:  # our log was closed behind it, too
            replicated = kafka.append(folder, self.before, self.config, now_ms=now_ms)
            assert [result.error for result in replicated.results if result.error] == []
        operations = []
        clocks = dict(self.clocks)
        for offset, data in self.batches_from(self.clocks[0][0]):
            if offset in clocks:
                operations.append(Op.clock(clocks[offset]))
            operations.append(Op.append(as_sent(data), leader_epoch=0))
        run = kafka.append(folder, operations, self.config, now_ms=now_ms, crash=True)
        assert [result.error for result in run.results if result.error] == []
        return run

    def check(self, kafka: Kafka) -> list[tuple[int, int]]:
        """Compare; returns our segments."""
        run = self.given_to(kafka)
        assert run.closed.log_end_offset == self.end
        ours = self.segments()
        assert ours == list(run.closed.segments)
        for base, _ in ours:
            for suffix in (".log", ".index", ".timeindex"):
                if suffix != ".log" and base == ours[-1][0]:
                    continue  # still open: Kafka's is preallocated
                name = f"{base:020d}{suffix}"
                theirs = self.root / f"kafka {self.batches}" / "orders-0" / name
                assert (self.folder / name).read_bytes() == theirs.read_bytes(), name
        return ours


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Topic]]:
    made: list[Topic] = []

    def topic(**config: Any) -> Topic:
        made.append(Topic(tmp_path, config))
        return made[-1]

    yield topic
    for each in made:
        each.store.close()


def rows(spark: Spark, count: int, *, step_ms: int = 1, value_bytes: int = 40, parts: int = 3, start: int = 0) -> Any:
    """Timestamps go up by `step_ms`."""
    return spark.range(start, start + count, 1, parts).selectExpr(
        "concat('k', id % 17) as key",
        f"rpad(concat('v', id), {value_bytes}, 'x') as value",
        f"{NOW_MS} + id * {step_ms} as timestamp",
    )


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_size_one_micro_batch_of_fifty_segments(
    kafka: Kafka, spark: Spark, make: Callable[..., Topic], codec: str
) -> None:
    topic = make(**{"segment.bytes": 20_000, "index.interval.bytes": 1000})
    topic.write(rows(spark, 20_000), batch_size=3000, compression_type=codec)
    segments = topic.check(kafka)
    if codec == "none":
        assert len(segments) > 50
    topic.write(rows(spark, 2000, start=20_000), batch_size=7000)
    assert len(topic.check(kafka)) > len(segments)


def test_time_of_records(kafka: Kafka, spark: Spark, make: Callable[..., Topic]) -> None:
    topic = make(**{"segment.ms": HOUR_MS})
    topic.write(rows(spark, 300, step_ms=HOUR_MS // 10), batch_size=500)
    assert 10 < len(topic.check(kafka)) < 60
    topic.write(rows(spark, 100, step_ms=HOUR_MS // 10, start=300), batch_size=900)
    topic.check(kafka)


def test_time_across_micro_batches(kafka: Kafka, spark: Spark, make: Callable[..., Topic]) -> None:
    topic = make(**{"segment.ms": HOUR_MS})
    for number in range(6):
        topic.write(rows(spark, 10, step_ms=1, start=number * HOUR_MS // 2, parts=1))
    assert 2 <= len(topic.check(kafka)) < 6


@pytest.mark.parametrize("fixed_time", [False, True])
def test_index_full(kafka: Kafka, spark: Spark, make: Callable[..., Topic], fixed_time: bool) -> None:
    """The time index fills first where times go up; where they do not, the offset index."""
    topic = make(**{"segment.index.bytes": 120, "index.interval.bytes": 100})
    for number in range(2):
        topic.write(rows(spark, 2000, step_ms=0 if fixed_time else 1, start=number * 2000), batch_size=1000)
    assert len(topic.check(kafka)) > 5


@pytest.mark.parametrize("gap", [RELATIVE_MAX - 50, RELATIVE_MAX, 2**31, 2**32])
def test_offset_overflow(kafka: Kafka, spark: Spark, make: Callable[..., Topic], gap: int) -> None:
    """The log holds a batch far up, as compaction or replication leaves one; what the sink writes begins a segment."""
    topic = make(**{"segment.bytes": 1_000_000})
    near = kafka.build_batches([batch([record(b"k", b"first", NOW_MS)], base_offset=0, leader_epoch=0)])[0]
    # Far above, but still in the first segment: its offsets reach up to `gap` at most.
    last = min(gap, RELATIVE_MAX)
    far = kafka.build_batches(
        [batch([record(b"k", b"far", NOW_MS)], base_offset=last - 3, last_offset=last, leader_epoch=0)]
    )[0]
    topic.replicate(near)
    topic.replicate(far)
    if gap > RELATIVE_MAX:
        farther = kafka.build_batches([batch([record(b"k", b"farther", NOW_MS)], base_offset=gap, leader_epoch=0)])[0]
        topic.replicate(farther)
    topic.write(rows(spark, 300), batch_size=500)
    segments = topic.check(kafka)
    assert len(segments) == 2
    assert segments[1][0] <= max(gap, RELATIVE_MAX) + 1
    topic.write(rows(spark, 100, start=300))
    assert len(topic.check(kafka)) == 2
