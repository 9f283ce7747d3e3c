"""What is due in a store, and why: one plan for each partition.

Planning reads a few small files and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow.compute as pc

from logstore.cleaner.cleaner import SWAP_BYTES, plan_pass
from logstore.cleaner.dedupe_map import MapSettings
from logstore.cleaner.eligibility import (
    Cleanable,
    CleanerFacts,
    CleanerRules,
    Due,
    Looks,
    SegmentAge,
    cleanable,
)
from logstore.cleaner.filter import LastRecord
from logstore.cleaner.grouping import group_segments
from logstore.cleaner.versions import Order
from logstore.cleaner.work import CleaningOptions, PassWork
from logstore.compaction.budget import Budget, budget_of
from logstore.config import LogConfig
from logstore.directory.state import PartitionState, SegmentEntry
from logstore.errors import NotCompacted
from logstore.ledger import Ledger
from logstore.ledger.rows import DONE, FAILED
from logstore.partition.roll import max_segment_ms
from logstore.records.compression import codec_by_name
from logstore.records.header import BatchHeader, read_header
from logstore.records.table import CODEC_MASK
from logstore.segment.names import FileKind, file_name
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic

KIND = "compaction"
_RETRY_MS_MAX = 86_400_000


@dataclass(frozen=True, slots=True)
class SetAside:
    """A partition whose last passes failed."""

    reason: str
    failures: int
    failed_ms: int
    retry_ms: int


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
    #: what small groups may have together that share a swap
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


def plan_partition(
    store: OpenStore,
    topic: Topic,
    number: int,
    *,
    now_ms: int,
    config: LogConfig | None = None,
    force: bool = False,
    failures: Mapping[tuple[str, int], SetAside] | None = None,
    threads: int = 1,
    job_bytes: int = 0,
    free_bytes: int | None = None,
    flushed: bool = False,
) -> PartitionPlan:
    """Look at one partition; nothing is opened but its state, and first headers where max.compaction.lag.ms is set.

    `config` answers what-if. `flushed` looks at it as it will be once it was flushed, and rolled where that is due:
    a job does so first. A thread takes groups of up to `job_bytes` in a row before they are swapped in. Raises
    UnknownTopic, CorruptState.
    """
    config = config or store.log_config(topic)
    state = store.partition_state(topic, number)
    rolls_active = config.compact and idle_and_due(store, topic, number, state, config, now_ms)
    if flushed and rolls_active:
        state = _as_rolled(store, topic, number, state)
    facts = facts_of(store, topic, number, state, config, flushed=flushed)
    found = cleanable(
        facts, rules_of(config), now_ms=now_ms, looks=looks_of(store, topic, number, config), forced=force
    )
    sources = [s for s in state.segments[:-1] if s.base_offset < found.first_uncleanable_offset]
    work = None
    groups: list[tuple[object, ...]] = []
    if sources and config.compact:
        work = _work(store, topic, number, state, config, found, now_ms, budget_of(store), {})
        groups = list(
            group_segments(
                work.segments,
                segment_bytes=config.segment_bytes,
                segment_index_bytes=config.segment_index_bytes,
                first_uncleanable_offset=found.first_uncleanable_offset,
            )
        )
    largest = max((sum(s.size_bytes for s in group) for group in groups), default=0)  # type: ignore[attr-defined]
    in_a_row = max(job_bytes // largest, 1) if largest else 1
    # Some are made durable and swapped in while others are written.
    at_once = max(min((threads + 1) * in_a_row, len(groups)), 1)
    if free_bytes is not None:
        while at_once > 1 and largest * at_once > free_bytes:
            at_once -= 1
    beside = largest * at_once
    swap_bytes = SWAP_BYTES if free_bytes is None or beside + SWAP_BYTES <= free_bytes else 0
    dirty_bytes = found.cleanable_bytes
    return PartitionPlan(
        topic=topic.name,
        topic_id=topic.id,
        partition=number,
        cleanable=found,
        size_bytes=sum(s.size_bytes for s in state.segments[:-1]) + _active_bytes(store, topic, number, state),
        segments=len(state.segments),
        groups=len(groups),
        read_bytes=dirty_bytes + sum(s.size_bytes for s in sources),
        extra_bytes=beside + max(min(swap_bytes, sum(s.size_bytes for s in sources) - beside), 0),
        groups_at_once=at_once,
        swap_bytes=swap_bytes,
        rolls_active=rolls_active,
        paused=config.duramen_compaction_paused,
        compacted=config.compact,
        settings_unknown=topic.settings_unknown,
        set_aside=(failures or {}).get((topic.id, number)),
        next_horizon_ms=facts.next_horizon_ms,
        unfinished=state.swap is not None,
    )


def _as_rolled(store: OpenStore, topic: Topic, number: int, state: PartitionState) -> PartitionState:
    """The state with the active segment closed; the one behind it is not there yet."""
    active = replace(state.segments[-1], size_bytes=_active_bytes(store, topic, number, state))
    end_offset = store.high_watermark(topic, number)
    return replace(state, segments=(*state.segments[:-1], active, SegmentEntry(end_offset, 0, -1)))


def _active_bytes(store: OpenStore, topic: Topic, number: int, state: PartitionState) -> int:
    return (store.active_bytes(topic, number, state) or 0) if state.segments else 0


def facts_of(
    store: OpenStore, topic: Topic, number: int, state: PartitionState, config: LogConfig, *, flushed: bool = False
) -> CleanerFacts:
    ends = store.ends(topic)
    horizon = state.next_horizon_ms
    active = state.segments[-1] if state.segments else None
    segments = [
        SegmentAge(s.base_offset, s.size_bytes, _largest_timestamp_ms(store, topic, number, s)) for s in state.segments
    ]
    if active is not None:
        segments[-1] = replace(segments[-1], size_bytes=_active_bytes(store, topic, number, state))
    return CleanerFacts(
        segments=tuple(segments),
        log_start_offset=state.log_start_offset,
        log_end_offset=ends.high_watermarks[number],
        last_stable_offset=ends.last_stable_offsets[number],
        first_dirty_offset=state.first_dirty_offset,
        recovery_point=ends.high_watermarks[number] if flushed else ends.recovery_points[number],
        next_horizon_ms=None if horizon in (None, -1) else horizon,
        oldest_value_ms=state.oldest_value_ms,
        # What was found for another codec says nothing.
        oldest_other_codec_ms=state.oldest_other_codec_ms
        if state.wanted_codec_id == recompress_codec_id(config)
        else None,
    )


def _largest_timestamp_ms(store: OpenStore, topic: Topic, number: int, entry: SegmentEntry) -> int:
    """A segment's age: of its newest record, or of its file where no record has a time."""
    if entry.largest_timestamp_ms >= 0 or not entry.size_bytes:
        return entry.largest_timestamp_ms
    path = os.path.join(store.layout.partition(topic.partition(number)), file_name(entry.base_offset, FileKind.LOG))
    try:
        return store.fs.stat(path).mtime_ms
    except FileNotFoundError:  # replaced since the list was read
        return entry.largest_timestamp_ms


