"""What was committed and what compaction did in a bucket, by the ledger and the manifests. Implements `Tables`.

Rows of the ledger do not say how large a batch is, and only those that this process saw come say what they took.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from logstore.bucket.rows import Kind, TopicRow
from logstore.compaction.maintenance import Commits
from logstore.ledger.rows import COMMITS, RUNS

if TYPE_CHECKING:
    from logstore.bucket.maintenance import BucketMaintenance
    from logstore.bucket.store import BucketStore

#: manifests are read again after so long: one request a partition
_LOOK_AGAIN_S = 10.0


class BucketTables:
    def __init__(self, store: BucketStore, maintenance: BucketMaintenance) -> None:
        self._store = store
        self._maintenance = maintenance

    def versions(self) -> tuple[int, ...]:
        return self._store.ledger.refresh().version, _look()

    def runs(self, version: int) -> tuple[int, pa.Table]:
        now = _look()
        if now == version:
            return version, RUNS.empty_table()
        rows = [
            asdict(run) | {"version": at, "removed": list(run.removed.items()), "workers": list(run.workers)}
            for at, run in enumerate(self._maintenance.runs())
        ]
        return now, pa.Table.from_pylist(rows, RUNS)

    def commits(self, known: Commits, most: int) -> Commits:
        view = self._store.ledger.refresh()
        if view.version == known.version:
            return known
        names = {topic.id: topic.name for topic in view.definitions.values()}
        kinds = (Kind.BATCH, Kind.EMPTY)
        details = {
            row.plan.key: entry.details
            for entry in self._store.ledger.seen_entries()
            for row in entry.rows
            if row.plan is not None
        }
        rows = [
            self._row(row, names.get(row.topic_id, ""), details.get(row.plan.key, {}) if row.plan else {})
            for row in view.rows
            if row.kind in kinds
        ]
        table = pa.Table.from_pylist(rows, COMMITS).select(known.rows.column_names)
        # Rows of batches that were sealed long ago are pruned.
        complete = len(view.rows) == 0 or view.rows[0].sequence <= 1
        return Commits(view.version, table, complete).newest(most)

    def _row(self, row: TopicRow, topic: str, told: Mapping[str, object]) -> dict[str, Any]:
        spans = zip(row.base_offsets, row.end_offsets, strict=True)
        return {
            # Ordered like the ledger's versions, which the summary does not keep.
            "version": row.clock_ms,
            "topic_id": row.topic_id,
            "topic": topic,
            "sequence": row.sequence,
            "plan_id": row.plan.key if row.plan else f"{row.app_id} {row.batch_id}",
            "app_id": row.app_id,
            "batch_id": row.batch_id,
            "query_id": row.query_id,
            "records": sum(end - base for base, end in spans),
            "timings_ms": _timings(told.get("timings_ms")),
            "workers": [each for each in _list(told.get("workers")) if isinstance(each, str)],
            "dead_letters": dead if isinstance(dead := told.get("dead_letters"), int) else None,
            "void": False,
            "committed_ms": row.clock_ms,
            "engine": "",
        }


def _timings(told: object) -> list[tuple[str, int]]:
    return [(name, ms) for name, ms in told.items() if type(ms) is int] if isinstance(told, dict) else []


def _list(told: object) -> list[object]:
    return told if isinstance(told, list) else []


def _look() -> int:
    """Counts the looks at manifests that there could have been."""
    return int(time.monotonic() / _LOOK_AGAIN_S)
