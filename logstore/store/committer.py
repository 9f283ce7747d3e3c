"""The commit path: staged batches become part of the logs, exactly once.

    lease → settle → plan (fsynced) → commit (one ledger transaction: the decision) → append → publish → flush

Nothing undecided is ever in a log. Whatever a dead process left is finished by the next one that takes the lease
(`settle`), because a committed plan gives the same bytes whenever it is applied. `docs/protocols.md` has the crash
points.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from logstore.config import format_value
from logstore.errors import (
    AppendTooLarge,
    AppendUnfinished,
    BufferLimit,
    CommitConflict,
    CommitUnknown,
    CorruptBatch,
    CorruptIndex,
    CorruptState,
    DamagedLog,
    DiskFull,
    LedgerError,
    LockHeld,
    MissingBatches,
    TopicChanged,
    UnappliablePlan,
    UnknownTopic,
    is_disk_full,
)
from logstore.files import MANY_FILES, check_written, each_side_by_side, read_whole, sync_everything
from logstore.ledger import AppProgress, CommitRequest, CommitRow, Ledger, TopicCommit
from logstore.ledger.table import REBUILT
from logstore.partition.checkpoint import partition_metadata
from logstore.partition.state import read_state, segments_max
from logstore.partition.unsynced import is_unsynced, marking_unsynced
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, PARTITION_METADATA, SEGMENT_KINDS, FileKind, file_name
from logstore.store.apply import apply_partitions, numbers_of
from logstore.store.apps import AppBatch, is_replay
from logstore.store.ends import JointEnds, TopicEnds, read_applied_sequence
from logstore.store.locks import FileLock
from logstore.store.origin import note_restored, read_origin
from logstore.store.placing import place_partitions
from logstore.store.plan import PLAN_FILE, Plan, TopicPlan, read_plan, write_plan
from logstore.store.redo import committed_plan, cut_short, first_damage, restore_partition, unflushed
from logstore.store.registry import Topic
from logstore.store.staging import StagedFile, TopicTarget
from logstore.store.store import LogStore
from logstore.store.trees import remove_tree

_SEGMENTS_LOOK = 1000  # a batch that makes fewer segments is not looked at
_OWNER_FILE = "owner"
_ROOM_FACTOR = 1.1  # indexes and rounding beside the batches themselves
#: a folder that no process owns belongs to a batch write, whose driver process comes and goes
_UNOWNED_MS_MIN = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did. `replayed`: the batch was in the ledger already and nothing was written again."""

    plan_id: str
    topics: Mapping[str, TopicPlan] = field(default_factory=dict)
    records: int = 0
    bytes: int = 0
    replayed: bool = False
    timings_ms: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    #: rows that went to the dead-letter topic instead; `records` has them, too
    dead_letters: int = 0


#: Where nothing is open any more behind a batch that ends transactions, by partition.
StableOffsets = Callable[[Topic, TopicEnds], Mapping[int, int]]
#: Runs `apply_partition` for partitions of one topic of a plan; the sink spreads large ones over executors.
ApplyMany = Callable[[Plan, Topic, Sequence[int]], None]


class Staging:
    """A plan's folder while it is being filled; locked, so that a sweep leaves it alone. Close it in any case."""

    def __init__(self, store: LogStore, plan_id: str | None = None) -> None:
        """Raises LockHeld when somebody else has the folder of this `plan_id`, DiskFull."""
        self._store = store
        #: from here on a commit may name the folder: it is the redo log, and only `flush` or `sweep` may remove it
        self.decided = False
        while True:
            self.plan_id = plan_id or uuid.uuid4().hex
            self.folder = store.layout.plan(self.plan_id)
            self._lock = FileLock(store.fs, os.path.join(self.folder, _OWNER_FILE))
            try:
                store.fs.mkdir(self.folder)
                if self._lock.try_acquire():
                    return
            except FileNotFoundError:
                pass  # a sweep was faster
            except OSError as error:
                with contextlib.suppress(OSError):
                    store.fs.rmdir(self.folder)
                if is_disk_full(error):
                    raise disk_full(error) from error
                raise
            if plan_id is not None:
                raise LockHeld(f"the staged files of plan {plan_id} are in use", file=self.folder)

    def close(self) -> None:
        """Give the folder up; it is removed unless a commit may name it. Once is enough, twice is fine."""
        if not self._lock.held:
            return
        try:
            if not self.decided:
                with contextlib.suppress(OSError):  # a late task may be writing into it: swept later
                    _remove(self._store, self.folder)
        finally:
            self._lock.release()


