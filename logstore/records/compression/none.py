"""The codec that leaves a payload as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore.errors import DecompressionLimit, InvalidConfig
from logstore.records.compression.codec import OutputTooSmall, byte_view

if TYPE_CHECKING:
    from typing_extensions import Buffer


class NoCompression:
    id = 0
    name = "none"

    def compress(self, payload: Buffer, level: int | None = None) -> bytes:
        if level is not None:
            raise InvalidConfig("uncompressed batches have no compression level")
        return bytes(payload)

    def decompress_into(self, data: Buffer, out: memoryview, *, magic: int = 2) -> int:
        view = byte_view(data)
        if len(view) > len(out):
            raise OutputTooSmall
        out[: len(view)] = view
        return len(view)

    def decompress(self, data: Buffer, *, limit: int, magic: int = 2) -> bytes:
        view = byte_view(data)
        if len(view) > limit:
            raise DecompressionLimit(f"the payload of {len(view)} bytes is above the limit of {limit} bytes")
        return bytes(view)
