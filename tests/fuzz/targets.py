"""What is fuzzed: every reader of bytes from outside, each with inputs to start from, a way to make a mutated input
pass its checksum, and what must hold of a result.

A target's `run` returns when all is well: a plausible result or a typed error. It raises `Implausible` for a result
that cannot be right; any exception but a DuramenError is a finding as well. Nothing here is random.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from crc32c import crc32c

from logstore.directory.checkpoint import (
    read_meta_properties,
    read_offset_checkpoint,
    read_partition_metadata,
)
from logstore.directory.ends import TopicEnds, read_ends, write_ends
from logstore.directory.layout import Layout
from logstore.directory.sealed import seal
from logstore.directory.state import PartitionState, SegmentEntry, SwapNote, encode_state, read_state
from logstore.errors import CorruptBatch, DecompressionLimit, DuramenError
from logstore.files import OS_FILES, FileStat
from logstore.limits import INT64_MAX, Limits
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.snapshot import SnapshotEntry, encode_snapshot, read_snapshot
from logstore.records import marks, slots, table
from logstore.records.codes import FULL, OK
from logstore.records.columns import columns_of
from logstore.records.compression import CODECS
from logstore.records.control import encode_marker, parse_control_record
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.header import parse_header
from logstore.records.iterate import iter_records
from logstore.records.legacy import decode_legacy
from logstore.records.native import address_of, kernels
from logstore.records.record import Record
from logstore.segment.offset_index import OffsetIndex
from logstore.segment.time_index import TimeIndex
from logstore.segment.txn_index import AbortedTransaction, TxnIndex, encode_entry
from logstore.topics.registry import TopicRegistry

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
LIMITS = Limits(batch_bytes=1 << 20, decompressed_bytes=1 << 18, read_buffer_bytes=1 << 20, side_file_bytes=1 << 22)
FILE = "fuzzed"


class Implausible(AssertionError):
    """A result that cannot be right."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    corpus: Sequence[bytes]
    run: Callable[[bytes], None]
    #: make the checksums of a mutated input hold; the word is random
    repair: Callable[[bytearray, int], bytes | bytearray] = lambda data, _word: data
    #: share of the cases
    weight: int = 1
    #: numbers are written in digits
    text: bool = False


def require(held: bool, what: str) -> None:
    if not held:
        raise Implausible(what)


# --- files in memory --------------------------------------------------------------------------------------------------


class BytesFile:
    """One file that cannot be written, as the parsers see it."""

    def __init__(self, data: bytes, path: str) -> None:
        self._data = data
        self.path = path

    def pread(self, size: int, position: int) -> bytes:
        if size < 0 or position < 0:
            raise OSError(errno.EINVAL, "negative", self.path)
        return self._data[position : position + size]

    def size(self) -> int:
        return len(self._data)

    def close(self) -> None:
        pass


