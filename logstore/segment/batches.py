"""Whole batches out of a file, a buffer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.errors import BufferLimit, CorruptBatch
from logstore.files import File
from logstore.limits import Limits
from logstore.records.header import read_header
from logstore.records.memory import Memory
from logstore.records.scan import is_damage, scan_batches
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, POSITION, BatchTable

SCAN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole batches: `data` begins at `position` of the file. Valid until the next one is asked for."""

    data: npt.NDArray[np.uint8]
    table: BatchTable
    position: int
    file: str


def read_batches(
    file: File,
    position: int,
    end: int,
    *,
    limits: Limits,
    chunk_bytes: int = SCAN_BYTES,
    verify_crc: bool = True,
    memory: Memory | None = None,
) -> Iterator[Chunk]:
    """Whole batches of [position, end), about `chunk_bytes` at a time; the buffer is reused, and comes from `memory`.

    Raises CorruptBatch at damage (a batch cut off at the end is damage too), BufferLimit when one batch is larger than
    the limits' read buffer.
    """
    memory = Memory(blocks=0) if memory is None else memory
    size = min(chunk_bytes, limits.read_buffer_bytes, max(end - position, 1))
    buffer = memory.block(size)[:size]
    while position < end:
        got = file.pread_into(buffer[: min(len(buffer), end - position)].data, position)
        if got == 0:
            raise CorruptBatch("the file is shorter than it was", file=file.path, position=position)
        scan = scan_batches(buffer[:got], verify_crc=verify_crc)
        if len(scan.table):
            yield Chunk(buffer[: scan.next_position], scan.table, position, file.path)
        if is_damage(scan.code):
            raise scan.error(file=file.path, base_position=position)
        if not len(scan.table):
            buffer = _larger(file, position, end, len(buffer), limits)
        position += scan.next_position


def _larger(file: File, position: int, end: int, size: int, limits: Limits) -> npt.NDArray[np.uint8]:
    """A buffer that holds the batch at `position`, doubled until it does."""
    header = read_header(file, position, end)
    if header is None:
        raise CorruptBatch("the file ends inside a batch", file=file.path, position=position)
    if header.size_bytes > limits.read_buffer_bytes:
        raise BufferLimit(
            f"a batch of {header.size_bytes} bytes; the read buffer may have {limits.read_buffer_bytes}",
            file=file.path,
            position=position,
            offset=header.last_offset,
            hint="Raise read_buffer_bytes of the reader's limits",
        )
    while size < header.size_bytes:
        size *= 2
    return np.empty(min(size, limits.read_buffer_bytes), dtype=np.uint8)


# --- offsets, which no checksum covers ------------------------------------------------------------------------------


def begin_offsets(table: BatchTable) -> npt.NDArray[np.int64]:
    """First offsets as far as the headers say; a legacy one only has its last."""
    return np.where(table[:, BASE_OFFSET] >= 0, table[:, BASE_OFFSET], table[:, LAST_OFFSET])


def earliest_begins(table: BatchTable) -> npt.NDArray[np.int64]:
    """The least each first offset can be: a legacy set may begin right after the batch before it."""
    behind = np.concatenate(([0], table[:-1, LAST_OFFSET] + 1)) if len(table) else table[:, LAST_OFFSET]
    return np.where(table[:, BASE_OFFSET] >= 0, table[:, BASE_OFFSET], behind)


def begin_after(file: File, position: int, end: int) -> int | None:
    """Where the batch at `position` begins, None when there is none or it cannot be read."""
    try:
        header = read_header(file, position, end)
    except CorruptBatch:
        return None
    return None if header is None else header.begin_offset


def ordered_batches(
    table: BatchTable, *, after: int, expected: int, low: int, high: int, following: Callable[[], int | None]
) -> int:
    """How many leading batches have offsets that can be theirs: above `after` and increasing, within [low, high).

    A batch's offset lies outside its checksum, so only its neighbours can contradict it. Of two that overlap the
    earlier one is wrong when it does not go on where the log was `expected` to, and the later one would. `following`
    is asked for the begin of the batch after the last one when that matters.
    """
    if not len(table):
        return 0
    begins, lasts = begin_offsets(table), table[:, LAST_OFFSET]
    before = np.concatenate(([after], lasts[:-1]))
    wrong = np.nonzero((begins <= before) | (begins < low) | (lasts >= high))[0]
    count = int(wrong[0]) if len(wrong) else len(table)
    if not count:
        return 0
    gap_before = int(begins[count - 1]) > (int(lasts[count - 2]) + 1 if count > 1 else expected)
    if gap_before:
        contradiction = int(begins[count]) if count < len(table) else following()
        if contradiction is not None and int(before[count - 1]) < contradiction <= int(lasts[count - 1]):
            return count - 1
    return count


class OrderCheck:
    """For readers that judge records by their offsets, as compaction does: offsets of a segment must increase."""

    def __init__(self, low: int, high: int, *, after: int = -1) -> None:
        """All of them lie in [low, high) and begin after `after`."""
        self._low, self._high = low, high
        #: of the first batch seen; None before
        self.first_offset: int | None = None
        self.last_offset = after

    def see(self, chunk: Chunk) -> None:
        """The next batches. Raises CorruptBatch."""
        begins, lasts = begin_offsets(chunk.table), chunk.table[:, LAST_OFFSET]
        before = np.concatenate(([self.last_offset], lasts[:-1]))
        wrong = (begins <= before) | (lasts < begins) | (begins < self._low) | (lasts >= self._high)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise misplaced(chunk.file, chunk.position + int(chunk.table[at, POSITION]), int(begins[at]))
        if self.first_offset is None:
            self.first_offset = int(begins[0])
        self.last_offset = int(lasts[-1])


def misplaced(file: str, position: int, offset: int) -> CorruptBatch:
    return CorruptBatch(
        f"the batch at offset {offset} contradicts its neighbours or its segment",
        file=file,
        position=position,
        offset=offset,
        hint="Run `duramen recover`",
    )
