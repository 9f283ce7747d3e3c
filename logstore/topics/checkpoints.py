"""Kafka's four checkpoint files, brought up to date with the state of all partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from logstore.directory.ends import TopicEnds
from logstore.directory.projection import PartitionFacts, checkpoint_entries, write_checkpoints
from logstore.errors import CorruptState
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


def project_checkpoints(store: OpenStore) -> None:
    """Bring Kafka's four checkpoint files up to date with the state; for tools, nothing of ours reads them.

    Every run that changes a store ends with it. A partition whose state cannot be read is left out.
    """
    with store.locks.checkpoint():
        facts: list[PartitionFacts] = []
        for topic in store.topics():
            with contextlib.suppress(CorruptState):
                facts += _topic_facts(store, topic)
        write_checkpoints(store.fs, store.layout.logs, checkpoint_entries(facts))


def _topic_facts(store: OpenStore, topic: Topic) -> Iterator[PartitionFacts]:
    ends, compacted = store.ends(topic), store.log_config(topic).compact
    for number in range(topic.partitions):
        with contextlib.suppress(CorruptState):
            yield _partition_facts(store, topic, number, ends, compacted)


def _partition_facts(store: OpenStore, topic: Topic, number: int, ends: TopicEnds, compacted: bool) -> PartitionFacts:
    state = store.partition_state(topic, number)
    return PartitionFacts(
        compacted=compacted,
        partition=topic.partition(number),
        high_watermark=ends.high_watermarks[number],
        recovery_point=ends.recovery_points[number],
        log_start_offset=state.log_start_offset,
        first_base_offset=state.segments[0].base_offset if state.segments else 0,
        first_dirty_offset=state.first_dirty_offset,
    )
