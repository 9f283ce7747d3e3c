"""Topic names, partition directories and topic ids, by Kafka's rules."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.errors import InvalidTopic
from logstore.topic import TopicPartition, check_topic_name, format_uuid, new_topic_id, parse_uuid


@pytest.mark.parametrize("name", ["a", "orders", "A.b_c-9", "-", "...", "a" * 249, "0", "_"])
def test_names_kafka_accepts(name: str) -> None:
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "must not be empty"),
        (".", "cannot be called"),
        ("..", "cannot be called"),
        ("a" * 250, "at most 249"),
        ("a/b", "character outside"),
        ("../x", "character outside"),
        ("a b", "character outside"),
        ("a\n", "character outside"),
        ("a\x00", "character outside"),
        ("\u00e4", "character outside"),
        ("\u0661", "character outside"),
    ],
)
def test_names_kafka_refuses(name: str, says: str) -> None:
    with pytest.raises(InvalidTopic, match=says):
        check_topic_name(name)


@settings(max_examples=300)
@given(st.text(max_size=300))
def test_an_accepted_name_is_one_plain_path_component(name: str) -> None:
    try:
        check_topic_name(name)
    except InvalidTopic:
        return
    assert "/" not in name
    assert name not in ("", ".", "..")
    assert name.isascii()
    assert len(f"{name}-99999") <= 255


@pytest.mark.parametrize(
    ("directory", "topic", "partition"), [("orders-0", "orders", 0), ("a-b.c-12", "a-b.c", 12), ("--3", "-", 3)]
)
def test_partition_directories_split_at_the_last_dash(directory: str, topic: str, partition: int) -> None:
    found = TopicPartition.parse(directory)
    assert found == TopicPartition(topic, partition)
    assert str(found) == directory


@pytest.mark.parametrize(
    "directory", ["orders", "orders-", "-1", "orders-x", "orders-\u0661", "../x-1", "use.duramen.export"]
)
def test_other_directories_are_refused(directory: str) -> None:
    with pytest.raises(InvalidTopic):
        TopicPartition.parse(directory)


@settings(max_examples=200)
@given(st.uuids())
def test_topic_ids_round_trip(value: uuid.UUID) -> None:
    text = format_uuid(value)
    assert len(text) == 22
    assert parse_uuid(text) == value


@pytest.mark.parametrize("text", ["", "A" * 21, "A" * 23, "A" * 21 + "+", "A" * 21 + "\n", "\u00e4" * 22])
def test_texts_that_are_no_topic_id(text: str) -> None:
    with pytest.raises(ValueError, match="not a base64url UUID"):
        parse_uuid(text)


def test_new_topic_ids_are_random_and_never_begin_with_a_dash() -> None:
    ids = {new_topic_id() for _ in range(500)}
    assert len(ids) == 500
    assert not any(text.startswith("-") for text in ids)
