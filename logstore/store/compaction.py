"""Compaction of a store's partitions: what is due and why, and one pass over one partition under its locks.

Planning reads a few small files and changes nothing. Executing holds the partition's maintenance lock; whoever comes
while another has it, skips the partition and says so. Every pass leaves a row in the ledger's `runs`, and true counts
in its `segments`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import pyarrow.compute as pc

from logstore.cleaner.cleaner import SWAP_BYTES, Engine, plan_pass, run_pass
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
from logstore.cleaner.transactions import find_transactions
from logstore.cleaner.versions import Order
from logstore.cleaner.work import Cleaned, CleaningOptions, PassReport, PassWork
from logstore.clock import ManualClock
from logstore.config import LogConfig, Source
from logstore.errors import (
    CleaningAborted,
    DiskFull,
    DuramenError,
    LockHeld,
    NotCompacted,
    RetriableError,
    is_disk_full,
)
from logstore.ledger import Ledger, RunRow
from logstore.partition.roll import max_segment_ms
from logstore.partition.state import PartitionState, SegmentEntry, read_state
from logstore.partition.swap import finish_swap
from logstore.records.compression import codec_by_name
from logstore.records.header import BatchHeader, read_header
from logstore.records.table import CODEC_MASK
from logstore.segment.names import FileKind, file_name
from logstore.store.locks import FileLock
from logstore.store.registry import Topic
from logstore.store.segment_counts import SegmentCounts
from logstore.store.store import LogStore
from logstore.topic import TopicPartition

KIND = "compaction"
RUNNING, DONE, FAILED, SKIPPED, ABANDONED = "running", "done", "failed", "skipped", "abandoned"


class Skip(Enum):
    """Why a partition had no pass."""

    NOT_DUE = "not_due"
    #: another process is at work on it
    TAKEN = "taken"
    #: the run was told to stop
    STOPPING = "stopping"
    DRY_RUN = "dry_run"
    #: by an earlier job of the same Airflow run
    DONE_BEFORE = "done_before"


_RETRY_MS_MAX = 86_400_000
_OWNER_FILE = "owner"


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


@dataclass(slots=True)
class Run:
    """One pass, or why there was none."""

    plan: PartitionPlan
    result: str
    reason: str = ""
    run_id: str = ""
    report: PassReport | None = None
    rolled: bool = False
    error: DuramenError | None = None
    #: with the result SKIPPED
    skip: Skip | None = None

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.plan.topic, self.plan.partition)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one pass may take; a run divides its own among those it makes at once."""

    map_bytes: int
    load_factor: float = 0.9
    bytes_per_second: float = float("inf")
    algorithm: str = "siphash"
    #: so many have as much at the same time
    passes: int = 1

    def divided(self, passes: int) -> Budget:
        return replace(
            self,
            map_bytes=self.map_bytes // passes,
            bytes_per_second=self.bytes_per_second / passes,
            passes=self.passes * passes,
        )


@dataclass(frozen=True, slots=True)
class MapAdvice:
    """What to set so that a pass whose map was full gets through: the buffer, or fewer threads to share it."""

    #: log.cleaner.dedupe.buffer.size
    buffer_bytes: int
    #: log.cleaner.threads; None: even one would have too little
    threads: int | None

    def __str__(self) -> str:
        fewer = "" if self.threads is None else f", or log.cleaner.threads = {self.threads}"
        return f"log.cleaner.dedupe.buffer.size = {self.buffer_bytes}{fewer}"


def map_advice(wanted_bytes: int, budget: Budget) -> MapAdvice:
    """For a pass that wants so many bytes, where the budget's were too few."""
    wanted_bytes = max(wanted_bytes, budget.map_bytes + 1)
    threads = budget.map_bytes * budget.passes // wanted_bytes
    return MapAdvice(wanted_bytes * budget.passes, threads if 1 <= threads < budget.passes else None)


def cleaner_threads(store: LogStore) -> int | None:
    """log.cleaner.threads where the store's settings have it; None: as many as there are cores."""
    found = store.broker_settings()["log.cleaner.threads"]
    if found.source is Source.DEFAULT:
        return None
    return max(store.broker_config.log_cleaner_threads, 1)


def budget_of(store: LogStore) -> Budget:
    """As the store's settings have it."""
    config = store.broker_config
    return Budget(
        config.log_cleaner_dedupe_buffer_size,
        config.log_cleaner_io_buffer_load_factor,
        config.log_cleaner_io_max_bytes_per_second,
        config.duramen_cleaner_hash,
    )


# --- planning -------------------------------------------------------------------------------------------------------


