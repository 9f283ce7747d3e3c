"""Sweeping a store: what crashed processes left behind, and a name or a mark says may go."""

from __future__ import annotations

import contextlib
import os

from logstore.directory.trees import remove_tree
from logstore.errors import CorruptState, LockHeld, TopicExists, UnknownTopic
from logstore.topics.deleting import finish_deletion, take_back_import
from logstore.topics.import_folder import sweep_import_folders
from logstore.topics.marks import DELETED, IMPORTED, IMPORTING
from logstore.topics.opened import OpenStore

#: what a crashed process left in `topics/` or `staging/` is not touched before this age
_LEFTOVER_MS_MIN = 3_600_000


def sweep(store: OpenStore) -> list[str]:
    """Remove what crashed processes left behind and a name or a mark says may go; returns the paths."""
    removed = []
    for name in store.fs.listdir(store.layout.staging):
        if name.endswith("-delete"):
            removed.append(os.path.join(store.layout.staging, name))
    oldest = store.clock.now_ms() - _LEFTOVER_MS_MIN
    for folder, suffixes in (
        (store.layout.topics, (".new", ".tmp")),
        (store.layout.staging, ("-partition", "-draft")),
    ):
        for name in store.fs.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(suffixes) and store.fs.stat(path).mtime_ms < oldest:
                    removed.append(path)
    for path in removed:
        remove_tree(store.fs, path)
    removed += [*_finish_imports(store, oldest), *_finish_deletions(store)]
    for name in store.registry.names():  # topics of older releases have no copy yet
        _refresh_copy_of(store, name)
    return removed


def _refresh_copy_of(store: OpenStore, name: str) -> None:
    try:
        topic = store.registry.read(name)
        if store.registry.read_copy(topic.id) != topic:
            with store.locks.lease(topic.id, what="copy its definition", wait_ms=0):
                refresh_copy(store, name)
    except (UnknownTopic, CorruptState, LockHeld):
        return  # gone, damaged (`recover` needs the copy there is), or being altered


def refresh_copy(store: OpenStore, name: str) -> None:
    """The caller holds the topic's lease."""
    topic = store.registry.read(name)
    if store.fs.exists(store.layout.topic_state(topic.id)) and store.registry.read_copy(topic.id) != topic:
        store.registry.write_copy(topic)


def _finish_imports(store: OpenStore, oldest_ms: int) -> list[str]:
    """Remove what imports that died have begun, and give those that were complete their name."""
    begun, complete = store.marks.find(IMPORTING), store.marks.find(IMPORTED)
    # After the marks: an import holds its folder before it sets the first and until the last is gone.
    removed, at_work = sweep_import_folders(store, oldest_ms=oldest_ms)
    if at_work:
        return removed
    for mark in complete:
        if mark.topic is None or not store.fs.exists(mark.path):
            continue
        try:
            store.registry.link(mark.path, mark.topic)
        except TopicExists:
            if store.registry.read(mark.topic.name).id != mark.topic_id:
                continue  # left, and reported: it is not known which is right
        store.marks.drop(mark.path)
    for mark in begun:
        with contextlib.suppress(LockHeld):
            removed += take_back_import(store, mark.topic_id, mark.topic)
    return removed


def _finish_deletions(store: OpenStore) -> list[str]:
    """What is left of topics that a mark says are deleted."""
    removed = []
    for mark in store.marks.find(DELETED):
        # Held by the process that is deleting the topic.
        with contextlib.suppress(LockHeld), store.locks.lease(mark.topic_id, what="sweep", wait_ms=0):
            removed += finish_deletion(store, mark.topic_id, mark.topic, "sweep")
            store.locks.forget_topic(mark.topic_id)
    return removed
