"""Finding the next intact batch after damage.

Offsets and sizes are explicit in every batch, so a log can be read on from any position at which a batch begins. NumPy
finds candidates by the few header fields that have few legal values; a checksum decides. The work is bounded: bytes
made on purpose could look like a large batch at every position.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from logstore.errors import CorruptBatch
from logstore.files import File
from logstore.records.header import BatchHeader, read_header
from logstore.records.table import HEADER_BYTES, LEGACY_OVERHEAD_MIN, LEGACY_V1_BYTES_MIN, PREFIX_BYTES

_BLOCK_BYTES = 1 << 20
_CRC_BLOCK_BYTES = 1 << 20
_V2_CRC_FROM = 21  # everything after the checksum itself
_LEGACY_CRC_FROM = 16
_SIZES_MIN = np.array([PREFIX_BYTES + LEGACY_OVERHEAD_MIN, LEGACY_V1_BYTES_MIN, HEADER_BYTES], dtype=np.int64)
_BATCH_BYTES_MIN = int(_SIZES_MIN.min())
#: checksums are taken over at most this many times the bytes that are searched, and a floor for small files
_EFFORT_FACTOR = 16
_EFFORT_BYTES_MIN = 64 << 20


@dataclass(slots=True)
class Effort:
    """How many bytes of checksums a search may still take."""

    left_bytes: int

    @classmethod
    def for_file(cls, size_bytes: int) -> Effort:
        return cls(_EFFORT_FACTOR * size_bytes + _EFFORT_BYTES_MIN)


def intact_at(file: File, position: int, end: int) -> BatchHeader | None:
    """The header of the batch at `position` if all of it lies before `end` and its checksum holds."""
    try:
        header = read_header(file, position, end)
    except CorruptBatch:
        return None
    return header if header is not None and _checksum_holds(file, header) else None


def _checksum_holds(file: File, header: BatchHeader) -> bool:
    legacy = header.magic < 2
    at = header.position + (_LEGACY_CRC_FROM if legacy else _V2_CRC_FROM)
    crc = 0
    while at < header.end_position:
        block = file.pread(min(_CRC_BLOCK_BYTES, header.end_position - at), at)
        if not block:
            return False
        crc = zlib.crc32(block, crc) if legacy else crc32c(block, crc)
        at += len(block)
    return crc == header.crc


def next_intact(file: File, position: int, end: int, *, low: int, high: int, effort: Effort) -> BatchHeader | None:
    """The first intact batch in [position, end) whose offsets lie in [low, high); None when there is none, or when
    looking for it would cost more than `effort`.
    """
    while position + _BATCH_BYTES_MIN <= end:
        data = np.frombuffer(file.pread(min(_BLOCK_BYTES + HEADER_BYTES, end - position), position), dtype=np.uint8)
        last = end - position <= len(data)
        starts = len(data) - _BATCH_BYTES_MIN + 1 if last else len(data) - HEADER_BYTES
        if starts <= 0:
            return None
        for at in _candidates(data, starts, end - position, low, high).tolist():
            header = _plausible(file, position + at, end, low, high)
            if header is None:
                continue
            effort.left_bytes -= header.size_bytes
            if effort.left_bytes < 0:
                return None
            if _checksum_holds(file, header):
                return header
        position += starts
    return None


def _plausible(file: File, position: int, end: int, low: int, high: int) -> BatchHeader | None:
    try:
        header = read_header(file, position, end)
    except CorruptBatch:
        return None
    if header is None or header.begin_offset < low or header.last_offset >= high:
        return None
    return header


def _candidates(
    data: npt.NDArray[np.uint8], starts: int, room_bytes: int, low: int, high: int
) -> npt.NDArray[np.int64]:
    """Positions among the first `starts` at which magic, size and offset could be a batch's."""
    at = np.nonzero(data[16 : 16 + starts] <= 2)[0].astype(np.int64)
    magic = data[at + 16]
    size = _big_endian(data, at + 8, 4) + PREFIX_BYTES
    size = np.where(size > np.int64(0x7FFFFFFF), -1, size)
    at = at[(size >= _SIZES_MIN[magic]) & (at + size <= room_bytes)]
    top = data[at]
    at = at[top < 0x80]
    offset = _big_endian(data, at, 8)
    return at[(offset >= low) & (offset < high)]


def _big_endian(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    value = np.zeros(len(at), dtype=np.int64)
    for byte in range(width):
        value = (value << 8) | data[at + byte]
    return value
