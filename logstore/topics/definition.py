"""A topic's definition: how a new one is made and how one is altered, for stores of both kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from logstore.clock import Clock
from logstore.config import LogConfig, Resolved
from logstore.errors import InvalidConfig
from logstore.limits import Limits
from logstore.settings import topic_setting
from logstore.topic import check_topic_name, new_topic_id
from logstore.topics.registry import Topic, check_partitions, spelled


class HoldsTopics(Protocol):
    """As much of a store as a definition needs."""

    @property
    def clock(self) -> Clock: ...
    @property
    def limits(self) -> Limits: ...
    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]: ...


@dataclass(frozen=True, slots=True)
class TopicChange:
    """What to set, what to unset, and how many partitions there are to be.

    If the settings were unknown, they are known from now on: `defaults` says so without setting any.
    """

    configs: Mapping[str, object]
    unset: frozenset[str]
    partitions: int | None = None
    defaults: bool = False

    @classmethod
    def of(
        cls, configs: Mapping[str, object] | None, unset: Iterable[str], partitions: int | None, defaults: bool
    ) -> TopicChange:
        """Raises UnknownConfig for a name to unset that there is not."""
        names = frozenset(unset)
        for name in names:
            topic_setting(name)
        return cls(configs or {}, names, partitions, defaults)


def new_topic(store: HoldsTopics, name: str, partitions: int, configs: Mapping[str, object] | None) -> Topic:
    """Raises InvalidTopic, UnknownConfig, InvalidConfig."""
    check_topic_name(name)
    own = configs or {}
    store.resolve(own)
    _check_within_limits(store, own)
    made_ms = store.clock.now_ms()
    return Topic(name, new_topic_id(), check_partitions(partitions), spelled(own), 1, made_ms, keyed=True)


def altered_topic(store: HoldsTopics, topic: Topic, change: TopicChange) -> Topic:
    """The topic with the change, one version further. Raises UnknownConfig, InvalidConfig."""
    wanted: dict[str, object] = {key: value for key, value in topic.configs.items() if key not in change.unset}
    wanted.update(change.configs)
    store.resolve(wanted)
    _check_within_limits(store, change.configs)
    if change.partitions is not None and check_partitions(change.partitions) < topic.partitions:
        raise InvalidConfig(f"topic {topic.name} has {topic.partitions} partitions; their number can only grow")
    return replace(
        topic,
        configs=spelled(wanted),
        partitions=change.partitions or topic.partitions,
        config_version=topic.config_version + 1,
        # With more partitions, keys move; earlier records stay where they are.
        keyed=topic.keyed and change.partitions in (None, topic.partitions),
        settings_unknown=topic.settings_unknown and not (change.configs or change.unset or change.defaults),
    )


def is_change(topic: Topic, altered: Topic) -> bool:
    """Whether anything but the version differs; a change that changes nothing is not written."""
    return replace(altered, config_version=topic.config_version) != topic


def _check_within_limits(store: HoldsTopics, configs: Mapping[str, object]) -> None:
    """Refuse a setting that promises more than can be read back; one that came from elsewhere is capped."""
    most = store.limits.written_batch_bytes
    if "max.message.bytes" in configs and LogConfig.from_resolved(store.resolve(configs)).max_message_bytes > most:
        raise InvalidConfig(
            f"max.message.bytes={configs['max.message.bytes']}: the largest batch that can be read back has "
            f"{most} bytes",
            hint=f"Set {most} or less",
        )
