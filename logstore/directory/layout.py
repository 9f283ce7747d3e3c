"""Where things lie in a store: every path, built in one place from checked names. Touches no file."""

from __future__ import annotations

import functools
import os
import re
import uuid
from dataclasses import dataclass

from logstore.errors import CorruptState
from logstore.topic import TopicPartition, check_topic_name, parse_uuid

#: a directory whose name is not topic-N makes a broker refuse to start, and print this name
BROKER_GUARD = "use.duramen.export"

#: A short suffix: with the temporary one after it, the longest topic name still fits a file name of 255 bytes. There
#: has to be one, or the temporary file of topic `a` would be the file of topic `a.tmp`.
TOPIC_SUFFIX = ".t"

#: everything a store may hold at its top level
TOP_NAMES = frozenset(
    {
        "logs",
        "state",
        "ledger",
        "staging",
        "topics",
        "locks",
        "history",
        "version",
        "version.tmp",
        "duramen.toml",
        "origin",
        "origin.tmp",
        "unfinished",
    }
)


@dataclass(frozen=True, slots=True)
class PartitionPlace:
    """Where the files of a partition are, and its segment list."""

    directory: str
    partition: TopicPartition
    state_path: str


@dataclass(frozen=True, slots=True)
class Layout:
    root: str

    @property
    def logs(self) -> str:
        return os.path.join(self.root, "logs")

    @property
    def state(self) -> str:
        return os.path.join(self.root, "state")

    @property
    def staging(self) -> str:
        return os.path.join(self.root, "staging")

    @property
    def topics(self) -> str:
        return os.path.join(self.root, "topics")

    @property
    def locks(self) -> str:
        return os.path.join(self.root, "locks")

    @property
    def version(self) -> str:
        return os.path.join(self.root, "version")

    @property
    def unfinished(self) -> str:
        """Exists while a copy is being made: it is not a store yet."""
        return os.path.join(self.root, "unfinished")

    @property
    def origin(self) -> str:
        """In a backup: the store it is a copy of, when it was taken, and since when it has been written to."""
        return os.path.join(self.root, "origin")

    @property
    def settings(self) -> str:
        """The store's own defaults, when it has any."""
        return os.path.join(self.root, "duramen.toml")

    @property
    def directories(self) -> tuple[str, ...]:
        return (self.logs, self.state, self.staging, self.topics, self.locks)

    def topic(self, name: str) -> str:
        return os.path.join(self.topics, check_topic_name(name) + TOPIC_SUFFIX)

    def topic_mark(self, topic_id: str, kind: str) -> str:
        """See `marks`. Topics' own files all end in `TOPIC_SUFFIX`, so that none is taken for a mark."""
        return os.path.join(self.topics, _checked_id(topic_id) + kind)

    def partition(self, partition: TopicPartition) -> str:
        check_topic_name(partition.topic)
        return os.path.join(self.logs, str(partition))

    def topic_state(self, topic_id: str) -> str:
        return os.path.join(self.state, _checked_id(topic_id))

    def topic_copy(self, topic_id: str) -> str:
        return os.path.join(self.topic_state(topic_id), "topic")

    def ends(self, topic_id: str) -> str:
        return os.path.join(self.topic_state(topic_id), "ends")

    def partition_state(self, topic_id: str, partition: int) -> str:
        return os.path.join(self.topic_state(topic_id), str(partition))

    def place(self, topic_id: str, partition: TopicPartition) -> PartitionPlace:
        return PartitionPlace(self.partition(partition), partition, self.partition_state(topic_id, partition.partition))

    def tails(self, topic_id: str) -> str:
        return os.path.join(self.topic_state(topic_id), "tails")

    def history(self, topic_id: str | None) -> str:
        """How the topic grew, or the store as a whole."""
        return os.path.join(self.root if topic_id is None else self.topic_state(topic_id), "history")

    def plan(self, plan_id: str) -> str:
        """The folder of a plan's staged files."""
        if not re.fullmatch(r"[0-9a-f]{32}", plan_id):
            raise CorruptState(f"{plan_id[:40]!r} is not a plan id")
        return os.path.join(self.staging, f"{plan_id}-plan")

    @property
    def ledger(self) -> str:
        return os.path.join(self.root, "ledger")

    def work(self, purpose: str) -> str:
        """A new place under `staging/`, on the same file system, for what is later renamed into place, or removed."""
        return os.path.join(self.staging, f"{uuid.uuid4().hex}-{purpose}")


@functools.lru_cache(maxsize=4096)
def _checked_id(topic_id: str) -> str:
    parse_uuid(topic_id)  # ids come from files: never a path
    return topic_id
