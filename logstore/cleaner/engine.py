"""Who does the work of a pass: `LocalEngine` is this process with its threads; `compaction_job` has one for Spark."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Protocol

from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import Progress, build_map, no_progress
from logstore.cleaner.rewrite import GroupWriter, OpenGroup, Pace
from logstore.cleaner.throttle import Throttle
from logstore.cleaner.work import Cleaned, Indexed, PassWork
from logstore.files import FileSystem
from logstore.records.offset_map import OffsetMap

Groups = Sequence[tuple[SourceSegment, ...]]

_LISTEN_S = 0.2


class Engine(Protocol):
    """The two steps of a pass that read and write records."""

    def index(self, work: PassWork, folder: str) -> Indexed:
        """Build the map, and keep it for `rewrite`."""

    def rewrite(self, work: PassWork, indexed: Indexed, groups: Groups, folder: str) -> Iterator[Cleaned]:
        """The groups in the order of the log; outputs lie in `folder`. Raises at the first that failed."""


class LocalEngine:
    """This process, with threads: the kernels and codecs do not hold the interpreter."""

    def __init__(
        self, fs: FileSystem, *, threads: int = 1, groups_at_once: int | None = None, progress: Progress = no_progress
    ) -> None:
        """`groups_at_once` is how many outputs may lie there before they are swapped in. At most one more than there
        are threads is used: the device writes one while the others are made.
        """
        self._fs = fs
        self._groups_at_once = min(groups_at_once or threads, threads + 1)
        self._threads = threads
        self._progress = progress
        self._map: OffsetMap | None = None
        self._throttle = Throttle(float("inf"))

    def index(self, work: PassWork, folder: str) -> Indexed:
        self._throttle = Throttle(work.bytes_per_second, sleep=self._wait)
        with ThreadPoolExecutor(self._threads) as pool:
            self._map, indexed = build_map(
                self._fs, work, pool=pool, threads=self._threads, throttle=self._throttle, progress=self._progress
            )
        return indexed

    def _wait(self, seconds: float) -> None:
        """Sleep, but stop at once when the pass is stopped."""
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
            pace=Pace(self._throttle, self._progress, self._threads),
            indexed_here=True,
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
                    # Begun in order, so that a piece never waits for one that was not begun.
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
        wait(pieces[-1:])  # the rest is done by then, or nearly; so this thread wakes once, not for each piece
        errors = [error for piece in pieces if (error := piece.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, CancelledError)), errors[0])
        waiting.popleft()
        return writer.finish(group)
