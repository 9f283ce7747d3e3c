"""Arrow columns to appended and visible records, against Kafka's batch builder and its log's append, and against bare
write().

Ours is the whole of `LogStore.append`: staged (and synced), committed, appended, visible; what of it the commit takes,
the decision in the ledger, is shown apart. Each round times ours, bare write() and Kafka's, one after the other, each
into a new log that is removed afterwards. Kafka syncs nothing inside the timed part and bare write() neither, except in
the variant that says so: there both end with an fsync.
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
from logstore.store import LogStore

#: settings of the log on both sides, by Kafka's names
CONFIG = {"segment.bytes": 1 << 30}
WRITE_BYTES = 4 << 20  # of one bare write(); as large as the engine's own
#: a topic's compression.type for Kafka's name of a codec
COMPRESSION = {"none": "uncompressed", "lz4": "lz4", "zstd": "zstd"}


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
    commit: list[float] = field(default_factory=list)
    kafka: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    log_bytes: dict[str, int] = field(default_factory=dict)

    def detail(self) -> dict[str, Any]:
        return {
            "seconds_ours": self.ours,
            "seconds_ours_commit": self.commit,
            "seconds_kafka": self.kafka,
            "seconds_write": self.write,
            "others_cores": self.others_cores,
            "log_bytes": self.log_bytes,
        }


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    sizes = QUICK if quick else Sizes()
    with TimedKafka() as judge:
        plain = data.letters(folder, sizes.records)
        yield from _uncompressed(folder, judge, plain, sizes, flush=False)
        if sizes.variants:
            yield from _uncompressed(folder, judge, plain, sizes, flush=True)
        for kind in (data.words, data.letters) if sizes.variants else (data.words,):
            records = kind(folder, sizes.compressed_records)
            for codec in ("lz4", "zstd"):
                yield from _compressed(folder, judge, records, codec, sizes)


def _uncompressed(
    folder: Path, judge: TimedKafka, records: data.Records, sizes: Sizes, *, flush: bool
) -> Iterator[Result]:
    times = _timed(folder, judge, records, "none", sizes, flush=flush, with_write=True)
    write = f" (write() {rate(records.count, median(times.write))})"
    yield from _results("none; Kafka's with an fsync at the end" if flush else "none", records, times, write)


def _compressed(folder: Path, judge: TimedKafka, records: data.Records, codec: str, sizes: Sizes) -> Iterator[Result]:
    times = _timed(folder, judge, records, codec, sizes, flush=False, with_write=False)
    yield from _results(f"{codec}, {records.name}", records, times)


def _results(name: str, records: data.Records, times: Times, beside: str = "") -> Iterator[Result]:
    """The whole call, and the call without its commit. Nothing is claimed: ours is durable, the others are not."""
    theirs = median(times.kafka)
    without = [whole - commit for whole, commit in zip(times.ours, times.commit, strict=True)]
    for label, ours in ((name, median(times.ours)), (f"{name}; without the commit", median(without))):
        yield Result(
            part="append",
            name=label,
            ours=rate(records.count, ours),
            theirs=rate(records.count, theirs) + beside,
            ratio=theirs / ours,
            others_cores=max(times.others_cores),
            detail={**times.detail(), "records": records.count},
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
            ours, commit, directory = _append(folder, batches, codec)
            if with_write and not len(finished):
                finished = np.concatenate(
                    [np.fromfile(path, dtype=np.uint8) for path in sorted(directory.glob("*.log"))]
                )
            times.log_bytes["ours"] = sum(path.stat().st_size for path in directory.glob("*.log"))
            shutil.rmtree(folder / "ours")
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
        times.commit.append(commit)
        times.write.append(write)
        times.kafka.append(answer["seconds"][0])
        times.others_cores.append(watch.others_cores)
    return times


def _append(folder: Path, batches: list[pa.RecordBatch], codec: str) -> tuple[float, float, Path]:
    """One call for all of it: seconds, how many of them the commit took, and where the log lies."""
    root = folder / "ours"
    table = pa.Table.from_batches(batches)
    with LogStore(root, create=True) as store:
        topic = store.create_topic("ours", partitions=1, configs={**CONFIG, "compression.type": COMPRESSION[codec]})
        store.append("ours", table.slice(0, 1))  # a writer that runs has its ledger open
        began = time.perf_counter()
        committed = store.append("ours", table)
        seconds = time.perf_counter() - began
        directory = Path(store.layout.partition(topic.partition(0)))
    return seconds, committed.timings_ms["commit"] / 1000, directory


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
