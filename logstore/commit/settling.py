"""Settling a topic: what was committed and not appended, or lost from a log since, is appended and published.

Whoever holds the topic's lease settles it first. Applying a plan twice gives the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from logstore.commit.apply import apply_partitions, numbers_of
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.redo import committed_plan, first_damage, restore_partition, unflushed
from logstore.directory.checkpoint import partition_metadata
from logstore.directory.ends import JointEnds, TopicEnds, read_applied_sequence
from logstore.errors import (
    AppendTooLarge,
    BufferLimit,
    CorruptBatch,
    CorruptIndex,
    CorruptState,
    DamagedLog,
    LedgerError,
    LockHeld,
    UnappliablePlan,
    UnknownTopic,
)
from logstore.files import read_whole
from logstore.ledger import CommitRow
from logstore.ledger.table import REBUILT
from logstore.segment.names import PARTITION_METADATA
from logstore.topics.opened import OpenStore
from logstore.topics.placing import place_partitions
from logstore.topics.registry import Topic

#: Runs `apply_partition` for partitions of one topic of a plan; the sink spreads large ones over executors.
ApplyMany = Callable[[Plan, Topic, Sequence[int]], None]


class Settler:
    """Finishes commits of one open store."""

    def __init__(self, store: OpenStore) -> None:
        store.check_writable()
        self.store = store
        self._fs = store.fs
        _check_ledger(store)
        self.ledger = store.ledger()

    def settle_topic(self, topic: Topic) -> TopicEnds:
        """Settle under the topic's lease. Raises LockHeld, UnknownTopic, DamagedLog."""
        with self.store.locks.lease(topic.id, what=f"settle {topic.name}"):
            self.store.check_exists(topic)
            return self.settle(topic)

    def settle(self, topic: Topic) -> TopicEnds:
        """Finish what others committed and did not append; the caller holds the topic's lease.

        After the machine was started anew, what was not flushed is checked first, and plans are applied again from the
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
            self._apply_mending(plan, topic, ends, None, placed=False)
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
                    self._apply(plan, topic, None)
                    plans.append(plan)
            return plans

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

    # --- append and publish -----------------------------------------------------------------------------------------

    def _apply(self, plan: Plan, topic: Topic, apply_many: ApplyMany | None, *, placed: bool = False) -> None:
        topic_plan = plan.topic(topic.id)
        assert topic_plan is not None
        numbers = list(numbers_of(topic_plan))
        if not placed:
            self._place(topic, numbers)
        if apply_many is not None:
            apply_many(plan, topic, numbers)
        else:
            apply_partitions(self.store, plan, topic, numbers)

    def _apply_mending(
        self, plan: Plan, topic: Topic, ends: TopicEnds, apply_many: ApplyMany | None, *, placed: bool = True
    ) -> None:
        """Apply; where an append finds that the log behind it lost unflushed bytes, they come from staging first."""
        try:
            self._apply(plan, topic, apply_many, placed=placed)
        except (CorruptBatch, CorruptIndex, DamagedLog):
            topic_plan = plan.topic(topic.id)
            assert topic_plan is not None
            damaged = [
                number
                for number in numbers_of(topic_plan)
                if is_unflushed(ends, number) and first_damage(self.store, topic, number, ends) is not None
            ]
            if not damaged:
                raise
            self._restore(topic, damaged, ends)
            self._apply(plan, topic, apply_many, placed=placed)

    def _place(self, topic: Topic, numbers: Iterable[int]) -> None:
        """Make directories that are missing. Who was appended to in this boot, and says whose it is, has one."""
        numbers = list(numbers)
        with self.store.tails(topic) as tails:
            unknown = set(tails.not_of_this_boot(numbers))
        wanted = [number for number in numbers if number in unknown or not self._is_marked(topic, number)]
        place_partitions(self.store, topic, wanted, wait_ms=0)

    def _is_marked(self, topic: Topic, number: int) -> bool:
        path = os.path.join(self.store.layout.partition(topic.partition(number)), PARTITION_METADATA)
        mark = partition_metadata(topic.id)
        try:
            return read_whole(self._fs, path, limit=len(mark)) == mark
        except OSError:  # whatever it is: the long way says
            return False

    def publish(
        self, topic: Topic, ends: TopicEnds, plan: TopicPlan, joint: Mapping[str, JointEnds] | None = None
    ) -> TopicEnds:
        """Readers see the batch from here on; who reads several topics, in those of `joint` too."""
        while True:
            published = replace(
                ends.advanced(plan.end_offsets, plan.sequence, plan.stable_offsets),
                joint={**self._still_behind(ends.joint), **(joint or {})},
            )
            if self.store.replace_ends(topic, ends, published):
                return published
            ends = self.store.ends(topic)  # the lease was lost meanwhile
            if ends.applied_sequence >= plan.sequence:
                return ends  # another has published this, and perhaps more

    def _still_behind(self, joint: Mapping[str, JointEnds]) -> dict[str, JointEnds]:
        """What must still be said of other topics: they are not published that far themselves."""
        behind = {}
        for topic_id, told in joint.items():
            applied: int | None = 0
            with contextlib.suppress(CorruptState):
                applied = read_applied_sequence(self._fs, self.store.layout.ends(topic_id), limits=self.store.limits)
            if applied is not None and applied < told.sequence:
                behind[topic_id] = told
        return behind


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
