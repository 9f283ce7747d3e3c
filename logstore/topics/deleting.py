"""Deleting a topic: a mark first, then what belongs to it, the mark last.

What no mark names is never removed: that a file is missing proves nothing.
"""

from __future__ import annotations

import contextlib

from logstore.directory.state import read_state
from logstore.directory.trees import is_directory, remove_tree
from logstore.errors import CorruptState
from logstore.topic import TopicPartition
from logstore.topics.marks import DELETED, IMPORTED, IMPORTING
from logstore.topics.opened import OpenStore
from logstore.topics.places import is_log_of
from logstore.topics.placing import discard
from logstore.topics.registry import Topic


def delete_topic(store: OpenStore, name: str, *, dry_run: bool = False) -> Topic:
    """Remove the topic and all its records. Raises UnknownTopic, LockHeld."""
    topic = store.registry.read(name)
    if dry_run:
        return topic
    what = f"delete {name}"
    with contextlib.ExitStack() as held:
        held.enter_context(store.locks.maintenance_of(topic.id, what=what))
        held.enter_context(store.locks.lease(topic.id, what=what))
        store.check_exists(topic)
        store.marks.retire(topic)
        finish_deletion(store, topic.id, topic, what)
    store.locks.forget_topic(topic.id)
    return topic


def take_back_import(store: OpenStore, topic_id: str, topic: Topic | None) -> list[str]:
    """Remove what an import made of a topic that never came to be; returns the paths. Raises LockHeld."""
    mark = store.layout.topic_mark(topic_id, IMPORTING)
    with store.locks.lease(topic_id, what="take an import back", wait_ms=0):
        if not store.fs.exists(mark):
            return []  # it is complete
        removed = finish_deletion(store, topic_id, topic, "take an import back")
    store.locks.forget_topic(topic_id)
    return removed


def finish_deletion(store: OpenStore, topic_id: str, topic: Topic | None, what: str) -> list[str]:
    """Remove what belongs to a deleted topic, the mark last; the caller holds its lease."""
    removed = []
    for partition in store.existing_partitions(topic):
        directory = store.layout.partition(partition)
        carried = store.topic_id_at(directory)
        if carried == topic_id or (carried is None and _is_log_of(store, topic, partition)):
            with store.locks.partition(topic_id, partition.partition, what=what):  # a late append may still run
                discard(store, directory)
            removed.append(directory)
    state = store.layout.topic_state(topic_id)
    if store.fs.exists(state):
        remove_tree(store.fs, state)
        store.fs.fsync_dir(store.layout.state)
        removed.append(state)
    for kind in (IMPORTING, IMPORTED, DELETED):
        store.marks.drop(store.layout.topic_mark(topic_id, kind))
    return removed


def _is_log_of(store: OpenStore, topic: Topic | None, partition: TopicPartition) -> bool:
    if topic is None or not is_directory(store.fs, store.layout.partition(partition)):
        return False
    try:
        state = read_state(store.fs, store.layout.partition_state(topic.id, partition.partition), limits=store.limits)
    except CorruptState:
        return False
    return is_log_of(store.fs, store.layout.partition(partition), state)
