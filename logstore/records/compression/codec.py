"""What every compression codec offers, and the one way a payload of unknown size is decompressed.

Owns the interface, the bounded growth of an output buffer and the wording of a refused level. Knows no format.
A codec never keeps a reference to the buffers it was given, and may be called from many threads at once.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Protocol

from logstore.errors import DecompressionLimit, InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

#: A batch of the producer's default size fits the first try even when it shrank to a quarter.
FIRST_GUESS_BYTES = 64 * 1024
GROWTH = 4


class OutputTooSmall(Exception):
    """The payload is longer than the buffer it was to be decompressed into; retry with a larger one."""


class Codec(Protocol):
    """One compression type; `id` is the number in the low three bits of a batch's attributes."""

    id: int
    name: str

    def compress(self, payload: Buffer, level: int | None = None) -> bytes:
        """Returns the payload in the framing Kafka reads. `None` is Kafka's default level.

        Raises InvalidConfig for a level the codec does not have.
        """

    def decompress_into(self, data: Buffer, out: memoryview, *, magic: int = 2) -> int:
        """Decompresses all of `data` to the start of `out` and returns the number of bytes written.

        `magic` is that of the batch the data comes from. Raises OutputTooSmall when `out` cannot hold the payload, and
        CorruptBatch, its position counted from the start of `data`, for bytes no writer of the format leaves.
        In both cases `out` may have been written to.
        """

    def decompress(self, data: Buffer, *, limit: int, magic: int = 2) -> bytes:
        """Returns the payload; raises DecompressionLimit when it has more than `limit` bytes, else as above."""


def byte_view(data: Buffer) -> memoryview:
    """A one-dimensional view of bytes, whatever the items of `data` are."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def check_level(codec: str, level: int, lowest: int, highest: int) -> None:
    if not lowest <= level <= highest:
        raise InvalidConfig(f"{codec} level {level} is outside {lowest}..{highest}")


def decompress_within(limit: int, data: Buffer, decompress_into: Callable[[memoryview], int]) -> bytes:
    """Calls `decompress_into` with ever larger buffers, never above `limit` bytes, until the payload fits.

    Sizes grow geometrically, so that a payload that never fits costs a constant multiple of `limit`, and one buffer is
    gone before the next is made.
    """
    size = min(max(FIRST_GUESS_BYTES, GROWTH * len(byte_view(data))), limit)
    while True:
        # BytesIO hands its storage over as bytes without a copy once it has been cut to length.
        buffer = io.BytesIO(bytes(size))
        try:
            with buffer.getbuffer() as out:
                written = decompress_into(out)
            buffer.truncate(written)
            return buffer.getvalue()
        except OutputTooSmall:
            if size >= limit:
                raise DecompressionLimit(
                    f"the compressed payload of {len(byte_view(data))} bytes grows beyond the limit of {limit} bytes",
                    hint="Raise the limit on decompressed bytes if the data is trusted",
                ) from None
        del buffer
        size = min(size * GROWTH, limit)
