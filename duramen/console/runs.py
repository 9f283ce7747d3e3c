"""Runs: passes of compaction with their receipts, newest first, by page."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from duramen.console.position import read_position, write_position
from duramen.console.problems import Refused, bad_request
from duramen.console.view import View

_NOTHING = {"results": {}, "removed": {}, "read_bytes": 0, "written_bytes": 0}


def runs(
    view: View,
    *,
    topic: str | None = None,
    partition: int | None = None,
    result: str | None = None,
    from_ms: int | None = None,
    to_ms: int | None = None,
    limit: int = 50,
    position: str | None = None,
) -> dict[str, Any]:
    known = view.ledger.runs()
    table = known.table
    conditions = [
        pc.field("topic") == topic if topic is not None else None,
        pc.field("partition") == partition if partition is not None else None,
        pc.field("result") == result if result is not None else None,
        pc.field("started_ms") >= from_ms if from_ms is not None else None,
        pc.field("started_ms") < to_ms if to_ms is not None else None,
    ]
    for condition in conditions:
        if condition is not None:
            table = table.filter(condition)
    first = _first(table, position)
    page = table.slice(first, limit)
    more = first + page.num_rows < table.num_rows
    return {
        "now_ms": view.now_ms,
        "total": table.num_rows,
        "runs": [run_document(row) for row in page.to_pylist()],
        "next": _next(table, first + page.num_rows) if more else None,
        "summary": _summary(table),
        "forgotten": {**_NOTHING, **known.forgotten},
    }


def _first(table: pa.Table, position: str | None) -> int:
    """Where a page begins: behind all that started later, and those of the same moment that were given already."""
    if position is None:
        return 0
    started_ms, given = read_position(position, "r", 2)
    started = _started(table)
    if given < 0:
        raise bad_request("the position is none of ours", parameter="position")
    return int(min(np.searchsorted(-started, -started_ms, side="left") + given, table.num_rows))


def _next(table: pa.Table, at: int) -> str:
    started = _started(table)
    given = at - int(np.searchsorted(-started, -started[at], side="left"))
    return write_position("r", int(started[at]), given)


def _started(table: pa.Table) -> Any:
    return np.array(pc.fill_null(table["started_ms"], 0).to_numpy(), dtype=np.int64)


def _summary(table: pa.Table) -> dict[str, Any]:
    done = table.filter(pc.field("result") == "done")
    removed: Counter[str] = Counter()
    for each in done["removed"].chunks:  # fresh from a filter, so its keys and items are those of its rows
        for reason, count in zip(each.keys.to_pylist(), each.items.to_pylist(), strict=True):
            removed[reason] += count or 0
    return {
        "results": dict(Counter(table["result"].to_pylist())),
        "removed": dict(removed),
        "before_bytes": pc.sum(done["before_bytes"]).as_py() or 0,
        "after_bytes": pc.sum(done["after_bytes"]).as_py() or 0,
    }


def run(view: View, *, run_id: str) -> dict[str, Any]:
    known = view.ledger.runs()
    at = known.of_id.get(run_id)
    if at is None:
        raise Refused(
            404, "UnknownRun", "there is no such run", hint="Receipts of old runs are summed up after a while."
        )
    return run_document(known.rows([at])[0])


def runs_of(view: View, topic: str, partition: int, count: int) -> list[dict[str, Any]]:
    """The newest runs of a partition."""
    known = view.ledger.runs()
    return [run_document(row) for row in known.rows(known.of_partition.get((topic, partition), [])[:count])]


def last_ended(view: View) -> dict[str, int]:
    """When the last pass of each topic ended."""
    table = view.ledger.runs().table
    if not table.num_rows:
        return {}
    found = table.select(["topic", "ended_ms"]).group_by("topic").aggregate([("ended_ms", "max")])
    pairs = zip(found["topic"].to_pylist(), found["ended_ms_max"].to_pylist(), strict=True)
    return {topic: ended_ms for topic, ended_ms in pairs if topic is not None and ended_ms is not None}


def run_document(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the ledger as the API shows it."""
    names = ("run_id", "kind", "topic", "partition", "started_ms", "ended_ms", "result", "before_bytes", "after_bytes")
    return {name: row[name] for name in names} | {
        "engine": row["engine"] or "",
        "reason": row["reason"] or "",
        "removed": {reason: count for reason, count in row["removed"] or () if count},
        "map_fill": _finite(row["map_fill"]),
        "seconds": _finite(row["seconds"]),
        "workers": list(row["workers"] or ()),
        "airflow_run_id": row["airflow_run_id"],
        "details": _details(row["details"]),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _details(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}", parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
