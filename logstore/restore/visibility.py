"""What readers may see of a topic, and of several at once. Every read path asks here.

Isolation, in Kafka's terms:

- No reader sees anything above the high watermark. Control records (transaction markers) are never returned.
- **read_uncommitted** ends at the high watermark. Records of open and of aborted transactions are among what it
  returns, until compaction removes the aborted ones.
- **read_committed** ends at the last stable offset, below which no transaction is open, and leaves out records of
  aborted transactions. Compaction does not change what it returns of a key's latest record.

What answers with state is always read_committed: `get`, `restore`, increments and Delta tables. What streams records
takes a level: `OpenStore.follow` read_committed unless asked otherwise; `consume` and the Spark source read_uncommitted
unless asked otherwise, as Kafka's own consumers. `prove-erased`, `verify` and `dump` look at bytes, so they see
everything. Transactions come from imported topics only: what this store commits itself is never open and never
aborted.

Several topics: one commit may write to several. Its topics are published one after the other, but all of them are
appended before the first is published, and what is published first says how far the others are (`TopicEnds.joint`).
Whoever reads several topics takes the higher of both for each, and so sees a commit in all its topics or in none,
also when its writer died between two of them. A restore reads one topic, at a moment of its own; it, too, takes the
higher of both, so that a commit that one restore has shown is in every later one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from logstore.directory.ends import TopicEnds
from logstore.errors import DuramenError, LockHeld
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic

_LOOKS_MAX = 1000
_LOOKS_AT_ONCE = 20
_LOOK_AGAIN_S = 0.001


def visible_ends(store: ReadableStore, topics: Sequence[Topic]) -> dict[str, TopicEnds]:
    """The ends of the topics as of one moment, by topic id; use `TopicEnds.visible` for a reader's own.

    Raises CorruptState; LockHeld when they change each time they are read twice.
    """
    distinct = list({topic.id: topic for topic in topics}.values())
    at_once = store.ends_at_once(distinct)
    if at_once is not None:
        return dict(at_once)
    before = {topic.id: store.ends(topic) for topic in distinct}
    if len(distinct) <= 1:
        return before
    for look in range(_LOOKS_MAX):
        ends = {topic.id: store.ends(topic) for topic in distinct}
        # What two reads in a row show was all true at one moment between them.
        if all(_seen(ends[topic_id]) == _seen(before[topic_id]) for topic_id in ends):
            return {topic_id: _joined(topic_id, own, ends) for topic_id, own in ends.items()}
        before = ends
        if look >= _LOOKS_AT_ONCE:
            time.sleep(_LOOK_AGAIN_S)
    raise LockHeld(
        f"the ends of {', '.join(topic.name for topic in distinct)} changed during each of {_LOOKS_MAX} reads",
        hint="Try again",
    )


def ends_beside_others(store: ReadableStore, topic: Topic) -> TopicEnds:
    """The ends of one topic, no less far than what topics that were read before have shown of common commits.

    So several topics that are restored one after the other have such a commit in each from the first one on that has
    it. Raises CorruptState, UnknownTopic.
    """
    at_once = store.ends_at_once([topic])
    if at_once is not None:
        return at_once[topic.id]
    ends: dict[str, TopicEnds] = {}
    for name in store.topic_names():
        with contextlib.suppress(DuramenError):  # nobody can have read that one
            other = store.topic(name)
            ends[other.id] = store.ends(other)
    # Its own come last: whoever published it meanwhile no longer says how far it is.
    return _joined(topic.id, store.ends(topic), ends)


def _seen(ends: TopicEnds) -> tuple[object, ...]:
    return ends.high_watermarks, ends.last_stable_offsets, ends.applied_sequence, ends.joint


def _joined(topic_id: str, own: TopicEnds, ends: dict[str, TopicEnds]) -> TopicEnds:
    for other in ends.values():
        told = other.joint.get(topic_id)
        if told is not None and told.sequence > own.applied_sequence:
            own = own.advanced(told.end_offsets, told.sequence)
    return own
