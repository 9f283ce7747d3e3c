"""A partition's log under power cuts: at every step of a script, at random moments of random work, and in recovery.

The recovery point is kept by the log's owner in a file of its own, written after a flush returned; a log is opened
again with what that file says.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from crash.oracle import Bounds, Model, bounds, check, check_files, check_quarantine
from crash.workload import Operation, Place, Settings, Writer, draw_operation, draw_settings, leader_epoch
from logstore.clock import ManualClock
from logstore.limits import INT64_MAX
from logstore.records.record import Record
from logstore.segment.names import FileKind
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter
from simulation.filesystem import PowerCut, SimulatedFileSystem

PLACE = Place("/store")
NOW_MS = 1_700_000_000_000
SOAK = 50 if os.environ.get("DURAMEN_SOAK") == "1" else 1


@contextlib.contextmanager
def told(case: str) -> Iterator[None]:
    """Print which case it is that fails."""
    try:
        yield
    except BaseException:
        print(case)
        raise


class Machine:
    """A log, its model, and the machine they run on. After a cut `survivor` is the machine started again."""

    def __init__(self, settings: Settings, fs: SimulatedFileSystem | None = None) -> None:
        self.settings = settings
        self.clock = ManualClock(NOW_MS)
        if fs is None:
            fs = SimulatedFileSystem(self.clock)
            for path in (PLACE.root, *map(os.path.dirname, (PLACE.directory, PLACE.state_path))):
                fs.mkdir(path)
                fs.fsync_dir(os.path.dirname(path))
        self.fs = fs
        self.model = Model()
        self.under_way: Operation | None = None
        #: what the log must be compared with once it is open again, and should the power fail before it is
        self.pending: Bounds | None = None
        self.pending_cut: Bounds | None = None
        self.writer: Writer | None = None

    @property
    def log(self) -> PartitionWriter:
        assert self.writer is not None
        return self.writer.log

    def start(self) -> None:
        """Open the log, without trust in how it was left; judge what is found."""
        found = self.fs.files()
        self.writer = Writer(PLACE, self.fs, self.settings, self.clock)
        if self.pending is not None:
            check_quarantine(found, self.fs, PLACE, self.log)
            model = check(self.log, self.model, self.pending)
            check_files(self.fs, PLACE, self.log)
            self.model, self.pending, self.pending_cut = model, None, None
        self.model = replace(self.model, flushed=self.log.recovery_point)

    def do(self, operation: Operation) -> None:
        assert self.writer is not None
        self.under_way = operation
        self.writer.carry_out(operation)
        self.model = self.model.after(operation, self.log, self.writer.content_end(), self.clock.now_ms())
        self.under_way = None

    def wait(self, ms: int) -> None:
        """Let time pass, with the flusher looking as often as it does."""
        flush_ms = self.settings.config.flush_ms
        step_ms = flush_ms // 4 if flush_ms < INT64_MAX else ms
        while ms > 0:
            self.clock.advance(min(ms, step_ms))
            ms -= step_ms
            if flush_ms < INT64_MAX:
                self.log.flush_if_due(within_ms=step_ms + 1)
                self.model = replace(self.model, flushed=self.log.recovery_point)

    def durable_end(self) -> int:
        """How much of what was acknowledged no power cut can take: what was flushed, and what the settings promise."""
        model, config = self.model, self.settings.config
        end = model.flushed
        if config.flush_messages <= len(model.entries):
            end = max(end, model.entries[-config.flush_messages].offset + 1)
        old = [entry.offset for entry in model.entries if self.clock.now_ms() - entry.appended_ms >= config.flush_ms]
        return max(end, old[-1] + 1 if old else 0)

    def survivor(self, rng: random.Random | None) -> Machine:
        """The machine after a power cut now, or, without `rng`, after the process alone was killed."""
        after = Machine(self.settings, self.fs.kill() if rng is None else self.fs.crash(rng))
        after.clock = self.clock
        after.model = self.model
        if self.pending is None:
            now_ms = self.clock.now_ms()
            cut = bounds(self.model, self.under_way, durable_end=self.durable_end(), now_ms=now_ms)
            killed = bounds(self.model, self.under_way, durable_end=INT64_MAX, now_ms=now_ms)
            after.pending, after.pending_cut = cut if rng else killed, cut
        else:
            after.pending, after.pending_cut = self.pending_cut if rng else self.pending, self.pending_cut
        return after

    def records(self) -> list[Record]:
        return list(self.log.records(isolation=Isolation.LOG_END))


# --- a script, cut at every step ---------------------------------------------------------------------------------

_Step = Callable[[PartitionWriter], Operation]


def _append(count: int, kind: str = "append") -> _Step:
    def step(log: PartitionWriter) -> Operation:
        end, now_ms = log.log_end_offset, log.clock.now_ms()
        return Operation(kind, 1000 * count + end, now_ms, count, leader_epoch=leader_epoch(now_ms))

    return step


def _batch(producer_id: int, count: int, *, transactional: bool = False) -> _Step:
    def step(log: PartitionWriter) -> Operation:
        state = log.producers.producers.get(producer_id)
        return Operation(
            "batch",
            seed=log.log_end_offset,
            now_ms=NOW_MS,
            count=count,
            producer_id=producer_id,
            sequence=state.last_sequence + 1 if state else 0,
            transactional=transactional,
            leader_epoch=leader_epoch(log.clock.now_ms()),
        )

    return step


def _marker(producer_id: int, *, commit: bool) -> _Step:
    def step(log: PartitionWriter) -> Operation:
        return Operation(
            "marker",
            count=1,
            producer_id=producer_id,
            commit=commit,
            leader_epoch=leader_epoch(log.clock.now_ms()),
        )

    return step


def _plain(kind: str, offset: int = 0) -> _Step:
    return lambda log: Operation(kind, offset=offset)


def _flush() -> _Step:
    return lambda log: Operation("flush", offset=log.log_end_offset)


def _behind_end(kind: str, records: int) -> _Step:
    return lambda log: Operation(kind, offset=max(log.log_end_offset - records, log.log_start_offset))


APPEND_AND_ROLL = (_append(5), _append(3, "columns"), _plain("roll"), _append(6), _append(4), _append(7))
TRANSACTIONS = (
    _append(2),
    _batch(11, 2, transactional=True),
    _flush(),
    _batch(12, 2),
    _marker(11, commit=False),
    _plain("roll"),
    _batch(12, 1, transactional=True),
    _flush(),
    _batch(13, 2),
    _marker(12, commit=True),
    _append(3),
)
FLUSHES = (_append(4), _flush(), _append(5), _plain("flush", 6), _append(6), _flush(), _append(2))
TRUNCATIONS = (
    _append(6),
    _append(6),
    _batch(11, 2),
    _flush(),
    _behind_end("truncate", 3),
    _append(3),
    _append(8),
    _flush(),
    _behind_end("truncate", 14),
    _append(7),
    _append(8),
    _flush(),
)
TRUNCATED_AND_WRITTEN_AGAIN = (
    *[_append(1)] * 4,
    _plain("roll"),
    *[_append(1)] * 2,
    _flush(),
    _plain("truncate", 2),
    *[_append(1)] * 2,  # the log ends where the segment began that was cut off
    _plain("truncate", 3),
    _append(1),
    _flush(),
)
RETENTION = (
    _append(8),
    _batch(11, 2),
    _append(6),
    _behind_end("advance", 9),
    _append(2),
    _plain("retain"),
    _append(8),
    _append(8),
    _flush(),
    _plain("retain"),
    _append(4),
    _behind_end("advance", 1),
    _append(2),
    _flush(),
)
BEGINNING_ANEW = (
    _append(8),
    _flush(),
    lambda log: Operation("anew", offset=log.log_end_offset + 4),
    _append(6),
    _behind_end("anew", 3),
    _append(3),
    _flush(),
    _append(8),
    _append(8),
    _flush(),
    lambda log: Operation("anew", offset=log.log_start_offset - 3),
    _append(2),
)
CLOSING = (_append(8), _batch(11, 2), _plain("reopen"), _append(6), _plain("roll"), _plain("reopen"), _append(2))
SCRIPTS = {
    "append and roll": APPEND_AND_ROLL,
    "transactions": TRANSACTIONS,
    "flushes": FLUSHES,
    "truncations": TRUNCATIONS,
    "truncated and written again": TRUNCATED_AND_WRITTEN_AGAIN,
    "retention": RETENTION,
    "starting again": BEGINNING_ANEW,
    "closing": CLOSING,
}
TOPIC = {
    "segment.bytes": "700",
    "index.interval.bytes": "100",
    "segment.index.bytes": "240",
    "retention.bytes": "1500",
    "retention.ms": "-1",
    "file.delete.delay.ms": "0",
}


def run(settings: Settings, script: tuple[_Step, ...], cut_at: int) -> tuple[Machine, bool]:
    """A machine on which `script` ran until the power failed in operation `cut_at`; False when it ended before."""
    machine = Machine(settings)
    machine.fs.fail_after(cut_at)
    try:
        machine.start()
        for step in script:
            machine.do(step(machine.log))
            machine.wait(20)
    except PowerCut:
        return machine, True
    machine.fs.heal()
    return machine, False


@pytest.mark.parametrize("preallocate", ["false", "true"], ids=["plain", "preallocated"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_power_cut_at_any_step_loses_nothing_flushed_and_leaves_a_prefix(
    name: str, preallocate: str, seed: int
) -> None:
    settings = Settings(TOPIC | {"preallocate": preallocate}, long_lived=preallocate == "true")
    step, was_cut = 0, True
    while was_cut:
        machine, was_cut = run(settings, SCRIPTS[name], step)
        for draw in range(3 * SOAK):
            with told(f"cut in operation {step}, draw {draw}: {machine.fs.trace[-1]}, in {machine.under_way}"):
                after = machine.survivor(random.Random(f"{seed}/{step}/{draw}"))
                after.start()
                after.do(_append(3)(after.log))
                after.do(_flush()(after.log))
        step += 1
    assert step > 50


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_power_cut_in_recovery_changes_nothing_about_what_is_recovered(name: str, seed: int) -> None:
    settings = Settings(TOPIC)
    rng = random.Random(seed)
    steps = run(settings, SCRIPTS[name], INT64_MAX)[0].fs.operations
    for cut_at in rng.sample(range(steps), min(6 * SOAK, steps)):
        machine, _ = run(settings, SCRIPTS[name], cut_at)
        crashed = machine.survivor(rng)
        undisturbed = crashed.survivor(None)
        undisturbed.start()
        step, was_cut = 0, True
        while was_cut:
            again = crashed.survivor(None)
            again.fs.fail_after(step)
            with told(f"first cut in operation {cut_at}, second in operation {step} of recovery"):
                try:
                    again.start()
                    was_cut = False
                except PowerCut:
                    last = again.survivor(rng)
                    last.start()
                    assert last.records() == undisturbed.records()
                    assert last.log.log_start_offset == undisturbed.log.log_start_offset
                    assert last.log.log_end_offset == undisturbed.log.log_end_offset
            step += 1
        assert step > 10


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_power_cut_while_a_killed_process_is_made_good(name: str, seed: int) -> None:
    """What the killed process left is visible, but not on disk; nothing durable may be made of it before it is."""
    settings = Settings(TOPIC)
    rng = random.Random(seed)
    steps = run(settings, SCRIPTS[name], INT64_MAX)[0].fs.operations
    for cut_at in rng.sample(range(steps), min(12 * SOAK, steps)):
        machine, _ = run(settings, SCRIPTS[name], cut_at)
        killed = machine.survivor(None)
        undisturbed = killed.survivor(None)
        undisturbed.start()
        for step in rng.sample(range(undisturbed.fs.operations), min(8 * SOAK, undisturbed.fs.operations)):
            again = killed.survivor(None)
            again.fs.fail_after(step)
            with told(f"killed in operation {cut_at}, cut in operation {step} of recovery: {machine.under_way}"):
                with contextlib.suppress(PowerCut):
                    again.start()
                again.survivor(rng).start()


def test_what_recovery_cut_off_does_not_come_back_behind_a_record_of_the_same_size(seed: int) -> None:
    machine, _ = run(Settings(TOPIC), (_append(1), _append(1), _append(1), _flush()), INT64_MAX)
    path = machine.log.segments[0].path(FileKind.LOG)
    position = list(machine.log.segments[0].headers())[1].position
    file = machine.fs.open(path, writable=True)
    file.pwrite(b"damage", position + 61)
    file.fsync()
    first, damaged, _ = machine.model.entries
    damaged_machine = machine.survivor(None)
    log = PLACE.open(damaged_machine.fs, machine.settings, machine.clock)
    assert log.log_end_offset == 1
    assert damaged.record is not None
    assert damaged.record.key is not None
    new = replace(damaged.record, key=b"n" * len(damaged.record.key))
    log.append([new])
    for draw in range(200 * SOAK):
        with told(f"draw {draw}"):
            fs = damaged_machine.fs.crash(random.Random(f"{seed}/{draw}"))
            found = list(PLACE.open(fs, machine.settings, machine.clock).records())
            assert found in ([first.record], [first.record, new])


# --- random work, random cuts --------------------------------------------------------------------------------------


def live(machine: Machine, rng: random.Random, operations: int) -> None:
    machine.start()
    for _ in range(operations):
        machine.wait(rng.choice((0, 1, 7, 30)))
        machine.do(draw_operation(rng, machine.log, machine.clock.now_ms()))


def lives(settings: Settings, rng: random.Random, generations: int) -> int:
    """One log through several cuts; returns how many of them came in the middle of something."""
    machine, cuts = Machine(settings), 0
    for _ in range(generations):
        if rng.random() < 0.9:
            machine.fs.fail_after(rng.choice((rng.randrange(30), rng.randrange(300))))
        try:
            live(machine, rng, 30)
        except PowerCut:
            cuts += 1
        machine = machine.survivor(None if rng.random() < 0.2 else rng)
    machine.start()
    return cuts


def test_random_work_survives_random_cuts(seed: int) -> None:
    cuts = 0
    for case in range(60 * SOAK):
        rng = random.Random(f"{seed}/{case}")
        settings = draw_settings(rng)
        with told(f"case {case}: {settings}"):
            cuts += lives(settings, rng, 4)
    assert cuts > 50


@pytest.mark.parametrize("messages", [1, 5, 40])
def test_flush_messages_bounds_how_many_records_a_cut_takes(messages: int, seed: int) -> None:
    for case in range(15 * SOAK):
        rng = random.Random(f"{seed}/{case}")
        settings = draw_settings(rng, **{"flush.messages": str(messages)})
        with told(f"case {case}: {settings}"):
            lives(settings, rng, 3)


@pytest.mark.parametrize("ms", [4, 50])
def test_flush_ms_bounds_how_old_a_record_is_that_a_cut_takes(ms: int, seed: int) -> None:
    for case in range(15 * SOAK):
        rng = random.Random(f"{seed}/{case}")
        settings = draw_settings(rng, **{"flush.ms": str(ms)})
        with told(f"case {case}: {settings}"):
            lives(settings, rng, 3)
