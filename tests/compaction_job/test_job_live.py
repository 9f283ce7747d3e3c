"""Compaction while others write, read and restore: nobody sees a key that is lost or one that came back."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from compaction_job import compact
from logstore.ledger import Ledger
from logstore.records.record import Record
from logstore.restore.restore import plan_restore, restore_partition
from logstore.store import LogStore
from reference.partition_writer import writing

SECONDS = 60 if os.environ.get("DURAMEN_SOAK") == "1" else 8
KEYS = 40


def value_at(offset: int) -> bytes | None:
    """The record at an offset is a function of it, so that any reader can be judged."""
    rng = random.Random(offset * 7919)
    return None if rng.random() < 0.3 else rng.randbytes(rng.randrange(1, 30))


def key_at(offset: int) -> bytes:
    return b"k%d" % random.Random(offset * 104729).randrange(KEYS)


def state_at(end: int) -> dict[bytes, bytes]:
    state: dict[bytes, bytes | None] = {}
    for offset in range(end):
        state[key_at(offset)] = value_at(offset)
    return {key: value for key, value in state.items() if value is not None}


@contextmanager
def in_background(work: list[threading.Thread], failures: list[BaseException]) -> Iterator[None]:
    for thread in work:
        thread.start()
    try:
        yield
    finally:
        for thread in work:
            thread.join()
    if failures:
        raise failures[0]


def made(path: Path, *, segments: int = 0, **configs: object) -> LogStore:
    store = LogStore(path, create=True)
    settings = {"cleanup.policy": "compact", "segment.bytes": 400, "file.delete.delay.ms": 2000} | {
        key.replace("_", "."): value for key, value in configs.items()
    }
    store.create_topic("t", configs=settings)
    if segments:
        with writing(store, store.topic("t"), 0, what="a test") as log:
            for offset in range(segments):
                log.append([Record(key_at(offset), value_at(offset), 1_700_000_000_000)])
                log.roll()
    return store


def append(store: LogStore, count: int) -> None:
    begin = store.high_watermark(store.topic("t"), 0)
    offsets = range(begin, begin + count)
    table = pa.table(
        {
            "key": pa.array([key_at(o) for o in offsets], pa.binary()),
            "value": pa.array([value_at(o) for o in offsets], pa.binary()),
        }
    )
    store.append("t", table)


def looped(stop: threading.Event, failures: list[BaseException], step: object) -> threading.Thread:
    def run() -> None:
        try:
            while not stop.is_set():
                step()  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)
            stop.set()

    return threading.Thread(target=run)


def until(stop: threading.Event, enough: Callable[[], bool]) -> None:
    """Let them work for a while, and on a busy machine for as long as it takes to see something."""
    began = time.monotonic()
    while not stop.wait(0.1):
        elapsed = time.monotonic() - began
        if (elapsed > SECONDS and enough()) or elapsed > SECONDS + 120:
            break
    stop.set()


def test_readers_of_a_thousand_segments_see_every_swap_as_nothing(tmp_path: Path) -> None:
    store = made(tmp_path / "store", segments=1000, delete_retention_ms=0, segment_bytes=4000)
    topic = store.topic("t")
    stop, failures = threading.Event(), []
    swaps = [0]
    reads = [0]

    def compacting() -> None:
        append(store, 5)
        report = compact(store, force=True, roll_active=True, threads=1, retention=False)
        assert not report.failed, report.failed[0].reason
        swaps[0] += sum(run.report.groups_changed for run in report.done if run.report)

    def reading() -> None:
        with LogStore(tmp_path / "store") as mine:
            reader = mine.reader(topic, 0)
            end = reader.end_offset()
            seen = -1
            state: dict[bytes | None, bytes | None] = {}
            for record in reader.records(0, end):
                assert record.offset > seen
                assert (record.key, record.value) == (key_at(record.offset), value_at(record.offset))
                seen = record.offset
                state[record.key] = record.value
                if record.offset % 50 == 0:
                    time.sleep(0.001)  # so that a pass gets in between
            left = {key: value for key, value in state.items() if value is not None}
            # A key deleted in the meantime may be seen with its old value by a reader that passed it before, and so may
            # one that was written again behind the end: a pass takes what the reader was to come to.
            wanted = state_at(end)
            assert left.keys() >= wanted.keys()
            compared = wanted.keys() - {key_at(offset) for offset in range(end, reader.end_offset())}
            assert {key: left[key] for key in compared} == {key: wanted[key] for key in compared}
            reads[0] += 1

    with in_background([looped(stop, failures, compacting), looped(stop, failures, reading)], failures):
        until(stop, lambda: swaps[0] >= 10 and reads[0] >= 3)
    assert swaps[0] >= 10
    assert reads[0] >= 3


def test_a_restore_during_forced_passes_is_right(tmp_path: Path) -> None:
    """Tombstones go at once here: a restore must notice when one went while it read."""
    store = made(tmp_path / "store", delete_retention_ms=0)
    append(store, 200)
    stop, failures = threading.Event(), []
    restores = [0]
    passes = [0]

    def writing() -> None:
        append(store, random.randrange(1, 30))

    def compacting() -> None:
        with LogStore(tmp_path / "store") as mine:
            report = compact(mine, force=True, roll_active=True, threads=2, retention=False)
            assert not report.failed, report.failed[0].reason
            passes[0] += len(report.done)

    def restoring() -> None:
        with LogStore(tmp_path / "store") as mine:
            plan = plan_restore(mine, "t")
            found: dict[bytes, bytes] = {}
            for columns in restore_partition(mine, plan, 0):
                for record in columns.records():
                    assert record.key not in found
                    found[record.key] = record.value
            assert found == state_at(plan.end_offsets[0])
            restores[0] += 1

    work = [looped(stop, failures, step) for step in (writing, compacting, restoring)]
    with in_background(work, failures):
        until(stop, lambda: passes[0] >= 5 and restores[0] >= 5)
    assert passes[0] >= 5
    assert restores[0] >= 5


_KILLED = """
import sys
from compaction_job import compact
from logstore.store import LogStore
while True:
    with LogStore(sys.argv[1]) as store:
        compact(store, force=True, roll_active=True, retention=False)
        print("pass", flush=True)
