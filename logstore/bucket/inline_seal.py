"""Sealing by the writer, above a limit, so that a store nobody maintains stays readable.

Each partition is looked at once in so many commits of its topic, in turn; that takes one request. What goes wrong here
says nothing about the batch: it is committed, and the next one who seals goes on.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from logstore.bucket.rows import concerning
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules, seal_partition
from logstore.errors import DuramenError

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.commit.committer import Committed

#: commits that a tail has when its writer seals it; maintenance does long before
TAIL_COMMITS = 2048
#: commits of a topic between two looks at a partition
LOOK_EVERY = 512


def seal_long_tails(store: BucketStore, done: Committed) -> None:
    """After a commit. Raises nothing of its own."""
    for plan in done.topics.values():
        for number in range(-plan.sequence % LOOK_EVERY, plan.partitions, LOOK_EVERY):
            with contextlib.suppress(DuramenError, OSError):
                _seal_if_long(store, plan.topic, plan.topic_id, number)


def _seal_if_long(store: BucketStore, name: str, topic_id: str, number: int) -> None:
    manifest = store.manifests.read(topic_id, number).manifest
    sealed_offset = manifest.sealed_offset if manifest else 0
    if len(concerning(store.ledger.view.topic(topic_id), number, sealed_offset)) < TAIL_COMMITS:
        return
    topic = store.topic(name)
    if topic.id == topic_id:
        environment = MaintenanceEnvironment(store.objects, store.manifests, store.shelf)
        rules = SealRules(tail_commits=TAIL_COMMITS)
        seal_partition(environment, store.source(topic, number), topic_id, rules, store.clock.now_ms())
