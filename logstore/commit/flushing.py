"""Flushing: logs become durable, then the staged files that would have redone them go.

Before they go, everything is checked: the bytes in the logs are read back, and an fsync after a failed one is not
believed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from logstore.commit.durable import sync_partition
from logstore.commit.plan import PLAN_FILE, read_plan
from logstore.commit.plan_folder import OWNER_FILE, remove_folder
from logstore.commit.redo import first_damage
from logstore.commit.settling import Settler, unflushed_of
from logstore.directory.ends import TopicEnds
from logstore.directory.locks import FileLock
from logstore.directory.unsynced import is_unsynced
from logstore.errors import CorruptState, DamagedLog, UnknownTopic
from logstore.syncing import MANY_FILES, each_side_by_side, sync_everything
from logstore.topics.registry import Topic

#: a folder that no process owns belongs to a batch write, whose driver process comes and goes
_UNOWNED_MS_MIN = 24 * 3_600_000


class Flusher(Settler):
    """Flushes topics of one open store, and sweeps its staging."""

    def flush(self, topic: Topic, *, wait_ms: int | None = None) -> TopicEnds:
        """Fsync what was appended, record it, and let the staged files of those commits go. Raises LockHeld."""
        with self.store.locks.lease(topic.id, what=f"flush {topic.name}", wait_ms=wait_ms):
            self.store.check_exists(topic)
            ends = self.settle(topic)
            pending = unflushed_of(ends)
            if not pending and ends.flushed_sequence == ends.applied_sequence:
                return ends
            self._make_durable(topic, pending, ends)
            flushed = replace(ends, recovery_points=ends.high_watermarks, flushed_sequence=ends.applied_sequence)
            if not self.store.replace_ends(topic, ends, flushed):
                return self.store.ends(topic)  # the lease was lost meanwhile: its new holder flushes
            rows = self.ledger.commits_after(topic.id, ends.flushed_sequence)
            plans = [row.plan_id for row in rows if not row.void and row.sequence <= flushed.flushed_sequence]
        for plan_id in plans:
            self._drop_plan(plan_id)
        return flushed

    def _make_durable(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> None:
        """Read back and sync what was appended; what is not sound comes from staging once more.

        The redo log goes after this, so everything is checked: the bytes are read back, and an fsync after a failed one
        is not believed.
        """
        unsound: list[int] = []
        # One call for thousands of partitions; the bytes read back below are the ones it wrote.
        together = len(numbers) >= MANY_FILES and sync_everything(self._fs, self.store.layout.logs)

        def sync(number: int) -> None:
            if not self._synced(topic, number, ends, together=together):
                unsound.append(number)

        if together:
            for number in numbers:
                sync(number)
        else:
            each_side_by_side(sync, numbers)
        self._restore(topic, sorted(unsound), ends)
        for number in unsound:
            if not self._synced(topic, number, ends):
                damage = first_damage(self.store, topic, number, ends)
                reason = damage.reason if damage else "its sync failed before"
                raise DamagedLog(
                    f"the staged files could not repair the log: {reason}",
                    partition=topic.partition(number),
                    offset=damage.offset if damage else ends.recovery_points[number],
                    hint="The staged files stay; see `duramen verify`",
                )

    def _synced(self, topic: Topic, number: int, ends: TopicEnds, *, together: bool = False) -> bool:
        """Fsync the partition; False, with nothing synced, where what would be synced is not what was committed.

        `together`: the whole file system was synced, and only errors are asked for.
        """
        state_path = self.store.layout.partition_state(topic.id, number)
        if is_unsynced(self._fs, state_path) or first_damage(self.store, topic, number, ends) is not None:
            return False
        sync_partition(self.store, topic, number, ends.recovery_points[number], together=together)
        return True

    def _drop_plan(self, plan_id: str) -> None:
        """Remove a plan's staging once all its topics are flushed, or gone."""
        folder = self.store.layout.plan(plan_id)
        try:
            plan = read_plan(self._fs, folder, limits=self.store.limits)
        except FileNotFoundError:
            return
        for topic_plan in plan.topics:
            try:
                topic = self.store.topic(topic_plan.topic)
            except UnknownTopic:
                topic = None
            if topic is None or topic.id != topic_plan.topic_id:
                if not self.store.is_gone(topic_plan.topic_id):
                    return  # its file is lost, not the topic
            elif self.store.ends(topic).flushed_sequence < topic_plan.sequence:
                return
        remove_folder(self.store, folder)

    def sweep(self) -> list[str]:
        """Remove staging that no commit names and no process is filling; returns the plan ids."""
        removed = []
        for name in self._fs.listdir(self.store.layout.staging):
            plan_id, dash, kind = name.partition("-")
            if not dash or kind != "plan":
                continue
            folder = self.store.layout.plan(plan_id)
            lock = FileLock(self._fs, os.path.join(folder, OWNER_FILE))
            try:
                owned = self._fs.exists(lock.path)
                if not owned and self._fs.stat(folder).mtime_ms > self.store.clock.now_ms() - _UNOWNED_MS_MIN:
                    continue
                if not lock.try_acquire():
                    continue
            except FileNotFoundError:
                continue
            try:
                if any(not row.void for row in self.ledger.find_plan(plan_id)):
                    self._drop_plan(plan_id)
                elif not self._may_be_committed(folder):
                    remove_folder(self.store, folder)
                    removed.append(plan_id)
            finally:
                lock.release()
        return removed

    def _may_be_committed(self, folder: str) -> bool:
        """Whether a plan that no commit names may be one that the ledger has lost: the logs are ahead of the ledger."""
        if not self._fs.exists(os.path.join(folder, PLAN_FILE)):
            return False  # no commit was ever tried
        for name in self.store.topic_names():
            try:
                topic = self.store.topic(name)
                if self.store.ends(topic).applied_sequence > self.ledger.sequence(topic.id):
                    return True
            except (UnknownTopic, CorruptState):
                return True  # nothing is certain before it is recovered
        return False
