"""Files no read depends on: the second copy of each topic's definition, and Kafka's checkpoints, for its tools.

They are rebuilt from their sources. One that is missing says nothing: older releases had none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from logstore.directory.checkpoint import read_offset_checkpoint
from logstore.directory.finding import Finding, StoreReport
from logstore.directory.projection import checkpoint_entries
from logstore.errors import CorruptCheckpoint, CorruptState, UnknownTopic
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic, read_definition


def examine_side_files(store: OpenStore) -> StoreReport:
    """Whether they can be read, and are about what they should be. Changes nothing."""
    return StoreReport([finding for _, finding in _damaged_copies(store)] + _damaged_checkpoints(store))


def restore_side_files(store: OpenStore, *, dry_run: bool = False) -> StoreReport:
    """Write damaged copies again; the checkpoints are, where a recovery ends, from what it found."""
    report = StoreReport()
    for topic, finding in _damaged_copies(store):
        report.findings.append(finding)
        done = "would write" if dry_run else "wrote"
        report.actions.append(f"{done} the second copy of {topic.name}'s definition again")
        if not dry_run:
            store.registry.write_copy(topic)
    for finding in _damaged_checkpoints(store):
        report.findings.append(finding)
        name = os.path.basename(str(finding.file))
        report.actions.append(f"{'would make' if dry_run else 'made'} {name} again")
    return report


def _damaged_copies(store: OpenStore) -> Iterator[tuple[Topic, Finding]]:
    for name in store.topic_names():
        try:
            topic = store.topic(name)
        except (UnknownTopic, CorruptState):
            continue  # deleted meanwhile, or reported with the topic
        path = store.layout.topic_copy(topic.id)
        try:
            found = read_definition(store.fs, path)
            if found.id != topic.id:
                yield topic, Finding(f"the second copy of {name}'s definition is of topic id {found.id}", file=path)
        except FileNotFoundError:
            continue
        except CorruptState as error:
            yield topic, Finding(f"the second copy of {name}'s definition: {error.what}", file=path)


def _damaged_checkpoints(store: OpenStore) -> list[Finding]:
    found = []
    for name in checkpoint_entries(()):
        path = os.path.join(store.layout.logs, name)
        try:
            read_offset_checkpoint(store.fs, path, limits=store.limits)
        except CorruptCheckpoint as error:
            found.append(Finding(f"{name} is damaged: {error.what}", file=path))
    return found
