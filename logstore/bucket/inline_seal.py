"""Sealing by the writer, above a limit, so that a store nobody maintains stays readable.

Each partition is looked at once in so many commits of its topic, in turn; that takes one request. What goes wrong here
says nothing about the batch: it is committed, and the next one who seals goes on.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from logstore.bucket.freeing import sealed_sequence
from logstore.bucket.rows import concerning
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules, seal_partition
from logstore.errors import DuramenError

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.commit.committer import Committed
    from logstore.commit.plan import TopicPlan

#: commits that a tail has when its writer seals it; maintenance does long before
TAIL_COMMITS = 2048
#: offsets in the ledger's rows of a topic: with many partitions a tail is sealed sooner, or rows would fill the memory
ROW_OFFSETS = 4_000_000
#: commits of a topic between two looks at a partition
LOOK_EVERY = 512


def seal_long_tails(store: BucketStore, done: Committed) -> None:
    """After a commit. Raises nothing of its own."""
    for plan in done.topics.values():
        tail_commits = min(TAIL_COMMITS, max(LOOK_EVERY // 2, ROW_OFFSETS // plan.partitions))
        for number in range(-plan.sequence % LOOK_EVERY, plan.partitions, LOOK_EVERY):
            with contextlib.suppress(DuramenError, OSError):
                _seal_if_long(store, plan.topic, plan.topic_id, number, tail_commits)
        if plan.sequence % LOOK_EVERY == 0:
            with contextlib.suppress(DuramenError, OSError):
                _forget_offsets(store, plan, tail_commits + LOOK_EVERY)


def _seal_if_long(store: BucketStore, name: str, topic_id: str, number: int, tail_commits: int) -> None:
    manifest = store.manifests.read(topic_id, number).manifest
    sealed_offset = manifest.sealed_offset if manifest else 0
    rows = store.ledger.view.topic(topic_id)
    tail = concerning(rows, number, sealed_offset)
    # By the age of the oldest commit, in commits: a partition that gets little holds the rows of all others.
    if not tail or rows[-1].sequence - tail[0].sequence < tail_commits:
        return
    topic = store.topic(name)
    if topic.id == topic_id:
        environment = MaintenanceEnvironment(store.objects, store.manifests, store.shelf)
        source = store.source(topic, number)
        seal_partition(environment, source, topic_id, SealRules(force=True), store.clock.now_ms())


def _forget_offsets(store: BucketStore, plan: TopicPlan, rows_max: int) -> None:
    """Of rows that are sealed everywhere, so that the ledger's summary does not grow with what nobody asks for."""
    rows = store.ledger.view.topic(plan.topic_id)
    if len(rows) > rows_max:
        manifests = [store.manifests.read(plan.topic_id, number).manifest for number in range(plan.partitions)]
        store.ledger.prune({}, {plan.topic_id: sealed_sequence(rows, manifests)})
