"""A store to schedule and measure: one compacted topic with work to do, one that is not compacted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from logstore.commit.committer import Committer
from logstore.commit.produce import table_of
from logstore.records.record import Record
from logstore.store import LogStore

KEYS, TURNS = 40, 8


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Topic `accounts`, two partitions, each key written eight times, the last key deleted; topic `events`."""
    path = tmp_path / "store"
    with LogStore(path, create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": 4000, "min.cleanable.dirty.ratio": 0.1}
        store.create_topic("accounts", partitions=2, configs=configs)
        store.create_topic("events")
        now_ms = int(time.time() * 1000) - 60_000
        for turn in range(TURNS):
            rows = [(f"key-{at}", f"value-{turn}-{at}" * 3) for at in range(KEYS)]
            store.append("accounts", table_of([Record(k.encode(), v.encode(), now_ms) for k, v in rows]))
        store.append("accounts", table_of([Record(b"key-0", None, now_ms)]))
        store.append("events", table_of([Record(None, b"e", now_ms)] * 5))
    return path


@pytest.fixture
def flushed(store_path: Path) -> Path:
    """The same, flushed: what is damaged now does not come back from staging."""
    with LogStore(store_path) as store:
        for topic in store.topics():
            Committer(store).flush(topic)
    return store_path
