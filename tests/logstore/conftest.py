"""A store with two topics of a few hundred records, for tests that read, move or damage one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic
from reference.partition_writer import writing

BASE_MS = 1_700_000_000_000


def some_records(count: int, *, seed: int = 0, start_ms: int = BASE_MS) -> list[Record]:
    return [
        Record(b"key-%d" % (number % 17), b"value-%d-%d" % (seed, number), start_ms + number, (("h", b"%d" % number),))
        for number in range(count)
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[LogStore]:
    with LogStore(root, create=True, lock_wait_ms=50) as opened:
        yield opened


@pytest.fixture
def orders(store: LogStore) -> Topic:
    """Two partitions, several small segments each: 300 and 200 records."""
    topic = store.create_topic("orders", partitions=2, configs={"segment.bytes": 2000, "index.interval.bytes": 200})
    for number, count in ((0, 300), (1, 200)):
        with writing(store, topic, number, what="test") as log:
            log.append(some_records(count, seed=number), batch_bytes=400)
    return topic
