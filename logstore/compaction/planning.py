"""What is due in a store, and why: one plan for each partition.

Planning reads a few small files and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from logstore.cleaner.cleaner import SWAP_BYTES, groups_of
from logstore.cleaner.eligibility import Cleanable, Due, cleanable
from logstore.cleaner.work import PassWork
from logstore.compaction.budget import Budget, budget_of
from logstore.compaction.failures import SetAside, holds, last_failures
from logstore.compaction.partition_view import PartitionView
from logstore.config import LogConfig
from logstore.errors import NotCompacted
from logstore.files import OS_FILES, FileSystem
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What all plans of a run share."""

    now_ms: int
    force: bool = False
    #: partitions that are set aside, by topic id and number
    failures: Mapping[tuple[str, int], SetAside] = field(default_factory=dict)
    threads: int = 1
    #: a thread rewrites groups of up to this size before they are swapped in
    job_bytes: int = 0
    free_bytes: int | None = None
    #: look at each partition as it will be once it was flushed, and rolled where that is due: a job does so first
    flushed: bool = False
    #: how long a partition whose pass failed waits at first
    retry_ms: int = 0


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What a pass over one partition would do, and why, or why there is none."""

    topic: str
    topic_id: str
    partition: int
    cleanable: Cleanable
    size_bytes: int
    segments: int
    groups: int = 0
    read_bytes: int = 0
    #: free space a pass needs beside what is there, with so many groups under way at once
    extra_bytes: int = 0
    groups_at_once: int = 1
    #: small groups share a swap up to this size together
    swap_bytes: int = 0
    rolls_active: bool = False
    paused: bool = False
    compacted: bool = True
    settings_unknown: bool = False
    set_aside: SetAside | None = None
    #: when the first tombstone or marker may go
    next_horizon_ms: int | None = None
    #: whether an earlier pass stopped in the middle
    unfinished: bool = False
    largest_group_bytes: int = 0
    #: what the plan was made from; see `holds`
    basis: tuple[object, ...] = field(default=(), repr=False, compare=False)
    #: the pass itself, but for its share of the run's budget and what an open log knows of its producers
    work: PassWork | None = field(default=None, repr=False, compare=False)
    #: the files of `work`, for reading
    fs: FileSystem = field(default=OS_FILES, repr=False, compare=False)

    @property
    def is_due(self) -> bool:
        due = self.cleanable.due is not None or self.rolls_active
        return due and self.compacted and not self.paused and self.set_aside is None

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def why(self) -> str:
        """One sentence for people."""
        if self.settings_unknown:
            return "settings unknown: nothing is deleted or compacted until `duramen topics alter` gives them"
        if not self.compacted:
            return "not compacted: its cleanup.policy does not include compact"
        if self.paused:
            return "paused; `duramen resume` lets it go on"
        if self.set_aside is not None:
            return f"set aside after {self.set_aside.failures} failures: {self.set_aside.reason}"
        found = self.cleanable
        if found.due is not None:
            return f"due: {found.due.value}"
        if self.rolls_active:
            return "due: its active segment is idle and old enough to be rolled"
        return f"not due: {found.not_due.value}" if found.not_due is not None else "not due"

    @property
    def urgency(self) -> tuple[int, int, float]:
        """Greater goes first: what is late by max.compaction.lag.ms, then by dirty ratio."""
        found = self.cleanable
        return (int(found.due is Due.MAX_LAG), found.late_ms, found.ratio)

    def may_run(self, *, roll_active: bool) -> bool:
        """Whether a run has to look at it under its locks; `roll_active` may make it due."""
        return self.is_due or (roll_active and self.compacted and not self.paused)

    def holds(self, topic: Topic, view: PartitionView) -> bool:
        """Whether the partition is still what was planned: same settings, same segment list.

        Records that came since lie in the active segment, which no pass touches; a roll writes another list.
        """
        return self.basis == _basis(topic, view)

    def with_room(self, options: PlanOptions) -> PartitionPlan:
        """With as many groups under way at once as there are threads for, and room on the disk."""
        largest, free = self.largest_group_bytes, options.free_bytes
        in_a_row = max(options.job_bytes // largest, 1) if largest else 1
        # Some are made durable and swapped in while others are written.
        at_once = max(min((options.threads + 1) * in_a_row, self.groups), 1)
        if free is not None and largest:
            at_once = max(min(at_once, free // largest), 1)
        beside = largest * at_once
        swap_bytes = SWAP_BYTES if free is None or beside + SWAP_BYTES <= free else 0
        source_bytes = sum(source.size_bytes for source in self.work.segments) if self.work is not None else 0
        return replace(
            self,
            extra_bytes=beside + max(min(swap_bytes, source_bytes - beside), 0),
            groups_at_once=at_once,
            swap_bytes=swap_bytes,
        )


def plan_partition(
    store: ReadableStore, topic: Topic, number: int, options: PlanOptions, *, config: LogConfig | None = None
) -> PartitionPlan:
    """Look at one partition; nothing is opened but its state, and first headers where max.compaction.lag.ms is set.

    `config` answers what-if. Raises UnknownTopic, CorruptState.
    """
    options = replace(options, retry_ms=store.broker_config.duramen_cleaner_retry_ms)
    return plan_view(PartitionView.of(store, topic, number, config), topic, options, budget_of(store))


def plan_view(view: PartitionView, topic: Topic, options: PlanOptions, budget: Budget) -> PartitionPlan:
    """The same of a partition that was looked at."""
    basis, number = _basis(topic, view), view.look.partition.partition
    rolls_active = view.rolls_active(options.now_ms)
    if options.flushed and rolls_active:
        view = view.rolled()
    config, facts = view.config, view.facts(flushed=options.flushed)
    found = cleanable(facts, view.rules(), now_ms=options.now_ms, looks=view.looks(), forced=options.force)
    sources = [s for s in view.state.segments[:-1] if s.base_offset < found.first_uncleanable_offset]
    work = None
    if sources and config.compact:
        work = view.work(found, now_ms=options.now_ms, budget=budget)
    groups = groups_of(work, work.segments) if work is not None else ()
    plan = PartitionPlan(
        topic=topic.name,
        topic_id=topic.id,
        partition=number,
        cleanable=found,
        size_bytes=view.size_bytes,
        segments=len(view.state.segments),
        groups=len(groups),
        read_bytes=found.cleanable_bytes + sum(s.size_bytes for s in sources),
        rolls_active=rolls_active,
        paused=config.duramen_compaction_paused,
        compacted=config.compact,
        settings_unknown=topic.settings_unknown,
        set_aside=_set_aside(view, topic.id, options),
        next_horizon_ms=facts.next_horizon_ms,
        unfinished=view.state.swap is not None,
        largest_group_bytes=max((sum(source.size_bytes for source in group) for group in groups), default=0),
        basis=basis,
        work=work,
        fs=view.look.fs,
    )
    return plan.with_room(options)


def _set_aside(view: PartitionView, topic_id: str, options: PlanOptions) -> SetAside | None:
    """By the receipts that lie with the list, or as the options have it."""
    own = None if options.force else last_failures(view.look.runs, options.retry_ms)
    if own is not None and holds(own, options.now_ms):
        return own
    return options.failures.get((topic_id, view.look.partition.partition))


def _basis(topic: Topic, view: PartitionView) -> tuple[object, ...]:
    state = view.state
    return topic.id, topic.config_version, state.generation, state.first_dirty_offset, state.log_start_offset


def compacted_partitions(store: ReadableStore, topics: Sequence[str] | None = None) -> Iterator[tuple[Topic, int]]:
    """Every partition of the named topics, or of all that are compacted. Raises UnknownTopic, NotCompacted."""
    named = store.topics() if topics is None else [store.topic(name) for name in topics]
    for topic in named:
        if not store.log_config(topic).compact:
            if topics is not None and topic.settings_unknown:
                raise NotCompacted(
                    f"the settings of topic {topic.name} are unknown; until they are given nothing of it is compacted",
                    hint=f"Give them: `duramen topics alter {topic.name} --config …`, or `--defaults`",
                )
            if topics is not None:
                raise NotCompacted(
                    f"topic {topic.name} is not compacted",
                    hint=f"Set it with `duramen topics alter {topic.name} --config cleanup.policy=compact`",
                )
            continue
        for number in range(topic.partitions):
            yield topic, number


def most_urgent_first(plans: Iterable[PartitionPlan]) -> list[PartitionPlan]:
    return sorted(plans, key=lambda plan: plan.urgency, reverse=True)
