"""A checksum-verified scan into Arrow columns, against Kafka's iteration over the records of the same files.

The files are Kafka's own and lie in the page cache on both sides. Kafka is timed twice: looking at keys and values in
place, which delivers nothing, and taking them out of its buffers, as its consumer does and as columns do. The claim is
judged against the first, the faster one; the second is shown.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench import data, machine
from bench.append import CONFIG
from bench.kafka import TimedKafka
from bench.result import Result, median, rate
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.partition.environment import LastKnown
from logstore.partition.log import PartitionLog
from logstore.partition.reader import PartitionReader
from logstore.records.arrow import to_arrow
from logstore.topic import TopicPartition

TIMES_KAFKA = 3.0
COLUMNS = ["key", "value", "offset", "timestamp"]


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    records, rounds, discarded = (500_000, 3, 2) if quick else (5_000_000, 5, 4)
    partition = TopicPartition("scanned", 0)
    directory = folder / "scanned-0"
    state_path = folder / "scanned.state"
    with TimedKafka() as judge:
        for codec in ("none",) if quick else ("none", "lz4", "zstd"):
            made = data.letters(folder, records) if codec == "none" else data.words(folder, records // 4)
            judge.bench_append(
                directory,
                made.path,
                codec=codec,
                now_ms=data.NOW_MS,
                records_per_ms=data.RECORDS_PER_MS,
                config=CONFIG,
            )
            config = LogConfig(segment_bytes=CONFIG["segment.bytes"])
            with PartitionLog.open(
                str(directory),
                partition=partition,
                config=config,
                known=LastKnown(clean=True),
                state_path=str(state_path),
            ) as log:
                end = log.log_end_offset
            reader = PartitionReader(
                PartitionPlace(str(directory), partition, str(state_path)), high_watermark=partial(int, end)
            )
            ours: list[float] = []
            in_place: list[float] = []
            copied: list[float] = []
            others: list[float] = []
            patience = machine.Patience(rounds)
            unwanted = discarded
            while len(ours) < rounds:
                with machine.watching(*judge.processes) as watch:
                    times = (
                        _scanned(reader, made.count),
                        judge.bench_iterate(directory)["seconds"][0],
                        judge.bench_iterate(directory, copy=True)["seconds"][0],
                    )
                unwanted -= 1
                if unwanted >= 0 or not patience.takes(watch):
                    continue
                for series, seconds in zip((ours, in_place, copied), times, strict=True):
                    series.append(seconds)
                others.append(watch.others_cores)
            reader.close()
            shutil.rmtree(directory)
            state_path.unlink()
            detail = {
                "records": made.count,
                "seconds_ours": ours,
                "seconds_kafka_in_place": in_place,
                "seconds_kafka_copied": copied,
                "others_cores": others,
            }
            for how, theirs in (("in place", in_place), ("taken out", copied)):
                ratio = median(theirs) / median(ours)
                claimed = codec == "none" and how == "in place"
                yield Result(
                    part="scan",
                    name=f"{codec}, {made.name}; Kafka's are {how}",
                    ours=rate(made.count, median(ours)),
                    theirs=rate(made.count, median(theirs)),
                    ratio=ratio,
                    target=f">= {TIMES_KAFKA}x" if claimed else "",
                    met=ratio >= TIMES_KAFKA if claimed else None,
                    others_cores=max(others),
                    detail=detail,
                )


def _scanned(reader: PartitionReader, expected: int) -> float:
    rows = 0
    began = time.perf_counter()
    for columns in reader.columns(0):
        rows += to_arrow(columns).select(COLUMNS).num_rows
        del columns  # its memory serves the next ones
    seconds = time.perf_counter() - began
    if rows != expected:
        raise AssertionError(f"the scan found {rows} records of {expected}")
    return seconds
