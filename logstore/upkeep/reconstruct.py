"""The rule by which a damaged table of commits is made whole again. Pure: it reads and writes nothing.

What is certain stays: rows that a readable commit names. A row or plan that nothing names counts only if its topic says
that this sequence was applied, and if its offsets fit between its neighbours: a batch is acknowledged only after that.
Sequences that were applied and of which nothing is left get a void row, so that they are never used again; the apps
that may have written them are marked unsure, because their last batch is not known.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from logstore.commit.plan import Plan
from logstore.ledger import CommitRow
from logstore.ledger.ledger import APP, APPS_LOST, COUNTED, TOPIC
from logstore.ledger.rows import ENGINE_REBUILT, ENGINE_UNSURE

LOST_PLAN = "lost"


@dataclass(frozen=True, slots=True)
class Applied:
    """What a topic's `ends` say."""

    topic: str
    sequence: int
    high_watermarks: tuple[int, ...]


@dataclass(slots=True)
class Reconstruction:
    rows: list[CommitRow] = field(default_factory=list)
    transactions: dict[str, int] = field(default_factory=dict)
    #: rows that came back from data files or plans
    regained: list[CommitRow] = field(default_factory=list)
    #: topic id -> sequences of which nothing is left
    lost: dict[str, list[int]] = field(default_factory=dict)
    #: the newest row of each app that may be further than the ledger knows
    unsure: list[CommitRow] = field(default_factory=list)


def rows_of_plan(plan: Plan, version: int) -> list[CommitRow]:
    """The rows that the commit of a plan has."""
    return [
        CommitRow(
            version=version,
            topic_id=topic.topic_id,
            topic=topic.topic,
            sequence=topic.sequence,
            plan_id=plan.plan_id,
            app_id=plan.app_id,
            batch_id=plan.batch_id,
            query_id=plan.query_id,
            base_offsets=topic.base_offsets,
            end_offsets=topic.end_offsets,
            records=topic.records,
            size_bytes=topic.bytes,
            dead_letters=0,
            timings_ms={},
            workers=(),
            void=False,
            committed_ms=plan.now_ms,
            engine=ENGINE_REBUILT,
        )
        for topic in plan.topics
    ]


def reconstruct(
    named: Sequence[CommitRow],
    others: Sequence[CommitRow],
    plans: Sequence[Plan],
    *,
    transactions: Mapping[str, tuple[int, int]],
    is_chained: bool,
    applied: Mapping[str, Applied],
    version: int,
    now_ms: int,
) -> Reconstruction:
    """Rows and transactions of the table as it should be. `version` is the newest one known."""
    found = Reconstruction()
    known = _unique(named)
    newest = max([version, *(row.version for row in others)])
    for candidates in _by_sequence(_pool(others, plans, newest), known, applied):
        best = _choose(candidates, known, applied)
        if best is not None:
            for row in best:
                known.setdefault((row.topic_id, row.sequence), row)
            found.regained += best
    between = _place(known, [row for row in found.regained if row.version > newest])
    found.lost = _lost(known, applied, transactions)
    rows = [*known.values(), *_without_topic(named)]
    rows += [
        _filler(topic_id, applied[topic_id].topic if topic_id in applied else "", sequence, now_ms)
        for topic_id, sequences in found.lost.items()
        for sequence in sequences
    ]
    # With every commit readable up to what was applied, the apps' own transactions are all known.
    is_unsure = any(
        not is_chained or sequence > transactions.get(TOPIC + topic_id, (0, 0))[1]
        for topic_id, sequences in found.lost.items()
        for sequence in sequences
    )
    _finish_apps(found, rows, transactions, between, is_unsure=is_unsure, version=version, now_ms=now_ms)
    found.rows = sorted(rows, key=lambda row: (row.version, row.topic_id, row.sequence))
    _finish_transactions(found, transactions, is_unsure=is_unsure, now_ms=now_ms)
    return found


def _unique(rows: Iterable[CommitRow]) -> dict[tuple[str, int], CommitRow]:
    """A merged file has the rows of its sources again."""
    return {(row.topic_id, row.sequence): row for row in sorted(rows, key=lambda row: row.version) if row.topic_id}


def _without_topic(rows: Iterable[CommitRow]) -> list[CommitRow]:
    return list({(row.version, row.app_id): row for row in rows if not row.topic_id}.values())


