"""Reads one `.log` file through damage: which stretches are sound, and what lies between them.

A scan ends at the first bad batch, as a reader's does; this one looks for the next batch that is intact and can follow,
and goes on there. It changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from logstore.errors import BufferLimit, CorruptBatch
from logstore.files import File
from logstore.limits import INT64_MAX, Limits
from logstore.partition.soundness import MALFORMED, in_order, well_formed
from logstore.records.header import BatchHeader, read_header
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, POSITION, SIZE, BatchTable
from logstore.segment.batches import SCAN_BYTES, begin_offsets, read_batches
from logstore.segment.resync import Effort, intact_at, next_intact

#: after damage the reads begin small again: where much is damaged, little is read in vain
_WINDOW_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True)
class Run:
    """Sound batches, one after the other: a stretch of the file and the offsets it holds."""

    position: int
    end: int
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes that are not a sound batch. `claims` are the offsets its first header names, if one can be read."""

    position: int
    end: int
    reason: str
    claims: tuple[int, int] | None = None
    #: the begin of the file's last batch: what it claims is all that was lost after it
    torn: bool = False


@dataclass(slots=True)
class FileScan:
    size_bytes: int
    runs: list[Run] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    #: where bytes begin that were never published; the end of the file when there are none
    tail_position: int = 0
    #: whether sound neighbours left offsets out
    has_gaps: bool = False

    @property
    def end_offset(self) -> int | None:
        return self.runs[-1].end_offset if self.runs else None


def scan_file(
    file: File, *, low: int, high: int, limits: Limits, open_ended: bool = False, had_bytes: int | None = None
) -> FileScan:
    """All sound batches of the file with offsets in [low, high), and the holes between them.

    `open_ended`: `high` is the high watermark, and what follows the last batch below it was never published.
    `had_bytes`: how long the file was, where that is known. Raises BufferLimit for a sound batch that is larger than
    the limits' read buffer.
    """
    return _Scan(file, low, high, limits, open_ended, had_bytes or 0).run()


