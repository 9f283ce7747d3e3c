"""The commit path of a store in a bucket: staged objects become part of the logs by one commit of the ledger.

    replay? → stage and encode → look at the ledger → put the plan → commit to exactly the next version: visible

Nothing is appended afterwards. After a conflict or a lost answer the ledger is read again, and it alone says what has
happened; only then is the batch planned anew, with the staged objects it has. `docs/protocols.md` has each step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from crc32c import crc32c

from logstore.bucket.commit_file import Entry, commit_rows
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import GRACE_MS, check_age
from logstore.bucket.inline_seal import seal_long_tails
from logstore.bucket.judging import Attempt, Verdict, is_next_or_replay, is_settled, judge, plan_clock
from logstore.bucket.keys import new_nonce, plan_key, staged_key
from logstore.bucket.output import ObjectOutput
from logstore.bucket.plan import PlanFile, encode_plan
from logstore.bucket.rows import (
    NO_TOPIC,
    Aborted,
    Kind,
    LedgerView,
    PlanRef,
    TopicRow,
    Transactions,
    batch_row,
    unkeyed,
)
from logstore.clock import Clock
from logstore.commit.apply import ApplyMany
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed, Ending, target_of
from logstore.commit.deciding import plan_of
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.staged_output import Filled
from logstore.commit.staging import StagedFile, TopicTarget
from logstore.errors import (
    CommitConflict,
    CommitUnknown,
    DuramenError,
    MissingBatches,
    TopicChanged,
    UnknownTopic,
)
from logstore.ledger.rows import AppProgress, CommitRow
from logstore.objects.objects import Objects

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_CONFLICTS_MAX = 60
_UNKNOWN_MAX = 3
_WAIT_S, _WAIT_S_MAX = 0.005, 1.0
#: behind a lost answer: the ledger keeps a row for twice as long at least, so one that is not there was not committed
_REMEMBERED_MS = GRACE_MS // 2


class ObjectBatch:
    """Implements `driver.Batch`: the names of a batch's staged objects. What is not committed is swept one day."""

    def __init__(self, objects: Objects, filled: Filled | None = None) -> None:
        self.plan_id = new_nonce() if filled is None else filled.plan_id
        #: since before the first name was made
        self.elapsed = Elapsed() if filled is None else Elapsed.since(filled.since_ms)
        self._objects = objects

    def output(self, task: int = 0) -> ObjectOutput:
        return ObjectOutput(self._objects, staged_key(self.plan_id, task, new_nonce()))

    def outputs(self) -> ObjectOutputs:
        return ObjectOutputs(self._objects, self.plan_id)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ObjectOutputs:
    """Implements `Outputs`: each process opens a connection of its own. Secret options are not pickled."""

    objects: Objects
    plan_id: str

    def check(self) -> None:
        """A process that cannot reach the bucket is told so by its first request."""

    def of(self, plan_id: str) -> ObjectOutputs:
        return replace(self, plan_id=plan_id)

    def open(self, task: int) -> tuple[ObjectOutput, int]:
        return ObjectOutput(self.objects, staged_key(self.plan_id, task, new_nonce())), time.time_ns() // 1_000_000


