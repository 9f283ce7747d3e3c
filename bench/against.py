"""`python -m bench.against REVISION…`: this tree side by side with earlier ones, the same work in turns.

Each tree has a process of its own that stays up (`bench.worker`, started with that tree in front of the path), so that
Spark and the kernels are warm. A round does each piece of work once in each tree, in an order that changes. What is
printed is the median of the rounds' ratios, new to old, of seconds and of processor seconds: above 1 this tree is
slower. Nothing else of the machine is assumed quiet: both sides meet the same disturbance, a single round means
nothing, the median does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from bench.machine import TICKS_PER_S
from bench.result import median

ROOT = Path(__file__).resolve().parent.parent
TREES = ROOT / "build" / "against"
ENGINE = ("append", "small appends", "read", "compact", "restore")
SPARK = ("sink", "small sink", "source", "restore_state", "spark compact")


class Tree:
    """One version of the code and the process that works with it."""

    def __init__(self, name: str, code: Path, folder: Path, work: tuple[str, ...]) -> None:
        self.name = name
        environment = os.environ | {"PYTHONPATH": str(code), "PYSPARK_PYTHON": sys.executable}
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(folder)]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: dict[str, list[float]] = {each: [] for each in work}
        self.processor_s: dict[str, list[float]] = {each: [] for each in work}

    def do(self, work: str) -> tuple[float, float]:
        print(work, file=_pipe(self._process.stdin), flush=True)
        answer = _pipe(self._process.stdout).readline()
        if not answer:
            raise OSError(f"{self.name}: the process that measures {work} ended")
        seconds, processor_s = json.loads(answer)
        return seconds, processor_s

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        self._process.wait(120)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def checked_out(revision: str) -> tuple[str, Path]:
    """The revision's short name, and where its files lie below `build/`."""
    name = subprocess.check_output(["git", "rev-parse", "--short", revision], cwd=ROOT, text=True).strip()
    place = TREES / name
    if not place.exists():
        archive = subprocess.check_output(["git", "archive", "--format=tar", name], cwd=ROOT)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(place, filter="data")
    return name, place


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revisions", nargs="+", metavar="REVISION")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--spark", action="store_true", help="the sink, the source, restore and compaction with Spark")
    parser.add_argument("--only", action="append", help="this piece of work; may be given again")
    parser.add_argument("--folder", type=Path, help="where the data goes (default: build/against)")
    chosen = parser.parse_args(arguments)
    TREES.mkdir(parents=True, exist_ok=True)
    work = tuple(chosen.only or (SPARK if chosen.spark else ENGINE))
    out = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="data-", dir=chosen.folder or TREES) as folder:
        trees = []
        for name, code in [("this tree", ROOT), *map(checked_out, chosen.revisions)]:
            (Path(folder) / name).mkdir()
            trees.append(Tree(name, code, Path(folder) / name, work))
        try:
            for number in range(-1, chosen.rounds):  # the first does not count
                for each in work:
                    turn = trees if number % 2 else trees[::-1]
                    taken = {tree.name: tree.do(each) for tree in turn}
                    out.print(f"{number} {each} {taken}", highlight=False)
                    for tree in trees if number >= 0 else ():
                        tree.seconds[each].append(taken[tree.name][0])
                        tree.processor_s[each].append(taken[tree.name][1])
        finally:
            for tree in trees:
                tree.close()
    Console().print(_table(trees, work))
    return 0


def _table(trees: list[Tree], work: tuple[str, ...]) -> Table:
    new, *old = trees
    columns = [f"{what} to {each.name}" for each in old for what in ("seconds", "processor")]
    table = Table("work", f"{new.name}, s", *columns, title="medians of the rounds' ratios (quartiles)")
    for each in work:
        cells = []
        for tree in old:
            cells += [_ratios(new.seconds[each], tree.seconds[each])]
            cells += [_ratios(new.processor_s[each], tree.processor_s[each])]
        table.add_row(each, f"{median(new.seconds[each]):.3f}", *cells)
    return table


def _ratios(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios, and between which values half of them lie."""
    found = sorted(mine / max(other, 1 / TICKS_PER_S) for mine, other in zip(ours, theirs, strict=True))
    return f"{median(found):.3f} ({found[len(found) // 4]:.2f} to {found[-1 - len(found) // 4]:.2f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
