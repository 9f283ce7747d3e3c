"""The ledger's gate: many may read and commit at once; clean-up and repair need it exclusively.

Two bytes of one file, locked by open-file-description locks. Whoever passes locks the first byte shared for a moment
and the second one shared while it works; whoever wants to be alone locks the first one, so that nobody new comes in,
and waits for the second. The gate keeps log files in place under a committer that stalls; it decides nothing about
who wins, which is the table's compare-and-set.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator

from logstore.errors import LockHeld, ReadOnlyStore
from logstore.files import FileSystem
from logstore.ofd import set_lock, wait_for

PASS_WAIT_MS = 30_000

_DOOR, _ROOM = 0, 1  # the two bytes
_PAUSE_S = 0.001


class Gate:
    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path

    @contextlib.contextmanager
    def shared(self) -> Iterator[bool]:
        """Shared with others. Raises LockHeld when it is held exclusively for longer than PASS_WAIT_MS.

        Where nothing can be written, the lock is taken on a file opened for reading. Gives False where there is no such
        file: then nothing keeps files in place.
        """
        with self._open(shared=True) as fd:
            if fd < 0:
                yield False
                return
            self._take(fd, _DOOR, fcntl.F_RDLCK, PASS_WAIT_MS)
            self._take(fd, _ROOM, fcntl.F_RDLCK, PASS_WAIT_MS)
            set_lock(fd, fcntl.F_UNLCK, _DOOR, 1)
            yield True

    @contextlib.contextmanager
    def alone(self, wait_ms: int = PASS_WAIT_MS) -> Iterator[None]:
        """Exclusively; raises LockHeld after `wait_ms`."""
        with self._open() as fd:
            self._take(fd, _DOOR, fcntl.F_WRLCK, wait_ms)
            self._take(fd, _ROOM, fcntl.F_WRLCK, wait_ms)
            yield

    @contextlib.contextmanager
    def _open(self, *, shared: bool = False) -> Iterator[int]:
        try:
            file = self._fs.open(self.path, create=True)
        except ReadOnlyStore:
            if not shared:
                raise
            try:
                file = self._fs.open(self.path)
            except (FileNotFoundError, PermissionError):
                yield -1
                return
        try:
            yield file.fileno()
        finally:
            # Not left to close(): a forked child may share the open file.
            try:
                set_lock(file.fileno(), fcntl.F_UNLCK)
            finally:
                file.close()

    def _take(self, fd: int, byte: int, kind: int, wait_ms: int) -> None:
        deadline = time.monotonic() + wait_ms / 1000
        if not wait_for(lambda: set_lock(fd, kind, byte, 1), deadline, pause_s_max=_PAUSE_S):
            raise LockHeld(
                f"the ledger was in use for longer than {wait_ms} ms",
                file=self.path,
                hint="A process that is stopped inside a commit or a clean-up holds it; `lslocks` shows which.",
            )
