"""A source folder that is the oracle, and Spark's streams over it: for tests of micro-batches that Spark runs again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

Spark = Any
ROOT = Path(__file__).parents[1]
SOAK = os.environ.get("DURAMEN_SOAK") == "1"
ROUNDS = 20 if SOAK else 3
DRIVER = ROOT / "tests" / "streaming" / "driver.py"


class Rows:
    """A source folder, and what was put into it."""

    def __init__(self, folder: Path, name: str, rng: random.Random) -> None:
        self.folder = folder
        self.name = name
        self.rng = rng
        self.files = 0
        self.values: list[str] = []
        self.last: list[tuple[str, str]] = []
        folder.mkdir()

    def add(self) -> None:
        values = [f"{self.name}-{self.files:03d}-{n:04d}" for n in range(self.rng.randrange(1, 60))]
        self.last = [(f"k{self.rng.randrange(6)}", value) for value in values]
        draft = self.folder / f".{self.files}"
        draft.write_text("\n".join(json.dumps({"key": key, "value": value}) for key, value in self.last))
        os.utime(draft, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
        draft.rename(self.folder / f"{self.files:05d}.json")
        self.files += 1
        self.values += values

    def last_table(self) -> pa.Table:
        """What was added last, for a writer without Spark."""
        return pa.table({"key": [key.encode() for key, _ in self.last], "value": [v.encode() for _, v in self.last]})


def start(spark: Spark, rows: Rows, checkpoint: Path, write: Callable[[Any, int], None]) -> Any:
    stream = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 1).json(str(rows.folder))
    return (
        stream.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def run(spark: Spark, rows: Rows, checkpoint: Path, write: Callable[[Any, int], None]) -> Any:
    query = start(spark, rows, checkpoint, write)
    assert query.awaitTermination(110)
    return query


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had died before Spark noted the end of its last batch."""
    last = max((path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def drive(root: Path | str, rows: Rows, checkpoint: Path, **told: Any) -> subprocess.Popen[bytes]:
    """What it says is in `checkpoint` with the suffix .log."""
    told |= {"store": str(root), "source": str(rows.folder), "checkpoint": str(checkpoint)}
    with open(checkpoint.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(told)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )


def said(checkpoint: Path) -> str:
    return checkpoint.with_suffix(".log").read_text(errors="replace")[-5000:]


def has_stopped(driver: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{driver.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
