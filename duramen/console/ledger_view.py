"""What the console needs of the ledger, kept until the ledger changes: runs, counts of segments, failures, commits.

Read as columns and asked for by page, so that ten thousand runs are neither parsed nor held as objects.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logstore.compaction.failures import SetAside, failures_of
from logstore.compaction.maintenance import Counted
from logstore.ledger import Ledger
from logstore.ledger.receipts import SUMMARY
from logstore.ledger.rows import COMMITS, RUNS
from logstore.store import LogStore
from logstore.upkeep.ledger_figures import read_counts

#: commits that are looked at, newest first
COMMITS_MAX = 20_000
#: nobody notices when an answer is so old; one page asks for several things
_FRESH_S = 0.25
_COMMIT_COLUMNS = [name for name in COMMITS.names if name not in ("topic_id", "base_offsets", "end_offsets")]


@dataclass(frozen=True, slots=True)
class Runs:
    """Every run as it was last recorded, newest first."""

    table: pa.Table
    #: totals of those whose receipts were summed up
    forgotten: dict[str, Any]
    #: rows by partition, and by run id
    of_partition: Mapping[tuple[str | None, int | None], list[int]]
    of_id: Mapping[str, int]

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table.take(pa.array(numbers, pa.int64())).to_pylist()
        return found


_NO_RUNS = Runs(RUNS.empty_table(), {}, {}, {})


class LedgerView:
    """For any number of threads. A store without a ledger has nothing in it, and is not given one by looking."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._looked: dict[str, float] = {}
        self._runs: tuple[int, Runs] = (-1, _NO_RUNS)
        self._failures: tuple[int, dict[tuple[str, int], SetAside]] = (-1, {})
        self._counts: tuple[int, dict[tuple[str, int], dict[int, Counted]]] = (-1, {})
        self._commits: tuple[int, pa.Table, bool] = (-1, COMMITS.empty_table().select(_COMMIT_COLUMNS), True)

    def _opened(self) -> Ledger | None:
        if self._ledger is None and self._store.has_ledger:
            self._ledger = self._store.ledger()
        return self._ledger

    def versions(self) -> tuple[int, ...]:
        """Changes whenever one of the tables does."""
        with self._lock:
            ledger = self._opened()
            if ledger is None:
                return ()
            tables = (ledger.commits_table, ledger.runs_table, ledger.segments_table)
            return tuple(table.run(lambda table=table: table.version) for table in tables)  # type: ignore[misc]

    def _is_fresh(self, what: str) -> bool:
        """Whether it was looked at a moment ago; if not, it is now."""
        now = time.monotonic()
        if now - self._looked.get(what, -_FRESH_S) < _FRESH_S:
            return True
        self._looked[what] = now
        return False

    def runs(self) -> Runs:
        with self._lock:
            ledger = self._opened()
            if ledger is None or self._is_fresh("runs"):
                return self._runs[1]
            table = ledger.runs_table

            def look() -> tuple[int, Runs]:
                if table.version == self._runs[0]:
                    return self._runs
                return table.version, _latest(table.read_all())

            self._runs = table.run(look)
            return self._runs[1]

    def failures(self) -> dict[tuple[str, int], SetAside]:
        """Partitions whose last passes failed, with when they are tried again."""
        with self._lock:
            ledger = self._opened()
            if ledger is None or self._is_fresh("failures"):
                return self._failures[1]
            version = ledger.runs_table.run(lambda: ledger.runs_table.version)
            if version != self._failures[0]:
                self._failures = (version, failures_of(self._store, ledger))
            return self._failures[1]

    def counts(self) -> dict[tuple[str, int], dict[int, Counted]]:
        """What compaction counted in segments. Those of a partition are the same object until they change."""
        with self._lock:
            ledger = self._opened()
            if ledger is None or self._is_fresh("counts"):
                return self._counts[1]
            table = ledger.segments_table
            if table.run(lambda: table.version) != self._counts[0]:
                known = self._counts[1]
                version, found = read_counts(ledger)
                same = {key: known[key] if known.get(key) == counts else counts for key, counts in found.items()}
                self._counts = (version, same)
            return self._counts[1]

    def commits(self) -> tuple[pa.Table, bool]:
        """The newest commits, oldest first, and whether these are all there are."""
        with self._lock:
            ledger = self._opened()
            if ledger is None or self._is_fresh("commits"):
                return self._commits[1:]
            table = ledger.commits_table

            def look() -> tuple[int, pa.Table, bool]:
                version, known, complete = self._commits
                if table.version == version:
                    return self._commits
                if version < 0:
                    found, complete = _newest_commits(ledger)
                else:
                    newer = table.read_newer(version, _COMMIT_COLUMNS).sort_by("version")
                    found = pa.concat_tables([known, newer])
                if found.num_rows > COMMITS_MAX:
                    found, complete = found.slice(found.num_rows - COMMITS_MAX).combine_chunks(), False
                return table.version, found, complete

            self._commits = table.run(look)
            return self._commits[1:]


def _newest_commits(ledger: Ledger) -> tuple[pa.Table, bool]:
    """From the newest files, until there are enough."""
    table = ledger.commits_table
    empty = pa.schema([COMMITS.field(name) for name in _COMMIT_COLUMNS]).empty_table()
    found, rows = [], 0
    files = table.files()
    for file in reversed(files):
        found.append(table.read(file, _COMMIT_COLUMNS).cast(empty.schema))
        rows += found[-1].num_rows
        if rows >= COMMITS_MAX:
            break
    return pa.concat_tables([empty, *found]).sort_by("version"), len(found) == len(files)


def _latest(rows: pa.Table) -> Runs:
    """The newest row of each run, by when it started."""
    summaries = rows.filter(pc.field("kind") == SUMMARY).sort_by("version")["details"].to_pylist()
    rows = rows.filter(pc.field("kind") != SUMMARY).sort_by("version").combine_chunks()
    last = {run_id: at for at, run_id in enumerate(rows["run_id"].to_pylist())}
    kept = np.fromiter(last.values(), dtype=np.int64, count=len(last))
    rows = rows.take(pa.array(kept))
    started = np.array([ms or 0 for ms in rows["started_ms"].to_pylist()], dtype=np.int64)
    order = np.argsort(started, kind="stable")[::-1]
    rows = rows.take(pa.array(order)).combine_chunks()
    of_partition: dict[tuple[str | None, int | None], list[int]] = {}
    for at, key in enumerate(zip(rows["topic"].to_pylist(), rows["partition"].to_pylist(), strict=True)):
        of_partition.setdefault(key, []).append(at)
    of_id = {run_id: at for at, run_id in enumerate(rows["run_id"].to_pylist())}
    return Runs(rows, _forgotten(summaries[-1] if summaries else None), of_partition, of_id)


def _forgotten(details: str | None) -> dict[str, Any]:
    try:
        kinds = json.loads(details or "{}").get("kinds", {})
    except (ValueError, AttributeError):
        return {}
    results: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    read_bytes = written_bytes = 0
    for each in kinds.values():
        results.update(each.get("results", {}))
        removed.update(each.get("removed", {}))
        read_bytes += each.get("read_bytes", 0)
        written_bytes += each.get("written_bytes", 0)
    return {
        "results": dict(results),
        "removed": dict(removed),
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
    }
