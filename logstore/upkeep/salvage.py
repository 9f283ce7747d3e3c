"""Recovery of a store's partitions: what is known of them, and where missing batches may still be.

The logs are asked first, then staging (the redo log of what was not flushed), and with `readmit` the quarantine. The
ledger says which offsets were committed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from logstore.commit.plan import Plan, read_plan
from logstore.commit.staged_reader import StagedReader
from logstore.directory.ends import TopicEnds
from logstore.directory.state import PartitionState, read_state
from logstore.directory.swap import finish_swap
from logstore.errors import CorruptBatch, CorruptCheckpoint, CorruptState
from logstore.partition.damage import FoundBatch, intact_batches
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.quarantine import data_files, dropped_tombstones, folders, read_reason, reasons
from logstore.partition.salvage import Partition, Piece, Salvage, Source
from logstore.partition.salvage_planning import has_wrong_list, plan_salvage, with_found_end
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, POSITION, SIZE
from logstore.topics.opened import OpenStore
from logstore.topics.placing import EMPTY
from logstore.topics.registry import Topic
from logstore.upkeep.partition_repair import rebuilt_state, without_older_list

if TYPE_CHECKING:
    from logstore.ledger import CommitRow


@dataclass(slots=True)
class Looked:
    """A partition as recovery found it."""

    partition: Partition
    plan: Salvage
    notes: list[str] = field(default_factory=list)
    #: batches in quarantine that may not come back: from, to, why
    held_back: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KnownEnds:
    """Where the topic's partitions end, by its `ends` and by the ledger."""

    #: None: they are not known, and everything found was committed
    ends: TopicEnds | None
    #: the high watermarks, or what the ledger decided beyond them
    decided: tuple[int, ...] = ()
    #: the last commit that `decided` covers
    sequence: int = 0
    #: commits whose staged files may still be there
    rows: tuple[CommitRow, ...] = ()

    def published_only(self) -> KnownEnds:
        assert self.ends is not None
        applied = self.ends.applied_sequence
        rows = tuple(row for row in self.rows if row.sequence <= applied)
        return KnownEnds(self.ends, self.ends.high_watermarks, applied, rows)

    def applied(self, result: TopicEnds, *, is_whole: bool) -> int | None:
        """The last commit up to which the recovered logs hold everything; None where the ends say so already."""
        if self.ends is not None:
            # Every partition has what was committed, or its loss is written down.
            return self.sequence if is_whole and self.sequence > result.applied_sequence else None
        applied = 0
        for row in self.rows:  # the next writer appends later ones
            if any(end > found for end, found in zip(row.end_offsets, result.high_watermarks, strict=False)):
                break
            applied = row.sequence
        return applied


def look(
    store: OpenStore, topic: Topic, number: int, known: KnownEnds, *, readmit: bool = False, dry_run: bool = False
) -> Looked:
    """Plan the recovery of one partition. The caller holds its locks; with `dry_run` nothing is changed."""
    notes: list[str] = []
    given = _partition(store, topic, number, known, dry_run, notes)
    sources: list[Source] = [StagedBatches(store, topic, number, list(known.rows))]
    quarantine = Quarantine(given) if readmit else None
    if quarantine is not None:
        sources.append(quarantine)
    if known.ends is None:
        given = with_found_end(given, known.decided[number])
    plan = plan_salvage(given, sources, gaps=readmit)
    notes += plan.notes
    return Looked(given, plan, notes, quarantine.held_back if quarantine else [])


def _partition(
    store: OpenStore, topic: Topic, number: int, known: KnownEnds, dry_run: bool, notes: list[str]
) -> Partition:
    directory = store.layout.partition(topic.partition(number))
    path = store.layout.partition_state(topic.id, number)
    state: PartitionState | None = None
    try:
        state = read_state(store.fs, path, limits=store.limits)
    except CorruptState as error:
        notes.append(f"state file rebuilt: {error}")
    if state is not None and state.swap is not None:
        state = _half_swapped(store, directory, state) if dry_run else finish_swap(store.fs, directory, path, state)
    found = Partition(
        store.fs,
        directory,
        str(topic.partition(number)),
        state,
        None if known.ends is None else known.decided[number],
        store.log_config(topic),
        store.limits,
        store.clock.now_ms(),
        flushed_offset=None if known.ends is None else known.ends.recovery_points[number],
    )
    if has_wrong_list(found):
        notes.append("state file rebuilt: its segment list is not this partition's")
        found = replace(found, state=None)
    if found.state is not None and dry_run:  # as a repair would leave it
        older = without_older_list(store, topic, topic.partition(number), found.state)
        return found if older is None else replace(found, state=older)
    if found.state is None and dry_run:
        end_offset = known.decided[number]
        state = rebuilt_state(store, topic, topic.partition(number), end_offset)
        if end_offset and not store.fs.exists(directory):
            state = replace(state, segments=EMPTY.segments)
        return replace(found, state=state)
    if found.state is None:
        documents = [read_reason(store.fs, folder) for folder in folders(store.fs, directory)]
        found = replace(found, known_losses=reasons(data for data in documents if data is not None))
    return found


