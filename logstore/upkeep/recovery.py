"""Recovery of a topic's partitions: every byte is checked, damage taken out, and what is derived rebuilt.

A dry run reports the same, and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from logstore.commit.writing import published
from logstore.directory.ends import TopicEnds
from logstore.directory.state import Loss
from logstore.errors import CorruptState, DamagedLog, LedgerError, RecoveryChanged, StrayDirectory
from logstore.partition.environment import LastKnown
from logstore.partition.losses import subtract
from logstore.partition.salvage_writing import carry_out
from logstore.segment.names import HIGH_WATERMARK_CHECKPOINT
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic
from logstore.upkeep.retention import committer_of
from logstore.upkeep.salvage import KnownEnds, Looked, look

if TYPE_CHECKING:
    from logstore.commit.committer import Committer
    from logstore.directory.finding import Finding
    from logstore.ledger import CommitRow
    from logstore.partition.log import PartitionLog


_ENDS_EVERY = 64


@dataclass(slots=True)
class Recovery:
    """What recovery found and did, or, of a dry run, would do."""

    partition: TopicPartition
    log_end_offset: int
    segments_scanned: int = 0
    bytes_scanned: int = 0
    dropped_bytes: int = 0
    cuts: list[dict[str, object]] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: small files that were lost or damaged, and what became of them
    repaired: list[str] = field(default_factory=list)
    #: committed offsets that no record has any more, since this recovery
    losses: tuple[Loss, ...] = ()
    #: batches that were put back: where from, first offset, end offset
    readmitted: list[tuple[str, int, int]] = field(default_factory=list)
    #: batches in quarantine that may not come back: first offset, end offset, why
    held_back: list[tuple[int, int, str]] = field(default_factory=list)
    #: what `verify` found before, where it was asked
    findings: list[Finding] = field(default_factory=list)

    @property
    def found_damage(self) -> bool:
        return bool(self.repaired or self.cuts or self.quarantined or self.losses or self.findings)


def recover(
    store: OpenStore,
    topic: Topic,
    numbers: list[int] | None = None,
    *,
    done: Callable[[Recovery], None] = lambda _: None,
    dry_run: bool = False,
    readmit: bool = False,
    allowed: Mapping[TopicPartition, Sequence[Loss]] | None = None,
    ledger: RecoveryLedger | None = None,
) -> list[Recovery]:
    """Check every byte of the topic's partitions, take out what is damaged, rebuild what is derived.

    Damage costs the batches it hit and no others; the offsets they had are written down as losses. What staging still
    has is put back first, with `readmit` what quarantine has, too. An offset once committed is never given to another
    record: where a log ends too early, it goes on at the committed end. If the topic's ends are damaged or missing, all
    records found are taken as committed, in all partitions.

    With `dry_run` nothing is changed and the reports say what would be. `allowed` are the losses that were agreed to:
    raises RecoveryChanged when there are others by now, with nothing done. Raises LockHeld. `ledger` may be shared when
    several topics are recovered.
    """
    what = f"recover {topic.name}"
    notes: list[str] = []
    ledger = ledger or RecoveryLedger(store)
    wanted = range(topic.partitions) if numbers is None else numbers
    repaired = repair_partitions(store, topic, wanted, ledger=ledger, dry_run=dry_run)
    committer = ledger.committer(dry_run=dry_run)
    if committer is not None and not dry_run:
        try:
            committer.settle_topic(topic)  # what is staged still need not be lost
        except (CorruptState, DamagedLog, LedgerError, StrayDirectory) as error:
            notes.append(f"not everything that is staged could be appended: {error}")
    known = _known_ends(store, topic, committer, notes)
    chosen = list(range(topic.partitions)) if numbers is None or known.ends is None else numbers
    reports: list[Recovery] = []
    with contextlib.ExitStack() as held:
        held.enter_context(store.locks.maintenance_of(topic.id, sorted(set(chosen)), what=what))
        others = [number for number in chosen if number not in repaired]
        repaired |= repair_partitions(store, topic, others, ledger=ledger, dry_run=dry_run)
        held.enter_context(store.locks.lease(topic.id, what=what))
        store.check_exists(topic)
        known = _known_ends(store, topic, committer, [])
        if len(chosen) < topic.partitions:
            known = known.published_only()  # a commit is taken for applied in all partitions or in none
        result = known.ends or TopicEnds.empty(topic.partitions)
        for number in chosen:
            with store.locks.partition(topic.id, number, what=what):
                looked = look(store, topic, number, known, readmit=readmit, dry_run=dry_run)
                report = _planned(topic.partition(number), looked)
                if not dry_run:
                    if allowed is not None:
                        _check_allowed(report, allowed.get(report.partition, ()))
                    synced = result.recovery_points[number]
                    result = published(result, number, _carry_out(store, topic, number, looked, report, synced))
            report.notes += notes
            report.repaired += repaired[number]
            # All of them lie in one file: not written again for each of many partitions.
            is_last = number == chosen[-1]
            if known.ends is not None and not dry_run and (is_last or len(reports) % _ENDS_EVERY == 0):
                store.write_ends(topic, result)
            reports.append(report)
            done(report)
        if known.ends is None and any(report.log_end_offset for report in reports):
            reports[0].repaired.append("the topic's ends were missing or damaged; all records found are committed")
        sequence = known.applied(result, is_whole=len(chosen) == topic.partitions)
        if sequence is not None and not dry_run:
            store.write_ends(topic, replace(result, applied_sequence=sequence, flushed_sequence=sequence))
    return reports


def repair_partitions(
    store: OpenStore, topic: Topic, numbers: Iterable[int], *, ledger: RecoveryLedger, dry_run: bool
) -> dict[int, list[str]]:
    """Give partitions back the small files they lost; what was done for each, or with `dry_run` would be.

    Where both list and directory are gone, only the ends and the ledger tell a lost partition from one that was never
    written to.
    """
    from logstore.upkeep.partition_repair import repair_partition

    ends = _known_ends(store, topic, ledger.committer(dry_run=dry_run), []).decided
    return {
        number: repair_partition(store, topic, number, end_offset=ends[number], dry_run=dry_run) for number in numbers
    }


def _known_ends(store: OpenStore, topic: Topic, committer: Committer | None, notes: list[str]) -> KnownEnds:
    ends: TopicEnds | None = None
    try:
        ends = store.ends(topic) if store.fs.exists(store.layout.ends(topic.id)) else None
    except CorruptState as error:
        notes.append(f"the topic's ends were rebuilt: {error}")
    rows: tuple[CommitRow, ...] = ()
    if committer is not None:
        try:
            rows = tuple(committer.ledger.commits_after(topic.id, 0 if ends is None else ends.flushed_sequence))
        except LedgerError as error:
            notes.append(f"the ledger could not be asked: {error}")
    decided = [0] * topic.partitions if ends is None else list(ends.high_watermarks)
    for row in rows:
        for number, end in enumerate(row.end_offsets[: topic.partitions] if not row.void else ()):
            decided[number] = max(decided[number], end)
    if ends is None:
        from logstore.upkeep.partition_repair import checkpointed_offsets

        # Of a topic that the ledger knows nothing of, an imported one say. It never tells more than there was.
        told = checkpointed_offsets(store, topic, HIGH_WATERMARK_CHECKPOINT)
        decided = [end or told.get(topic.partition(number), 0) for number, end in enumerate(decided)]
    sequence = max([0 if ends is None else ends.applied_sequence, *(row.sequence for row in rows)])
    return KnownEnds(ends, tuple(decided), sequence, rows)


class RecoveryLedger:
    """The ledger as recovery asks it, opened once for all topics: that costs more than most partitions do."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._committer: Committer | None = None

    def committer(self, *, dry_run: bool) -> Committer | None:
        """None where there is no ledger, or none that can be opened."""
        # Opening a ledger sets aside what is torn; a dry run leaves a damaged one alone.
        if self._committer is None and (not dry_run or _has_sound_ledger(self._store)):
            self._committer = committer_of(self._store)
        return self._committer


