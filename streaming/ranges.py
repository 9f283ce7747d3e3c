"""Which offsets a read covers: subscription and boundaries resolved against a store, as ranges a task can read alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from logstore.errors import InvalidConfig, OffsetOutOfRange, UnknownTopic
from logstore.store.registry import Topic
from logstore.store.store import LogStore
from streaming.options import EARLIEST, LATEST, Boundary, ReadOptions

#: topic -> partition (as text: offsets of a stream are JSON) -> offset
StreamOffsets = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets [start, end) of one partition of a topic, known by its id: a re-created topic is another one."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int


def subscribed(store: LogStore, options: ReadOptions) -> list[tuple[Topic, int]]:
    """The partitions a read covers. Raises UnknownTopic."""
    if options.assign:
        found = [(store.topic(name), numbers) for name, numbers in sorted(options.assign.items())]
        for topic, numbers in found:
            for number in numbers:
                topic.partition(number)
        return [(topic, number) for topic, numbers in found for number in sorted(set(numbers))]
    if options.pattern is not None:
        names = [name for name in store.topic_names() if re.fullmatch(options.pattern, name)]
    else:
        names = sorted(set(options.subscribe))
    topics = [store.topic(name) for name in names]
    if not topics:
        raise UnknownTopic(f"no topic matches {options.pattern!r}" if options.pattern else "no topic is named")
    return [(topic, number) for topic in topics for number in range(topic.partitions)]


def resolve(store: LogStore, options: ReadOptions, boundary: Boundary, name: str) -> list[tuple[Topic, int, int]]:
    """The boundary as an offset of each partition. Raises InvalidConfig, OffsetOutOfRange."""
    partitions = subscribed(store, options)
    for given, kind in ((boundary.offsets, "Offsets"), (boundary.timestamps, "OffsetsByTimestamp")):
        if given:
            _check_complete(given, partitions, f"{name}{kind}")
    return [(topic, number, _offset(store, options, boundary, topic, number, name)) for topic, number in partitions]


def _check_complete(given: dict[str, dict[int, int]], partitions: Sequence[tuple[Topic, int]], name: str) -> None:
    wanted = {(topic.name, number) for topic, number in partitions}
    named = {(topic, number) for topic, entries in given.items() for number in entries}
    missing, foreign = sorted(wanted - named), sorted(named - wanted)
    if missing:
        raise InvalidConfig(f"{name} says nothing of {_joined(missing)}", hint="Name every partition that is read")
    if foreign:
        raise InvalidConfig(f"{name} names {_joined(foreign)}, which is not read")


def _joined(partitions: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{topic}-{number}" for topic, number in partitions[:5])


def _offset(store: LogStore, options: ReadOptions, boundary: Boundary, topic: Topic, number: int, name: str) -> int:
    start = store.partition_state(topic, number).log_start_offset
    end = _end(store, options, topic, number)
    timestamp_ms = boundary.timestamp_ms
    if boundary.timestamps:
        timestamp_ms = boundary.timestamps[topic.name][number]
    if timestamp_ms is not None:
        found = store.reader(topic, number).offset_for_timestamp(timestamp_ms)
        if found is not None:
            return found.offset
        if name == "starting" and not options.latest_when_no_timestamp:
            raise InvalidConfig(
                f"no record of {topic.name}-{number} is at or after {timestamp_ms}",
                hint="startingOffsetsByTimestampStrategy=latest starts at the end then",
            )
        return end
    offset = boundary.everywhere
    if offset is None:
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


def _end(store: LogStore, options: ReadOptions, topic: Topic, number: int) -> int:
    ends = store.ends(topic)
    return (ends.last_stable_offsets if options.committed else ends.high_watermarks)[number]


def batch_ranges(store: LogStore, options: ReadOptions) -> list[OffsetRange]:
    """What a batch read covers. Raises InvalidConfig when an end lies before its start."""
    starts = resolve(store, options, options.starting, "starting")
    ends = {(topic.id, number): end for topic, number, end in resolve(store, options, options.ending, "ending")}
    ranges = []
    for topic, number, start in starts:
        end = ends[topic.id, number]
        if end < start:
            raise InvalidConfig(f"{topic.name}-{number} would end at {end}, before its start {start}")
        ranges.append(in_range(store, options, OffsetRange(topic.name, topic.id, number, start, end)))
    return split([each for each in ranges if each.end > each.start], options.min_partitions)


def in_range(store: LogStore, options: ReadOptions, wanted: OffsetRange) -> OffsetRange:
    """The range, begun at the log start when older records are gone and that is allowed. Raises OffsetOutOfRange."""
    topic = store.topic(wanted.topic)
    if topic.id != wanted.topic_id:
        raise UnknownTopic(f"topic {wanted.topic} was deleted and created again", hint="Start the query anew")
    log_start = store.partition_state(topic, wanted.partition).log_start_offset
    if wanted.start >= log_start or wanted.start >= wanted.end:
        return wanted
    if options.fail_on_data_loss:
        raise OffsetOutOfRange(
            f"records {wanted.start} to {min(log_start, wanted.end)} are gone: the log starts at {log_start}",
            partition=topic.partition(wanted.partition),
            offset=wanted.start,
            hint="failOnDataLoss=false goes on behind them",
        )
    return replace(wanted, start=min(log_start, wanted.end))


def split(ranges: list[OffsetRange], min_partitions: int | None) -> list[OffsetRange]:
    """At least `min_partitions` ranges where there are that many offsets, in proportion to their size."""
    total = sum(each.end - each.start for each in ranges)
    if min_partitions is None or len(ranges) >= min_partitions or not total:
        return ranges
    pieces = []
    for each in ranges:
        size = each.end - each.start
        parts = min(size, max(1, math.ceil(size / total * min_partitions)))
        bounds = [each.start + size * part // parts for part in range(parts + 1)]
        pieces += [replace(each, start=low, end=high) for low, high in zip(bounds, bounds[1:], strict=False)]
    return pieces


def limited(start: StreamOffsets, latest: StreamOffsets, rows_max: int) -> StreamOffsets:
    """Ends of a micro-batch of about `rows_max` offsets, shared out in proportion to what each partition has."""
    sizes = {
        (topic, number): max(end - start.get(topic, {}).get(number, end), 0)
        for topic, entries in latest.items()
        for number, end in entries.items()
    }
    total = sum(sizes.values())
    if total <= rows_max:
        return latest
    ends: StreamOffsets = {}
    for topic, entries in latest.items():
        for number, end in entries.items():
            size = sizes[topic, number]
            begin = end - size
            share = min(size, math.ceil(size * rows_max / total)) if size else 0
            ends.setdefault(topic, {})[number] = begin + share
    return ends