"""


def test_processes_that_are_killed_leave_no_key_lost_or_returned(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = made(tmp_path / "store", delete_retention_ms=0)
    append(store, 300)
    for _ in range(20 if SECONDS > 8 else 4):
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(rng.randrange(1, 4)):
                append(store, rng.randrange(1, 40))
                time.sleep(rng.random() * 0.3)
            process.kill()
        end = store.high_watermark(store.topic("t"), 0)
        found = {r.key: r.value for r in store.reader(store.topic("t"), 0).records(0)}
        assert {key: value for key, value in found.items() if value is not None} == state_at(end)
    report = compact(store, force=True, roll_active=True)
    assert not report.failed
    runs = [run.result for run in Ledger(store.layout.ledger).runs() if run.kind == "compaction"]
    assert "running" not in runs
    directory = store.layout.partition(store.topic("t").partition(0))
    assert not [name for name in os.listdir(directory) if name.endswith((".cleaned", ".swap"))]
    assert not [name for name in os.listdir(store.layout.staging) if name.endswith("-run")]


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_throttle_is_kept(tmp_path: Path, tasks: int) -> None:
    rate = 4_000_000.0
    store = LogStore(tmp_path / "store", create=True)
    (tmp_path / "store" / "duramen.toml").write_text(f"log.cleaner.io.max.bytes.per.second = {rate}\n")
    store = LogStore(tmp_path / "store")
    store.create_topic("t", partitions=tasks, configs={"cleanup.policy": "compact", "segment.bytes": 200_000})
    rng = random.Random(1)
    for _ in range(6):
        rows = [(b"k%d" % rng.randrange(5000), rng.randbytes(100)) for _ in range(5000)]
        store.append("t", pa.table({"key": [k for k, _ in rows], "value": [v for _, v in rows]}))
    report = compact(store, force=True, roll_active=True, threads=tasks, retention=False)
    moved = sum(run.report.read_bytes + run.report.written_bytes for run in report.done if run.report)
    seconds = max(run.report.seconds for run in report.done if run.report)
    assert len(report.done) == tasks
    assert moved / seconds == pytest.approx(rate, rel=0.15)
