"""Receipts of passes, in the manifest of their partition: who did what to it, and sums over all that ever was done.

A receipt is part of the replacement that it is about, so there is none without its pass and no pass without one. Of a
partition the newest stay, and the newest that erased something for good; the sums go on counting the others.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from logstore.compaction.failures import KIND
from logstore.errors import CorruptState
from logstore.ledger.receipts import ERASES, KEPT_EACH, KEPT_ERASING_EACH
from logstore.ledger.rows import DONE, RunRow
from logstore.limits import INT64_MAX

#: characters of a reason and of details, and names of workers
REASON_MAX, DETAILS_MAX, WORKERS_MAX = 500, 4000, 16
_NUMBERS = ("started_ms", "ended_ms", "before_bytes", "after_bytes")


@dataclass(frozen=True, slots=True)
class Receipts:
    """Of one partition. `runs` are the newest, oldest first, and do not say of which partition they are."""

    runs: tuple[RunRow, ...] = ()
    results: Mapping[str, int] = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0

    def noted(self, run: RunRow) -> Receipts:
        """With one that ended; one that is there already is not counted again."""
        if any(known.run_id == run.run_id for known in self.runs):
            return self
        bare = replace(
            run,
            topic_id=None,
            topic=None,
            partition=None,
            reason=run.reason[:REASON_MAX],
            details=run.details if len(run.details) <= DETAILS_MAX else "{}",
            workers=run.workers[:WORKERS_MAX],
        )
        details = _details(bare)
        return Receipts(
            _kept((*self.runs, bare)),
            {**self.results, run.result: self.results.get(run.result, 0) + 1},
            dict(Counter(self.removed) + Counter(run.removed)),
            self.read_bytes + (details.get("read_bytes", 0) if run.result == DONE else 0),
            self.written_bytes + details.get("written_bytes", 0),
        )


def _kept(runs: tuple[RunRow, ...]) -> tuple[RunRow, ...]:
    older = [run for run in runs[:-KEPT_EACH] if any(run.removed.get(reason) for reason in ERASES)]
    return (*older[-KEPT_ERASING_EACH:], *runs[-KEPT_EACH:])


def _details(run: RunRow) -> dict[str, int]:
    try:
        found = json.loads(run.details)
    except ValueError:
        return {}
    return {name: each for name, each in found.items() if type(each) is int} if isinstance(found, dict) else {}


# --- bytes -----------------------------------------------------------------------------------------------------------


def receipts_document(receipts: Receipts) -> dict[str, object]:
    return {
        "runs": [_run_document(run) for run in receipts.runs],
        "results": dict(receipts.results),
        "removed": dict(receipts.removed),
        "read_bytes": receipts.read_bytes,
        "written_bytes": receipts.written_bytes,
    }


def _run_document(run: RunRow) -> dict[str, object]:
    document: dict[str, object] = {name: getattr(run, name) for name in _NUMBERS}
    return document | {
        "id": run.run_id,
        "engine": run.engine,
        "result": run.result,
        "reason": run.reason,
        "removed": dict(run.removed),
        "map_fill": run.map_fill,
        "seconds": run.seconds,
        "workers": list(run.workers),
        "airflow": run.airflow_run_id,
        "details": run.details,
    }


def receipts_from(document: object) -> Receipts:
    """Raises ValueError, KeyError, TypeError, CorruptState."""
    if not isinstance(document, dict):
        raise ValueError("receipts that are no object")
    runs = document["runs"]
    if not isinstance(runs, list) or len(runs) > KEPT_EACH + KEPT_ERASING_EACH:
        raise CorruptState("receipts that are no list, or too many")
    return Receipts(
        tuple(_run(each) for each in runs),
        _counts(document["results"]),
        _counts(document["removed"]),
        _number(document["read_bytes"]),
        _number(document["written_bytes"]),
    )


def _run(document: Mapping[str, Any]) -> RunRow:
    workers = document["workers"]
    if not isinstance(workers, list) or len(workers) > WORKERS_MAX:
        raise ValueError("workers that are no list, or too many")
    return RunRow(
        run_id=_text(document["id"]),
        kind=KIND,
        engine=_text(document["engine"]),
        started_ms=_number_or_none(document["started_ms"]),
        ended_ms=_number_or_none(document["ended_ms"]),
        result=_text(document["result"]),
        reason=_text(document["reason"]),
        before_bytes=_number_or_none(document["before_bytes"]),
        after_bytes=_number_or_none(document["after_bytes"]),
        removed=_counts(document["removed"]),
        map_fill=_share(document["map_fill"]),
        seconds=_share(document["seconds"]),
        workers=tuple(_text(each) for each in workers),
        airflow_run_id=None if document["airflow"] is None else _text(document["airflow"]),
        details=_text(document["details"]),
    )


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > 64:
        raise ValueError("counts that are no object, or too many")
    return {_text(name): _number(count) for name, count in value.items()}


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise ValueError(f"{value!r} is not a number from 0 on")
    return value


def _number_or_none(value: object) -> int | None:
    return None if value is None else _number(value)


def _share(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > DETAILS_MAX:
        raise ValueError("not a text, or too long")
    return value
