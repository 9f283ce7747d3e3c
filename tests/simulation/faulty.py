"""The operating system's files with one call that fails: the n-th of all calls through the seam, or the n-th read or
write of the system below it cut short.

`calls` counts while `armed`; every kind of call counts, also those that only look. A failed write may have got half
way, as a real one may.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from logstore.files import File, FileStat, OsFile, OsFileSystem

#: what the system may say to any call
ERRORS = (errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES)
#: and to one that needs room
ROOM_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NEEDS_ROOM = {"pwrite", "truncate", "mkdir", "rename", "link", "create", "fsync", "fsync_dir"}


@dataclass(frozen=True, slots=True)
class Call:
    number: int
    kind: str
    path: str

    def __str__(self) -> str:
        return f"call {self.number}: {self.kind} {self.path}"


@dataclass
class Fault:
    """Fail call number `at` with error number `turn`; afterwards everything works again."""

    at: int
    turn: int = 0
    #: how many calls in a row fail
    times: int = 1

    def error(self, call: Call) -> OSError:
        choice = (*ERRORS, *ROOM_ERRORS) if call.kind in NEEDS_ROOM else ERRORS
        number = choice[self.turn % len(choice)]
        return OSError(number, os.strerror(number), call.path)


class _FaultyFile(OsFile):
    __slots__ = ("_files",)

    def __init__(self, fd: int, path: str, files: FaultyFiles) -> None:
        super().__init__(fd, path)
        self._files = files

    def pread(self, size: int, position: int) -> bytes:
        self._files.call("pread", self.path)
        return super().pread(size, position)

    def pread_into(self, buffer: Any, position: int) -> int:
        self._files.call("pread", self.path)
        return super().pread_into(buffer, position)

    def pwrite(self, data: Any, position: int) -> None:
        try:
            self._files.call("pwrite", self.path)
        except OSError:
            half = memoryview(data).cast("B")
            super().pwrite(half[: len(half) // 2], position)
            raise
        super().pwrite(data, position)

    def size(self) -> int:
        self._files.call("fstat", self.path)
        return super().size()

    def truncate(self, size: int) -> None:
        self._files.call("truncate", self.path)
        super().truncate(size)

    def fsync(self) -> None:
        self._files.call("fsync", self.path)


@dataclass
class FaultyFiles(OsFileSystem):
    """Syncs nothing, for speed: the machine does not lose its power here."""

    fault: Fault | None = None
    armed: bool = False
    calls: int = 0
    #: the call that failed
    failed: Call | None = None
    #: which kinds of calls there were, by number
    kinds: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, kind: str, path: str) -> None:
        if not self.armed:
            return
        with self._lock:
            self.calls += 1
            self.kinds.append(kind)
            call = Call(self.calls - 1, kind, path)
            if self.fault is None or not self.fault.at <= call.number < self.fault.at + self.fault.times:
                return
            self.failed = self.failed or call
        raise self.fault.error(call)

    @contextlib.contextmanager
    def faulty(self, fault: Fault | None) -> Iterator[None]:
        """Count calls in here, and let one fail."""
        self.fault, self.armed, self.calls, self.failed, self.kinds = fault, True, 0, None, []
        try:
            yield
        finally:
            self.armed = False

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        self.call("create" if create and not os.path.exists(path) else "open", path)
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _FaultyFile(os.dup(file.fileno()), path, self)

    def exists(self, path: str) -> bool:
        self.call("exists", path)
        return super().exists(path)

    def stat(self, path: str) -> FileStat:
        self.call("stat", path)
        return super().stat(path)

    def listdir(self, path: str) -> list[str]:
        self.call("listdir", path)
        return super().listdir(path)

    def mkdir(self, path: str) -> None:
        self.call("mkdir", path)
        super().mkdir(path)

    def rename(self, source: str, target: str) -> None:
        self.call("rename", source)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self.call("link", source)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self.call("unlink", path)
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self.call("rmdir", path)
        super().rmdir(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self.call("set_mtime", path)
        super().set_mtime(path, mtime_ms)

    def fsync_dir(self, path: str) -> None:
        self.call("fsync_dir", path)


@contextlib.contextmanager
def short_transfers(at: int) -> Iterator[list[int]]:
    """Let the system's read or write number `at` move one byte only, as it may; gives how many there were."""
    real = {"pread": os.pread, "preadv": os.preadv, "pwrite": os.pwrite}
    count = [0]

    def is_short() -> bool:
        count[0] += 1
        return count[0] - 1 == at

    def pread(fd: int, size: int, position: int) -> bytes:
        return real["pread"](fd, 1 if is_short() else size, position)

    def preadv(fd: int, buffers: Any, position: int, *flags: int) -> int:
        if is_short() and len(buffers) == 1 and len(buffers[0]):
            return real["preadv"](fd, [buffers[0][:1]], position, *flags)
        return real["preadv"](fd, buffers, position, *flags)

    def pwrite(fd: int, data: Any, position: int) -> int:
        return real["pwrite"](fd, memoryview(data)[:1] if is_short() and len(data) else data, position)

    os.pread, os.preadv, os.pwrite = pread, preadv, pwrite
    try:
        yield count
    finally:
        os.pread, os.preadv, os.pwrite = real["pread"], real["preadv"], real["pwrite"]
