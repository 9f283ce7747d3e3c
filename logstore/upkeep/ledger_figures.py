"""Totals of a store's ledger for its metrics, brought up to date with each look."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from logstore.compaction.failures import KIND, failures_of
from logstore.compaction.maintenance import STEPS, Counted, Counts
from logstore.ledger import Ledger
from logstore.ledger.receipts import SUMMARY
from logstore.ledger.rows import DONE, RUNNING
from logstore.topics.opened import OpenStore

COMMITTED, VOID = "committed", "void"


@dataclass(slots=True)
class _RunTotals:
    version: int = -1
    results: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    written_bytes: int = 0
    #: runs that have not ended
    running: set[str] = field(default_factory=set)

    def clear(self) -> None:
        self.version, self.read_bytes, self.written_bytes = -1, 0, 0
        for each in (self.results, self.removed, self.running):
            each.clear()

    def add(self, row: dict[str, Any]) -> None:
        """A row of a run, or the summary of many."""
        if row["kind"] == SUMMARY:
            earlier = json.loads(row["details"] or "{}").get("kinds", {}).get(KIND, {})
            self.results.update(earlier.get("results", {}))
            self.removed.update(earlier.get("removed", {}))
            self.read_bytes += earlier.get("read_bytes", 0)
            self.written_bytes += earlier.get("written_bytes", 0)
            return
        if row["result"] == RUNNING:
            self.running.add(row["run_id"])
            return
        self.running.discard(row["run_id"])
        self.results[row["result"]] += 1
        self.removed.update({reason: count for reason, count in row["removed"] or () if count})
        details = _details(row["details"])
        self.read_bytes += details.get("read_bytes", 0) if row["result"] == DONE else 0
        self.written_bytes += details.get("written_bytes", 0)


class LedgerFigures:
    """Totals of the ledger, brought up to date with each look; only rows that are new are gone through."""

    def __init__(self, store: OpenStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._lock = threading.Lock()
        self._runs = _RunTotals()
        self._uncleanable: tuple[int, int] = (-1, 0)
        self._appends: tuple[int, dict[str, int]] = (-1, {COMMITTED: 0, VOID: 0})
        self._timings: tuple[int, Counter[str]] = (-1, Counter())
        self._segments: tuple[int, Counts] = (-1, {})

    def runs(self) -> _RunTotals:
        """Runs of compaction that ended, by result, and what they did."""
        with self._lock:
            table, totals = self._ledger.runs_table, self._runs
            names = ["version", "run_id", "kind", "result", "removed", "details"]
            kinds = pc.field("kind").isin([KIND, SUMMARY])

            def look() -> tuple[int, list[dict[str, Any]]]:
                if table.version == totals.version:
                    return table.version, []
                rows = table.read_newer(totals.version, names).filter(kinds)
                return table.version, rows.sort_by("version").to_pylist()

            version, rows = table.run(look)
            if any(row["kind"] == SUMMARY for row in rows) and totals.version >= 0:
                # Rows were summed up, perhaps some that were never seen here: from the beginning.
                totals.clear()
                version, rows = table.run(look)
            for row in rows:
                totals.add(row)
            totals.version = version
            return totals

    def uncleanable(self) -> int:
        """Partitions whose last pass failed."""
        with self._lock:
            table = self._ledger.runs_table
            version = table.run(lambda: table.version)
            if self._uncleanable[0] != version:
                known = {topic.id for topic in self._store.topics()}
                failures = failures_of(self._store, self._ledger)
                self._uncleanable = (version, sum(topic_id in known for topic_id, _ in failures))
            return self._uncleanable[1]

    def appends(self) -> dict[str, int]:
        """Commits by outcome."""
        with self._lock:
            table = self._ledger.commits_table

            def look() -> tuple[int, dict[str, int]]:
                if table.version == self._appends[0]:
                    return self._appends
                rows = table.read_all(["version", "void"])
                count = {
                    name: int(pc.count_distinct(rows.filter(chosen).column("version")).as_py())
                    for name, chosen in ((COMMITTED, ~pc.field("void")), (VOID, pc.field("void")))
                }
                return table.version, count

            self._appends = table.run(look)
            return self._appends[1]

    def append_ms(self) -> Counter[str]:
        """Time that batches took by step; a batch of several topics counts once."""
        with self._lock:
            table, (seen, known) = self._ledger.commits_table, self._timings

            def look() -> tuple[int, list[tuple[int, Any]]]:
                if table.version == seen:
                    return seen, []
                rows = table.read_newer(seen, ["version", "timings_ms"])
                pairs = zip(rows["version"].to_pylist(), rows["timings_ms"].to_pylist(), strict=True)
                return table.version, list(pairs)

            version, rows = table.run(look)
            # Replaced, never changed: a thread that still counts the old totals is not disturbed.
            total = Counter(known)
            for timings in dict(rows).values():
                # A row is written before its own commit and append end: it has those of the batch before.
                spent = {name.removeprefix("previous_"): spent_ms for name, spent_ms in timings or ()}
                total.update({step: spent[step] for step in STEPS if step in spent})
            self._timings = (version, total)
            return total

    def segments(self) -> Counts:
        """What compaction counted in each segment, by partition and base offset."""
        with self._lock:
            self._segments = read_counts(self._ledger, known=self._segments)
            return self._segments[1]


def read_counts(ledger: Ledger, *, known: tuple[int, Counts] = (-1, {})) -> tuple[int, Counts]:
    """The table's version, and what compaction counted in all segments, by partition and base offset.

    `known` is an earlier answer, returned again while the table has that version.
    """
    table = ledger.segments_table
    names = ["topic_id", "partition", "base_offset", "size_bytes", "records", "keys", "tombstones", "run_id"]

    def look() -> tuple[int, Counts]:
        if table.version == known[0]:
            return known
        rows = table.read_all(names)
        found: dict[tuple[str, int], dict[int, Counted]] = {}
        for topic_id, number, base, *counts in zip(*(rows[name].to_pylist() for name in names), strict=True):
            found.setdefault((topic_id, number), {})[base] = Counted(*counts)
        return table.version, found

    return table.run(look)


def _details(text: str | None) -> dict[str, int]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, int)} if isinstance(found, dict) else {}
