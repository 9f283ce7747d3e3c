"""Maintenance of a store in a bucket: seal, retain, compact, collect, free, sweep; one run over all topics.

Any number of runs may be at work at once, with writers and readers: each replacement is a compare-and-set, and who
comes second plans again or leaves it to the next run. What is one partition's own fault does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logstore.bucket.collecting import Ages, Collector
from logstore.bucket.compacting import CompactedPartition, CompactionRules, compact_partition, plan_compaction
from logstore.bucket.definitions import end_manifests
from logstore.bucket.manifest import Manifest
from logstore.bucket.pins import remove_expired_pins
from logstore.bucket.reader import Looked
from logstore.bucket.retaining import delete_records, expiry_of, retain_partition
from logstore.bucket.rows import Kind, TopicRow, view_partition
from logstore.bucket.sealing import MaintenanceEnvironment, SealedPartition, SealRules, seal_due, seal_partition
from logstore.cleaner.versions import Order
from logstore.errors import DuramenError, SegmentsChanged
from logstore.partition.retention import DeletedRecords, Retention
from logstore.records.offset_map import MapSettings
from logstore.topic import TopicPartition
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_TRIES_MAX = 3


@dataclass(frozen=True, slots=True)
class MaintenanceRules:
    """What a run does, and by which ages."""

    seal: SealRules = field(default_factory=SealRules)
    compact: bool = True
    #: compaction ignores the dirty ratio, never min.compaction.lag.ms
    force_compaction: bool = False
    sweep: bool = True
    ages: Ages = field(default_factory=Ages)
    map_bytes: int = 128 << 20
    #: for temporary copies of segments; None: the system's folder for such files
    folder: str | None = None
    topics: tuple[str, ...] = ()


@dataclass(slots=True)
class Maintained:
    """What a run did."""

    sealed: list[SealedPartition] = field(default_factory=list)
    compacted: list[CompactedPartition] = field(default_factory=list)
    retained: list[Retention] = field(default_factory=list)
    garbage: int = 0
    plans: int = 0
    pruned: int = 0
    #: commit files of the ledger
    commits: int = 0
    swept: list[str] = field(default_factory=list)
    failed: list[tuple[str, DuramenError]] = field(default_factory=list)

    @property
    def lost_records(self) -> int:
        """Records whose bytes were damaged, and are kept under `quarantine/`."""
        return sum(lost.end_offset - lost.base_offset for each in self.sealed for lost in each.lost)


def environment_of(store: BucketStore, collector: Collector, folder: str | None = None) -> MaintenanceEnvironment:
    return MaintenanceEnvironment(store.objects, collector.manifests, store.shelf, folder)


def retain(
    store: BucketStore, partitions: Sequence[tuple[Topic, int]], *, now_ms: int | None = None, dry_run: bool = False
) -> list[Retention]:
    """Run retention over some partitions. Raises UnsuitableObjectStore where this machine's clock is off."""
    collector = Collector(store)
    environment = environment_of(store, collector)
    done = []
    for topic, number in partitions:
        source, config = store.source(topic, number), store.log_config(topic)
        at_ms = collector.now_ms() if now_ms is None else now_ms
        done.append(retain_partition(environment, source, topic.id, config, at_ms, dry_run=dry_run))
    return done


def delete_up_to(
    store: BucketStore, topic: Topic, number: int, *, before_offset: int | None, dry_run: bool = False
) -> DeletedRecords:
    """Hide the records of a partition below an offset. Raises OffsetOutOfRange, UnknownTopic."""
    environment = MaintenanceEnvironment(store.objects, store.manifests, store.shelf)
    return delete_records(
        environment, store.source(topic, number), topic.id, before_offset=before_offset, dry_run=dry_run
    )


def maintain(store: BucketStore, rules: MaintenanceRules | None = None) -> Maintained:
    """One run. Raises UnsuitableObjectStore where this machine's clock is off, and what opening requests raise."""
    rules = rules or MaintenanceRules()
    collector = Collector(store, rules.ages)
    run = _Run(store, collector, rules, environment_of(store, collector, rules.folder))
    topics = [topic for topic in store.topics() if not rules.topics or topic.name in rules.topics]
    for topic in topics:
        run.topic(topic)
    run.clean_up(topics)
    return run.done