class BytesFiles:
    """A file system in which every path leads to the same bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, path: str, **_how: bool) -> BytesFile:
        return BytesFile(self._data, path)

    def exists(self, path: str) -> bool:
        return True

    def stat(self, path: str) -> FileStat:
        return FileStat(len(self._data), 0, 0)


# --- v2 batches through the kernels, between unmapped pages -----------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE


class Guarded:
    """Memory whose end is followed by a page nobody may touch."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _PAGE) * _PAGE
        self.memory = mmap.mmap(-1, self.size + _PAGE)
        start = address_of(self.memory)
        self.end = start + self.size
        if _libc.mprotect(ctypes.c_void_p(self.end), ctypes.c_size_t(_PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: bytes | bytearray) -> int:
        """Copy `data` to the very end; returns its address."""
        self.memory[self.size - len(data) : self.size] = bytes(data)
        return self.end - len(data)

    def numbers(self, form: str, count: int) -> tuple[int, ...]:
        """The last `count` numbers."""
        return struct.unpack_from(f"<{count}{form}", self.memory, self.size - count * struct.calcsize(form))


_ROWS = 32
_INPUT_MAX = 1 << 16
_COUNT_MAX = _INPUT_MAX // table.RECORD_BYTES_MIN


class KernelTarget:
    """Scan, check and decode with every buffer ending at an unmapped page and no larger than the caller promises."""

    def __init__(self) -> None:
        self._input = Guarded(_INPUT_MAX)
        self._table = Guarded(_ROWS * table.ROW_BYTES)
        self._block = Guarded(max(slots.D_SLOTS, slots.S_SLOTS) * 8)
        self._offsets = Guarded(8 * _COUNT_MAX)
        self._timestamps = Guarded(8 * _COUNT_MAX)
        self._types = Guarded(_COUNT_MAX)
        self._ends = [Guarded(4 * (_COUNT_MAX + 1)) for _ in range(3)]  # of keys, values, header lists
        self._header_ends = [Guarded(4 * (_INPUT_MAX // 2 + 1)) for _ in range(2)]
        self._bytes = [Guarded(_INPUT_MAX) for _ in range(4)]  # keys, values, header keys, header values
        self._valid = [Guarded(_COUNT_MAX), Guarded(_COUNT_MAX), Guarded(_INPUT_MAX // 2)]
        self._kernels = kernels()

    def __call__(self, data: bytes) -> None:
        address = self._input.put(data)
        rows_address = self._table.end - _ROWS * table.ROW_BYTES
        scan_block = self._block.end - slots.S_SLOTS * 8
        first = [0] * slots.S_SLOTS
        first[slots.S_CAPACITY], first[slots.S_VERIFY] = _ROWS, 1
        self._block.put(struct.pack(f"<{slots.S_SLOTS}q", *first))
        code = self._kernels.scan(address, len(data), rows_address, scan_block)
        results = self._block.numbers("q", slots.S_SLOTS)
        found, next_position = results[slots.S_N], results[slots.S_NEXT]
        require(0 <= found <= _ROWS, f"{found} batches")
        require(0 <= next_position <= len(data), f"stopped at {next_position}")
        require(code != OK or next_position == len(data), "ended before the end")
        require(code != FULL or found == _ROWS, "full too early")
        position = 0
        for number in range(found):
            # the table lies at the start of its last _ROWS rows, so rows are counted from there
            at = self._table.size - _ROWS * table.ROW_BYTES + number * table.ROW_BYTES
            row = struct.unpack_from(f"<{table.COLUMNS}q", self._table.memory, at)
            require(row[table.POSITION] == position, "batches do not lie side by side")
            require(table.PREFIX_BYTES < row[table.SIZE] <= len(data) - position, "size of a batch")
            self._compare_header(data, row)
            position += row[table.SIZE]
            if row[table.MAGIC] == 2 and row[table.ATTRIBUTES] & table.CODEC_MASK == 0:
                self._decode(rows_address, number, row)
        require(position == next_position, "the end of the last batch")

    def _compare_header(self, data: bytes, row: tuple[int, ...]) -> None:
        """The plain reader of headers sees what the kernel sees."""
        position = row[table.POSITION]
        header = parse_header(data[position : position + table.HEADER_BYTES], position, len(data))
        require(header is not None, "a header only the kernel accepts")
        assert header is not None
        seen = (header.size_bytes, header.last_offset, header.magic, header.attributes, header.max_timestamp_ms)
        columns = (table.SIZE, table.LAST_OFFSET, table.MAGIC, table.ATTRIBUTES, table.MAX_TIMESTAMP)
        require(seen == tuple(row[column] for column in columns), f"header {header} differs from {row}")

    def _decode(self, rows_address: int, number: int, row: tuple[int, ...]) -> None:
        count, payload = row[table.COUNT], row[table.PAYLOAD_SIZE]
        require(count * table.RECORD_BYTES_MIN <= payload, "more records than bytes")
        capacity = payload // 2
        block = [0] * slots.D_SLOTS
        block[slots.D_MAX_OFFSET] = INT64_MAX
        block[slots.D_OFFSETS] = self._offsets.end - 8 * count
        block[slots.D_TIMESTAMPS] = self._timestamps.end - 8 * count
        block[slots.D_TIMESTAMP_TYPES] = self._types.end - count
        block[slots.D_KEY_OFFSETS] = self._ends[0].end - 4 * (count + 1)
        block[slots.D_KEY_DATA] = self._bytes[0].end - payload
        block[slots.D_KEY_VALID] = self._valid[0].end - count
        block[slots.D_VALUE_OFFSETS] = self._ends[1].end - 4 * (count + 1)
        block[slots.D_VALUE_DATA] = self._bytes[1].end - payload
        block[slots.D_VALUE_VALID] = self._valid[1].end - count
        block[slots.D_HEADER_CAPACITY] = capacity
        block[slots.D_HEADER_OFFSETS] = self._ends[2].end - 4 * (count + 1)
        block[slots.D_HEADER_KEY_OFFSETS] = self._header_ends[0].end - 4 * (capacity + 1)
        block[slots.D_HEADER_KEY_DATA] = self._bytes[2].end - payload
        block[slots.D_HEADER_VALUE_OFFSETS] = self._header_ends[1].end - 4 * (capacity + 1)
        block[slots.D_HEADER_VALUE_DATA] = self._bytes[3].end - payload
        block[slots.D_HEADER_VALUE_VALID] = self._valid[2].end - capacity
        block_address = self._block.put(struct.pack(f"<{slots.D_SLOTS}q", *block))
        code = self._kernels.decode(rows_address, number, number + 1, block_address)
        results = self._block.numbers("q", slots.D_SLOTS)
        n, headers = results[slots.D_N], results[slots.D_HEADER_N]
        require(0 <= n <= count and 0 <= headers <= capacity, f"{n} records, {headers} headers")
        if code != OK:
            return
        require(n == count, "records were left out")
        if not n:
            return
        offsets = self._offsets.numbers("q", n)
        require(row[table.BASE_OFFSET] <= offsets[0] and offsets[-1] <= row[table.LAST_OFFSET], "offsets out of range")
        require(n == 1 or all(a < b for a, b in pairwise(offsets)), "offsets out of order")
        lengths = 0
        for ends in (self._ends[0], self._ends[1]):
            seen = ends.numbers("i", n)
            require(seen[0] >= 0 and all(a <= b for a, b in pairwise(seen)), "lengths")
            lengths += seen[-1]
        lists = self._ends[2].numbers("i", n)
        require(lists[0] >= 0 and all(a <= b for a, b in pairwise(lists)) and lists[-1] == headers, "header lists")
        require(lengths + 2 * headers <= payload, "more bytes than there are")


# --- v2 batches through a compaction ----------------------------------------------------------------------------------

_NOW_MS, _RETENTION_MS = 1_700_000_000_000, 1000
_MAP_ROOM = 2 * _COUNT_MAX


class CompactionTarget:
    """Keys into the map, verdicts, and batches written anew, again with every buffer ending at an unmapped page."""

    def __init__(self) -> None:
        self._input = Guarded(_INPUT_MAX)
        self._table = Guarded(_ROWS * table.ROW_BYTES)
        self._marks = Guarded(_ROWS * marks.MARK_BYTES)
        self._block = Guarded(max(slots.S_SLOTS, slots.K_SLOTS, slots.B_SLOTS, slots.W_SLOTS) * 8)
        self._map = Guarded(24 * _MAP_ROOM)
        self._scratch = Guarded(64 * 48 + 128)
        self._bits = Guarded(_INPUT_MAX // 8 + 2)
        self._keep = Guarded(_COUNT_MAX)
        self._out = Guarded(4 * _INPUT_MAX)
        self._made = Guarded(_ROWS * table.ROW_BYTES)
        self._kernels = kernels()

    def __call__(self, data: bytes) -> None:
        written = self._compact(data)
        if written:  # what was compacted is sound, and compacting it again at the same time changes nothing
            again = self._compact(written)
            require(again == written, "compacting twice is not compacting once")

    def _compact(self, data: bytes) -> bytes | None:
        """What is left of the batches in front of the first that a cleaner would refuse; None where one is damaged."""
        address = self._input.put(data)
        rows = self._scanned(address, len(data))
        if not rows:
            return None
        # As many rows as there are, and their marks, at the end of their memory.
        at_rows = self._table.put(b"".join(struct.pack(f"<{table.COLUMNS}q", *row) for row in rows))
        at_marks = self._marks.put(bytes(len(rows) * marks.MARK_BYTES))
        batches = [0] * slots.B_SLOTS
        batches[slots.B_MARKS], batches[slots.B_FIRST_UNCLEANABLE] = at_marks, rows[-1][table.LAST_OFFSET] + 1
        batches[slots.B_NOW_MS], batches[slots.B_DELETE_RETENTION_MS] = _NOW_MS, _RETENTION_MS
        batches[slots.B_CODEC], batches[slots.B_NEXT_HORIZON] = -1, INT64_MAX
        self._call("judge_batches", batches, at_rows, len(rows))
        records = sum(row[table.COUNT] for row in self._rows(self._table, len(rows)) if not row[table.SKIP])

        known = [0] * slots.K_SLOTS
        slot_count = records + 1
        known[slots.K_MAP], known[slots.K_MAP_SLOTS] = self._map.put(bytes(24 * slot_count)), slot_count
        known[slots.K_SLOT_BYTES], known[slots.K_SCRATCH] = 24, self._scratch.end - (64 * 48 + 128)
        known[slots.K_LIMIT] = known[slots.K_ROOM] = slot_count
        known[slots.K_SECRET_0], known[slots.K_MAX_OFFSET] = len(data), INT64_MAX
        code, known = self._call("index_keys", known, at_rows, 0, len(rows))
        require(known[slots.K_USED] <= records, "more keys than records")
        sound = code == OK
        require(not sound or known[slots.K_RECORDS] == records, "records were not indexed")
        keyless = known[slots.K_KEYLESS]
        known[slots.K_MARKS], known[slots.K_KEEP] = at_marks, self._keep.end - records
        known[slots.K_NOW_MS], known[slots.K_KEYLESS] = _NOW_MS, 0
        code, known = self._call("judge", known, at_rows, 0, len(rows))
        require((code == OK) == sound, "sound for one kernel, malformed for the other")
        if not sound:
            return None
        require(known[slots.K_KEYLESS] == keyless, "records without key")
        verdicts = self._keep.numbers("B", records)
        staying = sum(each != marks.DROP_RECORD for each in verdicts)
        require(staying == known[slots.K_USED] - known[slots.K_TOMBSTONES], "a record for each key that is not deleted")
        self._judge_by_offsets(known, at_rows, rows, verdicts)
        return self._rewritten(address, at_rows, at_marks, len(rows), batches, staying)

    def _scanned(self, address: int, size: int) -> list[tuple[int, ...]]:
        """Plain batches in order, as many as a cleaner would go on with."""
        block = [0] * slots.S_SLOTS
        block[slots.S_CAPACITY], block[slots.S_VERIFY] = _ROWS, 1
        at_block = self._block.put(struct.pack(f"<{slots.S_SLOTS}q", *block))
        self._kernels.scan(address, size, self._table.end - _ROWS * table.ROW_BYTES, at_block)
        found = self._block.numbers("q", slots.S_SLOTS)[slots.S_N]
        rows: list[tuple[int, ...]] = []
        for row in self._rows(self._table, _ROWS)[:found]:
            compressed = row[table.MAGIC] < 2 or row[table.ATTRIBUTES] & table.CODEC_MASK
            if compressed or (rows and row[table.BASE_OFFSET] <= rows[-1][table.LAST_OFFSET]):
                break
            rows.append(row)
        return rows

    def _rows(self, memory: Guarded, count: int) -> list[tuple[int, ...]]:
        numbers = memory.numbers("q", count * table.COLUMNS)
        return [numbers[at : at + table.COLUMNS] for at in range(0, len(numbers), table.COLUMNS)]

    def _call(self, name: str, block: list[int], *arguments: int) -> tuple[int, list[int]]:
        at_block = self._block.put(struct.pack(f"<{len(block)}q", *block))
        code = getattr(self._kernels, name)(*arguments, at_block)
        return code, list(self._block.numbers("q", len(block)))

    def _judge_by_offsets(
        self, known: list[int], at_rows: int, rows: list[tuple[int, ...]], verdicts: tuple[int, ...]
    ) -> None:
        """With the bits of the keys' last offsets the verdicts are the same."""
        first, end = rows[0][table.BASE_OFFSET], rows[-1][table.LAST_OFFSET] + 1
        if end - first > _INPUT_MAX:
            return
        bits = self._bits.put(bytes((end - first + 7) // 8 + 1))
        self._kernels.mark_offsets(known[slots.K_MAP], known[slots.K_MAP_SLOTS], 24, first, end, bits)
        again = list(known)
        again[slots.K_MARKS] = self._made.put(bytes(len(rows) * marks.MARK_BYTES))
        again[slots.K_SURVIVORS], again[slots.K_SURVIVORS_FIRST], again[slots.K_SURVIVORS_END] = bits, first, end
        code, _ = self._call("judge", again, at_rows, 0, len(rows))
        require(code == OK, "malformed for who goes by offsets")
        require(self._keep.numbers("B", len(verdicts)) == verdicts, "another verdict by offsets")

    def _rewritten(
        self, address: int, at_rows: int, at_marks: int, count: int, batches: list[int], staying: int
    ) -> bytes | None:
        _, batches = self._call("choose_actions", batches, at_rows, 0, count)
        require(batches[slots.B_KEPT] == staying, "records that stay")
        room = self._kernels.rewrite_room(at_rows, at_marks, 0, count)
        write = [0] * slots.W_SLOTS
        records = sum(row[table.COUNT] for row in self._rows(self._table, count) if not row[table.SKIP])
        write[slots.W_KEEP], write[slots.W_OUT] = self._keep.end - records, self._out.put(bytes(room))
        write[slots.W_TABLE] = self._made.end - count * table.ROW_BYTES
        at_block = self._block.put(struct.pack(f"<{slots.W_SLOTS}q", *write))
        code = self._kernels.rewrite(address, at_rows, at_marks, 0, count, at_block)
        require(code == OK, "judged sound, but not written")
        results = self._block.numbers("q", slots.W_SLOTS)
        made, size = results[slots.W_TABLE_N], results[slots.W_OUT_SIZE]
        require(0 <= size <= room and 0 <= made <= count, f"{made} batches of {size} bytes")
        rows = self._rows(self._made, count)[:made]
        data_rows = [row for row in rows if not row[table.ATTRIBUTES] & table.CONTROL_BIT]
        require(sum(row[table.COUNT] for row in data_rows) == staying, "records written")
        start = self._out.size - room
        return bytes(self._out.memory[start : start + size])


def repair_v2(data: bytearray, word: int) -> bytearray:
    """Checksums of all batches; with some words the length of the first batch is made to end with the data."""
    if word & 3 == 0 and len(data) >= table.HEADER_BYTES:
        struct.pack_into(">i", data, 8, len(data) - table.PREFIX_BYTES)
    position = 0
    while len(data) - position >= table.HEADER_BYTES:
        (length,) = struct.unpack_from(">i", data, position + 8)
        end = position + table.PREFIX_BYTES + length
        if end < position + table.HEADER_BYTES or end > len(data):
            break
        if data[position + 16] == 2:
            struct.pack_into(">I", data, position + 17, crc32c(memoryview(data)[position + 21 : end]))
        elif data[position + 16] < 2:
            struct.pack_into(">I", data, position + 12, zlib.crc32(memoryview(data)[position + 16 : end]))
        position = end
    return data


# --- batches through the public face ----------------------------------------------------------------------------------


def run_records(data: bytes) -> None:
    """iter_records: offsets within their batch and increasing; errors that say where."""
    previous = -1
    try:
        for record in iter_records(data, limits=LIMITS, control=True, file=FILE):
            require(0 <= record.offset < INT64_MAX, f"offset {record.offset}")
            require(record.timestamp_type in (0, 1), "timestamp type")
            previous = record.offset
    except DuramenError as error:
        require(error.file == FILE, f"no file in: {error}")
        require(error.position is not None and 0 <= error.position <= len(data), f"no position in: {error}")
        require(error.offset is not None or previous == -1, f"no offset in: {error}")


def repack_v2(data: bytearray, word: int) -> bytes | bytearray:
    """The records of an uncompressed batch compressed with a codec of the word's choice, so that damage lies inside."""
    if word & 4 and len(data) >= table.HEADER_BYTES and data[16] == 2 and data[22] & table.CODEC_MASK == 0:
        codec = CODECS[1 + (word >> 3) % 4]
        header = bytearray(data[: table.HEADER_BYTES])
        header[22] |= codec.id
        payload = codec.compress(data[table.HEADER_BYTES :])
        struct.pack_into(">i", header, 8, table.HEADER_BYTES + len(payload) - table.PREFIX_BYTES)
        data = header + payload
    return repair_v2(data, word)


def run_legacy(data: bytes) -> None:
    try:
        batch = decode_legacy(data, limits=LIMITS)
    except DuramenError as error:
        require(error.position is not None and 0 <= error.position <= len(data), f"no position in: {error}")
        return
    offsets = [record.offset for record in batch.records]
    require(0 < batch.size_bytes <= len(data), "size")
    require(offsets[0] == batch.first_offset >= 0, "first offset")
    require(all(a < b for a, b in pairwise(offsets)), "offsets out of order")
    if batch.magic == 1 and batch.last_offset:
        require(offsets[-1] == batch.last_offset, "last offset")


def rewrap_legacy(data: bytearray, word: int) -> bytes | bytearray:
    """A run of uncompressed messages put into a wrapper, so that damage lies inside; or just the checksum."""
    if word & 4 and len(data) > 34 and data[16] < 2 and data[17] & 7 == 0:
        magic, codec = data[16], CODECS[1 + (word >> 3) % 3]
        value = codec.compress(bytes(data))
        body = bytes((magic, codec.id)) + (struct.pack(">q", word) if magic else b"")
        body += struct.pack(">ii", -1, len(value)) + value
        return struct.pack(">qiI", word >> 5, len(body) + 4, zlib.crc32(body)) + body
    if word & 3 == 0 and len(data) >= 26:
        struct.pack_into(">i", data, 8, len(data) - table.PREFIX_BYTES)
    if len(data) >= 26:
        (length,) = struct.unpack_from(">i", data, 8)
        end = table.PREFIX_BYTES + length
        if 26 <= end <= len(data):
            struct.pack_into(">I", data, 12, zlib.crc32(memoryview(data)[16:end]))
    return data


def run_control(data: bytes) -> None:
    """The first byte says where the key ends."""
    at = 1 + (data[0] if data else 0)
    record = Record(data[1:at], data[at:] or None, offset=7)
    try:
        parse_control_record(record)
    except CorruptBatch as error:
        require(error.offset == 7, f"no offset in: {error}")


def codec_runner(codec_id: int, magic: int) -> Callable[[bytes], None]:
    codec = CODECS[codec_id]

    def run(data: bytes) -> None:
        try:
            payload = codec.decompress(data, limit=LIMITS.decompressed_bytes, magic=magic)
            require(len(payload) <= LIMITS.decompressed_bytes, "more than the limit")
        except CorruptBatch as error:
            require(error.position is not None and 0 <= error.position <= len(data), f"no position in: {error}")
        except DecompressionLimit:
            pass

    return run


# --- side files -------------------------------------------------------------------------------------------------------


def file_runner(read: Callable[[BytesFiles], object], *, position: bool = True) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            read(BytesFiles(data))
        except DuramenError as error:
            require(error.file == FILE, f"no file in: {error}")
            require(not position or error.position is not None, f"no position in: {error}")

    return run


def _read_snapshot(files: BytesFiles) -> None:
    entries = read_snapshot(files, FILE, limits=LIMITS)  # type: ignore[arg-type]
    require(encode_snapshot(entries) == files.open(FILE).pread(1 << 20, 0), "not what was read")


def repair_snapshot(data: bytearray, word: int) -> bytearray:
    if word & 3 == 0 and len(data) >= 10:
        struct.pack_into(">i", data, 6, (len(data) - 10) // 46)
    if len(data) >= 6:
        struct.pack_into(">I", data, 2, crc32c(memoryview(data)[6:]))
    return data


_BASE = 1000
_PROBES = (0, _BASE, _BASE + 1, _BASE + 37, _BASE + (1 << 31), INT64_MAX)


def _read_offset_index(files: BytesFiles) -> None:
    index = OffsetIndex(files, FILE, _BASE, 1 << 20)  # type: ignore[arg-type]
    found = [index.lookup(probe) for probe in _PROBES]
    index.each_beyond([100])
    index.last_offset()
    index.sanity_check(1 << 20)
    require(all(a.offset <= b.offset and a.position <= b.position for a, b in pairwise(found)), "lookups out of order")
    require(all(entry.offset >= _BASE for entry in found), "below the base")
    items = index.items()
    require(len(items) == index.entries, "entries")
    require(all(a.offset < b.offset and a.position < b.position for a, b in pairwise(items)), "entries out of order")


def _read_time_index(files: BytesFiles) -> None:
    index = TimeIndex(files, FILE, _BASE, 1 << 20)  # type: ignore[arg-type]
    found = [index.lookup(probe) for probe in _PROBES]
    index.last_entry()
    index.sanity_check()
    require(all(a.offset <= b.offset for a, b in pairwise(found)), "lookups out of order")
    items = index.items()
    require(all(a.offset <= b.offset for a, b in pairwise(items)), "entries out of order")


def _read_txn_index(files: BytesFiles) -> None:
    index = TxnIndex(files, FILE, _BASE, writable=False)  # type: ignore[arg-type]
    found, _ = index.collect_aborted(0, INT64_MAX)
    require(all(a.last_offset < b.last_offset for a, b in pairwise(found)), "entries out of order")
    require(found == [] or index.last_offset is not None, "no last offset")
    index.sanity_check()
    require(all(each.last_offset >= _BASE for each in found), "below the base")


def _read_state(files: BytesFiles) -> None:
    state = read_state(files, FILE, limits=LIMITS)  # type: ignore[arg-type]
    require(state is not None, "no state")
    assert state is not None
    encode_state(state)
    require(all(a.base_offset < b.base_offset for a, b in pairwise(state.segments)), "segments out of order")


def repair_state(data: bytearray, _word: int) -> bytes:
    head, newline, text = bytes(data).partition(b"\n")
    return head.rpartition(b"=")[0] + b"=%08x" % crc32c(text) + newline + text


def repair_sealed(data: bytearray, _word: int) -> bytes:
    line, _, _ = bytes(data).partition(b"\n")
    line += b"\n"
    return line + b"crc32c %08x\n" % crc32c(line)


def _read_ends(files: BytesFiles) -> None:
    ends = read_ends(files, FILE, partitions=4, limits=LIMITS)  # type: ignore[arg-type]
    require(len(ends.high_watermarks) == len(ends.last_stable_offsets) == len(ends.recovery_points) == 4, "partitions")


def run_topic(data: bytes) -> None:
    registry = TopicRegistry(BytesFiles(data), Layout(""))  # type: ignore[arg-type]
    try:
        topic = registry.read("t")
    except DuramenError as error:
        require(error.file is not None, f"no file in: {error}")
        return
    require(topic.name == "t" and topic.partitions >= 1, "topic")


def run_epochs(data: bytes) -> None:
    try:
        epochs = LeaderEpochs.load(BytesFiles(data), "", limits=LIMITS)  # type: ignore[arg-type]
    except DuramenError as error:
        require(error.file is not None and error.position is not None, f"no place in: {error}")
        return
    require(all(a.epoch < b.epoch and a.start_offset < b.start_offset for a, b in pairwise(epochs.entries)), "order")


# --- corpora ----------------------------------------------------------------------------------------------------------


def vectors(version: int) -> Iterator[bytes]:
    for case in json.loads((VECTORS / f"batches_v{version}.json").read_text())["cases"]:
        yield bytes.fromhex(case["hex"])


def _own_batches() -> Iterator[bytes]:
    records = [
        Record(
            b"key%d" % i if i % 5 else None,
            b"v" * (i * 7 % 40) if i % 7 else None,
            1_700_000_000_000 + i,
            tuple((f"h{j}", b"x" * j if j % 3 else None) for j in range(i % 4)),
        )
        for i in range(40)
    ]
    for codec_id in range(len(CODECS)):
        for size in (1, 3, 40):
            yield encode_batch(columns_of(records[:size]), BatchOptions(codec_id=codec_id, base_offset=5))
    yield encode_batch(columns_of([Record(None, None)] * 300), BatchOptions())
    yield encode_marker(commit=True, producer_id=7, producer_epoch=1, coordinator_epoch=3, timestamp_ms=5)


def _logs() -> Iterator[bytes]:
    """Several batches in a row, whose records compete for few keys; some have no value, some a horizon."""
    for seed in range(6):
        log, offset = b"", 3 * seed
        for number in range(2 + seed):
            records = [
                Record(b"%d" % (i * seed % 5), None if (i + number) % 3 == 0 else b"v" * i, _NOW_MS - 9 + i)
                for i in range(1 + (seed + number) % 7)
            ]
            options = BatchOptions(base_offset=offset)
            if number % 3 == 2:
                options = BatchOptions(base_offset=offset, delete_horizon_ms=_NOW_MS + (seed - 3))
            log += encode_batch(columns_of(records), options)
            offset += len(records) + seed % 2
        yield log


def _payloads(codec_id: int) -> list[bytes]:
    texts = (b"a", b"kafka" * 30, bytes(range(256)) * 2, b"\0" * 3000, os.fsencode("lorem ipsum ") * 9)
    return [CODECS[codec_id].compress(text) for text in texts]


def _index_entries() -> list[bytes]:
    return [b"".join(struct.pack(">ii", 3 + 5 * i, 100 * i) for i in range(n)) for n in (1, 2, 9, 40)]


def _time_entries() -> list[bytes]:
    return [b"".join(struct.pack(">qi", 1_700_000_000_000 + i, 3 + 5 * i) for i in range(n)) for n in (1, 2, 9, 40)]


def _txn_entries() -> list[bytes]:
    return [
        b"".join(encode_entry(AbortedTransaction(i % 3, 5 * i, _BASE + 5 * i + 3, 5 * i + 1)) for i in range(n))
        for n in (1, 2, 9)
    ]


def _snapshots() -> list[bytes]:
    return [
        encode_snapshot(SnapshotEntry(i, i % 3, i * 2, 50 + i, i % 4, 1_700_000_000_000, i % 2, -1) for i in range(n))
        for n in (0, 1, 3, 20)
    ]


def _states() -> list[bytes]:
    segments = tuple(SegmentEntry(100 * i, 1000 + i, 1_700_000_000_000 + i) for i in range(5))
    return [
        encode_state(state)
        for state in (
            PartitionState(),
            PartitionState(7, 3, 5, 1, segments),
            PartitionState(8, 0, 0, 0, segments[:2], SwapNote((1, 2), (3,))),
        )
    ]


_OFFSET_CHECKPOINTS = (b"0\n0\n", b"0\n2\ntopic 0 100\na.b_c-d 17 9223372036854775807\n", b"0\n1\nt 2147483647 0\n")
_EPOCHS = (b"0\n0\n", b"0\n3\n0 0\n4 100\n2147483647 9223372036854775807\n")
_METADATA = (b"version: 0\ntopic_id: 5bF9DN1LQNi1Xrl_4L0c6A",)
_PROPERTIES = (
    b"#\n#Fri\ncluster.id=abc\ndirectory.id=5bF9DN1LQNi1Xrl_4L0c6A\nnode.id=1\nversion=1\n",
    b"version=0\nbroker.id=0\ncluster.id=\\u0041b\\\n c\n",
)
_TOPICS = (
    seal(
        {
            "name": "t",
            "id": "5bF9DN1LQNi1Xrl_4L0c6A",
            "partitions": 4,
            "configs": {"segment.bytes": "1048576", "cleanup.policy": "compact"},
            "config_version": 0,
            "created_ms": 0,
        },
        version=1,
    ),
)


def _ends() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ends")
        write_ends(OS_FILES, path, TopicEnds((1, 2), (1, 1), (0, 2)))
        return Path(path).read_bytes()


def all_targets() -> tuple[Target, ...]:
    v2 = [batch for batch in (*vectors(2), *_own_batches()) if len(batch) < 2500]
    plain = [batch for batch in v2 if batch[22] & table.CODEC_MASK == 0]
    legacy = [batch for version in (0, 1) for batch in vectors(version) if len(batch) < 1000]
    return (
        Target("kernels", plain, KernelTarget(), repair_v2, weight=24),
        Target("compaction", [*plain, *_logs()], CompactionTarget(), repair_v2, weight=12),
        Target("records", [*v2, *legacy], run_records, repack_v2, weight=5),
        Target("legacy", legacy, run_legacy, rewrap_legacy, weight=3),
        Target("control", [b"\x04\0\0\0\1\0\0\0\0\0\5", b"\x04\0\0\0\2xyz"], run_control),
        Target("gzip", _payloads(1), codec_runner(1, 2)),
        Target("snappy", _payloads(2), codec_runner(2, 2)),
        Target("lz4", _payloads(3), codec_runner(3, 2)),
        Target("lz4-v0", _payloads(3), codec_runner(3, 0)),
        Target("zstd", _payloads(4), codec_runner(4, 2)),
        Target("offset-index", _index_entries(), file_runner(_read_offset_index)),
        Target("time-index", _time_entries(), file_runner(_read_time_index)),
        Target("txn-index", _txn_entries(), file_runner(_read_txn_index)),
        Target("snapshot", _snapshots(), file_runner(_read_snapshot), repair_snapshot, weight=2),
        Target("state", _states(), file_runner(_read_state), repair_state, weight=2, text=True),
        Target("ends", [_ends()], file_runner(_read_ends, position=False), repair_sealed, text=True),
        Target("topic", _TOPICS, run_topic, repair_sealed, text=True),
        Target(
            "offset-checkpoint",
            _OFFSET_CHECKPOINTS,
            file_runner(lambda files: read_offset_checkpoint(files, FILE, limits=LIMITS)),  # type: ignore[arg-type]
            text=True,
        ),
        Target("leader-epochs", _EPOCHS, run_epochs, text=True),
        Target(
            "partition-metadata",
            _METADATA,
            file_runner(lambda files: read_partition_metadata(files, FILE, limits=LIMITS)),  # type: ignore[arg-type]
        ),
        Target(
            "meta-properties",
            _PROPERTIES,
            file_runner(
                lambda files: read_meta_properties(files, FILE, limits=LIMITS),  # type: ignore[arg-type]
                position=False,
            ),
            text=True,
        ),
    )
