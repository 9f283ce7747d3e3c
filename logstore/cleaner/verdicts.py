"""Verdicts on the records of a chunk: which stay, go, or lose their value; the kernel decides by an offset map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.records import slots
from logstore.records.codes import OK
from logstore.records.marks import Marks
from logstore.records.native import address_of, kernels
from logstore.records.offset_map import OffsetMap
from logstore.records.survivors import Survivors
from logstore.records.table import COUNT, SKIP
from logstore.segment.batches import Chunk


@dataclass(frozen=True, slots=True)
class RecordRules:
    """What decides over records; no key is looked for where `survivors` tell."""

    max_offset: int
    now_ms: int
    keep_legacy_tombstones: bool
    expired_before_ms: int = 0
    survivors: Survivors | None = None


@dataclass(slots=True)
class Judged:
    superseded: int = 0
    keyless: int = 0
    tombstones: int = 0
    nulled: int = 0


def judge(
    offset_map: OffsetMap, chunk: Chunk, first: int, last: int, marks: Marks, rules: RecordRules
) -> tuple[npt.NDArray[np.uint8], Judged]:
    """A byte for each record of opened batches [first, last) that are not skipped, and why records go.

    `marks` get the counts of each batch. Raises CorruptBatch.
    """
    table, survivors = chunk.table, rules.survivors
    live = table[first:last, SKIP] == 0
    keep = np.empty(max(int(table[first:last, COUNT][live].sum()), 1), dtype=np.uint8)
    block = offset_map.block
    block[slots.K_MAX_OFFSET] = rules.max_offset
    block[slots.K_NOW_MS] = rules.now_ms
    block[slots.K_KEEP_LEGACY_TOMBSTONES] = rules.keep_legacy_tombstones
    block[slots.K_EXPIRED_BEFORE] = rules.expired_before_ms
    block[slots.K_MARKS] = address_of(marks)
    block[slots.K_KEEP] = address_of(keep)
    block[slots.K_SURVIVORS] = 0
    if survivors is not None:
        block[slots.K_SURVIVORS] = address_of(survivors.bits)
        block[slots.K_SURVIVORS_FIRST] = survivors.first_offset
        block[slots.K_SURVIVORS_END] = survivors.end_offset
    for slot in (slots.K_KEYLESS, slots.K_SUPERSEDED, slots.K_TOMBSTONES, slots.K_NULLED):
        block[slot] = 0
    code = kernels().judge(address_of(table), first, last, address_of(block))
    if code != OK:
        raise offset_map.corrupt(table, code, chunk.file, chunk.position)
    return keep, Judged(
        int(block[slots.K_SUPERSEDED]),
        int(block[slots.K_KEYLESS]),
        int(block[slots.K_TOMBSTONES]),
        int(block[slots.K_NULLED]),
    )
