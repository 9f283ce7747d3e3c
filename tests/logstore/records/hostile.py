"""What the tests give to kernels: numbers at their edges, sound and hostile records, batches in guarded memory."""

from __future__ import annotations

from typing import Any

import columnar
import guarded
import twins
import wire
from guarded import Place
from hypothesis import strategies as st

from logstore.records import table
from logstore.records.native import address_of

INT32_MAX, INT64_MAX, INT64_MIN = (1 << 31) - 1, (1 << 63) - 1, -(1 << 63)

places = st.sampled_from([guarded.at_end, guarded.at_start])
int64s = st.integers(INT64_MIN, INT64_MAX) | st.sampled_from([INT64_MIN, -2, -1, 0, 1, INT64_MAX - 1, INT64_MAX])
int32s = st.integers(-(1 << 31), INT32_MAX) | st.sampled_from([-(1 << 31), -1, 0, 1, INT32_MAX])
times = st.integers(-1, 1 << 41) | st.sampled_from([-1, 0, INT64_MAX])
strings = st.none() | st.binary(max_size=12) | st.integers(60, 200).map(lambda size: b"x" * size)
headers = st.lists(st.tuples(st.binary(max_size=6), st.none() | st.binary(max_size=6)), max_size=3)

#: lengths at which a varint, or the way a byte string is copied, changes
edges = st.sampled_from(
    [0, 1, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2047, 2048, 4096, 8191, 8192]
)
plain_strings = st.tuples(edges | st.integers(0, 100), st.integers(0, 255)).map(
    lambda c: bytes((c[1] + i) % 256 for i in range(c[0]))
)
#: distances of timestamps at which a varint changes
steps = st.sampled_from(
    [sign * (1 << power) + more for power in (0, 6, 13, 20, 27, 40) for sign in (1, -1) for more in (-1, 0, 1)]
)

#: varints of every length, too long ones among them, and those whose number is an extreme
varints = st.one_of(
    st.integers(-3, 40).map(wire.varint),
    int32s.map(wire.varint),
    int64s.map(wire.varint),
    st.binary(min_size=1, max_size=12).map(lambda raw: bytes(byte | 0x80 for byte in raw[:-1]) + raw[-1:]),
    st.integers(1, 12).map(lambda size: b"\xff" * size),
)


@st.composite
def hostile_records(draw: st.DrawFn) -> bytes:
    """A record of which any part may be anything; its length is most often right, so that the rest is looked at."""

    def part(honest: bytes) -> bytes:
        return draw(varints) if draw(st.integers(0, 9)) == 0 else honest

    def blob(content: bytes | None) -> bytes:
        return part(wire.varint(-1)) if content is None else part(wire.varint(len(content))) + content

    entries = draw(headers)
    body = bytes([draw(st.sampled_from([0, 0, 0, 1, 255]))])
    body += part(wire.varint(draw(st.integers(-2, 9) | int64s)))
    body += part(wire.varint(draw(st.integers(0, 12))))
    body += blob(draw(st.none() | st.binary(max_size=8))) + blob(draw(st.none() | st.binary(max_size=8)))
    body += part(wire.varint(len(entries)))
    body += b"".join(blob(name) + blob(content) for name, content in entries)
    return part(wire.varint(len(body))) + body


def sound_records(count: int, entries: list[list[wire.Header]], base: int = 0) -> bytes:
    return b"".join(
        wire.record(
            b"k%d" % i if i % 3 else None,
            b"v" * i if i % 4 else None,
            timestamp_delta=i - 3,
            offset_delta=base + i,
            headers=entries[i % len(entries)] if entries else (),
        )
        for i in range(count)
    )


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, cut out, put in, or the end cut off."""
    out = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        if not out:
            break
        at = draw(st.integers(0, len(out) - 1))
        match draw(st.sampled_from(["set", "flip", "cut", "insert", "end", "last"])):
            case "last":
                del out[-1]
            case "set":
                out[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "flip":
                out[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del out[at : at + draw(st.integers(1, 8))]
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "end":
                del out[at:]
    return bytes(out)


@st.composite
def plain_records(draw: st.DrawFn) -> tuple[bytes, int]:
    """Records with key and value and without headers, for which kernels have a short way."""
    steps_ = draw(
        st.lists(st.tuples(plain_strings, plain_strings, steps, st.sampled_from([1, 1, 1, 60, 9000])), max_size=5)
    )
    delta = -1
    out = b""
    for key, value, step, gap in steps_:
        delta += gap
        out += wire.record(key, value, timestamp_delta=step, offset_delta=delta)
    return out, len(steps_)


@st.composite
def payloads_of_records(draw: st.DrawFn) -> tuple[bytes, int]:
    """(bytes, how many records they are meant to be)."""
    count = draw(st.integers(0, 6))
    match draw(st.sampled_from(["sound", "mutated", "hostile", "noise", "plain", "plain mutated"])):
        case "plain":
            return draw(plain_records())
        case "plain mutated":
            payload, count = draw(plain_records())
            return draw(mutated(payload)), count
        case "sound":
            return sound_records(count, draw(st.lists(headers, max_size=3))), count
        case "mutated":
            return draw(mutated(sound_records(count, draw(st.lists(headers, max_size=3))))), count
        case "hostile":
            records = draw(st.lists(hostile_records(), min_size=1, max_size=4))
            return b"".join(records), len(records)
        case _:
            return draw(st.binary(max_size=60)), count


@st.composite
def batches_in_memory(draw: st.DrawFn) -> tuple[list[twins.Row], list[bytes]]:
    """Rows and payloads as a scan and a decompression leave them: sound ones, then one whose bytes, count or offsets
    may be lies.
    """
    rows, payloads = [], []
    honest = draw(st.integers(0, 2))
    for i in range(honest + draw(st.integers(0 if honest else 1, 1))):
        count = draw(st.integers(1, 5))
        payload = sound_records(count, draw(st.lists(headers, max_size=3)))
        delta = count - 1
        if draw(st.booleans()):
            payload, count = draw(plain_records())
            delta = 50_000
        base = draw(st.sampled_from([0, 5, 1000, INT64_MAX - 1 - delta]))
        if i >= honest:
            payload, count = draw(payloads_of_records())
            delta = max(count - 1, 0)
            if draw(st.integers(0, 4)) == 0:
                count = draw(st.integers(0, 8) | st.sampled_from([len(payload) // 7 + 1, 1 << 20, INT32_MAX]))
            if draw(st.integers(0, 4)) == 0:
                delta = draw(st.sampled_from([0, 2, 12, INT32_MAX]))
            base = draw(st.sampled_from([0, 1000, INT64_MAX - 1 - delta]))
        row = [0] * table.COLUMNS
        row[table.BASE_OFFSET], row[table.LAST_OFFSET] = base, base + delta
        row[table.ATTRIBUTES] = draw(st.sampled_from([0, 8, 0x28]))
        row[table.BASE_TIMESTAMP] = draw(times | int64s)
        row[table.MAX_TIMESTAMP] = draw(times | int64s)
        row[table.MAGIC], row[table.COUNT], row[table.PAYLOAD_SIZE] = 2, count, len(payload)
        row[table.SKIP] = draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
        rows.append(row)
        payloads.append(payload)
    return rows, payloads


def in_memory(rows: list[twins.Row], payloads: list[bytes], place: Place) -> tuple[Any, Any]:
    """(batch table, the payloads it points at)."""
    memory = [place(payload) for payload in payloads]
    return columnar.batch_table(rows, place, [address_of(payload) for payload in memory]), memory
