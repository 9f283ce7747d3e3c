"""The `.snapshot` file: the producers of a partition as of an offset, the offset being the file's number.

Owns the bytes in both directions. What the entries mean, and which files are kept, is producer_state's.

    file  := int16 version = 1 · uint32 CRC-32C over the rest · int32 count · entry*          (big-endian)
    entry := int64 producerId · int16 producerEpoch · int32 lastSequence · int64 lastOffset · int32 offsetDelta ·
             int64 timestamp · int32 coordinatorEpoch · int64 currentTxnFirstOffset           (46 bytes)
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from crc32c import crc32c

from logstore.errors import CorruptSnapshot
from logstore.files import FileSystem, read_whole, replace_file
from logstore.limits import DEFAULT_LIMITS, Limits

SNAPSHOT_VERSION = 1

_VERSION_CRC = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")
_HEADER_BYTES = _VERSION_CRC.size + _COUNT.size
ENTRY_BYTES = _ENTRY.size
#: what one entry is reckoned to take in memory, so that a file within `side_file_bytes` stays within it parsed
ENTRY_MEMORY_BYTES = 256


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One producer; -1 stands for "none" in the sequence, the offsets and the coordinator epoch."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int
    coordinator_epoch: int
    current_txn_first_offset: int


def encode_snapshot(entries: Iterable[SnapshotEntry]) -> bytes:
    body = [
        _ENTRY.pack(
            entry.producer_id,
            entry.producer_epoch,
            entry.last_sequence,
            entry.last_offset,
            entry.offset_delta,
            entry.timestamp_ms,
            entry.coordinator_epoch,
            entry.current_txn_first_offset,
        )
        for entry in entries
    ]
    checked = _COUNT.pack(len(body)) + b"".join(body)
    return _VERSION_CRC.pack(SNAPSHOT_VERSION, crc32c(checked)) + checked


def decode_snapshot(data: bytes, *, file: str | None = None) -> list[SnapshotEntry]:
    """The producers of a snapshot. Raises CorruptSnapshot for anything but exactly one well-formed snapshot."""
    if len(data) < _HEADER_BYTES:
        raise CorruptSnapshot(f"snapshot of {len(data)} bytes, the shortest has {_HEADER_BYTES}", file=file, position=0)
    version, stored_crc = _VERSION_CRC.unpack_from(data, 0)
    if version != SNAPSHOT_VERSION:
        raise CorruptSnapshot(f"snapshot version {version}, only {SNAPSHOT_VERSION} is known", file=file, position=0)
    computed_crc = crc32c(memoryview(data)[_VERSION_CRC.size :])
    if stored_crc != computed_crc:
        raise CorruptSnapshot(
            f"snapshot checksum {stored_crc:08x} does not match its content ({computed_crc:08x})", file=file, position=2
        )
    (count,) = _COUNT.unpack_from(data, _VERSION_CRC.size)
    if count < 0 or _HEADER_BYTES + count * ENTRY_BYTES != len(data):
        raise CorruptSnapshot(
            f"snapshot of {len(data)} bytes announces {count} producers", file=file, position=_VERSION_CRC.size
        )
    entries: list[SnapshotEntry] = []
    seen: set[int] = set()
    for fields in _ENTRY.iter_unpack(memoryview(data)[_HEADER_BYTES:]):
        entry = SnapshotEntry(*fields)
        if not _is_plausible(entry) or entry.producer_id in seen:
            raise CorruptSnapshot(
                f"producer {entry.producer_id} is there twice"
                if entry.producer_id in seen
                else f"invalid snapshot entry: {entry}",
                file=file,
                position=_HEADER_BYTES + len(entries) * ENTRY_BYTES,
            )
        seen.add(entry.producer_id)
        entries.append(entry)
    return entries


def _is_plausible(entry: SnapshotEntry) -> bool:
    return (
        entry.producer_id >= 0
        and entry.producer_epoch >= 0
        and entry.last_sequence >= -1
        and entry.last_offset >= -1
        and (0 <= entry.offset_delta <= entry.last_offset if entry.last_offset >= 0 else entry.offset_delta == 0)
        and entry.coordinator_epoch >= -1
        and entry.current_txn_first_offset >= -1
    )


def read_snapshot(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> list[SnapshotEntry]:
    """Raises CorruptSnapshot; FileNotFoundError travels up."""
    limit_bytes = _HEADER_BYTES + limits.side_file_bytes // ENTRY_MEMORY_BYTES * ENTRY_BYTES
    try:
        data = read_whole(fs, path, limit=limit_bytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptSnapshot(
                f"snapshot larger than the limit of {limit_bytes} bytes", file=path, position=0
            ) from error
        raise
    return decode_snapshot(data, file=path)


def write_snapshot(fs: FileSystem, path: str, entries: Iterable[SnapshotEntry], *, sync: bool = True) -> None:
    """Replace the file as a whole. Without `sync` a power cut may leave nonsense, which the checksum shows."""
    replace_file(fs, path, encode_snapshot(entries), durable=sync)
