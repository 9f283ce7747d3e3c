"""Partitions whose last passes failed: set aside, and tried again after a wait that doubles with each failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from logstore.ledger import Ledger
from logstore.ledger.rows import DONE, FAILED, RunRow
from logstore.topics.opened import OpenStore

#: of a compaction's rows in the ledger
KIND = "compaction"
_RETRY_MS_MAX = 86_400_000


@dataclass(frozen=True, slots=True)
class SetAside:
    """A partition whose last passes failed."""

    reason: str
    failures: int
    failed_ms: int
    retry_ms: int


def last_failures(runs: Sequence[RunRow], base_ms: int) -> SetAside | None:
    """By the receipts of one partition, oldest first; None where its last pass did not fail."""
    found: SetAside | None = None
    for run in runs:
        if run.result == DONE:
            found = None
        elif run.result == FAILED:
            found = one_more(found, run.reason, run.ended_ms or 0, base_ms)
    return found


def one_more(before: SetAside | None, reason: str, failed_ms: int, base_ms: int) -> SetAside:
    """After another failure the wait is twice as long."""
    failures = before.failures + 1 if before is not None else 1
    wait_ms = min(base_ms * 2 ** min(failures - 1, 30), _RETRY_MS_MAX)
    return SetAside(reason, failures, failed_ms, failed_ms + wait_ms)


def failures_of(store: OpenStore, ledger: Ledger) -> dict[tuple[str, int], SetAside]:
    """Partitions whose last pass failed, with when they are tried again."""
    base_ms = store.broker_config.duramen_cleaner_retry_ms
    found: dict[tuple[str, int], SetAside] = {}
    names = ("topic_id", "partition", "result", "reason", "ended_ms")
    ended = (pc.field("kind") == KIND) & pc.field("result").isin([FAILED, DONE])
    rows = ledger.run_rows(["kind", *names], ended)
    failed = rows.filter(pc.field("result") == FAILED)
    keys = set(zip(failed["topic_id"].to_pylist(), failed["partition"].to_pylist(), strict=True))
    for topic_id, number, result, reason, ended_ms in zip(*(rows[name].to_pylist() for name in names), strict=True):
        key = (topic_id, number)
        if key not in keys or topic_id is None or number is None:
            continue
        if result == DONE:
            found.pop(key, None)
            continue
        found[key] = one_more(found.get(key), reason, ended_ms or 0, base_ms)
    return found


def set_aside_now(store: OpenStore, now_ms: int) -> dict[tuple[str, int], SetAside]:
    """Those whose wait is not over. A store without a ledger has none, and is not given one by looking."""
    return still_set_aside(failures_of(store, store.ledger()) if store.has_ledger else {}, now_ms)


def still_set_aside(failures: Mapping[tuple[str, int], SetAside], now_ms: int) -> dict[tuple[str, int], SetAside]:
    """Those whose wait is not over. A wait longer than the longest was recorded by a wrong clock, and does not
    count."""
    return {key: aside for key, aside in failures.items() if holds(aside, now_ms)}


def holds(aside: SetAside, now_ms: int) -> bool:
    """Whether its wait is not over."""
    return now_ms < aside.retry_ms <= now_ms + _RETRY_MS_MAX
