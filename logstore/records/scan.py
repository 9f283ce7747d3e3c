"""Batch headers out of bytes: where batches begin and end, and whether their checksums hold."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.errors import CorruptBatch
from logstore.records import slots
from logstore.records.codes import BAD_CRC, EXPLAINED, FULL, OK, PARTIAL
from logstore.records.native import address_of, kernels
from logstore.records.table import (
    COLUMNS,
    CRC,
    LAST_OFFSET,
    MAGIC,
    POSITION,
    SIZE,
    BatchTable,
    new_table,
)

_TABLE_ROWS = 512  # enough for most buffers; where batches are tiny, more tables follow
_MORE_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Scan:
    """Batches found, where the scan stopped, and why (a code of `codes`: OK or PARTIAL when nothing is wrong)."""

    table: BatchTable
    next_position: int
    code: int

    def error(self, *, file: str | None = None, base_position: int = 0, partition: object = None) -> CorruptBatch:
        offset = int(self.table[-1, LAST_OFFSET]) + 1 if len(self.table) else None
        return CorruptBatch(
            EXPLAINED.get(self.code, f"code {self.code}"),
            partition=partition,
            file=file,
            position=base_position + self.next_position,
            offset=offset,
        )


def scan_batches(
    data: npt.NDArray[np.uint8],
    *,
    start: int = 0,
    verify_crc: bool = True,
    rows_max: int | None = None,
    into: BatchTable | None = None,
) -> Scan:
    """Headers of all whole batches of `data` from `start` on; `rows_max` stops early. Nothing is raised: see
    `Scan.code`.

    With `into` the rows go to that table (reuse), and the scan stops, code FULL, when it has no more room.
    """
    if start < 0:
        raise ValueError(f"a scan cannot start at {start}")
    scan = kernels().scan
    block = np.zeros(slots.S_SLOTS, dtype=np.int64)
    block_address = address_of(block)
    data_address = address_of(data)
    found: list[BatchTable] = []
    position = start
    total = 0
    while True:
        if into is not None:
            table = into
        else:
            rows = _MORE_ROWS if found else _TABLE_ROWS
            table = new_table(rows if rows_max is None else min(rows, rows_max - total))
        block[slots.S_START] = position
        block[slots.S_CAPACITY] = len(table)
        block[slots.S_VERIFY] = verify_crc
        code = scan(data_address, len(data), address_of(table), block_address)
        table = table[: int(block[slots.S_N])]
        position = int(block[slots.S_NEXT])
        if verify_crc:
            sound = _sound_legacy(data, table)
            if sound < len(table):
                position = int(table[sound, POSITION])
                found.append(table[:sound])
                return Scan(_joined(found), position, BAD_CRC)
        found.append(table)
        total += len(table)
        if code != FULL or into is not None or (rows_max is not None and total >= rows_max):
            return Scan(_joined(found), position, code)


def _joined(parts: list[BatchTable]) -> BatchTable:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty((0, COLUMNS), dtype=np.int64)


def _sound_legacy(data: npt.NDArray[np.uint8], table: BatchTable) -> int:
    """How many leading rows have a sound CRC-32, where they are legacy messages (v2 was checked by the kernel)."""
    legacy = np.nonzero(table[:, MAGIC] < 2)[0]
    if not len(legacy):
        return len(table)
    view = data.data
    for i in legacy.tolist():
        position, size = int(table[i, POSITION]), int(table[i, SIZE])
        if zlib.crc32(view[position + 16 : position + size]) != int(table[i, CRC]):
            return int(i)
    return len(table)


def is_damage(code: int) -> bool:
    """Whether a scan's code means wrong bytes, as opposed to a normal end or a batch that is cut off."""
    return code not in (OK, PARTIAL, FULL)
