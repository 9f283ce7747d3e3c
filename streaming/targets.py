"""The topics that rows of a write go to."""

from __future__ import annotations

from collections.abc import Iterable

from logstore.commit.committer import target_of
from logstore.commit.staging import TopicTarget
from logstore.errors import InvalidConfig
from logstore.topics.readable import ReadableStore
from streaming.dead_letters import DeadLetters


def dead_letters(target: TopicTarget, topic: str | None, app_id: str | None, batch_id: int | None) -> DeadLetters:
    """Raises InvalidConfig for a topic that could refuse dead letters itself."""
    name = target.name
    if name == topic:
        raise InvalidConfig(f"topic {name} cannot take its own dead letters", hint="Give them a topic of their own")
    if target.config.compact:
        raise InvalidConfig(
            f"the dead-letter topic {name} is compacted; records without key and all but the last of a key would go",
            hint="Create it with cleanup.policy=delete",
        )
    return DeadLetters(target, app_id, batch_id)


def targets_of(
    store: ReadableStore, columns: Iterable[str], topic: str | None, dead_letter_topic: str | None
) -> dict[str, TopicTarget]:
    """The topics rows may go to: the one named, or any of the store when rows name theirs. Raises UnknownTopic."""
    names = store.topic_names() if "topic" in columns else []
    names += [name for name in (topic, dead_letter_topic) if name is not None]
    return {name: target_of(store, name) for name in dict.fromkeys(names)}