class Committer:
    """The commit path of one open store."""

    def __init__(self, store: LogStore) -> None:
        store.check_writable()
        self.store = store
        self._fs = store.fs
        self._is_noted = False
        _check_ledger(store)
        self.ledger = Ledger(store.layout.ledger, fs=store.fs, clock=store.clock)

    # --- before encoding --------------------------------------------------------------------------------------------

    def target(self, name: str) -> TopicTarget:
        """A topic as encoding tasks need it. Raises UnknownTopic, CorruptState."""
        return target_of(self.store, name)

    def check_replay(self, app: AppBatch) -> bool:
        """Whether the batch is committed already. Raises ReplayMismatch when it cannot be this app's next."""
        return self._is_replay(self.ledger.last_batch(app.app_id), app)

    def finish_replay(self, app: AppBatch) -> None:
        """Append and publish what a committed batch may still lack, in all its topics."""
        last = self.ledger.last_batch(app.app_id)
        for row in self.ledger.find_plan(last.plan_id) if last else ():
            if not row.topic_id:
                continue  # an empty batch
            with contextlib.suppress(UnknownTopic):
                topic = self.store.topic(row.topic)
                if topic.id == row.topic_id and self.store.ends(topic).applied_sequence < row.sequence:
                    self.settle_topic(topic)

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(
        self,
        staging: Staging,
        files: Sequence[StagedFile],
        targets: Mapping[str, TopicTarget],
        *,
        app: AppBatch | None = None,
        apply_many: ApplyMany | None = None,
        timings_ms: Mapping[str, int] | None = None,
        engine: str = "local",
        stable_offsets: StableOffsets | None = None,
    ) -> Committed:
        """Decide and append what was staged. `targets` are by topic id, as the encoding tasks saw them.

        Raises TopicChanged (encode again), ReplayMismatch, DiskFull, LockHeld: nothing was changed then. An error of
        the append leaves a committed batch that the next holder of the lease finishes; its message says so.
        `stable_offsets` is asked of each topic once it is settled, under its lease, where the batch ends transactions;
        it may raise, and nothing was changed then.
        """
        try:
            return self._commit(
                staging, files, targets, app, apply_many, dict(timings_ms or {}), engine, stable_offsets
            )
        except OSError as error:
            if is_disk_full(error) and not staging.decided:
                raise disk_full(error) from error
            raise
        finally:
            staging.close()

    def _commit(
        self,
        staging: Staging,
        files: Sequence[StagedFile],
        targets: Mapping[str, TopicTarget],
        app: AppBatch | None,
        apply_many: ApplyMany | None,
        timings: dict[str, int],
        engine: str,
        stable_offsets: StableOffsets | None,
    ) -> Committed:
        written = {count.topic_id for file in files for count in file.counts if count.records}
        if not written:
            return Committed(staging.plan_id) if app is None else self._commit_empty(staging, app, timings, engine)
        with contextlib.ExitStack() as held:
            topics = {topic_id: self._leased(held, targets[topic_id]) for topic_id in sorted(written)}
            began = time.monotonic()
            ends = {topic_id: self.settle(topic) for topic_id, topic in topics.items()}
            # One look for both: the commit happens only if the app is still where this says.
            last = None if app is None else self.ledger.last_batch(app.app_id)
            if app is not None and self._is_replay(last, app):
                return Committed(staging.plan_id, replayed=True)
            for topic_id in {topic_id for file in files for topic_id in file.placed}:
                if topics[topic_id].keyed:  # before the commit: a restore must never trust what no longer holds
                    self.store.registry.replace(replace(topics[topic_id], keyed=False))
            stable = {} if stable_offsets is None else {t.id: stable_offsets(t, ends[t.id]) for t in topics.values()}
            plan = self._plan(staging, files, topics, ends, app, stable)
            self._check_room(plan)
            self._check_segments(plan, files)
            for topic_plan in plan.topics:
                topic = topics[topic_plan.topic_id]
                self._check_whole(topic, list(numbers_of(topic_plan)), ends[topic.id])
            for topic_plan in plan.topics:  # a directory that is not ours must be known before the commit
                self._place(topics[topic_plan.topic_id], numbers_of(topic_plan))
            write_plan(self._fs, staging.folder, plan, limits=self.store.limits)
            self._fs.fsync_dir(self.store.layout.staging)
            timings["plan"] = _since(began)

            began = time.monotonic()
            workers = tuple(sorted({file.host for file in files}))
            dead_letters = sum(file.dead_letters for file in files)
            request = CommitRequest(
                plan_id=plan.plan_id,
                topics=tuple(
                    TopicCommit(
                        topic.topic_id,
                        topic.topic,
                        topic.sequence - 1,
                        topic.base_offsets,
                        topic.end_offsets,
                        topic.records,
                        topic.bytes,
                    )
                    for topic in plan.topics
                ),
                app_id=app.app_id if app else None,
                batch_id=app.batch_id if app else None,
                query_id=app.query_id if app else None,
                expected_batch_id=None if last is None else last.batch_id,
                expected_as_of=None if last is None else last.as_of,
                timings_ms=timings,
                workers=workers,
                engine=engine,
                dead_letters=dead_letters,
            )
            self._note_restored()
            self._decide(request, staging)
            timings["commit"] = _since(began)

            began = time.monotonic()
            try:
                # All are appended before the first is published: that one says of the others how far they are.
                for topic_plan in plan.topics:
                    self._apply_mending(plan, topics[topic_plan.topic_id], ends[topic_plan.topic_id], apply_many)
                for at, topic_plan in enumerate(plan.topics):
                    topic = topics[topic_plan.topic_id]
                    self.publish(topic, ends[topic.id], topic_plan, _joint(plan.topics[at + 1 :]))
            except Exception as error:
                raise AppendUnfinished(
                    f"the batch is committed (plan {plan.plan_id}), but appending it failed: {error}",
                    hint="Nothing is lost; the next writer of the topic, or a replay of the batch, finishes it",
                ) from error
            timings["append"] = _since(began)
        return Committed(
            plan.plan_id,
            {topic.topic: topic for topic in plan.topics},
            sum(topic.records for topic in plan.topics),
            sum(topic.bytes for topic in plan.topics),
            timings_ms=timings,
            workers=workers,
            dead_letters=dead_letters,
        )

    def _commit_empty(self, staging: Staging, app: AppBatch, timings: dict[str, int], engine: str) -> Committed:
        """A batch without rows counts too, so that a gap in an app's batches is a loss."""
        began = time.monotonic()
        last = self.ledger.last_batch(app.app_id)
        if self._is_replay(last, app):
            return Committed(staging.plan_id, replayed=True)
        request = CommitRequest(
            plan_id=staging.plan_id,
            topics=(),
            app_id=app.app_id,
            batch_id=app.batch_id,
            query_id=app.query_id,
            expected_batch_id=None if last is None else last.batch_id,
            expected_as_of=None if last is None else last.as_of,
            timings_ms=timings,
            engine=engine,
        )
        self._note_restored()
        self._decide(request, staging)
        staging.decided = False  # there is nothing to apply
        return Committed(staging.plan_id, timings_ms=timings | {"commit": _since(began), "append": 0})

    def _is_replay(self, last: AppProgress | None, app: AppBatch) -> bool:
        """Raises ReplayMismatch, InvalidConfig."""
        try:
            return is_replay(
                last,
                app,
                is_counted=lambda: self.ledger.is_counted(app.app_id),
                are_apps_lost=self.ledger.are_apps_lost,
            )
        except MissingBatches as error:
            origin = None
            with contextlib.suppress(CorruptState):
                origin = read_origin(self._fs, self.store.layout)
            if origin is not None:
                copied = f"The store is a copy of {origin.source}, taken at {origin.taken_text}"
                error.with_hint(f"{copied}. {error.hint}")
            raise

    def _note_restored(self) -> None:
        if not self._is_noted:
            note_restored(self._fs, self.store.layout, now_ms=self.store.clock.now_ms())
            self._is_noted = True

    def _decide(self, request: CommitRequest, staging: Staging) -> None:
        """The commit point. An unknown outcome is made known before anything else happens."""
        staging.decided = True
        try:
            self.ledger.commit(request)
        except (CommitConflict, OSError):  # the ledger says of both that nothing happened
            staging.decided = False
            raise
        except CommitUnknown as error:
            if self.ledger.resolve(request) is None:
                staging.decided = False
                raise CommitConflict(
                    f"the commit of plan {request.plan_id} failed and is ruled out for good: {error}",
                    hint="Nothing was written; run the batch again",
                ) from error

    def _leased(self, held: contextlib.ExitStack, target: TopicTarget) -> Topic:
        held.enter_context(self.store.locks.lease(target.id, what=f"append to {target.name}"))
        try:
            topic = self.store.topic(target.name)
        except UnknownTopic as error:
            raise TopicChanged(f"topic {target.name} was deleted meanwhile") from error
        if topic.id != target.id or topic.config_version != target.config_version:
            raise TopicChanged(
                f"topic {target.name} was altered while its batch was encoded", hint="The batch is encoded again"
            )
        return topic

    def _plan(
        self,
        staging: Staging,
        files: Sequence[StagedFile],
        topics: Mapping[str, Topic],
        ends: Mapping[str, TopicEnds],
        app: AppBatch | None,
        stable_offsets: Mapping[str, Mapping[int, int]],
    ) -> Plan:
        records: dict[str, list[int]] = {topic.id: [0] * topic.partitions for topic in topics.values()}
        sizes = dict.fromkeys(topics, 0)
        for file in files:
            for count in file.counts:
                records[count.topic_id][count.partition] += count.records
                sizes[count.topic_id] += count.bytes
        plans = []
        for topic_id, topic in topics.items():
            bases = ends[topic_id].high_watermarks
            settings = self.store.topic_settings(topic)
            plans.append(
                TopicPlan(
                    topic.name,
                    topic_id,
                    topic.partitions,
                    topic.config_version,
                    {name: format_value(one.value) for name, one in settings.items()},
                    ends[topic_id].applied_sequence + 1,
                    bases,
                    tuple(base + more for base, more in zip(bases, records[topic_id], strict=True)),
                    sum(records[topic_id]),
                    sizes[topic_id],
                    dict(stable_offsets.get(topic_id, {})),
                )
            )
        names = tuple(file.name for file in files if file.records)
        return Plan(
            staging.plan_id,
            self.store.clock.now_ms(),
            names,
            tuple(plans),
            app_id=app.app_id if app else None,
            batch_id=app.batch_id if app else None,
            query_id=app.query_id if app else None,
        )

    def _check_room(self, plan: Plan) -> None:
        needed = int(sum(topic.bytes for topic in plan.topics) * _ROOM_FACTOR)
        available = self.store.free_bytes()
        if available is not None and needed > available:
            raise DiskFull(
                f"the batch needs about {needed} bytes, {available} are free",
                file=self.store.layout.logs,
                hint="Nothing was committed; make room and run the batch again",
            )

    def _check_segments(self, plan: Plan, files: Sequence[StagedFile]) -> None:
        """A segment list that no state file holds must not come of it."""
        bytes_of: dict[tuple[str, int], int] = {}
        for count in (count for file in files for count in file.counts):
            key = (count.topic_id, count.partition)
            bytes_of[key] = bytes_of.get(key, 0) + count.bytes
        segment_bytes = {topic.topic_id: topic.log_config().segment_bytes for topic in plan.topics}
        for (topic_id, number), size in bytes_of.items():
            segments = 2 * size // segment_bytes[topic_id] + 1  # two neighbours hold one's worth at least
            if segments < _SEGMENTS_LOOK:
                continue
            path = self.store.layout.partition_state(topic_id, number)
            state = read_state(self._fs, path, limits=self.store.limits)
            most = segments_max(self.store.limits)
            if segments + len(state.segments if state else ()) > most:
                raise AppendTooLarge(
                    f"about {segments} segments of {segment_bytes[topic_id]} bytes would come of the batch; "
                    f"a partition has at most {most}",
                    partition=f"partition {number}",
                    hint="Raise segment.bytes of the topic, or send smaller batches",
                )

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
                if _is_unflushed(ends, number) and first_damage(self.store, topic, number, ends) is not None
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

    # --- settle -----------------------------------------------------------------------------------------------------

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
        return _joint(reached.values())

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

    def _check_whole(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> None:
        """Before a commit: logs that lost bytes since they were appended to get them back from staging.

        Raises DamagedLog where they were flushed, so that nothing is committed behind a hole.
        """
        short = cut_short(self.store, topic, numbers, ends)
        if not short:
            return
        self._restore(topic, [number for number in short if _is_unflushed(ends, number)], ends)
        for number in cut_short(self.store, topic, short, ends):
            raise DamagedLog(
                f"the log is shorter than what was flushed of it, up to offset {ends.recovery_points[number]}",
                partition=topic.partition(number),
                hint="Run `duramen recover`",
            )

    # --- flush and sweep --------------------------------------------------------------------------------------------

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
                return self.store.ends(topic)  # the lease was lost meanwhile: whoever has it flushes
            rows = self.ledger.commits_after(topic.id, ends.flushed_sequence)
            plans = [row.plan_id for row in rows if not row.void and row.sequence <= flushed.flushed_sequence]
        for plan_id in plans:
            self._drop_plan(plan_id)
        return flushed

    def _make_durable(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> None:
        """Read back and sync what was appended; what is not sound comes from staging once more.

        The redo log goes after this, so nothing is taken on trust: neither the bytes in the logs, nor an fsync that
        comes after one that failed.
        """
        unsound: list[int] = []
        # One call for thousands of partitions; what is read back afterwards is what it wrote.
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
                raise DamagedLog(
                    f"the staged files did not mend the log: {damage.reason if damage else 'its sync failed before'}",
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
        self._sync(topic, number, ends.recovery_points[number], state_path, together)
        return True

    def _sync(self, topic: Topic, number: int, recovery_point: int, state_path: str, together: bool) -> None:
        directory = self.store.layout.partition(topic.partition(number))
        bases = [segment.base_offset for segment in self.store.partition_state(topic, number).segments]
        for at, base in enumerate(bases):
            if at + 1 < len(bases) and bases[at + 1] <= recovery_point:
                continue
            for kind in (*SEGMENT_KINDS, FileKind.SNAPSHOT):
                self._sync_file(os.path.join(directory, file_name(base, kind)), state_path, together)
        # the first append does not wait for it
        self._sync_file(os.path.join(directory, LEADER_EPOCH_CHECKPOINT), state_path, together)
        if not together:
            with marking_unsynced(self._fs, state_path):
                self._fs.fsync_dir(directory)

    def _sync_file(self, path: str, state_path: str, together: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            if together:
                with marking_unsynced(self._fs, state_path), contextlib.suppress(FileNotFoundError):
                    check_written(self._fs, path)
                return
            file = self._fs.open(path)
            try:
                with marking_unsynced(self._fs, state_path):
                    file.fsync()
            finally:
                file.close()

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
        _remove(self.store, folder)

    def sweep(self) -> list[str]:
        """Remove staging that no commit names and nobody is filling; returns the plan ids."""
        removed = []
        for name in self._fs.listdir(self.store.layout.staging):
            plan_id, dash, kind = name.partition("-")
            if not dash or kind != "plan":
                continue
            folder = self.store.layout.plan(plan_id)
            lock = FileLock(self._fs, os.path.join(folder, _OWNER_FILE))
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
                    _remove(self.store, folder)
                    removed.append(plan_id)
            finally:
                lock.release()
        return removed

    def _may_be_committed(self, folder: str) -> bool:
        """Whether a plan that no commit names may be one that the ledger has lost: the logs are ahead of the ledger."""
        if not self._fs.exists(os.path.join(folder, PLAN_FILE)):
            return False  # it was never decided about
        for name in self.store.topic_names():
            try:
                topic = self.store.topic(name)
                if self.store.ends(topic).applied_sequence > self.ledger.sequence(topic.id):
                    return True
            except (UnknownTopic, CorruptState):
                return True  # nothing is certain before it is recovered
        return False


def target_of(store: LogStore, name: str) -> TopicTarget:
    """A topic as encoding tasks need it. Raises UnknownTopic, CorruptState."""
    topic = store.topic(name)
    return TopicTarget(
        topic.name,
        topic.id,
        topic.partitions,
        store.log_config(topic),
        topic.config_version,
        store.limits.written_batch_bytes,
    )


def _check_ledger(store: LogStore) -> None:
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


def _is_unflushed(ends: TopicEnds, number: int) -> bool:
    return ends.recovery_points[number] < ends.high_watermarks[number]


def unflushed_of(ends: TopicEnds) -> list[int]:
    """Partitions with published records that may not be on disk."""
    pairs = zip(ends.recovery_points, ends.high_watermarks, strict=True)
    return [number for number, (flushed, published) in enumerate(pairs) if flushed < published]


def _joint(plans: Iterable[TopicPlan]) -> dict[str, JointEnds]:
    return {plan.topic_id: JointEnds(plan.sequence, plan.end_offsets) for plan in plans}


def _remove(store: LogStore, folder: str) -> None:
    """Out of sight in one step, then gone; what a crash leaves of it, the store's own sweep takes."""
    grave = store.layout.work("delete")
    with contextlib.suppress(FileNotFoundError):  # somebody else was faster
        store.fs.rename(folder, grave)
        remove_tree(store.fs, grave)


def disk_full(error: OSError) -> DiskFull:
    return DiskFull(
        f"the disk is full: {error}",
        file=error.filename,
        hint="Nothing was committed; make room and run the batch again",
    )


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)
