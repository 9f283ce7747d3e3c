"""A process that appends to one partition and runs its retention, over and over, until its standard input is closed.

What is at an offset follows from the offset alone (`key_of`, `value_of`), so whoever reads knows what it must find.
"""

from __future__ import annotations

import random
import select
import sys
import time

import pyarrow as pa

from logstore.commit.committer import Committer
from logstore.store import LogStore
from logstore.upkeep.retention import retain

TOPIC = "orders"
KEYS = 97
#: among so many records every key there is comes several times
MEMORY = 20 * KEYS
#: what retention leaves, many times as much
RETAINED_BYTES = 2_000_000
CONFIGS = {
    "segment.bytes": 40_000,
    "index.interval.bytes": 1000,
    "retention.bytes": RETAINED_BYTES,
    "retention.ms": -1,
    "file.delete.delay.ms": 200,
}


def key_of(offset: int) -> bytes:
    return b"k%d" % (offset * offset % KEYS)


def value_of(offset: int) -> bytes | None:
    """Now and then a tombstone."""
    return None if offset % 11 == 0 else b"%d " % offset + b"x" * (offset % 50)


def state_at(end_offset: int) -> dict[bytes, bytes]:
    """The latest value of each key below an offset."""
    latest: dict[bytes, int] = {}
    for offset in range(max(end_offset - MEMORY, 0), end_offset):
        latest[key_of(offset)] = offset
    found = {key: value_of(offset) for key, offset in latest.items()}
    return {key: value for key, value in found.items() if value is not None}


def append(store: LogStore, count: int) -> None:
    first = store.ends(store.topic(TOPIC)).high_watermarks[0]
    offsets = range(first, first + count)
    table = pa.table(
        {
            "key": pa.array(map(key_of, offsets), pa.binary()),
            "value": pa.array(map(value_of, offsets), pa.binary()),
            "timestamp": pa.array([1_700_000_000_000 + offset for offset in offsets], pa.int64()),
        }
    )
    store.append(TOPIC, table)


def main(path: str, seed: int) -> None:
    rng = random.Random(seed)
    with LogStore(path) as store:
        topic = store.topic(TOPIC)
        committer = Committer(store)
        while not select.select([sys.stdin], [], [], 0)[0]:
            append(store, rng.randrange(1, 400))
            if rng.random() < 0.3:
                committer.flush(topic)
            if rng.random() < 0.4:
                committer.flush(topic)
                retain(store, topic, 0, now_ms=time.time_ns() // 1_000_000)
            if rng.random() < 0.1:
                store.sweep()
            time.sleep(rng.uniform(0, 0.25))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
