"""Topic names and topic-partitions, by Kafka's rules; the gate every name passes before a path is built from it."""

from __future__ import annotations

import base64
import re
import uuid
from dataclasses import dataclass

from logstore.errors import InvalidTopic
from logstore.limits import TOPIC_NAME_CHARS_MAX

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+\Z")


def check_topic_name(name: str) -> str:
    """Return `name` if Kafka would accept it as a topic, else raise InvalidTopic saying why."""
    if not name:
        raise InvalidTopic("a topic name must not be empty")
    if name in (".", ".."):
        raise InvalidTopic(f"a topic cannot be called {name!r}")
    if len(name) > TOPIC_NAME_CHARS_MAX:
        raise InvalidTopic(f"a topic name has at most {TOPIC_NAME_CHARS_MAX} characters, this one has {len(name)}")
    if not _LEGAL.match(name):
        raise InvalidTopic(f"topic name {name!r} has a character outside a-z A-Z 0-9 . _ -")
    return name


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @classmethod
    def parse(cls, directory_name: str) -> TopicPartition:
        """From a partition directory's name: split at the last dash, topic checked. Raises InvalidTopic."""
        topic, dash, number = directory_name.rpartition("-")
        if not dash or not (number.isascii() and number.isdigit()):
            raise InvalidTopic(f"{directory_name!r} is not named like a partition directory (topic-N)")
        return cls(check_topic_name(topic), int(number))


def new_topic_id() -> str:
    """A random Kafka topic id: 22 characters of base64url. Never one that begins with a dash, as Kafka avoids those."""
    while True:
        text = format_uuid(uuid.uuid4())
        if not text.startswith("-"):
            return text


def format_uuid(value: uuid.UUID) -> str:
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode("ascii")


def parse_uuid(text: str) -> uuid.UUID:
    """Raises ValueError when `text` is not a 22-character base64url UUID."""
    if len(text) != 22 or not re.fullmatch(r"[A-Za-z0-9_-]{22}", text):
        raise ValueError(f"{text!r} is not a base64url UUID")
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))
