"""Every kernel against its plain-Python twin, on good and on hostile bytes, in memory that borders unmapped pages.

A kernel that touches one byte outside of what it was given ends the process here, with the test's name in the
traceback. The twins are in `twins`, the memory in `guarded`.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import columnar
import compaction_twins
import crc32c as library_crc32c
import guarded
import numpy as np
import pytest
import twins
import wire
from guarded import Place
from hostile import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    batches_in_memory,
    headers,
    in_memory,
    int32s,
    int64s,
    mutated,
    payloads_of_records,
    places,
    plain_strings,
    sound_records,
    steps,
    strings,
    times,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logstore.records import codes, slots, table
from logstore.records import kernels as source
from logstore.records.native import address_of, kernels


def test_every_kernel_has_a_twin() -> None:
    assert [
        name for name in source.PARAMETERS if not hasattr(twins, name) and not hasattr(compaction_twins, name)
    ] == []


@pytest.mark.parametrize("where", ["at_end", "at_start"])
def test_guarded_memory_ends_the_process_one_byte_further(where: str) -> None:
    program = f"import sys, guarded, ctypes; a = guarded.{where}(bytes(100)); start = a.ctypes.data; \
        ctypes.string_at(start, 100); sys.stdout.write('inside'); sys.stdout.flush(); \
        ctypes.string_at(start + (100 if {where == 'at_end'} else -1), 1)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.stdout == "inside"
    assert done.returncode == -signal.SIGSEGV


# --- checksums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["crc32c", "crc32c_striped", "crc32c_tables"])
@given(data=st.binary(max_size=400), place=places)
def test_crc32c_is_its_twins(name: str, data: bytes, place: Place) -> None:
    memory = place(data)
    assert getattr(kernels(), name)(address_of(memory), len(data)) == twins.crc32c(data)


@pytest.mark.parametrize("name", ["crc32c", "crc32c_striped", "crc32c_tables"])
@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 513, 3071, 3072, 3073, 6143, 6144, 9217, 100_003]
)
def test_crc32c_of_lengths_around_the_interleaved_stripes(name: str, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    for place in (guarded.at_end, guarded.at_start):
        memory = place(data)
        assert getattr(kernels(), name)(address_of(memory), size) == library_crc32c.crc32c(data)


@pytest.mark.parametrize("name", ["crc32c", "crc32c_striped", "crc32c_tables"])
def test_crc32c_of_the_published_check_string(name: str) -> None:
    data = guarded.at_end(b"123456789")
    assert getattr(kernels(), name)(address_of(data), 9) == 0xE3069283 == twins.crc32c(b"123456789")


# --- encode -----------------------------------------------------------------------------------------------------------


near = st.integers(-9, 9) | st.integers(-(1 << 19), 1 << 19)


@st.composite
def plain_columns(draw: st.DrawFn) -> twins.Rows:
    """Rows without nulls, headers and offsets of their own: nearly all there are, so kernels have a short way for them.

    One row in a few may leave that way again, by its size or its time.
    """
    count = draw(st.integers(1, 8))
    start = draw(st.sampled_from([-1, 0, 1 << 40, 1 << 41]))
    rows = twins.Rows(
        keys=draw(st.lists(plain_strings, min_size=count, max_size=count)),
        values=draw(st.lists(plain_strings, min_size=count, max_size=count)),
        timestamps=draw(
            st.none()
            | st.lists(near.map(lambda step: max(start + step, -1)), min_size=count, max_size=count)
            | st.lists(steps.map(lambda step: max(start + step, -1)), min_size=count, max_size=count)
        ),
        selection=draw(st.none() | st.lists(st.integers(0, count - 1), max_size=12)),
        default_timestamp=draw(times),
        batch_bytes=draw(st.sampled_from([0, 300, 5000, INT32_MAX])),
        batch_records=draw(st.sampled_from([1, 3, INT32_MAX])),
        attributes=draw(st.sampled_from([0, 0, 0, 0x40, 4])),
        delete_horizon=draw(times | int64s),
    )
    rows.out_capacity = max(len(twins.encode(rows).data) - draw(st.integers(-9, 3)), 0)
    return rows


@st.composite
def encoder_rows(draw: st.DrawFn) -> twins.Rows:
    count = draw(st.integers(0, 12))

    def column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=count, max_size=count)

    rows = twins.Rows(
        keys=draw(column(strings)),
        values=draw(column(strings)),
        timestamps=draw(st.none() | column(st.none() | times)),
        headers=draw(st.none() | column(st.none() | headers)),
        offset_deltas=draw(st.none() | column(st.integers(0, INT32_MAX)).map(sorted)),
        selection=draw(st.none() | st.lists(st.integers(0, count - 1), max_size=12)) if count else None,
        default_timestamp=draw(times),
        batch_bytes=draw(st.sampled_from([0, 100, 300, 16384, INT32_MAX])),
        batch_records=draw(st.sampled_from([1, 3, INT32_MAX])),
        table_capacity=draw(st.sampled_from([0, 1, 2, 20])),
        attributes=draw(st.integers(0, 0x7F)),
        leader_epoch=draw(int32s),
        producer_id=draw(int64s),
        producer_epoch=draw(st.integers(-(1 << 15), (1 << 15) - 1)),
        base_sequence=draw(st.sampled_from([-1, 0, INT32_MAX - 1, INT32_MAX])),
        base_offset=draw(st.integers(0, 1 << 62)),
        delete_horizon=draw(times | int64s),
    )
    rows.start = draw(st.integers(0, len(rows.selection if rows.selection is not None else rows.keys)))
    if draw(st.booleans()):  # exactly the room that is needed, or one byte less
        needed = len(twins.encode(rows).data)
        rows.out_capacity = max(needed - draw(st.integers(0, 1)), 0)
    else:
        rows.out_capacity = draw(st.integers(0, 4000))
    return rows


@settings(max_examples=400)
@given(
    rows=encoder_rows() | plain_columns(),
    place=places,
    shift=st.integers(0, 17),
    prefix=st.binary(max_size=3),
    hidden=st.binary(max_size=3),
)
def test_encode_is_its_twins(rows: twins.Rows, place: Place, shift: int, prefix: bytes, hidden: bytes) -> None:
    expected = twins.encode(rows)
    block, keep = columnar.encode_block(rows, place, shift=shift, prefix=prefix, hidden=hidden)
    out, made = keep[-2:]
    code = kernels().encode(address_of(block))
    n = int(block[slots.E_TABLE_N])
    shown = made[:n].copy()
    shown[:, table.PAYLOAD_ADDRESS] -= address_of(out)
    assert code == expected.code
    assert shown.tolist() == expected.table
    assert out[: block[slots.E_OUT_SIZE]].tobytes() == expected.data
    assert block[slots.E_ROW] == expected.row
    assert block[slots.E_BASE_OFFSET] == expected.base_offset
    assert block[slots.E_BASE_SEQUENCE] == expected.base_sequence


@pytest.mark.parametrize("timestamps", [[INT64_MAX, -1, 0], [-1, INT64_MAX], [0, INT64_MIN], [INT64_MIN, INT64_MAX]])
def test_encode_wraps_the_distance_of_two_timestamps_as_java_does(timestamps: list[int]) -> None:
    rows = twins.Rows(keys=[b"k"] * len(timestamps), values=[None] * len(timestamps), timestamps=list(timestamps))
    block, keep = columnar.encode_block(rows, guarded.at_end, shift=0, prefix=b"", hidden=b"")
    assert kernels().encode(address_of(block)) == codes.OK
    assert keep[-2][: block[slots.E_OUT_SIZE]].tobytes() == twins.encode(rows).data


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("attributes", [0, 0x44])
def test_encode_into_every_room_up_to_what_it_needs(nulls: bool, attributes: int) -> None:
    """Also one byte too little must neither be written behind the end nor be taken for enough."""
    rows = twins.Rows(
        keys=[b"k" * 63, b"", None if nulls else b"x" * 64],
        values=[b"v", b"w" * 200, b"y" * 7],
        timestamps=[1000, 1000 - 8193, 1000 + (1 << 20)],
        batch_records=2,
        attributes=attributes,
    )
    for capacity in range(len(twins.encode(rows).data) + 3):
        rows.out_capacity = capacity
        expected = twins.encode(rows)
        block, keep = columnar.encode_block(rows, guarded.at_end, shift=0, prefix=b"", hidden=b"")
        assert kernels().encode(address_of(block)) == expected.code
        assert keep[-2][: block[slots.E_OUT_SIZE]].tobytes() == expected.data


def test_encode_of_more_records_than_a_short_offset_delta_can_count() -> None:
    count = 20_000
    rows = twins.Rows(
        keys=[b"%d" % i for i in range(count)],
        values=[b""] * count,
        timestamps=[1000 + 7 * i for i in range(count)],
        batch_bytes=INT32_MAX,
    )
    block, keep = columnar.encode_block(rows, guarded.at_end, shift=0, prefix=b"", hidden=b"")
    assert kernels().encode(address_of(block)) == codes.OK
    assert keep[-2][: block[slots.E_OUT_SIZE]].tobytes() == b"".join(
        [
            wire.batch(
                b"".join(wire.record(b"%d" % i, b"", timestamp_delta=7 * i, offset_delta=i) for i in range(count)),
                count=count,
                base_timestamp=1000,
                max_timestamp=1000 + 7 * (count - 1),
            )
        ]
    )


@given(payload=st.binary(max_size=300), head=st.binary(min_size=61, max_size=61), place=places)
def test_finish_batch_is_its_twins(payload: bytes, head: bytes, place: Place) -> None:
    memory = place(head + payload)
    expected, crc = twins.finish_batch(head + payload)
    assert kernels().finish_batch(address_of(memory), len(memory)) == crc
    assert memory.tobytes() == expected


# --- scan -------------------------------------------------------------------------------------------------------------


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Batches of all formats one after another, some changed with their checksum made right again, some just cut."""
    pieces = []
    for _ in range(draw(st.integers(0, 5))):
        payload, count = draw(payloads_of_records())
        match draw(st.sampled_from(["batch", "batch", "lie", "changed", "header", "v0", "v1", "noise", "short"])):
            case "batch":
                pieces.append(
                    wire.batch(payload, count=min(count, len(payload) // 7), base_offset=draw(st.integers(0, 1 << 62)))
                )
            case "lie":
                pieces.append(
                    wire.batch(
                        payload,
                        count=draw(int32s),
                        base_offset=draw(st.integers(0, 1 << 62) | int64s),
                        last_offset_delta=draw(int32s),
                        attributes=draw(st.integers(-(1 << 15), (1 << 15) - 1)),
                        magic=draw(st.sampled_from([2, 2, 2, 0, 1, 3, -1])),
                        length=draw(st.none() | int32s),
                        base_timestamp=draw(int64s),
                        max_timestamp=draw(int64s),
                        base_sequence=draw(int32s),
                    )
                )
            case "changed":
                piece = draw(mutated(wire.batch(payload, count=count)))
                pieces.append(wire.resealed(piece) if len(piece) > 21 else piece)
            case "header":
                pieces.append(wire.batch(b"", count=0, last_offset_delta=draw(st.integers(0, 5))))
            case "v0":
                pieces.append(wire.message(draw(st.integers(0, 99)), b"k", draw(strings), magic=0))
            case "v1":
                pieces.append(wire.message(draw(st.integers(0, 99)), None, draw(strings), timestamp=draw(int64s)))
            case "noise":
                pieces.append(draw(st.binary(max_size=40)))
            case _:
                pieces.append(draw(mutated(wire.batch(payload, count=count))))
    data = b"".join(pieces)
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@settings(max_examples=300)
@given(data=logs(), capacity=st.sampled_from([0, 1, 2, 50]), verify=st.booleans(), place=places, pick=st.integers(0, 9))
@example(data=wire.batch(b"", count=0, base_offset=INT64_MAX), capacity=9, verify=True, place=guarded.at_end, pick=0)
@example(
    data=wire.batch(b"", count=0, base_offset=INT64_MAX - 7, last_offset_delta=7),
    capacity=9,
    verify=True,
    place=guarded.at_end,
    pick=0,
)
@example(
    data=wire.batch(b"", count=0, base_offset=INT64_MAX - 7, last_offset_delta=INT32_MAX),
    capacity=9,
    verify=True,
    place=guarded.at_end,
    pick=0,
)
@example(data=wire.batch(bytes(6), count=INT32_MAX), capacity=9, verify=True, place=guarded.at_end, pick=0)
def test_scan_is_its_twins(data: bytes, capacity: int, verify: bool, place: Place, pick: int) -> None:
    whole = twins.scan(data, start=0, capacity=9, verify=False)
    starts = [0, len(data), *(row[table.POSITION] for row in whole.table)]
    start = starts[pick % len(starts)]
    expected = twins.scan(data, start=start, capacity=capacity, verify=verify)
    memory = place(data)
    rows = place(capacity * table.ROW_BYTES, np.int64).reshape(-1, table.COLUMNS)
    block = place(np.array([start, capacity, verify, 0, 0], np.int64), np.int64)
    code = kernels().scan(address_of(memory), len(data), address_of(rows), address_of(block))
    found = rows[: block[slots.S_N]].copy()
    found[found[:, table.PAYLOAD_ADDRESS] != 0, table.PAYLOAD_ADDRESS] -= address_of(memory)
    assert (code, int(block[slots.S_NEXT])) == (expected.code, expected.next_position)
    assert found.tolist() == expected.table


# --- decode -----------------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(
    batches=batches_in_memory(),
    place=places,
    room=st.sampled_from([-1, 0, 1, 3, None, None, None, None]),
    min_offset=st.sampled_from([0, 0, 2, 6, 1002, INT64_MAX]),
    max_offset=st.sampled_from([INT64_MAX, INT64_MAX, 3, 1001, 0]),
    first=st.sampled_from([0, 0, 0, 1, 4]),
    flags=st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=20),
)
def test_decode_is_its_twins(
    batches: tuple[list[twins.Row], list[bytes]],
    place: Place,
    room: int | None,
    min_offset: int,
    max_offset: int,
    first: int,
    flags: list[int] | None,
) -> None:
    rows, payloads = batches
    first = min(first, len(rows))
    live = [row for row in rows[first:] if not row[table.SKIP]]
    payload_bytes = sum(row[table.PAYLOAD_SIZE] for row in live)
    # No payload holds more than this, however many records its batch claims to have.
    records = sum(min(row[table.COUNT], row[table.PAYLOAD_SIZE] // 7) for row in live)
    capacity = payload_bytes // 2 if room is None else room
    keep = None if flags is None else place(bytes(flags[i % len(flags)] for i in range(records)))
    expected = twins.decode(
        rows,
        payloads,
        first,
        len(rows),
        min_offset=min_offset,
        max_offset=max_offset,
        header_capacity=capacity,
        keep=None if keep is None else keep.tolist(),
    )
    memory, _keep = in_memory(rows, payloads, place)
    block = place(slots.D_SLOTS * 8, np.int64)
    block[slots.D_MIN_OFFSET], block[slots.D_MAX_OFFSET] = min_offset, max_offset
    block[slots.D_KEEP] = 0 if keep is None else address_of(keep)
    outputs = columnar.Outputs(records, payload_bytes, capacity, place, block)

    code = kernels().decode(address_of(memory), first, len(rows), address_of(block))
    n = int(block[slots.D_N])
    assert (code, n, int(block[slots.D_BATCH])) == (expected.code, len(expected.offsets), expected.batch)
    assert outputs.arrays["offsets"][:n].tolist() == expected.offsets
    assert outputs.arrays["timestamps"][:n].tolist() == expected.timestamps
    assert outputs.arrays["timestamp_types"][:n].tolist() == expected.timestamp_types
    assert outputs.strings("key", n) == expected.keys
    assert outputs.strings("value", n) == expected.values
    if capacity >= 0:
        assert outputs.headers(n) == expected.headers
    if room is None:
        assert code != codes.FULL
    if code == codes.OK:
        assert block[slots.D_KEY_NULLS] == expected.keys.count(None)
        assert block[slots.D_VALUE_NULLS] == expected.values.count(None)
        flat = [content for entries in expected.headers for _, content in entries] if capacity >= 0 else []
        assert block[slots.D_HEADER_N] == len(flat)
        assert block[slots.D_HEADER_VALUE_NULLS] == flat.count(None)


def decode_one(payload: bytes, count: int, delta: int = INT32_MAX) -> tuple[int, int]:
    """(code, records) of one batch, at the end of its memory."""
    row = [0] * table.COLUMNS
    row[table.MAGIC], row[table.COUNT], row[table.PAYLOAD_SIZE], row[table.LAST_OFFSET] = 2, count, len(payload), delta
    memory, _keep = in_memory([row], [payload], guarded.at_end)
    block = guarded.at_end(slots.D_SLOTS * 8, np.int64)
    block[slots.D_MAX_OFFSET] = INT64_MAX
    room = min(count, len(payload) // 7)
    _outputs = columnar.Outputs(room, len(payload), len(payload) // 2, guarded.at_end, block)
    code = kernels().decode(address_of(memory), 0, 1, address_of(block))
    expected = twins.decode(
        [row], [payload], 0, 1, min_offset=0, max_offset=INT64_MAX, header_capacity=len(payload) // 2
    )
    assert (code, block[slots.D_N]) == (expected.code, len(expected.offsets))
    return code, int(block[slots.D_N])


CUT = {
    "short": wire.record(b"key", b"value", timestamp_delta=5, offset_delta=1),
    "long value": wire.record(b"key", b"v" * 100, timestamp_delta=-9000, offset_delta=70),
    "long key": wire.record(b"k" * 70, b"v" * 64, timestamp_delta=1 << 19, offset_delta=1),
    "late": wire.record(b"key", b"value", timestamp_delta=1 << 50, offset_delta=1 << 20),
    "nulls": wire.record(None, None, offset_delta=1),
    "empty": wire.record(b"", b"", offset_delta=1),
    "headers": wire.record(b"k", None, offset_delta=1, headers=[(b"name", b"x" * 70), (b"", None), (b"n" * 65, b"")]),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("before", [b"", wire.record(b"k", b"v")])
def test_a_record_cut_anywhere_is_malformed_and_nothing_behind_it_is_read(name: str, before: bytes) -> None:
    record = CUT[name]
    count = 2 if before else 1
    body = record[1:] if record[0] < 0x80 else record[2:]
    for size in range(len(record)):
        code, _ = decode_one(before + record[:size], count)
        assert code == codes.BAD_RECORD
    for size in range(len(body)):  # the same with a length that admits it
        code, _ = decode_one(before + wire.varint(size) + body[:size], count)
        assert code == codes.BAD_RECORD


@pytest.mark.parametrize("name", CUT)
def test_a_record_with_any_one_byte_changed(name: str) -> None:
    record = CUT[name]
    for at in range(len(record)):
        for byte in (0, 1, 2, 0x7F, 0x80, 0x81, 0xFE, 0xFF):
            decode_one(record[:at] + bytes([byte]) + record[at + 1 :], 1)


@pytest.mark.parametrize("claimed", [50, 97, 98, 99, 100, 196, 197, INT32_MAX])
def test_a_header_count_that_cannot_fit_asks_for_no_room(claimed: int) -> None:
    body = b"\0\0\0\1\1" + wire.varint(claimed) + b"\0\1" * 98
    payload = wire.varint(len(body)) + body
    row = [0] * table.COLUMNS
    row[table.MAGIC], row[table.COUNT], row[table.PAYLOAD_SIZE] = 2, 1, len(payload)
    memory, _keep = in_memory([row], [payload], guarded.at_end)
    block = guarded.at_end(slots.D_SLOTS * 8, np.int64)
    block[slots.D_MAX_OFFSET] = INT64_MAX
    _outputs = columnar.Outputs(1, len(payload), len(payload) // 2, guarded.at_end, block)
    code = kernels().decode(address_of(memory), 0, 1, address_of(block))
    assert code == (codes.OK if claimed == 98 else codes.BAD_RECORD)


# --- stamping and placing ---------------------------------------------------------------------------------------------


@st.composite
def buffers(draw: st.DrawFn) -> tuple[bytes, list[twins.Row]]:
    """Sound batches side by side, and their table."""
    data = b""
    rows: list[twins.Row] = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(0, 4))
        batch = wire.batch(
            sound_records(count, []),
            count=count,
            base_offset=draw(st.integers(0, 20) | st.integers(0, 1 << 33)),
            last_offset_delta=draw(st.sampled_from([max(count - 1, 0)] * 6 + [7, INT32_MAX])),
            attributes=draw(st.integers(-(1 << 15), (1 << 15) - 1)) & ~7,
            max_timestamp=draw(st.integers(0, 5000) | times | int64s),
        )
        (row,) = twins.scan(batch, start=0, capacity=1, verify=True).table
        row[table.POSITION] = len(data)
        row[table.PAYLOAD_ADDRESS] += len(data)
        rows.append(row)
        data += batch
    return data, rows


@given(buffer=buffers(), now_ms=int64s, place=places, some=st.booleans())
def test_stamp_append_time_is_its_twins(
    buffer: tuple[bytes, list[twins.Row]], now_ms: int, place: Place, some: bool
) -> None:
    data, rows = buffer
    n = len(rows) // 2 if some else len(rows)
    expected, expected_rows = twins.stamp_append_time(data, rows, n, now_ms)
    memory, placed = place(data), columnar.batch_table(rows, place)
    assert kernels().stamp_append_time(address_of(memory), address_of(placed), n, now_ms) == codes.OK
    assert memory.tobytes() == expected
    assert placed.tolist() == expected_rows


@given(buffer=buffers(), max_ts=int64s, place=places)
def test_set_max_timestamp_is_its_twins(buffer: tuple[bytes, list[twins.Row]], max_ts: int, place: Place) -> None:
    row = buffer[1][0]
    data = buffer[0][: row[table.SIZE]]
    expected, expected_row = twins.set_max_timestamp(data, row, max_ts)
    memory, placed = place(data), columnar.batch_table([row], place)
    assert kernels().set_max_timestamp(address_of(memory), address_of(placed), max_ts) == codes.OK
    assert memory.tobytes() == expected
    assert placed.tolist() == [expected_row]


SEGMENT_SLOTS = {
    "size": slots.A_SIZE,
    "base_offset": slots.A_BASE_OFFSET,
    "next_offset": slots.A_NEXT_OFFSET,
    "leader_epoch": slots.A_EPOCH,
    "max_ts": slots.A_MAX_TS,
    "max_ts_offset": slots.A_MAX_TS_OFFSET,
    "first_ts": slots.A_FIRST_TS,
    "created_ms": slots.A_CREATED_MS,
    "now_ms": slots.A_NOW_MS,
    "bytes_since": slots.A_BYTES_SINCE,
    "index_entries": slots.A_INDEX_ENTRIES,
    "time_entries": slots.A_TIME_ENTRIES,
    "last_time_ts": slots.A_LAST_TIME_TS,
    "segment_bytes": slots.A_SEGMENT_BYTES,
    "max_segment_ms": slots.A_MAX_SEGMENT_MS,
    "index_interval": slots.A_INDEX_INTERVAL,
    "index_max": slots.A_INDEX_MAX,
    "time_max": slots.A_TIME_MAX,
    "fresh": slots.A_FRESH,
}


@st.composite
def segments(draw: st.DrawFn) -> twins.Segment:
    base = draw(st.sampled_from([0, 0, 7, 1 << 33]))
    return twins.Segment(
        size=draw(st.sampled_from([0, 0, 100, 100, INT32_MAX - 200])),
        base_offset=base,
        next_offset=draw(st.sampled_from([base, base, base + 9, base + INT32_MAX - 4, INT64_MAX - 3, 0])),
        leader_epoch=draw(int32s),
        max_ts=draw(st.integers(-1, 3000)),
        max_ts_offset=base + draw(st.integers(-1, 100)),
        first_ts=draw(st.integers(-1, 3000) | times),
        created_ms=draw(times | int64s),
        now_ms=draw(times | int64s),
        bytes_since=draw(st.integers(0, 300) | st.sampled_from([0, 1, 70, 71, 150, 151])),
        index_entries=draw(st.integers(0, 3)),
        time_entries=draw(st.integers(0, 3)),
        last_time_ts=draw(st.integers(-1, 3000)),
        segment_bytes=draw(st.sampled_from([50, 300, 600, INT32_MAX, INT32_MAX, INT32_MAX])),
        max_segment_ms=draw(st.sampled_from([1000, INT64_MAX, INT64_MAX])),
        index_interval=draw(st.sampled_from([0, 70, 150, 4096])),
        index_max=draw(st.sampled_from([0, 4, 1 << 40, 1 << 40, 1 << 40])),
        time_max=draw(st.sampled_from([0, 4, 1 << 40, 1 << 40, 1 << 40])),
        fresh=draw(st.booleans()),
    )


@settings(max_examples=300)
@given(buffer=buffers(), segment=segments(), assign=st.booleans(), place=places, first=st.sampled_from([0, 0, 0, 1, 8]))
def test_place_is_its_twins(
    buffer: tuple[bytes, list[twins.Row]], segment: twins.Segment, assign: bool, place: Place, first: int
) -> None:
    data, rows = buffer
    first = min(first, len(rows))
    assert SEGMENT_SLOTS.keys() == {field.name for field in fields(segment)}
    block = place(slots.A_SLOTS * 8, np.int64)
    for name, slot in SEGMENT_SLOTS.items():
        block[slot] = getattr(segment, name)
    batches = len(rows) - first
    index, time_index = place(batches * 8), place(batches * 12)  # at most one entry of each a batch
    block[slots.A_INDEX_OUT], block[slots.A_TIME_OUT] = address_of(index), address_of(time_index)
    memory, placed = place(data), columnar.batch_table(rows, place)

    expected = twins.place(data, rows, first, len(rows), assign, segment)
    count = kernels().place(address_of(memory), address_of(placed), first, len(rows), int(assign), address_of(block))
    assert (count, int(block[slots.A_REASON])) == (expected.count, expected.reason)
    assert memory.tobytes() == expected.buffer
    assert placed.tolist() == expected.table
    assert index[: block[slots.A_INDEX_OUT_N] * 8].tobytes() == expected.index
    assert time_index[: block[slots.A_TIME_OUT_N] * 12].tobytes() == expected.time_index
    for name, slot in SEGMENT_SLOTS.items():
        assert block[slot] == getattr(segment, name), name


# --- routing ----------------------------------------------------------------------------------------------------------


@given(key=st.binary(max_size=40), place=places)
def test_murmur2_is_its_twins(key: bytes, place: Place) -> None:
    memory = place(key)
    assert kernels().murmur2(address_of(memory), len(key)) == twins.murmur2(key)


@given(
    keys=st.lists(st.none() | st.binary(max_size=9), max_size=20),
    partitions=st.integers(1, 9),
    place=places,
    shift=st.integers(0, 9),
    data=st.data(),
)
def test_route_is_its_twins(
    keys: list[bytes | None], partitions: int, place: Place, shift: int, data: st.DataObject
) -> None:
    asked = st.none() | st.integers(0, partitions - 1) | st.sampled_from([-1, partitions, INT64_MIN, INT64_MAX])
    given_ones = data.draw(st.none() | st.lists(asked, min_size=len(keys), max_size=len(keys)))
    sticky = data.draw(st.integers(0, partitions - 1))
    block = place(slots.R_SLOTS * 8, np.int64)
    strings = columnar.ByteStrings(keys, place, shift=shift)
    strings.put(block, slots.R_KEY_OFFSETS, slots.R_KEY_DATA, slots.R_KEY_VALID, slots.R_KEY_VALID_AT)
    ids, selection, starts = (place(size * 8, np.int64) for size in (len(keys), len(keys), partitions + 1))
    if given_ones is not None:
        numbers = place(np.array([INT64_MIN if one is None else one for one in given_ones], np.int64), np.int64)
        valid = place(columnar.bitmap([one is not None for one in given_ones], shift))
        block[slots.R_PARTITIONS] = address_of(numbers)
        block[slots.R_PARTITION_VALID], block[slots.R_PARTITION_VALID_AT] = address_of(valid), shift
    block[slots.R_ROWS], block[slots.R_PARTITION_COUNT], block[slots.R_STICKY] = len(keys), partitions, sticky
    block[slots.R_IDS], block[slots.R_SELECTION] = address_of(ids), address_of(selection)
    block[slots.R_STARTS] = address_of(starts)

    expected = twins.route(keys, given_ones, partitions, sticky)
    assert kernels().route(address_of(block)) == expected.code
    if expected.code == codes.OK:
        assert ids.tolist() == expected.ids
        assert selection.tolist() == expected.selection
        assert starts.tolist() == expected.starts
    else:
        assert block[slots.R_BAD_ROW] == expected.bad_row


# --- the offset map ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"), [(0, "a3817f04ba25a8e66df67214c7550293"), (1, "da87c1d86b99af44347659119b22fc45")]
)
def test_the_twins_siphash_is_the_published_one_at_its_own_number_of_rounds(size: int, expected: str) -> None:
    k0, k1 = struct.unpack("<QQ", bytes(range(16)))
    found = twins.siphash128(bytes(range(size)), k0, k1, compressions=2, finalizations=4)
    assert struct.pack("<QQ", *found).hex() == expected


@given(key=st.binary(max_size=40), k0=int64s, k1=int64s, place=places)
def test_sip_hash_is_its_twins(key: bytes, k0: int, k1: int, place: Place) -> None:
    memory, result = place(key), place(16)
    assert kernels().sip_hash(address_of(memory), len(key), k0, k1, address_of(result)) == codes.OK
    assert result.tobytes() == struct.pack("<QQ", *twins.sip_hash(key, k0, k1))
