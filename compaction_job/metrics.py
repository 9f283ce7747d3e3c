"""Metrics of a store for Prometheus, and the small HTTP server that shows them with the daemon's health.

Everything is read at the scrape: gauges from the partitions' state files, counters from the ledger, so that they
survive restarts and count what other processes did. A partition that cannot be read is counted and left out; it never
makes a scrape fail. Serving is read-only and on loopback unless asked otherwise.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from compaction_job.bounded_server import BoundedHandler, BoundedServer
from logstore.cleaner.eligibility import Cleanable, cleanable
from logstore.cleaner.filter import ABORTED, EXPIRED, KEYLESS, MARKER, SUPERSEDED, TOMBSTONE
from logstore.compaction.planning import KIND, facts_of, failures_of, first_timestamp, rules_of
from logstore.config import LogConfig
from logstore.directory.state import PartitionState
from logstore.errors import DuramenError, UsageError
from logstore.ledger import Ledger
from logstore.ledger.receipts import SUMMARY
from logstore.ledger.rows import ABANDONED, DONE, FAILED, RUNNING
from logstore.partition.losses import lost_offsets
from logstore.store import LogStore
from logstore.topics.registry import Topic

#: results and reasons that are always there, also at 0: a counter that appears late loses its first increase
RESULTS = (DONE, FAILED, ABANDONED)
REASONS = (SUPERSEDED, KEYLESS, TOMBSTONE, ABORTED, MARKER, EXPIRED)
COMMITTED, VOID = "committed", "void"

_PARTITION = ("topic", "partition")
_log = logging.getLogger("duramen.metrics")


@dataclass(slots=True)
class _Counted:
    """What the ledger knows of a segment."""

    size_bytes: int
    records: int
    keys: int
    tombstones: int


@dataclass(slots=True)
class PartitionFigures:
    """One partition at one moment; bytes of a topic that is not compacted are all uncleanable."""

    topic: str
    partition: int
    clean_bytes: int = 0
    dirty_bytes: int = 0
    uncleanable_bytes: int = 0
    #: counted by compaction where it was, offsets elsewhere
    records: int = 0
    #: of the segments compaction has counted
    keys: int = 0
    tombstones: int = 0
    counted_segments: int = 0
    compacted: bool = False
    dirty_ratio: float = 0.0
    #: age of the oldest record that no pass has met
    lag_s: float = 0.0
    next_horizon_ms: int | None = None
    #: offsets whose records damage took, at most
    lost_offsets: int = 0


@dataclass(slots=True)
class _RunTotals:
    version: int = -1
    results: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    written_bytes: int = 0
    #: runs whose last word is not in yet
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

    def __init__(self, store: LogStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._lock = threading.Lock()
        self._runs = _RunTotals()
        self._uncleanable: tuple[int, int] = (-1, 0)
        self._appends: tuple[int, dict[str, int]] = (-1, {COMMITTED: 0, VOID: 0})
        self._segments: tuple[int, dict[tuple[str, int], dict[int, _Counted]]] = (-1, {})

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

    def segments(self) -> dict[tuple[str, int], dict[int, _Counted]]:
        """What each segment holds, by partition and base offset."""
        with self._lock:
            table = self._ledger.segments_table
            names = ["topic_id", "partition", "base_offset", "size_bytes", "records", "keys", "tombstones"]

            def look() -> tuple[int, dict[tuple[str, int], dict[int, _Counted]]]:
                if table.version == self._segments[0]:
                    return self._segments
                found: dict[tuple[str, int], dict[int, _Counted]] = {}
                rows = table.read_all(names)
                for topic_id, number, base, *counts in zip(
                    *(rows.column(name).to_pylist() for name in names), strict=True
                ):
                    found.setdefault((topic_id, number), {})[base] = _Counted(*counts)
                return table.version, found

            self._segments = table.run(look)
            return self._segments[1]


def _details(text: str | None) -> dict[str, int]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, int)} if isinstance(found, dict) else {}


def partition_figures(
    store: LogStore,
    topic: Topic,
    number: int,
    *,
    config: LogConfig,
    counted: dict[int, _Counted],
    now_ms: int,
) -> PartitionFigures:
    """Raises DuramenError, OSError."""
    state = store.partition_state(topic, number)
    facts = facts_of(store, topic, number, state, config, flushed=True)
    figures = PartitionFigures(topic.name, number, compacted=config.compact, next_horizon_ms=facts.next_horizon_ms)
    figures.lost_offsets = lost_offsets(state.losses)
    total_bytes = sum(segment.size_bytes for segment in facts.segments)
    _count(figures, state, counted, facts.log_end_offset)
    if not config.compact:
        figures.uncleanable_bytes = total_bytes
        return figures
    found = cleanable(facts, rules_of(config), now_ms=now_ms)
    figures.clean_bytes = found.clean_bytes
    figures.dirty_bytes = found.cleanable_bytes
    figures.uncleanable_bytes = max(total_bytes - found.clean_bytes - found.cleanable_bytes, 0)
    figures.dirty_ratio = found.ratio
    figures.lag_s = _lag_s(store, topic, number, state, found, facts.log_end_offset, now_ms)
    return figures


def _count(figures: PartitionFigures, state: PartitionState, counted: dict[int, _Counted], end_offset: int) -> None:
    for at, segment in enumerate(state.segments):
        known = counted.get(segment.base_offset)
        if known is not None and known.size_bytes == segment.size_bytes and at + 1 < len(state.segments):
            figures.records += known.records
            figures.keys += known.keys
            figures.tombstones += known.tombstones
            figures.counted_segments += 1
            continue
        end = state.segments[at + 1].base_offset if at + 1 < len(state.segments) else end_offset
        figures.records += max(end - max(segment.base_offset, state.log_start_offset), 0)


def _lag_s(
    store: LogStore, topic: Topic, number: int, state: PartitionState, found: Cleanable, end_offset: int, now_ms: int
) -> float:
    if found.first_dirty_offset >= end_offset:
        return 0.0
    bases = [s.base_offset for s in state.segments if s.base_offset <= found.first_dirty_offset]
    first_ms = first_timestamp(store, topic, number, bases[-1]) if bases else -1
    return max(now_ms - first_ms, 0) / 1000 if first_ms >= 0 else 0.0


class StoreCollector(Collector):
    """The store's metrics, for a registry of its own."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._ledger = LedgerFigures(store, store.ledger())

    def figures(self) -> tuple[list[PartitionFigures], int]:
        """Every partition, and how many could not be read."""
        store, now_ms = self._store, self._store.clock.now_ms()
        found: list[PartitionFigures] = []
        unreadable = 0
        try:
            counted = self._ledger.segments()
        except (DuramenError, OSError) as error:
            _log.warning("the ledger's segments could not be read: %s", error)
            counted = {}
        for name in store.topic_names():
            try:
                topic = store.topic(name)
                config = store.log_config(topic)
            except (DuramenError, OSError) as error:
                _log.warning("topic %s could not be read: %s", name, error)
                unreadable += 1
                continue
            for number in range(topic.partitions):
                try:
                    found.append(
                        partition_figures(
                            store,
                            topic,
                            number,
                            config=config,
                            counted=counted.get((topic.id, number), {}),
                            now_ms=now_ms,
                        )
                    )
                except (DuramenError, OSError) as error:
                    _log.warning("%s-%d could not be read: %s", name, number, error)
                    unreadable += 1
        return found, unreadable

    def collect(self) -> Iterator[Metric]:
        try:
            partitions, unreadable = self.figures()
        except (DuramenError, OSError) as error:
            _log.warning("the store could not be read: %s", error)
            partitions, unreadable = [], 1
        yield from _partition_metrics(partitions)
        yield _gauge("duramen_unreadable_partitions", "Partitions this scrape could not read.", unreadable)
        try:
            yield from self._ledger_metrics()
        except (DuramenError, OSError) as error:
            _log.warning("the ledger could not be read: %s", error)

    def _ledger_metrics(self) -> Iterator[Metric]:
        runs = self._ledger.runs()
        uncleanable = self._ledger.uncleanable()
        appends = self._ledger.appends()
        yield _gauge("duramen_uncleanable_partitions", "Partitions whose last compaction failed.", uncleanable)
        yield _counter(
            "duramen_compaction_runs",
            "Passes of compaction over a partition that ended.",
            "result",
            {name: runs.results.get(name, 0) for name in dict.fromkeys((*RESULTS, *runs.results))},
        )
        yield _counter(
            "duramen_records_removed",
            "Records compaction removed.",
            "reason",
            {name: runs.removed.get(name, 0) for name in dict.fromkeys((*REASONS, *runs.removed))},
        )
        yield CounterMetricFamily(
            "duramen_compaction_read_bytes", "Bytes compaction read, the index pass included.", value=runs.read_bytes
        )
        yield CounterMetricFamily(
            "duramen_compaction_written_bytes", "Bytes compaction wrote.", value=runs.written_bytes
        )
        yield _counter("duramen_append_batches", "Batches in the ledger.", "result", appends)


