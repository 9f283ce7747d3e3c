"""Which offsets a read covers: subscription and boundaries resolved against a store, as ranges a task can read alone.

Offsets of a stream are JSON, `{"topic": {"0": 23}, "@ids": {"topic": id}}`: those of Spark's Kafka source, and the ids
by which a topic that was deleted and created again is noticed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from logstore.directory.state import PartitionState
from logstore.errors import InvalidConfig, OffsetOutOfRange, UnknownTopic
from logstore.partition.losses import clipped
from logstore.restore.visibility import visible_ends
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic
from streaming.options import EARLIEST, IDS, LATEST, Boundary, ReadOptions

#: topic -> partition (as text: offsets of a stream are JSON) -> offset; and under IDS topic -> id
StreamOffsets = dict[str, dict[str, Any]]
#: the same, taken apart: (topic, id, partition) -> offset
Positions = dict[tuple[str, str, int], int]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets [start, end) of one partition of a topic, known by its id: a re-created topic is another one."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int


def subscribed(store: ReadableStore, options: ReadOptions) -> list[tuple[Topic, int]]:
    """The partitions a read covers. Raises UnknownTopic."""
    if options.assign:
        found = [(store.known_topic(name), numbers) for name, numbers in sorted(options.assign.items())]
        for topic, numbers in found:
            for number in numbers:
                topic.partition(number)
        return [(topic, number) for topic, numbers in found for number in sorted(set(numbers))]
    if options.pattern is not None:
        names = [name for name in store.topic_names() if re.fullmatch(options.pattern, name)]
    else:
        names = sorted(set(options.subscribe))
    topics = [store.known_topic(name) for name in names]  # the store was opened, or looked at anew, just now
    if not topics:
        raise UnknownTopic(f"no topic matches {options.pattern!r}" if options.pattern else "no topic is named")
    return [(topic, number) for topic in topics for number in range(topic.partitions)]


def resolve(store: ReadableStore, options: ReadOptions, boundary: Boundary, name: str) -> list[tuple[Topic, int, int]]:
    """The boundary as an offset of each partition. Raises InvalidConfig, OffsetOutOfRange."""
    partitions = subscribed(store, options)
    for given, kind in ((boundary.offsets, "Offsets"), (boundary.timestamps, "OffsetsByTimestamp")):
        if given is not None:
            _check_complete(given, partitions, f"{name}{kind}")
    for topic, _ in partitions:
        if boundary.topic_ids.get(topic.name, topic.id) != topic.id:
            raise _recreated(topic.name)
    ends = visible_ends(store, [topic for topic, _ in partitions])
    return [
        (
            topic,
            number,
            _offset(
                store,
                options,
                boundary,
                topic,
                number,
                name,
                ends[topic.id].visible(committed=options.committed)[number],
            ),
        )
        for topic, number in partitions
    ]


def _check_complete(given: dict[str, dict[int, int]], partitions: Sequence[tuple[Topic, int]], name: str) -> None:
    wanted = {(topic.name, number) for topic, number in partitions}
    named = {(topic, number) for topic, entries in given.items() for number in entries}
    missing, foreign = sorted(wanted - named), sorted(named - wanted)
    if missing:
        raise InvalidConfig(f"{name} lacks {_joined(missing)}", hint="Name every partition that is read")
    if foreign:
        raise InvalidConfig(f"{name} names {_joined(foreign)}, which is not read")


def _joined(partitions: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{topic}-{number}" for topic, number in partitions[:5])


def _offset(
    store: ReadableStore, options: ReadOptions, boundary: Boundary, topic: Topic, number: int, name: str, end: int
) -> int:
    start = store.partition_state(topic, number).log_start_offset
    timestamp_ms = boundary.timestamp_ms
    if boundary.timestamps is not None:
        timestamp_ms = boundary.timestamps[topic.name][number]
    if timestamp_ms is not None:
        found = store.reader(topic, number, end_offset=end).offset_for_timestamp(timestamp_ms, exact=True)
        if found is not None:
            return min(found.offset, end)
        if name == "starting" and not options.latest_when_no_timestamp:
            raise InvalidConfig(
                f"no record of {topic.name}-{number} is at or after {timestamp_ms}",
                hint="startingOffsetsByTimestampStrategy=latest starts at the end then",
            )
        return end
    offset = boundary.everywhere
    if offset is None:
        assert boundary.offsets is not None
        offset = boundary.offsets[topic.name][number]
    if offset == EARLIEST:
        return start
    if offset == LATEST:
        return end
    if offset > end:
        raise OffsetOutOfRange(
            f"{name}Offsets asks for {offset}, the log ends at {end}", partition=topic.partition(number), offset=offset
        )
    return offset


def latest_positions(store: ReadableStore, options: ReadOptions) -> Positions:
    """Where a read ends now: a commit to several of its topics is in all of them or in none."""
    partitions = subscribed(store, options)
    ends = visible_ends(store, [topic for topic, _ in partitions])
    return {
        (topic.name, topic.id, number): ends[topic.id].visible(committed=options.committed)[number]
        for topic, number in partitions
    }


def visible_end(store: ReadableStore, options: ReadOptions, topic: Topic, wanted: OffsetRange) -> int:
    """Where the topic ends, by what the others of the read say where it has not come as far itself."""
    end = store.ends(topic).visible(committed=options.committed)[wanted.partition]
    if end < wanted.end:
        end = latest_positions(store, options).get((topic.name, topic.id, wanted.partition), end)
    return end


def batch_ranges(store: ReadableStore, options: ReadOptions) -> list[OffsetRange]:
    """What a batch read covers. Raises InvalidConfig when an end lies before its start."""
    starts = resolve(store, options, options.starting, "starting")
    ends = {(topic.id, number): end for topic, number, end in resolve(store, options, options.ending, "ending")}
    ranges = []
    for topic, number, start in starts:
        end = ends[topic.id, number]
        if end < start:
            raise InvalidConfig(f"{topic.name}-{number} would end at {end}, before its start {start}")
        ranges.append(in_range(store, options, OffsetRange(topic.name, topic.id, number, start, end)))
    return pieces(ranges, options)


def in_range(
    store: ReadableStore, options: ReadOptions, wanted: OffsetRange, *, is_planned: bool = False
) -> OffsetRange:
    """The range, begun at the log start when older records are gone and that is allowed. What `is_planned` is looked at
    again by its task, so new records take no request here.

    Raises OffsetOutOfRange, UnknownTopic.
    """
    topic = store.known_topic(wanted.topic)
    if topic.id != wanted.topic_id:
        if options.fail_on_data_loss:
            raise _recreated(wanted.topic)
        return replace(wanted, start=wanted.end)
    end = visible_end(store, options, topic, wanted)
    if wanted.end > end and options.fail_on_data_loss:
        raise OffsetOutOfRange(
            f"records up to {wanted.end} were there, the log ends at {end}",
            partition=topic.partition(wanted.partition),
            offset=wanted.end,
            hint="The store is older than the query; restart the query",
        )
    if is_planned and store.is_in_tail(topic, wanted.partition, wanted.start):
        return wanted
    state = store.partition_state(topic, wanted.partition)
    if options.fail_on_data_loss:
        _check_no_loss(topic, state, wanted)
        return wanted
    return replace(wanted, start=max(wanted.start, min(state.log_start_offset, wanted.end)))


def _check_no_loss(topic: Topic, state: PartitionState, wanted: OffsetRange) -> None:
    """Raises OffsetOutOfRange for what was deleted or lost; what only compaction took out is no loss."""
    log_start = state.log_start_offset
    what = None
    if wanted.start < min(log_start, wanted.end):
        what = f"records {wanted.start} to {min(log_start, wanted.end)} are gone: the log starts at {log_start}"
    elif lost := clipped(state.losses, wanted.start, wanted.end):
        first = lost[0]
        at_most = "at most " if first.at_most else ""
        what = f"{at_most}records {first.base_offset} to {first.end_offset} were lost to damage: {first.reason}"
    if what is not None:
        raise OffsetOutOfRange(
            what,
            partition=topic.partition(wanted.partition),
            offset=wanted.start,
            hint="failOnDataLoss=false continues after them",
        )


def _recreated(name: str) -> UnknownTopic:
    return UnknownTopic(
        f"topic {name} was deleted and created again",
        hint="Restart the query; in a stream failOnDataLoss=false goes on with the new topic",
    )


def pieces(ranges: Sequence[OffsetRange], options: ReadOptions) -> list[OffsetRange]:
    """What tasks read: none with more offsets than maxRecordsPerPartition, and at least minPartitions of them."""
    found = [each for each in ranges if each.end > each.start]
    if options.max_records_per_partition is not None:
        found = [piece for each in found for piece in _cut(each, -(-_size(each) // options.max_records_per_partition))]
    return split(found, options.min_partitions)


def _size(each: OffsetRange) -> int:
    return each.end - each.start


def _cut(each: OffsetRange, parts: int) -> list[OffsetRange]:
    bounds = [each.start + _size(each) * part // parts for part in range(parts + 1)]
    return [replace(each, start=low, end=high) for low, high in itertools.pairwise(bounds)]


def split(ranges: list[OffsetRange], min_partitions: int | None) -> list[OffsetRange]:
    """At least `min_partitions` ranges where there are that many offsets, in proportion to their size."""
    total = sum(map(_size, ranges))
    if min_partitions is None or len(ranges) >= min_partitions or not total:
        return ranges
    return [
        piece
        for each in ranges
        for piece in _cut(each, min(_size(each), max(1, -(-_size(each) * min_partitions // total))))
    ]


# --- streams ----------------------------------------------------------------------------------------------------------


def to_stream(positions: Positions) -> StreamOffsets:
    offsets: StreamOffsets = {}
    for (topic, _, number), offset in sorted(positions.items()):
        offsets.setdefault(topic, {})[str(number)] = offset
    if positions:
        offsets[IDS] = {topic: topic_id for topic, topic_id, _ in sorted(positions)}
    return offsets


def from_stream(offsets: StreamOffsets) -> Positions:
    ids = offsets.get(IDS, {})
    return {
        (topic, ids.get(topic, ""), int(number)): offset
        for topic, entries in offsets.items()
        if topic != IDS
        for number, offset in entries.items()
    }


def stream_start(options: ReadOptions, start: Positions, end: Positions) -> Positions:
    """Where each partition of `end` is read from; partitions that came since, from 0.

    Raises UnknownTopic for a topic that is gone or another one by now, OffsetOutOfRange for one that ends before it
    began, unless data loss is allowed: then the new topic is read from its beginning.
    """
    names = {topic: topic_id for topic, topic_id, _ in end}
    if options.fail_on_data_loss:
        for (topic, topic_id, number), offset in start.items():
            if topic not in names:
                raise UnknownTopic(f"topic {topic} is gone", hint="failOnDataLoss=false goes on without it")
            if topic_id not in ("", names[topic]):
                raise _recreated(topic)
            if offset > end.get((topic, names[topic], number), offset):
                raise OffsetOutOfRange(
                    f"the stream is at {offset}, the log ends at {end[topic, names[topic], number]}",
                    partition=f"{topic}-{number}",
                    offset=offset,
                    hint="The store is older than the query; restart the query",
                )
    return {key: start.get(key, start.get((key[0], "", key[2]), 0)) for key in end}


def limited(start: Positions, latest: Positions, rows_max: int) -> Positions:
    """Ends of a micro-batch of at most `rows_max` offsets, shared out in proportion to what each partition has.

    Shares are rounded down; what that leaves goes to those that lost most by it, so that a micro-batch is always as
    large as it may be.
    """
    sizes = {key: max(end - start[key], 0) for key, end in latest.items()}
    total = sum(sizes.values())
    if total <= rows_max:
        return latest
    shares = {key: size * rows_max // total for key, size in sizes.items()}
    by_loss = sorted(sizes, key=lambda key: (-(sizes[key] * rows_max % total), key))
    for key in by_loss[: rows_max - sum(shares.values())]:
        shares[key] += 1
    return {key: min(start[key], latest[key]) + share for key, share in shares.items()}
