"""When the thread behind the sink flushes what was appended; without Spark, which has no part in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.records.record import Record
from logstore.store import LogStore
from streaming.flusher import flush_later, flush_now

LONG_MS = 3_600_000


@pytest.mark.parametrize(
    ("configs", "delay_ms", "is_flushed"),
    [
        ({}, 0, True),
        ({}, LONG_MS, False),
        ({"flush.ms": 50}, LONG_MS, True),
        ({"flush.ms": LONG_MS}, 0, True),
        ({"flush.messages": 6}, LONG_MS, True),
        ({"flush.messages": 7}, LONG_MS, False),
    ],
)
def test_the_earliest_of_delay_age_and_count_decides(
    tmp_path: Path, configs: dict[str, object], delay_ms: int, is_flushed: bool
) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("t", configs=configs)
        committer = Committer(store)
        for _ in range(2):
            done = append_table(committer, "t", table_of([Record(b"k", b"v", -1)] * 3))
            flush_later(committer, done.topics.values(), delay_ms)
        until = time.monotonic() + (30 if is_flushed else 0.5)
        while os.listdir(store.layout.staging) and time.monotonic() < until:
            time.sleep(0.02)
        assert (not os.listdir(store.layout.staging)) == is_flushed
        flush_now()
        assert store.ends(topic).recovery_points == [6] or store.ends(topic).recovery_points == (6,)
