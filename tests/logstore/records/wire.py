"""Record batches of format 2 written byte by byte, every field free to lie. Knows nothing of the engine."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")
Header = tuple[bytes, "bytes | None"]


def varint(number: int) -> bytes:
    """Zig-zag, seven bits a byte, lowest first."""
    bits = (number << 1) ^ (number >> 63)
    bits &= (1 << 64) - 1
    out = bytearray()
    while bits > 0x7F:
        out.append(bits & 0x7F | 0x80)
        bits >>= 7
    out.append(bits)
    return bytes(out)


def field(content: bytes | None) -> bytes:
    return varint(-1) if content is None else varint(len(content)) + content


def headers_bytes(headers: Sequence[Header]) -> bytes:
    return varint(len(headers)) + b"".join(field(key) + field(value) for key, value in headers)


def record(
    key: bytes | None,
    value: bytes | None,
    *,
    timestamp_delta: int = 0,
    offset_delta: int = 0,
    headers: Sequence[Header] = (),
) -> bytes:
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + field(key) + field(value) + headers_bytes(headers)
    return varint(len(body)) + body


def batch(
    payload: bytes,
    *,
    count: int,
    base_offset: int = 0,
    last_offset_delta: int | None = None,
    attributes: int = 0,
    base_timestamp: int = 0,
    max_timestamp: int = 0,
    leader_epoch: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    magic: int = 2,
    length: int | None = None,
) -> bytes:
    """A batch around `payload`, its checksum right whatever else is not."""
    delta = max(count - 1, 0) if last_offset_delta is None else last_offset_delta
    data = bytearray(
        HEADER.pack(
            base_offset,
            49 + len(payload) if length is None else length,
            leader_epoch,
            magic,
            0,
            attributes,
            delta,
            base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            count,
        )
    )
    return resealed(bytes(data) + payload)


def resealed(data: bytes) -> bytes:
    """The same bytes with the checksum they should have."""
    return data[:17] + struct.pack(">I", crc32c.crc32c(data[21:])) + data[21:]


def message(offset: int, key: bytes | None, value: bytes | None, *, magic: int = 1, timestamp: int = 0) -> bytes:
    """A message of format 0 or 1, uncompressed."""
    import zlib

    def sized(content: bytes | None) -> bytes:
        return struct.pack(">i", -1) if content is None else struct.pack(">i", len(content)) + content

    body = struct.pack(">bb", magic, 0) + (struct.pack(">q", timestamp) if magic else b"") + sized(key) + sized(value)
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body)) + body
