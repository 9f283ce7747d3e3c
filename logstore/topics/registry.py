"""The topics of a store: one file each with id, number of partitions and the topic's own settings under Kafka's names.

A topic exists from the moment its file has its name (a hard link, which never replaces another's) to the moment the
file becomes the mark of its deletion (`marks`). Files are changed under the topic's lease, as a
whole. Knows nothing of logs.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from logstore.config import resolve_topic
from logstore.directory.layout import TOPIC_SUFFIX, Layout
from logstore.directory.sealed import (
    Parsed,
    read_sealed,
    read_sealed_bytes,
    seal,
    unseal,
    whole_number,
    write_sealed,
)
from logstore.errors import CorruptState, DuramenError, InvalidConfig, InvalidTopic, TopicExists, UnknownTopic
from logstore.files import FileSystem
from logstore.limits import INT32_MAX
from logstore.setting import format_value, parse_value
from logstore.settings import TOPIC_SETTINGS
from logstore.topic import TopicPartition, check_topic_name, parse_uuid

VERSION = 2
#: the version older releases read; they do not know unknown settings, and would delete by their defaults
_VERSION_OF_KNOWN_SETTINGS = 1
#: a topic's file is small; a larger one is not ours
TOPIC_FILE_BYTES_MAX = 1 << 20
#: partition directories are `topic-N`: with five digits the longest topic name fits a file name of 255 bytes
PARTITIONS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    id: str
    partitions: int
    #: the topic's own settings, in Kafka's spelling
    configs: Mapping[str, str]
    #: counts alterations, so that an encoder can see whether its config still holds
    config_version: int
    created_ms: int
    #: every record was placed by its key, with this number of partitions: a key lives in one partition only
    keyed: bool = False
    #: the id a Kafka cluster knows the topic by, when it came from one; ours is new at each creation and import
    kafka_id: str | None = None
    #: its settings are not known; until they are given nothing of it is deleted or compacted
    settings_unknown: bool = False

    @property
    def export_id(self) -> str:
        """The id the topic gets in a broker's directory."""
        return self.kafka_id or self.id

    def partition_list(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, number) for number in range(self.partitions)]

    def partition(self, number: int) -> TopicPartition:
        """Raises UnknownTopic when the topic has no such partition."""
        if not 0 <= number < self.partitions:
            raise UnknownTopic(
                f"topic {self.name} has partitions 0 to {self.partitions - 1}", partition=f"{self.name}-{number}"
            )
        return TopicPartition(self.name, number)


