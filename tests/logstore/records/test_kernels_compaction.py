"""The compaction's kernels against their twins, as `test_kernels` does it: hostile bytes, memory that borders unmapped
pages.
"""

from __future__ import annotations

import random
import struct
from dataclasses import fields
from typing import Any

import columnar
import compaction_twins as twins
import guarded
import numpy as np
import pytest
import wire
from compaction_twins import Batches, Bits, KeyMap, Mark
from guarded import Place
from hostile import INT32_MAX, INT64_MAX, batches_in_memory, in_memory, int64s, mutated, places, times
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import Cursor, Malformed, Row, parse_record

from logstore.records import codes, marks, slots, table
from logstore.records.native import address_of, kernels

HEADER = b"version"

#: most of what is random here is drawn by these: a strategy for each of so many small choices would take seconds
seeds = st.integers(0, 1 << 32)

#: few keys, so that records compete; long ones, whose MD5 takes several blocks
KEYS = [None, b"", b"a", b"b", b"c" * 55, b"d" * 56, b"e" * 130]
VALUES = [None, None, b"", b"v", b"value"]
NAMES = [HEADER, HEADER, HEADER, HEADER, b"versio", b""]
VERSIONS = [None, b"\0" * 8, b"\0" * 7 + b"\1", b"\xff" * 8, b"\x80" + b"\0" * 7, b"seven !", b""]


def competing(seed: int) -> tuple[list[Row], list[bytes]]:
    """Batches in the order of their offsets, of all kinds a log has."""
    rng = random.Random(seed)
    rows, payloads = [], []
    offset = rng.choice([0, 0, 7, INT64_MAX - 1000])
    for _ in range(rng.randint(1, 5)):
        payload, delta, count = b"", -1, rng.randint(0, 6)
        for _ in range(count):
            delta += rng.choice([1, 1, 1, 2, 9])
            payload += wire.record(
                rng.choice(KEYS),
                rng.choice(VALUES),
                timestamp_delta=rng.randint(-3, 3),
                offset_delta=delta,
                headers=[
                    (rng.choice([HEADER, b"versio", b""]), rng.choice(VERSIONS)) for _ in range(rng.randint(0, 3))
                ],
            )
        row = [0] * table.COLUMNS
        delta = max(delta, 0) + rng.choice([0, 0, 0, 3])
        row[table.BASE_OFFSET], row[table.LAST_OFFSET] = offset, offset + delta
        row[table.MAGIC] = rng.choice([2, 2, 2, 2, 1, 0])
        row[table.ATTRIBUTES] = rng.choice([0, 0, 8, 0x20, 0x40, 0x48, 0x11])
        row[table.BASE_TIMESTAMP], row[table.MAX_TIMESTAMP] = rng.randint(-1, 9), rng.randint(-1, 9)
        row[table.LEADER_EPOCH], row[table.PRODUCER_ID], row[table.PRODUCER_EPOCH] = rng.choice(
            [(-1, -1, -1), (INT32_MAX, INT64_MAX, 32767), (3, 4, 5)]
        )
        row[table.BASE_SEQUENCE], row[table.CRC] = rng.choice([-1, INT32_MAX]), 77
        row[table.COUNT], row[table.PAYLOAD_SIZE] = count, len(payload)
        row[table.SKIP] = rng.choice([0, 0, 0, 0, 1])
        rows.append(row)
        payloads.append(payload)
        offset += delta + rng.choice([1, 1, 5])
    return rows, payloads


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[Row], list[bytes]]:
    rows, payloads = competing(draw(seeds))
    payloads[-1] = draw(mutated(payloads[-1]))
    rows[-1][table.PAYLOAD_SIZE] = len(payloads[-1])
    return rows, payloads


log_batches = seeds.map(competing) | seeds.map(competing) | damaged() | batches_in_memory()


# --- the map ----------------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=200), place=places)
def test_md5_is_its_twins(data: bytes, place: Place) -> None:
    memory, scratch, result = place(data), place(128), place(16)
    assert kernels().md5(address_of(memory), len(data), address_of(scratch), address_of(result)) == codes.OK
    assert result.tobytes() == twins.md5(data)


