"""What was done to the store, kept until there is news: runs, counts of segments, failures, commits.

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

from logstore.compaction.failures import SetAside
from logstore.compaction.maintenance import Commits, Counts, Maintenance
from logstore.ledger.receipts import SUMMARY
from logstore.ledger.rows import COMMITS, RUNS

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


class LedgerHistory:
    """For any number of threads."""

    def __init__(self, maintenance: Maintenance) -> None:
        self._maintenance = maintenance
        self._tables = maintenance.tables()
        self._lock = threading.Lock()
        self._looked: dict[str, float] = {}
        self._runs: tuple[int, Runs] = (-1, _NO_RUNS)
        self._failures: tuple[tuple[int, ...], dict[tuple[str, int], SetAside]] = ((-1,), {})
        self._counts: Counts = {}
        self._commits = Commits(-1, COMMITS.empty_table().select(_COMMIT_COLUMNS), True)

    def versions(self) -> tuple[int, ...]:
        """Changes whenever there may be news."""
        with self._lock:
            return self._tables.versions()

    def _is_fresh(self, what: str, fresh_s: float | None = None) -> bool:
        """Whether it was looked at a moment ago; if not, it is now."""
        now = time.monotonic()
        fresh_s = fresh_s or max(_FRESH_S, self._maintenance.fresh_s / 6)
        if now - self._looked.get(what, -fresh_s) < fresh_s:
            return True
        self._looked[what] = now
        return False

    def runs(self) -> Runs:
        with self._lock:
            if not self._is_fresh("runs"):
                version, rows = self._tables.runs(self._runs[0])
                if version != self._runs[0]:
                    self._runs = (version, _latest(rows))
            return self._runs[1]

    def failures(self) -> dict[tuple[str, int], SetAside]:
        """Partitions whose last passes failed, with when they are tried again."""
        with self._lock:
            if not self._is_fresh("failures"):
                versions = self._tables.versions()
                if versions != self._failures[0]:
                    self._failures = (versions, self._maintenance.failures())
            return self._failures[1]

    def counts(self) -> Counts:
        """What compaction counted in segments. Those of a partition are the same object until they change."""
        with self._lock:
            if not self._is_fresh("counts"):
                known, found = self._counts, self._maintenance.counts()
                if found is not known:
                    self._counts = {
                        key: known[key] if known.get(key) == counts else counts for key, counts in found.items()
                    }
            return self._counts

    def commits(self) -> tuple[pa.Table, bool]:
        """The newest commits, oldest first, and whether these are all there are."""
        with self._lock:
            if not self._is_fresh("commits", _FRESH_S):
                self._commits = self._tables.commits(self._commits, COMMITS_MAX)
            return self._commits.rows, self._commits.complete


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
