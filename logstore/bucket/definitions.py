"""Creating, altering and deleting topics: rows of the ledger, so that every commit planned before conflicts.

A topic lives from its first row to the row that ends it. Its id is new at each creation. `topics/NAME` is a copy of the
definition for people and tools; nothing of ours reads it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from logstore.bucket.commit_file import Entry
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import check_age
from logstore.bucket.judging import plan_clock
from logstore.bucket.keys import TOPICS, new_nonce, topic_key
from logstore.bucket.lost_commits import Copy
from logstore.bucket.manifests import overwrite
from logstore.bucket.replacing import end_partition
from logstore.bucket.rows import Kind, LedgerView, TopicRow
from logstore.directory.sealed import seal, unseal, whole_number
from logstore.errors import (
    CommitConflict,
    CommitUnknown,
    CorruptState,
    DuramenError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    TopicExists,
    UnknownTopic,
)
from logstore.topics.definition import TopicChange, altered_topic, is_change, new_topic
from logstore.topics.registry import Topic, topic_document, topic_from, unknown_topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_CONFLICTS_MAX = 60
_UNKNOWN_MAX = 3
_WAIT_S_MAX = 0.5
_PROJECTION_VERSION = 1


def create_topic(
    store: BucketStore, name: str, partitions: int, configs: Mapping[str, object] | None, *, dry_run: bool
) -> Topic:
    """Raises InvalidTopic, TopicExists, UnknownConfig, InvalidConfig, CommitUnknown."""
    topic = new_topic(store, name, partitions, configs)
    made_ms = topic.created_ms
    zeros = (0,) * partitions
    row = TopicRow(topic.id, 1, Kind.DEFINED, 1, zeros, zeros, made_ms, definition=topic)

    def first(view: LedgerView) -> TopicRow:
        there = view.named(name)
        if there is not None:
            raise TopicExists(f"there is a topic {name} already")
        return row

    if dry_run:
        first(store.ledger.refresh())
    else:
        _commit(store, first)
        project(store, topic)
    return topic


def alter_topic(store: BucketStore, name: str, change: TopicChange, *, dry_run: bool) -> Topic:
    """The changed topic, or the topic as it is where nothing changes.

    Raises UnknownTopic, UnknownConfig, InvalidConfig, CommitUnknown.
    """
    seen, _ = _living(store.ledger.refresh(), name)
    altered = altered_topic(store, seen, change)
    if not is_change(seen, altered):
        return seen
    if dry_run:
        return altered

    def next_row(view: LedgerView) -> TopicRow:
        topic, newest = _living(view, name)
        altered = altered_topic(store, topic, change)
        ends = newest.end_offsets + (0,) * (altered.partitions - topic.partitions)
        clock_ms = plan_clock(store.clock.now_ms(), view, [topic.id])
        version = altered.config_version
        return TopicRow(
            topic.id, newest.sequence + 1, Kind.DEFINED, version, ends, ends, clock_ms, definition=altered
        )  # fmt: skip

    row = _commit(store, next_row)
    assert row.definition is not None
    project(store, row.definition)
    return row.definition


def touch_topic(store: BucketStore, topic: Topic) -> None:
    """A row that changes nothing, so that everybody looks again. Raises UnknownTopic, CommitUnknown."""

    def next_row(view: LedgerView) -> tuple[TopicRow, ...]:
        newest = view.newest(topic.id)
        if newest is None or newest.kind is Kind.ENDED:
            raise UnknownTopic(f"topic {topic.name} was deleted meanwhile")
        clock_ms = plan_clock(store.clock.now_ms(), view, [topic.id])
        return (replace(_bare(newest), sequence=newest.sequence + 1, kind=Kind.DEFINED, clock_ms=clock_ms),)

    commit_rows(store, next_row)


def delete_topic(store: BucketStore, name: str, *, dry_run: bool = False) -> Topic:
    """End the topic: from here on it is not found. Then its manifests are ended; maintenance frees its objects.

    Raises UnknownTopic, CommitUnknown.
    """
    topic, _ = _living(store.ledger.refresh(), name)
    if dry_run:
        return topic

    def last_row(view: LedgerView) -> TopicRow:
        topic, newest = _living(view, name)
        clock_ms = plan_clock(store.clock.now_ms(), view, [topic.id])
        return replace(_bare(newest), sequence=newest.sequence + 1, kind=Kind.ENDED, clock_ms=clock_ms)

    row = _commit(store, last_row)
    with contextlib.suppress(DuramenError):  # the topic has ended; maintenance goes on with it
        end_manifests(store, row.topic_id, len(row.end_offsets))
    project(store, topic, ended=True)
    return topic


def end_manifests(store: BucketStore, topic_id: str, partitions: int) -> None:
    """Nothing can be sealed behind this. Idempotent: who deletes may have died before."""
    made = Elapsed()
    for number in range(partitions):
        store.manifests.change(
            topic_id,
            number,
            lambda seen, now_ms, nonce: (
                None if seen and seen.ended else end_partition(seen, now_ms=now_ms, nonce=nonce)
            ),
            check=lambda: check_age(made.ms()),
        )


def project(store: BucketStore, topic: Topic, *, ended: bool = False) -> None:
    """Bring `topics/NAME` up to date as far as it is older. That it fails says nothing about the topic."""
    key, order = topic_key(topic.name), store.ledger.view.version
    data = _projection(store, topic, ended=ended)
    with contextlib.suppress(DuramenError):
        try:
            store.objects.create(key, data)
            return
        except ObjectExists:
            stored, seen = store.objects.get(key)
        there = whole_number(unseal(stored, version=_PROJECTION_VERSION, file=key), "ledger_version", file=key)
        if there < order:
            with contextlib.suppress(ObjectChanged):
                store.objects.replace(key, data, seen)


def _commit(store: BucketStore, row_of: Callable[[LedgerView], TopicRow]) -> TopicRow:
    return commit_rows(store, lambda view: (row_of(view),))[0]


def _projection(store: BucketStore, topic: Topic, *, ended: bool) -> bytes:
    document = {"ledger_version": store.ledger.view.version, "ended": ended, "topic": topic_document(topic)}
    return seal(document, version=_PROJECTION_VERSION)


def read_projection(store: BucketStore, name: str) -> None:
    """Raises CorruptState, ObjectMissing."""
    key = topic_key(name)
    unseal(store.objects.get(key)[0], version=_PROJECTION_VERSION, file=key)


def read_copies(store: BucketStore) -> list[Copy]:
    """Of all topics that there ever were, as far as they can be read."""
    found = []
    for head in store.objects.list(TOPICS):
        with contextlib.suppress(CorruptState, ObjectMissing, KeyError, ValueError, TypeError):
            document = unseal(store.objects.get(head.key)[0], version=_PROJECTION_VERSION, file=head.key)
            topic = topic_from(document["topic"], file=head.key)
            version = whole_number(document, "ledger_version", file=head.key)
            found.append(Copy(topic, document["ended"] is True, version))
    return found


def write_projection(store: BucketStore, topic: Topic) -> None:
    """In the place of one that cannot be read."""
    overwrite(store.objects, topic_key(topic.name), _projection(store, topic, ended=False))


def commit_rows(
    store: BucketStore,
    rows_of: Callable[[LedgerView], tuple[TopicRow, ...]],
    *,
    details: Mapping[str, object] = MappingProxyType({}),
) -> tuple[TopicRow, ...]:
    """Commit the rows that follow the newest view, all or none of them; returns them as they are in the ledger.

    Raises what `rows_of` raises, CommitConflict, CommitUnknown.
    """
    tried: list[tuple[TopicRow, ...]] = []
    unknown = 0
    for attempt in range(_CONFLICTS_MAX):
        view = store.ledger.refresh()
        for rows in tried:  # an attempt whose answer was lost; its rows may be forgotten, a definition is not
            first = rows[0]
            if first in view.rows or (first.definition and first.definition == view.definitions.get(first.topic_id)):
                return rows
        rows = rows_of(view)
        tried.append(rows)
        try:
            store.ledger.commit(view, Entry(rows, new_nonce(), details=details))
            return rows
        except CommitConflict:
            tried.remove(rows)
            time.sleep(min(_WAIT_S_MAX, 0.005 * 2**attempt) * random.random())
        except CommitUnknown:
            unknown += 1
            if unknown == _UNKNOWN_MAX:
                raise
    raise CommitConflict(f"other writers were faster {_CONFLICTS_MAX} times; nothing was changed", hint="Try again")


def _living(view: LedgerView, name: str) -> tuple[Topic, TopicRow]:
    topic = view.named(name)
    newest = view.newest(topic.id) if topic is not None else None
    if topic is None or newest is None:
        raise unknown_topic(name, [each.name for each in view.definitions.values()])
    return topic, newest


def _bare(newest: TopicRow) -> TopicRow:
    ends = newest.end_offsets
    return TopicRow(newest.topic_id, newest.sequence, newest.kind, newest.config_version, ends, ends, newest.clock_ms)
