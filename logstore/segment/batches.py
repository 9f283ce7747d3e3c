"""Whole batches out of a file, a buffer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.errors import BufferLimit, CorruptBatch
from logstore.files import File
from logstore.limits import Limits
from logstore.records.header import read_header
from logstore.records.scan import is_damage, scan_batches
from logstore.records.table import BatchTable

SCAN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole batches: `data` begins at `position` of the file. Valid until the next one is asked for."""

    data: npt.NDArray[np.uint8]
    table: BatchTable
    position: int
    file: str


def read_batches(
    file: File, position: int, end: int, *, limits: Limits, chunk_bytes: int = SCAN_BYTES, verify_crc: bool = True
) -> Iterator[Chunk]:
    """Whole batches of [position, end), about `chunk_bytes` at a time; the buffer is reused.

    Raises CorruptBatch at damage (a batch cut off at the end is damage too), BufferLimit when one batch is larger than
    the limits' read buffer.
    """
    buffer = np.empty(min(chunk_bytes, max(end - position, 1)), dtype=np.uint8)
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
