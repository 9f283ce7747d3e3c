"""Ceilings on everything that comes from outside, in one place.

A length, count or ratio read from a file is compared with these before anything is allocated for it.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
INT64_MIN = -(1 << 63)

#: Offsets of a segment lie within its base and base + this.
RELATIVE_OFFSET_MAX = INT32_MAX
#: Kafka opens no larger segment file.
SEGMENT_BYTES_MAX = INT32_MAX
TOPIC_NAME_CHARS_MAX = 249


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader is willing to hold in memory; all figures in bytes unless named otherwise."""

    #: the largest single batch, as stored
    batch_bytes: int = 256 * MIB
    #: the largest payload a batch may decompress to
    decompressed_bytes: int = 512 * MIB
    #: how far the read buffer may double
    read_buffer_bytes: int = 256 * MIB
    #: a checkpoint, snapshot, metadata or state file
    side_file_bytes: int = 256 * MIB

    @property
    def written_batch_bytes(self) -> int:
        """The largest batch to write, before compression: appends, reads and compactions must be able to hold it, also
        after it was recompressed with another codec.
        """
        largest = min(self.batch_bytes, self.read_buffer_bytes, self.decompressed_bytes)
        return largest - largest // 64  # packing what cannot be packed makes it a little larger


DEFAULT_LIMITS = Limits()
