"""Creating a topic, and changing its settings or the number of its partitions.

A topic exists from the moment its file in `topics/` has its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from logstore.config import LogConfig
from logstore.directory.ends import TopicEnds
from logstore.errors import InvalidConfig, StrayDirectory, TopicExists
from logstore.settings import topic_setting
from logstore.topic import check_topic_name, new_topic_id
from logstore.topics.opened import OpenStore
from logstore.topics.placing import check_place, place_partitions
from logstore.topics.registry import Topic, check_partitions, spelled
from logstore.topics.sweeping import refresh_copy


def create_topic(
    store: OpenStore,
    name: str,
    *,
    partitions: int = 1,
    configs: Mapping[str, object] | None = None,
    dry_run: bool = False,
) -> Topic:
    """Raises InvalidTopic, TopicExists, UnknownConfig, InvalidConfig."""
    check_topic_name(name)
    store.resolve(configs or {})
    _check_within_limits(store, configs or {})
    topic = Topic(
        name=name,
        id=new_topic_id(),
        partitions=check_partitions(partitions),
        configs=spelled(configs or {}),
        config_version=1,
        created_ms=store.clock.now_ms(),
        keyed=True,
    )
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


def alter_topic(
    store: OpenStore,
    name: str,
    *,
    configs: Mapping[str, object] | None = None,
    unset: Iterable[str] = (),
    partitions: int | None = None,
    defaults: bool = False,
    dry_run: bool = False,
) -> Topic:
    """Set and unset the topic's own settings, or widen it; returns the changed topic.

    If its settings were unknown, they are known from now on: `defaults` says so without setting any.

    Raises UnknownTopic, UnknownConfig, InvalidConfig.
    """
    unset = list(unset)
    for key in unset:
        topic_setting(key)
    with store.locks.lease(store.registry.read(name).id, what=f"alter {name}"):
        topic = store.registry.read(name)
        wanted: dict[str, object] = {key: value for key, value in topic.configs.items() if key not in unset}
        wanted.update(configs or {})
        store.resolve(wanted)
        _check_within_limits(store, configs or {})
        if partitions is not None and check_partitions(partitions) < topic.partitions:
            raise InvalidConfig(f"topic {name} has {topic.partitions} partitions; their number can only grow")
        if partitions is not None:
            check_place(store, replace(topic, partitions=partitions), topic.partitions, clear=False)
        altered = replace(
            topic,
            configs=spelled(wanted),
            partitions=partitions or topic.partitions,
            config_version=topic.config_version + 1,
            # With more partitions, keys move; earlier records stay where they are.
            keyed=topic.keyed and partitions in (None, topic.partitions),
            settings_unknown=topic.settings_unknown and not (configs or unset or defaults),
        )
        if not dry_run:
            store.registry.replace(altered)
    if not dry_run:
        place_partitions(store, altered, range(topic.partitions, altered.partitions), is_new=True)
    return altered


def _check_within_limits(store: OpenStore, configs: Mapping[str, object]) -> None:
    """Refuse a setting that promises more than can be read back; one that came from elsewhere is capped."""
    most = store.limits.written_batch_bytes
    if "max.message.bytes" in configs and LogConfig.from_resolved(store.resolve(configs)).max_message_bytes > most:
        raise InvalidConfig(
            f"max.message.bytes={configs['max.message.bytes']}: the largest batch that can be read back has "
            f"{most} bytes",
            hint=f"Set {most} or less",
        )
