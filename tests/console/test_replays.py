"""Batches that came again are counted by the sink, and shown."""

from __future__ import annotations

import time
from typing import Any

from console.asking import Client
from logstore.commit.committer import Committed
from logstore.ledger.rows import CommitRequest, TopicCommit
from logstore.store import LogStore
from streaming import LogSink


def test_the_next_commit_tells_how_many_batches_came_again() -> None:
    given: list[dict[str, int]] = []
    answers = [
        Committed("", replayed=True),
        Committed("", replayed=True),
        Committed("a", timings_ms={"commit": 3, "append": 4}),
        Committed("b", timings_ms={"commit": 5, "append": 6}),
    ]

    class Sink(LogSink):
        def __init__(self) -> None:
            self._previous_ms: dict[str, int] = {}
            self.last = None

        def _written(self, df: Any, batch_id: int, previous_ms: dict[str, int]) -> Committed:
            given.append(previous_ms)
            return answers[batch_id]

    sink = Sink()
    for batch_id in range(4):
        sink.write(None, batch_id)  # type: ignore[arg-type]
    assert given == [{}, {"replays": 1}, {"replays": 2}, {"previous_commit": 3, "previous_append": 4}]


def test_replays_and_dead_letters_are_shown(client: Client, shop: LogStore) -> None:
    topic = shop.topic("empty")
    ledger = shop.ledger()
    ends = (0, 0, 0)
    for batch, replays in ((0, 2), (1, 0)):
        request = CommitRequest(
            f"{batch:032x}",
            (TopicCommit(topic.id, topic.name, batch, ends, ends),),
            app_id="again",
            batch_id=batch,
            expected_batch_id=None if batch == 0 else 0,
            timings_ms={"encode": 5, "replays": replays, "previous_commit": 7},
            dead_letters=3,
        )
        ledger.commit(request)
    time.sleep(0.6)
    [app] = [each for each in client.get("/apps")["apps"] if each["app_id"] == "again"]
    assert (app["replays"], app["dead_letters"], app["commits"]) == (2, 6, 2)
    assert app["timings"]["commit"] == {"last": 7, "p50": 7, "p95": 7}
    newest, oldest = client.get("/commits", app="again")["commits"]
    assert (newest["commit_ms"], oldest["commit_ms"]) == (None, 7)
