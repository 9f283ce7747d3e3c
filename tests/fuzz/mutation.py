"""A mutation fuzzer: inputs that were right once, damaged in every way that is cheap, through every reader of bytes.

A case is one input of one target. It follows from (seed, case number) alone: numbers are dealt in blocks, a block has
one target and one row of random words a case. Cases run in child processes with a ceiling on their memory, watched
from outside, so that a crash or a hang is found like any other finding; the input is kept under `build/fuzz`.

    python tests/fuzz/mutation.py --seed 7 --seconds 60        look for findings
    python tests/fuzz/mutation.py --seed 7 --case 123456       run one case again, here
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fuzz.targets import Target

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "fuzz"

BLOCK_CASES = 1024
WORDS = 16
CASE_SECONDS_MAX = 1.0
HANG_SECONDS = 60.0
#: on top of what the process has when the first case begins
MEMORY_BYTES_MAX = 256 << 20
FINDINGS_MAX = 5  # of one worker: more would only repeat the first

_PROGRESS = struct.Struct("<qqd")  # case under way, cases done, seconds spent on them

_EDGES = (0, 1, 2, 7, 13, 14, 26, 34, 48, 49, 61, 62, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000)
_INTEGERS = tuple(
    sorted(
        {sign * edge for edge in _EDGES for sign in (1, -1)}
        | {
            sign * (1 << bits) + more
            for bits in (20, 24, 30, 31, 32, 40, 62, 63)
            for sign in (1, -1)
            for more in (-1, 0, 1)
        }
    )
)
_WIDTHS = (1, 2, 4, 4, 8)


# --- cases ------------------------------------------------------------------------------------------------------------


def block_words(seed: int, block: int) -> list[list[int]]:
    """The random words of a block: one row for the block itself, then one a case."""
    generator = np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, block])
    rows: list[list[int]] = generator.integers(0, 1 << 32, (BLOCK_CASES + 1, WORDS), dtype=np.uint32).tolist()
    return rows


def block_target(targets: Sequence[Target], words: list[int]) -> Target:
    at = words[0] % sum(target.weight for target in targets)
    for target in targets:
        at -= target.weight
        if at < 0:
            return target
    raise AssertionError


def mutate(target: Target, words: list[int]) -> bytes | bytearray:
    """One damaged input. Every second one is made to pass its checksum again."""
    how, choice = words[0], words[1]
    corpus = target.corpus
    data = bytearray(corpus[choice % len(corpus)])
    # one to four changes, fewer more often
    for at in range(2, (4, 4, 4, 6, 6, 8, 10, 4)[how & 7], 2):
        _change(data, words[at], words[at + 1], target)
    return target.repair(data, words[14]) if how & 8 else data


def _change(data: bytearray, word: int, value: int, target: Target) -> None:
    size = len(data)
    corpus = target.corpus
    kind = word & 15
    at = (word >> 4) % size if size else 0
    if kind < 5:
        if size:
            data[at] ^= 1 << (value & 7)
    elif kind < 7:
        if size:
            data[at] = value & 0xFF
    elif kind < 11:  # a field of a likely width, at any place, becomes a number that programs get wrong
        width = _WIDTHS[value % 5]
        number = _INTEGERS[(value >> 8) % len(_INTEGERS)] if value & 0x80 else size + (value >> 8) % 33 - 16
        if target.text:
            data[at : at + width] = b"%d" % number
            return
        order = "little" if value & 0x60 == 0x60 else "big"
        data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, order)  # type: ignore[arg-type]
    elif kind == 11:  # a varint, in place of what is there or pushed in
        number = _INTEGERS[(value >> 8) % len(_INTEGERS)]
        bits = ((number << 1) ^ (number >> 63)) & 0xFFFFFFFFFFFFFFFF
        coded = bytearray()
        while bits > 0x7F:
            coded.append(bits & 0x7F | 0x80)
            bits >>= 7
        coded.append(bits)
        data[at : at + (1 if value & 1 else len(coded))] = coded
    elif kind == 12:
        del data[at:]
    elif kind == 13:
        del data[at : at + 1 + value % 16]
    elif kind == 14:  # splice: the tail of another input
        other = corpus[value % len(corpus)]
        data[at:] = other[(value >> 8) % (len(other) + 1) :]
    else:
        data[at:at] = data[at : at + 1 + value % 64]


def case_input(targets: Sequence[Target], seed: int, number: int) -> tuple[Target, bytes]:
    block, at = divmod(number, BLOCK_CASES)
    words = block_words(seed, block)
    target = block_target(targets, words[0])
    return target, bytes(mutate(target, words[at + 1]))


# --- a worker ---------------------------------------------------------------------------------------------------------


def limit_memory() -> None:
    """Let the process grow by MEMORY_BYTES_MAX from here on, no further."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))