def plan_partition(
    store: LogStore,
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


def _as_rolled(store: LogStore, topic: Topic, number: int, state: PartitionState) -> PartitionState:
    """The state with the active segment closed; the one behind it is not there yet."""
    active = replace(state.segments[-1], size_bytes=_active_bytes(store, topic, number, state))
    end_offset = store.high_watermark(topic, number)
    return replace(state, segments=(*state.segments[:-1], active, SegmentEntry(end_offset, 0, -1)))


def _active_bytes(store: LogStore, topic: Topic, number: int, state: PartitionState) -> int:
    return (store.active_bytes(topic, number, state) or 0) if state.segments else 0


def facts_of(
    store: LogStore, topic: Topic, number: int, state: PartitionState, config: LogConfig, *, flushed: bool = False
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


def _largest_timestamp_ms(store: LogStore, topic: Topic, number: int, entry: SegmentEntry) -> int:
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


def looks_of(store: LogStore, topic: Topic, number: int, config: LogConfig) -> Looks:
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


def first_header(store: LogStore, topic: Topic, number: int, base_offset: int) -> BatchHeader | None:
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


def first_timestamp(store: LogStore, topic: Topic, number: int, base_offset: int) -> int:
    """The largest timestamp of a segment's first batch; -1 when there is none."""
    header = first_header(store, topic, number, base_offset)
    return -1 if header is None else header.max_timestamp_ms


def idle_and_due(
    store: LogStore, topic: Topic, number: int, state: PartitionState, config: LogConfig, now_ms: int
) -> bool:
    """Whether the next append would roll the active segment by its age, but none comes."""
    if not state.segments or not _active_bytes(store, topic, number, state):
        return False
    first_ms = first_timestamp(store, topic, number, state.segments[-1].base_offset)
    return first_ms >= 0 and now_ms - first_ms > max_segment_ms(config)


def failures_of(store: LogStore, ledger: Ledger) -> dict[tuple[str, int], SetAside]:
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
    store: LogStore,
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
    store: LogStore,
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


# --- executing ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Context:
    """What all passes of a run share."""

    store: LogStore
    ledger: Ledger
    engine: Callable[[PartitionPlan], Engine]
    engine_name: str
    now_ms: int
    budget: Budget
    run_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    force: bool = False
    roll_active: bool = False
    threads: int = 1
    #: whether several threads or tasks work at one pass, where its log allows it
    in_parallel: bool = False
    job_bytes: int = 0
    airflow_run_id: str | None = None
    #: where the counts of segments go; each pass writes its own without
    counts: SegmentCounts | None = None
    failures: Mapping[tuple[str, int], SetAside] = field(default_factory=dict)
    stopping: Callable[[], bool] = lambda: False
    started: Callable[[PartitionPlan], None] = lambda _: None
    swapped: Callable[[PartitionPlan, Cleaned], None] = lambda _plan, _group: None


def compact_partition(context: Context, topic: Topic, number: int) -> Run:
    """One pass over one partition, if it is due; never raises what is the partition's own fault, but records it."""
    store = context.store
    what = f"compact {topic.name}-{number}"
    try:
        with store.locks.maintenance(topic.id, number, what=what, wait_ms=0):
            store.check_exists(topic)
            return _compact_locked(context, topic, number, what)
    except LockHeld as error:
        why = f"another process is at work on it: {error.what}"
        return Run(_plan(context, topic, number), SKIPPED, why, skip=Skip.TAKEN)


def _plan(context: Context, topic: Topic, number: int) -> PartitionPlan:
    return plan_partition(
        context.store,
        topic,
        number,
        now_ms=context.now_ms,
        force=context.force,
        failures={} if context.force else context.failures,
        threads=context.threads,
        job_bytes=context.job_bytes,
        free_bytes=context.store.free_bytes(),
    )


def _compact_locked(context: Context, topic: Topic, number: int, what: str) -> Run:
    store = context.store
    with store.locks.partition(topic.id, number, what=what):
        finish_swap_of(store, topic, number)
    plan = _plan(context, topic, number)
    rolled = False
    if plan.compacted and not plan.paused and plan.set_aside is None and (plan.rolls_active or context.roll_active):
        rolled = roll(store, topic, number, what=what)
        plan = _plan(context, topic, number)
    if plan.cleanable.due is None or not plan.is_due:
        return Run(plan, SKIPPED, plan.why, rolled=rolled, skip=Skip.NOT_DUE)
    if context.stopping():
        return Run(plan, SKIPPED, "the run was told to stop", rolled=rolled, skip=Skip.STOPPING)
    run_id = f"{context.run_name}-{topic.name}-{number}"
    context.started(plan)
    row = RunRow(
        run_id=run_id,
        kind=KIND,
        topic_id=topic.id,
        topic=topic.name,
        partition=number,
        engine=context.engine_name,
        started_ms=store.clock.now_ms(),
        result=RUNNING,
        reason=plan.why,
        airflow_run_id=context.airflow_run_id,
        details=json.dumps(plan_details(plan)),
    )
    context.ledger.record_run(row)
    began = time.monotonic()
    try:
        report = _pass(context, topic, number, plan, what)
    except (DuramenError, OSError) as error:
        failed = error if isinstance(error, DuramenError) else _as_ours(error)
        stopped = isinstance(failed, CleaningAborted)
        context.ledger.record_run(
            replace(
                row,
                ended_ms=store.clock.now_ms(),
                result=ABANDONED if stopped else FAILED,
                reason=str(failed)[:4000],
                seconds=time.monotonic() - began,
            )
        )
        return Run(plan, ABANDONED if stopped else FAILED, str(failed), run_id, rolled=rolled, error=failed)
    context.ledger.record_run(finished_row(row, report, plan, store.clock.now_ms()))
    (context.counts or SegmentCounts(context.ledger)).add(store, topic, number, report, run_id)
    return Run(plan, DONE, plan.why, run_id, report, rolled)


def _as_ours(error: OSError) -> DuramenError:
    if is_disk_full(error):
        return DiskFull(
            f"no space left: {error.strerror}",
            file=error.filename,
            hint="The old segments stand as they were; make room and run it again",
        )
    return RetriableError(f"{type(error).__name__}: {error}", file=error.filename)


def _pass(context: Context, topic: Topic, number: int, plan: PartitionPlan, what: str) -> PassReport:
    store = context.store
    free = store.free_bytes()
    if free is not None and plan.extra_bytes > free:
        raise DiskFull(
            f"compacting {plan.name} needs {plan.extra_bytes} bytes, {free} are free",
            partition=topic.partition(number),
            hint="Nothing was touched; make room, or lower segment.bytes",
        )
    config = store.log_config(topic)
    producers: Mapping[int, LastRecord] = {}
    if store.partition_state(topic, number).producers:
        producers = producers_of(store, topic, number, context.now_ms, what)
    state = store.partition_state(topic, number)
    work = _work(store, topic, number, state, config, plan.cleanable, context.now_ms, context.budget, producers)
    folder, owner = _run_folder(store, topic.partition(number), what)
    try:
        if work.has_transactions and context.in_parallel:
            work = replace(work, has_transactions=find_transactions(store.fs, work, stopping=context.stopping))

        def swapped(done: Cleaned) -> None:
            context.swapped(plan, done)
            if context.stopping():
                raise CleaningAborted("the run was told to stop", partition=topic.partition(number))

        report = run_pass(
            store.fs,
            work,
            engine=context.engine(plan),
            state_path=store.layout.partition_state(topic.id, number),
            folder=folder,
            locked=lambda: store.locks.partition(topic.id, number, what=what),
            swapped=swapped,
            swap_bytes=plan.swap_bytes,
        )
        if report.map_buffer_wanted is not None:
            advice = map_advice(report.map_buffer_wanted, context.budget)
            report.map_buffer_wanted, report.map_threads_wanted = advice.buffer_bytes, advice.threads
        return report
    finally:
        remove_run_folder(folder)
        owner.release()


def _run_folder(store: LogStore, partition: TopicPartition, what: str) -> tuple[str, FileLock]:
    """A folder for one pass, locked before it has its name: whoever sweeps never takes it for a killed run's."""
    draft, folder = store.layout.work("draft"), store.layout.work("run")
    store.fs.mkdir(draft)
    owner = FileLock(store.fs, os.path.join(draft, _OWNER_FILE))
    owner.acquire(0)
    owner.sign(store.clock, what, partition=str(partition))  # whose records lie here
    store.fs.rename(draft, folder)
    return folder, owner


def remove_run_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def sweep_runs(store: LogStore) -> list[str]:
    """Remove folders that killed runs left in `staging/`; returns their names."""
    removed = []
    for name in store.fs.listdir(store.layout.staging):
        if not name.endswith("-run"):
            continue
        folder = os.path.join(store.layout.staging, name)
        lock = FileLock(store.fs, os.path.join(folder, _OWNER_FILE))
        with contextlib.suppress(FileNotFoundError):
            if lock.try_acquire():
                remove_run_folder(folder)
                lock.release()
                removed.append(name)
    return removed


def abandon_runs(ledger: Ledger, store: LogStore) -> list[str]:
    """Close the rows of runs that were killed: what they left undone is planned anew. Returns their ids."""
    closed = []
    for run in ledger.unfinished_runs(KIND, RUNNING):
        if run.topic_id is None or run.partition is None:
            continue
        try:
            with store.locks.maintenance(run.topic_id, run.partition, what="look for killed runs", wait_ms=0):
                # It may have ended since the ledger was read; its receipt must stand.
                now = ledger.runs(pc.field("run_id") == run.run_id)
                if now and now[-1].result != RUNNING:
                    continue
                ledger.record_run(
                    replace(run, result=ABANDONED, reason="its process is gone", ended_ms=store.clock.now_ms())
                )
                closed.append(run.run_id)
        except LockHeld:
            continue
    return closed


def finish_swap_of(store: LogStore, topic: Topic, number: int) -> None:
    """Finish a replacement that a killed process left; the caller holds the partition lock."""
    path = store.layout.partition_state(topic.id, number)
    state = read_state(store.fs, path, limits=store.limits)
    if state is not None and state.swap is not None:
        finish_swap(store.fs, store.layout.partition(topic.partition(number)), path, state)


def roll(store: LogStore, topic: Topic, number: int, *, what: str) -> bool:
    """Close the active segment, so that it can be compacted; False when it is empty."""
    with store.writing(topic, number, what=what) as log:
        before = len(log.segments)
        log.roll()
        return len(log.segments) > before


def producers_of(store: LogStore, topic: Topic, number: int, now_ms: int, what: str) -> dict[int, LastRecord]:
    """Last records of the producers that are still known; opens the log, as only that tells."""
    with store.writing(topic, number, what=what, clock=ManualClock(now_ms)) as log:
        return {producer: LastRecord(*last) for producer, last in log.last_records.items()}


# --- receipts -------------------------------------------------------------------------------------------------------


def plan_details(plan: PartitionPlan) -> dict[str, object]:
    found = plan.cleanable
    return {
        "first_dirty_offset": found.first_dirty_offset,
        "first_uncleanable_offset": found.first_uncleanable_offset,
        "dirty_ratio": round(found.ratio, 6),
        "clean_bytes": found.clean_bytes,
        "cleanable_bytes": found.cleanable_bytes,
        "late_ms": found.late_ms,
        "groups": plan.groups,
        "read_bytes": plan.read_bytes,
        "extra_bytes": plan.extra_bytes,
    }


def finished_row(row: RunRow, report: PassReport, plan: PartitionPlan, ended_ms: int) -> RunRow:
    return replace(
        row,
        ended_ms=ended_ms,
        result=DONE,
        before_bytes=report.before_bytes,
        after_bytes=report.after_bytes,
        removed=dict(report.removed),
        map_fill=report.map_keys / report.map_keys_max if report.map_keys_max else 0.0,
        seconds=report.seconds,
        workers=report.workers,
        details=json.dumps(plan_details(plan) | report_details(report)),
    )


def report_details(report: PassReport) -> dict[str, object]:
    return {
        "end_offset": report.end_offset,
        "groups": report.groups,
        "groups_changed": report.groups_changed,
        "segments_before": report.segments_before,
        "segments_after": report.segments_after,
        "read_bytes": report.read_bytes,
        "written_bytes": report.written_bytes,
        "records": report.counts.records,
        "tombstones": report.counts.tombstones,
        "map_keys": report.map_keys,
        "map_full": report.map_full,
        "map_buffer_wanted": report.map_buffer_wanted,
        "map_threads_wanted": report.map_threads_wanted,
        "index_seconds": round(report.index_seconds, 3),
        "next_horizon_ms": report.next_horizon_ms,
    }


def describe_run(run: Run) -> dict[str, object]:
    """A run as JSON: the contract of `compact` and of the job's report."""
    answer: dict[str, object] = {
        "topic": run.plan.topic,
        "partition": run.plan.partition,
        "result": run.result,
        "reason": run.reason,
        "skip": None if run.skip is None else run.skip.value,
        "run_id": run.run_id or None,
        "rolled": run.rolled,
        "plan": plan_details(run.plan),
    }
    if run.report is not None:
        report = run.report
        answer["receipt"] = {
            "before_bytes": report.before_bytes,
            "after_bytes": report.after_bytes,
            "removed": dict(report.removed),
            "map_fill": report.map_keys / report.map_keys_max if report.map_keys_max else 0.0,
            "seconds": round(report.seconds, 3),
            "workers": list(report.workers),
        } | report_details(report)
    return answer


def compacted_partitions(store: LogStore, topics: Sequence[str] | None = None) -> Iterator[tuple[Topic, int]]:
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


__all__ = [
    "Budget",
    "Context",
    "PartitionPlan",
    "Run",
    "Skip",
    "budget_of",
    "compact_partition",
    "compacted_partitions",
    "describe_run",
    "failures_of",
    "most_urgent_first",
    "plan_partition",
    "still_set_aside",
    "sweep_runs",
]
