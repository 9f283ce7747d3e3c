"""An error of the system says nothing about a file: the ledger keeps everything, and goes on when the error is over."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake.exceptions import DeltaError

from logstore.errors import DuramenError, LedgerError
from logstore.files import File, OsFile, OsFileSystem
from logstore.ledger import CommitRequest, Ledger
from logstore.ledger.loaded_table import raise_system_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

RequestOf = Callable[..., CommitRequest]
ERRORS = [errno.EMFILE, errno.EIO, errno.ENOMEM, errno.EACCES]
COMMITS = 30


class _FailingFile(OsFile):
    __slots__ = ("_files",)

    def __init__(self, fd: int, path: str, files: FailingFiles) -> None:
        super().__init__(fd, path)
        self._files = files

    def pread(self, size: int, position: int) -> bytes:
        self._files.step("pread", self.path)
        data = super().pread(size, position)
        return data[: len(data) // 2] if self._files.is_short(self.path) else data

    def pwrite(self, data: Buffer, position: int) -> None:
        self._files.step("pwrite", self.path)
        super().pwrite(data, position)

    def fsync(self) -> None:
        self._files.step("fsync", self.path)
        super().fsync()


class FailingFiles(OsFileSystem):
    """The operating system's files; `fails` chooses the calls that fail with `error_number`."""

    def __init__(self) -> None:
        self.error_number = errno.EIO
        self.fails: Callable[[str, str], bool] = lambda kind, path: False
        self.is_short: Callable[[str], bool] = lambda path: False
        self.calls = 0

    def step(self, kind: str, path: str) -> None:
        self.calls += 1
        if self.fails(kind, path):
            raise OSError(self.error_number, os.strerror(self.error_number), path)

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        self.step("open", path)
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _FailingFile(os.dup(file.fileno()), path, self)

    def listdir(self, path: str) -> list[str]:
        self.step("listdir", path)
        return super().listdir(path)

    def unlink(self, path: str) -> None:
        self.step("unlink", path)
        super().unlink(path)

    def rename(self, source: str, target: str) -> None:
        self.step("rename", target)
        super().rename(source, target)

    def fsync_dir(self, path: str) -> None:
        self.step("fsync_dir", path)
        super().fsync_dir(path)


@pytest.fixture
def files() -> FailingFiles:
    return FailingFiles()


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, request_of: RequestOf) -> Path:
    path = tmp_path_factory.mktemp("grown") / "ledger"
    ledger = Ledger(path)
    for number in range(COMMITS - 1):
        ledger.commit(request_of(number))
    ledger.maintain()
    log = path / "commits" / "_delta_log"
    newest = max(log.glob("*.checkpoint.parquet"))
    for file in log.glob("*.json"):  # as after the grace: only the newest checkpoint knows what was committed
        if file.name[:20] < newest.name[:20]:
            file.unlink()
    for file in log.glob("*.checkpoint.parquet"):
        if file != newest:
            file.unlink()
    Ledger(path).commit(request_of(COMMITS - 1))
    return path


@pytest.fixture
def path(tmp_path: Path, grown: Path) -> Path:
    return Path(shutil.copytree(grown, tmp_path / "ledger"))


def everything(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.endswith(".gate")
    }