def work(
    targets: Sequence[Target],
    seed: int,
    worker: int,
    workers: int,
    seconds: float,
    cases: int,
    progress: Path,
    out: Path,
    findings_max: int = FINDINGS_MAX,
) -> int:
    """Run this worker's blocks until the time or the number of cases is used up; returns how many findings."""
    import mmap

    from logstore.errors import DuramenError

    with progress.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), _PROGRESS.size)
    pack_into = _PROGRESS.pack_into
    findings = done = 0
    block = worker
    clock = time.perf_counter
    begun = clock()
    limit_memory()
    while (not seconds or clock() - begun < seconds) and (not cases or block * BLOCK_CASES < cases):
        words = block_words(seed, block)
        target = block_target(targets, words[0])
        run = target.run
        number = block * BLOCK_CASES
        for row in words[1:]:
            pack_into(shared, 0, number, done, clock() - begun)
            data = bytes(mutate(target, row))
            started = clock()
            try:
                run(data)
            except DuramenError:
                pass  # typed, and the target asks no more of it
            except Exception:
                findings += 1
                _report(out, seed, number, target.name, data, traceback.format_exc())
            if clock() - started > CASE_SECONDS_MAX and _cpu_seconds(run, data) > CASE_SECONDS_MAX:
                findings += 1
                _report(out, seed, number, target.name, data, f"took more than {CASE_SECONDS_MAX} s")
            if findings >= findings_max:
                return findings
            number += 1
            done += 1
        block += workers
    pack_into(shared, 0, -1, done, clock() - begun)
    return findings


def _cpu_seconds(run: object, data: bytes) -> float:
    """The machine may have been busy with something else: what counts is the process's own time, measured again."""
    assert callable(run)
    started = time.process_time()
    with contextlib.suppress(Exception):
        run(data)
    return time.process_time() - started


def _report(out: Path, seed: int, number: int, target: str, data: bytes, what: str) -> None:
    stem = out / f"{target}-{seed}-{number}"
    out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".bin").write_bytes(data)
    finding = {"seed": seed, "case": number, "target": target, "what": what}
    with stem.with_suffix(".json").open("w") as file:
        json.dump(finding, file, indent=2)
    print(json.dumps(finding), flush=True)


# --- the watcher ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    cases: int = 0
    seconds: float = 0.0
    findings: list[dict[str, object]] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.cases / self.seconds if self.seconds else 0.0
        return f"{self.cases} cases in {self.seconds:.0f} s ({rate:.0f}/s), {len(self.findings)} findings"


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[str]
    progress: Path
    last: tuple[int, float] = (-1, 0.0)
    ended: bool = False


def fuzz(
    seed: int,
    *,
    seconds: float = 0.0,
    cases: int = 0,
    workers: int = 1,
    progress: Path,
    out: Path = OUT,
    self_test: str = "",
) -> Outcome:
    """Run workers until `seconds` are over or `cases` are done, and collect what they find, crashes and hangs too."""
    running = [
        _start(seed, worker, workers, seconds, cases, progress / f"worker-{worker}", out, self_test)
        for worker in range(workers)
    ]
    outcome = Outcome()
    begun = time.monotonic()
    try:
        while not all(worker.ended for worker in running):
            time.sleep(0.05)
            for worker in running:
                if not worker.ended:
                    _look(worker, seed, outcome, out, self_test)
    finally:
        for worker in running:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
    outcome.seconds = time.monotonic() - begun
    return outcome