def _has_sound_ledger(store: OpenStore) -> bool:
    from logstore.upkeep.repair import examine

    return store.has_ledger and examine(store, deep=False).sound


def _planned(partition: TopicPartition, looked: Looked) -> Recovery:
    """The report of a plan; what is only found while it is carried out is added then."""
    plan = looked.plan
    ends = [piece.end_offset for segment in plan.segments for piece in segment.pieces]
    return Recovery(
        partition,
        plan.committed if plan.committed is not None else max(ends, default=plan.log_start_offset),
        segments_scanned=len(plan.segments),
        bytes_scanned=plan.bytes_scanned,
        dropped_bytes=sum(each.size_bytes for each in plan.damages),
        cuts=[
            {
                "file": each.file,
                "position": each.position,
                "dropped_bytes": each.size_bytes,
                "reason": each.reason,
                "lost_from": each.base_offset,
                "lost_to": each.end_offset,
                "at_most": each.at_most,
            }
            for each in plan.damages
        ],
        notes=list(looked.notes),
        losses=plan.losses,
        readmitted=list(plan.refilled),
        held_back=list(looked.held_back),
    )


def _check_allowed(report: Recovery, allowed: Sequence[Loss]) -> None:
    agreed = [(each.base_offset, each.end_offset) for each in allowed]
    more = subtract([(each.base_offset, each.end_offset) for each in report.losses], agreed)
    if more:
        raise RecoveryChanged(
            f"offsets {more[0][0]} to {more[0][1]} would be lost as well by now; nothing was changed",
            partition=report.partition,
            offset=more[0][0],
            hint="Look again with `duramen recover --dry-run`",
        )


def _carry_out(
    store: OpenStore, topic: Topic, number: int, looked: Looked, report: Recovery, synced_offset: int
) -> PartitionLog:
    """Make the directory sound, then let the log itself rebuild the rest; the log, closed."""
    committed = looked.partition.committed
    state_path = store.layout.partition_state(topic.id, number)
    if looked.plan.changes or looked.partition.state is None:
        _, report.quarantined = carry_out(looked.partition, looked.plan, state_path)
    tail = store.tail(topic, number)
    log = store.open_log(topic, number, LastKnown(clean=False, keep_offset=committed or 0))
    found = log.recovery
    report.rebuilt += found.rebuilt
    report.notes += found.notes
    if committed is not None:
        log.truncate_to(committed)  # what lies above was never published
    if tail is None or not tail.is_current:
        log.write_again(synced_offset)  # another host's memory may hold it
    log.close()
    report.segments_scanned = found.segments_scanned
    report.log_end_offset = log.log_end_offset
    return log