def _pool(others: Sequence[CommitRow], plans: Sequence[Plan], newest: int) -> list[list[CommitRow]]:
    """What may have been committed, one entry a commit; the row of a data file says more than its plan."""
    groups: dict[tuple[str, bool], dict[str, CommitRow]] = defaultdict(dict)
    for row in others:
        if row.topic_id:
            groups[row.plan_id, row.void].setdefault(row.topic_id, row)
    seen = {plan_id for plan_id, void in groups if not void}
    later = sorted((plan for plan in plans if plan.plan_id not in seen), key=lambda plan: plan.now_ms)
    from_plans = [rows_of_plan(plan, newest + at + 1) for at, plan in enumerate(later)]
    return [*(list(group.values()) for group in groups.values()), *from_plans]


def _by_sequence(
    pool: Sequence[list[CommitRow]], known: Mapping[tuple[str, int], CommitRow], applied: Mapping[str, Applied]
) -> list[list[list[CommitRow]]]:
    """Candidates for each sequence that was applied and is missing, in order."""
    wanted: dict[tuple[str, int], list[list[CommitRow]]] = defaultdict(list)
    for group in pool:
        for row in group:
            facts = applied.get(row.topic_id)
            if facts is not None and row.sequence <= facts.sequence and (row.topic_id, row.sequence) not in known:
                wanted[row.topic_id, row.sequence].append(group)
    return [wanted[key] for key in sorted(wanted, key=lambda key: (key[1], key[0]))]


def _choose(
    candidates: Sequence[list[CommitRow]], known: Mapping[tuple[str, int], CommitRow], applied: Mapping[str, Applied]
) -> list[CommitRow] | None:
    """The commit that fits best; None when none does, or when two fit equally well."""
    scored = [(score, group) for group in candidates if (score := _fit(group, known, applied)) is not None]
    best = [group for score, group in scored if score == max(each for each, _ in scored)]
    return best[0] if len(best) == 1 else None


def _place(known: dict[tuple[str, int], CommitRow], from_plans: Sequence[CommitRow]) -> dict[str, tuple[int, int]]:
    """Give rows from plans a version before that of what followed them in their topics; a plan does not know its own.

    Returns, by plan, between which versions it was committed.
    """
    sequences: dict[str, list[int]] = defaultdict(list)
    for topic_id, sequence in sorted(known):
        sequences[topic_id].append(sequence)
    groups: dict[str, list[CommitRow]] = defaultdict(list)
    for row in from_plans:
        groups[row.plan_id].append(row)
    between = {}
    for plan_id, rows in sorted(groups.items(), key=lambda group: group[1][0].version, reverse=True):
        before, after = 0, rows[0].version + 1
        for row in rows:
            of_topic = sequences[row.topic_id]
            at = bisect.bisect_left(of_topic, row.sequence)
            earlier = (known[row.topic_id, each] for each in reversed(of_topic[:at]))
            before = max(before, next((each.version for each in earlier if each.plan_id not in groups), 0))
            after = min([after, *(known[row.topic_id, each].version for each in of_topic[at + 1 : at + 2])])
        for row in rows:
            known[row.topic_id, row.sequence] = replace(row, version=after - 1)
        between[plan_id] = (before, after)
    return between


def _fit(
    group: Sequence[CommitRow], known: Mapping[tuple[str, int], CommitRow], applied: Mapping[str, Applied]
) -> int | None:
    """How many of its neighbours a commit joins exactly; None when it contradicts what is known."""
    joins = 0
    for row in group:
        if (row.topic_id, row.sequence) in known:
            if known[row.topic_id, row.sequence].plan_id != row.plan_id:
                return None
            continue
        before = known.get((row.topic_id, row.sequence - 1))
        after = known.get((row.topic_id, row.sequence + 1))
        facts = applied.get(row.topic_id)
        borders = [(before.end_offsets, row.base_offsets)] if before and before.end_offsets else []
        if after and after.base_offsets:
            borders.append((row.end_offsets, after.base_offsets))
        elif facts is not None and row.sequence <= facts.sequence:
            borders.append((row.end_offsets, facts.high_watermarks))
        for lower, upper in borders:
            if any(low > high for low, high in zip(lower, upper, strict=False)):
                return None
            joins += all(low == high for low, high in zip(lower, upper, strict=False))
    return joins