def _start(
    seed: int, worker: int, workers: int, seconds: float, cases: int, progress: Path, out: Path, self_test: str
) -> _Worker:
    progress.write_bytes(_PROGRESS.pack(-1, 0, 0.0))
    arguments = {"seed": seed, "worker": worker, "workers": workers, "seconds": seconds, "cases": cases}
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in arguments.items())]
    command += [f"--progress={progress}", f"--out={out}", f"--self-test={self_test}"]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    output = progress.with_suffix(".out").open("w+")
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    output.close()
    return _Worker(process, progress)


def _look(worker: _Worker, seed: int, outcome: Outcome, out: Path, self_test: str) -> None:
    """Notice what a worker did since the last look: progress, its end, or that it stands still."""
    number, done, _ = _PROGRESS.unpack(worker.progress.read_bytes())
    now = time.monotonic()
    code = worker.process.poll()
    if code is None:
        if number != worker.last[0] or number < 0:
            worker.last = (number, now)
        elif now - worker.last[1] > HANG_SECONDS:
            worker.process.send_signal(signal.SIGKILL)
            worker.process.wait()
            worker.ended = True
            outcome.cases += done
            outcome.findings.append(_regenerated(out, seed, number, f"no end after {HANG_SECONDS:.0f} s", self_test))
        return
    worker.ended = True
    outcome.cases += done
    text = worker.progress.with_suffix(".out").read_text()
    outcome.findings += [json.loads(line) for line in text.splitlines() if line.startswith('{"seed"')]
    if code < 0:
        what = f"killed by {signal.Signals(-code).name}"
        outcome.findings.append(_regenerated(out, seed, number, what, self_test))
    elif code > 1:
        outcome.findings.append({"seed": seed, "case": number, "target": "worker", "what": text[-4000:]})


def _regenerated(out: Path, seed: int, number: int, what: str, self_test: str) -> dict[str, object]:
    """A finding of a worker that could not report itself; the input is made once more, and kept."""
    if number < 0:
        return {"seed": seed, "case": number, "target": "worker", "what": what}
    target, data = case_input(_targets(self_test), seed, number)
    _report(out, seed, number, target.name, data, what)
    return {"seed": seed, "case": number, "target": target.name, "what": what}


def _targets(self_test: str) -> tuple[Target, ...]:
    from fuzz.targets import all_targets

    return (_broken_target(self_test),) if self_test else all_targets()


def _broken_target(how: str) -> Target:
    """A reader with a fault, to see that faults are found. It shows on inputs that begin with two even bytes."""
    from fuzz.targets import Target

    def run(data: bytes) -> None:
        if len(data) < 2 or data[0] & 1 or data[1] & 1:
            return
        if how == "segfault":
            import ctypes

            ctypes.string_at(8)
        elif how == "hang":
            time.sleep(2 * HANG_SECONDS)
        elif how == "slow":
            end = time.process_time() + 1.5 * CASE_SECONDS_MAX
            while time.process_time() < end:
                pass
        elif how == "memory":
            bytearray(2 * MEMORY_BYTES_MAX)
        else:
            raise KeyError(how)

    return Target("broken", [b"\1\1\1\1"], run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--case", type=int, help="run only this one, in this process")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=OUT, help="where inputs of findings are kept")
    parser.add_argument("--self-test", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    from logstore.errors import DuramenError

    if given.case is not None:
        target, data = case_input(_targets(given.self_test), given.seed, given.case)
        print(f"{target.name}, {len(data)} bytes: {data.hex()}", flush=True)
        try:
            target.run(data)
        except DuramenError as error:
            print(f"{type(error).__name__}: {error}")
        return 0
    if given.worker is not None:
        targets = _targets(given.self_test)
        found = work(
            targets,
            given.seed,
            given.worker,
            given.workers,
            given.seconds,
            given.cases,
            given.progress,
            given.out,
            1 if given.self_test else FINDINGS_MAX,
        )
        return 1 if found else 0
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzz(
            given.seed,
            seconds=given.seconds,
            cases=given.cases,
            workers=given.workers,
            progress=Path(folder),
            out=given.out,
        )
    print(outcome)
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(main())
