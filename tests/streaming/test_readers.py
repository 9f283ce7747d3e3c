"""Readers in a loop against a partition that another process appends to and retains: each result equals the oracle.

The oracle is a function of the offset (writer.py). A batch read must hold every record from the log start to its end;
what retention took while it read may be missing at its beginning, and nothing else. A stream must hand on each record
once, in order. A restored state must be that of its end offsets. DURAMEN_READERS_SECONDS says how long.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from logstore.store import LogStore
from streaming import restore_state

Spark = Any
ROOT = Path(__file__).parents[2]
WRITER = Path(__file__).parent / "writer.py"
SOAK = os.environ.get("DURAMEN_SOAK") == "1"
SECONDS = float(os.environ.get("DURAMEN_READERS_SECONDS", "600" if SOAK else "60"))

_spec = importlib.util.spec_from_file_location("readers_writer", WRITER)
assert _spec is not None
assert _spec.loader is not None
writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(writer)


class Watched:
    """The partition while it is written to."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        self.topic = store.topic(writer.TOPIC)

    @property
    def start(self) -> int:
        return self.store.partition_state(self.topic, 0).log_start_offset

    @property
    def end(self) -> int:
        return self.store.ends(self.topic).high_watermarks[0]


def check_records(table: pa.Table) -> list[int]:
    """Every record is the one of its offset; returns the offsets as they came."""
    offsets = table["offset"].to_pylist()
    assert table["key"].to_pylist() == [writer.key_of(offset) for offset in offsets]
    assert table["value"].to_pylist() == [writer.value_of(offset) for offset in offsets]
    return offsets


def read_everything(spark: Spark, watched: Watched) -> int:
    """What retention takes meanwhile may be missing, and nothing else."""
    start, end = watched.start, watched.end
    source = spark.read.format("duramen").option("store", watched.store.path).option("subscribe", writer.TOPIC)
    frame = source.option("failOnDataLoss", "false").option("minPartitions", "3").load()
    offsets = sorted(check_records(frame.toArrow()))
    start_after, end_after = watched.start, watched.end
    assert len(offsets) == len(set(offsets))
    assert all(start <= offset < end_after for offset in offsets)
    last = offsets[-1] + 1 if offsets else end
    assert end <= last
    assert all(offset < start_after for offset in set(range(start, last)).difference(offsets))
    return len(offsets)


def read_range(spark: Spark, watched: Watched) -> int:
    """A range that is there is whole; one that retention has overtaken is refused."""
    end = watched.end
    first = (watched.start + end) // 2
    source = spark.read.format("duramen").option("store", watched.store.path).option("subscribe", writer.TOPIC)
    source = source.option("startingOffsets", json.dumps({writer.TOPIC: {"0": first}}))
    try:
        table = source.option("endingOffsets", json.dumps({writer.TOPIC: {"0": end}})).load().toArrow()
    except PySparkException:
        assert watched.start > first
        return 0
    assert sorted(check_records(table)) == list(range(first, end))
    return end - first


def read_state(spark: Spark, watched: Watched) -> int:
    before = watched.end
    state = restore_state(spark, store=watched.store.path, topic=writer.TOPIC)
    end = state.end_offsets[0]
    assert before <= end <= watched.end
    table = state.df.toArrow()
    if watched.start > end - writer.MEMORY:
        return 0  # so slow that retention has overtaken it
    check_records(table)
    assert table.num_rows == len(set(table["key"].to_pylist()))
    assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == writer.state_at(end)
    return table.num_rows


class Stream:
    """Follows the partition, a few micro-batches at a time."""

    def __init__(self, folder: Path, watched: Watched) -> None:
        self.folder = folder
        self.watched = watched
        self.begun = 0
        self.begin()

    def begin(self) -> None:
        self.begun += 1
        self.next_offset = self.watched.end
        self.beginning = json.dumps({writer.TOPIC: {"0": self.next_offset}})

    def take(self, df: Any, batch_id: int) -> None:
        offsets = check_records(df.toArrow())
        assert offsets == list(range(self.next_offset, self.next_offset + len(offsets)))
        self.next_offset += len(offsets)

    def read(self, spark: Spark) -> int:
        first, end = self.next_offset, self.watched.end
        query = (
            spark.readStream.format("duramen")
            .option("store", self.watched.store.path)
            .option("subscribe", writer.TOPIC)
            .option("startingOffsets", self.beginning)
            .option("maxOffsetsPerTrigger", "3000")
            .load()
            .writeStream.foreachBatch(self.take)
            .option("checkpointLocation", str(self.folder / str(self.begun)))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(110)
        except StreamingQueryException:
            assert self.watched.start > self.next_offset
            self.begin()  # so slow that retention has overtaken it
            return 0
        assert end <= self.next_offset <= self.watched.end
        return self.next_offset - first


@pytest.mark.timeout(SECONDS + 300)
def test_what_is_read_while_it_is_written_and_retained_is_true(spark: Spark, tmp_path: Path, seed: int) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic(writer.TOPIC, configs=writer.CONFIGS)
        for _ in range(10):
            writer.append(store, 5000)
        watched = Watched(store)
        read_everything(spark, watched)  # Spark is slow the first time
        process = subprocess.Popen(
            [sys.executable, str(WRITER), store.path, str(seed)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        try:
            stream = Stream(tmp_path / "checkpoint", watched)
            began = time.monotonic()
            first = watched.end
            rounds = batch_rows = stream_rows = keys = 0
            while time.monotonic() - began < SECONDS or rounds < 2:
                batch_rows += read_everything(spark, watched)
                batch_rows += read_range(spark, watched)
                stream_rows += stream.read(spark)
                keys += read_state(spark, watched)
                rounds += 1
                assert process.poll() is None, "the writer ended"
        finally:
            process.stdin.close()
            process.wait(60)
        assert process.returncode == 0
        print(
            f"{rounds} rounds: {batch_rows} rows by batches, {stream_rows} by the stream, {keys} keys restored; "
            f"{watched.end - first} appended, log start {watched.start}"
        )
        assert min(batch_rows, stream_rows, keys) > 0
        assert watched.end > first
        assert watched.start > 0, "retention took something"
