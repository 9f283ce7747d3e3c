"""What is due in a store, and what a run would do about it: `plan` and `explain`. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, cpu_count

from compaction_job.estimate import Estimate, estimate_partition
from logstore.compaction.budget import budget_of, cleaner_threads
from logstore.compaction.maintenance import MaintainedStore
from logstore.compaction.planning import PartitionPlan, PlanOptions, compacted_partitions, plan_partition
from logstore.config import LogConfig, hold_back
from logstore.store import open_store
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


def plan(
    store: str | PathLike[str] | MaintainedStore,
    *,
    topics: Sequence[str] | None = None,
    config: Mapping[str, object] | None = None,
    force: bool = False,
    now_ms: int | None = None,
    estimate: bool = True,
    storage_options: Mapping[str, str] | None = None,
) -> list[tuple[PartitionPlan, Estimate | None]]:
    """For each partition why it is due, why not, or when next; with an estimate of what would go. Changes nothing.

    `config` overrules settings of the topics: what if? Raises UnknownTopic, UnknownConfig, InvalidConfig.

        for found, estimate in plan("/data/store", config={"min.cleanable.dirty.ratio": 0.1}):
            print(found.name, found.why, estimate)
    """
    with opened_store(store, storage_options) as opened:
        maintenance = opened.maintenance()
        now = maintenance.now_ms() if now_ms is None else now_ms
        aside = maintenance.set_aside(now)
        options = PlanOptions(now, force, aside, threads_of(opened), free_bytes=maintenance.free_bytes(), flushed=True)
        plans = [
            plan_partition(opened, topic, number, options, config=_what_if(opened, topic, config))
            for topic, number in _chosen(opened, topics, config)
        ]
        # A run has one buffer for all the passes it makes at once.
        budget = budget_of(opened).divided(passes_at_once(plans, options.threads))
        return [
            (found, estimate_partition(found, budget) if estimate and found.cleanable.due is not None else None)
            for found in plans
        ]


def explain(
    store: str | PathLike[str] | MaintainedStore,
    *,
    topics: Sequence[str] | None = None,
    now_ms: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[PartitionPlan]:
    """For each partition why it is due, why not, or when next: `.why` is a sentence. Changes nothing, reads no records.

    Raises UnknownTopic.

        for found in explain("/data/store", topics=["orders"]):
            print(found.name, found.why)
    """
    found = plan(store, topics=topics, now_ms=now_ms, estimate=False, storage_options=storage_options)
    return [each for each, _ in found]


def passes_at_once(plans: Sequence[PartitionPlan], threads: int, *, roll_active: bool = False) -> int:
    """How many passes a run makes side by side; they share its map memory and its rate."""
    return max(min(threads, sum(each.may_run(roll_active=roll_active) for each in plans)), 1)


def threads_of(store: ReadableStore) -> int:
    return cleaner_threads(store) or max(cpu_count() or 1, 1)


def opened_store(
    store: str | PathLike[str] | MaintainedStore, storage_options: Mapping[str, str] | None = None
) -> AbstractContextManager[MaintainedStore]:
    """A store that was given open stays open. Raises what opening one raises."""
    if isinstance(store, (str, PathLike)):
        return open_store(store, storage_options=storage_options)
    return nullcontext(store)


def _what_if(store: ReadableStore, topic: Topic, config: Mapping[str, object] | None) -> LogConfig:
    if not config:
        return store.log_config(topic)
    resolved = store.resolve({**topic.configs, **config})
    return LogConfig.from_resolved(hold_back(resolved) if topic.settings_unknown else resolved)


def _chosen(
    store: ReadableStore, topics: Sequence[str] | None, config: Mapping[str, object] | None = None
) -> list[tuple[Topic, int]]:
    if topics is None and config and "compact" in str(config.get("cleanup.policy", "")):
        return [(topic, number) for topic in store.topics() for number in range(topic.partitions)]
    if config and topics is not None:
        return [(topic, number) for topic in map(store.topic, topics) for number in range(topic.partitions)]
    return list(compacted_partitions(store, topics))