def rules_of(config: LogConfig) -> CleanerRules:
    recompresses = recompress_codec_id(config) is not None
    return CleanerRules(
        config.min_cleanable_dirty_ratio,
        config.min_compaction_lag_ms,
        config.max_compaction_lag_ms,
        key_ttl_ms=max(config.duramen_key_ttl_ms, 0),
        recompress_after_ms=config.duramen_compaction_recompress_after_ms if recompresses else None,
    )


def recompress_codec_id(config: LogConfig) -> int | None:
    """The codec compaction gives to cold data; None: it leaves it as it is."""
    name = config.duramen_compaction_recompress_type
    if name == "producer":
        return None
    return codec_by_name("none" if name == "uncompressed" else name).id


def looks_of(store: OpenStore, topic: Topic, number: int, config: LogConfig) -> Looks:
    """How the rules look into a partition's files, where they need to."""
    codec_id = recompress_codec_id(config)

    def other_codec_ms(base_offset: int) -> int | None:
        header = first_header(store, topic, number, base_offset)
        if header is None or header.attributes & CODEC_MASK == codec_id:
            return None
        path = os.path.join(store.layout.partition(topic.partition(number)), file_name(base_offset, FileKind.LOG))
        try:
            return store.fs.stat(path).mtime_ms
        except FileNotFoundError:
            return None

    return Looks(lambda base_offset: first_timestamp(store, topic, number, base_offset), other_codec_ms)


def first_header(store: OpenStore, topic: Topic, number: int, base_offset: int) -> BatchHeader | None:
    """Of a segment's first batch; None when there is none, or the segment was replaced since the list was read."""
    path = os.path.join(store.layout.partition(topic.partition(number)), file_name(base_offset, FileKind.LOG))
    try:
        file = store.fs.open(path)
    except FileNotFoundError:
        return None
    try:
        return read_header(file, 0, file.size())
    finally:
        file.close()


