"""What a store costs as it grows: commits and runs in its ledger, partitions in a topic, segments in a partition, one,
ten and a hundred times.

The ledger is filled in bulk, through its own table code, with the rows that so many commits and runs would have left
(merged files and a checkpoint, as its upkeep makes them). Everything else goes the usual way.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from bench import machine
from bench.result import Result, median
from compaction_job.choice import Choice
from compaction_job.job import compact, plan
from compaction_job.report import Report
from compaction_job.retention import retain_all
from logstore.compaction.failures import KIND
from logstore.ledger import Ledger
from logstore.ledger.rows import COMMITS, DONE, RUNS
from logstore.ledger.table import Change
from logstore.store import LogStore
from logstore.upkeep.backup import backup

LEDGER_SIZES = (1_000, 10_000, 100_000)
PARTITION_SIZES = (100, 1_000, 10_000)
QUICK_LEDGER_SIZES, QUICK_PARTITION_SIZES = (100, 1_000), (20, 100)
APPENDS = 40
APPEND_RATIO_MAX = 1.5
EXPLAIN_S_MAX, OPEN_S_MAX = 1.0, 0.5
BATCH_S_MAX, FEW_S_MAX, IDLE_MS_MAX = 5.0, 0.15, 10.0
_CHUNK = 20_000


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    yield from _ledger(folder, QUICK_LEDGER_SIZES if quick else LEDGER_SIZES)
    yield from _partitions(folder, QUICK_PARTITION_SIZES if quick else PARTITION_SIZES)
    yield from _segments(folder, QUICK_PARTITION_SIZES if quick else PARTITION_SIZES)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- the ledger -----------------------------------------------------------------------------------------------------


def _ledger(folder: Path, sizes: tuple[int, ...]) -> Iterator[Result]:
    paths = {size: folder / f"ledger-{size}" for size in (0, *sizes)}
    for size, path in paths.items():
        _fill(path, size)
    appends: dict[int, list[float]] = {size: [] for size in paths}
    opened: dict[int, list[float]] = {size: [] for size in paths}
    explained: dict[int, list[float]] = {size: [] for size in paths}
    with machine.watching() as watch:
        for _ in range(4):  # in turns, so that all see the same machine
            for size, path in paths.items():
                opened[size].append(_timed(lambda path=path: _open(path)))  # type: ignore[misc]
                with LogStore(str(path)) as store:
                    explained[size].append(_timed(lambda store=store: plan(store, estimate=False)))  # type: ignore[misc]
                    store.append("grown", _rows(1, 1))
                    appends[size] += [
                        _timed(lambda store=store: store.append("grown", _rows(1, 1)))  # type: ignore[misc]
                        for _ in range(APPENDS // 4)
                    ]
    base = median(appends[0])
    for size in sizes:
        middle = median(appends[size])
        yield Result(
            part="growth",
            name=f"append, {size:,} commits and runs",
            ours=f"{middle * 1000:.1f} ms",
            theirs=f"{base * 1000:.1f} ms empty",
            ratio=middle / base,
            target=f"<= {APPEND_RATIO_MAX}x of an empty store",
            met=middle / base <= APPEND_RATIO_MAX,
            others_cores=watch.others_cores,
            detail={"seconds": appends[size], "empty": appends[0]},
        )
        for name, found, limit in (
            ("explain", explained[size], EXPLAIN_S_MAX),
            ("open", opened[size], OPEN_S_MAX),
        ):
            yield _limited(f"{name}, {size:,} commits and runs", median(found), limit, watch.others_cores, found)
    for path in paths.values():
        shutil.rmtree(path)


def _open(path: Path) -> None:
    with LogStore(str(path)) as store:
        Ledger(store.layout.ledger, fs=store.fs, clock=store.clock)


def _fill(path: Path, size: int) -> None:
    with LogStore(str(path), create=True) as store:
        topic = store.create_topic("grown", partitions=100, configs={"cleanup.policy": "compact"})
        ledger = Ledger(store.layout.ledger, fs=store.fs, clock=store.clock)
        details = json.dumps({"read_bytes": 1000, "written_bytes": 100, "groups": 1})
        for first in range(0, size, _CHUNK):
            numbers = range(first, min(first + _CHUNK, size))

            def commits(numbers: range = numbers) -> Change:
                rows = [
                    {
                        "version": ledger.commits_table.version + 1,
                        "topic_id": topic.id,
                        "topic": topic.name,
                        "sequence": number + 1,
                        "plan_id": f"{number:032x}",
                        "app_id": "app",
                        "batch_id": number,
                        "base_offsets": [number] * topic.partitions,
                        "end_offsets": [number + 1] * topic.partitions,
                        "records": topic.partitions,
                        "void": False,
                        "committed_ms": number,
                    }
                    for number in numbers
                ]
                last = {f"topic:{topic.id}": numbers[-1] + 1, "app:app": numbers[-1]}
                return Change(pa.Table.from_pylist(rows, schema=COMMITS), last)

            def runs(numbers: range = numbers) -> Change:
                rows = [
                    {
                        "version": ledger.runs_table.version + 1,
                        "run_id": f"run-{number}",
                        "kind": KIND,
                        "topic_id": topic.id,
                        "topic": topic.name,
                        "partition": number % topic.partitions,
                        "result": DONE,
                        "ended_ms": number,
                        "removed": [("superseded", 5)],
                        "details": details,
                    }
                    for number in numbers
                ]
                return Change(pa.Table.from_pylist(rows, schema=RUNS))

            ledger.commits_table.write(commits)
            ledger.runs_table.write(runs)
        ledger.maintain()
        ends = store.ends(topic)
        store.write_ends(topic, replace(ends, applied_sequence=size, flushed_sequence=size))


# --- partitions -----------------------------------------------------------------------------------------------------


def _partitions(folder: Path, sizes: tuple[int, ...]) -> Iterator[Result]:
    for size in sizes:
        yield from _wide(folder / f"partitions-{size}", size)


def _wide(path: Path, size: int) -> Iterator[Result]:
    with machine.watching() as watch, LogStore(str(path), create=True) as store:
        created = _timed(lambda: store.create_topic("wide", partitions=size, configs={"cleanup.policy": "compact"}))
        store.create_topic("other")
        store.append("other", _rows(1, 1))  # the kernels are loaded, the ledger is there
        first = _timed(lambda: store.append("wide", _rows(size, size)))
        batches = [_timed(lambda: store.append("wide", _rows(size, size))) for _ in range(3)]
        few = [_timed(lambda: store.append("wide", _rows(size, 10))) for _ in range(5)]
        idle = _timed(lambda: compact(store, retention=False)), _timed(lambda: compact(store))
        retained = _timed(lambda: retain_all(store, Choice(), Report("r", "local", store.clock.now_ms())))
        planned = _timed(lambda: plan(store, estimate=False))
        files = len(os.listdir("/proc/self/fd"))
    name, others = f"{size:,} partitions", watch.others_cores
    yield Result("growth", f"create a topic, {name}", f"{created:.2f} s", others_cores=others)
    yield _limited(f"first batch over all, {name}", first, BATCH_S_MAX, others, [first])
    yield _limited(f"batch over all, {name}", median(batches), BATCH_S_MAX, others, batches)
    yield _limited(f"batch over ten, {name}", median(few), FEW_S_MAX, others, few)
    for what, seconds in (("compact", idle[1]), ("retain", retained), ("explain", planned)):
        each_ms = seconds / size * 1000
        yield Result(
            part="growth",
            name=f"{what}, nothing to do, {name}",
            ours=f"{each_ms:.2f} ms each ({seconds:.2f} s)",
            target=f"< {IDLE_MS_MAX:.0f} ms each",
            met=each_ms < IDLE_MS_MAX,
            others_cores=others,
            detail={"seconds": seconds},
        )
    yield Result("growth", f"open files, {name}", str(files), target="< 256", met=files < 256)
    shutil.rmtree(path)


# --- segments -------------------------------------------------------------------------------------------------------


def _segments(folder: Path, sizes: tuple[int, ...]) -> Iterator[Result]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        for size in sizes:
            yield from _long(folder / f"segments-{size}", size)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _long(path: Path, size: int) -> Iterator[Result]:
    """Segments of one record each, of which a pass empties every one of the first half."""
    with machine.watching() as watch, LogStore(str(path), create=True) as store:
        store.create_topic("long", configs={"cleanup.policy": "compact", "segment.bytes": 1024})
        rows = pa.table(
            {
                "key": [b"key-%d" % (row % (size // 2)) for row in range(size)],
                "value": [b"v" * 900] * size,
                "partition": pa.array([0] * size, pa.int32()),
            }
        )
        appended = _timed(lambda: store.append("long", rows))
        planned = _timed(lambda: plan(store, estimate=False))
        first = _timed(lambda: compact(store, retention=False))
        again = _timed(lambda: compact(store, retention=False))
        copied = _timed(lambda: backup(store, str(path) + "-copy"))
        files = len(os.listdir("/proc/self/fd"))
    name, others = f"{size:,} segments", watch.others_cores
    for what, seconds in (
        ("append", appended),
        ("explain", planned),
        ("compact", first),
        ("compact, nothing to do", again),
        ("backup", copied),
    ):
        each_ms = seconds / size * 1000
        yield Result("growth", f"{what}, {name}", f"{each_ms:.2f} ms each ({seconds:.2f} s)", others_cores=others)
    yield Result("growth", f"open files, {name}", str(files), target="< 256", met=files < 256)
    shutil.rmtree(path)
    shutil.rmtree(str(path) + "-copy")


def _rows(count: int, partitions: int) -> pa.Table:
    return pa.table(
        {
            "key": [b"key-%d" % row for row in range(count)],
            "value": [b"v" * 100] * count,
            "partition": pa.array([row % partitions for row in range(count)], pa.int32()),
        }
    )


def _limited(name: str, seconds: float, limit_s: float, others: float | None, all_s: list[float]) -> Result:
    return Result(
        part="growth",
        name=name,
        ours=f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s",
        target=f"< {limit_s} s",
        met=seconds < limit_s,
        others_cores=others,
        detail={"seconds": all_s},
    )
