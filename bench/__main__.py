"""`python -m bench [PART…] [--quick]`: measures, prints a table, keeps JSON lines.

Exit code 1 when a target is missed. The engine is measured on one core, Spark on all; see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.result import Result

#: part -> module; those of Spark have all cores
PARTS = {
    "append": "bench.append",
    "scan": "bench.scan",
    "memory": "bench.memory",
    "startup": "bench.startup",
    "growth": "bench.growth",
    "compaction": "bench.compaction",
    "sink": "bench.spark_sink",
    "source": "bench.spark_source",
    "restore": "bench.spark_restore",
    "latency": "bench.spark_latency",
    "bucket": "bench.spark_bucket",
}
RESULTS = Path(__file__).resolve().parent.parent / "build" / "bench"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them without")
    parser.add_argument("--quick", action="store_true", help="small sizes: is it working, not how fast is it")
    parser.add_argument("--folder", type=Path, help="where the data goes (about 14 GB; default: build/bench)")
    chosen = parser.parse_args(arguments)
    for part in chosen.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}; there are {', '.join(PARTS)}")
    out = Console(stderr=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y%m%dT%H%M%S")
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="data-", dir=chosen.folder or RESULTS) as folder,
        open(RESULTS / f"{began}{'-quick' if chosen.quick else ''}.jsonl", "w") as lines,
    ):
        for part in chosen.parts or PARTS:
            module = importlib.import_module(PARTS[part])
            if PARTS[part].startswith("bench.spark"):
                machine.take_all_cores()
            else:
                machine.take_one_core()
            with out.status(f"{part} …"):
                for result in module.run(Path(folder), quick=chosen.quick):
                    results.append(result)
                    lines.write(json.dumps({"quick": chosen.quick, **result.as_json()}) + "\n")
                    lines.flush()
                    out.print(f"{result.part}: {result.name}: {result.ours} {result.verdict}", highlight=False)
    Console(width=max(Console().width, 120)).print(_table(results))
    if any(result.others_cores is not None and result.others_cores > machine.NOISY_CORES for result in results):
        out.print(f"Others used more than {machine.NOISY_CORES} of a core meanwhile: do not trust single figures.")
    missed = [result for result in results if result.met is False]
    if missed:
        out.print(f"[bold red]{len(missed)} target(s) missed[/]: " + "; ".join(f"{r.part} {r.name}" for r in missed))
    return 1 if missed else 0


def _table(results: list[Result]) -> Table:
    table = Table(title="duramen bench, medians", title_justify="left")
    for name, where in (
        ("part", "left"),
        ("what", "left"),
        ("ours", "right"),
        ("theirs", "right"),
        ("ratio", "right"),
        ("target", "left"),
        ("verdict", "left"),
        ("others", "right"),
    ):
        table.add_column(name, justify="right" if where == "right" else "left")
    for result in results:
        table.add_row(
            result.part,
            result.name,
            result.ours,
            result.theirs,
            "" if result.ratio is None else f"{result.ratio:.2f}x",
            result.target,
            result.verdict,
            "" if result.others_cores is None else f"{result.others_cores:.2f}",
            style=None if result.met is not False else "bold red",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