class _Scan:
    def __init__(self, file: File, low: int, high: int, limits: Limits, open_ended: bool, had_bytes: int) -> None:
        self._file = file
        self._low = low
        self._high = high
        self._limits = limits
        self._open_ended = open_ended
        self._size = file.size()
        self._had_bytes = had_bytes
        self._effort = Effort.for_file(self._size)
        self._found = FileScan(self._size, tail_position=self._size)
        self._last = low - 1
        self._begin: int | None = None  # of the run being read
        self._first = 0
        #: of a batch after a gap, in case the batches that follow contradict it: its position, and the offset before
        self._unconfirmed: tuple[int, int] | None = None

    def run(self) -> FileScan:
        position = 0
        window = SCAN_BYTES
        while position < self._size:
            trouble, reason = self._read_on(position, window)
            if not reason:
                break
            if self._open_ended and self._last + 1 >= self._high:
                self._end_run(trouble)
                self._found.tail_position = trouble
                return self._found
            window = max(_WINDOW_BYTES_MIN, min(SCAN_BYTES, 2 * (trouble - position)))
            position = self._skip(trouble, reason)
        self._end_run(self._size)
        return self._found

    def _read_on(self, position: int, window: int) -> tuple[int, str]:
        """Read sound batches; where they stop, and why ('' at the end of the file)."""
        at = position
        try:
            for chunk in read_batches(self._file, position, self._size, limits=self._limits, chunk_bytes=window):
                sound, reason = in_order(self._file, chunk, after=self._last, low=self._low, high=self._high)
                sound, reason = well_formed(chunk, self._last, sound, reason, self._limits)
                if sound:
                    self._take(chunk.position, chunk.table[:sound])
                    at = chunk.position + int(chunk.table[sound - 1, POSITION] + chunk.table[sound - 1, SIZE])
                if reason:
                    return chunk.position + int(chunk.table[sound, POSITION]), reason
        except CorruptBatch as error:
            return at if error.position is None else error.position, error.what
        except BufferLimit as error:
            if error.position is not None and intact_at(self._file, error.position, self._size) is not None:
                raise  # the log is sound: the limit is too low for it
            return at if error.position is None else error.position, error.what
        return self._size, ""

    def _take(self, base_position: int, table: BatchTable) -> None:
        begins, lasts = begin_offsets(table), table[:, LAST_OFFSET]
        # After a hole the offsets that are missing were in it.
        before_first = int(begins[0]) - 1 if self._begin is None and self._found.holes else self._last
        self._found.has_gaps |= int(lasts[-1]) - before_first != int((lasts - begins + 1).sum())
        if self._begin is None:
            self._begin, self._first = base_position + int(table[0, POSITION]), int(begins[0])
            if (
                int(table[0, BASE_OFFSET]) < 0
                and (header := intact_at(self._file, self._begin, self._size)) is not None
            ):
                first = _first_offset(self._file, header, self._limits)
                self._first = self._first if first is None else first
        before = self._last if len(table) == 1 else int(lasts[-2])
        gap = int(begins[-1]) > before + 1
        self._unconfirmed = (base_position + int(table[-1, POSITION]), before) if gap else None
        self._last = int(lasts[-1])

    def _end_run(self, position: int) -> None:
        if self._begin is not None and position > self._begin:
            self._found.runs.append(Run(self._begin, position, self._first, self._last + 1))
        self._begin = None

    def _skip(self, trouble: int, reason: str) -> int:
        """Note what lies from `trouble` up to the next intact batch that can follow; its position."""
        unconfirmed = self._unconfirmed
        low = self._last + 1 if unconfirmed is None else unconfirmed[1] + 1
        following = self._next(trouble, low)
        if unconfirmed is not None and following is not None and following.begin_offset <= self._last:
            # The batch before the damage claims offsets that intact ones after it have: it is the wrong one.
            self._retract(*unconfirmed)
            trouble, reason = unconfirmed[0], "its offsets contradict the batches around it"
        else:
            self._end_run(trouble)
        self._unconfirmed = None
        end = self._size if following is None else following.position
        torn = self._torn_claims(trouble) if following is None else None
        self._note(Hole(trouble, end, reason, torn or self._claims(trouble, end), torn=torn is not None))
        return end

    def _retract(self, position: int, last_offset: int) -> None:
        assert self._begin is not None
        begin, first = self._begin, self._first
        self._last = last_offset
        if position > begin:
            self._found.runs.append(Run(begin, position, first, last_offset + 1))
        self._begin = None

    def _next(self, trouble: int, low: int) -> BatchHeader | None:
        """The next intact batch with offsets in [low, high). A damaged batch may hold one in a record's value, so its
        own size is believed where the batch after it goes on with the next offset.
        """
        try:
            header = read_header(self._file, trouble, self._size)
        except CorruptBatch:
            header = None
        if header is not None and header.base_offset is not None and low <= header.base_offset:
            following = intact_at(self._file, header.end_position, self._size)
            if (
                following is not None
                and following.begin_offset == header.next_offset
                and following.last_offset < self._high
            ):
                return following
            if header.end_position == self._size and header.next_offset == self._high:
                return None
        return next_intact(self._file, trouble + 1, self._size, low=low, high=self._high, effort=self._effort)

    def _claims(self, position: int, end: int) -> tuple[int, int] | None:
        claimed = self._claimed(position, end)
        if claimed is None or intact_at(self._file, position, end) is not None:
            return None  # its checksum holds: it is the offset that is wrong
        return claimed.begin_offset, claimed.next_offset

    def _torn_claims(self, position: int) -> tuple[int, int] | None:
        """The offsets of a batch that lacks its end, if it was the last one: the file ended where it would."""
        if self._size >= self._had_bytes:
            return None
        claimed = self._claimed(position, self._had_bytes)
        # No checksum can be held against it, so its header must be likely.
        if claimed is None or not 0 < (claimed.count or 0) <= claimed.next_offset - claimed.begin_offset:
            return None
        return claimed.begin_offset, claimed.next_offset

    def _claimed(self, position: int, end: int) -> BatchHeader | None:
        """The header of what claims to be one batch that ends at `end`, with offsets that may stand there."""
        try:
            header = read_header(self._file, position, end)
        except CorruptBatch:
            return None
        if header is None or header.base_offset is None or header.end_position != end:
            return None
        return header if self._last < header.base_offset and header.last_offset < self._high else None

    def _note(self, hole: Hole) -> None:
        holes = self._found.holes
        if holes and holes[-1].end == hole.position:
            holes[-1] = Hole(holes[-1].position, hole.end, holes[-1].reason)
        else:
            holes.append(hole)


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """One intact batch somewhere in a file."""

    position: int
    end: int
    first_offset: int
    end_offset: int


def intact_batches(file: File, *, limits: Limits) -> list[FoundBatch]:
    """Every intact batch of a file that may hold anything, wherever its offsets lie; also out of order."""
    found: list[FoundBatch] = []
    size = file.size()
    effort = Effort.for_file(size)
    position = 0
    while position < size:
        header = intact_at(file, position, size)
        if header is None:
            header = next_intact(file, position + 1, size, low=0, high=INT64_MAX, effort=effort)
            if header is None:
                break
        first = _first_offset(file, header, limits)
        if first is not None:
            found.append(FoundBatch(header.position, header.end_position, first, header.next_offset))
        position = header.end_position
    return found


def _first_offset(file: File, header: BatchHeader, limits: Limits) -> int | None:
    """Where the batch begins; None for one that cannot be opened, or not within the limits."""
    if header.base_offset is not None:
        return header.base_offset
    if header.size_bytes > limits.read_buffer_bytes:
        return None
    from logstore.records.legacy import decode_legacy

    try:
        return decode_legacy(file.pread(header.size_bytes, header.position), limits=limits).first_offset
    except (*MALFORMED, BufferLimit):
        return None
