"""Metrics of a store for Prometheus.

Everything is read at the scrape: gauges from the partitions' lists, counters from the ledger and the receipts, so that
they survive restarts and count what other processes did. A partition that cannot be read is counted and left out; it
never makes a scrape fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compaction_job.figures import counted_in
from logstore.cleaner.eligibility import Cleanable, cleanable
from logstore.cleaner.filter import ABORTED, EXPIRED, KEYLESS, MARKER, SUPERSEDED, TOMBSTONE
from logstore.compaction.maintenance import STEPS, Counted, MaintainedStore
from logstore.compaction.partition_view import PartitionView
from logstore.config import LogConfig
from logstore.errors import DuramenError
from logstore.ledger.rows import ABANDONED, DONE, FAILED
from logstore.partition.losses import lost_offsets
from logstore.topics.registry import Topic

#: results and reasons that are always there, also at 0: a counter that appears late loses its first increase
RESULTS = (DONE, FAILED, ABANDONED)
REASONS = (SUPERSEDED, KEYLESS, TOMBSTONE, ABORTED, MARKER, EXPIRED)

T = TypeVar("T")
_PARTITION = ("topic", "partition")
_log = logging.getLogger("duramen.metrics")


@dataclass(slots=True)
class PartitionGauges:
    """The gauges of one partition; bytes of a topic that is not compacted are all uncleanable."""

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
    compacted: bool = False
    dirty_ratio: float = 0.0
    #: `min.cleanable.dirty.ratio`
    threshold: float = 0.0
    #: how long a pass is overdue by max.compaction.lag.ms
    late_s: float = 0.0
    #: age of the oldest record that no pass has met
    lag_s: float = 0.0
    next_horizon_ms: int | None = None
    #: offsets whose records damage took, at most
    lost_offsets: int = 0


def partition_gauges(
    store: MaintainedStore, topic: Topic, number: int, config: LogConfig, counted: Mapping[int, Counted], now_ms: int
) -> PartitionGauges:
    """Raises DuramenError, OSError."""
    view = PartitionView.of(store, topic, number, config)
    facts = view.facts(flushed=True)
    gauges = PartitionGauges(topic.name, number, compacted=config.compact, next_horizon_ms=facts.next_horizon_ms)
    gauges.lost_offsets = lost_offsets(view.state.losses)
    total_bytes = sum(segment.size_bytes for segment in facts.segments)
    for records, counts in counted_in(view.state, counted, facts.log_end_offset):
        gauges.records += records
        gauges.keys += counts.keys if counts else 0
        gauges.tombstones += counts.tombstones if counts else 0
    if not config.compact:
        gauges.uncleanable_bytes = total_bytes
        return gauges
    found = cleanable(facts, view.rules(), now_ms=now_ms)
    gauges.clean_bytes = found.clean_bytes
    gauges.dirty_bytes = found.cleanable_bytes
    gauges.uncleanable_bytes = max(total_bytes - found.clean_bytes - found.cleanable_bytes, 0)
    gauges.dirty_ratio = found.ratio
    gauges.threshold = config.min_cleanable_dirty_ratio
    gauges.late_s = found.late_ms / 1000
    gauges.lag_s = _lag_s(view, found, facts.log_end_offset, now_ms)
    return gauges


def _lag_s(view: PartitionView, found: Cleanable, end_offset: int, now_ms: int) -> float:
    if found.first_dirty_offset >= end_offset:
        return 0.0
    bases = [s.base_offset for s in view.state.segments if s.base_offset <= found.first_dirty_offset]
    first_ms = view.first_timestamp(bases[-1]) if bases else -1
    return max(now_ms - first_ms, 0) / 1000 if first_ms >= 0 else 0.0


def _readable(what: str, read: Callable[[], T]) -> T | None:
    """None, and a line in the log, for what cannot be read."""
    try:
        return read()
    except (DuramenError, OSError) as error:
        _log.warning("%s could not be read: %s", what, error)
        return None


class StoreCollector(Collector):
    """The store's metrics, for a registry of its own."""

    def __init__(self, store: MaintainedStore) -> None:
        self._store = store
        self._maintenance = store.maintenance()
        self._figures = self._maintenance.figures()
        self._found: tuple[float, list[Metric]] | None = None

    def gauges(self) -> tuple[list[PartitionGauges], int]:
        """Every partition, and how many could not be read."""
        store, now_ms = self._store, self._store.clock.now_ms()
        found: list[PartitionGauges | None] = []
        counted = _readable("the ledger's segments", self._figures.segments) or {}
        for name in store.topic_names():
            topic = _readable(f"topic {name}", partial(store.topic, name))
            config = None if topic is None else _readable(f"topic {name}", partial(store.log_config, topic))
            if topic is None or config is None:
                found.append(None)
                continue
            for number in range(topic.partitions):
                mine = counted.get((topic.id, number), {})
                look = partial(partition_gauges, store, topic, number, config, mine, now_ms)
                found.append(_readable(f"{name}-{number}", look))
        return [each for each in found if each is not None], found.count(None)

    def collect(self) -> Iterator[Metric]:
        """Where a look takes requests, what was found a while ago is told again."""
        now_s, fresh_s = time.monotonic(), self._maintenance.fresh_s
        if self._found is None or now_s - self._found[0] >= fresh_s:
            self._found = (now_s, list(self._collected()))
        return iter(self._found[1])

    def _collected(self) -> Iterator[Metric]:
        partitions, unreadable = _readable("the store", self.gauges) or ([], 1)
        yield from _partition_metrics(partitions)
        yield _gauge("duramen_unreadable_partitions", "Partitions this scrape could not read.", unreadable)
        free_bytes = self._maintenance.free_bytes()
        if free_bytes is not None:
            yield _gauge("duramen_free_bytes", "Free space of the store's file system.", free_bytes)
        yield from _readable("the ledger", lambda: list(self._ledger_metrics())) or ()

    def _ledger_metrics(self) -> Iterator[Metric]:
        runs = self._figures.runs()
        uncleanable = self._figures.uncleanable()
        appends = self._figures.appends()
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
        spent = self._figures.append_ms()
        yield _counter(
            "duramen_append_seconds",
            "Time that the batches in the ledger took, by step.",
            "step",
            {step: spent[step] / 1000 for step in STEPS},
        )


def _partition_metrics(partitions: list[PartitionGauges]) -> Iterator[Metric]:
    sizes = GaugeMetricFamily(
        "duramen_log_bytes",
        "Bytes of a partition's log that are clean, dirty or uncleanable.",
        labels=(*_PARTITION, "section"),
    )
    ratio = GaugeMetricFamily(
        "duramen_dirty_ratio", "Share of uncompacted bytes among the cleanable.", labels=_PARTITION
    )
    threshold = GaugeMetricFamily(
        "duramen_dirty_ratio_threshold", "The topic's min.cleanable.dirty.ratio.", labels=_PARTITION
    )
    late = GaugeMetricFamily(
        "duramen_compaction_late_seconds", "How long a pass is overdue by max.compaction.lag.ms.", labels=_PARTITION
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
        threshold.add_metric(where, each.threshold)
        late.add_metric(where, each.late_s)
        lag.add_metric(where, each.lag_s)
        keys.add_metric(where, each.keys)
        tombstones.add_metric(where, each.tombstones)
        if each.next_horizon_ms is not None:
            horizon.add_metric(where, each.next_horizon_ms / 1000)
    yield from (sizes, ratio, threshold, late, lag, records, keys, tombstones, horizon, lost)


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(name, doc, value=value)


def _counter(name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=(label,))
    for each, value in values.items():
        family.add_metric((each,), value)
    return family
