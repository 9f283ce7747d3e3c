"""Creating a topic, and changing its settings or the number of its partitions.

A topic exists from the moment its file in `topics/` has its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from logstore.directory.ends import TopicEnds
from logstore.errors import StrayDirectory, TopicExists
from logstore.topics.definition import TopicChange, altered_topic, is_change, new_topic
from logstore.topics.opened import OpenStore
from logstore.topics.placing import check_place, place_partitions
from logstore.topics.registry import Topic
from logstore.topics.sweeping import refresh_copy


def create_topic(
    store: OpenStore, name: str, partitions: int, configs: Mapping[str, object] | None, *, dry_run: bool
) -> Topic:
    """Raises InvalidTopic, TopicExists, UnknownConfig, InvalidConfig."""
    topic = new_topic(store, name, partitions, configs)
    if store.fs.exists(store.layout.topic(name)):
        raise TopicExists(f"there is a topic {name} already")
    try:
        check_place(store, topic, clear=not dry_run)
    except StrayDirectory:
        if store.fs.exists(store.layout.topic(name)):  # another process is creating it
            raise TopicExists(f"there is a topic {name} already") from None
        raise
    if not dry_run:
        store.registry.create(topic)
        place_partitions(store, topic, range(topic.partitions), is_new=True)
        with store.locks.lease(topic.id, what=f"create {name}"):
            if not store.fs.exists(store.layout.ends(topic.id)):
                store.write_ends(topic, TopicEnds.empty(topic.partitions))
            refresh_copy(store, name)
    return topic


def alter_topic(store: OpenStore, name: str, change: TopicChange, *, dry_run: bool) -> Topic:
    """The changed topic, or the topic as it is where nothing changes.

    Raises UnknownTopic, UnknownConfig, InvalidConfig.
    """
    with store.locks.lease(store.registry.read(name).id, what=f"alter {name}"):
        topic = store.registry.read(name)
        altered = altered_topic(store, topic, change)
        if not is_change(topic, altered):
            return topic
        if change.partitions is not None:
            check_place(store, altered, topic.partitions, clear=False)
        if not dry_run:
            store.registry.replace(altered)
    if not dry_run:
        place_partitions(store, altered, range(topic.partitions, altered.partitions), is_new=True)
    return altered
