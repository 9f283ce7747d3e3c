"""Maintenance of a store in a bucket, as jobs and the daemon ask for it. Implements `Maintenance`.

Nothing is locked: who comes second plans again, or leaves it to the next run. Receipts lie in the manifests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from logstore.bucket.collecting import Collector
from logstore.bucket.maintaining import MaintenanceRules, Step, environment_of, maintain
from logstore.bucket.manifest import Manifest
from logstore.bucket.passes import PassRoom, compact_partition
from logstore.bucket.retaining import retain_partition
from logstore.bucket.rows import Kind
from logstore.bucket.tables import BucketTables
from logstore.compaction.failures import SetAside, last_failures
from logstore.compaction.maintenance import STEPS, Context, Counted, Counts, Job, Prepared
from logstore.compaction.planning import PartitionPlan
from logstore.compaction.receipts import Run
from logstore.errors import NotAStore
from logstore.ledger.rows import DONE, FAILED, RunRow
from logstore.partition.retention import Retention
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

#: a run looks at every partition, and each look is a request or two
SEAL_INTERVAL_MS = COMPACTION_INTERVAL_MS = 300_000
SWEEP_INTERVAL_MS = 3_600_000
#: requests at once where many manifests are read
_READS_AT_ONCE = 16
#: for how long the server's clock is believed to be where it was
_CLOCK_S = 600.0
_SAME_S = 60.0
#: what is asked for within this time is asked for at one moment
_TOGETHER_S = 0.5


class BucketMaintenance:
    def __init__(self, store: BucketStore) -> None:
        self._store = store
        self._collector: tuple[float, Collector] | None = None
        self._identity: str | None = None
        self._looked_s = -_SAME_S
        self._manifests: tuple[float, list[tuple[Topic, int, Manifest]]] = (-_TOGETHER_S, [])

    # --- looking ----------------------------------------------------------------------------------------------------

    def now_ms(self, *, working: bool = False) -> int:
        return self._worker().now_ms() if working else self._store.clock.now_ms()

    def _worker(self) -> Collector:
        """Goes by the server's time. Raises UnsuitableObjectStore where this machine's is far off."""
        if self._collector is None or time.monotonic() - self._collector[0] > _CLOCK_S:
            self._collector = (time.monotonic(), Collector(self._store))
        return self._collector[1]

    def clock_doubt(self) -> str | None:
        return None

    def free_bytes(self) -> int | None:
        return None

    def total_bytes(self) -> int | None:
        return None

    @property
    def fresh_s(self) -> float:
        return 60.0

    def manifests(self) -> list[tuple[Topic, int, Manifest]]:
        """Of every partition that has one."""
        partitions = [(topic, number) for topic in self._store.topics() for number in range(topic.partitions)]
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            found = pool.map(lambda each: _read(self._store, each[0].id, each[1]), partitions)
            return [(*each, manifest) for each, manifest in zip(partitions, found, strict=True) if manifest is not None]

    def _lately(self) -> list[tuple[Topic, int, Manifest]]:
        """The same, for those who ask for several things at a time."""
        if time.monotonic() - self._manifests[0] > _TOGETHER_S:
            self._manifests = (time.monotonic(), self.manifests())
        return self._manifests[1]

    def failures(self) -> dict[tuple[str, int], SetAside]:
        base_ms = self._store.broker_config.duramen_cleaner_retry_ms
        found = {
            (topic.id, number): last_failures(manifest.receipts.runs, base_ms)
            for topic, number, manifest in self._lately()
        }
        return {key: aside for key, aside in found.items() if aside is not None}

    def set_aside(self, now_ms: int) -> dict[tuple[str, int], SetAside]:
        return {}

    def runs(self) -> list[RunRow]:
        found = [
            replace(run, topic_id=topic.id, topic=topic.name, partition=number)
            for topic, number, manifest in self._lately()
            for run in manifest.receipts.runs
        ]
        return sorted(found, key=lambda run: run.ended_ms or 0)

    def counts(self) -> Counts:
        return counts_of(self._lately())

    def figures(self) -> BucketFigures:
        return BucketFigures(self._store, self)

    def tables(self) -> BucketTables:
        return BucketTables(self._store, self)

    def history_path(self, topic_id: str | None) -> str | None:
        return None

    @property
    def activity_folder(self) -> str | None:
        return None

    def is_same(self) -> bool:
        """Asked for once a minute."""
        if time.monotonic() - self._looked_s < _SAME_S:
            return True
        try:
            found = self._store.store_id
        except NotAStore:
            return False
        self._looked_s = time.monotonic()
        self._identity = self._identity or found
        return found == self._identity

    # --- a run ------------------------------------------------------------------------------------------------------

    def prepare(self, topics: Sequence[Topic], stopping: Callable[[], bool]) -> Prepared:
        """What is committed is durable, and a killed pass leaves nothing that has to be closed."""
        return Prepared()

    def compact(self, context: Context, plan: PartitionPlan) -> Run:
        store, topic = self._store, self._store.topic(plan.topic)
        collector = self._worker()
        environment, source = environment_of(store, collector), store.source(topic, plan.partition)
        retry_ms = store.broker_config.duramen_cleaner_retry_ms
        context = replace(context, planning=replace(context.planning, retry_ms=retry_ms))
        room = PassRoom(environment, source, topic, store.log_config(topic), collector.now_ms)
        return compact_partition(room, context, plan)

    def end_passes(self) -> list[str]:
        return []

    def prepare_retention(self, topic: Topic) -> None:
        """What is committed may go."""

    def retain(self, topic: Topic, number: int, *, now_ms: int, dry_run: bool = False) -> Retention:
        environment, source = environment_of(self._store, self._worker()), self._store.source(topic, number)
        return retain_partition(environment, source, topic.id, self._store.log_config(topic), now_ms, dry_run=dry_run)

    def publish(self) -> list[str]:
        return []

    # --- the daemon -------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (Job.SEAL, Job.COMPACTION, Job.RETENTION, Job.SWEEP)

    def intervals_ms(self) -> dict[Job, int]:
        backoff_ms = self._store.given("log.cleaner.backoff.ms")
        return {
            Job.SEAL: SEAL_INTERVAL_MS,
            Job.COMPACTION: COMPACTION_INTERVAL_MS if backoff_ms is None else max(backoff_ms, 1_000),
            Job.RETENTION: self._store.broker_config.log_retention_check_interval_ms,
            Job.SWEEP: SWEEP_INTERVAL_MS,
        }

    def tidy(self, job: Job, stopping: Callable[[], bool], *, wait_for_idle: bool) -> Prepared:
        steps = frozenset({Step.SEAL}) if job is Job.SEAL else frozenset({Step.COLLECT, Step.CLEAN_UP})
        done = maintain(self._store, MaintenanceRules(steps=steps), stopping=stopping)
        notes = [f"{each.partition}: sealed {each.from_offset} to {each.end_offset}" for each in done.sealed]
        if job is Job.SWEEP and (done.garbage or done.plans or done.swept):
            notes.append(
                f"deleted {done.garbage} replaced segments, the staged files of {done.plans} batches, "
                f"{len(done.swept)} orphans"
            )
        problems = [f"{what}: {error}" for what, error in done.failed]
        problems += [
            f"{lost.partition}: offsets {lost.base_offset} to {lost.end_offset} are lost: {lost.reason}"
            for each in done.sealed
            for lost in each.lost
        ]
        return Prepared(problems, notes)

    def hold_schedule(self) -> str | None:
        """Any number of daemons may run; who comes second at a partition finds nothing to do."""
        return None

    def release_schedule(self) -> None:
        """Nothing is held."""


def _read(store: BucketStore, topic_id: str, number: int) -> Manifest | None:
    return store.manifests.read(topic_id, number).manifest


def counts_of(manifests: Iterable[tuple[Topic, int, Manifest]]) -> Counts:
    """What compaction counted in segments."""
    return {
        (topic.id, number): {
            each.base_offset: Counted(each.log_bytes, each.records, each.keys, each.tombstones, None)
            for each in manifest.segments
            if each.keys >= 0
        }
        for topic, number, manifest in manifests
    }


@dataclass(slots=True)
class _Totals:
    """Implements `RunTotals`."""

    results: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    written_bytes: int = 0

    def add(self, manifest: Manifest) -> None:
        receipts = manifest.receipts
        self.results.update(receipts.results)
        self.removed.update(receipts.removed)
        self.read_bytes += receipts.read_bytes
        self.written_bytes += receipts.written_bytes


class BucketFigures:
    """Implements `Figures`: by manifests, all of which are read once for an answer to everything."""

    def __init__(self, store: BucketStore, maintenance: BucketMaintenance) -> None:
        self._store = store
        self._maintenance = maintenance
        self._manifests: tuple[float, list[tuple[Topic, int, Manifest]]] = (0, [])
        #: of topics that have ended: what was done to them does not change any more
        self._ended: dict[str, list[Manifest]] = {}

    def _read(self) -> list[tuple[Topic, int, Manifest]]:
        at, found = self._manifests
        if not found or time.monotonic() - at > self._maintenance.fresh_s:
            found = self._maintenance.manifests()
            self._manifests = (time.monotonic(), found)
        return found

    def runs(self) -> _Totals:
        totals = _Totals()
        for manifest in (*(each for _, _, each in self._read()), *self._of_ended()):
            totals.add(manifest)
        return totals

    def _of_ended(self) -> list[Manifest]:
        for row in self._store.ledger.view.rows:
            if row.kind is Kind.ENDED and row.topic_id not in self._ended:
                found = (_read(self._store, row.topic_id, number) for number in range(len(row.end_offsets)))
                self._ended[row.topic_id] = [each for each in found if each is not None]
        return [each for manifests in self._ended.values() for each in manifests]

    def uncleanable(self) -> int:
        return sum(last_result(manifest) == FAILED for _, _, manifest in self._read())

    def appends(self) -> dict[str, int]:
        """Of each topic its batches; one of several topics counts in each."""
        newest = {row.topic_id: row for row in self._store.ledger.refresh().rows if row.topic_id}
        batches = (row.sequence - row.config_version - (row.kind is Kind.ENDED) for row in newest.values())
        return {"committed": sum(batches), "void": 0}

    def append_ms(self) -> Counter[str]:
        """Of the commits that this process saw come."""
        return Counter({step: self._store.ledger.spent_ms[step] for step in STEPS})

    def segments(self) -> Counts:
        return counts_of(self._read())


def last_result(manifest: Manifest) -> str | None:
    """How the last pass that did or failed ended."""
    results = [run.result for run in manifest.receipts.runs if run.result in (DONE, FAILED)]
    return results[-1] if results else None
