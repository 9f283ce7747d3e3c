"""Arrow columns to appended batches, against Kafka's batch builder and its log's append, and against bare write().

Each round times ours, bare write() and Kafka's, one after the other, each into a new log that is removed afterwards.
Nothing is fsynced inside the timed part on any side, except in the variant that says so: there each side ends with an
fsync.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench import data, machine
from bench.kafka import TimedKafka
from bench.result import Result, median, rate
from logstore.config import LogConfig
from logstore.records.compression import codec_by_name
from logstore.topic import TopicPartition
from reference.partition_writer import PartitionWriter

#: settings of the log on both sides, by Kafka's names
CONFIG = {"segment.bytes": 1 << 30}
WRITE_BYTES = 4 << 20  # of one bare write(); as large as the engine's own
TIMES_KAFKA = {"none": 5.0, "lz4": 1.5, "zstd": 1.3}
SHARE_OF_WRITE = 0.85


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Kafka's code is compiled while it runs: more than its first run must be thrown away."""

    records: int = 5_000_000
    compressed_records: int = 2_000_000
    rounds: int = 5
    discarded: int = 4
    variants: bool = True


QUICK = Sizes(records=500_000, compressed_records=200_000, rounds=3, discarded=1, variants=False)


@dataclass(slots=True)
class Times:
    """Seconds of every round that counts."""

    ours: list[float] = field(default_factory=list)
    kafka: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    log_bytes: dict[str, int] = field(default_factory=dict)

    def detail(self) -> dict[str, Any]:
        return {
            "seconds_ours": self.ours,
            "seconds_kafka": self.kafka,
            "seconds_write": self.write,
            "others_cores": self.others_cores,
            "log_bytes": self.log_bytes,
        }


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    sizes = QUICK if quick else Sizes()
    with TimedKafka() as judge:
        plain = data.letters(folder, sizes.records)
        yield _uncompressed(folder, judge, plain, sizes, flush=False)
        if sizes.variants:
            yield _uncompressed(folder, judge, plain, sizes, flush=True)
        for kind in (data.words, data.letters) if sizes.variants else (data.words,):
            records = kind(folder, sizes.compressed_records)
            for codec in ("lz4", "zstd"):
                yield _compressed(folder, judge, records, codec, sizes)


def _uncompressed(folder: Path, judge: TimedKafka, records: data.Records, sizes: Sizes, *, flush: bool) -> Result:
    times = _timed(folder, judge, records, "none", sizes, flush=flush, with_write=True)
    ours, theirs, write = median(times.ours), median(times.kafka), median(times.write)
    needed_s = max(theirs / TIMES_KAFKA["none"], write / SHARE_OF_WRITE)  # whichever of the two is the lesser demand
    return Result(
        part="append",
        name="none, fsync at the end" if flush else "none",
        ours=rate(records.count, ours),
        theirs=f"{rate(records.count, theirs)} (write() {rate(records.count, write)})",
        ratio=theirs / ours,
        target="" if flush else f">= 5x, or 85 % of write() (now {write / ours:.0%})",
        met=None if flush else ours <= needed_s,
        others_cores=max(times.others_cores),
        detail={
            **times.detail(),
            "records": records.count,
            "fsynced": "everything, at the end" if flush else "nothing",
        },
    )


def _compressed(folder: Path, judge: TimedKafka, records: data.Records, codec: str, sizes: Sizes) -> Result:
    times = _timed(folder, judge, records, codec, sizes, flush=False, with_write=False)
    ours, theirs = median(times.ours), median(times.kafka)
    claimed = records.name == "words"
    return Result(
        part="append",
        name=f"{codec}, {records.name}",
        ours=rate(records.count, ours),
        theirs=rate(records.count, theirs),
        ratio=theirs / ours,
        target=f">= {TIMES_KAFKA[codec]}x" if claimed else "",
        met=theirs / ours >= TIMES_KAFKA[codec] if claimed else None,
        others_cores=max(times.others_cores),
        detail={**times.detail(), "records": records.count, "fsynced": "nothing"},
    )


def _timed(
    folder: Path, judge: TimedKafka, records: data.Records, codec: str, sizes: Sizes, *, flush: bool, with_write: bool
) -> Times:
    times = Times()
    batches = records.batches()
    finished = np.empty(0, dtype=np.uint8)
    # The compiler's work is done once for all; after that one run is enough for what a codec adds.
    discarded = sizes.discarded if codec == "none" and not flush else min(sizes.discarded, 2)
    patience = machine.Patience(sizes.rounds)
    while len(times.ours) < sizes.rounds:
        with machine.watching(*judge.processes) as watch:
            ours, directory = _append(folder, batches, codec, flush)
            if with_write and not len(finished):
                finished = np.concatenate(
                    [np.fromfile(path, dtype=np.uint8) for path in sorted(directory.glob("*.log"))]
                )
            times.log_bytes["ours"] = sum(path.stat().st_size for path in directory.glob("*.log"))
            shutil.rmtree(directory)
            write = _write(folder, finished, flush) if with_write else 0.0
            directory = folder / "kafka-0"
            answer = judge.bench_append(
                directory,
                records.path,
                codec=codec,
                batch_bytes=16 << 10,
                now_ms=data.NOW_MS,
                records_per_ms=data.RECORDS_PER_MS,
                flush=flush,
                config=CONFIG,
            )
            times.log_bytes["kafka"] = answer["log_bytes"]
            shutil.rmtree(directory)
        discarded -= 1
        if discarded >= 0 or not patience.takes(watch):
            continue
        times.ours.append(ours)
        times.write.append(write)
        times.kafka.append(answer["seconds"][0])
        times.others_cores.append(watch.others_cores)
    return times


def _append(folder: Path, batches: list[pa.RecordBatch], codec: str, flush: bool) -> tuple[float, Path]:
    directory = folder / "ours-0"
    directory.mkdir()
    codec_id = codec_by_name(codec).id
    config = LogConfig(segment_bytes=CONFIG["segment.bytes"])
    with PartitionWriter.open(str(directory), partition=TopicPartition("ours", 0), config=config, clean=True) as log:
        began = time.perf_counter()
        for batch in batches:
            log.append_columns(batch, codec_id=codec_id, batch_bytes=16 << 10)
        if flush:
            log.flush()
        seconds = time.perf_counter() - began
    return seconds, directory


def _write(folder: Path, finished: np.ndarray[Any, np.dtype[np.uint8]], flush: bool) -> float:
    """The same bytes, ready in memory, into a new file."""
    path = folder / "bare"
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    try:
        began = time.perf_counter()
        for start in range(0, len(finished), WRITE_BYTES):
            os.write(file, finished[start : start + WRITE_BYTES].data)
        if flush:
            os.fsync(file)
        return time.perf_counter() - began
    finally:
        os.close(file)
        path.unlink()
