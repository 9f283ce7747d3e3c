"""Locks of partitions as byte ranges of one file, so that ten thousand of them cost one descriptor.

Each partition of each topic has a byte for maintenance and one for its log. The bytes need not exist: the file stays
empty. Open-file-description locks belong to the open file, so each thread has an open file of its own; all ranges that
the thread holds share it, and it is closed with the last of them. Who holds a range is written into a slot of a file
of its own, for those who wait. This module knows nothing of the order in which locks may be taken.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator

from logstore.files import File, FileSystem
from logstore.ofd import FLOCK, same_file, set_lock

#: room for the partitions of a topic: more than there can be
PARTITIONS_ROOM = 1 << 17
_TOPIC_BITS, _AREA_BITS = 42, 20
_NOTE_BYTES = 512
#: the slot of whoever holds all partitions; the partitions' own slots follow
_ALL = 0


def position(topic_id: str, area: int, partition: int) -> int:
    """Where the byte of a partition is. Two topics share bytes once in 2^42: they would wait for each other."""
    digest = hashlib.sha256(topic_id.encode()).digest()
    topic = int.from_bytes(digest[:8], "big") >> (64 - _TOPIC_BITS)
    return (topic << _AREA_BITS) + area * PARTITIONS_ROOM + partition


def runs_of(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs (first, count)."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


class OpenFile:
    """The lock file as one thread has it open."""

    __slots__ = ("file", "held", "mutex", "pid")

    def __init__(self, file: File) -> None:
        self.file = file
        self.held: list[tuple[int, int]] = []  # start and end of each range, in order
        self.mutex = threading.Lock()  # a lock may be released by another thread than the one that took it
        self.pid = os.getpid()

    def has_part_of(self, start: int, end: int) -> bool:
        at = bisect.bisect_left(self.held, (end, 0))
        return at > 0 and self.held[at - 1][1] > start

    def release(self, start: int, length: int) -> None:
        with self.mutex:
            try:
                set_lock(self.file.fileno(), fcntl.F_UNLCK, start, length)
            finally:
                self.held.remove((start, start + length))
                if not self.held:
                    self.file.close()


class Ranges:
    """The ranges of the file at `path`, created when missing."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path
        self._mine = threading.local()

    def take(self, start: int, length: int) -> OpenFile | None:
        """Lock the range if no other lock conflicts, else None. Release it with the same numbers."""
        opened: OpenFile | None = self._mine.__dict__.get("opened")
        if opened is None or not opened.held or opened.pid != os.getpid():
            opened = OpenFile(self._fs.open(self.path, create=True))
        end = start + length
        if opened.has_part_of(start, end):
            raise RuntimeError(f"{self.path}: this thread holds a part of the bytes {start} to {end} already")
        fd = opened.file.fileno()
        got = False
        try:
            got = set_lock(fd, fcntl.F_WRLCK, start, length) and (bool(opened.held) or same_file(fd, self.path))
        finally:
            if got:
                bisect.insort(opened.held, (start, end))
                self._mine.opened = opened
            elif not opened.held:
                opened.file.close()
        return opened if got else None

    def blocked_at(self, start: int, length: int) -> int:
        """The first byte of the range that another open file holds; `start` when none does any more."""
        file = self._fs.open(self.path, create=True)
        try:
            asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
            kind, _, found, _, _ = FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, asked))
        finally:
            file.close()
        return start if kind == fcntl.F_UNLCK else max(start, found)


def sign(fs: FileSystem, path: str, runs: Iterable[tuple[int, int]] | None, note: dict[str, object]) -> None:
    """Write who holds these partitions, None for all. Best effort: a full disk must not stop the holder."""
    text = json.dumps({**note, "what": str(note.get("what"))[:200]}).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES)
    with contextlib.suppress(OSError):
        file = fs.open(path, create=True)
        try:
            for first, count in ((_ALL - 1, 1),) if runs is None else runs:
                file.pwrite(text * count, (first + 1) * _NOTE_BYTES)
        finally:
            file.close()


def holder(fs: FileSystem, path: str, partition: int) -> str:
    """Who holds the partition, in words: the last to sign, for it or for all."""
    notes = []
    with contextlib.suppress(OSError):
        file = fs.open(path)
        try:
            for slot in (_ALL, partition + 1):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    note = json.loads(file.pread(_NOTE_BYTES, slot * _NOTE_BYTES))
                    notes.append((int(note["since_ms"]), str(note["host"])[:255], int(note["pid"]), str(note["what"])))
        finally:
            file.close()
    if not notes:
        return "an unknown process"
    since_ms, host, pid, what = max(notes)
    with contextlib.suppress(OverflowError, ValueError, OSError):
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_ms // 1000))
        return f"host {host}, pid {pid}, since {since}, for {what[:255]}"
    return f"host {host}, pid {pid}, for {what[:255]}"
