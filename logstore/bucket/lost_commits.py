"""Commits of the ledger that are gone or damaged, made again of what the rest of the store tells.

The commits behind a lost one say which sequences and offsets of a topic are missing. A plan lies in the bucket for each
batch, under a name that nobody else has, and was put before its commit; so one that fills exactly what is missing was
committed there. One that fits a topic without later commits is believed only if no other plan could have been meant. A
plan whose staged objects or whose batch another commit names was an attempt that did not succeed.

What no plan fills becomes a row of a plan that nobody has: its offsets are taken, and `recover` seals the log behind
them. Pure rules; `ledger_mending` looks for the evidence and writes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from logstore.bucket.keys import lost_plan_key
from logstore.bucket.rows import NO_TOPIC, Kind, LedgerView, PlanRef, TopicRow, batch_row, unkeyed
from logstore.commit.plan import Plan, TopicPlan
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan object, whoever put it."""

    ref: PlanRef
    plan: Plan
    modified_ms: int

    @property
    def batch(self) -> tuple[str | None, int | None]:
        return self.plan.app_id, self.plan.batch_id


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a definition, as `topics/NAME` has it."""

    topic: Topic
    ended: bool
    #: not before this version of the ledger
    version: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Neighbouring commits that cannot be read, and what a damaged one still says to Delta's readers."""

    first: int
    last: int
    topics: Mapping[str, int] = field(default_factory=dict)
    apps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What may tell of lost commits."""

    plans: Sequence[FoundPlan] = ()
    copies: Sequence[Copy] = ()
    #: of topics that live: up to where each partition is sealed
    sealed: Mapping[str, Sequence[int]] = field(default_factory=dict)


def bring_back(view: LedgerView, hole: Hole, later: Sequence[TopicRow], evidence: Evidence) -> list[TopicRow]:
    """The rows of the commits of `hole`. `view` is of the version before it, `later` has every row known behind it."""
    return _Bridge(view, hole, later, evidence).rows()


class _Bridge:
    def __init__(self, view: LedgerView, hole: Hole, later: Sequence[TopicRow], evidence: Evidence) -> None:
        self._hole = hole
        self._evidence = evidence
        self._apps_later = {row.app_id for row in later}
        #: each topic's newest row on this side, and its first one on the other
        self._newest = {row.topic_id: row for row in view.rows if row.topic_id != NO_TOPIC}
        self._next: dict[str, TopicRow] = {}
        for row in later:
            if row.topic_id != NO_TOPIC:
                self._next.setdefault(row.topic_id, row)
        self._topics = dict(view.definitions)
        self._copies = {copy.topic.id: copy for copy in evidence.copies}
        self._plans = _possible(evidence.plans, [*view.rows, *later])
        self._rows: list[TopicRow] = []
        self._left = hole.last - hole.first + 1

    def rows(self) -> list[TopicRow]:
        self._define_new()
        self._take_plans()
        for topic_id, following in self._next.items():
            self._fill(topic_id, following.sequence, following.base_offsets)
        for topic_id in list(self._newest):
            if topic_id not in self._next:
                self._end_open(topic_id)
        self._rows += self._empty_batches()
        return self._rows

    def _add(self, row: TopicRow) -> None:
        self._rows.append(row)
        self._newest[row.topic_id] = row
        if row.definition is not None:
            self._topics[row.topic_id] = row.definition

    # --- topics -------------------------------------------------------------------------------------------------

    def _define_new(self) -> None:
        """Topics that were created in the hole."""
        created = {topic_id for topic_id, row in self._next.items() if row.sequence > 1} - set(self._newest)
        created |= {
            copy.topic.id
            for copy in self._evidence.copies
            if copy.version >= self._hole.first and not copy.ended and copy.topic.id not in self._next
        } - set(self._newest)
        for topic_id in sorted(created):
            topic = self._definition(topic_id)
            # One that was imported began with what it brought.
            following, ends = self._next.get(topic_id), self._sealed(topic_id, (0,) * topic.partitions)
            if following is not None:
                is_next = following.sequence == 2
                ends = following.base_offsets if is_next else tuple(map(min, ends, following.base_offsets))
            self._add(
                TopicRow(
                    topic_id, 1, Kind.DEFINED, topic.config_version, ends, ends, topic.created_ms, definition=topic
                )
            )

    def _sealed(self, topic_id: str, ends: Sequence[int]) -> tuple[int, ...]:
        """`ends`, or where the partitions are sealed beyond them."""
        known = self._evidence.sealed.get(topic_id, ())
        return tuple(max(end, *known[number : number + 1], 0) for number, end in enumerate(ends))

    def _definition(self, topic_id: str) -> Topic:
        """By its copy, else by a plan; else it comes back with its settings unknown."""
        following = self._next.get(topic_id)
        copy = self._copies.get(topic_id)
        if copy is not None and (following is None or copy.topic.config_version <= following.config_version):
            return copy.topic
        partitions = len(following.base_offsets) if following is not None else 1
        version, clock_ms = (1, 0) if following is None else (following.config_version, following.clock_ms)
        told = next((t for each in self._plans for t in each.plan.topics if t.topic_id == topic_id), None)
        name = copy.topic.name if copy is not None else told.topic if told else f"recovered-{topic_id[:8]}"
        return Topic(name, topic_id, partitions, {}, version, clock_ms, settings_unknown=True)

    # --- plans --------------------------------------------------------------------------------------------------

    def _take_plans(self) -> None:
        """One after the other: each gives what the next has to fit."""
        while fitting := [each for each in self._plans if self._fits(each.plan)]:
            sure = [each for each in fitting if self._is_sure(each)]
            if not sure:
                # A commit a plan, and none that contradicts another.
                slots = [topic.topic_id for each in fitting for topic in each.plan.topics]
                if len(slots) != len(set(slots)) or len(fitting) > self._unexplained():
                    return
            self._take((sure or fitting)[0])

    def _unexplained(self) -> int:
        """Commits of the hole of which nothing is known yet."""
        missing = [row.sequence - 1 - self._newest[i].sequence for i, row in self._next.items() if i in self._newest]
        return self._left - max([0, *missing])

    def _fits(self, plan: Plan) -> bool:
        return bool(plan.topics) and all(self._fits_topic(topic) for topic in plan.topics)

    def _fits_topic(self, topic: TopicPlan) -> bool:
        newest, following = self._newest.get(topic.topic_id), self._next.get(topic.topic_id)
        if newest is None or newest.kind is Kind.ENDED or topic.stable_offsets:
            return False
        if topic.sequence != newest.sequence + 1 or topic.base_offsets != newest.end_offsets:
            return False
        if following is None:
            return True
        if topic.sequence == following.sequence - 1:
            return topic.end_offsets == following.base_offsets
        return topic.sequence < following.sequence and _within(topic.end_offsets, following.base_offsets)

    def _is_sure(self, found: FoundPlan) -> bool:
        """Whether something but the plan itself tells of it, and of no other."""
        app_id, batch_id = found.batch
        if app_id is not None and self._hole.apps.get(app_id) == batch_id:
            return True
        for topic in found.plan.topics:
            following = self._next.get(topic.topic_id)
            rivals = [
                each
                for each in self._plans
                if each is not found and (t := each.plan.topic(topic.topic_id)) is not None and self._fits_topic(t)
            ]
            is_told = following is not None or self._hole.topics.get(topic.topic_id) == topic.sequence
            if is_told and not rivals:
                return True
        return False

    def _take(self, found: FoundPlan) -> None:
        plan = found.plan
        for topic in plan.topics:
            self._add(replace(batch_row(plan, topic, found.ref), definition=self._unkeyed(topic.topic_id)))
        self._left -= 1
        self._plans = [each for each in self._plans if each is not found and each.plan.plan_id != plan.plan_id]

    # --- what nothing tells of ----------------------------------------------------------------------------------

    def _fill(self, topic_id: str, sequence: int, ends: Sequence[int]) -> None:
        """Rows up to below `sequence`, which end at `ends`."""
        newest = self._newest.get(topic_id)
        if newest is None:
            return  # it was created behind the hole
        topic = self._topics.get(topic_id)
        new = len(ends) - len(newest.end_offsets)
        if new > 0 and topic is not None and newest.sequence + 1 < sequence:
            newest = self._alter(newest, replace(topic, partitions=len(ends)))
        if newest.end_offsets != tuple(ends) and newest.sequence + 2 < sequence:
            # A seal takes whole commits, so one ended where it ended.
            newest = self._lose(newest, tuple(map(min, self._sealed(topic_id, newest.end_offsets), ends)))
        if newest.end_offsets != tuple(ends) and newest.sequence + 1 < sequence:
            newest = self._lose(newest, tuple(ends))
        while newest.sequence + 1 < sequence and topic is not None:
            copy = self._copies.get(topic_id)
            following = self._next.get(topic_id)
            is_newer = copy is not None and topic.config_version < copy.topic.config_version
            if copy is not None and is_newer and following is not None:
                is_newer = copy.topic.config_version <= following.config_version
            fits = copy is not None and is_newer and copy.topic.partitions == len(newest.end_offsets)
            newest = self._alter(newest, copy.topic if copy is not None and fits else self._topics[topic_id])

    def _end_open(self, topic_id: str) -> None:
        """A topic of which nothing came later: by its manifests, its copy and what damaged commits still say."""
        newest, topic = self._newest[topic_id], self._topics.get(topic_id)
        if newest.kind is Kind.ENDED or topic is None:
            return
        copy = self._copies.get(topic_id)
        # An attempt may have been committed: then its offsets were given away.
        contested = [
            t.end_offsets
            for each in self._plans
            for t in each.plan.topics
            if t.topic_id == topic_id and self._fits_topic(t) and self._unexplained() > 0
        ]
        if copy is not None and topic.config_version < copy.topic.config_version and not copy.ended:
            newest = self._alter(newest, copy.topic)
        newest = self._lose(newest, self._sealed(topic_id, newest.end_offsets))
        ends = newest.end_offsets
        for each in contested:
            ends = tuple(max(end, *each[number : number + 1], 0) for number, end in enumerate(ends))
        newest = self._lose(newest, ends)
        while newest.sequence < self._hole.topics.get(topic_id, 0):
            newest = self._alter(newest, self._topics[topic_id])
        if copy is not None and copy.ended and copy.version >= self._hole.first:
            ends = newest.end_offsets
            self._add(
                replace(
                    newest,
                    sequence=newest.sequence + 1,
                    kind=Kind.ENDED,
                    base_offsets=ends,
                    plan=None,
                    app_id=None,
                    batch_id=None,
                    query_id=None,
                    definition=None,
                    transactions=None,
                )
            )

    def _lose(self, newest: TopicRow, ends: tuple[int, ...]) -> TopicRow:
        """A row for offsets that nobody has; none where there are none."""
        if ends == newest.end_offsets:
            return newest
        sequence = newest.sequence + 1
        ref = PlanRef(lost_plan_key(), 0, 0, ((newest.topic_id, sequence),))
        row = TopicRow(
            newest.topic_id, sequence, Kind.BATCH, newest.config_version, newest.end_offsets, ends, newest.clock_ms, ref
        )
        row = replace(row, definition=self._unkeyed(newest.topic_id))
        self._add(row)
        return row

    def _unkeyed(self, topic_id: str) -> Topic | None:
        """Whether the records were placed by their keys was in the lost commit alone: nothing may rely on it."""
        topic = self._topics.get(topic_id)
        return None if topic is None else unkeyed(topic)

    def _alter(self, newest: TopicRow, topic: Topic) -> TopicRow:
        ends = newest.end_offsets + (0,) * (topic.partitions - len(newest.end_offsets))
        version = max(newest.config_version, topic.config_version)
        row = TopicRow(
            topic.id,
            newest.sequence + 1,
            Kind.DEFINED,
            version,
            ends,
            ends,
            newest.clock_ms,
            definition=replace(topic, config_version=version),
        )
        self._add(row)
        return row

    def _empty_batches(self) -> list[TopicRow]:
        """Batches without records, which a damaged commit still names."""
        told = {row.app_id for row in self._rows} | self._apps_later
        return [
            TopicRow(NO_TOPIC, 0, Kind.EMPTY, 0, (), (), 0, None, app_id, batch_id)
            for app_id, batch_id in self._hole.apps.items()
            if not self._hole.topics and app_id not in told
        ]


def _possible(plans: Iterable[FoundPlan], rows: Sequence[TopicRow]) -> list[FoundPlan]:
    """The newest attempt of each batch that no known commit has."""
    known = {row.plan.key for row in rows if row.plan is not None}
    batches = {(row.app_id, row.batch_id) for row in rows if row.app_id is not None}
    plans = list(plans)
    taken = {file for each in plans if each.ref.key in known for file in each.plan.files}
    newest: dict[str, FoundPlan] = {}
    for each in sorted(plans, key=lambda each: each.modified_ms):
        if each.ref.key not in known and each.batch not in batches and taken.isdisjoint(each.plan.files):
            newest[each.plan.plan_id] = each
    return list(newest.values())


def _within(ends: Sequence[int], bound: Sequence[int]) -> bool:
    return len(ends) <= len(bound) and all(end <= most for end, most in zip(ends, bound, strict=False))
