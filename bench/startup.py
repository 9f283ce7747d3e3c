"""How long the commands take from nothing to their answer, on a small store."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from bench import data, machine
from bench.result import Result, median
from logstore.store import LogStore

RUNS = 7
LIGHT_S = 0.4  # commands that need no kernel
HEAVY_S = 1.5

LIGHT = (
    ("--help",),
    ("topics", "list"),
    ("topics", "describe", "small"),
    ("config",),
    ("offsets", "small"),
    ("describe", "small"),
)
HEAVY = (
    ("consume", "small", "--max-records", "10"),
    ("dump", "{log}"),
    ("verify", "small"),
    ("recover", "small"),
    ("retain", "small"),
)


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    path = folder / "store"
    log = _store(path)
    for commands, limit_s in ((LIGHT, LIGHT_S), (HEAVY, HEAVY_S)):
        for command in commands:
            arguments = [str(log) if word == "{log}" else word for word in command]
            seconds = []
            with machine.watching() as watch:
                for _ in range(1 + (3 if quick else RUNS)):
                    began = time.perf_counter()
                    done = subprocess.run(
                        [sys.executable, "-m", "duramen", "--store", str(path), *arguments],
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                    )
                    seconds.append(time.perf_counter() - began)
                    if done.returncode != 0:
                        raise AssertionError(f"duramen {' '.join(arguments)}: {done.stderr.decode()}")
            middle = median(seconds[1:])
            yield Result(
                part="startup",
                name=f"duramen {' '.join(word for word in command if word != '{log}')}",
                ours=f"{middle:.2f} s",
                target=f"< {limit_s} s",
                met=middle < limit_s,
                others_cores=watch.others_cores,
                detail={"seconds": seconds[1:]},
            )


def _store(path: Path) -> Path:
    """A store with one small topic; returns one of its log files."""
    with LogStore(str(path), create=True) as store:
        topic = store.create_topic("small", partitions=1)
        keys = [f"key-{number}" for number in range(1000)]
        store.append("small", pa.table({"key": keys, "value": keys, "timestamp": [data.NOW_MS] * len(keys)}))
        directory = Path(store.layout.partition(topic.partition(0)))
    return next(iter(sorted(directory.glob("*.log"))))
