"""Restoring state: which offsets a moment means, whether it can still be had exactly, and reading it without Spark.

The state of a topic at a moment is the latest value of every key among the records below the moment's offsets; a
tombstone removes its key. Where a key lives in one partition only, partitions are restored alone; else they are
merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from logstore.errors import HistoryCompacted, InvalidConfig, OffsetOutOfRange
from logstore.partition.latest import DEFAULT_MEMORY_BYTES, latest_records
from logstore.records.columns import DecodedColumns
from logstore.store.registry import Topic
from logstore.store.store import LogStore


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

    def explain(self) -> str:
        records = sum(end - start for start, end in zip(self.start_offsets, self.end_offsets, strict=True))
        way = (
            "each partition alone, without a shuffle"
            if self.by_partition
            else "merged across partitions (slower): rows were not all placed by key with this number of partitions"
        )
        return f"restore {self.topic}: at most {records} records of {len(self.end_offsets)} partitions, {way}"


def plan_restore(
    store: LogStore,
    name: str,
    *,
    as_of_offsets: Mapping[int, int] | None = None,
    as_of_timestamp_ms: int | None = None,
    since_offsets: Mapping[int, int] | None = None,
    allow_thinned: bool = False,
) -> RestorePlan:
    """Raises UnknownTopic, InvalidConfig, OffsetOutOfRange, HistoryCompacted."""
    if as_of_offsets is not None and as_of_timestamp_ms is not None:
        raise InvalidConfig("as_of_offsets and as_of_timestamp_ms exclude each other")
    topic = store.topic(name)
    watermarks = store.ends(topic).high_watermarks
    ends = list(watermarks)
    if as_of_offsets is not None:
        ends = _checked(topic, as_of_offsets, watermarks, "as_of_offsets")
    elif as_of_timestamp_ms is not None:
        if as_of_timestamp_ms < 0:
            raise InvalidConfig(f"as_of_timestamp_ms is {as_of_timestamp_ms}; expected milliseconds from 0 up")
        for number in range(topic.partitions):
            later = store.reader(topic, number).offset_for_timestamp(as_of_timestamp_ms + 1)
            ends[number] = watermarks[number] if later is None else later.offset
    states = [store.partition_state(topic, number) for number in range(topic.partitions)]
    starts = [state.log_start_offset for state in states]
    if since_offsets is not None:
        starts = _checked(topic, since_offsets, watermarks, "since_offsets")
    thinned = {
        number: state.first_dirty_offset
        for number, state in enumerate(states)
        if ends[number] < state.first_dirty_offset and ends[number] < watermarks[number]
    }
    if thinned and not allow_thinned:
        error = HistoryCompacted(
            f"compaction has already thinned {', '.join(f'{name}-{number}' for number in thinned)} at that moment; "
            f"exact from offset {', '.join(f'{offset} of partition {number}' for number, offset in thinned.items())} on",
            partition=topic.partition(min(thinned)),
            hint="Ask for a later moment, or pass allow_thinned=True to get what is left",
        )
        error.earliest = {f"{name}-{number}": offset for number, offset in thinned.items()}
        raise error
    return RestorePlan(
        topic.name,
        topic.id,
        tuple(starts),
        tuple(max(end, start) for start, end in zip(starts, ends, strict=True)),
        topic.keyed,
        tuple(state.dropped_tombstones for state in states),
    )


def _checked(topic: Topic, given: Mapping[int, int], watermarks: tuple[int, ...], name: str) -> list[int]:
    missing = sorted(set(range(topic.partitions)) - set(given))
    foreign = sorted(set(given) - set(range(topic.partitions)))
    if missing or foreign:
        what = f"says nothing of partition {missing[0]}" if missing else f"names partition {foreign[0]}"
        raise InvalidConfig(f"{name} {what}; topic {topic.name} has partitions 0 to {topic.partitions - 1}")
    for number, offset in given.items():
        if not 0 <= offset <= watermarks[number]:
            raise OffsetOutOfRange(
                f"{name} asks for {offset}, the log ends at {watermarks[number]}",
                partition=topic.partition(number),
                offset=offset,
            )
    return [given[number] for number in range(topic.partitions)]


def restore_partition(
    store: LogStore,
    plan: RestorePlan,
    number: int,
    *,
    tombstones: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    headers: bool = False,
) -> Iterator[DecodedColumns]:
    """The latest record of each key of one partition, as planned."""
    topic = store.topic(plan.topic)
    yield from latest_records(
        store.reader(topic, number),
        plan.start_offsets[number],
        plan.end_offsets[number],
        tombstones=tombstones,
        memory_bytes=memory_bytes,
        headers=headers,
        limits=store.limits,
    )
