"""Maintenance of a store in a bucket: seal, retain, compact, collect, free, sweep; one run over all topics.

Any number of runs may be at work at once, with writers and readers: each replacement is a compare-and-set, and who
comes second plans again or leaves it to the next run. What is one partition's own fault does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from logstore.bucket.collecting import Ages, Collector
from logstore.bucket.definitions import end_manifests, touch_topic
from logstore.bucket.keys import new_nonce
from logstore.bucket.manifest import Manifest
from logstore.bucket.passes import PassRoom, compact_partition, plan_pass_of
from logstore.bucket.pins import remove_expired_pins
from logstore.bucket.reader import Looked, look
from logstore.bucket.retaining import delete_records, expiry_of, retain_partition
from logstore.bucket.rows import Kind, TopicRow, view_partition
from logstore.bucket.sealing import MaintenanceEnvironment, SealedPartition, SealRules, seal_due, seal_partition
from logstore.compaction.budget import budget_of
from logstore.compaction.local_workers import LocalWorkers
from logstore.compaction.maintenance import Context
from logstore.compaction.planning import PlanOptions
from logstore.compaction.receipts import Run, Skip
from logstore.errors import DuramenError, SegmentsChanged
from logstore.ledger.rows import DONE
from logstore.partition.retention import DeletedRecords, Retention
from logstore.topic import TopicPartition
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_TRIES_MAX = 3


class Step(Enum):
    """What a run does to each partition, and at its end."""

    SEAL = "seal"
    RETAIN = "retain"
    COMPACT = "compact"
    #: delete garbage of manifests
    COLLECT = "collect"
    #: end what was deleted, free what is sealed, let the ledger forget, sweep orphans
    CLEAN_UP = "clean up"


@dataclass(frozen=True, slots=True)
class MaintenanceRules:
    """What a run does, and by which ages."""

    seal: SealRules = field(default_factory=SealRules)
    compact: bool = True
    #: compaction ignores the dirty ratio, never min.compaction.lag.ms
    force_compaction: bool = False
    sweep: bool = True
    ages: Ages = field(default_factory=Ages)
    #: for the map of a pass; None: as the store's settings have it
    map_bytes: int | None = None
    #: for temporary copies of segments; None: the system's folder for such files
    folder: str | None = None
    topics: tuple[str, ...] = ()
    steps: frozenset[Step] = frozenset(Step)

    def has(self, step: Step) -> bool:
        return step in self.steps and (self.compact or step is not Step.COMPACT)


@dataclass(slots=True)
class Maintained:
    """What a run did."""

    sealed: list[SealedPartition] = field(default_factory=list)
    compacted: list[Run] = field(default_factory=list)
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
    """Hide the records of a partition below an offset. Raises OffsetOutOfRange, UnknownTopic, CommitUnknown."""
    environment = MaintenanceEnvironment(store.objects, store.manifests, store.shelf)
    done = delete_records(
        environment, store.source(topic, number), topic.id, before_offset=before_offset, dry_run=dry_run
    )
    if not dry_run:
        touch_topic(store, topic)  # whoever goes by the rows alone looks at the manifest again
    return done


def maintain(
    store: BucketStore, rules: MaintenanceRules | None = None, *, stopping: Callable[[], bool] = lambda: False
) -> Maintained:
    """One run, or what it did until it was to stop.

    Raises UnsuitableObjectStore where this machine's clock is off, and what opening requests raise.
    """
    rules = rules or MaintenanceRules()
    collector = Collector(store, rules.ages)
    run = _Run(store, collector, rules, environment_of(store, collector, rules.folder))
    topics = [topic for topic in store.topics() if not rules.topics or topic.name in rules.topics]
    for topic in topics:
        if not stopping():
            run.topic(topic)
    if rules.has(Step.CLEAN_UP) and not stopping():
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
    run_name: str = field(default_factory=new_nonce)

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
        source, now_ms, wanted = self.store.source(topic, number), self.collector.now_ms(), self.rules
        if wanted.has(Step.SEAL) and seal_due(self.environment, source, looked, wanted.seal, now_ms):
            return False
        if wanted.has(Step.COLLECT) and self.collector.has_due(looked.manifest):
            return False
        if topic.settings_unknown:
            return True
        if wanted.has(Step.RETAIN):
            expiry = expiry_of(self.environment, source, looked, self.store.log_config(topic), now_ms)
            if expiry.passes(looked.manifest):
                return False
        if not wanted.has(Step.COMPACT) or not self.store.log_config(topic).compact or looked.manifest is None:
            return True
        return not plan_pass_of(self._room(topic, number), self._context(), looked).is_due

    def partition(self, topic: Topic, number: int) -> None:
        steps: list[tuple[Step, Callable[[], None]]] = [(Step.SEAL, lambda: self._seal(topic, number))]
        if not topic.settings_unknown:  # nobody has said what may go
            steps.append((Step.RETAIN, lambda: self._retain(topic, number)))
            steps.append((Step.COMPACT, lambda: self._compact(topic, number)))
        steps.append((Step.COLLECT, lambda: self._collect(topic.id, number)))
        for step, work in steps:
            if self.rules.has(step):
                self._try(topic.partition(number), work)

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
        room, context = self._room(topic, number), self._context()
        plan = plan_pass_of(room, context, look(room.source))
        if not plan.is_due:
            return
        run = compact_partition(room, context, replace(plan, rolls_active=False))  # sealed it was, as far as it is due
        if run.skip is Skip.TAKEN:
            raise SegmentsChanged(run.reason)
        if run.error is not None:
            raise run.error
        if run.result == DONE:
            self.done.compacted.append(run)

    def _room(self, topic: Topic, number: int) -> PassRoom:
        source, config = self.store.source(topic, number), self.store.log_config(topic)
        return PassRoom(self.environment, source, topic, config, self.collector.now_ms)

    def _context(self) -> Context:
        config, rules = self.store.broker_config, self.rules
        options = PlanOptions(self.collector.now_ms(), rules.force_compaction, retry_ms=config.duramen_cleaner_retry_ms)
        budget = replace(budget_of(self.store), map_bytes=rules.map_bytes) if rules.map_bytes else budget_of(self.store)
        return Context(LocalWorkers(1, lambda _name, _step, _bytes: None), options, budget, run_name=self.run_name)

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
        if self.rules.sweep:
            self._try("ledger", self._bury)
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

    def _bury(self) -> None:
        self.collector.bury()

    def _free(self, topic_id: str) -> None:
        self.done.plans += self.collector.free(topic_id, self.seen.get(topic_id))

    def _prune(self) -> None:
        self.done.pruned += self.collector.prune()
        self.done.commits += self.collector.clean_log()
