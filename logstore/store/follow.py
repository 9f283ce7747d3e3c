"""Following a topic without consumer groups: the caller keeps its position, which is plain JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from logstore.errors import InvalidConfig, UnknownTopic
from logstore.records.record import Record
from logstore.store.registry import Topic
from logstore.store.store import LogStore


@dataclass(frozen=True, slots=True)
class Followed:
    """Records of one partition, in order, and where to go on once they are dealt with."""

    partition: int
    records: tuple[Record, ...]
    position: dict[str, object]


def follow(
    store: LogStore, name: str, position: Mapping[str, object] | None, *, poll_s: float, wait: bool
) -> Iterator[Followed]:
    """See `LogStore.follow`. Without `wait` it ends where the topic ends."""
    topic = store.topic(name)
    offsets = _offsets(store, topic, position)
    while True:
        topic = store.topic(name)
        if position is not None and topic.id != position.get("topic_id"):
            raise UnknownTopic(f"topic {name} was deleted and created again; the position is of the old one")
        moved = False
        for number in range(topic.partitions):  # partitions that were added meanwhile come from their beginning
            start = offsets.get(number, store.partition_state(topic, number).log_start_offset)
            end = store.high_watermark(topic, number)
            if start >= end:
                continue
            moved = True
            reader = store.reader(topic, number)
            for columns in reader.columns(start, end):
                offsets[number] = int(columns.offsets[-1]) + 1
                position = _position(topic, offsets)
                yield Followed(number, tuple(columns.records()), position)
            if offsets.get(number, start) < end:  # the rest was compacted away, or is not for readers
                offsets[number] = end
            reader.close()
        if not moved:
            if not wait:
                return
            time.sleep(poll_s)


def _position(topic: Topic, offsets: Mapping[int, int]) -> dict[str, object]:
    return {
        "topic": topic.name,
        "topic_id": topic.id,
        "offsets": {str(number): offset for number, offset in sorted(offsets.items())},
    }


def _offsets(store: LogStore, topic: Topic, position: Mapping[str, object] | None) -> dict[int, int]:
    if position is None:
        return {}
    given = position.get("offsets")
    try:
        assert isinstance(given, dict)
        offsets = {int(number): int(offset) for number, offset in given.items()}
        for number, offset in offsets.items():
            assert offset >= 0
            topic.partition(number)
        return offsets
    except (AssertionError, ValueError, TypeError):
        example = '{"topic": …, "topic_id": …, "offsets": {"0": 12}}'
        raise InvalidConfig(f"not a position: {str(position)[:100]}", hint=f"Expected {example}") from None
