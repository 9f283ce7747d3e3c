"""A shop's store with three hours behind it, and with records that want to harm whoever looks at them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from compaction_job import compact
from compaction_job.sampling import take_samples
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.records.record import Record
from logstore.store import LogStore

STEPS = 16
STEP_MS = 675_000
NAMES = ("Ada", "Björn", "Chidi", "Dana", "Emre", "Fatima", "Grace", "Hiro")

#: topic: partitions, customers, records a step, share of tombstones, settings
TOPICS = {
    "orders": (4, 20_000, 6_000, 0.02, {"segment.bytes": 128 << 10, "min.cleanable.dirty.ratio": 0.45}),
    "accounts": (
        6,
        6_000,
        3_000,
        0.08,
        {"segment.bytes": 48 << 10, "min.cleanable.dirty.ratio": 0.3, "delete.retention.ms": 3_600_000},
    ),
    "payments": (2, 9_000, 1_000, 0.0, {"segment.bytes": 48 << 10, "max.compaction.lag.ms": 9_000_000}),
    "inventory": (3, 2_000, 1_500, 0.0, {"segment.bytes": 32 << 10, "delete.retention.ms": 7_200_000}),
    "clicks": (1, 9_000, 900, 0.0, {"cleanup.policy": "delete", "retention.ms": 172_800_000}),
    "sessions": (2, 2_000, 900, 0.2, {"cleanup.policy": "compact,delete", "segment.bytes": 32 << 10}),
}

APPS = {"orders": "orders-cdc", "clicks": "web-clicks"}

SCRIPT = "<script>window.__pwned = 1</script><img src=x onerror='window.__pwned = 2'>"
OVERRIDE = "\u202egnp.exe\u2066"
HOSTILE = "edge-cases"
HOSTILE_RECORDS = (
    Record(SCRIPT.encode(), SCRIPT.encode(), headers=((SCRIPT, SCRIPT.encode()), (OVERRIDE, None))),
    Record(OVERRIDE.encode(), f"{OVERRIDE}\r\n\0\x1b[31m".encode()),
    Record(b"\xff\xfe\x80invalid", b"\xc3\x28\xf0\x9f"),
    Record(b"large", b"<b>A</b>" * (1 << 17), headers=(("big", b"B" * 100_000),)),
    Record(b"json", json.dumps({"__proto__": {"x": SCRIPT}, "html": SCRIPT, "constructor": None}).encode()),
    Record(b"gone", None),
    Record("עברית".encode(), "שלום <i>world</i>".encode()),
)


def make_shop(path: Path) -> None:
    """Orders, payments and the rest over the three hours that end now, compacted every half an hour or so."""
    randomness = np.random.default_rng(15)
    clock = ManualClock(time.time_ns() // 1_000_000 - STEPS * STEP_MS)
    with LogStore(path, create=True, clock=clock) as store:
        for name, (partitions, _, _, _, configs) in TOPICS.items():
            store.create_topic(name, partitions=partitions, configs={"cleanup.policy": "compact", **configs})
        settings = {"max.message.bytes": 4 << 20, "duramen.compaction.version.header": SCRIPT + OVERRIDE}
        store.create_topic(HOSTILE, configs={"cleanup.policy": "compact", **settings})
        store.append(HOSTILE, HOSTILE_RECORDS)
        for step in range(STEPS):
            clock.advance(STEP_MS)
            for name, (_, customers, count, gone, _) in TOPICS.items():
                records = _records(randomness, clock.now_ms(), customers, count, gone)
                app = APPS.get(name)
                store.append(name, records, app=None if app is None else AppBatch(app, step))
            if step % 3 == 1:
                compact(store, threads=1)
            take_samples(store)
        store.alter_topic("sessions", configs={"duramen.compaction.paused": "true"})


def _records(randomness: np.random.Generator, now_ms: int, customers: int, count: int, gone: float) -> list[Record]:
    # Few customers come often, as in life.
    keys = (customers * randomness.random(count) ** 2).astype(int)
    totals = randomness.integers(100, 100_000, count)
    tombstones = randomness.random(count) < gone
    return [
        Record(
            f"customer-{key:05d}".encode(),
            None
            if is_gone
            else json.dumps({"name": NAMES[key % len(NAMES)], "total": total / 100, "at": now_ms}).encode(),
            timestamp_ms=now_ms - int(STEP_MS * (count - number) / count),
            headers=(("source", b"shop"),),
        )
        for number, (key, total, is_gone) in enumerate(
            zip(keys.tolist(), totals.tolist(), tombstones.tolist(), strict=True)
        )
    ]
