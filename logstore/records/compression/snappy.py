"""Snappy in the "xerial" stream framing of snappy-java, which is what Kafka stores.

Writes blocks of 32 KiB after one stream header; reads such streams, several of them end to end, and the bare block
that some clients send. Google's own framing format is something else and is not read.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import cramjam

from logstore.errors import CorruptBatch, InvalidConfig
from logstore.records.compression.codec import OutputTooSmall, byte_view, decompress_within

if TYPE_CHECKING:
    from typing_extensions import Buffer

# stream := header block* ; header := magic int32 version int32 compatible_version ; block := int32 length, raw block
MAGIC = b"\x82SNAPPY\x00"
HEADER = struct.Struct(">8sii")
BLOCK_LENGTH = struct.Struct(">i")
VERSION = 1
STREAM_HEADER = HEADER.pack(MAGIC, VERSION, VERSION)
#: what the start of a header looks like where a block length is expected; negative, so never a length
(MAGIC_AS_LENGTH,) = BLOCK_LENGTH.unpack_from(MAGIC)

BLOCK_BYTES = 32 * 1024
#: the densest element of a raw block is a copy of 64 bytes in 3
EXPANSION_MAX = (64, 3)


class Snappy:
    id = 2
    name = "snappy"

    def compress(self, payload: Buffer, level: int | None = None) -> bytes:
        if level is not None:
            raise InvalidConfig("snappy has no compression levels")
        view = byte_view(payload)
        parts: list[Buffer] = [STREAM_HEADER]
        for start in range(0, len(view), BLOCK_BYTES):
            block = cramjam.snappy.compress_raw(view[start : start + BLOCK_BYTES])
            parts += BLOCK_LENGTH.pack(len(block)), block
        return b"".join(parts)

    def decompress_into(self, data: Buffer, out: memoryview, *, magic: int = 2) -> int:
        view = byte_view(data)
        end = len(view)
        if end < HEADER.size or view[: len(MAGIC)] != MAGIC:
            return _decompress_block(view, 0, out)
        position = written = 0
        while position < end:
            if end - position < BLOCK_LENGTH.size:
                raise CorruptBatch("snappy stream is cut short in a block length", position=position)
            (length,) = BLOCK_LENGTH.unpack_from(view, position)
            if length == MAGIC_AS_LENGTH:
                position = _skip_header(view, position)
                continue
            position += BLOCK_LENGTH.size
            if not 0 < length <= end - position:
                raise CorruptBatch(f"snappy block of {length} bytes where {end - position} are left", position=position)
            written += _decompress_block(view[position : position + length], position, out[written:])
            position += length
        return written

    def decompress(self, data: Buffer, *, limit: int, magic: int = 2) -> bytes:
        return decompress_within(limit, data, lambda out: self.decompress_into(data, out))


def _skip_header(view: memoryview, position: int) -> int:
    if len(view) - position < HEADER.size:
        raise CorruptBatch("snappy stream is cut short in a header", position=position)
    magic, version, _ = HEADER.unpack_from(view, position)
    if magic != MAGIC or version < VERSION:
        raise CorruptBatch(f"snappy stream header with magic {magic.hex()} and version {version}", position=position)
    return position + HEADER.size


def _decompress_block(block: memoryview, position: int, room: memoryview) -> int:
    try:
        length = cramjam.snappy.decompress_raw_len(block)
        if length * EXPANSION_MAX[1] > len(block) * EXPANSION_MAX[0]:
            raise CorruptBatch(
                f"snappy block of {len(block)} bytes claims to hold {length}, more than it can", position=position
            )
        if length > len(room):
            raise OutputTooSmall
        return cramjam.snappy.decompress_raw_into(block, room[:length])
    except cramjam.DecompressionError as error:
        raise CorruptBatch(f"snappy block cannot be decoded: {error}", position=position) from None
