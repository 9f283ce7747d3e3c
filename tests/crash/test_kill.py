"""A process killed while it works on a log: what it acknowledged is there, once, and the log goes on.

The machine stays up, so what was written is there whether it was synced or not. The same log is killed again and again;
some kills meet a process that is still repairing what the last one left. A run is repeated with its seed as far as
timing allows: the operations are the same, the moment of the kill is not.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crash.oracle import Model, bounds, check, check_files
from crash.workload import Operation, Place, Settings, UnsyncedFiles, draw_settings, leader_epoch, records_of
from logstore.clock import SYSTEM_CLOCK
from logstore.limits import INT64_MAX

ROOT = Path(__file__).resolve().parents[2]
SOAK = 50 if os.environ.get("DURAMEN_SOAK") == "1" else 1
LOGS = 16 * SOAK
KILLS_PER_LOG = 25
UNSYNCED = UnsyncedFiles()


class WriterProcess:
    """The script `writer.py`, kept running because starting Python takes longer than a life of its child."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "crash" / "writer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        )
        self._heard = b""

    def _lines(self, until_s: float = float("inf")) -> Iterator[dict[str, Any]]:
        """What is said up to that time, without waiting any longer."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            while b"\n" in self._heard:
                line, _, self._heard = self._heard.partition(b"\n")
                yield dict(json.loads(line))
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], min(left_s, 60))[0]:
                return
            data = os.read(descriptor, 1 << 16)
            assert data, "the writer is gone"
            self._heard += data

    def live_and_die(self, order: dict[str, Any], after_s: float, *, opened: bool) -> Iterator[dict[str, Any]]:
        """Start a child, kill it that long after its start or, with `opened`, after it opened the log; yields what it
        said.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid = int(next(self._lines())["pid"])
        said = [next(self._lines())] if opened else []
        said += self._lines(time.monotonic() + after_s)
        os.kill(pid, signal.SIGKILL)
        for line in itertools.chain(said, self._lines()):
            assert "failed" not in line, line
            if "ended" in line:
                assert line["ended"] == "SIGKILL", line
                return
            yield line

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def writer() -> Iterator[WriterProcess]:
    process = WriterProcess()
    try:
        yield process
    finally:
        process.close()


@dataclass(slots=True)
class Life:
    """What one child said before it was killed."""

    model: Model
    under_way: Operation | None = None
    opened: bool = False
    operations: Counter[str] = field(default_factory=Counter)

    def hear(self, line: dict[str, Any]) -> None:
        if "opened" in line:
            self.opened = True
        elif "begins" in line:
            self.under_way = Operation(**line["begins"])
        else:
            assert self.under_way is not None
            self.model = self.model.after(self.under_way, _Facts(*line["done"]), line["done"][3], 0)
            self.operations[self.under_way.kind] += 1
            self.under_way = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the child tells of its log."""

    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    content_end: int


def judge(place: Place, copy: Place, settings: Settings, life: Life) -> Model:
    """Recover a copy, so that the next child finds the original as the kill left it. Returns what is there."""
    shutil.rmtree(copy.root, ignore_errors=True)
    shutil.copytree(place.root, copy.root)
    log = copy.open(UNSYNCED, settings, SYSTEM_CLOCK)
    allowed = bounds(life.model, life.under_way, durable_end=INT64_MAX, now_ms=0)
    model = check(log, life.model, allowed)
    check_files(UNSYNCED, copy, log)
    again = Operation("append", seed=life.model.log_end, now_ms=SYSTEM_CLOCK.now_ms(), count=3)
    _go_on(log, copy, settings, model, again)
    return model


def _go_on(log: Any, copy: Place, settings: Settings, model: Model, operation: Operation) -> None:
    """Append to the recovered log, close it, and find all of it again."""
    info = log.append(records_of(operation), batch_bytes=200, leader_epoch=leader_epoch(operation.now_ms))
    assert info.first_offset == model.log_end
    expected = list(log.records())
    log.close()
    log = copy.open(UNSYNCED, settings, SYSTEM_CLOCK, clean=True)
    assert not log.recovery.found_damage
    assert list(log.records()) == expected
    log.close(clean=False)


@pytest.mark.timeout(900 * SOAK)
def test_what_was_acknowledged_survives_kills(writer: WriterProcess, tmp_path: Path, seed: int) -> None:
    operations: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    for number in range(LOGS):
        rng = random.Random(f"{seed}/{number}")
        settings = draw_settings(rng, **({"flush.ms": "5"} if rng.random() < 0.3 else {}))
        place, copy = Place(str(tmp_path / "log")), Place(str(tmp_path / "copy"))
        shutil.rmtree(place.root, ignore_errors=True)
        model, sync = Model(), rng.random() < 0.25
        for kill in range(KILLS_PER_LOG):
            order = {
                "root": place.root,
                "topic": settings.topic,
                "long_lived": settings.long_lived,
                "sync": sync,
                "seed": f"{seed}/{number}/{kill}",
            }
            life = Life(model)
            opened, lives_s = rng.random() < 0.85, rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.2)))
            for line in writer.live_and_die(order, lives_s if opened else min(lives_s, 0.02), opened=opened):
                life.hear(line)
            try:
                os.makedirs(place.root, exist_ok=True)
                model = judge(place, copy, settings, life)
            except BaseException:
                print(f"log {number}, kill {kill}, in {life.under_way}: {settings}; {copy.root} has it")
                raise
            operations += life.operations
            in_what = life.under_way.kind if life.under_way else "between two operations"
            kills[in_what if life.opened else "opening the log"] += 1
    print(f"operations: {dict(operations)}; kills in: {dict(kills)}")
    assert sum(kills.values()) == LOGS * KILLS_PER_LOG
    assert kills["opening the log"] > 5
    assert {"append", "columns", "batch", "marker", "roll", "truncate", "advance", "retain", "flush"} <= set(operations)
