"""A file system that lacks what the store relies on is refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.directory.probe import probe_file_system
from logstore.errors import DiskFull, UnsuitableFileSystem
from logstore.files import OS_FILES, File, OsFileSystem
from logstore.store import LogStore


class CountsSyncs(OsFileSystem):
    def __init__(self) -> None:
        self.count = 0

    def fsync_dir(self, path: str) -> None:
        self.count += 1
        super().fsync_dir(path)


class IgnoresExclusive(OsFileSystem):
    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        return super().open(path, writable=writable, create=create)


class RenamesByCopy(OsFileSystem):
    def rename(self, source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes())


class HasNoLinks(OsFileSystem):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


class EveryOpenIsItsOwnFile(OsFileSystem):
    """Locks on it never meet, as on a network mount that keeps them to itself."""

    def __init__(self) -> None:
        self.opened = 0

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if path.endswith(".lock"):
            Path(path).unlink(missing_ok=True)
        return super().open(path, writable=writable, create=create, exclusive=exclusive)


class CannotSyncDirectories(OsFileSystem):
    def fsync_dir(self, path: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


class Failing(OsFileSystem):
    """Nothing new can be made; `number` says why."""

    def __init__(self, number: int) -> None:
        self.number = number

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if create and not self.exists(path):
            raise OSError(self.number, os.strerror(self.number))
        return super().open(path, writable=writable, create=create, exclusive=exclusive)


def test_a_sound_file_system_passes_once_and_keeps_nothing(tmp_path: Path) -> None:
    fs = CountsSyncs()
    probe_file_system(fs, str(tmp_path))
    tried = fs.count
    assert tried > 0
    probe_file_system(fs, str(tmp_path))
    assert fs.count == tried
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fs", "says"),
    [
        (IgnoresExclusive(), "create a file exclusively"),
        (RenamesByCopy(), "atomic rename"),
        (HasNoLinks(), "hard links"),
        (EveryOpenIsItsOwnFile(), "one lock"),
        (CannotSyncDirectories(), "atomic rename|sync a directory"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, fs: OsFileSystem, says: str) -> None:
    for _ in range(2):  # a failure is not remembered as a pass
        with pytest.raises(UnsuitableFileSystem, match=says) as caught:
            probe_file_system(fs, str(tmp_path))
        assert caught.value.file == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENOMEM])
def test_an_error_of_the_system_says_nothing_about_what_the_file_system_can(tmp_path: Path, number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        probe_file_system(Failing(number), str(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_store_on_a_full_disk_can_be_read(tmp_path: Path, number: int) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("t", partitions=1)
        store.append("t", pa.table({"key": [b"k"], "value": [b"v"]}))
    full = Failing(number)
    with LogStore(tmp_path / "store", fs=full) as store:
        topic = store.topic("t")
        assert [record.value for record in store.reader(topic, 0).records(0)] == [b"v"]
        with pytest.raises(DiskFull):
            store.append("t", pa.table({"key": [b"k"], "value": [b"w"]}))
    with LogStore(tmp_path / "store") as store:
        assert [record.value for record in store.reader(store.topic("t"), 0).records(0)] == [b"v"]
    with pytest.raises(OSError, match=os.strerror(number)):
        LogStore(tmp_path / "other", create=True, fs=full)


def test_a_missing_directory_is_an_error_not_a_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe_file_system(OS_FILES, str(tmp_path / "none"))
