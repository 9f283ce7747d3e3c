"""How a topic's definition is made and altered: pure rules, the same for stores of both kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from logstore.clock import Clock, ManualClock
from logstore.config import Resolved, resolve_topic
from logstore.errors import DuramenError, InvalidConfig, InvalidTopic, UnknownConfig
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.topics.definition import TopicChange, altered_topic, new_topic
from logstore.topics.registry import Topic

NOW_MS = 1_700_000_000_000


class Settings:
    """As much of a store as a definition asks for."""

    clock: Clock = ManualClock(NOW_MS)
    limits: Limits = DEFAULT_LIMITS

    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]:
        return resolve_topic(configs)


def topic_of(**changed: Any) -> Topic:
    return replace(new_topic(Settings(), "orders", 2, {"segment.bytes": 1000}), **changed)


def test_a_new_topic_is_keyed_and_has_its_settings_as_they_are_spelled() -> None:
    made = new_topic(Settings(), "orders", 3, {"retention.ms": "7d", "segment.bytes": 1000})
    assert (made.name, made.partitions, made.config_version, made.created_ms) == ("orders", 3, 1, NOW_MS)
    assert made.keyed
    assert not made.settings_unknown
    assert set(made.configs) == {"retention.ms", "segment.bytes"}
    assert made.id != new_topic(Settings(), "orders", 3, None).id


@pytest.mark.parametrize(
    ("name", "partitions", "configs", "error"),
    [
        ("a/b", 1, None, InvalidTopic),
        ("orders", 0, None, InvalidConfig),
        ("orders", 1, {"segment.byte": 1000}, UnknownConfig),
        ("orders", 1, {"segment.bytes": 1}, InvalidConfig),
        ("orders", 1, {"max.message.bytes": (1 << 31) - 1}, InvalidConfig),
    ],
)
def test_what_a_new_topic_cannot_be(
    name: str, partitions: int, configs: dict[str, object] | None, error: type[DuramenError]
) -> None:
    with pytest.raises(error):
        new_topic(Settings(), name, partitions, configs)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (TopicChange({"retention.ms": 5}, frozenset()), {"segment.bytes": "1000", "retention.ms": "5"}),
        (TopicChange({"segment.bytes": 2000}, frozenset()), {"segment.bytes": "2000"}),
        (TopicChange({}, frozenset({"segment.bytes"})), {}),
        (TopicChange({"segment.bytes": 2000}, frozenset({"segment.bytes"})), {"segment.bytes": "2000"}),
    ],
    ids=["set", "set again", "unset", "unset and set"],
)
def test_settings_are_set_and_unset(change: TopicChange, expected: dict[str, str]) -> None:
    altered = altered_topic(Settings(), topic_of(), change)
    assert altered.configs == expected
    assert (altered.partitions, altered.config_version, altered.keyed) == (2, 2, True)


@pytest.mark.parametrize(("partitions", "keyed"), [(None, True), (2, True), (3, False)])
def test_keys_move_where_there_are_more_partitions(partitions: int | None, keyed: bool) -> None:
    altered = altered_topic(Settings(), topic_of(), TopicChange({}, frozenset(), partitions))
    assert (altered.partitions, altered.keyed) == (partitions or 2, keyed)
    again = altered_topic(Settings(), altered, TopicChange({}, frozenset()))
    assert again.keyed == keyed, "earlier records stay where they are"


def test_partitions_only_grow() -> None:
    with pytest.raises(InvalidConfig, match="orders has 2 partitions; their number can only grow"):
        altered_topic(Settings(), topic_of(), TopicChange({}, frozenset(), 1))


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        (TopicChange({}, frozenset(), 3), True),
        (TopicChange({"retention.ms": 5}, frozenset()), False),
        (TopicChange({}, frozenset({"segment.bytes"})), False),
        (TopicChange({}, frozenset(), defaults=True), False),
    ],
    ids=["partitions say nothing", "set", "unset", "defaults"],
)
def test_settings_that_were_unknown_are_known_once_they_are_given(change: TopicChange, unknown: bool) -> None:
    assert altered_topic(Settings(), topic_of(settings_unknown=True), change).settings_unknown == unknown


def test_a_name_to_unset_must_be_a_setting() -> None:
    with pytest.raises(UnknownConfig):
        TopicChange.of(None, ["segment.byte"], None, False)
    assert TopicChange.of(None, ["segment.bytes"], None, False) == TopicChange({}, frozenset({"segment.bytes"}))
