"""One process on a store in a bucket, for tests that kill it: a writer, a maintainer or a reader, until it dies.

A writer notes a batch, and each that is acknowledged, in files that it alone writes: what stands there happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from logstore.bucket.collecting import Ages
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.commit.apps import AppBatch
from logstore.errors import CommitConflict, CommitUnknown, RetriableError
from logstore.records.record import Record

KEYS = 7
PARTITIONS = 2
#: no grace shorter than what a reader needs for one look; pins are not what is shown here
RULES = MaintenanceRules(
    seal=SealRules(tail_commits=4), force_compaction=True, sweep=True, ages=Ages(grace_ms=20_000), map_bytes=1 << 20
)


def records_of(writer: int, batch: int) -> list[Record]:
    """Follow from their numbers. Keys of a writer are its own."""
    rng = random.Random(f"{writer} {batch}")
    return [
        Record(b"%d-k%d" % (writer, rng.randrange(KEYS)), b"%d-%d-%d" % (writer, batch, n))
        for n in range(rng.randrange(1, 25))
    ]


def note(path: Path, batch: int) -> None:
    with path.open("ab") as file:
        file.write(b"%d\n" % batch)
        file.flush()
        os.fsync(file.fileno())


def noted(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(store: BucketStore, folder: Path, writer: int) -> None:
    """Each batch goes into both topics' worth of partitions: a log that keeps all, and a state that is compacted."""
    done = folder / f"done-{writer}"
    batch = len(noted(done))
    while True:
        for topic in ("log", "state"):
            app = AppBatch(f"{topic}-{writer}", batch, "query")
            while True:
                try:
                    store.append(topic, records_of(writer, batch), app=app)
                    break
                except (CommitUnknown, CommitConflict):
                    continue
        note(done, batch)
        batch += 1


def keep(store: BucketStore, folder: Path) -> None:
    while True:
        done = maintain(store, RULES)
        for what, error in done.failed:
            if not isinstance(error, RetriableError):
                (folder / f"failed-{os.getpid()}-{time.time_ns()}").write_text(f"{what}: {error!r}")
        if done.lost_records:
            (folder / f"failed-{os.getpid()}").write_text("records were lost")


def read(store: BucketStore, folder: Path) -> None:
    """A cursor: offsets without a gap. Each round anew, from the beginning."""
    while True:
        for number in range(PARTITIONS):
            at = 0
            with contextlib.suppress(RetriableError):
                for record in store.reader("log", number).records(0):
                    if record.offset != at:
                        (folder / f"failed-{os.getpid()}").write_text(f"{record.offset} follows {at} in {number}")
                    at += 1


def main(told: dict[str, Any]) -> None:
    store, folder = BucketStore(told["url"], storage_options=told["options"]), Path(told["folder"])
    if told["role"] == "writer":
        write(store, folder, told["number"])
    elif told["role"] == "maintainer":
        keep(store, folder)
    else:
        read(store, folder)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
