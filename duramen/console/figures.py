"""The figures of all topics, kept for as long as nothing changes: a page with a thousand partitions asks every few
seconds. A topic is looked at again when its stamp, its counts or its failures changed, when one of its rules comes
true by time alone, and every now and then in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from compaction_job.figures import PartitionFigures, figures_of
from duramen.console.documents import STATES
from duramen.console.ledger_history import LedgerHistory
from logstore.compaction.failures import SetAside, still_set_aside
from logstore.compaction.maintenance import MaintainedStore
from logstore.compaction.planning import PartitionPlan
from logstore.config import LogConfig
from logstore.errors import DuramenError
from logstore.topics.registry import Topic

#: nobody notices when an answer is so old
_FRESH_S = 0.5
_LOOK_AGAIN_MS = 15_000


@dataclass(slots=True)
class TopicLook:
    """A topic at one moment; what cannot be read has its error in the place of its figures."""

    name: str
    topic: Topic | None = None
    config: LogConfig | None = None
    partitions: list[PartitionFigures | str] = field(default_factory=list)
    error: str | None = None
    looked_ms: int = 0
    #: by time alone something changes then
    until_ms: int | None = None
    key: object = None

    def readable(self) -> Iterable[PartitionFigures]:
        return (each for each in self.partitions if isinstance(each, PartitionFigures))


def state_of(found: PartitionFigures | str) -> str:
    """Which of the contract's states a partition is in."""
    return "unreadable" if isinstance(found, str) else state_of_plan(found.plan)


def state_of_plan(plan: PartitionPlan) -> str:
    if plan.settings_unknown:
        return "settings_unknown"
    if not plan.compacted:
        return "not_compacted"
    if plan.paused:
        return "paused"
    if plan.set_aside is not None:
        return "set_aside"
    return "due" if plan.is_due else "waiting"


def count_states(partitions: Iterable[PartitionFigures | str]) -> dict[str, int]:
    counts = dict.fromkeys(STATES, 0)
    for each in partitions:
        counts[state_of(each)] += 1
    return counts


class Figures:
    """For any number of threads; one of them looks, the others wait for it."""

    def __init__(self, store: MaintainedStore, fresh_s: float, ledger: LedgerHistory) -> None:
        self._store = store
        #: all partitions are looked at again after so long; one that is asked for, sooner
        self._look_again_ms = max(_LOOK_AGAIN_MS, int(fresh_s * 1000))
        self._ledger = ledger
        self._lock = threading.Lock()
        self._known: dict[str, TopicLook] = {}
        self._looked_at = -_FRESH_S
        #: counts changes, for those who ask whether there were any
        self.generation = 0

    def topics(self) -> list[TopicLook]:
        """All topics by name."""
        with self._lock:
            if time.monotonic() - self._looked_at >= _FRESH_S:
                self._look()
                self._looked_at = time.monotonic()
            return list(self._known.values())

    def topic(self, name: str) -> TopicLook:
        """One topic. Raises UnknownTopic, InvalidTopic."""
        topic = self._store.topic(name)
        with self._lock:
            failures = still_set_aside(self._ledger.failures(), self._store.clock.now_ms())
            found = self._topic(name, failures, topic, look_again_ms=_LOOK_AGAIN_MS)
            self._known[name] = found
            return found

    def _look(self) -> None:
        failures = still_set_aside(self._ledger.failures(), self._store.clock.now_ms())
        names = self._store.topic_names()
        if names != list(self._known):
            self.generation += 1
        self._known = {name: self._topic(name, failures) for name in names}

    def _topic(
        self,
        name: str,
        failures: dict[tuple[str, int], SetAside],
        topic: Topic | None = None,
        *,
        look_again_ms: int | None = None,
    ) -> TopicLook:
        store, now_ms = self._store, self._store.clock.now_ms()
        counted, look_again_ms = self._ledger.counts(), look_again_ms or self._look_again_ms
        known = self._known.get(name)
        try:
            topic = topic or store.topic(name)
            numbers = range(topic.partitions)
            mine = tuple(failures.get((topic.id, number)) for number in numbers) if failures else ()
            counts = tuple(counted.get((topic.id, number)) for number in numbers)
            key = (topic.id, store.stamp(topic), mine, counts)
            if known is not None and known.key == key and not _is_old(known, now_ms, look_again_ms):
                return known
            config = store.log_config(topic)
        except (DuramenError, OSError) as error:
            self.generation += 1
            return TopicLook(name, error=str(error), looked_ms=now_ms)
        found = TopicLook(name, topic, config, looked_ms=now_ms, key=key)
        for number in numbers:
            try:
                look = figures_of(
                    store,
                    topic,
                    number,
                    config=config,
                    now_ms=now_ms,
                    counted=counted.get((topic.id, number), {}),
                    failures=failures,
                )
            except (DuramenError, OSError) as error:
                found.partitions.append(str(error))
                continue
            found.partitions.append(look)
            found.until_ms = _earlier(found.until_ms, look.plan.cleanable.next_ms)
        if known is None or known.key != key:
            self.generation += 1
        return found


def _is_old(known: TopicLook, now_ms: int, look_again_ms: int) -> bool:
    return abs(now_ms - known.looked_ms) >= look_again_ms or (known.until_ms is not None and known.until_ms <= now_ms)


def _earlier(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)
