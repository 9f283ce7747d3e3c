"""The twins of the compaction's kernels; see `twins`. A mark is a list in the order of `marks`."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import wire
from twins import INT64_MAX, Cursor, Malformed, Parsed, Row, crc32c, int32, int64, parse_record, sip_hash

from logstore.records import codes, table
from logstore.records import marks as m

INT64_MIN = -INT64_MAX - 1
AHEAD = 64  # keys are hashed so many ahead of the map
Hash = tuple[int, int]
Mark = list[int]


def md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


# --- the map ----------------------------------------------------------------------------------------------------------


@dataclass
class KeyMap:
    """What the map's slots hold, by hash: an offset and a version, which is 0 in the order of offsets."""

    slots: int
    limit: int
    room: int
    secret: tuple[int, int] = (0, 0)
    md5: bool = False
    order: int = m.ORDER_OFFSET
    header: bytes = b""
    bucket: int = 0
    buckets: int = 1
    entries: dict[Hash, tuple[int, int]] = field(default_factory=dict)

    def hash(self, key: bytes) -> Hash:
        if self.md5:
            low, high = struct.unpack("<QQ", md5(key))
            return low, high
        return sip_hash(key, *self.secret)

    def has(self, found: Hash) -> bool:
        """Whether a key of this hash is of the map's bucket."""
        return found[1] * self.buckets >> 64 == self.bucket

    def version(self, row: Row, record: Parsed, headers: Sequence[wire.Header]) -> int:
        if self.order == m.ORDER_OFFSET:
            return 0
        if self.order == m.ORDER_TIMESTAMP:
            return timestamp_of(row, record.timestamp_delta)
        named = [value for name, value in headers if name == self.header and value is not None and len(value) == 8]
        return int.from_bytes(named[-1], "big", signed=True) if named else INT64_MIN

    def put(self, found: Hash, offset: int, version: int) -> None:
        """In the order of offsets the last one put wins."""
        other = self.entries.get(found)
        if other is None or self.order == m.ORDER_OFFSET or (version, offset) > (other[1], other[0]):
            self.entries[found] = offset, version

    def supersedes(self, found: Hash, offset: int) -> bool:
        if found not in self.entries:
            return False
        latest = self.entries[found][0]
        return offset < latest if self.order == m.ORDER_OFFSET else offset != latest


def timestamp_of(row: Row, delta: int) -> int:
    stamped = row[table.ATTRIBUTES] & table.TIMESTAMP_TYPE_BIT
    return row[table.MAX_TIMESTAMP] if stamped else int64(row[table.BASE_TIMESTAMP] + delta)


@dataclass
class Indexed:
    """`stop_offset` was not taken, `last_offset` was the last that was."""

    code: int = codes.OK
    batch: int = 0
    records: int = 0
    keyless: int = 0
    stop_offset: int | None = None
    last_offset: int = -1


class _Full(Exception):
    def __init__(self, offset: int, not_taken: int) -> None:
        self.offset, self.not_taken = offset, not_taken


def index_keys(
    rows: Sequence[Row],
    payloads: Sequence[bytes],
    first: int,
    last: int,
    low: int,
    high: int,
    keys: KeyMap,
    *,
    only_known: bool = False,
    shared: bool = False,
) -> Indexed:
    """Changes `keys`. A malformed record is seen before a map that gets full less than 64 keys earlier."""
    result = Indexed(batch=first)
    ahead: list[tuple[Hash, int, int]] = []

    def put() -> None:
        for i, (found, offset, version) in enumerate(ahead):
            is_new = found not in keys.entries
            if shared:
                if is_new and len(keys.entries) >= keys.room:
                    raise _Full(offset, len(ahead) - i)
                keys.entries[found] = max(offset, keys.entries.get(found, (-1, 0))[0]), 0
                continue
            if not only_known and len(keys.entries) >= (min(keys.limit, keys.room) if is_new else keys.limit):
                raise _Full(offset, len(ahead) - i)
            if not (only_known and is_new):
                keys.put(found, offset, version)
            result.last_offset = offset
        ahead.clear()

    try:
        for b in range(first, last):
            result.batch = b
            if rows[b][table.SKIP]:
                continue
            for record, headers in _sound_records(rows[b], payloads[b]):
                offset = rows[b][table.BASE_OFFSET] + record.offset_delta
                if not low <= offset < high:
                    continue
                found = None if record.key is None else keys.hash(record.key)
                if found is None:
                    result.records += 1
                    result.keyless += 1
                    continue
                if not keys.has(found):
                    continue
                result.records += 1
                ahead.append((found, offset, keys.version(rows[b], record, headers)))
                if len(ahead) == AHEAD:
                    put()
        result.batch = max(first, last)
        put()
    except Malformed:
        result.code = codes.BAD_RECORD
    except _Full as full:
        result.code, result.stop_offset = codes.FULL, full.offset
        result.records -= full.not_taken
    return result


