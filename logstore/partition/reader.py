"""Reading a partition from another process than the one that writes it.

A reader takes the high watermark first, then the partition's state file, and opens files by name; a file that is gone
means "look at the list again". It never lists the directory, never blocks a writer and never sees a record twice or
out of order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, read_state
from logstore.errors import CorruptState, DamagedLog, OffsetOutOfRange
from logstore.files import OS_FILES, FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.partition.reading import LogView, OnOutOfRange, offset_for_timestamp, read_chunks
from logstore.records.columns import DecodedColumns
from logstore.records.decoder import Decoder
from logstore.records.record import Record
from logstore.records.table import LAST_OFFSET
from logstore.segment.names import Transient
from logstore.segment.segment import LogSegment
from logstore.segment.time_index import TimestampOffset

_OPEN_SEGMENTS_MAX = 16
_LOOKS_MAX = 50
_LOOK_AGAIN_S = 0.02


class PartitionReader:
    """Not for several threads at once; make one a thread."""

    def __init__(
        self,
        place: PartitionPlace,
        *,
        high_watermark: Callable[[], int],
        last_stable_offset: Callable[[], int] | None = None,
        recovery_point: Callable[[], int] | None = None,
        check_exists: Callable[[], None] = lambda: None,
        is_placed: Callable[[], bool] = lambda: True,
        fs: FileSystem = OS_FILES,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`high_watermark` is called for every view; read_committed needs `last_stable_offset` where transactions
        may be open. `recovery_point` says what is still staged, should it be damaged. `check_exists` raises when the
        topic is gone: its files may be those of its successor then. `is_placed` says whether the partition's directory
        was made; before that it has no state.
        """
        self.partition = place.partition
        self._directory = place.directory
        self._state_path = place.state_path
        self._high_watermark = high_watermark
        self._last_stable_offset = last_stable_offset
        self._recovery_point = recovery_point
        self._check_exists = check_exists
        self._is_placed = is_placed
        self._fs = fs
        self.limits = limits
        self._open: dict[int, LogSegment] = {}
        #: how many stay open; a caller with many readers lowers it
        self.open_segments_max = _OPEN_SEGMENTS_MAX
        #: a cursor that has read up to its position: what compaction took out since may still come
        self.goes_on = False
        self._generation = -1
        self._sizes: dict[int, int] = {}  # of all segments but the last, which grows
        self._replaced: frozenset[int] = frozenset()

    def frozen(self) -> PartitionReader:
        """A reader of the partition as it is now, where that can be had at once. Of a directory it is this one: its
        files are opened, and its list is looked at again.
        """
        return self

    def state(self) -> PartitionState:
        """Raises CorruptState when there is none or it is damaged; that of a topic just created is empty."""
        state = read_state(self._fs, self._state_path, limits=self.limits)
        if state is None:
            self._check_exists()
            if not self._is_placed():
                return PartitionState()
            state = read_state(self._fs, self._state_path, limits=self.limits)  # it may have been made just now
        if state is None:
            raise CorruptState(
                "the partition has no state file",
                partition=self.partition,
                file=self._state_path,
                hint="Run `duramen recover`",
            )
        return state

    def view(self, *, committed: bool = False) -> LogView:
        """The log as of now: high watermark first, then the segment list."""
        high_watermark = end = self._high_watermark()
        if committed and self._last_stable_offset is not None:
            end = min(high_watermark, self._last_stable_offset())
        state = self.state()
        if state.generation != self._generation:
            self._open.clear()  # files may have been replaced under the same name
            self._generation = state.generation
        elif state.segments:
            self._open.pop(state.segments[-1].base_offset, None)  # the active segment grows
        bases = tuple(segment.base_offset for segment in state.segments)
        self._sizes = {segment.base_offset: segment.size_bytes for segment in state.segments[:-1]}
        self._replaced = frozenset() if state.swap is None else frozenset(state.swap.old_bases)
        timestamps = {segment.base_offset: segment.largest_timestamp_ms for segment in state.segments[:-1]}
        return LogView(self.partition, bases, self._segment, state.log_start_offset, end, high_watermark, timestamps)

    def _segment(self, base_offset: int) -> LogSegment:
        segment = self._open.pop(base_offset, None)
        if segment is None:
            segment = self._named(base_offset)
            # A topic's file goes before its directories do: while it is there, what was opened is the topic's.
            self._check_exists()
            listed_bytes = self._sizes.get(base_offset, segment.size_bytes)
            if segment.size_bytes != listed_bytes:  # nothing else shows a cut between two batches
                raise DamagedLog(
                    f"a segment of {segment.size_bytes} bytes, where the segment list says {listed_bytes}",
                    partition=self.partition,
                    file=segment.log.path,
                    position=min(segment.size_bytes, listed_bytes),
                    offset=base_offset,
                    hint="Run `duramen recover`",
                )
        self._open[base_offset] = segment  # most recently used last
        if len(self._open) > self.open_segments_max:
            del self._open[next(iter(self._open))]
        return segment

    def _named(self, base_offset: int) -> LogSegment:
        """The segment the list means. Where a replacement is under way, or was left by a killed process, the files it
        replaces may be `.deleted` by now; they are still what the list says.
        """
        if base_offset in self._replaced:
            listed_bytes = self._sizes.get(base_offset)
            for suffix in (Transient.NONE, Transient.DELETED):
                try:
                    segment = LogSegment(self._fs, self._directory, base_offset, limits=self.limits, suffix=suffix)
                except FileNotFoundError:
                    continue
                if segment.size_bytes == listed_bytes:
                    return segment
                segment.close(clean=False)
        return LogSegment(self._fs, self._directory, base_offset, limits=self.limits)

    def columns(
        self,
        start: int,
        end: int | None = None,
        *,
        committed: bool = False,
        headers: bool = True,
        on_out_of_range: OnOutOfRange = OnOutOfRange.FAIL,
    ) -> Iterator[DecodedColumns]:
        """Records of [start, end) as columns; `end` defaults to what is visible at the first look.

        Raises OffsetOutOfRange (also when the log start overtakes the reader), DamagedLog, BufferLimit.
        """
        view = self.view(committed=committed)
        position = view.start(start, on_out_of_range)
        end = view.end_offset if end is None else min(end, view.end_offset)
        decoder = Decoder(limits=self.limits, headers=headers)
        looks = 0
        missing: str | None = None
        while position < end:
            before = position
            after = -1  # the first batch may begin below the position
            try:
                for chunk in read_chunks(view, position, end, limits=self.limits, committed=committed):
                    columns = decoder.columns(
                        chunk.data,
                        chunk.table,
                        min_offset=position,
                        max_offset=end,
                        file=chunk.file,
                        base_position=chunk.position,
                        after=after,
                    )
                    yield from filter(len, columns)  # nothing here holds on to what was delivered
                    after = int(chunk.table[-1, LAST_OFFSET])
                    position = after + 1
                if self._list_is_current():
                    return  # everything between here and `end` was compacted away
            except FileNotFoundError as error:  # replaced or retained while we looked: the list knows more
                missing = self.gone(error)
            except OffsetOutOfRange:
                raise
            except DamagedLog as error:
                if looks >= _LOOKS_MAX:
                    raise self._with_way_out(error, position) from error.__cause__
            looks = 0 if position > before else looks + 1
            if looks > _LOOKS_MAX:
                damaged = DamagedLog(
                    f"nothing readable at {position}, below the high watermark {end}",
                    partition=self.partition,
                    file=missing or self._directory,
                    position=0,
                    offset=position,
                    hint="Run `duramen recover`",
                )
                raise self._with_way_out(damaged, position)
            if looks:
                time.sleep(_LOOK_AGAIN_S)
            view = self.view(committed=committed)
            view.check(position)

    def _with_way_out(self, error: DamagedLog, position: int) -> DamagedLog:
        """Above the recovery point nothing is lost: the staged files are still there."""
        if self._recovery_point is not None and position >= self._recovery_point():
            error.with_hint("The records are still in staging; the next flush, or `duramen recover`, puts them back")
        return error

    def gone(self, error: FileNotFoundError) -> str:
        """The name of what is gone, where looking again may help. Raises SegmentsChanged where it cannot."""
        return str(error.filename)

    def _list_is_current(self) -> bool:
        return self.state().generation == self._generation

    def records(
        self,
        start: int,
        end: int | None = None,
        *,
        committed: bool = False,
        on_out_of_range: OnOutOfRange = OnOutOfRange.FAIL,
    ) -> Iterator[Record]:
        """The same as plain records."""
        for columns in self.columns(start, end, committed=committed, on_out_of_range=on_out_of_range):
            yield from columns.records()

    def log_start_offset(self) -> int:
        return self.state().log_start_offset

    def end_offset(self) -> int:
        return self._high_watermark()

    def offset_for_timestamp(self, timestamp_ms: int, *, exact: bool = False) -> TimestampOffset | None:
        """See `reading.offset_for_timestamp`; a file that vanishes means looking again."""
        for look in range(_LOOKS_MAX):
            try:
                return offset_for_timestamp(self.view(), timestamp_ms, self.limits, exact=exact)
            except FileNotFoundError as error:
                missing = self.gone(error)
            except DamagedLog:  # or replaced, and the list not yet
                if look + 1 == _LOOKS_MAX:
                    raise
            self._open.clear()
        raise DamagedLog(
            "the segment list names a file that is not there", partition=self.partition, file=missing, position=0
        )

    def close(self) -> None:
        for segment in self._open.values():
            segment.close(clean=False)
        self._open.clear()
