"""Settling a topic: what was committed and not appended, or lost from a log since, is appended and published.

Every holder of a topic's lease settles it first. Applying a plan twice gives the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from logstore.commit.apply import Applier
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.redo import committed_plan, first_damage, restore_partition, unflushed
from logstore.directory.ends import JointEnds, TopicEnds
from logstore.errors import (
    AppendTooLarge,
    BufferLimit,
    CorruptBatch,
    CorruptState,
    DamagedLog,
    LedgerError,
    LockHeld,
    UnappliablePlan,
    UnknownTopic,
)
from logstore.ledger import CommitRow
from logstore.ledger.loaded_table import REBUILT
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


class Settler(Applier):
    """Finishes commits of one open store."""

    def __init__(self, store: OpenStore) -> None:
        super().__init__(store)
        _check_ledger(store)
        self.ledger = store.ledger()

    def settle_topic(self, topic: Topic) -> TopicEnds:
        """Settle under the topic's lease. Raises LockHeld, UnknownTopic, DamagedLog."""
        with self.store.locks.lease(topic.id, what=f"settle {topic.name}"):
            self.store.check_exists(topic)
            return self.settle(topic)

    def settle(self, topic: Topic) -> TopicEnds:
        """Finish what others committed and did not append; the caller holds the topic's lease.

        After the machine was restarted, what was not flushed is checked first, and plans are applied again from the
        first damage on. Raises DamagedLog when even that does not bring the log to its committed end.
        """
        ends = self._repaired(topic, self.store.ends(topic))
        sequence = self.ledger.sequence(topic.id)
        if not self._fs.exists(self.store.layout.ends(topic.id)):
            if sequence:
                raise CorruptState(
                    f"{sequence} batches were committed to topic {topic.name}, but nothing says which are applied",
                    file=self.store.layout.ends(topic.id),
                    hint="`duramen recover` finds out from the logs",
                )
            self.store.write_ends(topic, ends)  # so that its absence means a loss from now on
        if sequence == ends.applied_sequence:
            return ends
        for row in self.ledger.commits_after(topic.id, ends.applied_sequence):
            ends = self._finish(topic, ends, row)
        return ends

    def _finish(self, topic: Topic, ends: TopicEnds, row: CommitRow) -> TopicEnds:
        if row.void:
            ends = replace(ends, applied_sequence=row.sequence)
            self.store.write_ends(topic, ends)
            return ends
        plan = committed_plan(self.store, topic, row)
        topic_plan = plan.topic(topic.id)
        assert topic_plan is not None
        try:
            self._apply(plan, topic, ends)
        except (AppendTooLarge, BufferLimit, CorruptBatch, CorruptState, UnappliablePlan) as error:
            raise UnappliablePlan(
                f"commit {row.sequence} of topic {topic.name} cannot be appended: {error}",
                file=self.store.layout.plan(row.plan_id),
                hint="Nothing can be appended to the topic before; `duramen set-aside` appends what can be read of "
                "the batch and records the rest as lost",
            ) from error
        return self.publish(topic, ends, topic_plan, self._append_to_others(topic, plan))

    def _append_to_others(self, topic: Topic, plan: Plan) -> dict[str, JointEnds]:
        """Append what a plan has for other topics, and all that comes before it there; returns how far they are then.

        Their own settling publishes it. Plans that come first may have topics of their own, and so on. A topic that is
        gone or damaged is left out: it must not stop this one.
        """
        reached: dict[str, TopicPlan] = {}
        todo = [each for each in plan.topics if each.topic_id != topic.id]
        while todo:
            other = todo.pop()
            known = reached.get(other.topic_id)
            if known is not None and known.sequence >= other.sequence:
                continue
            try:
                behind = self.store.topic(other.topic)
                if behind.id != other.topic_id:
                    continue
                plans = self._append_up_to(behind, other.sequence)
            except (UnknownTopic, DamagedLog, CorruptState):
                continue
            if plans:
                reached[other.topic_id] = other
            todo += [each for one in plans for each in one.topics if each.topic_id not in (topic.id, other.topic_id)]
        return joint_ends(reached.values())

    def _append_up_to(self, topic: Topic, sequence: int) -> list[Plan]:
        """Append another topic's commits up to `sequence`; returns those that it has not published.

        Its lease is not waited for, or two processes could wait for each other: applying is safe without.
        """
        with contextlib.ExitStack() as held:
            try:
                if not self.store.locks.holds_lease(topic.id):
                    what = f"append to {topic.name}"
                    held.enter_context(self.store.locks.lease(topic.id, what=what, wait_ms=0))
                ends = self._repaired(topic, self.store.ends(topic))
            except LockHeld:
                ends = self.store.ends(topic)
            plans = []
            for row in self.ledger.commits_after(topic.id, ends.applied_sequence):
                if row.sequence <= sequence and not row.void:
                    plan = committed_plan(self.store, topic, row)
                    self._apply(plan, topic)
                    plans.append(plan)
            return plans

    def _mend(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> bool:
        damaged = [
            number
            for number in numbers
            if is_unflushed(ends, number) and first_damage(self.store, topic, number, ends) is not None
        ]
        self._restore(topic, damaged, ends)
        return bool(damaged)

    def _repaired(self, topic: Topic, ends: TopicEnds) -> TopicEnds:
        """After a power cut: take back what is damaged above the recovery points, and apply those plans again."""
        with self.store.tails(topic) as tails:
            damaged = tails.not_of_this_boot(unflushed_of(ends))
        self._restore(topic, damaged, ends)
        return ends

    def _restore(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> None:
        rows = unflushed(self.ledger, topic, ends) if numbers else []
        for number in numbers:
            restore_partition(self.store, topic, number, ends, rows)


def _check_ledger(store: OpenStore) -> None:
    """Raises LedgerError when the ledger is missing where topics say that commits were applied."""
    commits = os.path.join(store.layout.ledger, "commits")
    if store.fs.exists(commits) or store.fs.exists(commits + REBUILT):
        return
    for topic in store.topics():
        applied = store.ends(topic).applied_sequence
        if applied:
            raise LedgerError(
                f"the ledger is missing, but {applied} commits were applied to topic {topic.name}",
                file=store.layout.ledger,
                hint="`duramen recover` rebuilds it from what is left",
            )


def is_unflushed(ends: TopicEnds, number: int) -> bool:
    return ends.recovery_points[number] < ends.high_watermarks[number]


def unflushed_of(ends: TopicEnds) -> list[int]:
    """Partitions with published records that may not be on disk."""
    pairs = zip(ends.recovery_points, ends.high_watermarks, strict=True)
    return [number for number, (flushed, published) in enumerate(pairs) if flushed < published]


def joint_ends(plans: Iterable[TopicPlan]) -> dict[str, JointEnds]:
    return {plan.topic_id: JointEnds(plan.sequence, plan.end_offsets) for plan in plans}
