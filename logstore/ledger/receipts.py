"""Which receipts of runs stay: as many as people, proofs and retries need, however long a store lives.

Of each partition the newest runs stay, and the newest that erased something for good (`duramen prove-erased` names
them); so do runs that have not ended. The others are summed up in one row, from which the counters continue. A pure
function over the table's rows; the ledger decides when.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: the row that stands for all dropped ones
SUMMARY = "summary"
KEPT_EACH, KEPT_ERASING_EACH = 8, 4
#: receipts are not looked through before there are this many, nor before they doubled
ROWS_MIN = 4096
_ENDED = ("done", "failed", "abandoned")
#: what these took is gone for good
ERASES = ("tombstone", "aborted")


def is_due(rows: int, kept_before: int) -> bool:
    return rows >= max(ROWS_MIN, 2 * kept_before)


def pruned(rows: pa.Table, *, version: int) -> pa.Table:
    """The rows that stay, oldest first, and the summary of all that were ever dropped, as written by `version`."""
    rows = rows.sort_by("version")
    kinds = np.array(rows["kind"].to_pylist(), dtype=object)
    results = np.array(rows["result"].to_pylist(), dtype=object)
    is_summary = kinds == SUMMARY
    run_ids = rows["run_id"].to_pylist()
    last = {run_id: at for at, run_id in enumerate(run_ids)}  # a run's newest row is its state
    keys = list(zip(kinds.tolist(), rows["topic_id"].to_pylist(), rows["partition"].to_pylist(), strict=True))
    removed = rows["removed"].to_pylist()
    kept = np.zeros(len(run_ids), dtype=bool)
    newest: Counter[tuple[Any, ...]] = Counter()
    erasing: Counter[tuple[Any, ...]] = Counter()
    for at in range(len(run_ids) - 1, -1, -1):
        if is_summary[at] or last[run_ids[at]] != at:
            continue
        key = keys[at]
        if results[at] not in _ENDED:
            kept[at] = True
        elif newest[key] < KEPT_EACH:
            newest[key] += 1
            kept[at] = True
        elif erasing[key] < KEPT_ERASING_EACH and any(
            count and reason in ERASES for reason, count in removed[at] or ()
        ):
            erasing[key] += 1
            kept[at] = True
    summary = totals_of(rows.filter(pa.array(~kept)))
    stays = rows.filter(pa.array(kept))
    details = json.dumps({**summary, "kept": stays.num_rows})
    row = {"version": version, "run_id": SUMMARY, "kind": SUMMARY, "result": "done", "details": details}
    return pa.concat_tables([stays, pa.Table.from_pylist([row], schema=rows.schema)])


def totals_of(rows: pa.Table) -> dict[str, Any]:
    """What the counters need of these rows: by kind the ended runs by result, removals by reason, bytes."""
    kinds: dict[str, dict[str, Any]] = {}
    ended = rows.filter(pc.is_in(rows["result"], pa.array(_ENDED)))
    names = ("kind", "result", "removed", "details")
    for kind, result, removed, details in zip(*(ended[name].to_pylist() for name in names), strict=True):
        document = _document(details)
        if kind == SUMMARY:
            for name, earlier in document.get("kinds", {}).items():
                _add(kinds, name, earlier)
            continue
        _add(
            kinds,
            kind,
            {
                "results": {result: 1},
                "removed": dict(removed or ()),
                "read_bytes": document.get("read_bytes", 0) if result == "done" else 0,
                "written_bytes": document.get("written_bytes", 0),
            },
        )
    return {"kinds": kinds}


def _add(kinds: dict[str, dict[str, Any]], kind: str, more: dict[str, Any]) -> None:
    known = kinds.setdefault(kind, {"results": {}, "removed": {}, "read_bytes": 0, "written_bytes": 0})
    for part in ("results", "removed"):
        known[part] = dict(Counter(known[part]) + Counter(more[part]))
    for part in ("read_bytes", "written_bytes"):
        known[part] += more[part]


def _document(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def kept_before(details: str | None) -> int:
    """How many rows the last look left, from the summary's details."""
    kept = _document(details).get("kept", 0)
    return kept if isinstance(kept, int) else 0