@st.composite
def key_maps(draw: st.DrawFn) -> KeyMap:
    slot_count = draw(st.sampled_from([2, 8, 50, 50, 50, 50]))
    buckets = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return KeyMap(
        slot_count,
        limit=draw(st.sampled_from([2, slot_count, slot_count, slot_count, slot_count])),
        room=draw(st.sampled_from([1, slot_count - 1, slot_count - 1, slot_count - 1])),
        secret=draw(st.tuples(st.integers(0, INT64_MAX), st.integers(0, INT64_MAX))),
        md5=draw(st.booleans()),
        order=draw(st.sampled_from([marks.ORDER_OFFSET, marks.ORDER_TIMESTAMP, marks.ORDER_HEADER])),
        header=draw(st.sampled_from([HEADER, HEADER, b""])),
        bucket=draw(st.integers(0, buckets - 1)),
        buckets=buckets,
    )


def entry_bytes(keys: KeyMap) -> int:
    return 24 if keys.order == marks.ORDER_OFFSET else 32


def key_block(keys: KeyMap, place: Place) -> tuple[Any, Any]:
    """(block, what it points at: the map first). The map is empty."""
    block = place(slots.K_SLOTS * 8, np.int64)
    memory, scratch, name = place(keys.slots * entry_bytes(keys)), place(64 * 48 + 128), place(keys.header)
    block[slots.K_MAP], block[slots.K_MAP_SLOTS] = address_of(memory), keys.slots
    block[slots.K_SLOT_BYTES] = entry_bytes(keys)
    block[slots.K_LIMIT], block[slots.K_ROOM] = keys.limit, keys.room
    block[slots.K_SECRET_0], block[slots.K_SECRET_1] = keys.secret
    block[slots.K_MD5], block[slots.K_ORDER] = keys.md5, keys.order
    block[slots.K_SCRATCH] = address_of(scratch)
    block[slots.K_HEADER], block[slots.K_HEADER_SIZE] = address_of(name), len(keys.header)
    block[slots.K_MAX_OFFSET], block[slots.K_LAST_OFFSET] = INT64_MAX, -1
    block[slots.K_BUCKET], block[slots.K_BUCKETS] = keys.bucket, keys.buckets
    return block, (memory, scratch, name)


def entries_of(memory: Any, keys: KeyMap) -> list[tuple[twins.Hash, int, int]]:
    """(hash, offset, version) in the order of the slots."""
    form = "<QQqq" if entry_bytes(keys) == 32 else "<QQq"
    found = [(*entry, 0)[:4] for entry in struct.iter_unpack(form, memory.tobytes())]
    return [((low, high), mark - 1, version) for low, high, mark, version in found if mark]


def as_entries(memory: Any, keys: KeyMap) -> dict[twins.Hash, tuple[int, int]]:
    return {found: (offset, version) for found, offset, version in entries_of(memory, keys)}


