"""Verdicts on batches: what is decided before their records are looked at, and what becomes of them after that."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import OK
from logstore.records.kernels.intrinsics import inline, jit, load_slot, store_slot
from logstore.records.kernels.survivors import none_survives
from logstore.records.marks import (
    DELETE,
    EMPTY,
    MARK_ACTION,
    MARK_BYTES,
    MARK_CODEC,
    MARK_HORIZON,
    MARK_KEPT,
    MARK_MAY_GO,
    MARK_NULLED,
    MARK_STAYS,
    MARK_TOMBSTONES,
    REBUILD,
    VERBATIM,
)
from logstore.records.table import (
    ATTRIBUTES,
    BASE_TIMESTAMP,
    CODEC_MASK,
    CONTROL_BIT,
    COUNT,
    DELETE_HORIZON_BIT,
    HEADER_BYTES,
    LAST_OFFSET,
    MAGIC,
    ROW_BYTES,
    SIZE,
    SKIP,
)


@inline
def _add(block, slot, value):
    store_slot(block, slot, load_slot(block, slot) + value)


@jit
def judge_batches(table, count, block):
    """What is decided without looking at records: batches that go as they are, or in which nothing is to be looked at,
    are marked SKIP. Reads MARK_MAY_GO; sets MARK_KEPT and MARK_CODEC, and MARK_STAYS where the last offset must stay.
    """
    now_ms = load_slot(block, slots.B_NOW_MS)
    marks = load_slot(block, slots.B_MARKS)
    bits = load_slot(block, slots.B_SURVIVORS)
    known_from = load_slot(block, slots.B_SURVIVORS_FIRST)
    known_to = load_slot(block, slots.B_SURVIVORS_END)
    for b in range(count):
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        attributes = load_slot(row, ATTRIBUTES)
        v2 = load_slot(row, MAGIC) == 2
        records = load_slot(row, COUNT)
        control = v2 and attributes & CONTROL_BIT != 0
        passed = attributes & DELETE_HORIZON_BIT != 0 and load_slot(row, BASE_TIMESTAMP) <= now_ms
        drop = load_slot(mark, MARK_MAY_GO) != 0 and (not control or passed)
        skip = drop or control or (v2 and records == 0)
        if drop:
            _add(block, slots.B_MARKERS if control else slots.B_ABORTED, records)
        elif control:
            store_slot(mark, MARK_KEPT, records)
        elif none_survives(row, bits, known_from, known_to):
            skip = True
            _add(block, slots.B_SUPERSEDED, records)
        store_slot(row, SKIP, 1 if skip else 0)
        store_slot(mark, MARK_CODEC, attributes & CODEC_MASK)  # opening a legacy set leaves none in the table
        if load_slot(row, LAST_OFFSET) + 1 == load_slot(block, slots.B_FIRST_UNCLEANABLE):
            store_slot(mark, MARK_STAYS, 1)
    return OK


@jit
def choose_actions(table, first, last, block):
    """What becomes of batches [first, last), whose records have been judged, and the counts of what stays."""
    marks = load_slot(block, slots.B_MARKS)
    for b in range(first, last):
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        attributes = load_slot(row, ATTRIBUTES)
        v2 = load_slot(row, MAGIC) == 2
        control = attributes & CONTROL_BIT != 0
        kept = load_slot(mark, MARK_KEPT)
        tombstones = load_slot(mark, MARK_TOMBSTONES)
        codec = load_slot(mark, MARK_CODEC)
        new_codec = codec if control or load_slot(block, slots.B_CODEC) < 0 else load_slot(block, slots.B_CODEC)
        store_slot(mark, MARK_CODEC, new_codec)
        horizon = -1
        sets_horizon = False
        if v2 and attributes & DELETE_HORIZON_BIT != 0:
            horizon = load_slot(row, BASE_TIMESTAMP)
        elif kept > 0 and (tombstones > 0 or (control and load_slot(mark, MARK_MAY_GO) != 0)):
            horizon = load_slot(block, slots.B_NOW_MS) + load_slot(block, slots.B_DELETE_RETENTION_MS)
            sets_horizon = True
        store_slot(mark, MARK_HORIZON, horizon)
        action = DELETE
        if kept > 0:
            whole = v2 and kept == load_slot(row, COUNT) and load_slot(mark, MARK_NULLED) == 0
            action = VERBATIM if whole and not sets_horizon and codec == new_codec else REBUILD
        elif load_slot(mark, MARK_STAYS) != 0:
            is_empty = v2 and load_slot(row, SIZE) == HEADER_BYTES and load_slot(row, BASE_TIMESTAMP) == -1
            is_empty = is_empty and attributes & (CODEC_MASK | DELETE_HORIZON_BIT) == 0
            action = VERBATIM if is_empty else EMPTY
        store_slot(mark, MARK_ACTION, action)
        if action != VERBATIM:
            _add(block, slots.B_CHANGED, 1)
        if not control:
            _add(block, slots.B_READ, max(load_slot(row, COUNT), 0))
            _add(block, slots.B_KEPT, kept)
            _add(block, slots.B_TOMBSTONES, tombstones)
        if (tombstones > 0 or (control and kept > 0)) and 0 <= horizon < load_slot(block, slots.B_NEXT_HORIZON):
            store_slot(block, slots.B_NEXT_HORIZON, horizon)
    return OK