class BucketCommitter:
    """Implements `driver.Commits`."""

    def __init__(self, store: BucketStore) -> None:
        store.check_writable()
        self.store = store
        self._ledger = store.ledger
        #: by app, what its next ledger row tells of the batch before; see `Committed.for_next_row`
        self.for_next_row: dict[str | None, dict[str, int]] = {}

    @property
    def clock(self) -> Clock:
        return self.store.clock

    def target(self, name: str) -> TopicTarget:
        """A topic as encoding tasks need it. Raises UnknownTopic."""
        return target_of(self.store, name)

    def last_batch(self, app_id: str) -> AppProgress | None:
        return self._ledger.refresh().app(app_id)

    def batches_of(self, app_id: str, count: int) -> list[CommitRow]:
        view, found = self._ledger.refresh(), []
        for version, entry in self._ledger.newest_entries():
            found += [row for row in reversed(commit_rows(entry, version, view)) if row.app_id == app_id]
            if len(found) >= count:
                break
        return found[:count][::-1]

    def check_replay(self, app: AppBatch) -> bool:
        try:
            return is_next_or_replay(self._ledger.refresh(), app)
        except MissingBatches as error:
            origin = self.store.origin()
            raise error if origin is None else error.with_hint(origin.explained(error.hint)) from None

    def finish_replay(self, app: AppBatch) -> None:
        """What is committed is visible."""

    def begin(self, filled: Filled | None = None) -> ObjectBatch:
        return ObjectBatch(self.store.objects, filled)

    def outputs(self, plan_id: str) -> ObjectOutputs:
        return ObjectOutputs(self.store.objects, plan_id)

    def discard(self, plan_id: str) -> None:
        """Only a sweep deletes: whether a commit may still name the objects is not known here."""

    def tidy(self, done: Committed) -> None:
        """What is committed is durable and visible."""

    def finish(self, topic: str) -> None:
        """The same."""

    def commit(
        self,
        staging: ObjectBatch,
        files: Sequence[StagedFile],
        targets: Mapping[str, TopicTarget],
        *,
        app: AppBatch | None = None,
        apply_many: ApplyMany | None = None,
        timings_ms: Mapping[str, int] | None = None,
        engine: str = "local",
        ending: Ending | None = None,
    ) -> Committed:
        """Commit what was staged; visible when this returns. `targets` are by topic id, as the encoding tasks saw them.

        Raises TopicChanged (encode again), ReplayMismatch, CommitConflict, StaleObjects: nothing was committed and
        nothing will be. CommitUnknown: it may have been.
        """
        written = sorted({count.topic_id for file in files for count in file.counts if count.records})
        if not written and app is None:
            return Committed(staging.plan_id)
        versions = {topic_id: targets[topic_id].config_version for topic_id in written}
        details = {
            "plan_id": staging.plan_id,
            "timings_ms": dict(timings_ms or {}),
            "engine": engine,
            "workers": sorted({file.host for file in files}),
            "dead_letters": sum(file.dead_letters for file in files),
        }
        done = _Decision(self, staging, files, Attempt(app, versions), details, ending).made()
        seal_long_tails(self.store, done)
        return done


