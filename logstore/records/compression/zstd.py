"""Zstandard frames: one is written, one or more are read.

Contexts are kept per thread, because making one costs as much as decompressing a small batch. The frame's outline is
walked before the library sees it: the streaming reader takes a frame that is cut short for one that has ended.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import zstandard

from logstore.errors import CorruptBatch
from logstore.records.compression.codec import OutputTooSmall, byte_view, check_level, decompress_within

if TYPE_CHECKING:
    from typing_extensions import Buffer

# frame := magic, descriptor, [window], [dictionary id], [content size], block+, [checksum]; little-endian
# block := 3 bytes (last bit, 2 bits of type, 21 bits of size), bytes
# skippable frame := magic, uint32 size, bytes
WORD = struct.Struct("<I")
MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC_MIN, SKIPPABLE_MAGIC_MAX = 0x184D2A50, 0x184D2A5F
DESCRIPTOR_AT = 4
SINGLE_SEGMENT = 0x20
CONTENT_CHECKSUM = 0x04
DICTIONARY_ID_BYTES = (0, 1, 2, 4)
CONTENT_SIZE_BYTES = (0, 2, 4, 8)
#: a two-byte content size counts from here
CONTENT_SIZE_SHORT_BASE = 256
CHECKSUM_BYTES = 4
BLOCK_HEADER_BYTES = 3
BLOCK_RAW, BLOCK_RUN, BLOCK_COMPRESSED, BLOCK_RESERVED = range(4)
BLOCK_BYTES_MAX = 128 * 1024

DEFAULT_LEVEL = 3
LEVEL_MIN, LEVEL_MAX = -131072, 22


class Contexts(threading.local):
    """The calling thread's compressor, for the level it used last, and decompressor."""

    def __init__(self) -> None:
        self.level = DEFAULT_LEVEL
        self.compressor = zstandard.ZstdCompressor(level=DEFAULT_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()

    def compressor_for(self, level: int) -> zstandard.ZstdCompressor:
        if level != self.level:
            self.level, self.compressor = level, zstandard.ZstdCompressor(level=level)
        return self.compressor


class Zstd:
    id = 4
    name = "zstd"

    def __init__(self) -> None:
        self._contexts = Contexts()

    def compress(self, payload: Buffer, level: int | None = None) -> bytes:
        if level is None:
            level = DEFAULT_LEVEL
        check_level(self.name, level, LEVEL_MIN, LEVEL_MAX)
        return self._contexts.compressor_for(level).compress(byte_view(payload))

    def decompress_into(self, data: Buffer, out: memoryview, *, magic: int = 2) -> int:
        view = byte_view(data)
        position, written = self._decompress_frame(view, 0, out, 0)
        while position < len(view):
            position, written = self._decompress_frame(view, position, out, written)
        return written

    def decompress(self, data: Buffer, *, limit: int, magic: int = 2) -> bytes:
        return decompress_within(limit, data, lambda out: self.decompress_into(data, out))

    def _decompress_frame(self, view: memoryview, start: int, out: memoryview, written: int) -> tuple[int, int]:
        """Decompresses the frame at `start`; returns the position after it and the bytes written so far."""
        end, content_bytes = _outline(view, start)
        if content_bytes > len(out) - written:
            raise OutputTooSmall
        try:
            reader = self._contexts.decompressor.stream_reader(view[start:end])
            written += reader.readinto(out[written:])
            # A full buffer stops the reader before it has seen the end of the frame and its checksum.
            if written == len(out) and reader.read(1):
                raise OutputTooSmall
        except zstandard.ZstdError as error:
            raise CorruptBatch(f"zstd frame cannot be decoded: {error}", position=start) from None
        return end, written


def _outline(view: memoryview, start: int) -> tuple[int, int]:
    """Returns the position after the frame and the content size it declares, 0 when it declares none."""
    magic = _number(view, start, WORD.size)
    if SKIPPABLE_MAGIC_MIN <= magic <= SKIPPABLE_MAGIC_MAX:
        end = start + 2 * WORD.size + _number(view, start + WORD.size, WORD.size)
        if end > len(view):
            raise CorruptBatch("zstd skippable frame is cut short", position=start)
        return end, 0
    if magic != MAGIC:
        raise CorruptBatch(f"zstd frame begins with {magic:#010x}", position=start)
    descriptor = _number(view, start + DESCRIPTOR_AT, 1)
    single_segment = bool(descriptor & SINGLE_SEGMENT)
    size_bytes = CONTENT_SIZE_BYTES[descriptor >> 6] or single_segment
    size_at = start + DESCRIPTOR_AT + 1 + (not single_segment) + DICTIONARY_ID_BYTES[descriptor & 3]
    content_bytes = _number(view, size_at, size_bytes) if size_bytes else 0
    if size_bytes == 2:
        content_bytes += CONTENT_SIZE_SHORT_BASE
    position, possible_bytes = size_at + size_bytes, 0
    last = 0
    while not last:
        header = _number(view, position, BLOCK_HEADER_BYTES)
        last, kind, size = header & 1, (header >> 1) & 3, header >> 3
        if kind == BLOCK_RESERVED:
            raise CorruptBatch("zstd block of a reserved type", position=position)
        position += BLOCK_HEADER_BYTES + (1 if kind == BLOCK_RUN else size)
        possible_bytes += BLOCK_BYTES_MAX if kind == BLOCK_COMPRESSED else size
    if descriptor & CONTENT_CHECKSUM:
        position += CHECKSUM_BYTES
    if position > len(view):
        raise CorruptBatch("zstd frame is cut short", position=len(view))
    if content_bytes > possible_bytes:
        raise CorruptBatch(f"zstd frame claims to hold {content_bytes} bytes, more than it can", position=start)
    return position, content_bytes


def _number(view: memoryview, position: int, size: int) -> int:
    if len(view) - position < size:
        raise CorruptBatch("zstd frame is cut short", position=len(view))
    return int.from_bytes(view[position : position + size], "little")
