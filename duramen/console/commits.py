"""What apps commit: how often, how much, and how long each step takes. From the newest commits of the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from duramen.console.position import read_position, write_position
from duramen.console.view import View

_STEPS = 60
_TIMINGS = ("encode", "plan", "commit", "append")
#: a row is written before its own commit and append end: their times are in the app's next row
_NEXT_ROW = ("commit", "append")
_APPS_MAX = 500

Row = dict[str, Any]


def apps(view: View, *, range_ms: int = 86_400_000) -> dict[str, Any]:
    table, all_there = view.ledger.commits()
    newest_ms = pc.max(table["committed_ms"]).as_py() if table.num_rows else view.now_ms
    from_ms = max(newest_ms - range_ms, 0)
    oldest_ms = pc.min(table["committed_ms"]).as_py() if table.num_rows else from_ms
    chosen = table.filter(pc.field("committed_ms") >= from_ms)
    by_app: dict[str | None, list[Row]] = {}
    for row in chosen.to_pylist():
        by_app.setdefault(row["app_id"], []).append(row)
    step_ms = max(range_ms // _STEPS, 1)
    found = [_app(app_id, rows, from_ms, step_ms) for app_id, rows in by_app.items()]
    found.sort(key=lambda each: -each["last_committed_ms"])
    return {
        "now_ms": view.now_ms,
        "from_ms": from_ms,
        "step_ms": step_ms,
        "complete": all_there or oldest_ms < from_ms,
        "apps": found[:_APPS_MAX],
    }


def _app(app_id: str | None, rows: Sequence[Row], from_ms: int, step_ms: int) -> dict[str, Any]:
    """Rows of one app, oldest first; a commit has one row a topic, and says what it says of all of them in each."""
    firsts = list({row["plan_id"]: row for row in reversed(rows)}.values())[::-1]
    real = [row for row in firsts if not row["void"]]
    first_ms, last_ms = rows[0]["committed_ms"], rows[-1]["committed_ms"]
    seconds = max(last_ms - first_ms, 0) / 1000
    several = len(real) > 1 and seconds > 0
    sizes = [row["size_bytes"] for row in rows if row["size_bytes"] is not None]
    rows_count, bytes_count = sum(row["records"] for row in rows), sum(sizes) if sizes else None
    return {
        "app_id": app_id,
        "topics": sorted({row["topic"] for row in rows if row["topic"]})[:1000],
        "commits": len(real),
        "rows": rows_count,
        "bytes": bytes_count,
        "dead_letters": sum(row["dead_letters"] or 0 for row in real),
        "replays": sum(dict(row["timings_ms"] or ()).get("replays", 0) for row in real),
        "void": len(firsts) - len(real),
        "last_batch_id": next((row["batch_id"] for row in reversed(real)), None),
        "last_committed_ms": last_ms,
        "first_committed_ms": first_ms,
        "commits_per_minute": round((len(real) - 1) / seconds * 60, 3) if several else None,
        "rows_per_second": round(rows_count / seconds, 3) if several else None,
        "bytes_per_second": round(bytes_count / seconds, 3) if several and bytes_count is not None else None,
        "timings": {name: _timing(name, real) for name in _TIMINGS},
        "series": _series(rows, firsts, from_ms, step_ms),
    }


def _timing(name: str, rows: Iterable[Row]) -> dict[str, int | None]:
    key = f"previous_{name}" if name in _NEXT_ROW else name
    found = [ms for row in rows if (ms := dict(row["timings_ms"] or ()).get(key)) is not None]
    if not found:
        return {"last": None, "p50": None, "p95": None}
    return {"last": found[-1], "p50": int(np.percentile(found, 50)), "p95": int(np.percentile(found, 95))}


def _series(rows: Sequence[Row], firsts: Sequence[Row], from_ms: int, step_ms: int) -> list[dict[str, int]]:
    found = [
        {"time_ms": from_ms + at * step_ms, "commits": 0, "rows": 0, "bytes": 0, "dead_letters": 0}
        for at in range(_STEPS)
    ]

    def at(row: Row) -> dict[str, int]:
        step: int = (row["committed_ms"] - from_ms) // step_ms
        return found[min(max(step, 0), _STEPS - 1)]

    for row in rows:
        at(row)["rows"] += row["records"]
        at(row)["bytes"] += row["size_bytes"] or 0
    for row in firsts:
        if not row["void"]:
            at(row)["commits"] += 1
            at(row)["dead_letters"] += row["dead_letters"] or 0
    return found


def commits(
    view: View,
    *,
    app: str | None = None,
    topic: str | None = None,
    limit: int = 50,
    position: str | None = None,
) -> dict[str, Any]:
    table, _ = view.ledger.commits()
    if app is not None:
        table = table.filter(pc.field("app_id") == app)
    if topic is not None:
        table = table.filter(pc.field("topic") == topic)
    # Rows of one version differ by topic; its number in the version keeps a page from cutting a commit in two.
    end = table.num_rows
    if position is not None:
        version, given = read_position(position, "c", 2)
        versions = np.array(table["version"].to_numpy(), dtype=np.int64)
        end = int(np.clip(np.searchsorted(versions, version, side="right") - max(given, 0), 0, table.num_rows))
    first = max(end - limit, 0)
    rows = table.slice(first, end - first).to_pylist()[::-1]
    after = _later_timings(table, first, end)
    return {
        "now_ms": view.now_ms,
        "commits": [_commit(row, after.get(row["plan_id"], {})) for row in rows],
        "next": _next(table, first) if first > 0 else None,
    }


def _next(table: pa.Table, first: int) -> str:
    versions = np.array(table["version"].to_numpy(), dtype=np.int64)
    version = int(versions[first - 1])
    given = int(np.searchsorted(versions, version, side="right")) - first
    return write_position("c", version, given)


def _later_timings(table: pa.Table, first: int, end: int) -> dict[str, Mapping[str, int]]:
    """By plan, the times that the same app's next commit has of it."""
    names = ["app_id", "plan_id", "timings_ms", "void"]
    rows = table.select(names).slice(first, min(end - first + 64, table.num_rows - first)).to_pylist()
    last: dict[str | None, str] = {}
    found: dict[str, Mapping[str, int]] = {}
    for row in rows:
        before = last.get(row["app_id"])
        if row["void"] or before == row["plan_id"] or row["app_id"] is None:
            continue  # rows of no app may be of several writers at once
        if before is not None:
            found[before] = dict(row["timings_ms"] or ())
        last[row["app_id"]] = row["plan_id"]
    return found


def _commit(row: Row, after: Mapping[str, int]) -> dict[str, Any]:
    timings = dict(row["timings_ms"] or ())
    names = ("version", "topic", "sequence", "app_id", "batch_id", "query_id", "committed_ms", "void", "workers")
    return {name: row[name] for name in names} | {
        "workers": list(row["workers"] or ()),
        "rows": row["records"],
        "bytes": row["size_bytes"],
        "dead_letters": row["dead_letters"] or 0,
        "engine": row["engine"] or "",
        "encode_ms": timings.get("encode"),
        "plan_ms": timings.get("plan"),
        "commit_ms": after.get("previous_commit"),
        "append_ms": after.get("previous_append"),
    }
