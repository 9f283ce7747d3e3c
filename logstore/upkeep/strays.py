"""What lies in a store and belongs to no topic that can be read: lost or damaged topic files, directories and state.

Only looks. Only a person removes a stray; `topic_repair` makes topics of what can be one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from logstore.directory.trees import is_directory
from logstore.errors import CorruptState, InvalidTopic, UnknownTopic
from logstore.topic import TopicPartition, parse_uuid
from logstore.topics.opened import OpenStore
from logstore.topics.places import topic_id_at
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


class StrayKind(Enum):
    #: the topic's file cannot be read
    TOPIC_FILE = "topic file"
    #: a partition directory whose topic has no file
    DIRECTORY = "directory"
    #: a partition directory that does not carry the id of the topic of its name
    METADATA = "partition.metadata"
    #: state of an id that no topic has
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Stray:
    kind: StrayKind
    what: str
    file: str
    #: the topic it would belong to, as far as its name tells
    name: str | None = None
    topic_id: str | None = None
    partition: int | None = None


def readable_topics(store: ReadableStore) -> tuple[list[Topic], dict[str, CorruptState]]:
    """The topics whose files can be read, and by name what is wrong with the others."""
    found: list[Topic] = []
    damaged: dict[str, CorruptState] = {}
    for name in store.topic_names():
        try:
            found.append(store.topic(name))
        except UnknownTopic:
            continue  # deleted since it was listed
        except CorruptState as error:
            damaged[name] = error
    return found, damaged


def find_strays(store: OpenStore, names: Sequence[str] | None = None, *, deep: bool = True) -> list[Stray]:
    """Everything that belongs to no readable topic, and to no deletion or import under way; only of topics `names`.

    Unless `deep`, the directories that are named like a topic's are taken for its own without a look.
    """
    # Directories and state first: a topic that is created or deleted meanwhile is not a stray.
    directories, states = store.fs.listdir(store.layout.logs), store.fs.listdir(store.layout.state)
    topics, damaged = readable_topics(store)
    by_name, marked = {topic.name: topic for topic in topics}, store.marks.ids()
    found = [
        Stray(StrayKind.TOPIC_FILE, f"the topic's file is damaged: {error.what}", store.layout.topic(name), name)
        for name, error in damaged.items()
    ]
    for entry in directories:
        found += _directory(store, entry, by_name, damaged, marked, deep)
    known = {topic.id for topic in topics} | marked
    for entry in states:
        if entry not in known and _is_id(entry) and store.fs.exists(store.layout.topic_state(entry)):
            found.append(
                Stray(
                    StrayKind.STATE,
                    f"state of topic id {entry}, which no topic's file names",
                    store.layout.topic_state(entry),
                    topic_id=entry,
                )
            )
    return found if names is None else [stray for stray in found if stray.name in names]


def _directory(
    store: OpenStore,
    entry: str,
    topics: Mapping[str, Topic],
    damaged: Mapping[str, CorruptState],
    marked: set[str],
    deep: bool,
) -> list[Stray]:
    try:
        partition = TopicPartition.parse(entry)
    except InvalidTopic:
        return []
    topic = topics.get(partition.topic)
    if not deep and topic is not None and partition.partition < topic.partitions:
        return []
    path = store.layout.partition(partition)
    if not is_directory(store.fs, path):
        return []
    carried = topic_id_at(store.fs, path, limits=store.limits)
    if carried in marked or (topic is not None and carried == topic.id and partition.partition < topic.partitions):
        return []
    where = (path, partition.topic, carried, partition.partition)
    if topic is None:
        file = "is damaged" if partition.topic in damaged else "is gone"
        return [Stray(StrayKind.DIRECTORY, f"a partition of topic {partition.topic}, whose file {file}", *where)]
    if carried == topic.id:
        return [Stray(StrayKind.DIRECTORY, f"the topic has only {topic.partitions} partitions", *where)]
    if carried is None:
        return [Stray(StrayKind.METADATA, "partition.metadata is missing or damaged", *where)]
    return [Stray(StrayKind.METADATA, f"partition.metadata names topic id {carried}, not {topic.id}", *where)]


def _is_id(text: str) -> bool:
    try:
        parse_uuid(text)
    except ValueError:
        return False
    return True
