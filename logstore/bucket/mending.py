"""`recover` of a partition in a bucket: what is damaged or gone costs the batches it held, and no others.

Segments that do not verify are fetched as far as they go, and the salvage of a directory takes the sound batches over
into new ones; one that is gone leaves an empty one in its place. The tail is sealed without what cannot be read. A
manifest that is damaged or gone is made again from the segments that lie there. The manifest notes what that cost, and
damaged bytes are kept under `quarantine/`. With `dry_run` all of it is only looked for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from logstore.bucket.elapsed import Elapsed
from logstore.bucket.files import BlockCache
from logstore.bucket.freeing import check_age
from logstore.bucket.keys import new_nonce, quarantine_key, segment_key
from logstore.bucket.manifest import LOSS_REASON_MAX, Segment
from logstore.bucket.reader import Looked, PartitionSource, leader_epoch, look
from logstore.bucket.rebuilding import find_partition, rebuild_manifest, sealed_once
from logstore.bucket.replacing import mend_segments
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules, seal_partition
from logstore.bucket.segment_object import FileParts, LocalSegment, measured, part_spans, put_segment
from logstore.bucket.tail import TailCommit, read_placed
from logstore.bucket.verifying import verify_segment
from logstore.config import LogConfig
from logstore.directory.state import Loss, PartitionState, SegmentEntry, write_state
from logstore.errors import CorruptBatch, CorruptState, DamageError, LedgerError, ObjectMissing, ObjectTruncated
from logstore.files import OS_FILES
from logstore.limits import MIB
from logstore.partition.environment import LastKnown
from logstore.partition.losses import clipped
from logstore.partition.salvage import Partition, Source
from logstore.partition.salvage_planning import plan_salvage
from logstore.partition.salvage_writing import carry_out
from logstore.segment.names import FileKind, file_name
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.topics.registry import Topic

_PART_BYTES = 4 * MIB


@dataclass(slots=True)
class Mended:
    """What recovery found in a partition and did about it, or would do."""

    partition: TopicPartition
    findings: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    #: keys of damaged bytes that are kept
    kept: list[str] = field(default_factory=list)
    #: batches that were put back: key, first offset, end offset
    readmitted: list[tuple[str, int, int]] = field(default_factory=list)
    #: batches in quarantine that may not come back: first offset, end offset, why
    held_back: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def found_damage(self) -> bool:
        return bool(self.findings)


def mend_partition(store: BucketStore, topic: Topic, number: int, *, dry_run: bool) -> Mended:
    """Raises SegmentsChanged when others replaced what was looked at: then nothing was changed; look again."""
    source, done = store.source(topic, number), Mended(topic.partition(number))
    if not _look_at_manifest(store, topic, source, done, dry_run=dry_run):
        return done  # nothing more can be seen without one
    looked = look(source)
    config = store.log_config(topic)
    _mend_segments(store, topic, source, looked, config, done, dry_run=dry_run)
    lost = _lost_in_tail(store, source, looked, done)
    done.losses += lost
    if lost and not dry_run:
        environment = MaintenanceEnvironment(store.objects, store.manifests, store.shelf)
        rules = SealRules(force=True, give_up=True, commits_max=len(looked.view.tail))
        sealed = seal_partition(environment, source, topic.id, rules, store.clock.now_ms())
        done.actions.append("sealed the tail without what cannot be read")
        done.kept += [each.quarantine for each in (sealed.lost if sealed else ()) if each.quarantine]
    return done


# --- the manifest ----------------------------------------------------------------------------------------------------


def _look_at_manifest(
    store: BucketStore, topic: Topic, source: PartitionSource, done: Mended, *, dry_run: bool
) -> bool:
    """False where there is none to go by."""
    try:
        looked = look(source)
        if looked.manifest is not None or not sealed_once(store, topic, looked.rows, source.number):
            return True
        done.findings.append("the manifest is gone")
    except (CorruptState, LedgerError, ObjectMissing) as error:
        done.findings.append(str(error))
    found = find_partition(store, topic, source.number)
    done.losses += found.losses
    done.actions.append(
        f"the list of segments is made again from the {len(found.segments)} that lie there; records that compaction or "
        "retention removed may be among them again"
    )
    if dry_run:
        return False
    store.manifests.force(topic.id, source.number, rebuild_manifest(store, topic, source.number, found))
    return True


# --- segments --------------------------------------------------------------------------------------------------------


def _mend_segments(
    store: BucketStore,
    topic: Topic,
    source: PartitionSource,
    looked: Looked,
    config: LogConfig,
    done: Mended,
    *,
    dry_run: bool,
) -> None:
    made, cache = Elapsed(), BlockCache(store.objects)
    mended: dict[str, Sequence[Segment]] = {}
    losses: list[Loss] = []
    for segment in looked.view.segments:
        problem = _problem(store, cache, source, segment)
        if problem is None:
            continue
        done.findings.append(problem)
        repair = Repair(store, topic, source, segment, config, looked.view.log_start_offset, looked.state())
        outputs, lost, kept = repair.run(problem, dry_run=dry_run)
        mended[segment.key] = outputs
        losses += lost
        done.kept += kept
    done.losses += losses
    if not mended or dry_run:
        return
    store.manifests.change(
        topic.id,
        source.number,
        lambda seen, now_ms, nonce: mend_segments(seen, mended, losses, now_ms=now_ms, nonce=nonce),
        outputs=[output.key for outputs in mended.values() for output in outputs if output.key not in mended],
        check=lambda: check_age(made.ms()),
    )
    done.actions.append(f"{len(mended)} damaged segments replaced by what is sound of them")


def _problem(store: BucketStore, cache: BlockCache, source: PartitionSource, segment: Segment) -> str | None:
    try:
        verify_segment(store, cache, source, segment)
        return None
    except FileNotFoundError:
        return f"a segment that the manifest names is gone (file {segment.key})"
    except DamageError as error:
        return str(error.at(file=segment.key))


@dataclass(frozen=True, slots=True)
class Repair:
    """One segment that is written again."""

    store: BucketStore
    topic: Topic
    source: PartitionSource
    segment: Segment
    config: LogConfig
    log_start_offset: int
    state: PartitionState
    #: what may fill its losses, and what was put back: source, first offset, end offset
    sources: Sequence[Source] = ()
    refilled: list[tuple[str, int, int]] = field(default_factory=list)

    def run(self, problem: str, *, dry_run: bool) -> tuple[list[Segment], list[Loss], list[str]]:
        """What takes its place, what is lost, and what is kept aside."""
        with tempfile.TemporaryDirectory(prefix="duramen-") as scratch:
            directory = os.path.join(scratch, "log")
            OS_FILES.mkdir(directory)
            there = self._fetch(directory)
            if not there:
                return self._gone(directory, problem, dry_run=dry_run)
            return self._salvage(directory, os.path.join(scratch, "state"), dry_run=dry_run)

    def _fetch(self, directory: str) -> bool:
        """As much of the segment's log as there is, and a transaction index that is whole."""
        try:
            size = self.store.objects.head(self.segment.key).size_bytes
        except ObjectMissing:
            return False
        spans = part_spans(self.segment)
        for kind in (FileKind.LOG, FileKind.TXN_INDEX):
            begin, end = spans[kind]
            if kind is FileKind.TXN_INDEX and (size < end or begin == end):
                continue
            file = OS_FILES.open(os.path.join(directory, file_name(self.segment.base_offset, kind)), create=True)
            try:
                for at in range(begin, min(end, size), _PART_BYTES):
                    stop = min(at + _PART_BYTES, end, size)
                    file.pwrite(self.store.objects.ranges(self.segment.key, [(at, stop)])[0], at - begin)
            finally:
                file.close()
        return True

    def _gone(self, directory: str, problem: str, *, dry_run: bool) -> tuple[list[Segment], list[Loss], list[str]]:
        at_most = self.segment.base_offset < max(self.state.first_dirty_offset, self.state.thinned_offset)
        low = max(self.segment.base_offset, self.log_start_offset)
        now_ms = self.store.clock.now_ms()
        lost = [Loss(low, self.segment.next_offset, problem[:LOSS_REASON_MAX], now_ms, at_most)]
        entry = Segment(self._key(self.segment.base_offset), self.segment.base_offset, self.segment.next_offset)
        if not dry_run:
            entry = put_segment(self.store.objects, LocalSegment(OS_FILES, directory, entry.base_offset), entry)
        return [replace(entry, appended_ms=self.segment.appended_ms)], lost, []

    def _key(self, base_offset: int) -> str:
        return segment_key(self.topic.id, self.source.number, base_offset, new_nonce())

    def _salvage(
        self, directory: str, state_path: str, *, dry_run: bool
    ) -> tuple[list[Segment], list[Loss], list[str]]:
        segment, store = self.segment, self.store
        OS_FILES.open(os.path.join(directory, file_name(segment.next_offset, FileKind.LOG)), create=True).close()
        listed = (
            SegmentEntry(segment.base_offset, segment.log_bytes, segment.largest_timestamp_ms),
            SegmentEntry(segment.next_offset, 0, -1),
        )
        losses = clipped(self.state.losses, segment.base_offset, segment.next_offset) if self.sources else ()
        state = replace(
            self.state, segments=listed, log_start_offset=max(self.log_start_offset, segment.base_offset), losses=losses
        )
        write_state(OS_FILES, state_path, state)
        given = Partition(
            OS_FILES,
            directory,
            str(self.source.partition),
            state,
            segment.next_offset,
            self.config,
            store.limits,
            store.clock.now_ms(),
        )
        plan = plan_salvage(given, self.sources)
        self.refilled.extend(plan.refilled)
        if dry_run:
            return [segment], list(plan.losses), []
        aside: list[str] = []
        if plan.changes:
            state, aside = carry_out(given, plan, state_path)
        outputs = self._indexed(directory, state_path, state)
        kept = [self._keep(path) for path in aside if os.path.isfile(path)]
        return outputs, list(plan.losses), kept

    def _indexed(self, directory: str, state_path: str, state: PartitionState) -> list[Segment]:
        """Let the log itself make the indexes again, and put what it has."""
        from logstore.partition.log import PartitionLog

        end = self.segment.next_offset
        known = LastKnown(clean=True, recovery_point=end, high_watermark=end)
        PartitionLog.open(
            directory,
            partition=self.source.partition,
            config=self.config,
            known=known,
            environment=self.store.log_environment(),
            state_path=state_path,
        ).close()
        bases = sorted({entry.base_offset for entry in state.segments if entry.base_offset < end})
        outputs = []
        for at, base in enumerate(bases or [self.segment.base_offset]):
            local = LocalSegment(OS_FILES, directory, base)
            following = bases[at + 1] if at + 1 < len(bases) else end
            entry = measured(local, Segment(self._key(base), base, following), self.store.limits)
            entry = replace(entry, appended_ms=self.segment.appended_ms)
            outputs.append(put_segment(self.store.objects, local, entry))
        return outputs

    def _keep(self, path: str) -> str:
        key = quarantine_key(self.topic.id, self.source.number, self.segment.base_offset, new_nonce())
        self.store.objects.put(key, FileParts(OS_FILES, path, OS_FILES.stat(path).size_bytes))
        return key


# --- the tail --------------------------------------------------------------------------------------------------------


def _lost_in_tail(store: BucketStore, source: PartitionSource, looked: Looked, done: Mended) -> list[Loss]:
    """What of the tail cannot be read."""
    lost: list[Loss] = []
    now_ms, number = store.clock.now_ms(), source.number
    for row in looked.view.tail:
        assert row.plan is not None
        try:
            commit = TailCommit.of(store.shelf.plans.get(row.plan), row, number, leader_epoch(looked.manifest))
        except (ObjectMissing, CorruptState) as error:
            done.findings.append(str(error))
            lost.append(Loss(row.base_offsets[number], row.end_offsets[number], error.what[:LOSS_REASON_MAX], now_ms))
            continue
        for piece, base_offset in commit.pieces():
            try:
                read_placed(store.shelf.cache, commit, piece, base_offset)
            except (ObjectMissing, CorruptBatch, ObjectTruncated) as error:
                done.findings.append(str(error))
                end = base_offset + piece.records
                lost.append(Loss(base_offset, end, error.what[:LOSS_REASON_MAX], now_ms))
    return lost
