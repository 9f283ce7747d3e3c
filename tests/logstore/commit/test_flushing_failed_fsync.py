"""A failed fsync is not believed the second time: its pages may be gone and called clean, so only bytes that were
written again are proved by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.commit.committer import Committer
from logstore.commit.produce import append_table
from logstore.directory import tails, unsynced
from logstore.files import File, OsFile, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.retention import retain

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]


class _ForgetfulFile(OsFile):
    __slots__ = ("_files",)

    def __init__(self, fd: int, path: str, files: ForgetfulFiles) -> None:
        super().__init__(fd, path)
        self._files = files

    def pwrite(self, data: object, position: int) -> None:
        super().pwrite(data, position)  # type: ignore[arg-type]
        self._files.changed(self.fileno(), position, bytes(memoryview(data).cast("B")))  # type: ignore[arg-type]

    def truncate(self, size: int) -> None:
        super().truncate(size)
        self._files.changed(self.fileno(), size, None)

    def fsync(self) -> None:
        self._files.sync(self.fileno(), self.path)


class ForgetfulFiles(OsFileSystem):
    """The operating system's files over a disk that may fail to take what it is given: then the pages stay as they are
    in memory and count as clean, and only a cut shows what was never written.
    """

    def __init__(self) -> None:
        #: how many syncs of log files to let through before one fails; None: all
        self.fail_after: int | None = None
        self.failed: list[str] = []
        self._dirty: dict[int, list[tuple[int, bytes | None]]] = {}
        self._disk: dict[int, bytearray] = {}
        self._held: list[int] = []

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _ForgetfulFile(os.dup(file.fileno()), path, self)

    def _inode(self, fd: int) -> int:
        number = os.fstat(fd).st_ino
        if number not in self._disk:
            self._held.append(os.dup(fd))  # so that no inode number is used again
            self._disk[number] = bytearray()
        return number

    def changed(self, fd: int, position: int, data: bytes | None) -> None:
        self._dirty.setdefault(self._inode(fd), []).append((position, data))

    def sync(self, fd: int, path: str) -> None:
        number = self._inode(fd)
        changes = self._dirty.pop(number, [])
        if self.fail_after is not None and "/logs/" in path:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after = None
                self.failed.append(path)
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        disk = self._disk[number]
        for position, data in changes:
            if data is None:
                disk[:] = disk[:position].ljust(position, b"\0")
            else:
                disk[:] = disk.ljust(position, b"\0")
                disk[position : position + len(data)] = data

    def cut(self, source: Path, target: Path) -> None:
        """What the disk has of the logs; all else as it is."""
        shutil.copytree(source, target)
        for path in source.glob("logs/*-*/*.*"):
            (target / path.relative_to(source)).write_bytes(self._disk.get(path.stat().st_ino, b""))

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)


def rows(batch: int, count: int = 40) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([b"k%d" % n for n in range(count)]),
            "value": pa.array([b"%d-%d" % (batch, n) for n in range(count)]),
        }
    )


def expected(batches: int) -> list[bytes]:
    return sorted(b"%d-%d" % (batch, n) for batch in range(batches) for n in range(40))


def values(store: LogStore, read_all: ReadAll) -> list[bytes]:
    return sorted(record.value or b"" for records in read_all(store, "orders").values() for record in records)


@pytest.fixture
def files() -> object:
    found = ForgetfulFiles()
    yield found
    found.close()


ACTIONS: dict[str, Callable[[LogStore], None]] = {
    "flush": lambda store: Committer(store).flush(store.topic("orders")) and None,
    "retain": lambda store: [retain(store, store.topic("orders"), n, now_ms=1) for n in range(2)] and None,
    "roll": lambda store: roll_all(store),
}


def roll_all(store: LogStore) -> None:
    for number in range(2):
        with store.writing(store.topic("orders"), number, what="roll") as log:
            log.roll()


@pytest.mark.parametrize("forgets", [False, True], ids=["same process", "another process"])
@pytest.mark.parametrize("action", ACTIONS)
def test_after_a_failed_fsync_the_bytes_are_written_again_before_the_redo_log_goes(
    tmp_path: Path,
    files: ForgetfulFiles,
    read_all: ReadAll,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    forgets: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    failures = 0
    for case in range(6):
        root = tmp_path / f"store-{case}"
        monkeypatch.setattr(tails, "boot_id", lambda: "boot-1")
        with LogStore(root, create=True, fs=files) as store:
            store.create_topic("orders", partitions=2, configs={"segment.bytes": 1500, "retention.ms": "-1"})
            topic = store.topic("orders")
            committer = Committer(store)
            append_table(committer, "orders", rows(0))
            if case % 2:
                committer.flush(topic)
            append_table(committer, "orders", rows(1))
            files.failed.clear()
            files.fail_after = rng.choice([0, 0, 1, 3, rng.randrange(12)])
            with contextlib.suppress(OSError):
                ACTIONS[action](store)
            failures += len(files.failed)
            files.fail_after = None
            if forgets:
                monkeypatch.setattr(unsynced, "_REMEMBERED", set())
            ACTIONS[action](store)
            Committer(store).flush(topic)
            Committer(store).sweep()
            assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == []
            assert [name for name in os.listdir(store.layout.topic_state(topic.id)) if "unsynced" in name] == []
        files.cut(root, tmp_path / f"left-{case}")
        monkeypatch.setattr(tails, "boot_id", lambda: "boot-2")
        with LogStore(tmp_path / f"left-{case}") as store:
            append_table(Committer(store), "orders", rows(2))
            assert values(store, read_all) == expected(3), files.failed
    assert failures


def test_an_fsync_that_failed_keeps_the_staged_files_and_the_recovery_point(
    tmp_path: Path, files: ForgetfulFiles
) -> None:
    with LogStore(tmp_path / "store", create=True, fs=files) as store:
        store.create_topic("orders", partitions=2)
        topic = store.topic("orders")
        committer = Committer(store)
        append_table(committer, "orders", rows(0))
        before = store.ends(topic)
        files.fail_after = 0
        with pytest.raises(OSError, match="Input/output error"):
            committer.flush(topic)
        assert store.ends(topic) == before
        assert len([name for name in os.listdir(store.layout.staging) if name.endswith("-plan")]) == 1
        committer.flush(topic)
        assert store.ends(topic).recovery_points == before.high_watermarks