@dataclass(slots=True)
class _Run:
    store: BucketStore
    collector: Collector
    rules: MaintenanceRules
    environment: MaintenanceEnvironment
    done: Maintained = field(default_factory=Maintained)
    #: the manifests of each topic as the run found them
    seen: dict[str, list[Manifest | None]] = field(default_factory=dict)

    def topic(self, topic: Topic) -> None:
        """One request for each partition that has nothing to do: manifests first, then the ledger once."""
        manifests: list[Manifest | None] = []
        for number in range(topic.partitions):
            try:
                manifests.append(self.collector.manifests.read(topic.id, number).manifest)
            except DuramenError as error:
                self.done.failed.append((str(topic.partition(number)), error))
                manifests.append(None)
        rows = self.store.ledger.refresh().topic(topic.id)
        for number, manifest in enumerate(manifests):
            self._try(topic.partition(number), lambda n=number, m=manifest: self._look(topic, n, m, rows))  # type: ignore[misc]
        self.seen[topic.id] = manifests

    def _look(self, topic: Topic, number: int, manifest: Manifest | None, rows: tuple[TopicRow, ...]) -> None:
        view = view_partition(manifest, rows, number)
        if view is None or not self._is_idle(topic, number, Looked(manifest, view, rows)):
            self.partition(topic, number)

    def _is_idle(self, topic: Topic, number: int, looked: Looked) -> bool:
        """Whether nothing is to be done, by what was just read."""
        source, now_ms = self.store.source(topic, number), self.collector.now_ms()
        if seal_due(self.environment, source, looked, self.rules.seal, now_ms) or self.collector.has_due(
            looked.manifest
        ):
            return False
        if topic.settings_unknown:
            return True
        expiry = expiry_of(self.environment, source, looked, self.store.log_config(topic), now_ms)
        if expiry.passes(looked.manifest):
            return False
        rules = self._compaction_rules(topic)
        return not (
            self.rules.compact
            and rules.config.compact
            and looked.manifest is not None
            and plan_compaction(self.environment, source, looked, rules).due
        )

    def partition(self, topic: Topic, number: int) -> None:
        partition = topic.partition(number)
        self._try(partition, lambda: self._seal(topic, number))
        if not topic.settings_unknown:  # nobody has said what may go
            self._try(partition, lambda: self._retain(topic, number))
            if self.rules.compact:
                self._try(partition, lambda: self._compact(topic, number))
        self._try(partition, lambda: self._collect(topic.id, number))

    def _try(self, partition: TopicPartition | str, work: Callable[[], None]) -> None:
        for attempt in range(_TRIES_MAX):
            try:
                return work()
            except SegmentsChanged as error:
                if attempt + 1 == _TRIES_MAX:
                    self.done.failed.append((str(partition), error))
            except DuramenError as error:
                self.done.failed.append((str(partition), error))
                return None
        return None

    def _seal(self, topic: Topic, number: int) -> None:
        source = self.store.source(topic, number)
        while True:
            sealed = seal_partition(self.environment, source, topic.id, self.rules.seal, self.collector.now_ms())
            if sealed is None:
                return
            self.done.sealed.append(sealed)

    def _retain(self, topic: Topic, number: int) -> None:
        config, source = self.store.log_config(topic), self.store.source(topic, number)
        retained = retain_partition(self.environment, source, topic.id, config, self.collector.now_ms())
        if retained.passes:
            self.done.retained.append(retained)

    def _compact(self, topic: Topic, number: int) -> None:
        rules, source = self._compaction_rules(topic), self.store.source(topic, number)
        compacted = compact_partition(self.environment, source, topic.id, rules)
        if compacted is not None:
            self.done.compacted.append(compacted)

    def _compaction_rules(self, topic: Topic) -> CompactionRules:
        config = self.store.log_config(topic)
        order = Order.of(config)
        return CompactionRules(
            config,
            self.collector.now_ms(),
            MapSettings(self.rules.map_bytes, order=order.kind, header=order.header.encode()),
            forced=self.rules.force_compaction,
        )

    def _collect(self, topic_id: str, number: int) -> None:
        self.done.garbage += self.collector.collect(topic_id, number)

    def clean_up(self, topics: Sequence[Topic]) -> None:
        """What lies beside the partitions; topics that have ended included."""
        rows = {row.topic_id: row for row in self.store.ledger.refresh().rows if row.topic_id}
        ended = [row for row in rows.values() if row.kind is Kind.ENDED and row.end_offsets]  # with something left
        for row in ended:
            self._try(row.topic_id, lambda row=row: self._end(row.topic_id, len(row.end_offsets)))  # type: ignore[misc]
        for topic_id in (*(topic.id for topic in topics), *(row.topic_id for row in ended)):
            self._try(topic_id, lambda topic_id=topic_id: self._free(topic_id))  # type: ignore[misc]
        self._try("ledger", self._prune)
        if self.rules.sweep:
            self._try("sweep", lambda: self.done.swept.extend(self.collector.sweep()))
            self._try("sweep", lambda: self.done.swept.extend(self.collector.sweep_arrivals()))
        remove_expired_pins(self.store.objects, self.collector.now_ms())

    def _end(self, topic_id: str, partitions: int) -> None:
        """Who deleted the topic may have died before all of it."""
        end_manifests(self.store, topic_id, partitions)
        for number in range(partitions):
            self._collect(topic_id, number)

    def _free(self, topic_id: str) -> None:
        self.done.plans += self.collector.free(topic_id, self.seen.get(topic_id))

    def _prune(self) -> None:
        self.done.pruned += self.collector.prune()
        self.done.commits += self.collector.clean_log()
