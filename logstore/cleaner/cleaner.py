"""One pass of compaction over one partition: the map, then the groups, each swapped in as soon as it is done.

Groups are rewritten side by side, but swapped in the order of the log, and a failed one ends the pass: a tombstone may
go only once every older group is in, or a deleted key comes back. The first dirty offset moves when all are in. The
caller holds the partition's maintenance lock; the partition lock is taken here, for each swap.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from logstore.cleaner.engine import Engine, Groups
from logstore.cleaner.filter import TOMBSTONE, Counts, LastRecord
from logstore.cleaner.grouping import SourceSegment, group_segments
from logstore.cleaner.work import Cleaned, CleaningOptions, Indexed, LogToClean, PassReport, PassWork
from logstore.directory.state import PartitionState, SegmentEntry, read_state, write_state
from logstore.directory.swap import Swap, finish_swap, swap_in
from logstore.errors import CorruptState, SegmentsChanged
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.records.offset_map import MapSettings
from logstore.segment.names import FileKind, file_name

#: small groups share a swap up to this size together; their outputs lie beside their sources until then
SWAP_BYTES = 8 << 20
_SWAP_GROUPS = 256
_HEADROOM = 1.05  # what comes may have somewhat more keys than what was read


def plan_pass(
    fs: FileSystem,
    log: LogToClean,
    *,
    now_ms: int,
    map_settings: MapSettings,
    producers: Mapping[int, LastRecord],
    options: CleaningOptions = CleaningOptions(),  # noqa: B008 (frozen)
    bytes_per_second: float = float("inf"),
    limits: Limits = DEFAULT_LIMITS,
) -> PassWork:
    """Everything that a pass over the log needs to know."""
    config, segments = log.config, log.state.segments
    return PassWork(
        directory=log.directory,
        partition=log.partition,
        segments=tuple(
            SourceSegment(
                entry.base_offset,
                entry.size_bytes,
                _size(fs, log.directory, entry.base_offset, FileKind.INDEX),
                _size(fs, log.directory, entry.base_offset, FileKind.TIME_INDEX),
            )
            for entry in segments[:-1]
            if entry.base_offset < log.first_uncleanable_offset
        ),
        bases=tuple(entry.base_offset for entry in segments),
        first_dirty_offset=log.first_dirty_offset,
        first_uncleanable_offset=log.first_uncleanable_offset,
        now_ms=now_ms,
        delete_retention_ms=config.delete_retention_ms,
        segment_bytes=config.segment_bytes,
        segment_index_bytes=config.segment_index_bytes,
        index_interval_bytes=config.index_interval_bytes,
        map_settings=map_settings,
        last_records=dict(producers),
        has_transactions=log.state.transactions,
        clean_part_plain=log.state.clean_part_plain,
        options=options,
        limits=limits,
        bytes_per_second=bytes_per_second,
    )


def _size(fs: FileSystem, directory: str, base_offset: int, kind: FileKind) -> int:
    path = os.path.join(directory, file_name(base_offset, kind))
    return fs.stat(path).size_bytes if fs.exists(path) else 0


def run_pass(
    fs: FileSystem,
    work: PassWork,
    *,
    engine: Engine,
    state_path: str,
    folder: str,
    locked: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    swapped: Callable[[Cleaned], None] = lambda _: None,
    swap_bytes: int = SWAP_BYTES,
) -> PassReport:
    """Clean the partition; returns the receipt. Raises what stopped it: groups swapped in by then stay.

    `folder` is the run's own, and exists. `swapped` is called with each group once it is in. Small groups wait for each
    other until their sources have `swap_bytes`.
    """
    began = time.monotonic()
    indexed = engine.index(work, folder)
    groups = groups_of(work, [source for source in work.segments if source.base_offset < indexed.end_offset])
    report = _begun(work, indexed, groups)
    cleaned: list[Cleaned] = []
    for together in _swaps(engine.rewrite(work, indexed, groups, folder), swap_bytes):
        if together[0].changed:
            with locked():
                _install(fs, work, indexed, state_path, folder, together)
        for done in together:
            cleaned.append(done)
            _tally(report, done)
            swapped(done)
    report.segments_after = sum(len(done.segments) for done in cleaned)
    report.cleaned = tuple(cleaned)
    report.workers = tuple(sorted({done.worker for done in cleaned}))
    if indexed.is_full:
        report.map_buffer_wanted = wanted_buffer(work, indexed)
    with locked():
        _finish(fs, work, state_path, report)
    report.seconds = time.monotonic() - began
    return report


def groups_of(work: PassWork, sources: Sequence[SourceSegment]) -> Groups:
    """The sources in groups that become one segment each."""
    return group_segments(
        sources,
        segment_bytes=work.segment_bytes,
        segment_index_bytes=work.segment_index_bytes,
        first_uncleanable_offset=work.first_uncleanable_offset,
    )


def _begun(work: PassWork, indexed: Indexed, groups: Groups) -> PassReport:
    sources = [source for group in groups for source in group]
    return PassReport(
        partition=work.partition,
        first_dirty_offset=work.first_dirty_offset,
        end_offset=indexed.end_offset,
        first_uncleanable_offset=work.first_uncleanable_offset,
        groups=len(groups),
        before_bytes=sum(source.size_bytes for source in sources),
        segments_before=len(sources),
        read_bytes=indexed.read_bytes,
        map_keys=indexed.keys,
        map_keys_max=work.map_settings.keys_max,
        map_full=indexed.is_full,
        index_seconds=indexed.seconds,
    )


def _finish(fs: FileSystem, work: PassWork, state_path: str, report: PassReport) -> None:
    """Move the first dirty offset, and record what decides when the next pass is due."""
    state = _state(fs, work, state_path)
    horizon, oldest, other = report.next_horizon_ms, report.oldest_value_ms, report.oldest_other_codec_ms
    finished = replace(
        state,
        generation=state.generation + 1,
        first_dirty_offset=max(report.end_offset, state.log_start_offset),
        next_horizon_ms=-1 if horizon is None else horizon,
        oldest_value_ms=None if not work.options.key_ttl_ms else -1 if oldest is None else oldest,
        clean_part_plain=not work.has_transactions,
        wanted_codec_id=work.options.recompress_codec_id,
        oldest_other_codec_ms=-1 if other is None else other,
    )
    write_state(fs, state_path, finished)


def wanted_buffer(work: PassWork, indexed: Indexed) -> int:
    """The buffer that would hold the keys of everything that is dirty, if the rest is like what was read."""
    span = max(indexed.end_offset - work.first_dirty_offset, 1)
    keys = indexed.keys * (work.first_uncleanable_offset - work.first_dirty_offset) / span
    return work.map_settings.buffer_for(int(keys * _HEADROOM) + 1)


def _swaps(groups: Iterator[Cleaned], swap_bytes: int) -> Iterator[list[Cleaned]]:
    """The groups, in lists of what is swapped in at once. What was done before one failed comes, too.

    A swap costs the same for one small segment and for many, the writing of the whole list above all. Neighbours only:
    a broker that finds a swap half done takes what lies between the new segments for replaced.
    """
    together: list[Cleaned] = []
    failed: Exception | None = None
    while failed is None:
        try:
            done = next(groups, None)
        except Exception as error:
            done, failed = None, error
        if together and not (done is not None and _share_a_swap(together, done, swap_bytes)):
            yield together
            together = []
        if done is None:
            break
        together.append(done)
        if not done.changed or _source_bytes(together) >= swap_bytes:
            yield together  # at once: what follows may take long
            together = []
    if failed is not None:
        raise failed


def _share_a_swap(together: Sequence[Cleaned], done: Cleaned, swap_bytes: int) -> bool:
    return (
        done.changed
        and done.folder == together[0].folder
        and len(together) < _SWAP_GROUPS
        and _source_bytes(together) + _source_bytes([done]) <= swap_bytes
    )


def _source_bytes(groups: Sequence[Cleaned]) -> int:
    return sum(source.size_bytes for group in groups for source in group.sources)


def _install(
    fs: FileSystem, work: PassWork, indexed: Indexed, state_path: str, folder: str, together: Sequence[Cleaned]
) -> None:
    state = _state(fs, work, state_path)
    sizes = {entry.base_offset: entry.size_bytes for entry in state.segments}
    sources = [source for done in together for source in done.sources]
    counts = Counts()
    for done in together:
        counts.add(done.counts)
    for source in sources:
        if sizes.get(source.base_offset) != source.size_bytes:
            raise SegmentsChanged(
                f"segment {source.base_offset} is not what it was when its group was read",
                partition=work.partition,
                hint="The next pass takes it as it is now",
            )
    new = [
        SegmentEntry(each.base_offset, each.size_bytes, each.largest_timestamp_ms)
        for done in together
        for each in done.outputs
    ]
    swap = Swap(
        together[0].folder or folder,
        new,
        old_bases=[source.base_offset for source in sources],
        dropped_tombstones=counts.removed.get(TOMBSTONE, 0),
        thinned_offset=indexed.end_offset if any(counts.removed.values()) else None,
    )
    swap_in(fs, work.directory, state_path, state, swap)


def _state(fs: FileSystem, work: PassWork, state_path: str) -> PartitionState:
    state = read_state(fs, state_path, limits=work.limits)
    if state is None:
        raise CorruptState("the partition's state file is gone", file=state_path, partition=work.partition)
    return finish_swap(fs, work.directory, state_path, state)


def _tally(report: PassReport, done: Cleaned) -> None:
    report.counts.add(done.counts)
    report.read_bytes += done.read_bytes
    report.written_bytes += done.written_bytes
    report.after_bytes += done.size_bytes
    report.groups_changed += done.changed