def first_timestamp(store: OpenStore, topic: Topic, number: int, base_offset: int) -> int:
    """The largest timestamp of a segment's first batch; -1 when there is none."""
    header = first_header(store, topic, number, base_offset)
    return -1 if header is None else header.max_timestamp_ms


def idle_and_due(
    store: OpenStore, topic: Topic, number: int, state: PartitionState, config: LogConfig, now_ms: int
) -> bool:
    """Whether the next append would roll the active segment by its age, but none comes."""
    if not state.segments or not _active_bytes(store, topic, number, state):
        return False
    first_ms = first_timestamp(store, topic, number, state.segments[-1].base_offset)
    return first_ms >= 0 and now_ms - first_ms > max_segment_ms(config)


def failures_of(store: OpenStore, ledger: Ledger) -> dict[tuple[str, int], SetAside]:
    """Partitions whose last pass failed, with when they are tried again."""
    base_ms = store.broker_config.duramen_cleaner_retry_ms
    found: dict[tuple[str, int], SetAside] = {}
    names = ("topic_id", "partition", "result", "reason", "ended_ms")
    ended = (pc.field("kind") == KIND) & pc.field("result").isin([FAILED, DONE])
    rows = ledger.run_rows(["kind", *names], ended)
    failed = rows.filter(pc.field("result") == FAILED)
    keys = set(zip(failed["topic_id"].to_pylist(), failed["partition"].to_pylist(), strict=True))
    for topic_id, number, result, reason, ended_ms in zip(*(rows[name].to_pylist() for name in names), strict=True):
        key = (topic_id, number)
        if key not in keys or topic_id is None or number is None:
            continue
        if result == DONE:
            found.pop(key, None)
            continue
        failures = found[key].failures + 1 if key in found else 1
        failed_ms = ended_ms or 0
        wait_ms = min(base_ms * 2 ** min(failures - 1, 30), _RETRY_MS_MAX)
        found[key] = SetAside(reason, failures, failed_ms, failed_ms + wait_ms)
    return found


def still_set_aside(failures: Mapping[tuple[str, int], SetAside], now_ms: int) -> dict[tuple[str, int], SetAside]:
    """Those whose time has not come. One beyond every wait was noted by a clock that was wrong, and does not count."""
    return {key: aside for key, aside in failures.items() if now_ms < aside.retry_ms <= now_ms + _RETRY_MS_MAX}


def _work(
    store: OpenStore,
    topic: Topic,
    number: int,
    state: PartitionState,
    config: LogConfig,
    found: Cleanable,
    now_ms: int,
    budget: Budget,
    producers: Mapping[int, LastRecord],
) -> PassWork:
    order = Order.of(config)
    work = plan_pass(
        store.fs,
        store.layout.partition(topic.partition(number)),
        state,
        partition=topic.partition(number),
        config=config,
        first_uncleanable_offset=found.first_uncleanable_offset,
        now_ms=now_ms,
        map_settings=MapSettings(
            budget.map_bytes,
            budget.load_factor,
            budget.algorithm,
            order=order.kind,
            header=order.header.encode(),
        ),
        producers=producers,
        options=CleaningOptions(
            merge_bytes=config.duramen_compaction_merge_bytes,
            recompress_codec_id=recompress_codec_id(config),
            recompress_after_ms=config.duramen_compaction_recompress_after_ms,
            key_ttl_ms=max(config.duramen_key_ttl_ms, 0),
        ),
        bytes_per_second=budget.bytes_per_second,
        limits=store.limits,
    )
    return replace(work, first_dirty_offset=found.first_dirty_offset)


def pass_work(
    store: OpenStore,
    topic: Topic,
    number: int,
    config: LogConfig,
    found: Cleanable,
    now_ms: int,
    budget: Budget,
    *,
    rolled: bool = False,
) -> PassWork:
    """The work of a pass as it would be now, but for what only an open log knows of its producers."""
    state = store.partition_state(topic, number)
    if rolled:
        state = _as_rolled(store, topic, number, state)
    return _work(store, topic, number, state, config, found, now_ms, budget, {})


def compacted_partitions(store: OpenStore, topics: Sequence[str] | None = None) -> Iterator[tuple[Topic, int]]:
    """Every partition of the named topics, or of all that are compacted. Raises UnknownTopic, NotCompacted."""
    named = store.topics() if topics is None else [store.topic(name) for name in topics]
    for topic in named:
        if not store.log_config(topic).compact:
            if topics is not None and topic.settings_unknown:
                raise NotCompacted(
                    f"nobody has said which settings topic {topic.name} has; until then nothing of it is compacted",
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
