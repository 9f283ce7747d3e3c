"""What the ledger of a store in a bucket says: rows that chain, and the part of them that concerns one partition.

The ledger alone says whether a topic lives and where its partitions end. Every change of a topic is a row: its
definition, each batch, its end. Sequences of a topic have no gaps, and each row begins where the one before ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from logstore.bucket.manifest import Manifest, Segment
from logstore.commit.plan import Plan, TopicPlan
from logstore.directory.ends import TopicEnds
from logstore.errors import LedgerError
from logstore.ledger.rows import AppProgress
from logstore.topics.registry import Topic

#: the topic id of rows that belong to no topic: an app's batch that had no records
NO_TOPIC = ""


class Kind(Enum):
    #: the topic was created, altered, widened, imported or recovered
    DEFINED = "defined"
    BATCH = "batch"
    ENDED = "ended"
    #: a batch of no records, which counts for its app alone
    EMPTY = "empty"
    #: a batch that is sealed in every partition: it says what is left to delete, and which one of its app it was
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class PlanRef:
    """The plan of a batch, named exactly, and the sequence it has in each of its topics."""

    key: str
    size_bytes: int
    crc: int
    topics: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """A transaction that a row ends: its marker is the only record that the row has of that partition."""

    partition: int
    producer_id: int
    first_offset: int
    #: where the oldest transaction begins that is still open, or just behind the marker
    last_stable_offset: int


@dataclass(frozen=True, slots=True)
class Transactions:
    """What a row says of transactions. Only an import brings some, and only `transactions abort` ends one."""

    #: behind the row, where the oldest open one begins: partition and offset, of every partition that has one
    unstable: tuple[tuple[int, int], ...] = ()
    aborted: tuple[Aborted, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicRow:
    topic_id: str
    sequence: int
    kind: Kind
    config_version: int
    base_offsets: tuple[int, ...]
    end_offsets: tuple[int, ...]
    #: the plan's clock: never below that of the row before
    clock_ms: int
    plan: PlanRef | None = None
    app_id: str | None = None
    batch_id: int | None = None
    query_id: str | None = None
    #: of a DEFINED row: the topic as it is from here on
    definition: Topic | None = None
    #: None: transactions are as they were
    transactions: Transactions | None = None

    @property
    def is_lost(self) -> bool:
        """A batch of which nothing is known but its offsets: `recover` found that its commit and its plan are gone."""
        return self.plan is not None and self.plan.size_bytes == 0


def batch_row(plan: Plan, topic: TopicPlan, ref: PlanRef) -> TopicRow:
    """The row of a batch in one of its topics."""
    return TopicRow(
        topic.topic_id,
        topic.sequence,
        Kind.BATCH,
        topic.config_version,
        topic.base_offsets,
        topic.end_offsets,
        plan.now_ms,
        ref,
        plan.app_id,
        plan.batch_id,
        plan.query_id,
    )


def unkeyed(topic: Topic) -> Topic | None:
    """The definition behind a row whose records may lie in any partition; None: it says so already."""
    return replace(topic, keyed=False) if topic.keyed else None


@dataclass(frozen=True, slots=True)
class LedgerView:
    """One version of the ledger. `rows` has those that were not pruned, in the order of their commits."""

    version: int
    rows: tuple[TopicRow, ...] = ()
    #: how many sweeps have begun
    sweeps: int = 0
    #: every topic that lives, by id, as its newest definition has it
    definitions: Mapping[str, Topic] = field(default_factory=dict, hash=False)
    #: of topics with open transactions, by id: partition and where its oldest one begins
    unstable: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict, hash=False)

    def named(self, name: str) -> Topic | None:
        """The topic that has the name now."""
        return next((topic for topic in self.definitions.values() if topic.name == name), None)

    def with_rows(self, version: int, rows: Sequence[TopicRow], *, sweeps: int) -> LedgerView:
        """The view after the commit that made `version`."""
        definitions, unstable = dict(self.definitions), dict(self.unstable)
        for row in rows:
            if row.definition is not None:
                definitions[row.topic_id] = row.definition
            elif row.kind is Kind.ENDED:
                definitions.pop(row.topic_id, None)
            if row.transactions is not None or row.kind is Kind.ENDED:
                unstable.pop(row.topic_id, None)
                if row.transactions is not None and row.transactions.unstable:
                    unstable[row.topic_id] = row.transactions.unstable
        return LedgerView(version, (*self.rows, *rows), sweeps, definitions, unstable)

    def ends(self, row: TopicRow) -> TopicEnds:
        """Where a topic's partitions end behind its newest row: what is committed is visible and durable."""
        ends, stable = row.end_offsets, list(row.end_offsets)
        for partition, first_offset in self.unstable.get(row.topic_id, ()):
            stable[partition] = min(stable[partition], first_offset)
        return TopicEnds(ends, tuple(stable), ends, row.sequence, row.sequence)

    def topic(self, topic_id: str) -> tuple[TopicRow, ...]:
        """The topic's rows since the last one that was pruned: an older one may stay for the sake of its app."""
        rows = [row for row in self.rows if row.topic_id == topic_id and row.kind is not Kind.SEALED]
        begin = len(rows) - 1
        while begin > 0 and rows[begin - 1].sequence == rows[begin].sequence - 1:
            begin -= 1
        return tuple(rows[max(begin, 0) :])

    def newest(self, topic_id: str) -> TopicRow | None:
        """The topic as it is now; None for one that the ledger does not know."""
        return next((row for row in reversed(self.rows) if row.topic_id == topic_id), None)

    def app(self, app_id: str) -> AppProgress | None:
        is_unsure = False
        for row in reversed(self.rows):
            if row.app_id == app_id and row.batch_id is not None:
                plan = row.plan.key if row.plan is not None else ""
                return AppProgress(
                    app_id, row.batch_id, row.query_id, plan, row.clock_ms, is_unsure=is_unsure, as_of=self.version
                )
            is_unsure |= row.is_lost  # it may have been this app's
        return None

    @property
    def are_apps_lost(self) -> bool:
        """Whether there were batches of which nobody knows whose they were."""
        return any(row.is_lost for row in self.rows)