def _sound_records(row: Row, payload: bytes) -> Iterator[tuple[Parsed, list[wire.Header]]]:
    """Records in front of the first that is malformed or out of order, then Malformed; also where bytes are left."""
    cursor = Cursor(payload)
    previous = -1
    for _ in range(row[table.COUNT]):
        record = parse_record(cursor)
        if not previous < record.offset_delta <= row[table.LAST_OFFSET] - row[table.BASE_OFFSET]:
            raise Malformed
        previous = record.offset_delta
        yield record, record.headers()
    if cursor.left:
        raise Malformed


def merge_maps(entries: Sequence[tuple[Hash, int, int]], keys: KeyMap) -> int:
    """Changes `keys`; `entries` are in the order of their slots."""
    for found, offset, version in entries:
        if found not in keys.entries and len(keys.entries) >= keys.room:
            return codes.FULL
        if (version, offset) > keys.entries.get(found, (INT64_MIN, INT64_MIN))[::-1]:
            keys.entries[found] = offset, version
    return codes.OK


@dataclass
class Kept:
    code: int
    batch: int = 0
    flags: list[int] = field(default_factory=list)


def keep_latest(
    rows: Sequence[Row],
    payloads: Sequence[bytes],
    first: int,
    last: int,
    low: int,
    high: int,
    keys: KeyMap,
    *,
    tombstones: bool,
) -> Kept:
    result = Kept(codes.OK)
    for b in range(first, last):
        if rows[b][table.SKIP]:
            continue
        try:
            for record in _ordered_records(rows[b], payloads[b]):
                offset = rows[b][table.BASE_OFFSET] + record.offset_delta
                wanted = record.key is not None and (record.value is not None or tombstones) and low <= offset < high
                found = keys.hash(record.key) if wanted and record.key is not None else None
                is_last = found is not None and keys.has(found) and keys.entries.get(found, (-1, 0))[0] == offset
                result.flags.append(int(is_last))
        except Malformed:
            return Kept(codes.BAD_RECORD, b)
    return result


def _ordered_records(row: Row, payload: bytes) -> Iterator[Parsed]:
    """Records in front of the first that is malformed or out of order, then Malformed. Headers are not looked at."""
    cursor = Cursor(payload)
    previous = -1
    for _ in range(row[table.COUNT]):
        record = parse_record(cursor)
        if not previous < record.offset_delta <= row[table.LAST_OFFSET] - row[table.BASE_OFFSET]:
            raise Malformed
        previous = record.offset_delta
        yield record


# --- survivors --------------------------------------------------------------------------------------------------------


