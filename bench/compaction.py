"""One pass of compaction against Kafka's own cleaner, on copies of the same directory.

A directory is written once; each round both sides get a copy of it (its sealed files are hard links, which neither
side changes) and clean it whole, with the same clock and the same buffer. Kafka's time is that of its cleaner alone,
without opening the log; ours is that of a whole pass, with its state files. The cost of a small change and the memory
of a pass over a large log are measured as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench import machine
from bench.kafka import TimedKafka
from bench.memory import Sampler
from bench.result import Result, median, rate
from logstore.cleaner.work import PassReport
from logstore.config import LogConfig
from logstore.files import OS_FILES
from logstore.records.compression import codec_by_name
from logstore.records.offset_map import MapSettings
from logstore.topic import TopicPartition
from reference.cleaning import clean_partition
from reference.partition_writer import PartitionWriter

PARTITION = TopicPartition("t", 0)
SEGMENT_BYTES = 128 << 20
BUFFER_BYTES = 128 << 20
NOW_MS = 1_700_000_000_000
ROWS = 500_000
CONFIG: dict[str, str | int] = {"segment.bytes": SEGMENT_BYTES, "cleanup.policy": "compact"}
OURS = LogConfig(segment_bytes=SEGMENT_BYTES, cleanup_policy=frozenset({"compact"}))
MEMORY_ABOVE_BYTES = 128 << 20

#: records, keys, codec, cores, times Kafka
CASES = (
    (10_000_000, 1_000_000, "none", 1, 6.0),
    (10_000_000, 1_000_000, "none", 2, 10.0),
    (10_000_000, 1_000, "none", 1, 4.0),
    (4_000_000, 400_000, "lz4", 1, 3.0),
    (4_000_000, 400_000, "zstd", 1, 2.0),
)


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    rounds = 2 if quick else 6
    with TimedKafka() as judge:
        for records, keys, codec, cores, times in CASES:
            count = records // 10 if quick else records
            yield _against_kafka(folder, judge, count, keys, codec, cores, times, rounds)
        yield _small_change(folder, judge, 1_000_000 if quick else 4_000_000)
    yield _two_threads(folder, 2_000_000 if quick else 10_000_000, 4 * rounds + 1)
    yield _memory(folder, 2_000_000 if quick else 20_000_000)


# --- data -----------------------------------------------------------------------------------------------------------


def _columns(rng: np.random.Generator, ids: npt.NDArray[np.int64], words: bool) -> pa.RecordBatch:
    count = len(ids)
    keys = np.empty((count, 10), dtype=np.uint8)
    rest = ids.copy()
    for column in range(9, -1, -1):
        keys[:, column] = 48 + rest % 10
        rest //= 10
    # sixteen letters where it is to be compressed to about a half, the whole alphabet where it is not compressed
    values = rng.integers(65, 69 if words else 91, (count, 100), dtype=np.uint8)
    columns = [
        pa.Array.from_buffers(pa.binary(size), count, [None, pa.py_buffer(data.tobytes())]).cast(pa.binary())
        for size, data in ((10, keys), (100, values))
    ]
    times = pa.array(np.full(count, NOW_MS), pa.int64())
    return pa.RecordBatch.from_arrays([*columns, times], names=["key", "value", "timestamp"])


def _write(
    directory: Path, count: int, keys: int, codec: str, *, first: bool = True, segment_bytes: int = SEGMENT_BYTES
) -> int:
    """A log of random keys, rolled at its end; returns where its empty active segment begins."""
    rng = np.random.default_rng(count + keys)
    directory.mkdir(exist_ok=not first)
    config = LogConfig(segment_bytes=segment_bytes, cleanup_policy=frozenset({"compact"}))
    with PartitionWriter.open(
        str(directory), partition=PARTITION, config=config, clean=True, state_path=f"{directory}.state"
    ) as log:
        for at in range(0, count, ROWS):
            ids = rng.integers(0, keys, min(ROWS, count - at))
            log.append_columns(_columns(rng, ids, codec != "none"), codec_id=codec_by_name(codec).id)
        return log.roll()


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".log":
            os.link(file, target / file.name)
        else:
            shutil.copy2(file, target / file.name)
    if Path(f"{source}.state").exists():
        shutil.copy2(f"{source}.state", f"{target}.state")
    return target


# --- measuring ------------------------------------------------------------------------------------------------------


def _ours(directory: Path, end: int, *, threads: int = 1, config: LogConfig = OURS) -> tuple[float, PassReport]:
    began = time.perf_counter()
    report = clean_partition(
        OS_FILES,
        str(directory),
        partition=PARTITION,
        config=config,
        state_path=f"{directory}.state",
        first_uncleanable_offset=end,
        now_ms=NOW_MS + 1000,
        map_settings=MapSettings(buffer_bytes=BUFFER_BYTES),
        producers={},
        threads=threads,
        groups_at_once=threads + 1,
    )
    return time.perf_counter() - began, report


def _against_kafka(
    folder: Path, judge: TimedKafka, count: int, keys: int, codec: str, cores: int, times: float, rounds: int
) -> Result:
    source = folder / "source"
    end = _write(source, count, keys, codec)
    ours, kafka, others = [], [], []
    removed = 0
    for number in range(rounds):
        (machine.take_all_cores if cores > 1 else machine.take_one_core)()
        machine.fill_cache(folder)
        with machine.watching(*judge.processes) as watch:
            seconds, report = _ours(_copy(source, folder / "ours"), end, threads=cores)
            machine.take_one_core()
            machine.fill_cache(folder)
            theirs = judge.clean(
                _copy(source, folder / "kafka-0"),
                CONFIG,
                now_ms=NOW_MS + 1000,
                dedupe_buffer_bytes=BUFFER_BYTES,
                timeout_s=600,
            )
        if number:  # the first round warms both sides up
            ours.append(seconds)
            kafka.append(theirs.stats["nanos"] / 1e9)
            others.append(watch.others_cores)
        removed = sum(report.removed.values())
        assert theirs.end_offset == report.end_offset
    for name in ("source", "ours", "kafka-0"):
        shutil.rmtree(folder / name, ignore_errors=True)
        Path(f"{folder / name}.state").unlink(missing_ok=True)
    ratio = median(kafka) / median(ours)
    return Result(
        part="compaction",
        name=f"{count / 1e6:g} M records, {keys:,} keys, {codec}, {cores} core{'s' if cores > 1 else ''}",
        ours=rate(count, median(ours)),
        theirs=rate(count, median(kafka)),
        ratio=ratio,
        target=f">= {times:g}x Kafka's cleaner",
        met=ratio >= times,
        others_cores=median(others),
        detail={"seconds_ours": ours, "seconds_kafka": kafka, "removed": removed},
    )


def _small_change(folder: Path, judge: TimedKafka, count: int) -> Result:
    """5 % new records whose keys live in a tenth of the clean segments: what is written follows what changes."""
    source = folder / "source"
    small = 8 << 20
    config = LogConfig(segment_bytes=small, cleanup_policy=frozenset({"compact"}))
    source.mkdir()
    rng = np.random.default_rng(1)
    with PartitionWriter.open(
        str(source), partition=PARTITION, config=config, clean=True, state_path=f"{source}.state"
    ) as log:
        for at in range(0, count, ROWS):
            log.append_columns(_columns(rng, np.arange(at, min(at + ROWS, count)), False))
        end = log.roll()
    _ours(source, end, config=config)
    with PartitionWriter.open(
        str(source), partition=PARTITION, config=config, clean=True, state_path=f"{source}.state"
    ) as log:
        ids = rng.integers(int(count * 0.4), int(count * 0.5), count // 20)
        log.append_columns(_columns(rng, ids, False))
        end = log.roll()
    checkpoint = count
    _, report = _ours(_copy(source, folder / "ours"), end, config=config)
    theirs = judge.clean(
        _copy(source, folder / "kafka-0"),
        {**CONFIG, "segment.bytes": small},
        now_ms=NOW_MS + 1000,
        checkpoint=checkpoint,
        dedupe_buffer_bytes=BUFFER_BYTES,
        timeout_s=600,
    )
    for name in ("source", "ours", "kafka-0"):
        shutil.rmtree(folder / name, ignore_errors=True)
        Path(f"{folder / name}.state").unlink(missing_ok=True)
    share = report.written_bytes / theirs.stats["bytes_written"]
    return Result(
        part="compaction",
        name="bytes written for 5 % new records",
        ours=f"{report.written_bytes / 1e6:.0f} MB",
        theirs=f"{theirs.stats['bytes_written'] / 1e6:.0f} MB",
        ratio=share,
        target="< 0.20x of Kafka's",
        met=share < 0.20,
    )


def _two_threads(folder: Path, count: int, rounds: int) -> Result:
    """One partition with two tasks against one."""
    source = folder / "source"
    end = _write(source, count, count // 10, "none")
    seconds: dict[int, list[float]] = {1: [], 2: []}
    machine.take_all_cores()
    others = []
    for number in range(rounds):
        for threads in (1, 2):
            machine.fill_cache(folder)
            with machine.watching() as watch:
                took, _ = _ours(_copy(source, folder / "ours"), end, threads=threads)
            if number:  # the first round warms both up
                seconds[threads].append(took)
                others.append(watch.others_cores)
    shutil.rmtree(source)
    shutil.rmtree(folder / "ours", ignore_errors=True)
    # Of each round, since the machine drifts by more than what is measured.
    ratio = median([one / two for one, two in zip(seconds[1], seconds[2], strict=True)])
    return Result(
        part="compaction",
        name=f"{count / 1e6:g} M records, two tasks against one",
        ours=rate(count, median(seconds[2])),
        theirs=rate(count, median(seconds[1])),
        ratio=ratio,
        target=">= 1.6x",
        met=ratio >= 1.6,
        others_cores=median(others),
        detail={str(threads): values for threads, values in seconds.items()},
    )


def _memory(folder: Path, count: int) -> Result:
    """RssAnon of a pass in a process of its own."""
    source = folder / "large"
    end = _write(source, count, count // 4, "none")
    command = [sys.executable, "-m", "bench.compaction", str(source), str(end)]
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    shutil.rmtree(source)
    risen = answer["peak_bytes"] - answer["base_bytes"]
    limit = BUFFER_BYTES + MEMORY_ABOVE_BYTES
    return Result(
        part="compaction",
        name=f"memory for {answer['log_bytes'] / (1 << 30):.1f} GiB, {count // 4 / 1e6:g} M keys",
        ours=f"{risen / (1 << 20):.0f} MiB above {answer['base_bytes'] / (1 << 20):.0f} MiB",
        target=f"< {limit >> 20} MiB above (buffer + 128)",
        met=risen < limit,
        detail=answer,
    )


def _measure(directory: str, end: int) -> None:
    size = sum(path.stat().st_size for path in Path(directory).glob("*.log"))
    base = machine.rss_anon_bytes()
    with Sampler() as sampler:
        _, report = _ours(Path(directory), end, threads=2)
    print(
        json.dumps(
            {
                "base_bytes": base,
                "peak_bytes": sampler.peak_bytes,
                "log_bytes": size,
                "map_keys": report.map_keys,
                "map_full": report.map_full,
            }
        )
    )


if __name__ == "__main__":
    _measure(sys.argv[1], int(sys.argv[2]))
