"""One pass of compaction over one partition: the map, then the groups, each swapped in as soon as it is done.

Groups are rewritten side by side, but swapped in the order of the log, and a failed one ends the pass: a tombstone may
go only once every older group is in, or a deleted key comes back. The first dirty offset moves when all are in. Whoever
calls holds the partition's maintenance lock; the partition lock is taken here, for each swap.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from logstore.cleaner.dedupe_map import DedupeMap, MapSettings
from logstore.cleaner.filter import TOMBSTONE, Counts, LastRecord
from logstore.cleaner.grouping import SourceSegment, group_segments
from logstore.cleaner.index import Progress, build_map, no_progress
from logstore.cleaner.rewrite import GroupWriter, OpenGroup
from logstore.cleaner.throttle import Throttle
from logstore.cleaner.work import Cleaned, CleaningOptions, Indexed, PassReport, PassWork
from logstore.config import LogConfig
from logstore.directory.state import PartitionState, SegmentEntry, read_state, write_state
from logstore.directory.swap import finish_swap, swap_in
from logstore.errors import CorruptState, SegmentsChanged
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.segment.names import FileKind, file_name
from logstore.topic import TopicPartition

Groups = Sequence[tuple[SourceSegment, ...]]

#: what small groups may have together that share a swap; their outputs lie beside their sources until then
SWAP_BYTES = 8 << 20
_SWAP_GROUPS = 256
_LISTEN_S = 0.2
_HEADROOM = 1.05  # what comes may have somewhat more keys than what was read


class Engine(Protocol):
    """Who does the work of a pass: this process, or tasks elsewhere."""

    def index(self, work: PassWork, folder: str) -> Indexed:
        """Build the map, and keep it for `rewrite`."""

    def rewrite(self, work: PassWork, indexed: Indexed, groups: Groups, folder: str) -> Iterator[Cleaned]:
        """The groups in the order of the log; outputs lie in `folder`. Raises at the first that failed."""


class LocalEngine:
    """This process, with threads: the kernels and codecs do not hold the interpreter."""

    def __init__(
        self, fs: FileSystem, *, threads: int = 1, groups_at_once: int | None = None, progress: Progress = no_progress
    ) -> None:
        """`groups_at_once` is how many outputs may lie there before they are swapped in. One more than threads is used
        at most: the device has its turn with one while others are made.
        """
        self._fs = fs
        self._groups_at_once = min(groups_at_once or threads, threads + 1)
        self._threads = threads
        self._progress = progress
        self._map: DedupeMap | None = None
        self._throttle = Throttle(float("inf"))

    def index(self, work: PassWork, folder: str) -> Indexed:
        self._throttle = Throttle(work.bytes_per_second, sleep=self._wait)
        with ThreadPoolExecutor(self._threads) as pool:
            self._map, indexed = build_map(
                self._fs, work, pool=pool, threads=self._threads, throttle=self._throttle, progress=self._progress
            )
        return indexed

    def _wait(self, seconds: float) -> None:
        """Sleep, but listen: a slow pass that is told to stop does so at once."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LISTEN_S))
            self._progress("wait", 0)

    def rewrite(self, work: PassWork, indexed: Indexed, groups: Groups, folder: str) -> Iterator[Cleaned]:
        assert self._map is not None
        writer = GroupWriter(
            self._fs,
            work,
            indexed,
            self._map,
            folder,
            throttle=self._throttle,
            progress=self._progress,
            indexed_here=True,
            threads=self._threads,
        )
        if self._groups_at_once == 1 and self._threads == 1:
            yield from map(writer.clean, groups)
            return
        # What a transaction left in one piece matters in the next.
        with ThreadPoolExecutor(1 if work.has_transactions else self._threads) as pool:
            waiting: deque[tuple[OpenGroup, list[Future[None]]]] = deque()
            try:
                for sources in groups:
                    if len(waiting) == self._groups_at_once:
                        yield self._finished(writer, waiting)
                    group = writer.begin(sources)
                    # Begun in order, so that a piece never waits for one that is not in work.
                    pieces = [pool.submit(writer.rewrite, group, number) for number in range(len(group.pieces))]
                    waiting.append((group, pieces))
                while waiting:
                    yield self._finished(writer, waiting)
            finally:
                for _, pieces in waiting:
                    for piece in pieces:
                        piece.cancel()
                for group, pieces in waiting:
                    wait(pieces)
                    writer.discard(group)

    def _finished(self, writer: GroupWriter, waiting: deque[tuple[OpenGroup, list[Future[None]]]]) -> Cleaned:
        """The first one; it still waits when this raises what made one of its pieces fail."""
        group, pieces = waiting[0]
        wait(pieces[-1:])  # the rest is done by then, or nearly: this thread is woken once, not for each
        errors = [error for piece in pieces if (error := piece.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, CancelledError)), errors[0])
        waiting.popleft()
        return writer.finish(group)


