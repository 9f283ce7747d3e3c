"""What compaction counted in the segments it went through, on its way into the ledger: many partitions at a time.

The rows of all partitions lie in one table, so writing them one partition at a time would read it all as often. They
are statistics: those that a killed run did not write are counted by the next pass.
"""

from __future__ import annotations

import threading

from logstore.cleaner.work import Cleaned, PassReport
from logstore.ledger import Ledger, SegmentRow
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


class SegmentCounts:
    """Holds the counts of up to `every` partitions back; `write` puts what is left into the ledger. For threads."""

    def __init__(self, ledger: Ledger, *, every: int = 1) -> None:
        self._ledger = ledger
        self._every = every
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], tuple[frozenset[int], PassReport, str]] = {}

    def add(self, store: OpenStore, topic: Topic, number: int, report: PassReport, run_id: str) -> None:
        listed = frozenset(segment.base_offset for segment in store.partition_state(topic, number).segments)
        key = (topic.id, number)
        with self._lock:
            if key in self._held:
                self._write()
            self._held[key] = (listed, report, run_id)
            if len(self._held) >= self._every:
                self._write()

    def write(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        held, self._held = self._held, {}
        if not held:
            return
        known = {topic_id: self._ledger.segments_of(topic_id) for topic_id in {topic_id for topic_id, _ in held}}
        self._ledger.replace_segments_of(
            {
                key: counted(known[key[0]].get(key[1], []), listed, report, run_id)
                for key, (listed, report, run_id) in held.items()
            }
        )


def counted(known: list[SegmentRow], listed: frozenset[int], report: PassReport, run_id: str) -> list[SegmentRow]:
    """True counts of the segments the pass went through; what it did not touch keeps the row it had."""
    rows = {row.base_offset: row for row in known if row.base_offset in listed}
    for done in report.cleaned:
        counts = counts_of_group(done)
        for segment in done.segments:
            if segment.base_offset not in listed:
                continue
            before = rows.get(segment.base_offset)
            keys, tombstones = counts[segment.base_offset]
            rows[segment.base_offset] = SegmentRow(
                segment.base_offset,
                segment.size_bytes,
                segment.records,
                keys,
                tombstones,
                run_id if done.changed or before is None else before.run_id,
            )
    return [rows[base] for base in sorted(rows)]


def counts_of_group(done: Cleaned) -> dict[int, tuple[int, int]]:
    """Keys and tombstones of each segment of a group, by base offset."""
    return {
        segment.base_offset: (
            done.keys if done.keys is not None and len(done.segments) == 1 else segment.records,
            done.counts.tombstones if at == 0 else 0,  # known of the group as a whole
        )
        for at, segment in enumerate(done.segments)
    }
