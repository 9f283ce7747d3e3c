"""A partition's tail file: where its log ends, exactly, and which commit ended it.

Written after each append, under the partition lock, and never synced: it only saves looking. It is believed as long as
the machine that wrote it has not been started again; after that an older one may be back under its name.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import astuple, dataclass

from logstore.errors import CorruptState
from logstore.files import FileSystem
from logstore.limits import INT64_MAX, Limits
from logstore.partition.tail import Tail
from logstore.store.sealed import read_sealed, whole_number, write_sealed

VERSION = 1


@dataclass(frozen=True, slots=True)
class PartitionTail:
    sequence: int
    end_offset: int
    tail: Tail
    boot_id: str

    @classmethod
    def of_now(cls, sequence: int, end_offset: int, tail: Tail) -> PartitionTail:
        return cls(sequence, end_offset, tail, boot_id())

    @property
    def is_current(self) -> bool:
        """Whether it was written since the machine was started."""
        return bool(self.boot_id) and self.boot_id == boot_id()


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """What changes when the machine is started; empty (never current) where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def read_tail(fs: FileSystem, path: str, *, limits: Limits) -> PartitionTail | None:
    """None when there is none that can be believed."""
    try:
        document = read_sealed(fs, path, version=VERSION, limit=limits.side_file_bytes)
        numbers = document["tail"]
        if not isinstance(numbers, list) or any(type(n) is not int or not -1 <= n <= INT64_MAX for n in numbers):
            return None  # -1: no record has a timestamp
        return PartitionTail(
            whole_number(document, "sequence", file=path),
            whole_number(document, "end_offset", file=path),
            Tail(*numbers),
            str(document["boot_id"]),
        )
    except (FileNotFoundError, CorruptState, KeyError, TypeError):
        return None


def write_tail(fs: FileSystem, path: str, tail: PartitionTail) -> None:
    document = {
        "sequence": tail.sequence,
        "end_offset": tail.end_offset,
        "tail": list(astuple(tail.tail)),
        "boot_id": tail.boot_id,
    }
    write_sealed(fs, path, document, version=VERSION, durable=False)
