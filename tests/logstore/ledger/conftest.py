"""What the ledger's tests share: a way to make requests, and the operating system's files with a power switch.

delta-rs writes to the real disk, past the file-system seam, so the simulated file system cannot hold a ledger. Instead
`PoweredFiles` notes what was synced through the seam, and draws from it what a power cut would leave of a directory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.files import File, OsFile, OsFileSystem
from logstore.ledger import CommitRequest, TopicCommit


def make_request(number: int, *, topic: str = "orders", app: str | None = "app", plan: str = "plan") -> CommitRequest:
    """The commit that takes a topic of two partitions from sequence `number` to the next one."""
    return CommitRequest(
        plan_id=f"{plan}-{number}",
        topics=(TopicCommit(f"id-{topic}", topic, number, (number, 0), (number + 1, 0), records=1, size_bytes=70),),
        app_id=app,
        batch_id=None if app is None else number,
        query_id=None if app is None else "query-1",
        expected_batch_id=number - 1 if app is not None and number else None,
        timings_ms={"encode": 3},
        workers=("host-1",),
        engine="test",
    )


class _PoweredFile(OsFile):
    __slots__ = ("_files",)

    def __init__(self, fd: int, path: str, files: PoweredFiles) -> None:
        super().__init__(fd, path)
        self._files = files

    def pwrite(self, data: object, position: int) -> None:
        self._files.step("pwrite", self.path)
        super().pwrite(data, position)  # type: ignore[arg-type]
        self._files.written(self.fileno())

    def fsync(self) -> None:
        try:
            self._files.step("fsync", self.path)
        except OSError:
            self._files.dropped(self.fileno())
            raise
        super().fsync()
        self._files.synced(self.fileno())


class PoweredFiles(OsFileSystem):
    """The operating system's files; `on_step` is called before each call that changes or syncs something.

    Where it raises an OSError at a sync, what should have been synced is gone and counts as clean, as it does in Linux:
    the next sync succeeds, and proves only what was changed after the failed one.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[str, str], None] = lambda kind, path: None
        self.trace: list[tuple[str, str]] = []
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._dropped: set[int] = set()  # files; `leave` finds them as they were synced before
        self._dropped_names: dict[int, dict[str, int]] = {}
        self._held: list[int] = []  # open descriptors, so that no inode number is used again

    def step(self, kind: str, path: str) -> None:
        self.trace.append((kind, path))
        self.on_step(kind, path)

    def synced(self, fd: int) -> None:
        number = os.fstat(fd).st_ino
        if number in self._dropped:
            return
        if number not in self._contents:
            self._held.append(os.dup(fd))
        self._contents[number] = os.pread(fd, os.fstat(fd).st_size, 0)

    def dropped(self, fd: int) -> None:
        self._held.append(os.dup(fd))
        self._dropped.add(os.fstat(fd).st_ino)

    def written(self, fd: int) -> None:
        self._dropped.discard(os.fstat(fd).st_ino)

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _PoweredFile(os.dup(file.fileno()), path, self)

    def rename(self, source: str, target: str) -> None:
        self.step("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.step("unlink", path)
        super().unlink(path)

    def fsync_dir(self, path: str) -> None:
        number = os.stat(path).st_ino
        names = {entry.name: entry.inode() for entry in os.scandir(path)}
        try:
            self.step("fsync_dir", path)
        except OSError:
            self._dropped_names[number] = names
            raise
        super().fsync_dir(path)
        dropped, before = self._dropped_names.get(number, {}), self._names.get(number, {})
        kept = {name: inode for name, inode in names.items() if dropped.get(name) != inode or before.get(name) == inode}
        lost = {name: before[name] for name in names.keys() - kept.keys() if name in before}
        self._names[number] = kept | lost

    def leave(self, source: str, target: str, rng: random.Random) -> None:
        """Make `target` what a power cut now could leave of the directory `source`, itself durable."""
        os.mkdir(target)
        now = {entry.name: entry for entry in os.scandir(source)}
        durable = self._names.get(os.stat(source).st_ino, {})
        for name in sorted(now.keys() | durable.keys()):
            entry = now.get(name)
            is_durable = entry is not None and durable.get(name) == entry.inode()
            if not is_durable and rng.random() < 0.5:
                # The change of this name was lost: what was durable under it is back.
                if durable.get(name) in self._contents:
                    Path(target, name).write_bytes(self._contents[durable[name]])
            elif entry is not None and entry.is_dir():
                self.leave(entry.path, os.path.join(target, name), rng)
            elif entry is not None and entry.inode() in self._dropped:
                Path(target, name).write_bytes(self._contents.get(entry.inode(), b""))
            elif entry is not None:
                synced = self._contents.get(entry.inode(), b"")
                found = Path(entry.path).read_bytes()
                # What was appended since may be there in part; anything else is as it was synced.
                appended = found[len(synced) :] if found.startswith(synced) else b""
                Path(target, name).write_bytes(synced + _torn(appended, rng))

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)


def _torn(data: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(data) + 1)
    return rng.choice([b"", data, data[:cut], data[:cut] + bytes(len(data) - cut), rng.randbytes(len(data))])


@pytest.fixture
def powered() -> object:
    files = PoweredFiles()
    yield files
    files.close()


@pytest.fixture(scope="session")
def request_of() -> Callable[..., CommitRequest]:
    return make_request
