"""Restoring state: which offsets a moment means, whether it can still be had exactly, and reading it without Spark.

The state of a topic at a moment is the latest value of every key among the committed records below the moment's
offsets, by the order that compaction goes by, too; a tombstone removes its key. Where a key lives in one partition
only, partitions are restored alone; else they are merged. A plan is made once and read later: what compaction does to
it in between is noticed when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from logstore.cleaner.versions import Order, winners
from logstore.directory.ends import TopicEnds
from logstore.directory.state import Loss, PartitionState
from logstore.errors import HistoryCompacted, InvalidConfig, OffsetOutOfRange, SegmentsChanged, UnknownTopic
from logstore.limits import INT64_MIN
from logstore.partition.latest import DEFAULT_MEMORY_BYTES, Wanted, latest_records
from logstore.partition.losses import clipped, lost_offsets
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import LogView
from logstore.records.arrow import to_arrow
from logstore.records.columns import DecodedColumns
from logstore.restore.visibility import ends_beside_others
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic

#: columns of restored rows, in Arrow and in Spark
RESTORED = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)

#: a partition of which nothing was delivered is begun again this often
_TRIES_MAX = 3
_LOOKS_MAX = 20
_OLDEST = (INT64_MIN - 1,)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """`end_offsets` is where a stream goes on with nothing missed and nothing seen twice."""

    topic: str
    topic_id: str
    start_offsets: tuple[int, ...]
    end_offsets: tuple[int, ...]
    #: keys live in one partition each, so nothing is shuffled
    by_partition: bool
    dropped_tombstones: tuple[int, ...]
    log_start_offsets: tuple[int, ...]
    #: only what is newer than an earlier restore
    is_increment: bool = False
    allow_thinned: bool = False
    #: whose record of a key is the latest
    order: Order = field(default_factory=Order)
    #: what damage took of it, by partition: of those keys an older record may be the latest that is left
    losses: tuple[tuple[Loss, ...], ...] = ()

    @property
    def partitions(self) -> int:
        return len(self.end_offsets)

    @property
    def offsets(self) -> int:
        """How many offsets are read, at most: compaction leaves gaps."""
        return sum(end - start for start, end in zip(self.start_offsets, self.end_offsets, strict=True))

    def explain(self) -> str:
        way = (
            "each partition alone, without a shuffle"
            if self.by_partition
            else "merged across partitions (slower): rows were not all placed by key with this number of partitions"
        )
        if not self.order.by_offset:
            way += f"; of a key's records the one with {self.order} counts"
        if lost := sum(map(lost_offsets, self.losses)):
            way += f"; {lost} offsets among them were lost to damage"
        return f"restore {self.topic}: at most {self.offsets} records of {self.partitions} partitions, {way}"


def plan_restore(
    store: ReadableStore,
    name: str,
    *,
    as_of_offsets: Mapping[int, int] | None = None,
    as_of_timestamp_ms: int | None = None,
    since_offsets: Mapping[int, int] | None = None,
    allow_thinned: bool = False,
) -> RestorePlan:
    """What to read for the state now, below `as_of_offsets`, or before the first record later than a timestamp.

    With `since_offsets`, only what is newer: an increment to an earlier restore.
    Raises UnknownTopic, InvalidConfig, OffsetOutOfRange, HistoryCompacted.
    """
    if as_of_offsets is not None and as_of_timestamp_ms is not None:
        raise InvalidConfig("as_of_offsets and as_of_timestamp_ms exclude each other")
    topic, beside = _at_one_moment(store, name)
    order = Order.of(store.log_config(topic))
    if since_offsets is not None and not order.by_offset:
        raise InvalidConfig(
            f"since_offsets could miss records of topic {name}: {order} decides which record of a key is the latest, "
            "which may be an older record",
            hint="Restore everything, without since_offsets",
        )
    latest = beside.visible(committed=True)
    ends = list(latest)
    if as_of_offsets is not None:
        ends = _checked(topic, as_of_offsets, latest, "as_of_offsets")
    elif as_of_timestamp_ms is not None:
        if as_of_timestamp_ms < 0:
            raise InvalidConfig(f"as_of_timestamp_ms is {as_of_timestamp_ms}; expected milliseconds from 0 up")
        for number in range(topic.partitions):
            reader = store.reader(topic, number, end_offset=latest[number])
            later = reader.offset_for_timestamp(as_of_timestamp_ms + 1, exact=True)
            ends[number] = latest[number] if later is None else min(later.offset, latest[number])
    states = store.partition_states(topic)
    if not allow_thinned:
        _check_exact(topic, {n: _exact_from(state, ends[n], latest[n]) for n, state in enumerate(states)})
    starts = [state.log_start_offset for state in states]
    log_starts = tuple(starts)
    if since_offsets is not None:
        starts = _checked(topic, since_offsets, latest, "since_offsets")
        for number, (since, end, log_start) in enumerate(zip(starts, ends, log_starts, strict=True)):
            if end < since:
                raise InvalidConfig(f"{topic.partition(number)} would end at {end}, before its start {since}")
            if since < log_start:
                raise OffsetOutOfRange(
                    f"records {since} to {log_start} are gone: the log starts at {log_start}",
                    partition=topic.partition(number),
                    offset=since,
                    hint="Restore everything, without since_offsets",
                )
    return RestorePlan(
        topic.name,
        topic.id,
        tuple(starts),
        tuple(max(end, start) for start, end in zip(starts, ends, strict=True)),
        topic.keyed,
        tuple(state.dropped_tombstones for state in states),
        log_starts,
        since_offsets is not None,
        allow_thinned,
        order,
        tuple(clipped(state.losses, start, end) for state, start, end in zip(states, starts, ends, strict=True)),
    )


def _at_one_moment(store: ReadableStore, name: str) -> tuple[Topic, TopicEnds]:
    """A topic with its ends: what its settings say holds for all that is committed below them."""
    topic = store.known_topic(name)
    for _ in range(_LOOKS_MAX):
        try:
            ends = ends_beside_others(store, topic)
        except UnknownTopic:
            if store.topic(name).id == topic.id:
                raise
        after = store.known_topic(name)
        if after == topic:
            return topic, ends
        topic = after
    raise SegmentsChanged(f"topic {name} was altered each time it was looked at", hint="Try again")


def _exact_from(state: PartitionState, end: int, latest: int) -> int | None:
    """The earliest offset at which the partition's state can still be had; None when it can be had at `end`.

    Before the first offset there never was anything, and what is latest is whatever the log has.
    """
    return state.exact_from(end) if 0 < end < latest else None


def _check_exact(topic: Topic, exact_from: Mapping[int, int | None]) -> None:
    thinned = {number: offset for number, offset in exact_from.items() if offset is not None}
    if not thinned:
        return
    raise HistoryCompacted(
        f"{', '.join(f'{topic.name}-{number}' for number in thinned)} can no longer be restored as of that moment: "
        f"compaction or retention removed records; exact from "
        f"{', '.join(f'offset {offset} of partition {number}' for number, offset in thinned.items())} on",
        partition=topic.partition(min(thinned)),
        hint="Ask for a later moment, or pass allow_thinned=True to get what is left",
        earliest={f"{topic.name}-{number}": offset for number, offset in thinned.items()},
    )


def _checked(topic: Topic, given: Mapping[int, int], latest: tuple[int, ...], name: str) -> list[int]:
    missing = sorted(set(range(topic.partitions)) - set(given))
    foreign = sorted(set(given) - set(range(topic.partitions)))
    if missing or foreign:
        what = f"lacks partition {missing[0]}" if missing else f"names partition {foreign[0]}"
        raise InvalidConfig(f"{name} {what}; topic {topic.name} has partitions 0 to {topic.partitions - 1}")
    for number, offset in given.items():
        if type(offset) is not int:
            raise InvalidConfig(f"{name} has {offset!r} for partition {number}; expected a whole number")
        if not 0 <= offset <= latest[number]:
            raise OffsetOutOfRange(
                f"{name} asks for {offset}, the log ends at {latest[number]}",
                partition=topic.partition(number),
                offset=offset,
            )
    return [given[number] for number in range(topic.partitions)]


class Begun:
    """A snapshot of a planned partition, begun before its `with`: what it reads may be on its way by then."""

    def __init__(self, store: ReadableStore, plan: RestorePlan, number: int) -> None:
        offsets = plan.start_offsets[number], plan.end_offsets[number]
        snapshot = store.snapshot(_topic(store, plan), number, end_offset=offsets[1], again=offsets)
        self._ended = ExitStack()
        self._reader = self._ended.enter_context(snapshot)

    def __enter__(self) -> PartitionReader:
        return self._reader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.__exit__(kind, error, trace)


def _topic(store: ReadableStore, plan: RestorePlan) -> Topic:
    topic = store.known_topic(plan.topic)
    if topic.id != plan.topic_id:
        raise UnknownTopic(f"topic {plan.topic} was deleted and created again", hint="Plan the restore again")
    return topic


def _in_turn(store: ReadableStore, plan: RestorePlan, **how: Any) -> Iterator[tuple[int, DecodedColumns]]:
    """What `restore_partition` gives, of all partitions; each is begun before the one in front of it is read."""
    begun = [Begun(store, plan, 0)]
    try:
        for number in range(plan.partitions):
            if number + 1 < plan.partitions:
                begun.append(Begun(store, plan, number + 1))
            for columns in restore_partition(store, plan, number, begun=begun[0], **how):
                yield number, columns
            del begun[0]
    finally:
        for each in begun:
            each.__exit__(None, None, None)


def restore_partition(
    store: ReadableStore,
    plan: RestorePlan,
    number: int,
    *,
    tombstones: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    headers: bool = False,
    progress: Callable[[int], None] = lambda offsets: None,
    begun: Begun | None = None,
) -> Iterator[DecodedColumns]:
    """The latest record of each key of one partition, as planned. `progress` is called with the offsets of each pass.

    The first attempt reads what was `begun`, where that is given.
    Raises UnknownTopic when the topic was re-created since, HistoryCompacted when compaction has overtaken the plan,
    SegmentsChanged when objects that it reads were deleted meanwhile.
    """
    topic = _topic(store, plan)
    end = plan.end_offsets[number]
    planned_tombstones = plan.dropped_tombstones[number]

    def check(state: PartitionState, view: LogView) -> None:
        if not plan.allow_thinned:
            _check_exact(topic, {number: _exact_from(state, end, view.end_offset)})
        if plan.is_increment and state.dropped_tombstones != planned_tombstones:
            raise HistoryCompacted(
                "compaction dropped tombstones that the increment must deliver",
                partition=topic.partition(number),
                hint="Restore everything, without since_offsets",
            )

    for tries_left in reversed(range(_TRIES_MAX)):
        delivered = False
        first, begun = begun, None
        try:
            with first or Begun(store, plan, number) as reader:
                for columns in latest_records(
                    reader,
                    plan.start_offsets[number],
                    end,
                    wanted=Wanted(tombstones=tombstones, committed=True, headers=headers, memory_bytes=memory_bytes),
                    limits=store.limits,
                    held=check,
                    winners=None
                    if plan.order.by_offset
                    else lambda view, low, high: winners(
                        view, low, high, plan.order, committed=True, limits=store.limits
                    ),
                    progress=progress,
                ):
                    delivered = True
                    yield columns
            return
        except (FileNotFoundError, SegmentsChanged) as error:
            # A directory's files are open by then; objects are asked for one by one.
            if delivered or not tries_left:
                file = error.filename if isinstance(error, FileNotFoundError) else error.file
                raise SegmentsChanged(
                    "what the restore reads was deleted meanwhile; nothing of this partition counts",
                    file=file,
                    hint="Restore again",
                ) from error


def restored_batch(columns: DecodedColumns, partition: int) -> pa.RecordBatch:
    """Restored records with the columns of RESTORED."""
    decoded = to_arrow(columns)
    arrays = [
        decoded.column("key"),
        decoded.column("value"),
        pa.repeat(pa.scalar(partition, pa.int32()), len(columns)),
        decoded.column("offset"),
        pa.array(columns.timestamps_ms * 1000, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=RESTORED)


def restore(
    store: ReadableStore,
    plan: RestorePlan,
    *,
    tombstones: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int], None] = lambda offsets: None,
) -> Iterator[pa.RecordBatch]:
    """The planned state as Arrow batches, one row a key. `progress` is called with how many offsets were done since
    last time.

    Where keys must be merged across partitions, all keys of the topic are held in memory for the time.
    Raises what `restore_partition` raises.
    """
    done = _Done(progress, plan.offsets, passes=2 if plan.by_partition else 4)
    newest = None if plan.by_partition else _newest(store, plan, memory_bytes, done.add)
    for number, columns in _in_turn(store, plan, tombstones=tombstones, memory_bytes=memory_bytes, progress=done.add):
        batch = restored_batch(columns, number)
        if newest is None:
            yield batch
            continue
        keys = batch.column("key").to_pylist()
        own = [newest[key][2:] == (number, offset) for key, offset in zip(keys, columns.offsets.tolist(), strict=True)]
        if any(own):
            yield batch.filter(pa.array(own))
    done.all()


class _Done:
    """Counts finished offsets: each is read in several passes, and in more where memory is short."""

    def __init__(self, progress: Callable[[int], None], offsets: int, *, passes: int) -> None:
        self._progress = progress
        self._offsets = offsets
        self._passes = passes
        self._passed = 0
        self._told = 0

    def add(self, offsets: int) -> None:
        self._passed += offsets
        self._tell(min(self._passed // self._passes, self._offsets))

    def all(self) -> None:
        self._tell(self._offsets)

    def _tell(self, done: int) -> None:
        self._progress(done - self._told)
        self._told = done


def _newest(
    store: ReadableStore, plan: RestorePlan, memory_bytes: int, progress: Callable[[int], None]
) -> dict[bytes, tuple[int, ...]]:
    """Version, timestamp, partition and offset of each key's newest record, tombstones included.

    Offsets of different partitions say nothing about order, so where versions do not decide the timestamp does; a tie
    goes to the higher partition, here as everywhere.
    """
    newest: dict[bytes, tuple[int, ...]] = {}
    headers = plan.order.needs_headers
    for number, columns in _in_turn(
        store, plan, tombstones=True, memory_bytes=memory_bytes, headers=headers, progress=progress
    ):
        keys = restored_batch(columns, number).column("key").to_pylist()
        times, offsets = columns.timestamps_ms.tolist(), columns.offsets.tolist()
        versions = versions_of(columns, plan.order).tolist()
        for key, version, timestamp_ms, offset in zip(keys, versions, times, offsets, strict=True):
            place = (version, timestamp_ms, number, offset)
            if place > newest.get(key, _OLDEST):
                newest[key] = place
    return newest


def versions_of(columns: DecodedColumns, order: Order) -> npt.NDArray[np.int64]:
    """What decides between records of a key in several partitions before their timestamps, which come next."""
    versions = np.zeros(len(columns), dtype=np.int64)
    if order.needs_headers:
        for row, record in enumerate(columns.records()):
            versions[row] = order.version(record.timestamp_ms, record.headers)
    return versions