def _lost(
    known: Mapping[tuple[str, int], CommitRow],
    applied: Mapping[str, Applied],
    transactions: Mapping[str, tuple[int, int]],
) -> dict[str, list[int]]:
    last = {topic_id: facts.sequence for topic_id, facts in applied.items()}
    for name, (_, sequence) in transactions.items():
        if name.startswith(TOPIC):
            last[name[len(TOPIC) :]] = max(sequence, last.get(name[len(TOPIC) :], 0))
    for topic_id, sequence in known:
        last[topic_id] = max(sequence, last.get(topic_id, 0))
    missing = {
        topic_id: [at for at in range(1, sequence + 1) if (topic_id, at) not in known]
        for topic_id, sequence in last.items()
    }
    return {topic_id: sequences for topic_id, sequences in missing.items() if sequences}


def _filler(topic_id: str, topic: str, sequence: int, now_ms: int) -> CommitRow:
    return CommitRow(
        version=0,
        topic_id=topic_id,
        topic=topic,
        sequence=sequence,
        plan_id=LOST_PLAN,
        app_id=None,
        batch_id=None,
        query_id=None,
        base_offsets=(),
        end_offsets=(),
        records=0,
        size_bytes=0,
        dead_letters=0,
        timings_ms={},
        workers=(),
        void=True,
        committed_ms=now_ms,
        engine=ENGINE_REBUILT,
    )


def _finish_apps(
    found: Reconstruction,
    rows: list[CommitRow],
    transactions: Mapping[str, tuple[int, int]],
    between: Mapping[str, tuple[int, int]],
    *,
    is_unsure: bool,
    version: int,
    now_ms: int,
) -> None:
    """Where each app is, with a row that says so: its own, or one made for it."""
    newest: dict[str, CommitRow] = {}
    # Those whose version is certain first.
    for row in sorted(rows, key=lambda row: (row.plan_id in between, row.version, row.sequence)):
        if row.app_id is not None and row.batch_id is not None and not row.void:
            last = newest.get(row.app_id)
            if last is None or _is_newer(row, last, between.get(row.plan_id)):
                newest[row.app_id] = row
    at = {app_id: (row.version, row.batch_id) for app_id, row in newest.items()}
    for name, told in transactions.items():
        if name.startswith(APP):
            at[name[len(APP) :]] = max(told, at.get(name[len(APP) :], (-1, -1)), key=lambda each: each[0])
    next_version = max([version, *(row.version for row in rows)]) + 1
    for app_id, (_, batch_id) in sorted(at.items()):
        assert batch_id is not None
        found.transactions[APP + app_id] = batch_id
        if COUNTED + app_id in transactions and not is_unsure:  # an app that counted its batches once keeps counting
            found.transactions[COUNTED + app_id] = batch_id
        last = newest.get(app_id)
        known = last if last is not None and last.batch_id == batch_id else None
        if known is not None and not is_unsure:
            continue
        made = replace(
            _filler("", "", 0, now_ms),
            version=next_version,
            app_id=app_id,
            batch_id=batch_id,
            query_id=known.query_id if known else None,
            plan_id=known.plan_id if known else LOST_PLAN,
            void=False,
            engine=ENGINE_UNSURE if is_unsure else ENGINE_REBUILT,
        )
        rows.append(made)
        if is_unsure:
            found.unsure.append(made)


def _is_newer(row: CommitRow, last: CommitRow, between: tuple[int, int] | None) -> bool:
    """Whether the row's commit came after that of `last`, another one of the same app."""
    if between is None:
        return True  # they come in order
    before, after = between
    # Where the versions leave it open, the batch ids decide: they count up.
    return before >= last.version or (after > last.version and (row.batch_id or 0) > (last.batch_id or 0))


def _finish_transactions(
    found: Reconstruction, transactions: Mapping[str, tuple[int, int]], *, is_unsure: bool, now_ms: int
) -> None:
    others = {name: value for name, (_, value) in transactions.items() if not name.startswith(APP)}
    found.transactions = others | found.transactions
    for row in found.rows:
        if row.topic_id:
            name = TOPIC + row.topic_id
            found.transactions[name] = max(row.sequence, found.transactions.get(name, 0))
    if is_unsure:
        found.transactions[APPS_LOST] = now_ms