@pytest.mark.parametrize("error_number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("kind", ["open", "pread"])
@pytest.mark.parametrize("suffix", [".checkpoint.parquet", "_last_checkpoint", ".json"])
def test_a_passing_read_error_destroys_nothing(
    path: Path, files: FailingFiles, request_of: RequestOf, error_number: int, kind: str, suffix: str
) -> None:
    before = everything(path)
    files.error_number = error_number
    files.fails = lambda called, file: called == kind and file.endswith(suffix)
    with pytest.raises(OSError, match=os.strerror(error_number)) as error:
        Ledger(path, fs=files)
    assert error.value.errno == error_number
    assert everything(path) == before
    files.fails = lambda called, file: False
    ledger = Ledger(path, fs=files)
    assert ledger.sequence("id-orders") == COMMITS
    ledger.commit(request_of(COMMITS))


@pytest.mark.parametrize("kind", [DeltaError, OSError])
def test_what_delta_rs_says_of_the_system_is_told_from_damage(kind: type[Exception]) -> None:
    """It reads past the file-system seam, and has errors of several classes for what the system said."""
    with pytest.raises(OSError, match="Too many open files") as error:
        raise_system_error(kind("Kernel error: Unable to open file /x: Too many open files (os error 24)"))
    assert error.value.errno == errno.EMFILE
    raise_system_error(kind("Invalid JSON in log line"))
    raise_system_error(kind("Unable to open file /x: No such file or directory (os error 2)"))


@pytest.mark.parametrize("suffix", [".checkpoint.parquet", "_last_checkpoint", ".json"])
def test_a_short_read_is_no_torn_file(path: Path, files: FailingFiles, suffix: str) -> None:
    before = everything(path)
    files.is_short = lambda file: file.endswith(suffix)
    with pytest.raises(OSError, match="short"):
        Ledger(path, fs=files)
    assert everything(path) == before
    files.is_short = lambda file: False
    assert Ledger(path, fs=files).sequence("id-orders") == COMMITS


def test_a_torn_checkpoint_stays_when_what_it_sums_up_is_gone(path: Path) -> None:
    checkpoint = max((path / "commits" / "_delta_log").glob("*.checkpoint.parquet"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-20])
    before = everything(path)
    with pytest.raises(LedgerError, match=r"checkpoint.*damaged.*duramen recover"):
        Ledger(path)
    assert everything(path) == before


def test_a_torn_checkpoint_is_set_aside_when_its_commits_are_there(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for number in range(5):
        ledger.commit(request_of(number))
    ledger.maintain()
    checkpoint = max((tmp_path / "ledger" / "commits" / "_delta_log").glob("*.checkpoint.parquet"))
    torn = checkpoint.read_bytes()[:-20]
    checkpoint.write_bytes(torn)
    assert Ledger(tmp_path / "ledger").sequence("id-orders") == 5
    assert [file.read_bytes() for file in (tmp_path / "ledger" / "torn").iterdir()] == [torn]


@pytest.mark.parametrize("error_number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_an_error_at_any_call_loses_no_commit(
    tmp_path: Path, files: FailingFiles, request_of: RequestOf, error_number: int
) -> None:
    """Opening, committing and upkeep, with an error at every fourth call in turn."""
    files.error_number = error_number
    acknowledged = 0
    ledger = Ledger(tmp_path / "ledger", fs=files)
    for number in range(15):
        ledger.commit(request_of(number))
        acknowledged += 1
    failing = 0
    for first in range(0, 60, 4):
        start = files.calls + first
        files.fails = lambda kind, path, start=start: files.calls == start  # type: ignore[misc]
        try:
            ledger = Ledger(tmp_path / "ledger", fs=files)
            sequence = ledger.sequence("id-orders")
            assert sequence in (acknowledged, acknowledged + 1)
            acknowledged = sequence
            ledger.commit(request_of(acknowledged))
            acknowledged += 1
            ledger.maintain()
        except (OSError, DuramenError):
            failing += 1
        files.fails = lambda kind, path: False
        acknowledged = max(acknowledged, Ledger(tmp_path / "ledger").sequence("id-orders"))
        rows = Ledger(tmp_path / "ledger").commits_after("id-orders", 0)
        assert [row.plan_id for row in rows] == [f"plan-{number}" for number in range(acknowledged)]
    assert failing > 5


def test_a_log_that_vanishes_while_it_is_in_use_is_told_in_our_words(tmp_path: Path, request_of: RequestOf) -> None:
    """delta-rs reads commit files again when it is asked; another process may have moved the store meanwhile."""
    ledger = Ledger(tmp_path / "ledger")
    for sequence in range(3):
        ledger.commit(request_of(sequence))
    table = ledger.commits_table

    def look() -> None:
        (tmp_path / "ledger").rename(tmp_path / "elsewhere")
        table.transaction("no such application")

    with pytest.raises(LedgerError, match="cannot read the table's log"):
        table.run(look)