def _check_keep_latest(
    rows: list[Row],
    payloads: list[bytes],
    low: int,
    high: int,
    keys: KeyMap,
    block: Any,
    batch_table: Any,
    place: Place,
) -> None:
    live = [row for row in rows if not row[table.SKIP]]
    flags = place(sum(min(row[table.COUNT], row[table.PAYLOAD_SIZE] // 7) for row in live))
    block[slots.K_KEEP] = address_of(flags)
    for tombstones in (False, True):
        block[slots.K_TOMBSTONES_TOO] = tombstones
        expected = twins.keep_latest(rows, payloads, 0, len(rows), low, high, keys, tombstones=tombstones)
        code = kernels().keep_latest(address_of(batch_table), 0, len(rows), address_of(block))
        assert code == expected.code
        if code == codes.OK:
            assert flags.tolist()[: len(expected.flags)] == expected.flags
            assert block[slots.K_RECORDS] == sum(expected.flags)
        else:
            assert block[slots.K_BATCH] == expected.batch


@settings(max_examples=150)
@given(
    batches=log_batches,
    keys=key_maps(),
    place=places,
    low=st.sampled_from([0, 0, 0, 2]),
    high=st.sampled_from([INT64_MAX, INT64_MAX, 9]),
    first=st.sampled_from([0, 0, 0, 1, 9]),
    way=st.sampled_from(["alone", "alone", "shared", "only known"]),
)
def test_index_keys_merge_maps_and_mark_offsets_are_their_twins(
    batches: tuple[list[Row], list[bytes]], keys: KeyMap, place: Place, low: int, high: int, first: int, way: str
) -> None:
    rows, payloads = batches
    first = min(first, len(rows))
    if way == "shared":
        keys.order = marks.ORDER_OFFSET
    block, (memory, *_keep) = key_block(keys, place)
    batch_table, _payloads = in_memory(rows, payloads, place)
    if way == "only known":  # those of the first batch
        twins.index_keys(rows, payloads, 0, 1, 0, INT64_MAX, keys)
        kernels().index_keys(address_of(batch_table), 0, 1, address_of(block))
        block[slots.K_ONLY_KNOWN], block[slots.K_LAST_OFFSET] = 1, -1
    used = place(8, np.int64)
    if way == "shared":
        block[slots.K_SHARED_USED] = address_of(used)
    block[slots.K_MIN_OFFSET], block[slots.K_MAX_OFFSET] = low, high
    expected = twins.index_keys(
        rows, payloads, first, len(rows), low, high, keys, only_known=way == "only known", shared=way == "shared"
    )
    code = kernels().index_keys(address_of(batch_table), first, len(rows), address_of(block))
    assert code == expected.code
    assert as_entries(memory, keys) == keys.entries
    assert (used[0] if way == "shared" else block[slots.K_USED]) == len(keys.entries)
    assert block[slots.K_BATCH] == expected.batch
    assert (block[slots.K_RECORDS], block[slots.K_KEYLESS]) == (expected.records, expected.keyless)
    if way != "shared":
        assert block[slots.K_LAST_OFFSET] == expected.last_offset
        if code == codes.FULL:
            assert block[slots.K_STOP_OFFSET] == expected.stop_offset

    if not keys.md5:
        _check_keep_latest(rows, payloads, low, high, keys, block, batch_table, place)
    source = entries_of(memory, keys)
    spans = sorted(offset for _, offset, _ in source) or [0]
    begin, end = spans[0] + low, min(spans[-1] + low, spans[0] + 999)
    bits = place((max(end - begin, 0) + 7) // 8 + 1)
    assert kernels().mark_offsets(
        address_of(memory), keys.slots, entry_bytes(keys), begin, max(begin, end), address_of(bits)
    ) == (codes.OK)
    assert bits.tobytes() == twins.mark_offsets([offset for _, offset, _ in source], begin, max(begin, end)).data

    other = KeyMap(keys.slots + 3, keys.limit, keys.room, keys.secret, keys.md5, keys.order, keys.header)
    block, (target, *_keep) = key_block(other, place)
    twins.index_keys(rows, payloads, 0, 1, 0, INT64_MAX, other)
    kernels().index_keys(address_of(batch_table), 0, 1, address_of(block))
    merged = twins.merge_maps(source, other)
    assert kernels().merge_maps(address_of(memory), keys.slots, address_of(block)) == merged
    assert as_entries(target, other) == other.entries
    assert block[slots.K_USED] == len(other.entries)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("limit", "room"), [(300, 300), (299, 350), (350, 299), (300, 350), (64, 400), (400, 63)])
def test_a_map_takes_more_keys_than_it_looks_ahead(limit: int, room: int, shared: bool) -> None:
    rng = random.Random(limit * room)
    ids = [*range(300), *(rng.randrange(300) for _ in range(700))]
    rng.shuffle(ids)
    payload = b"".join(wire.record(b"key%d" % each, b"v", offset_delta=i) for i, each in enumerate(ids))
    row = [0] * table.COLUMNS
    row[table.MAGIC], row[table.COUNT], row[table.PAYLOAD_SIZE], row[table.LAST_OFFSET] = 2, 1000, len(payload), 999
    memory, _keep = in_memory([row], [payload], guarded.at_end)
    keys = KeyMap(410, limit, room, (5, 6))
    block, (entries, *_rest) = key_block(keys, guarded.at_end)
    used = guarded.at_end(8, np.int64)
    block[slots.K_SHARED_USED] = address_of(used) if shared else 0
    expected = twins.index_keys([row], [payload], 0, 1, 0, INT64_MAX, keys, shared=shared)
    assert kernels().index_keys(address_of(memory), 0, 1, address_of(block)) == expected.code
    assert as_entries(entries, keys) == keys.entries
    assert block[slots.K_RECORDS] == expected.records
    if not shared and expected.code == codes.FULL:
        assert (block[slots.K_STOP_OFFSET], block[slots.K_LAST_OFFSET]) == (expected.stop_offset, expected.last_offset)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def window(rng: random.Random, rows: list[Row]) -> Bits | None:
    """Bits around one of the batches, or none."""
    row = rng.choice(rows)
    first = max(row[table.BASE_OFFSET] - rng.randint(-1, 9), 0)
    end = min(row[table.LAST_OFFSET] + rng.choice([0, 1, 2, 40]), first + (1 << 16), INT64_MAX)
    if end <= first or rng.random() < 0.4:
        return None
    return twins.mark_offsets([first + rng.randint(0, 40) for _ in range(rng.choice([0, 1, 4, 12]))], first, end)


def put_bits(block: Any, at: int, bits: Bits | None, place: Place) -> Any:
    """Into three slots of the block; returns what must be kept."""
    if bits is None:
        return None
    memory = place(bits.data)
    block[at : at + 3] = address_of(memory), bits.first_offset, bits.end_offset
    return memory


def mark_table(rows: list[Mark], place: Place) -> Any:
    return place(np.array(rows, np.int64), np.int64).reshape(-1, marks.MARK_COLUMNS)


@given(batches=log_batches, place=places, seed=seeds)
def test_skip_superseded_is_its_twins(batches: tuple[list[Row], list[bytes]], place: Place, seed: int) -> None:
    rows, _payloads = batches
    bits = window(random.Random(seed), rows) or Bits(0, 9, bytes(3))
    memory, placed = place(bits.data), columnar.batch_table(rows, place)
    code = kernels().skip_superseded(
        address_of(placed), len(rows), address_of(memory), bits.first_offset, bits.end_offset
    )
    assert code == codes.OK
    assert placed.tolist() == twins.skip_superseded(rows, bits)


BATCH_SLOTS = {
    "first_uncleanable": slots.B_FIRST_UNCLEANABLE,
    "now_ms": slots.B_NOW_MS,
    "delete_retention_ms": slots.B_DELETE_RETENTION_MS,
    "codec": slots.B_CODEC,
    "superseded": slots.B_SUPERSEDED,
    "aborted": slots.B_ABORTED,
    "markers": slots.B_MARKERS,
    "read": slots.B_READ,
    "kept": slots.B_KEPT,
    "tombstones": slots.B_TOMBSTONES,
    "next_horizon": slots.B_NEXT_HORIZON,
    "changed": slots.B_CHANGED,
}


@settings(max_examples=150)
@given(batches=log_batches, place=places, seed=seeds)
def test_judge_batches_and_choose_actions_are_their_twins(
    batches: tuple[list[Row], list[bytes]], place: Place, seed: int
) -> None:
    rng = random.Random(seed)
    rows = [list(row) for row in batches[0]]
    for row in rows:
        row[table.ATTRIBUTES] = rng.randint(0, 0x7F) & rng.choice([0x60, 0x7F])
        row[table.SIZE] = rng.choice([61, 62])
        row[table.BASE_TIMESTAMP] = rng.randint(-1, 9)
        row[table.MAGIC] = rng.choice([2, 2, 2, 1])
    bits = window(rng, rows)
    told = Batches(
        first_uncleanable=rng.choice([INT64_MAX, rows[-1][table.LAST_OFFSET] + 1]),
        now_ms=rng.randint(0, 9),
        delete_retention_ms=rng.choice([0, 5]),
        codec=rng.randint(-1, 4),
    )
    states = [[0] * marks.MARK_COLUMNS for _ in rows]
    for state in states:
        state[marks.MARK_MAY_GO], state[marks.MARK_STAYS] = rng.randint(0, 1), rng.randint(0, 1)
    block = place(slots.B_SLOTS * 8, np.int64)
    placed, placed_marks = columnar.batch_table(rows, place), mark_table(states, place)
    block[slots.B_MARKS] = address_of(placed_marks)
    _keep = put_bits(block, slots.B_SURVIVORS, bits, place)
    assert BATCH_SLOTS.keys() == {each.name for each in fields(told)}
    for name, slot in BATCH_SLOTS.items():
        block[slot] = getattr(told, name)

    twins.judge_batches(rows, states, told, bits)
    assert kernels().judge_batches(address_of(placed), len(rows), address_of(block)) == codes.OK
    assert placed.tolist() == rows
    assert placed_marks.tolist() == states

    for row, state in zip(rows, states, strict=True):  # what a judge of the records may leave
        if not row[table.SKIP]:
            kept = rng.choice([0, row[table.COUNT], rng.randint(0, row[table.COUNT])])
            state[marks.MARK_KEPT], state[marks.MARK_TOMBSTONES] = kept, rng.choice([0, rng.randint(0, kept)])
            state[marks.MARK_NULLED] = rng.randint(0, state[marks.MARK_TOMBSTONES])
    placed_marks[:] = states
    first = rng.randint(0, len(rows))
    twins.choose_actions(rows, states, first, len(rows), told)
    assert kernels().choose_actions(address_of(placed), first, len(rows), address_of(block)) == codes.OK
    assert placed.tolist() == rows
    assert placed_marks.tolist() == states
    assert {name: block[slot] for name, slot in BATCH_SLOTS.items()} == vars(told)


@settings(max_examples=200)
@given(
    batches=log_batches,
    keys=key_maps(),
    place=places,
    first=st.sampled_from([0, 0, 0, 1, 9]),
    max_offset=st.sampled_from([INT64_MAX, INT64_MAX, 9]),
    now_ms=st.integers(-1, 9),
    expired_before=st.sampled_from([-1, 0, 0, 5, INT64_MAX]),
    keep_legacy_tombstones=st.booleans(),
    seed=seeds,
)
def test_judge_is_its_twins(
    batches: tuple[list[Row], list[bytes]],
    keys: KeyMap,
    place: Place,
    first: int,
    max_offset: int,
    now_ms: int,
    expired_before: int,
    keep_legacy_tombstones: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    rows, payloads = batches
    first = min(first, len(rows))
    block, (memory, *_keep) = key_block(keys, place)
    known, _known = in_memory(*rng.choice([batches, competing(seed)]), place)
    kernels().index_keys(address_of(known), 0, len(known), address_of(block))
    keys.entries = as_entries(memory, keys)
    states = [[0] * marks.MARK_COLUMNS for _ in rows]
    bits = window(rng, rows)
    expected = twins.judge(
        rows,
        payloads,
        first,
        len(rows),
        keys,
        states,
        max_offset=max_offset,
        now_ms=now_ms,
        keep_legacy_tombstones=keep_legacy_tombstones,
        expired_before=expired_before,
        bits=bits,
    )
    placed, _payloads = in_memory(rows, payloads, place)
    before = [[0] * marks.MARK_COLUMNS for _ in rows]
    placed_marks = mark_table(before, place)
    # A record takes two bytes at least before it is found out, however many a batch claims to have.
    live = [row for row in rows[first:] if not row[table.SKIP]]
    flags = place(sum(min(row[table.COUNT], row[table.PAYLOAD_SIZE] // 2) for row in live))
    block[slots.K_MAX_OFFSET], block[slots.K_NOW_MS] = max_offset, now_ms
    block[slots.K_EXPIRED_BEFORE], block[slots.K_KEEP_LEGACY_TOMBSTONES] = expired_before, keep_legacy_tombstones
    block[slots.K_MARKS], block[slots.K_KEEP] = address_of(placed_marks), address_of(flags)
    block[slots.K_KEYLESS] = 0
    _bits = put_bits(block, slots.K_SURVIVORS, bits, place)

    code = kernels().judge(address_of(placed), first, len(rows), address_of(block))
    assert code == expected.code
    if code != codes.OK:
        assert block[slots.K_BATCH] == expected.batch
        return
    assert flags.tolist()[: len(expected.keep)] == expected.keep
    assert placed_marks.tolist() == states
    assert (block[slots.K_SUPERSEDED], block[slots.K_KEYLESS]) == (expected.superseded, expected.keyless)
    assert (block[slots.K_TOMBSTONES], block[slots.K_NULLED]) == (expected.tombstones, expected.nulled)


def test_a_judge_takes_more_records_than_it_looks_ahead() -> None:
    rng = random.Random(1)
    rows, payloads = [], []
    for b in range(3):
        payload = b"".join(
            wire.record(
                b"k%d" % rng.randrange(40), None if rng.random() < 0.2 else b"v", timestamp_delta=i, offset_delta=i
            )
            for i in range(150)
        )
        row = [0] * table.COLUMNS
        row[table.BASE_OFFSET], row[table.LAST_OFFSET], row[table.MAGIC] = 150 * b, 150 * b + 149, 2
        row[table.COUNT], row[table.PAYLOAD_SIZE] = 150, len(payload)
        row[table.ATTRIBUTES] = table.DELETE_HORIZON_BIT if b == 1 else 0
        rows.append(row)
        payloads.append(payload)
    placed, _payloads = in_memory(rows, payloads, guarded.at_end)
    keys = KeyMap(64, 60, 60, (1, 2))
    block, (memory, *_keep) = key_block(keys, guarded.at_end)
    assert kernels().index_keys(address_of(placed), 0, 2, address_of(block)) == codes.OK
    keys.entries = as_entries(memory, keys)
    states = [[0] * marks.MARK_COLUMNS for _ in rows]
    placed_marks, flags = mark_table(states, guarded.at_end), guarded.at_end(450)
    block[slots.K_MARKS], block[slots.K_KEEP] = address_of(placed_marks), address_of(flags)
    block[slots.K_EXPIRED_BEFORE], block[slots.K_KEYLESS] = 75, 0
    expected = twins.judge(
        rows,
        payloads,
        0,
        3,
        keys,
        states,
        max_offset=INT64_MAX,
        now_ms=0,
        keep_legacy_tombstones=False,
        expired_before=75,
        bits=None,
    )
    assert kernels().judge(address_of(placed), 0, 3, address_of(block)) == codes.OK
    assert flags.tolist() == expected.keep
    assert set(expected.keep) == {marks.DROP_RECORD, marks.KEEP_RECORD, marks.NULL_RECORD}
    assert placed_marks.tolist() == states


# --- batches written anew ---------------------------------------------------------------------------------------------


def laid_out(rows: list[Row], payloads: list[bytes]) -> bytes:
    """Bytes in which the rows' batches lie side by side; their places go into the rows."""
    data = b""
    for number, (row, payload) in enumerate(zip(rows, payloads, strict=True)):
        row[table.POSITION], row[table.SIZE] = len(data), 61 + len(payload)
        data += bytes([number]) * 61 + payload
    return data


def verdicts(rng: random.Random, row: Row, payload: bytes) -> list[int]:
    """A byte for each record; only a sound one can have been found to lose its value."""
    cursor = Cursor(payload)
    out = []
    kinds = [marks.KEEP_RECORD, marks.DROP_RECORD, marks.NULL_RECORD]
    for _ in range(row[table.COUNT]):
        try:
            parse_record(cursor)
        except Malformed:
            kinds = kinds[:2]
        out.append(rng.choice(kinds))
    return out


@settings(max_examples=200)
@given(batches=log_batches, place=places, first=st.sampled_from([0, 0, 0, 1, 9]), seed=seeds)
def test_rewrite_room_and_rewrite_are_their_twins(
    batches: tuple[list[Row], list[bytes]], place: Place, first: int, seed: int
) -> None:
    rng = random.Random(seed)
    rows, payloads = batches
    first = min(first, len(rows))
    for row in rows:
        row[table.COUNT] = min(row[table.COUNT], 60)
    content = laid_out(rows, payloads)
    states: list[Mark] = []
    keep: list[int] = []
    leader: Row | None = None  # of batches that may be joined
    for b, (row, payload) in enumerate(zip(rows, payloads, strict=True)):
        found = verdicts(rng, row, payload)
        state = [0] * marks.MARK_COLUMNS
        state[marks.MARK_ACTION] = rng.choice([marks.REBUILD] * 5 + [marks.DELETE, marks.VERBATIM, marks.EMPTY])
        state[marks.MARK_KEPT] = len(found) - found.count(marks.DROP_RECORD)
        if row[table.SKIP]:
            state[marks.MARK_KEPT] = row[table.COUNT]
        elif b >= first:
            keep += found
        state[marks.MARK_HORIZON] = rng.choice([-1, -1, 0, 1 << 41, INT64_MAX])
        state[marks.MARK_CODEC] = rng.choice([0, 0, 4])
        if state[marks.MARK_ACTION] == marks.REBUILD:
            near = leader is not None and 0 <= row[table.BASE_OFFSET] - leader[table.BASE_OFFSET] <= INT32_MAX - 60_000
            if near and row[table.MAGIC] == 2 and rng.random() < 0.5:
                state[marks.MARK_JOIN] = 1
            else:
                leader = row if row[table.MAGIC] == 2 and b >= first else None
        elif state[marks.MARK_ACTION] != marks.DELETE:
            leader = None
        states.append(state)
    memory, (placed, _payloads) = place(content), in_memory(rows, payloads, place)
    placed_marks, flags = mark_table(states, place), place(bytes(keep))
    for row, address in zip(rows, placed[:, table.PAYLOAD_ADDRESS].tolist(), strict=True):
        row[table.PAYLOAD_ADDRESS] = address
    room = kernels().rewrite_room(address_of(placed), address_of(placed_marks), first, len(rows))
    assert room == twins.rewrite_room(rows, states, first, len(rows))
    out, made = place(room), place((len(rows) - first) * table.ROW_BYTES, np.int64).reshape(-1, table.COLUMNS)
    block = place(slots.W_SLOTS * 8, np.int64)
    block[slots.W_KEEP], block[slots.W_OUT] = address_of(flags), address_of(out)
    block[slots.W_TABLE] = address_of(made)

    expected = twins.rewrite(content, rows, payloads, states, first, len(rows), keep, address_of(out))
    code = kernels().rewrite(
        address_of(memory), address_of(placed), address_of(placed_marks), first, len(rows), address_of(block)
    )
    assert code == expected.code
    if code != codes.OK:
        assert block[slots.W_BATCH] == expected.batch
        return
    assert made[: block[slots.W_TABLE_N]].tolist() == expected.table
    assert out[: block[slots.W_OUT_SIZE]].tobytes() == expected.data


@settings(max_examples=50)
@given(
    base=times | int64s,
    delta=int64s,
    horizon=st.sampled_from([-1, 0, INT64_MAX]),
    gap=st.sampled_from([0, 1 << 20, INT32_MAX]),
    size=st.integers(110, 130),
)
def test_the_room_for_batches_written_anew_is_enough_for_the_widest_numbers(
    base: int, delta: int, horizon: int, gap: int, size: int
) -> None:
    """A record whose own numbers take a byte each, joined to a batch far in front of it and to a time far away."""
    records = [wire.record(b"k", b"v" * size), wire.record(b"k", b"v" * size, timestamp_delta=delta)]
    rows = []
    for number, payload in enumerate(records):
        row = [0] * table.COLUMNS
        row[table.BASE_OFFSET] = row[table.LAST_OFFSET] = number * gap
        row[table.MAGIC], row[table.COUNT], row[table.PAYLOAD_SIZE] = 2, 1, len(payload)
        row[table.BASE_TIMESTAMP] = twins.int64(-base) if number else base
        rows.append(row)
    content = laid_out(rows, records)
    state = [0] * marks.MARK_COLUMNS
    state[marks.MARK_ACTION], state[marks.MARK_KEPT], state[marks.MARK_HORIZON] = marks.REBUILD, 1, horizon
    states = [state, list(state)]
    states[1][marks.MARK_JOIN] = 1
    memory, (placed, _payloads) = guarded.at_end(content), in_memory(rows, records, guarded.at_end)
    placed_marks, flags = mark_table(states, guarded.at_end), guarded.at_end(b"\1\1")
    out = guarded.at_end(kernels().rewrite_room(address_of(placed), address_of(placed_marks), 0, 2))
    made = guarded.at_end(2 * table.ROW_BYTES, np.int64).reshape(-1, table.COLUMNS)
    block = guarded.at_end(slots.W_SLOTS * 8, np.int64)
    block[slots.W_KEEP], block[slots.W_OUT] = address_of(flags), address_of(out)
    block[slots.W_TABLE] = address_of(made)
    code = kernels().rewrite(address_of(memory), address_of(placed), address_of(placed_marks), 0, 2, address_of(block))
    expected = twins.rewrite(content, rows, records, states, 0, 2, [1, 1], address_of(out))
    assert (code, block[slots.W_TABLE_N]) == (codes.OK, 1)
    assert out[: block[slots.W_OUT_SIZE]].tobytes() == expected.data


# --- records cut off --------------------------------------------------------------------------------------------------

CUT = {
    "short": wire.record(b"key", b"value", timestamp_delta=5),
    "long": wire.record(b"k" * 70, b"v" * 64, timestamp_delta=1 << 50),
    "nulls": wire.record(None, None),
    "headers": wire.record(b"k", None, headers=[(HEADER, b"x" * 8), (b"", None), (b"n" * 65, b"")]),
}


@pytest.mark.parametrize("name", CUT)
def test_a_record_cut_anywhere_is_malformed_and_nothing_behind_it_is_read(name: str) -> None:
    record = CUT[name]
    body = record[1:] if record[0] < 0x80 else record[2:]
    cuts = [record[:size] for size in range(len(record))]
    cuts += [wire.varint(size) + body[:size] for size in range(len(body))]  # with a length that admits it
    keys = KeyMap(4, 3, 3, order=marks.ORDER_HEADER, header=HEADER)
    bits = twins.mark_offsets([0], 0, 1)
    for payload in cuts:
        row = [0] * table.COLUMNS
        row[table.MAGIC], row[table.COUNT], row[table.PAYLOAD_SIZE] = 2, 1, len(payload)
        placed, _payloads = in_memory([row], [payload], guarded.at_end)
        block, _keep = key_block(keys, guarded.at_end)
        assert kernels().index_keys(address_of(placed), 0, 1, address_of(block)) == codes.BAD_RECORD
        placed_marks, flags = mark_table([[0] * marks.MARK_COLUMNS], guarded.at_end), guarded.at_end(1)
        block[slots.K_MARKS], block[slots.K_KEEP] = address_of(placed_marks), address_of(flags)
        assert kernels().judge(address_of(placed), 0, 1, address_of(block)) == codes.BAD_RECORD
        memory = put_bits(block, slots.K_SURVIVORS, bits, guarded.at_end)
        assert memory is not None
        kernels().judge(address_of(placed), 0, 1, address_of(block))  # it need not look at headers
        placed_marks[0, marks.MARK_ACTION], placed_marks[0, marks.MARK_KEPT] = marks.REBUILD, 1
        out = guarded.at_end(kernels().rewrite_room(address_of(placed), address_of(placed_marks), 0, 1))
        made, rewritten = guarded.at_end(table.ROW_BYTES), guarded.at_end(slots.W_SLOTS * 8, np.int64)
        flags[0] = marks.KEEP_RECORD
        rewritten[slots.W_KEEP], rewritten[slots.W_OUT] = address_of(flags), address_of(out)
        rewritten[slots.W_TABLE] = address_of(made)
        kernels().rewrite(0, address_of(placed), address_of(placed_marks), 0, 1, address_of(rewritten))