def _half_swapped(store: OpenStore, directory: str, state: PartitionState) -> PartitionState:
    """The list once an interrupted replacement is finished, as far as it can be told without finishing it."""
    assert state.swap is not None
    concerned = {*state.swap.new_bases, *state.swap.old_bases}
    kept = [
        entry
        for entry in state.segments
        if entry.base_offset not in concerned
        or store.fs.exists(os.path.join(directory, f"{entry.base_offset:020d}.log"))
    ]
    return replace(state, segments=tuple(kept), swap=None)


# --- staging ----------------------------------------------------------------------------------------------------------


class StagedBatches:
    """Batches of commits that were not flushed: staging is the redo log until they are."""

    name = "staging"

    def __init__(self, store: OpenStore, topic: Topic, number: int, rows: list[CommitRow]) -> None:
        self._store = store
        self._topic = topic
        self._number = number
        self._rows = [row for row in rows if not row.void and number < len(row.end_offsets)]

    def pieces(self, low: int, high: int) -> Iterator[Piece]:
        for row in self._rows:
            base, end = row.base_offsets[self._number], row.end_offsets[self._number]
            if base < high and low < end:
                yield from self._of(row, low, high)

    def _of(self, row: CommitRow, low: int, high: int) -> Iterator[Piece]:
        try:
            plan = read_plan(self._store.fs, self._store.layout.plan(row.plan_id), limits=self._store.limits)
        except (FileNotFoundError, CorruptState):
            return
        epoch = self._epoch()
        topic_plan = plan.topic(self._topic.id)
        decided = (row.sequence, row.base_offsets, row.end_offsets)
        if topic_plan is None or (topic_plan.sequence, topic_plan.base_offsets, topic_plan.end_offsets) != decided:
            return  # not the plan that was committed
        stamp = plan.now_ms if topic_plan.log_config().message_timestamp_type == "LogAppendTime" else None
        offset = row.base_offsets[self._number]
        try:
            for path, position, end, count in self._batches(plan):
                if low <= offset and offset + count <= high:
                    yield Piece(path, position, end, offset, offset + count, epoch, stamp)
                offset += count
        except (CorruptState, CorruptBatch, FileNotFoundError):
            return  # what comes after has no offset that is certain

    def _batches(self, plan: Plan) -> Iterator[tuple[str, int, int, int]]:
        folder = self._store.layout.plan(plan.plan_id)
        for name in plan.files:
            path = os.path.join(folder, name)
            reader = StagedReader(self._store.fs, path, topic_id=self._topic.id, limits=self._store.limits)
            try:
                for chunk in reader.chunks(self._number):
                    for row in chunk.table.tolist():
                        at = chunk.position + row[POSITION]
                        yield chunk.file, at, at + row[SIZE], row[LAST_OFFSET] - row[BASE_OFFSET] + 1
            finally:
                reader.release()

    def _epoch(self) -> int:
        directory = self._store.layout.partition(self._topic.partition(self._number))
        try:
            latest = LeaderEpochs.load(self._store.fs, directory, limits=self._store.limits).latest
        except CorruptCheckpoint:
            latest = None
        return latest.epoch if latest else 0


# --- quarantine -------------------------------------------------------------------------------------------------------


class Quarantine:
    """Intact batches that earlier recoveries set aside, those of older versions included."""

    name = "quarantine"

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.held_back: list[tuple[int, int, str]] = []
        self._found: list[tuple[str, int | None, list[FoundBatch]]] | None = None

    def pieces(self, low: int, high: int) -> Iterator[Piece]:
        for path, tombstones, batches in self._files():
            for each in batches:
                if low <= each.first_offset and each.end_offset <= high and self._may_return(each, tombstones):
                    yield Piece(path, each.position, each.end, each.first_offset, each.end_offset)

    def _files(self) -> list[tuple[str, int | None, list[FoundBatch]]]:
        if self._found is None:
            fs, self._found = self._partition.fs, []
            for folder in folders(fs, self._partition.directory):
                reason = read_reason(fs, folder)
                tombstones = None if reason is None else dropped_tombstones(reason)
                for path in data_files(fs, folder):
                    file = fs.open(path)
                    try:
                        self._found.append((path, tombstones, intact_batches(file, limits=self._partition.limits)))
                    finally:
                        file.close()
        return self._found

    def _may_return(self, batch: FoundBatch, tombstones: int | None) -> bool:
        """After a compaction that dropped tombstones an old record could bring a deleted key back."""
        state = self._partition.state
        if state is None or "compact" not in self._partition.config.cleanup_policy:
            return True
        if batch.first_offset >= self._partition.compacted_offset or tombstones == state.dropped_tombstones:
            return True
        why = "tombstones were removed since, so a deleted key could come back"
        if (batch.first_offset, batch.end_offset, why) not in self.held_back:
            self.held_back.append((batch.first_offset, batch.end_offset, why))
        return False