@dataclass
class Bits:
    """A bit for each offset of [first_offset, end_offset), and a byte more."""

    first_offset: int
    end_offset: int
    data: bytes

    def has(self, offset: int) -> bool:
        at = offset - self.first_offset
        return self.first_offset <= offset < self.end_offset and bool(self.data[at // 8] >> at % 8 & 1)


def mark_offsets(offsets: Sequence[int], first_offset: int, end_offset: int) -> Bits:
    number = sum(1 << offset - first_offset for offset in set(offsets) if first_offset <= offset < end_offset)
    return Bits(first_offset, end_offset, number.to_bytes((end_offset - first_offset + 7) // 8 + 1, "little"))


def _none_survives(row: Row, bits: Bits | None) -> bool:
    """Whole bytes are looked at, so a neighbour's bit may be taken for the batch's own."""
    base, last = row[table.BASE_OFFSET], row[table.LAST_OFFSET]
    if bits is None or row[table.MAGIC] != 2 or base < bits.first_offset or last >= bits.end_offset:
        return False
    return not any(bits.data[(base - bits.first_offset) // 8 : (last - bits.first_offset) // 8 + 1])


def skip_superseded(rows: Sequence[Row], bits: Bits) -> list[Row]:
    return [[*row[: table.SKIP], 1] if _none_survives(row, bits) else row for row in rows]


# --- verdicts on batches ----------------------------------------------------------------------------------------------


@dataclass
class Batches:
    """What is told about batches, and what is counted of them."""

    first_uncleanable: int = INT64_MAX
    now_ms: int = 0
    delete_retention_ms: int = 0
    codec: int = -1
    superseded: int = 0
    aborted: int = 0
    markers: int = 0
    read: int = 0
    kept: int = 0
    tombstones: int = 0
    next_horizon: int = INT64_MAX
    changed: int = 0


def judge_batches(rows: Sequence[Row], marks: Sequence[Mark], told: Batches, bits: Bits | None) -> None:
    """Changes all but the bits."""
    for row, mark in zip(rows, marks, strict=True):
        records, attributes = row[table.COUNT], row[table.ATTRIBUTES]
        control = row[table.MAGIC] == 2 and bool(attributes & table.CONTROL_BIT)
        passed = bool(attributes & table.DELETE_HORIZON_BIT) and row[table.BASE_TIMESTAMP] <= told.now_ms
        row[table.SKIP] = 1
        if mark[m.MARK_MAY_GO] and control and passed:
            told.markers += records
        elif mark[m.MARK_MAY_GO] and not control:
            told.aborted += records
        elif control:
            mark[m.MARK_KEPT] = records
        elif _none_survives(row, bits):
            told.superseded += records
        elif row[table.MAGIC] != 2 or records:
            row[table.SKIP] = 0
        mark[m.MARK_CODEC] = attributes & table.CODEC_MASK
        if row[table.LAST_OFFSET] + 1 == told.first_uncleanable:
            mark[m.MARK_STAYS] = 1


def choose_actions(rows: Sequence[Row], marks: Sequence[Mark], first: int, last: int, told: Batches) -> None:
    """Changes marks and counts."""
    for row, mark in list(zip(rows, marks, strict=True))[first:last]:
        v2, control = row[table.MAGIC] == 2, bool(row[table.ATTRIBUTES] & table.CONTROL_BIT)
        kept, tombstones, codec = mark[m.MARK_KEPT], mark[m.MARK_TOMBSTONES], mark[m.MARK_CODEC]
        if told.codec >= 0 and not control:
            mark[m.MARK_CODEC] = told.codec
        has_horizon = v2 and bool(row[table.ATTRIBUTES] & table.DELETE_HORIZON_BIT)
        needs_horizon = kept > 0 and (tombstones > 0 or (control and mark[m.MARK_MAY_GO] != 0))
        horizon = -1
        if has_horizon:
            horizon = row[table.BASE_TIMESTAMP]
        elif needs_horizon:
            horizon = told.now_ms + told.delete_retention_ms
        mark[m.MARK_HORIZON] = horizon

        same = v2 and kept == row[table.COUNT] and not mark[m.MARK_NULLED] and mark[m.MARK_CODEC] == codec
        plain = row[table.ATTRIBUTES] & (table.CODEC_MASK | table.DELETE_HORIZON_BIT) == 0
        is_empty = v2 and plain and (row[table.SIZE], row[table.BASE_TIMESTAMP]) == (table.HEADER_BYTES, -1)
        if kept:
            mark[m.MARK_ACTION] = m.VERBATIM if same and (has_horizon or not needs_horizon) else m.REBUILD
        elif mark[m.MARK_STAYS]:
            mark[m.MARK_ACTION] = m.VERBATIM if is_empty else m.EMPTY
        else:
            mark[m.MARK_ACTION] = m.DELETE
        told.changed += mark[m.MARK_ACTION] != m.VERBATIM
        if not control:
            told.read += max(row[table.COUNT], 0)
            told.kept += kept
            told.tombstones += tombstones
        if horizon >= 0 and (tombstones or (control and kept)):
            told.next_horizon = min(told.next_horizon, horizon)


# --- verdicts on records ----------------------------------------------------------------------------------------------


@dataclass
class Judged:
    code: int = codes.OK
    batch: int = 0
    keep: list[int] = field(default_factory=list)
    superseded: int = 0
    keyless: int = 0
    tombstones: int = 0
    nulled: int = 0


def judge(
    rows: Sequence[Row],
    payloads: Sequence[bytes],
    first: int,
    last: int,
    keys: KeyMap,
    marks: Sequence[Mark],
    *,
    max_offset: int,
    now_ms: int,
    keep_legacy_tombstones: bool,
    expired_before: int,
    bits: Bits | None,
) -> Judged:
    """Changes `marks`."""
    result = Judged()
    for b in range(first, last):
        row, mark = rows[b], marks[b]
        if row[table.SKIP]:
            continue
        passed = not keep_legacy_tombstones
        if row[table.MAGIC] == 2:
            passed = bool(row[table.ATTRIBUTES] & table.DELETE_HORIZON_BIT) and row[table.BASE_TIMESTAMP] <= now_ms
        known = bits is not None and row[table.MAGIC] == 2
        known = known and bits.first_offset <= row[table.BASE_OFFSET] and row[table.LAST_OFFSET] < bits.end_offset
        try:
            looked_at = list(_marked_records(row, payloads[b], bits) if known else _sound_records(row, payloads[b]))
        except Malformed:
            result.code, result.batch = codes.BAD_RECORD, b
            return result
        for record, _ in looked_at:
            verdict = m.KEEP_RECORD
            if record is None:
                verdict = m.DROP_RECORD
                result.superseded += 1
            elif not known and row[table.BASE_OFFSET] + record.offset_delta >= max_offset:
                mark[m.MARK_TOMBSTONES] += record.value is None
            elif not known and record.key is None:
                verdict = m.DROP_RECORD
                result.keyless += 1
            elif not known and keys.supersedes(keys.hash(record.key), row[table.BASE_OFFSET] + record.offset_delta):
                verdict = m.DROP_RECORD
                result.superseded += 1
            elif record.value is None and passed:
                verdict = m.DROP_RECORD
                result.tombstones += 1
            elif record.value is None:
                mark[m.MARK_TOMBSTONES] += 1
            elif 0 <= timestamp_of(row, record.timestamp_delta) < expired_before:
                verdict = m.NULL_RECORD
                result.nulled += 1
                mark[m.MARK_NULLED] += 1
                mark[m.MARK_TOMBSTONES] += 1
            mark[m.MARK_KEPT] += verdict != m.DROP_RECORD
            result.keep.append(verdict)
    return result


def _marked_records(row: Row, payload: bytes, bits: Bits) -> Iterator[tuple[Parsed | None, None]]:
    """None for a record whose bit is not set. No more is looked at than that takes: whoever set the bits has."""
    cursor = Cursor(payload)
    last_delta = row[table.LAST_OFFSET] - row[table.BASE_OFFSET]
    for number in range(row[table.COUNT]):
        begin = cursor.at
        length = cursor.varint()
        if length < 1:
            raise Malformed
        body = Cursor(cursor.take(length))
        delta = number
        if row[table.COUNT] != last_delta + 1:  # else there is a record for every offset
            body.take(1)
            body.varint(10)
            delta = body.varint()
            if not 0 <= delta <= last_delta:
                raise Malformed
        survives = bits.has(row[table.BASE_OFFSET] + delta)
        yield (parse_record(Cursor(payload[begin : cursor.at])) if survives else None), None
    if cursor.left:
        raise Malformed


# --- batches written anew ---------------------------------------------------------------------------------------------


@dataclass
class Rewritten:
    code: int
    batch: int = 0
    data: bytes = b""
    table: list[Row] = field(default_factory=list)


def rewrite_room(rows: Sequence[Row], marks: Sequence[Mark], first: int, last: int) -> int:
    room = 61 * (last - first)
    for row, mark in list(zip(rows, marks, strict=True))[first:last]:
        if mark[m.MARK_ACTION] == m.VERBATIM:
            room += row[table.SIZE]
        elif mark[m.MARK_ACTION] == m.REBUILD:
            room += row[table.PAYLOAD_SIZE] + 16 * mark[m.MARK_KEPT]
    return room


def rewrite(
    data: bytes,
    rows: Sequence[Row],
    payloads: Sequence[bytes],
    marks: Sequence[Mark],
    first: int,
    last: int,
    keep: Sequence[int],
    out_address: int,
) -> Rewritten:
    """Payloads of batches that were written lie behind `out_address`."""
    flags = iter(keep)
    done = Rewritten(codes.OK)
    verdicts = [
        [m.KEEP_RECORD if row[table.SKIP] else next(flags) for _ in range(row[table.COUNT])] for row in rows[first:last]
    ]
    staying = [b for b in range(first, last) if marks[b][m.MARK_ACTION] != m.DELETE]
    while staying:
        b = staying.pop(0)
        row, mark = rows[b], marks[b]
        if mark[m.MARK_ACTION] == m.VERBATIM:
            position, size = row[table.POSITION], row[table.SIZE]
            done.table.append([len(done.data), *row[1 : table.SKIP], 1])
            done.data += data[position : position + size]
            continue
        attributes = row[table.ATTRIBUTES] & ~(table.CODEC_MASK | table.DELETE_HORIZON_BIT)
        base, end, max_ts = row[table.BASE_OFFSET], row[table.LAST_OFFSET], row[table.MAX_TIMESTAMP]
        base_ts = -1
        records: list[_Kept] = []
        payload = b""
        if mark[m.MARK_ACTION] == m.REBUILD:
            attributes |= mark[m.MARK_CODEC]
            joined = [b]
            while staying and marks[staying[0]][m.MARK_JOIN]:
                joined.append(staying.pop(0))
            for each in joined:
                try:
                    records += _kept_records(rows[each], payloads[each], verdicts[each - first], attributes)
                except Malformed:
                    return Rewritten(codes.BAD_RECORD, each)
                end = rows[each][table.LAST_OFFSET]
            if not attributes & table.TIMESTAMP_TYPE_BIT:
                max_ts = max([-1, *(record.timestamp for record in records)])
            if row[table.MAGIC] < 2:  # it did not say which offsets it has
                base = records[0].offset if records else base
                end = records[-1].offset if records else base
            if mark[m.MARK_HORIZON] >= 0:
                attributes |= table.DELETE_HORIZON_BIT
                base_ts = mark[m.MARK_HORIZON]
            elif records:
                base_ts = records[0].timestamp
            for record in records:
                body = b"\0" + wire.varint(int64(record.timestamp - base_ts)) + wire.varint(record.offset - base)
                payload += wire.varint(len(body + record.rest)) + body + record.rest
        batch = wire.batch(
            payload,
            count=len(records),
            base_offset=base,
            last_offset_delta=int32(end - base),
            attributes=attributes,
            base_timestamp=base_ts,
            max_timestamp=max_ts,
            leader_epoch=row[table.LEADER_EPOCH],
            producer_id=row[table.PRODUCER_ID],
            producer_epoch=row[table.PRODUCER_EPOCH],
            base_sequence=row[table.BASE_SEQUENCE],
        )
        compressed = attributes & table.CODEC_MASK != 0
        crc = 0 if compressed else crc32c(batch[21:])
        start = len(done.data)
        done.data += batch[:17] + struct.pack(">I", crc) + batch[21:]
        producer = [row[table.PRODUCER_ID], row[table.PRODUCER_EPOCH], row[table.BASE_SEQUENCE]]
        made = [start, len(batch), base, end, row[table.LEADER_EPOCH], 2, attributes, base_ts, max_ts, *producer]
        made += [len(records), crc, out_address + start + 61, len(payload), 0 if compressed else 1]
        done.table.append(made)
    return done


@dataclass
class _Kept:
    """`rest` is what follows the offset delta."""

    timestamp: int
    offset: int
    rest: bytes


def _kept_records(row: Row, payload: bytes, verdicts: Sequence[int], attributes: int) -> list[_Kept]:
    """Bytes behind the last record are nobody's: the judge looked for them."""
    cursor = Cursor(payload)
    kept = []
    for verdict in verdicts:
        length = cursor.varint()
        if length < 1:
            raise Malformed
        body = Cursor(cursor.take(length))
        if verdict == m.DROP_RECORD:
            continue
        body.take(1)
        timestamp, delta = body.varint(10), body.varint()
        rest = body.data[body.at :]
        if verdict == m.NULL_RECORD:
            begin = body.at
            body.field()
            rest = body.data[begin : body.at] + wire.varint(-1)
            body.field()
            rest += body.data[body.at :]
        stamped = attributes & table.TIMESTAMP_TYPE_BIT
        when = row[table.MAX_TIMESTAMP] if stamped else int64(row[table.BASE_TIMESTAMP] + timestamp)
        kept.append(_Kept(when, row[table.BASE_OFFSET] + delta, rest))
    return kept