def check_partitions(partitions: int) -> int:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidConfig(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
    return partitions


def spelled(configs: Mapping[str, object]) -> dict[str, str]:
    """Checked settings of a topic in Kafka's spelling. Raises UnknownConfig, InvalidConfig."""
    resolved = resolve_topic(configs)
    return {name: format_value(resolved[name].value) for name in TOPIC_SETTINGS if name in configs}


def unknown_topic(name: str, names: Sequence[str]) -> UnknownTopic:
    """The error for a name that is none of `names`."""
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "`duramen topics list` shows what is there."
    return UnknownTopic(f"no topic is called {name}", hint=hint)


class TopicRegistry:
    def __init__(self, fs: FileSystem, layout: Layout) -> None:
        self._fs = fs
        self._layout = layout
        self._parsed: Parsed[Topic] = Parsed(1024)

    def names(self) -> list[str]:
        """All topics by name. Files that are not named like a topic's are left alone."""
        found = []
        for entry in self._fs.listdir(self._layout.topics):
            if entry.endswith(TOPIC_SUFFIX):
                with contextlib.suppress(InvalidTopic):
                    found.append(check_topic_name(entry[: -len(TOPIC_SUFFIX)]))
        return found

    def read(self, name: str) -> Topic:
        """Raises UnknownTopic, CorruptState, StoreVersionError."""
        path = self._layout.topic(name)
        try:
            data = read_sealed_bytes(self._fs, path, limit=TOPIC_FILE_BYTES_MAX)
        except FileNotFoundError:
            raise unknown_topic(name, self.names()) from None
        return self._parsed.of(path, data, lambda data: _topic(name, unseal(data, version=VERSION, file=path), path))

    def create(self, topic: Topic) -> None:
        """Make the topic exist, durably. Raises TopicExists."""
        # A name of its own: an import that died may have left one for the same id.
        draft = os.path.join(self._layout.topics, f"{topic.id}-{uuid.uuid4().hex}.new")
        self.write(draft, topic)
        try:
            self.link(draft, topic)
        finally:
            self._fs.unlink(draft)

    def write(self, path: str, topic: Topic) -> None:
        """The topic's definition under a name of its own, which must be new; durable but for the name."""
        file = self._fs.open(path, create=True, exclusive=True)
        try:
            file.pwrite(seal(topic_document(topic), version=_version(topic)), 0)
            file.fsync()
        finally:
            file.close()

    def link(self, draft: str, topic: Topic) -> None:
        """Give a definition its name, durably, which makes the topic exist. Raises TopicExists."""
        try:
            self._fs.link(draft, self._layout.topic(topic.name))
        except FileExistsError:
            raise TopicExists(f"there is a topic {topic.name} already") from None
        self._fs.fsync_dir(self._layout.topics)

    def replace(self, topic: Topic) -> None:
        """Write the topic's new definition; the caller holds its lease."""
        if self._fs.exists(self._layout.topic_state(topic.id)):
            self.write_copy(topic)  # first: it is never older than what was acknowledged
        write_sealed(self._fs, self._layout.topic(topic.name), topic_document(topic), version=_version(topic))

    def write_copy(self, topic: Topic) -> None:
        """A second copy of the definition beside the topic's state, from which a lost file is restored."""
        write_sealed(self._fs, self._layout.topic_copy(topic.id), topic_document(topic), version=_version(topic))

    def read_copy(self, topic_id: str) -> Topic | None:
        """None where there is none that can be read."""
        try:
            found = read_definition(self._fs, self._layout.topic_copy(topic_id))
        except (FileNotFoundError, CorruptState):
            return None
        return found if found.id == topic_id else None


def read_definition(fs: FileSystem, path: str) -> Topic:
    """A topic's definition from a file that is not named like it. Raises FileNotFoundError, CorruptState."""
    return topic_from(read_sealed(fs, path, version=VERSION, limit=TOPIC_FILE_BYTES_MAX), file=path)


def _version(topic: Topic) -> int:
    return VERSION if topic.settings_unknown else _VERSION_OF_KNOWN_SETTINGS


def topic_document(topic: Topic) -> dict[str, object]:
    """The topic as JSON has it; `topic_from` reads it."""
    return {
        "name": topic.name,
        "id": topic.id,
        "partitions": topic.partitions,
        "configs": dict(topic.configs),
        "config_version": topic.config_version,
        "created_ms": topic.created_ms,
        "keyed": topic.keyed,
        "kafka_id": topic.kafka_id,
        "settings_unknown": topic.settings_unknown,
    }


def topic_from(document: object, *, file: str) -> Topic:
    """Raises CorruptState."""
    if not isinstance(document, Mapping):
        raise CorruptState("not a topic", file=file)
    try:
        name = check_topic_name(str(document.get("name")))
    except InvalidTopic as error:
        raise CorruptState(error.what, file=file) from error
    return _topic(name, document, file)


def _topic(name: str, document: Mapping[str, object], path: str) -> Topic:
    if document.get("name") != name:
        raise CorruptState("the file is about another topic than its name says", file=path)
    topic_id, kafka_id = document.get("id"), document.get("kafka_id")
    if not _is_id(topic_id) or not (kafka_id is None or _is_id(kafka_id)):
        raise CorruptState("no topic id in the file", file=path)
    partitions = whole_number(document, "partitions", file=path, high=INT32_MAX)
    configs = document.get("configs")
    if not isinstance(configs, dict):
        raise CorruptState("no settings in the file", file=path)
    try:
        check_partitions(partitions)
        resolve_topic(configs, file=path)
        checked = {key: format_value(parse_value(TOPIC_SETTINGS[key], value)) for key, value in configs.items()}
    except DuramenError as error:
        raise CorruptState(f"the topic's file does not hold: {error.what}", file=path) from error
    return Topic(
        name=name,
        id=str(topic_id),
        partitions=partitions,
        configs=checked,
        config_version=whole_number(document, "config_version", file=path),
        created_ms=whole_number(document, "created_ms", file=path),
        keyed=document.get("keyed") is True,
        kafka_id=None if kafka_id is None else str(kafka_id),
        settings_unknown=document.get("settings_unknown") is True,
    )


def _is_id(value: object) -> bool:
    try:
        return isinstance(value, str) and parse_uuid(value).int != 0
    except ValueError:
        return False
