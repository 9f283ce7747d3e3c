"""Where the logs of a topic end, exactly, and which commit ended each: one file a topic, one slot a partition.

A slot is written after each append, under the partition lock, and not synced: it only saves looking. It names the boot
of the host whose memory may hold bytes of the log that are not on disk yet, and is believed on that host, until it is
started again; after that an older one may be back. A task that appends by the order of a driver on another host syncs
bytes and slot, and writes the slot in the driver's name. A slot that was never written, or is torn, says nothing, and
whoever needs the end looks for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from crc32c import crc32c

from logstore.directory.ranges import runs_of
from logstore.directory.tail import Tail
from logstore.files import File, FileSystem

#: magic, sequence, end offset, the seven numbers of a tail, leader epoch, boot id; a CRC-32C of all that after it
_SLOT = struct.Struct(">4sqq7qi40s")
_CRC = struct.Struct(">I")
_MAGIC = b"DTL1"
SLOT_BYTES = 128
_BOOT_AT = _SLOT.size - 40


@dataclass(frozen=True, slots=True)
class PartitionTail:
    sequence: int
    end_offset: int
    tail: Tail
    boot_id: str
    #: the latest one; None: look into its checkpoint
    leader_epoch: int | None = None

    @classmethod
    def of_now(cls, sequence: int, end_offset: int, tail: Tail, leader_epoch: int | None = None) -> PartitionTail:
        return cls(sequence, end_offset, tail, boot_id(), leader_epoch)

    @property
    def is_current(self) -> bool:
        """Whether it is of this host, written since it was started."""
        return self.is_of(boot_id())

    def is_of(self, boot: str) -> bool:
        return bool(boot) and self.boot_id == boot


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """What changes when the machine is started; empty (never current) where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def is_here(boot: str) -> bool:
    """Whether that boot is this host's; of one that is not known nothing is."""
    return bool(boot) and boot == boot_id()


def encode_tail(tail: PartitionTail) -> bytes:
    name = tail.boot_id.encode()
    end = tail.tail
    data = _SLOT.pack(
        _MAGIC,
        tail.sequence,
        tail.end_offset,
        end.base_offset,
        end.size_bytes,
        end.largest_timestamp_ms,
        end.largest_timestamp_offset,
        end.bytes_since_index_entry,
        end.index_entries,
        end.time_index_entries,
        -1 if tail.leader_epoch is None else tail.leader_epoch,
        name if len(name) <= 40 else b"",
    )
    return (data + _CRC.pack(crc32c(data))).ljust(SLOT_BYTES, b"\0")


def decode_tail(data: bytes) -> PartitionTail | None:
    """None for anything `encode_tail` would not have written."""
    if len(data) != SLOT_BYTES or data[:4] != _MAGIC:
        return None
    if _CRC.unpack_from(data, _SLOT.size)[0] != crc32c(data[: _SLOT.size]):
        return None
    _, sequence, end_offset, *numbers, epoch, name = _SLOT.unpack_from(data)
    if sequence < 0 or end_offset < 0 or min(numbers) < -1:  # -1: no record has a timestamp
        return None
    boot = name.rstrip(b"\0").decode(errors="replace")
    return PartitionTail(sequence, end_offset, Tail(*numbers), boot, None if epoch < 0 else epoch)


def is_of_this_boot(data: bytes) -> bool:
    """Whether a slot was written, as a whole, since the machine was started. A torn one says nothing of itself either:
    its partition is looked at as if the machine had been started again.
    """
    name = boot_id().encode()
    return (
        bool(name)
        and len(data) == SLOT_BYTES
        and data[:4] == _MAGIC
        and data[_BOOT_AT : _BOOT_AT + 40].rstrip(b"\0") == name
        and _CRC.unpack_from(data, _SLOT.size)[0] == crc32c(data[: _SLOT.size])
    )


class TopicTails:
    """The slots of one topic's file; for one thread, as a context manager or closed."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file: File | None = None
        self._writable = False

    def __enter__(self) -> TopicTails:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def read(self, number: int) -> PartitionTail | None:
        """None when the slot says nothing that can be believed."""
        return self.read_many((number,))[0]

    def read_many(self, numbers: Sequence[int]) -> list[PartitionTail | None]:
        return [decode_tail(slot) for slot in self._slots(numbers)]

    def _slots(self, numbers: Sequence[int]) -> list[bytes]:
        file = self._opened(writable=False) if numbers else None
        if file is None:
            return [b""] * len(numbers)
        first, last = min(numbers), max(numbers)
        data = file.pread((last + 1 - first) * SLOT_BYTES, first * SLOT_BYTES)
        return [data[(number - first) * SLOT_BYTES : (number - first + 1) * SLOT_BYTES] for number in numbers]

    def not_of_this_boot(self, numbers: Sequence[int]) -> list[int]:
        """Those of the partitions whose slots were not written since the machine was started."""
        slots = self._slots(numbers)
        return [number for number, slot in zip(numbers, slots, strict=True) if not is_of_this_boot(slot)]

    def write(self, number: int, tail: PartitionTail) -> None:
        file = self._opened(writable=True)
        assert file is not None
        file.pwrite(encode_tail(tail), number * SLOT_BYTES)

    def write_many(self, tails: Sequence[tuple[int, PartitionTail]]) -> None:
        """The same for several partitions, ascending: neighbours in one write."""
        at = 0
        for first, count in runs_of(number for number, _ in tails):
            file = self._opened(writable=True)
            assert file is not None
            slots = b"".join(encode_tail(tail) for _, tail in tails[at : at + count])
            file.pwrite(slots, first * SLOT_BYTES)
            at += count

    def sync(self) -> None:
        """Have what was written here on disk."""
        if self._file is not None:
            self._file.fsync()

    def forget(self, number: int) -> PartitionTail | None:
        """Make the next append look for the log's end itself; returns what the slot said."""
        known = self.read(number)
        if known is not None:
            file = self._opened(writable=True)
            assert file is not None
            file.pwrite(bytes(SLOT_BYTES), number * SLOT_BYTES)
        return known

    def _opened(self, *, writable: bool) -> File | None:
        if self._file is None or writable > self._writable:
            self.close()
            try:
                self._file = self._fs.open(self._path, create=True) if writable else self._fs.open(self._path)
            except FileNotFoundError:
                if writable:
                    raise
                return None
            self._writable = writable
        return self._file


def remove_old_tail(fs: FileSystem, path: str, number: int) -> None:
    """An older release had a file a partition (`N.tail` beside `tails`): it must never be believed again."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(os.path.join(os.path.dirname(path), f"{number}.tail"))
