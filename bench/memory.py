"""Anonymous memory while a large partition is appended and scanned, each in a process of its own.

Measured is RssAnon: memory of the process itself, not the page cache, not mapped files. What counts is how far it rises
above its value after all imports and one warm-up call.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench import data, machine
from bench.result import Result
from logstore.records.arrow import to_arrow
from logstore.store import LogStore

LIMIT_BYTES = 256 << 20
PARTITION_BYTES = 10 << 30
QUICK_BYTES = 256 << 20
_SAMPLE_S = 0.01


def run(folder: Path, *, quick: bool) -> Iterator[Result]:
    size = QUICK_BYTES if quick else PARTITION_BYTES
    records = data.letters(folder, data.ROWS_PER_BATCH)
    root = folder / "large"
    free = shutil.disk_usage(folder).free
    if free < 1.2 * size:
        raise OSError(f"{folder} has {free >> 30} GiB free; the partition of {size >> 30} GiB does not fit")
    try:
        end_offset = 0
        for what in ("append", "scan"):
            arguments = [what, str(root), str(records.path), str(size), str(end_offset)]
            command = [sys.executable, "-m", "bench.memory", *arguments]
            with machine.watching() as watch:
                answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            end_offset = answer["end_offset"]
            risen = answer["peak_bytes"] - answer["base_bytes"]
            yield Result(
                part="memory",
                name=f"{what} {answer['log_bytes'] / (1 << 30):.1f} GiB",
                ours=f"{risen / (1 << 20):.0f} MiB above {answer['base_bytes'] / (1 << 20):.0f} MiB",
                target=f"< {LIMIT_BYTES >> 20} MiB above",
                met=risen < LIMIT_BYTES,
                others_cores=watch.others_cores,
                detail=answer,
            )
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Sampler:
    """The largest RssAnon seen since the start, looked at every few milliseconds and at the end."""

    def __init__(self) -> None:
        self.peak_bytes = machine.rss_anon_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, machine.rss_anon_bytes())

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self._look()

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()


def _append(root: Path, records: data.Records, size: int) -> int:
    """One record batch over and over, until the log has the size; returns its end offset."""
    (batch,) = records.batches()
    with LogStore(root, create=True) as store:
        topic = store.create_topic("large", partitions=1, configs={"segment.bytes": 1 << 30})
        while store.log_bytes(topic, 0) < size:
            store.append("large", batch)
        return store.high_watermark(topic, 0)


def _scan(root: Path, end_offset: int) -> None:
    """All records as Arrow columns, looked at and let go."""
    rows = 0
    with LogStore(root) as store:
        reader = store.reader("large", 0)
        for columns in reader.columns(0):
            rows += to_arrow(columns).num_rows
        reader.close()
    if rows != end_offset:
        raise AssertionError(f"the scan found {rows} records of {end_offset}")


def _measured(what: str, root: Path, source: Path, size: int, end_offset: int) -> dict[str, float]:
    """In the process that is measured."""
    records = data.Records("", source, data.ROWS_PER_BATCH)
    small = root.with_name("warm-up")
    small_end_offset = _append(small, records, 1)
    if what == "scan":
        _scan(small, small_end_offset)
    shutil.rmtree(small)
    base_bytes = machine.rss_anon_bytes()
    began = time.perf_counter()
    with Sampler() as sampler:
        if what == "append":
            end_offset = _append(root, records, size)
        else:
            _scan(root, end_offset)
    return {
        "base_bytes": base_bytes,
        "peak_bytes": sampler.peak_bytes,
        "seconds": time.perf_counter() - began,
        "log_bytes": sum(path.stat().st_size for path in root.glob("logs/large-0/*.log")),
        "end_offset": end_offset,
    }


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