@dataclass(frozen=True, slots=True)
class ReaderView:
    """What a reader finds: sealed segments, then the batches of `tail`, up to the high watermark."""

    log_start_offset: int
    sealed_offset: int
    high_watermark: int
    segments: tuple[Segment, ...]
    tail: tuple[TopicRow, ...]
    #: where read_committed stops: the oldest open transaction, or the high watermark
    last_stable_offset: int


def check_chain(rows: Sequence[TopicRow]) -> None:
    """Raises LedgerError where rows of one topic do not follow each other. Readers and sealers refuse such rows."""
    for before, after in pairwise(rows):
        fault = _break(before, after)
        if fault:
            raise LedgerError(f"topic {after.topic_id}: row {after.sequence} {fault}", hint="Run duramen verify")
    for row in rows:
        if len(row.base_offsets) != len(row.end_offsets) or any(
            not 0 <= base <= end for base, end in zip(row.base_offsets, row.end_offsets, strict=True)
        ):
            raise LedgerError(f"topic {row.topic_id}: row {row.sequence} ends before it begins")


def _break(before: TopicRow, after: TopicRow) -> str | None:
    if after.sequence != before.sequence + 1:
        return f"follows row {before.sequence}"
    if before.kind is Kind.ENDED:
        return "follows the end of its topic"
    if after.config_version < before.config_version or after.clock_ms < before.clock_ms:
        return "is older than the one before"
    new = len(after.base_offsets) - len(before.end_offsets)
    if new < 0 or (new and after.kind is not Kind.DEFINED):
        return "has another number of partitions"
    if after.base_offsets != before.end_offsets + (0,) * new:
        return "does not begin where the one before ended"
    return None


def concerning(rows: Iterable[TopicRow], partition: int, sealed_offset: int) -> tuple[TopicRow, ...]:
    """The rows of a topic with records of `partition` that are not sealed."""
    return tuple(
        row
        for row in rows
        if row.kind is Kind.BATCH
        and partition < len(row.end_offsets)
        and row.end_offsets[partition] > max(sealed_offset, row.base_offsets[partition])
    )


def view_partition(manifest: Manifest | None, rows: Sequence[TopicRow], partition: int) -> ReaderView | None:
    """A partition by its manifest and then by rows that were read *after* it. None: look again, both have moved on.

    `rows` are those of its topic. Raises LedgerError for rows that do not chain, and for a manifest that is sealed
    beyond the ends: the ledger decides, so what it does not know does not exist.
    """
    check_chain(rows)
    if not rows or partition >= len(rows[-1].end_offsets):
        raise LedgerError(f"the ledger has no row for partition {partition}")
    end = rows[-1].end_offsets[partition]
    sealed = manifest.sealed_offset if manifest else 0
    if sealed > end:
        raise LedgerError(f"partition {partition} is sealed up to {sealed}, and the ledger ends at {end}")
    tail = concerning(rows, partition, sealed)
    begins = tail[0].base_offsets[partition] if tail else end
    if begins != sealed:
        return None  # rows were pruned since the manifest was read: it is an old one
    log_start, high_watermark = manifest.log_start_offset if manifest else 0, max(sealed, end)
    unstable = unstable_after(manifest.unstable_offset if manifest else None, tail, partition)
    return ReaderView(
        log_start,
        sealed,
        high_watermark,
        manifest.segments if manifest else (),
        tail,
        high_watermark if unstable is None else min(max(unstable, log_start), high_watermark),
    )


def view_tail(rows: Sequence[TopicRow], partition: int, position: int) -> ReaderView | None:
    """What a cursor at `position` needs, by the rows alone; None: they do not say all of it.

    Whoever deletes records commits a row that is no batch behind that. So no batch behind the last such row lies below
    the log start, unless retention took it since.
    """
    begin = len(rows)
    while begin > 0 and rows[begin - 1].kind is Kind.BATCH and rows[begin - 1].transactions is None:
        begin -= 1
    run = rows[begin:]
    if not run or partition >= len(run[-1].end_offsets) or any(row.plan is None or row.is_lost for row in run):
        return None
    check_chain(run)
    tail = concerning(run, partition, position)
    if not tail or tail[0].base_offsets[partition] > position:
        return None
    first, end = tail[0].base_offsets[partition], run[-1].end_offsets[partition]
    return ReaderView(first, first, end, (), tail, end)


def unstable_after(before: int | None, rows: Iterable[TopicRow], partition: int) -> int | None:
    """Where the oldest open transaction of a partition begins behind `rows`; None: there is none."""
    for row in rows:
        if row.transactions is not None:
            before = dict(row.transactions.unstable).get(partition)
    return before