class _Decision:
    """One batch on its way into the ledger."""

    def __init__(
        self,
        committer: BucketCommitter,
        staging: ObjectBatch,
        files: Sequence[StagedFile],
        attempt: Attempt,
        details: dict[str, object],
        ending: Ending | None,
    ) -> None:
        self._store = committer.store
        self._ledger = committer.store.ledger
        self._staging = staging
        self._files = [file for file in files if file.records]
        self._all_files = files
        self._attempt = attempt
        self._details = details
        self._ending = ending
        #: versions for which a commit was sent and not answered
        self._tried: list[int] = []
        #: since the first of them
        self._in_doubt: Elapsed | None = None
        #: plans of attempts, by their key; of an empty batch the key is empty
        self._plans: dict[str, Plan] = {}
        self._unknown = 0

    def made(self) -> Committed:
        began = time.monotonic()
        wait_s = _WAIT_S
        for _ in range(_CONFLICTS_MAX):
            try:
                done = self._try()
            except CommitConflict:
                time.sleep(wait_s * random.random())
                wait_s = min(2 * wait_s, _WAIT_S_MAX)
            except CommitUnknown:
                self._unknown += 1
                if self._unknown == _UNKNOWN_MAX:
                    raise
            except DuramenError as error:
                raise self._told(error) from error.__cause__
            else:
                return replace(done, timings_ms={**done.timings_ms, "commit": int((time.monotonic() - began) * 1000)})
        raise self._told(
            CommitConflict(
                f"other writers were faster {_CONFLICTS_MAX} times; the batch is not committed", hint="Try again"
            )
        )

    def _told(self, error: DuramenError) -> DuramenError:
        """The error to raise: one that says no may only be raised when no attempt can land any more."""
        no = "The batch is not committed" + (f". {error.hint}" if error.hint else "")
        if not self._tried:
            return error.with_hint(no)
        try:
            view = self._ledger.refresh()
        except DuramenError:
            view = None
        is_remembered = self._in_doubt is None or self._in_doubt.ms() < _REMEMBERED_MS
        if view is not None and is_remembered and is_settled(view, self._tried) and self._found(view) is None:
            return error.with_hint(no)
        return CommitUnknown(
            f"the batch may be committed, or be committed later: {error.what}",
            file=error.file,
            hint="Write it again under the same app_id and batch_id: it is recognised if it is there",
        )

    def _try(self) -> Committed:
        """Look, judge, plan, commit. Raises CommitConflict and CommitUnknown: look again."""
        view = self._ledger.refresh()
        try:
            verdict = judge(view, self._attempt)
        except UnknownTopic as error:
            raise TopicChanged(error.what) from error
        if verdict is Verdict.COMMITTED:
            return self._committed(self._found(view) or "")
        if verdict is Verdict.REPLAYED:
            return Committed(self._staging.plan_id, replayed=True)
        if verdict is Verdict.ENCODE_AGAIN:
            raise TopicChanged("a topic was altered while its batch was encoded", hint="The batch is encoded again")
        if self._in_doubt is not None and self._in_doubt.ms() >= _REMEMBERED_MS:
            raise CommitUnknown("an attempt was not answered, and the ledger may have forgotten it since")
        check_age(self._staging.elapsed.ms())
        rows = self._rows(view)
        plan = self._plans["" if rows[0].plan is None else rows[0].plan.key]
        sizes = {topic.topic_id: topic.bytes for topic in plan.topics}
        entry = Entry(rows, new_nonce(), details={**self._details, "bytes": sizes})
        sent = Elapsed()
        try:
            self._ledger.commit(view, entry)
        except CommitUnknown:
            self._tried.append(view.version + 1)
            self._in_doubt = self._in_doubt or sent
            raise
        return self._committed("" if rows[0].plan is None else rows[0].plan.key)

    def _found(self, view: LedgerView) -> str | None:
        """The plan of ours that is committed."""
        own = set(self._attempt.plans)
        return next((row.plan.key for row in view.rows if row.plan is not None and row.plan.key in own), None)

    def _rows(self, view: LedgerView) -> tuple[TopicRow, ...]:
        """The rows of a new attempt; its plan is put."""
        app = self._attempt.app
        named: tuple[str | None, int | None, str | None]
        named = (None, None, None) if app is None else (app.app_id, app.batch_id, app.query_id)
        if not self._attempt.config_versions:
            plan = self._plans[""] = Plan(self._staging.plan_id, self._store.clock.now_ms(), (), (), *named)
            return (TopicRow(NO_TOPIC, 0, Kind.EMPTY, 0, (), (), plan.now_ms, None, *named),)
        topics = {topic_id: view.definitions[topic_id] for topic_id in self._attempt.config_versions}
        newest = {topic_id: view.newest(topic_id) for topic_id in topics}
        ends = {topic_id: view.ends(row) for topic_id, row in newest.items() if row is not None}
        ending = self._ending
        stable = {} if ending is None else {t.id: ending.stable_offsets(t, ends[t.id]) for t in topics.values()}
        plan = plan_of(self._store, self._staging.plan_id, self._files, topics, ends, app, stable)
        plan = replace(plan, now_ms=plan_clock(plan.now_ms, view, topics))
        ref = self._put(plan)
        placed = {topic_id for file in self._files for topic_id in file.placed}
        return tuple(
            replace(
                batch_row(plan, topic, ref),
                # In the commit itself: a restore must never trust what no longer holds.
                definition=unkeyed(topics[topic.topic_id]) if topic.topic_id in placed else None,
                transactions=None if ending is None else _ended(view, topic, ending),
            )
            for topic in plan.topics
        )

    def _put(self, plan: Plan) -> PlanRef:
        """Under a name that only this attempt has."""
        key = plan_key(plan.plan_id, new_nonce())
        data = encode_plan(plan, [_plan_file(file) for file in self._files], limits=self._store.limits)
        self._store.objects.put(key, [data])
        self._plans[key] = plan
        self._attempt = replace(self._attempt, plans=(*self._attempt.plans, key))
        return PlanRef(key, len(data), crc32c(data), tuple((topic.topic_id, topic.sequence) for topic in plan.topics))

    def _committed(self, key: str) -> Committed:
        plan = self._plans[key]
        timings = self._details["timings_ms"]
        return Committed(
            plan.plan_id,
            {topic.topic: topic for topic in plan.topics},
            sum(topic.records for topic in plan.topics),
            sum(topic.bytes for topic in plan.topics),
            timings_ms={**timings, "append": 0} if isinstance(timings, dict) else {},
            workers=tuple(sorted({file.host for file in self._all_files})),
            dead_letters=sum(file.dead_letters for file in self._all_files),
        )


def _ended(view: LedgerView, topic: TopicPlan, ending: Ending) -> Transactions:
    """Of a marker: what is open behind it, and what it aborts."""
    unstable = dict(view.unstable.get(topic.topic_id, ()))
    aborted = []
    for number, stable in topic.stable_offsets.items():
        aborted.append(Aborted(number, ending.producer_id, ending.first_offset, stable))
        unstable.pop(number, None)
        if stable < topic.end_offsets[number]:
            unstable[number] = stable
    return Transactions(tuple(sorted(unstable.items())), tuple(aborted))


def _plan_file(file: StagedFile) -> PlanFile:
    stored = file.stored
    assert stored is not None
    return PlanFile(file.name, stored.size_bytes, stored.crc, stored.pieces)
