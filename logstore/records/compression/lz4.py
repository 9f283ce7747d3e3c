"""LZ4 frames as Kafka writes and reads them: independent blocks after a fixed seven-byte header.

The frame is built and taken apart here around raw blocks, because the libraries' own frames link blocks, which Kafka
refuses. Content checksums are read over and not verified, as in Kafka; everything after the first end mark is ignored.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import cramjam

from logstore.errors import CorruptBatch
from logstore.records.compression.codec import OutputTooSmall, byte_view, check_level, decompress_within
from logstore.records.compression.xxhash32 import xxhash32

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

# frame := magic FLG BD [content size int64] HC block* end_mark [content checksum uint32]; little-endian
# block := uint32 length | stored bit, bytes, [block checksum uint32]
MAGIC = bytes.fromhex("04224d18")
WORD = struct.Struct("<I")
CHECKSUM_BYTES = 4
CONTENT_SIZE_BYTES = 8
DESCRIPTOR_AT = len(MAGIC)
END_MARK = bytes(4)
STORED = 1 << 31

FLG_VERSION_MASK, FLG_VERSION = 0xC0, 0x40
FLG_INDEPENDENT_BLOCKS = 0x20
FLG_BLOCK_CHECKSUM = 0x10
FLG_CONTENT_SIZE = 0x08
FLG_CONTENT_CHECKSUM = 0x04
FLG_RESERVED_MASK = 0x03
#: block size code in bits 4-6 of BD: 64 KiB, 256 KiB, 1 MiB, 4 MiB; all other bits are reserved
BLOCK_BYTES_BY_BD = {0x40: 1 << 16, 0x50: 1 << 18, 0x60: 1 << 20, 0x70: 1 << 22}

BLOCK_BYTES = BLOCK_BYTES_BY_BD[0x40]
#: the header of every frame we write: independent blocks of at most 64 KiB, nothing optional, and its checksum
HEADER = MAGIC + bytes((FLG_VERSION | FLG_INDEPENDENT_BLOCKS, 0x40, 0x82))

#: around the only block of such a frame
_FRAMING_BYTES = len(HEADER) + WORD.size + len(END_MARK)

#: Kafka's default level, and the only one that means the fast compressor
DEFAULT_LEVEL = 9
LEVEL_MIN, LEVEL_MAX = 1, 17
#: the library takes lower levels as fast ones and knows no higher
HIGH_COMPRESSION_MIN, HIGH_COMPRESSION_MAX = 3, 12


class Lz4:
    id = 3
    name = "lz4"

    def compress(self, payload: Buffer, level: int | None = None) -> bytes:
        if level is None:
            level = DEFAULT_LEVEL
        check_level(self.name, level, LEVEL_MIN, LEVEL_MAX)
        compress_block = _compress_block_fast if level == DEFAULT_LEVEL else _high_compressor(level)
        view = byte_view(payload)
        parts: list[Buffer] = [HEADER]
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            packed = compress_block(block)
            size = len(byte_view(packed))
            if size < len(block):
                parts += WORD.pack(size), packed
            else:
                parts += WORD.pack(len(block) | STORED), block
        parts.append(END_MARK)
        return b"".join(parts)

    def decompress_into(self, data: Buffer, out: memoryview, *, magic: int = 2) -> int:
        view = byte_view(data)
        end = len(view)
        # Nearly every frame has our own header and one block.
        if len(out) >= BLOCK_BYTES and view[: len(HEADER)] == HEADER and view[-WORD.size :] == END_MARK:
            begin, length = len(HEADER) + WORD.size, end - _FRAMING_BYTES
            if 0 < length <= BLOCK_BYTES and WORD.unpack_from(view, len(HEADER))[0] == length:
                return _decompress_block(view[begin : begin + length], begin, BLOCK_BYTES, out)
        # Clients of the first format wrote a wrong header checksum, so it is not verified there.
        position, flg, block_bytes_max = _read_header(view, verify_checksum=magic != 0)
        block_checksum_bytes = CHECKSUM_BYTES if flg & FLG_BLOCK_CHECKSUM else 0
        written = 0
        while True:
            word = _read_word(view, position)
            position += WORD.size
            length = word & ~STORED
            if not length:
                break
            if length > block_bytes_max:
                raise CorruptBatch(f"lz4 block of {length} bytes in a frame of {block_bytes_max}", position=position)
            if length + block_checksum_bytes > end - position:
                raise CorruptBatch(f"lz4 block of {length} bytes where {end - position} are left", position=position)
            block = view[position : position + length]
            if block_checksum_bytes and xxhash32(block) != _read_word(view, position + length):
                raise CorruptBatch("lz4 block checksum does not match", position=position)
            if word & STORED:
                if length > len(out) - written:
                    raise OutputTooSmall
                out[written : written + length] = block
                written += length
            else:
                written += _decompress_block(block, position, block_bytes_max, out[written:])
            position += length + block_checksum_bytes
        if flg & FLG_CONTENT_CHECKSUM:
            _read_word(view, position)
        return written

    def decompress(self, data: Buffer, *, limit: int, magic: int = 2) -> bytes:
        return decompress_within(limit, data, lambda out: self.decompress_into(data, out, magic=magic))


def _compress_block_fast(block: memoryview) -> Buffer:
    return cramjam.lz4.compress_block(block, store_size=False)


@lru_cache(maxsize=LEVEL_MAX)
def _high_compressor(level: int) -> Callable[[memoryview], Buffer]:
    # cramjam's raw blocks come from the fast compressor only. Imported here: few need it, and it takes long to load.
    import pyarrow as pa

    level = min(max(level, HIGH_COMPRESSION_MIN), HIGH_COMPRESSION_MAX)
    codec = pa.Codec("lz4_raw", compression_level=level)

    def compress_block(block: memoryview) -> Buffer:
        packed: bytes = codec.compress(block, asbytes=True)
        return packed

    return compress_block


def _read_word(view: memoryview, position: int) -> int:
    if len(view) - position < WORD.size:
        raise CorruptBatch("lz4 frame is cut short", position=position)
    word: int = WORD.unpack_from(view, position)[0]
    return word


def _read_header(view: memoryview, *, verify_checksum: bool) -> tuple[int, int, int]:
    """Returns the position after the header, the flags and the largest block."""
    if len(view) < len(HEADER):
        raise CorruptBatch("lz4 frame is cut short in its header", position=0)
    # Nearly every frame was written by Kafka or by us.
    if view[: len(HEADER)] == HEADER:
        return len(HEADER), HEADER[DESCRIPTOR_AT], BLOCK_BYTES
    if view[:DESCRIPTOR_AT] != MAGIC:
        raise CorruptBatch(f"lz4 frame begins with {view[:DESCRIPTOR_AT].hex()}", position=0)
    flg, bd = view[DESCRIPTOR_AT], view[DESCRIPTOR_AT + 1]
    if flg & FLG_VERSION_MASK != FLG_VERSION or flg & FLG_RESERVED_MASK:
        raise CorruptBatch(f"lz4 frame with flags {flg:#04x}", position=DESCRIPTOR_AT)
    if not flg & FLG_INDEPENDENT_BLOCKS:
        raise CorruptBatch("lz4 frame with linked blocks, which Kafka does not read", position=DESCRIPTOR_AT)
    if bd not in BLOCK_BYTES_BY_BD:
        raise CorruptBatch(f"lz4 frame with block size byte {bd:#04x}", position=DESCRIPTOR_AT + 1)
    checksum_at = DESCRIPTOR_AT + 2 + (CONTENT_SIZE_BYTES if flg & FLG_CONTENT_SIZE else 0)
    if checksum_at >= len(view):
        raise CorruptBatch("lz4 frame is cut short in its header", position=len(view))
    if verify_checksum and view[checksum_at] != (xxhash32(view[DESCRIPTOR_AT:checksum_at]) >> 8) & 0xFF:
        raise CorruptBatch("lz4 frame header checksum does not match", position=checksum_at)
    return checksum_at + 1, flg, BLOCK_BYTES_BY_BD[bd]


def _decompress_block(block: memoryview, position: int, block_bytes_max: int, room: memoryview) -> int:
    # The library wants to know whether a block carries its size, and silently tries the other way when that fails. With
    # the frame's block size in front the second try cannot succeed: read as a block, the four bytes copy from before
    # the output's start.
    sized = b"".join((WORD.pack(block_bytes_max), block))
    try:
        if len(room) >= block_bytes_max:
            return cramjam.lz4.decompress_block_into(sized, room[:block_bytes_max])
        # Only a full-sized buffer tells "too small" from "corrupt".
        scratch = bytearray(block_bytes_max)
        length = cramjam.lz4.decompress_block_into(sized, scratch)
    except cramjam.DecompressionError:
        raise CorruptBatch("lz4 block cannot be decoded", position=position) from None
    if length > len(room):
        raise OutputTooSmall
    room[:length] = memoryview(scratch)[:length]
    return length