def plan_pass(
    fs: FileSystem,
    directory: str,
    state: PartitionState,
    *,
    partition: TopicPartition,
    config: LogConfig,
    first_uncleanable_offset: int,
    now_ms: int,
    map_settings: MapSettings,
    producers: Mapping[int, LastRecord],
    options: CleaningOptions = CleaningOptions(),  # noqa: B008 (frozen)
    bytes_per_second: float = float("inf"),
    limits: Limits = DEFAULT_LIMITS,
) -> PassWork:
    """Everything a pass over the log as it is now needs to know."""
    bases = tuple(entry.base_offset for entry in state.segments)
    return PassWork(
        directory=directory,
        partition=partition,
        segments=tuple(
            SourceSegment(
                entry.base_offset,
                entry.size_bytes,
                _size(fs, directory, entry.base_offset, FileKind.INDEX),
                _size(fs, directory, entry.base_offset, FileKind.TIME_INDEX),
            )
            for entry in state.segments[:-1]
            if entry.base_offset < first_uncleanable_offset
        ),
        bases=bases,
        first_dirty_offset=max(state.first_dirty_offset, state.log_start_offset),
        first_uncleanable_offset=first_uncleanable_offset,
        now_ms=now_ms,
        delete_retention_ms=config.delete_retention_ms,
        segment_bytes=config.segment_bytes,
        segment_index_bytes=config.segment_index_bytes,
        index_interval_bytes=config.index_interval_bytes,
        map_settings=map_settings,
        last_records=dict(producers),
        has_transactions=state.transactions,
        clean_part_plain=state.clean_part_plain,
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

    `folder` is the run's own, and exists. `swapped` is told each group once it is in. Small groups wait for each other
    until their sources have `swap_bytes`.
    """
    began = time.monotonic()
    settings = work.map_settings
    indexed = engine.index(work, folder)
    sources = [source for source in work.segments if source.base_offset < indexed.end_offset]
    groups = group_segments(
        sources,
        segment_bytes=work.segment_bytes,
        segment_index_bytes=work.segment_index_bytes,
        first_uncleanable_offset=work.first_uncleanable_offset,
    )
    report = PassReport(
        partition=work.partition,
        first_dirty_offset=work.first_dirty_offset,
        end_offset=indexed.end_offset,
        first_uncleanable_offset=work.first_uncleanable_offset,
        groups=len(groups),
        before_bytes=sum(source.size_bytes for source in sources),
        segments_before=len(sources),
        read_bytes=indexed.read_bytes,
        map_keys=indexed.keys,
        map_keys_max=settings.keys_max,
        map_full=indexed.is_full,
        index_seconds=indexed.seconds,
    )
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
        state = _state(fs, work, state_path)
        horizon, oldest, other = report.next_horizon_ms, report.oldest_value_ms, report.oldest_other_codec_ms
        options = work.options
        write_state(
            fs,
            state_path,
            replace(
                state,
                generation=state.generation + 1,
                first_dirty_offset=max(indexed.end_offset, state.log_start_offset),
                next_horizon_ms=-1 if horizon is None else horizon,
                oldest_value_ms=None if not options.key_ttl_ms else -1 if oldest is None else oldest,
                clean_part_plain=not work.has_transactions,
                wanted_codec_id=options.recompress_codec_id,
                oldest_other_codec_ms=-1 if other is None else other,
            ),
        )
    report.seconds = time.monotonic() - began
    return report


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
    swap_in(
        fs,
        work.directory,
        state_path,
        state,
        folder=together[0].folder or folder,
        new=[
            SegmentEntry(each.base_offset, each.size_bytes, each.largest_timestamp_ms)
            for done in together
            for each in done.outputs
        ],
        old_bases=[source.base_offset for source in sources],
        dropped_tombstones=counts.removed.get(TOMBSTONE, 0),
        thinned_offset=indexed.end_offset if any(counts.removed.values()) else None,
    )


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


def clean_partition(
    fs: FileSystem,
    directory: str,
    *,
    partition: TopicPartition,
    config: LogConfig,
    state_path: str,
    first_uncleanable_offset: int,
    now_ms: int,
    map_settings: MapSettings,
    producers: Mapping[int, LastRecord],
    threads: int = 1,
    groups_at_once: int | None = None,
    folder: str | None = None,
    options: CleaningOptions = CleaningOptions(),  # noqa: B008 (frozen)
    limits: Limits = DEFAULT_LIMITS,
    swap_bytes: int = SWAP_BYTES,
) -> PassReport:
    """A pass over a log nobody else uses, by this process."""
    state = read_state(fs, state_path, limits=limits)
    if state is None:
        raise CorruptState("the partition has no state file", file=state_path, partition=partition)
    state = finish_swap(fs, directory, state_path, state)
    work = plan_pass(
        fs,
        directory,
        state,
        partition=partition,
        config=config,
        first_uncleanable_offset=first_uncleanable_offset,
        now_ms=now_ms,
        map_settings=map_settings,
        producers=producers,
        options=options,
        limits=limits,
    )
    folder = folder or directory + ".cleaning"
    fs.mkdir(folder)
    try:
        engine = LocalEngine(fs, threads=threads, groups_at_once=groups_at_once)
        return run_pass(fs, work, engine=engine, state_path=state_path, folder=folder, swap_bytes=swap_bytes)
    finally:
        with contextlib.suppress(OSError):
            for name in fs.listdir(folder):
                fs.unlink(os.path.join(folder, name))
            fs.rmdir(folder)
