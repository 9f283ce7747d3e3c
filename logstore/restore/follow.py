"""Following topics without consumer groups: the caller keeps its position, which is plain JSON.

The position of one topic is `{"topic": …, "topic_id": …, "offsets": {"0": 12}}`, that of several
`{"topics": {"orders": {"topic_id": …, "offsets": {"0": 12}}, …}}`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from logstore.errors import InvalidConfig, UnknownTopic
from logstore.records.record import Record
from logstore.restore.visibility import visible_ends
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class Followed:
    """Records of one partition, in order, and where to go on once they are dealt with."""

    partition: int
    records: tuple[Record, ...]
    position: dict[str, object]
    topic: str = ""


def follow(
    store: ReadableStore,
    name: str | Sequence[str],
    position: Mapping[str, object] | None,
    *,
    poll_s: float,
    wait: bool,
    committed: bool = True,
) -> Iterator[Followed]:
    """See `Reads.follow`. Without `wait` it ends where the topics end."""
    names = [name] if isinstance(name, str) else sorted(set(name))
    if not names:
        raise InvalidConfig("no topic to follow is named")
    given = {each: _given(position, each, alone=isinstance(name, str)) for each in names}
    places = {each: _Place(_begun(store, each, given[each]), given[each]) for each in names}
    while True:
        topics = {each: store.known_topic(each) for each in names}
        for each, topic in topics.items():
            places[each].check(topic)
        moved = False
        # One moment for all of them: what is committed to several is seen in all or in none.
        ends = visible_ends(store, list(topics.values()))
        for each, topic in topics.items():
            place = places[each]
            visible = ends[topic.id].visible(committed=committed)
            for number in range(topic.partitions):  # partitions that were added meanwhile come from their beginning
                end = visible[number]
                goes_on, start = number in place.offsets, place.start(store, topic, number, end)
                if start >= end:
                    continue
                moved = True
                reader = store.reader(topic, number, end_offset=end)
                reader.goes_on = goes_on
                for columns in reader.columns(start, end, committed=committed):
                    place.offsets[number] = int(columns.offsets[-1]) + 1
                    answer = place.document() if isinstance(name, str) else _document(places)
                    yield Followed(number, tuple(columns.records()), answer, topic.name)
                place.offsets[number] = max(place.offsets.get(number, start), end)  # the rest is not for readers
                reader.close()
        if not moved:
            if not wait:
                return
            time.sleep(poll_s)


def _begun(store: ReadableStore, name: str, given: Mapping[str, object] | None) -> Topic:
    """One that the position is of is looked at soon enough."""
    topic = store.known_topic(name)
    return topic if given is not None and given.get("topic_id") == topic.id else store.topic(name)


class _Place:
    """Where one topic is read."""

    def __init__(self, topic: Topic, given: Mapping[str, object] | None) -> None:
        self._topic = topic
        self._topic_id = topic.id if given is None else given.get("topic_id")
        self.offsets = {} if given is None else _offsets(topic, given)

    def check(self, topic: Topic) -> None:
        if topic.id != self._topic_id:
            raise UnknownTopic(f"topic {topic.name} was deleted and created again; the position is of the old one")

    def start(self, store: ReadableStore, topic: Topic, number: int, end: int) -> int:
        """Where a partition without records begins is asked for once: in a bucket it takes requests."""
        if number not in self.offsets and end:
            self.offsets[number] = store.partition_state(topic, number).log_start_offset
        return self.offsets.get(number, 0)

    def document(self) -> dict[str, object]:
        offsets = {str(number): offset for number, offset in sorted(self.offsets.items())}
        return {"topic": self._topic.name, "topic_id": self._topic.id, "offsets": offsets}


def _document(places: Mapping[str, _Place]) -> dict[str, object]:
    return {
        "topics": {
            name: {key: value for key, value in place.document().items() if key != "topic"}
            for name, place in places.items()
        }
    }


def _given(position: Mapping[str, object] | None, name: str, *, alone: bool) -> Mapping[str, object] | None:
    """What a position says of one topic; None when it is read from its beginning."""
    if position is None or alone:
        return position
    topics = position.get("topics")
    if not isinstance(topics, dict):
        raise _no_position(position)
    return topics.get(name)


def _offsets(topic: Topic, position: Mapping[str, object]) -> dict[int, int]:
    given = position.get("offsets")
    try:
        assert isinstance(given, dict)
        offsets = {int(number): int(offset) for number, offset in given.items()}
        for number, offset in offsets.items():
            assert offset >= 0
            topic.partition(number)
        return offsets
    except (AssertionError, ValueError, TypeError):
        raise _no_position(position) from None


def _no_position(position: Mapping[str, object]) -> InvalidConfig:
    example = '{"topic": …, "topic_id": …, "offsets": {"0": 12}}'
    return InvalidConfig(f"not a position: {str(position)[:100]}", hint=f"Expected {example}")
