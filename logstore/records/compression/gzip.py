"""gzip: RFC 1952 members around deflate, by the standard library's zlib.

Writes one member whose header is the one a JDK writes, reads one or more. The checksum and length in each trailer are
verified; bytes after the last member are refused.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from logstore.errors import CorruptBatch
from logstore.records.compression.codec import OutputTooSmall, byte_view, check_level, decompress_within

if TYPE_CHECKING:
    from typing_extensions import Buffer

# member := magic 1f8b, method 8 (deflate), flags 0, mtime int32 0, extra flags 0, system 255, deflate data, trailer
HEADER = bytes.fromhex("1f8b08000000000000ff")
TRAILER = struct.Struct("<II")  # CRC-32 of the payload, its length modulo 2^32

DEFAULT_LEVEL = -1
LEVEL_MIN, LEVEL_MAX = 1, 9

RAW_DEFLATE_WBITS = -15
GZIP_MEMBER_WBITS = 31

# zlib copies the input it has not used yet after every call, and its output once more into ours: small steps keep both
# copies small.
STEP_BYTES = 256 * 1024


class Gzip:
    id = 1
    name = "gzip"

    def compress(self, payload: Buffer, level: int | None = None) -> bytes:
        if level is None:
            level = DEFAULT_LEVEL
        elif level != DEFAULT_LEVEL:
            check_level(self.name, level, LEVEL_MIN, LEVEL_MAX)
        deflate = zlib.compressobj(level, zlib.DEFLATED, RAW_DEFLATE_WBITS)
        body = deflate.compress(payload)
        trailer = TRAILER.pack(zlib.crc32(payload), len(byte_view(payload)) & 0xFFFFFFFF)
        return b"".join((HEADER, body, deflate.flush(), trailer))

    def decompress_into(self, data: Buffer, out: memoryview, *, magic: int = 2) -> int:
        view = byte_view(data)
        position, written = _inflate_member(view, 0, out, 0)
        while position < len(view):
            position, written = _inflate_member(view, position, out, written)
        return written

    def decompress(self, data: Buffer, *, limit: int, magic: int = 2) -> bytes:
        return decompress_within(limit, data, lambda out: self.decompress_into(data, out))


def _inflate_member(view: memoryview, start: int, out: memoryview, written: int) -> tuple[int, int]:
    """Inflates the member at `start`; returns the position after it and the bytes written so far."""
    inflate = zlib.decompressobj(GZIP_MEMBER_WBITS)
    position = start
    pending: Buffer = b""
    while not inflate.eof:
        if not pending:
            pending = view[position : position + STEP_BYTES]
            position += len(pending)
        # One byte more than there is room for tells a full buffer from a payload that goes on; 0 would mean no bound.
        room = min(len(out) - written, STEP_BYTES) + 1
        try:
            piece = inflate.decompress(pending, room)
        except zlib.error as error:
            raise CorruptBatch(f"gzip member cannot be inflated: {error}", position=start) from None
        if len(piece) > len(out) - written:
            raise OutputTooSmall
        if not piece and not pending and not inflate.eof:
            raise CorruptBatch("gzip member is cut short", position=position)
        out[written : written + len(piece)] = piece
        written += len(piece)
        pending = inflate.unconsumed_tail
    return position - len(inflate.unused_data), written
