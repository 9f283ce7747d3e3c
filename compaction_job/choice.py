"""Which partitions a job is for: all, those of some topics, or some of those."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from logstore.compaction.planning import compacted_partitions
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class Choice:
    """`topics` may name the partitions of each; `partitions` are those of every topic. None: all."""

    topics: Sequence[str] | Mapping[str, Collection[int]] | None = None
    partitions: Collection[int] | None = None

    def has(self, topic: str, number: int) -> bool:
        """Whether a partition of a topic that was asked for was asked for itself."""
        named = self.topics if isinstance(self.topics, Mapping) else {}
        return (self.partitions is None or number in self.partitions) and (topic not in named or number in named[topic])

    @property
    def names(self) -> list[str] | None:
        return None if self.topics is None else list(self.topics)

    def topics_of(self, store: ReadableStore) -> list[Topic]:
        """Raises UnknownTopic."""
        return store.topics() if self.topics is None else [store.topic(name) for name in self.topics]

    def compacted(self, store: ReadableStore) -> list[tuple[Topic, int]]:
        """The partitions of compacted topics. Raises UnknownTopic, NotCompacted."""
        found = compacted_partitions(store, self.names)
        return [(topic, number) for topic, number in found if self.has(topic.name, number)]
