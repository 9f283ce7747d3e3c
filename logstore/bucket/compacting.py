"""Compaction of a partition in a bucket: today's cleaner over a local copy, then one compare-and-set for the pass.

Planning goes by the rules of a directory. What a worker has to do is a value (`FetchedPass`): it fetches the sources
into a folder of its own, the cleaner replaces them there, and what it wrote is put under new names. Then the manifest
takes all of it at once, with the receipt: there is no pass that is half in. Whoever loses the race deletes nothing; the
sweep takes what nobody names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import check_age
from logstore.bucket.keys import new_nonce, segment_key
from logstore.bucket.manifest import Segment
from logstore.bucket.producers import Producers
from logstore.bucket.reader import Looked, PartitionSource, aborted_by
from logstore.bucket.replacing import CompactionPass, Group, apply_pass
from logstore.bucket.scratch import scratch_folder
from logstore.bucket.sealing import MaintenanceEnvironment
from logstore.bucket.segment_object import LocalSegment, fetch_segments, part_spans, put_segment
from logstore.cleaner.cleaner import run_pass
from logstore.cleaner.engine import Engine
from logstore.cleaner.transactions import find_transactions
from logstore.cleaner.work import Cleaned, PassReport, PassWork
from logstore.compaction.segment_counts import counts_of_group
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.errors import DamagedLog, ObjectMissing, SegmentsChanged
from logstore.files import OS_FILES, FileSystem, replace_file
from logstore.ledger.rows import RunRow
from logstore.objects.objects import Objects
from logstore.segment.names import FileKind, file_name
from logstore.segment.txn_index import encode_entry


@dataclass(frozen=True, slots=True)
class FetchedPass:
    """A pass as data, for whoever does it. It asks for nothing but the objects it names."""

    objects: Objects
    topic_id: str
    number: int
    #: what is listed, as far as the pass goes; and what it is to become part of
    segments: tuple[Segment, ...]
    state: PartitionState
    work: PassWork
    #: of segments that are not cleaned, by base: entries of their transaction indexes. They tell which of the records
    #: in front of them were aborted, as do markers in the tail.
    aborted: Mapping[int, bytes] = field(default_factory=dict)

    def done_by(
        self,
        engine: Callable[[FileSystem], Engine],
        *,
        folder: str | None = None,
        in_parallel: bool = False,
        swapped: Callable[[Cleaned], None] = lambda _: None,
    ) -> CleanedCopy:
        """Fetch, clean and put. Raises ObjectMissing where a source is gone, DiskFull, and what stops the cleaner."""
        with scratch_folder(folder) as scratch:
            return self._done_in(scratch, engine, in_parallel, swapped)

    def _done_in(
        self,
        scratch: str,
        engine: Callable[[FileSystem], Engine],
        in_parallel: bool,
        swapped: Callable[[Cleaned], None],
    ) -> CleanedCopy:
        fs: FileSystem = OS_FILES
        directory, run, state_path = (os.path.join(scratch, name) for name in ("log", "run", "state"))
        for each in (directory, run):
            fs.mkdir(each)
        fetch_segments(self.objects, self.segments, fs, directory)
        for base, entries in self.aborted.items():
            for kind, data in ((FileKind.LOG, b""), (FileKind.TXN_INDEX, entries)):
                replace_file(fs, os.path.join(directory, file_name(base, kind)), data, durable=False)
        write_state(fs, state_path, self.state)
        work = replace(self.work, directory=directory)
        if work.has_transactions and in_parallel:
            work = replace(work, has_transactions=find_transactions(fs, work, stopping=lambda: False))
        report = run_pass(fs, work, engine=engine(fs), state_path=state_path, folder=run, swapped=swapped)
        left = read_state(fs, state_path, limits=work.limits)
        assert left is not None
        return CleanedCopy(report, left, self._put(report, LocalLog(fs, directory)), self._counted(report))

    def _put(self, report: PassReport, log: LocalLog) -> tuple[Group, ...]:
        """Put the outputs of every group that changed."""
        by_base = {segment.base_offset: segment for segment in self.segments}
        groups = []
        for done in report.cleaned:
            if not done.changed:
                continue
            sources = tuple(by_base[source.base_offset] for source in done.sources)
            ends = [*(output.base_offset for output in done.outputs[1:]), sources[-1].next_offset]
            appended_ms = max(source.appended_ms for source in sources)
            counts = counts_of_group(done)
            outputs = []
            for output, next_offset in zip(done.outputs, ends, strict=True):
                keys, tombstones = counts[output.base_offset]
                entry = Segment(
                    segment_key(self.topic_id, self.number, output.base_offset, new_nonce()),
                    output.base_offset,
                    next_offset,
                    largest_timestamp_ms=output.largest_timestamp_ms,
                    appended_ms=appended_ms,
                    records=output.records,
                    keys=keys,
                    tombstones=tombstones,
                )
                outputs.append(put_segment(self.objects, log.segment(output.base_offset), entry))
            groups.append(Group(sources, tuple(outputs)))
        return tuple(groups)

    def _counted(self, report: PassReport) -> tuple[Segment, ...]:
        """Segments that the pass went through and left alone."""
        by_base = {segment.base_offset: segment for segment in self.segments}
        counts = {base: counts for done in report.cleaned if not done.changed for base, counts in _known(done).items()}
        return tuple(
            replace(by_base[base], keys=keys, tombstones=tombstones) for base, (keys, tombstones) in counts.items()
        )


def _known(done: Cleaned) -> Mapping[int, tuple[int, int]]:
    """Of a group of several segments that stay, only the whole is counted."""
    return counts_of_group(done) if len(done.sources) == 1 else {}


@dataclass(frozen=True, slots=True)
class LocalLog:
    fs: FileSystem
    directory: str

    def segment(self, base_offset: int) -> LocalSegment:
        return LocalSegment(self.fs, self.directory, base_offset)


@dataclass(frozen=True, slots=True)
class CleanedCopy:
    """What came of a pass: its receipt, the state it would have left in a directory, and what was put."""

    report: PassReport
    state: PartitionState
    groups: tuple[Group, ...]
    counted: tuple[Segment, ...] = ()

    @property
    def outputs(self) -> list[Segment]:
        return [output for group in self.groups for output in group.outputs]


@dataclass(frozen=True, slots=True)
class PartitionAtHand:
    """A partition whose pass is under way: how to reach it, and what was seen when it was planned."""

    environment: MaintenanceEnvironment
    source: PartitionSource
    topic_id: str
    looked: Looked
    #: since before the first name of the pass was made
    made: Elapsed = field(default_factory=Elapsed)

    def fetched(self, work: PassWork) -> FetchedPass:
        """The pass for whoever does it. Of every producer that an import brought, the last batch stays."""
        manifest = self.looked.manifest
        producers = Producers(manifest.producer_snapshot if manifest else b"")
        segments = tuple(s for s in self.looked.view.segments if s.base_offset < work.first_uncleanable_offset)
        return FetchedPass(
            self.environment.objects,
            self.topic_id,
            self.source.number,
            segments,
            self.looked.state(),
            replace(work, last_records=producers.last_records(work.now_ms)),
            self._aborted(work),
        )

    def _aborted(self, work: PassWork) -> dict[int, bytes]:
        if not work.has_transactions:
            return {}
        view = self.looked.view
        ended = [aborted for row in view.tail for aborted in aborted_by(row, self.source.number)]
        found = {view.sealed_offset: b"".join(map(encode_entry, ended))}
        for segment in view.segments:
            if segment.base_offset >= work.first_uncleanable_offset:
                spans = [part_spans(segment)[FileKind.TXN_INDEX]]
                found[segment.base_offset] = bytes(self.environment.objects.ranges(segment.key, spans)[0])
        return found

    def finished(self, copy: CleanedCopy, run: RunRow) -> None:
        """Make the pass part of the manifest. Raises SegmentsChanged when others replaced what it read."""
        manifest, state = self.looked.manifest, copy.state
        assert manifest is not None
        done = CompactionPass(
            read=tuple(s for s in self.looked.view.segments if s.base_offset < copy.report.end_offset),
            groups=copy.groups,
            first_dirty_seen=manifest.first_dirty_offset,
            first_dirty_after=state.first_dirty_offset,
            dropped_tombstones=state.dropped_tombstones - manifest.dropped_tombstones,
            next_horizon_ms=state.next_horizon_ms,
            oldest_value_ms=state.oldest_value_ms,
            wanted_codec_id=state.wanted_codec_id,
            oldest_other_codec_ms=state.oldest_other_codec_ms,
            clean_part_plain=state.clean_part_plain,
            counted=copy.counted,
            run=run,
        )
        self.environment.manifests.change(
            self.topic_id,
            self.source.number,
            lambda seen, now_ms, nonce: apply_pass(seen, done, now_ms=now_ms, nonce=nonce),
            outputs=[output.key for output in copy.outputs],
            check=lambda: check_age(self.made.ms()),
        )

    def gone(self, error: ObjectMissing) -> SegmentsChanged | DamagedLog:
        """What it means that a source is gone: others replaced it, or the log is damaged."""
        manifest = self.source.manifest()
        listed = {segment.key for segment in manifest.segments} if manifest else set()
        if listed.issuperset(segment.key for segment in self.looked.view.segments):
            return DamagedLog(
                "an object that the manifest names is gone",
                partition=self.source.partition,
                file=error.file,
                hint="Restore the object from a backup or an older version of the bucket",
            )
        return SegmentsChanged("a segment was replaced before it was fetched", file=error.file)
