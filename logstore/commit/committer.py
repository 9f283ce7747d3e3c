"""The commit path: staged batches become part of the logs, exactly once.

    lease → settle → plan (fsynced) → commit (one ledger transaction: the decision) → append → publish → flush

`docs/protocols.md` has each step, why it is there, and what is found when a process dies after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from logstore.clock import Clock
from logstore.commit.apply import ApplyMany, numbers_of
from logstore.commit.apps import AppBatch, is_replay
from logstore.commit.deciding import check_room, check_segments, plan_of, request_of
from logstore.commit.flushing import Flusher
from logstore.commit.folder_outputs import FolderOutputs, store_token
from logstore.commit.own_flush import OwnFlush
from logstore.commit.plan import Plan, TopicPlan, write_plan
from logstore.commit.plan_folder import Staging, reporting_full_disk
from logstore.commit.redo import cut_short
from logstore.commit.settling import is_unflushed, joint_ends
from logstore.commit.staged_output import Filled
from logstore.commit.staging import StagedFile, TopicTarget
from logstore.directory.ends import TopicEnds
from logstore.directory.origin import note_restored, read_origin
from logstore.errors import (
    AppendUnfinished,
    CommitConflict,
    CommitUnknown,
    CorruptState,
    DamagedLog,
    MissingBatches,
    TopicChanged,
    UnknownTopic,
)
from logstore.ledger import AppProgress, CommitRequest, CommitRow
from logstore.topics.opened import OpenStore
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


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

    def for_next_row(self, before: Mapping[str, int]) -> dict[str, int]:
        """What the app's next ledger row tells of this batch, whose own was written before its commit and append ended.

        `before` is what this batch's row told; of a batch that came again, how many did in a row.
        """
        if self.replayed:
            return {"replays": before.get("replays", 0) + 1}
        return {f"previous_{name}": self.timings_ms[name] for name in ("commit", "append") if self.timings_ms}


class Ending(Protocol):
    """A batch that is the marker of a transaction."""

    @property
    def producer_id(self) -> int: ...
    @property
    def first_offset(self) -> int: ...

    def stable_offsets(self, topic: Topic, ends: TopicEnds) -> Mapping[int, int]:
        """The last stable offset behind the marker, of its partition; asked once the topic's ends are known.

        Raises UnknownTransaction when others ended it meanwhile.
        """


class Committer(Flusher):
    """The commit path of one open store."""

    def __init__(self, store: OpenStore) -> None:
        super().__init__(store)
        self._is_noted = False
        #: by app, what its next ledger row tells of the batch before; see `Committed.for_next_row`
        self.for_next_row: dict[str | None, dict[str, int]] = {}
        self._own_flush: OwnFlush | None = None

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

    def batches_of(self, app_id: str, count: int) -> list[CommitRow]:
        return self.ledger.commits_of_app(app_id, count)

    @property
    def clock(self) -> Clock:
        return self.store.clock

    def begin(self, filled: Filled | None = None) -> Staging:
        """A folder for staged files. Raises LockHeld when somebody else has the one that was filled, DiskFull."""
        return Staging(self.store, None if filled is None else filled.plan_id)

    def outputs(self, plan_id: str) -> FolderOutputs:
        return FolderOutputs(self.store.path, self.store.layout.plan(plan_id), store_token(self.store))

    def discard(self, plan_id: str) -> None:
        """Remove a plan's folder, unless a commit names it: then the staged files may be all there is of the batch."""
        staging = Staging(self.store, plan_id)
        staging.decided = bool(self.ledger.find_plan(plan_id))
        staging.close()

    def last_batch(self, app_id: str) -> AppProgress | None:
        return self.ledger.last_batch(app_id)

    def tidy(self, done: Committed) -> None:
        """Flush topics that are due."""
        if self._own_flush is None:
            self._own_flush = OwnFlush(self)
        self._own_flush.appended(done)

    def finish(self, topic: str) -> None:
        self.flush(self.store.topic(topic))

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
        ending: Ending | None = None,
    ) -> Committed:
        """Decide and append what was staged. `targets` are by topic id, as the encoding tasks saw them.

        Raises TopicChanged (encode again), ReplayMismatch, DiskFull, LockHeld: nothing was changed then. An error of
        the append leaves a committed batch that the next holder of the lease finishes; its message says so.
        `ending` is asked of its topic once it is settled, under its lease;
        it may raise, and nothing was changed then.
        """
        timings = dict(timings_ms or {})
        written = {count.topic_id for file in files for count in file.counts if count.records}
        with contextlib.closing(staging), reporting_full_disk(staging), contextlib.ExitStack() as held:
            if not written:
                return Committed(staging.plan_id) if app is None else self._commit_empty(staging, app, timings, engine)
            topics = {topic_id: self._leased(held, targets[topic_id]) for topic_id in sorted(written)}
            began = time.monotonic()
            ends = {topic_id: self.settle(topic) for topic_id, topic in topics.items()}
            # Read once for both: the commit happens only if the app is still at this batch.
            last = None if app is None else self.ledger.last_batch(app.app_id)
            if app is not None and self._is_replay(last, app):
                return Committed(staging.plan_id, replayed=True)
            for topic_id in {topic_id for file in files for topic_id in file.placed}:
                if topics[topic_id].keyed:  # before the commit: a restore must never trust what no longer holds
                    self.store.registry.replace(replace(topics[topic_id], keyed=False))
            stable = {} if ending is None else {t.id: ending.stable_offsets(t, ends[t.id]) for t in topics.values()}
            plan = plan_of(self.store, staging.plan_id, files, topics, ends, app, stable)
            self._check_plan(plan, files, topics, ends)
            write_plan(self._fs, staging.folder, plan, limits=self.store.limits)
            self._fs.fsync_dir(self.store.layout.staging)
            timings["plan"] = _since(began)

            began = time.monotonic()
            request = request_of(plan, app, last, timings, engine, files)
            self._note_restored()
            self._decide(request, staging)
            timings["commit"] = _since(began)

            began = time.monotonic()
            self._append(plan, topics, ends, apply_many)
            timings["append"] = _since(began)
        return Committed(
            plan.plan_id,
            {topic.topic: topic for topic in plan.topics},
            sum(topic.records for topic in plan.topics),
            sum(topic.bytes for topic in plan.topics),
            timings_ms=timings,
            workers=request.workers,
            dead_letters=request.dead_letters,
        )

    def _check_plan(
        self, plan: Plan, files: Sequence[StagedFile], topics: Mapping[str, Topic], ends: Mapping[str, TopicEnds]
    ) -> None:
        """What must be known before the commit: that the plan can be appended. Raises DiskFull, DamagedLog and more."""
        check_room(self.store, plan)
        check_segments(self.store, plan, files)
        for topic_plan in plan.topics:
            topic = topics[topic_plan.topic_id]
            self._check_whole(topic, list(numbers_of(topic_plan)), ends[topic.id])
        for topic_plan in plan.topics:  # a directory of another topic
            self._place(topics[topic_plan.topic_id], numbers_of(topic_plan))

    def _append(
        self, plan: Plan, topics: Mapping[str, Topic], ends: Mapping[str, TopicEnds], apply_many: ApplyMany | None
    ) -> None:
        """Append and publish what is committed. Raises AppendUnfinished."""
        try:
            # All are appended before the first is published: its `joint` says how far the others are.
            for topic_plan in plan.topics:
                topic = topics[topic_plan.topic_id]
                self._apply(plan, topic, ends[topic.id], apply_many=apply_many, placed=True)
            for at, topic_plan in enumerate(plan.topics):
                topic = topics[topic_plan.topic_id]
                self.publish(topic, ends[topic.id], topic_plan, joint_ends(plan.topics[at + 1 :]))
        except Exception as error:
            raise AppendUnfinished(
                f"the batch is committed (plan {plan.plan_id}), but appending it failed: {error}",
                hint="Nothing is lost; the next writer of the topic, or a replay of the batch, finishes it",
            ) from error

    def _commit_empty(self, staging: Staging, app: AppBatch, timings: dict[str, int], engine: str) -> Committed:
        """A batch without rows counts too, so that a gap in an app's batches is a loss."""
        began = time.monotonic()
        last = self.ledger.last_batch(app.app_id)
        if self._is_replay(last, app):
            return Committed(staging.plan_id, replayed=True)
        plan = Plan(staging.plan_id, self.store.clock.now_ms(), (), (), app.app_id, app.batch_id, app.query_id)
        request = request_of(plan, app, last, timings, engine, ())
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
                error.with_hint(origin.explained(error.hint))
            raise

    def _note_restored(self) -> None:
        if not self._is_noted:
            note_restored(self._fs, self.store.layout, now_ms=self.store.clock.now_ms())
            self._is_noted = True

    def _decide(self, request: CommitRequest, staging: Staging) -> None:
        """The commit point. An unknown outcome is resolved before anything else happens."""
        staging.decided = True
        try:
            self.ledger.commit(request)
        except (CommitConflict, OSError):  # with either of these nothing was committed
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

    def _check_whole(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> None:
        """Before a commit: logs that lost bytes since they were appended to get them back from staging.

        Raises DamagedLog where they were flushed, so that nothing is committed after a hole.
        """
        short = cut_short(self.store, topic, numbers, ends)
        if not short:
            return
        self._restore(topic, [number for number in short if is_unflushed(ends, number)], ends)
        for number in cut_short(self.store, topic, short, ends):
            raise DamagedLog(
                f"the log ends before offset {ends.recovery_points[number]}, up to which it was flushed",
                partition=topic.partition(number),
                hint="Run `duramen recover`",
            )


def target_of(store: ReadableStore, name: str) -> TopicTarget:
    """A topic as encoding tasks need it. Raises UnknownTopic, CorruptState."""
    topic = store.known_topic(name)  # the commit judges whether it still holds
    return TopicTarget(
        topic.name,
        topic.id,
        topic.partitions,
        store.log_config(topic),
        topic.config_version,
        store.limits.written_batch_bytes,
    )


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)
