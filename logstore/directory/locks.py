"""Locks of a store: open-file-description locks on files in `locks/`, and on `logs/.lock`, which a broker takes too.
Those of partitions are ranges of one file (`ranges`), those of topics (leases) of another, so that no command needs a
descriptor for each of them.

Classic fcntl locks do not exclude threads and vanish when any descriptor of the file is closed; these belong to one
open file and exclude every other open file, those of other threads and of JVMs included. Whoever holds one exclusively
writes its name into the file, so that a waiter can name it. Take them after any fork; they are released
explicitly, because a forked child shares the open file. This module decides the order in which locks may be taken,
never what they protect.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TypeVar

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.directory import ranges
from logstore.directory.layout import Layout
from logstore.directory.ranges import PARTITIONS_ROOM
from logstore.errors import LockHeld, StoreInUse
from logstore.files import File, FileSystem, make_directory
from logstore.ofd import FLOCK, same_file, set_lock, wait_for
from logstore.segment.names import LOCK

DEFAULT_WAIT_MS = 30_000

_HOLDER_BYTES_MAX = 4096

T = TypeVar("T")


class LockRank(IntEnum):
    """The order in which locks may be taken; of equal rank, by key."""

    STORE = 0
    MAINTENANCE = 1
    LEASE = 2
    PARTITION = 3
    CHECKPOINT = 4


#: the file whose ranges a rank has, and which part of a topic's
_RANGES = {
    LockRank.MAINTENANCE: ("partitions", 0),
    LockRank.LEASE: ("leases", 0),
    LockRank.PARTITION: ("partitions", 1),
}
#: the files of a topic begin with one of these
_OF_TOPICS = ("lease", "ends", "maintenance", "partition")


class FileLock:
    """One lock on one open file; `path` is created when missing, unless `create` is off (then only a shared lock)."""

    __slots__ = ("_create", "_file", "_fs", "exclusive", "path")

    def __init__(self, fs: FileSystem, path: str, *, exclusive: bool = True, create: bool = True) -> None:
        assert create or not exclusive, "an exclusive lock needs a file open for writing"
        self._fs = fs
        self._create = create
        self.path = path
        self.exclusive = exclusive
        self._file: File | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def try_acquire(self) -> bool:
        """Take it if no other lock conflicts."""
        if self._file is not None:
            raise RuntimeError(f"{self.path} is locked by this object already")
        file = self._fs.open(self.path, create=True) if self._create else self._fs.open(self.path)
        try:
            if not set_lock(file.fileno(), fcntl.F_WRLCK if self.exclusive else fcntl.F_RDLCK):
                return False
            if not same_file(file.fileno(), self.path):
                return False  # removed with its topic while we opened it: the lock is on a deleted file
            self._file, file = file, None  # type: ignore[assignment]
            return True
        finally:
            if file is not None:
                file.close()

    def acquire(self, wait_ms: int) -> bool:
        """Take it within `wait_ms`; False when it was held all that time."""
        return wait_for(self.try_acquire, time.monotonic() + wait_ms / 1000)

    def release(self) -> None:
        """Release it; fine when it is not held."""
        file, self._file = self._file, None
        if file is not None:
            try:
                set_lock(file.fileno(), fcntl.F_UNLCK)
            finally:
                file.close()

    def sign(self, clock: Clock, what: str, **more: str) -> None:
        """Write who holds the lock, for those who wait. Best effort: a full disk must not stop the holder."""
        assert self._file is not None
        note = _note(clock, what) | more
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.pwrite(json.dumps(note).encode()[:_HOLDER_BYTES_MAX], 0)


def _note(clock: Clock, what: str) -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since_ms": clock.now_ms(), "what": what}


def holder(fs: FileSystem, path: str) -> str:
    """Who holds the lock at `path`, in words."""
    try:
        file = fs.open(path)
        try:
            text = file.pread(_HOLDER_BYTES_MAX, 0)
            pid = _classic_holder(file.fileno())
        finally:
            file.close()
    except OSError:
        return "an unknown process"
    if pid:
        return f"process {pid} on this host (a broker?)"
    try:
        note = json.loads(text)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(note["since_ms"]) // 1000))
        return f"host {str(note['host'])[:255]}, pid {int(note['pid'])}, since {since}, for {str(note['what'])[:255]}"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "an unknown process"


def _classic_holder(fd: int) -> int:
    """The process with a classic lock (a JVM) on the file; 0 when there is none or the holder is one of our kind."""
    packed = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = FLOCK.unpack(packed)
    return pid if kind != fcntl.F_UNLCK and pid > 0 else 0


class StoreLocks:
    """The locks of one open store, taken in the order of `LockRank` only."""

    def __init__(
        self, fs: FileSystem, layout: Layout, *, clock: Clock = SYSTEM_CLOCK, wait_ms: int = DEFAULT_WAIT_MS
    ) -> None:
        self._fs = fs
        self._layout = layout
        self._clock = clock
        self._wait_ms = wait_ms
        self._held = threading.local()
        self._ranges = {
            name: ranges.Ranges(fs, os.path.join(layout.locks, name))
            for name in sorted({n for n, _ in _RANGES.values()})
        }
        self._shared: FileLock | None = None

    def enter(self, *, create: bool = True) -> None:
        """The shared lock on `logs/.lock`, for as long as the store is open. Raises StoreInUse when a broker has it.

        Without `create` nothing is written: a lock for reading needs no more than the right to read.
        """
        path = os.path.join(self._layout.logs, LOCK)
        lock = FileLock(self._fs, path, exclusive=False, create=create)
        if not lock.acquire(self._wait_ms):
            raise StoreInUse(
                f"{holder(self._fs, path)} uses the logs exclusively",
                file=path,
                hint="A store is never served by a broker; stop it, and give it a directory made by `duramen export`.",
            )
        self._shared = lock

    def leave(self) -> None:
        lock, self._shared = self._shared, None
        if lock is not None:
            lock.release()

    @contextlib.contextmanager
    def maintenance(self, topic_id: str, partition: int, *, what: str, wait_ms: int | None = None) -> Iterator[None]:
        """Compaction, retention, delete-records or deletion of one partition; held for the pass."""
        with self._hold_partitions(LockRank.MAINTENANCE, topic_id, (partition,), what, wait_ms):
            yield

    @contextlib.contextmanager
    def maintenance_of(
        self, topic_id: str, partitions: Sequence[int] | None = None, *, what: str, wait_ms: int | None = None
    ) -> Iterator[None]:
        """The same of several partitions in ascending order, or of all that the topic has and may get."""
        with self._hold_partitions(LockRank.MAINTENANCE, topic_id, partitions, what, wait_ms):
            yield

    @contextlib.contextmanager
    def lease(self, topic_id: str, *, what: str, wait_ms: int | None = None) -> Iterator[None]:
        """The right to change a topic's ends and definition. Several topics: in order of their ids."""
        with self._hold_partitions(LockRank.LEASE, topic_id, (0,), what, wait_ms):
            yield

    def holds_lease(self, topic_id: str) -> bool:
        """Whether the calling thread has it, taken by way of this store."""
        return (LockRank.LEASE, (topic_id, 0)) in self._stack()

    @contextlib.contextmanager
    def partition(self, topic_id: str, partition: int, *, what: str, wait_ms: int | None = None) -> Iterator[None]:
        """Append, roll, swap or deletion of segments; held for milliseconds."""
        with self._hold_partitions(LockRank.PARTITION, topic_id, (partition,), what, wait_ms):
            yield

    @contextlib.contextmanager
    def partitions(
        self, topic_id: str, partitions: Sequence[int], *, what: str, wait_ms: int | None = None
    ) -> Iterator[None]:
        """The same of several partitions, in ascending order."""
        with self._hold_partitions(LockRank.PARTITION, topic_id, partitions, what, wait_ms):
            yield

    @contextlib.contextmanager
    def checkpoint(self, *, what: str = "checkpoint files", wait_ms: int | None = None) -> Iterator[None]:
        """Projection into Kafka's checkpoint files; held for milliseconds."""
        with self._hold(LockRank.CHECKPOINT, ("", -1), what, wait_ms):
            yield

    @property
    def wait_ms(self) -> int:
        return self._wait_ms

    def ends_path(self, topic_id: str) -> str:
        """The lock file for replacing a topic's ends; held for no longer than that, after any other."""
        return os.path.join(self._layout.locks, f"ends-{topic_id}")

    def forget_topic(self, topic_id: str) -> None:
        """Remove the lock files of a deleted topic; a process that waits on one notices."""
        for name in self._fs.listdir(self._layout.locks):
            kind, dash, rest = name.partition("-")
            # An older release had a file a partition.
            if dash and kind in _OF_TOPICS and (rest == topic_id or rest.startswith(f"{topic_id}-")):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(os.path.join(self._layout.locks, name))

    @contextlib.contextmanager
    def _hold_partitions(
        self, rank: LockRank, topic_id: str, partitions: Sequence[int] | None, what: str, wait_ms: int | None
    ) -> Iterator[None]:
        wait_ms = self._wait_ms if wait_ms is None else wait_ms
        runs = [(0, PARTITIONS_ROOM)] if partitions is None else list(ranges.runs_of(partitions))
        if not runs:
            yield
            return
        stack = self._stack()
        self._check_order(stack, rank, (topic_id, runs[0][0]), wait_ms)
        path = os.path.join(self._layout.locks, _name(rank, (topic_id, -1)))
        deadline = time.monotonic() + wait_ms / 1000
        name, area = _RANGES[rank]
        file = self._ranges[name]
        with contextlib.ExitStack() as held:
            for first, count in runs:
                start = ranges.position(topic_id, area, first)
                take = functools.partial(file.take, start, count)
                opened = wait_for(functools.partial(self.with_folder, take), deadline)
                if opened is None:
                    taken = first + file.blocked_at(start, count) - start
                    who = ranges.holder(self._fs, path, taken)
                    raise LockHeld(
                        f"waited {wait_ms} ms for the {rank.name.lower()} lock, held by {who}",
                        file=path,
                        hint="Wait for that process to finish, or stop it.",
                    )
                held.callback(opened.release, start, count)
            stack.append((rank, (topic_id, runs[-1][0])))
            held.callback(stack.pop)
            ranges.sign(self._fs, path, None if partitions is None else runs, _note(self._clock, what))
            yield

    def with_folder(self, take: Callable[[], T]) -> T:
        """Take a lock; if the folder of the lock files was removed, make it again."""
        try:
            return take()
        except FileNotFoundError:
            make_directory(self._fs, self._layout.locks)
            return take()

    def _stack(self) -> list[tuple[LockRank, tuple[str, int]]]:
        stack: list[tuple[LockRank, tuple[str, int]]] = self._held.__dict__.setdefault("stack", [])
        return stack

    def _check_order(
        self, stack: list[tuple[LockRank, tuple[str, int]]], rank: LockRank, key: tuple[str, int], wait_ms: int
    ) -> None:
        # A lock that is only tried cannot deadlock.
        if stack and max(stack) >= (rank, key) and (wait_ms or (rank, key) in stack):
            raise RuntimeError(f"{_name(rank, key)} is taken after {_name(*max(stack))}: that order can deadlock")

    @contextlib.contextmanager
    def _hold(self, rank: LockRank, key: tuple[str, int], what: str, wait_ms: int | None) -> Iterator[None]:
        stack = self._stack()
        wait_ms = self._wait_ms if wait_ms is None else wait_ms
        self._check_order(stack, rank, key, wait_ms)
        path = os.path.join(self._layout.locks, _name(rank, key))
        lock = FileLock(self._fs, path)
        if not self.with_folder(lambda: lock.acquire(wait_ms)):
            raise LockHeld(
                f"waited {wait_ms} ms for the {rank.name.lower()} lock, held by {holder(self._fs, path)}",
                file=path,
                hint="Wait for that process to finish, or stop it.",
            )
        stack.append((rank, key))
        try:
            lock.sign(self._clock, what)
            yield
        finally:
            stack.pop()
            lock.release()


def _name(rank: LockRank, key: tuple[str, int]) -> str:
    topic_id, partition = key
    parts = [rank.name.lower(), *([topic_id] if topic_id else []), *([str(partition)] if partition >= 0 else [])]
    return "-".join(parts)