def _partition_metrics(partitions: list[PartitionFigures]) -> Iterator[Metric]:
    sizes = GaugeMetricFamily(
        "duramen_log_bytes",
        "Bytes of a partition's log, by what compaction makes of them.",
        labels=(*_PARTITION, "section"),
    )
    ratio = GaugeMetricFamily(
        "duramen_dirty_ratio", "Share of uncompacted bytes among the cleanable.", labels=_PARTITION
    )
    lag = GaugeMetricFamily(
        "duramen_compaction_lag_seconds", "Age of the oldest record no compaction has met.", labels=_PARTITION
    )
    records = GaugeMetricFamily("duramen_log_records", "Records in the log.", labels=_PARTITION)
    keys = GaugeMetricFamily("duramen_log_keys", "Keys in the segments compaction has counted.", labels=_PARTITION)
    tombstones = GaugeMetricFamily(
        "duramen_tombstones", "Tombstones in the segments compaction has counted.", labels=_PARTITION
    )
    horizon = GaugeMetricFamily(
        "duramen_next_delete_horizon_timestamp_seconds", "When the first tombstone or marker may go.", labels=_PARTITION
    )
    lost = GaugeMetricFamily("duramen_lost_offsets", "Offsets whose records damage took, at most.", labels=_PARTITION)
    for each in partitions:
        where = (each.topic, str(each.partition))
        lost.add_metric(where, each.lost_offsets)
        sizes.add_metric((*where, "clean"), each.clean_bytes)
        sizes.add_metric((*where, "dirty"), each.dirty_bytes)
        sizes.add_metric((*where, "uncleanable"), each.uncleanable_bytes)
        records.add_metric(where, each.records)
        if not each.compacted:
            continue
        ratio.add_metric(where, each.dirty_ratio)
        lag.add_metric(where, each.lag_s)
        keys.add_metric(where, each.keys)
        tombstones.add_metric(where, each.tombstones)
        if each.next_horizon_ms is not None:
            horizon.add_metric(where, each.next_horizon_ms / 1000)
    yield from (sizes, ratio, lag, records, keys, tombstones, horizon, lost)


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(name, doc, value=value)


def _counter(name: str, doc: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=(label,))
    for each, value in values.items():
        family.add_metric((each,), value)
    return family


# --- serving --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Health:
    healthy: bool
    document: dict[str, Any]


class MetricsServer:
    """`GET /metrics` and `GET /healthz`, on threads of its own. Raises UsageError when it cannot listen."""

    def __init__(self, host: str, port: int, *, collector: Collector, health: Callable[[], Health]) -> None:
        registry = CollectorRegistry()
        registry.register(_Quiet(collector))
        server = self

        one_at_a_time = threading.Lock()  # a scrape goes through every partition

        class Handler(BoundedHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                    with one_at_a_time:
                        text = encode(registry)
                    self.answer(200, content_type, text)
                elif path == "/healthz":
                    found = health()
                    text = json.dumps(found.document).encode() + b"\n"
                    self.answer(200 if found.healthy else 503, "application/json", text)
                else:
                    self.answer(404, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")

        try:
            self._http = BoundedServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot serve metrics on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="Give another --metrics-port, or 0 for none",
            ) from None
        self._thread = threading.Thread(target=self._http.serve_forever, name="duramen-metrics", daemon=True)
        server._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._http.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


class _Quiet(Collector):
    """Registers without a first scrape."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._collector.collect()
