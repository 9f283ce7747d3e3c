"""FIFOs, directories and links where files belong, in what is imported or dumped: refused, never waited for."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore.files import OS_FILES, NotRegularFile

from .conftest import Command, with_metadata

Put = Callable[[Path], object]

FILES = [
    ".lock",
    "meta.properties",
    "recovery-point-offset-checkpoint",
    "log-start-offset-checkpoint",
    "cleaner-offset-checkpoint",
    "orders-0/partition.metadata",
    "orders-0/leader-epoch-checkpoint",
    "orders-0/00000000000000000000.log",
    "orders-0/00000000000000000000.index",
    "orders-0/00000000000000000000.timeindex",
    "orders-0/00000000000000000100.snapshot",
    "__cluster_metadata-0/00000000000000000000.log",
    "__cluster_metadata-0/00000000000000000002-0000000001.checkpoint",
]


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A command that waits for the other end of a FIFO would wait for ever."""

    def over(*_: object) -> None:
        raise TimeoutError("the command waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir], ids=["fifo", "directory"])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_regular_file_is_refused_and_nothing_is_imported(
    duramen: Command,
    orders: Path,
    broker: Path,
    tmp_path: Path,
    file: str,
    put: Put,
) -> None:
    with_metadata(orders, broker)
    (broker / file).unlink(missing_ok=True)
    put(broker / file)
    found = duramen("import", broker)
    assert found.code == 1
    assert "not a regular file" in found.err
    assert file in found.err
    assert duramen("topics", "list", output="json").json["topics"] == [] if (tmp_path / "second").exists() else True


def moved_out(path: Path, outside: Path) -> None:
    """As somebody does who ran out of room."""
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("file", [*FILES[2:9], "orders-1"])
def test_a_link_out_of_the_directory_is_refused_unless_asked_for(
    duramen: Command,
    orders: Path,
    broker: Path,
    tmp_path: Path,
    file: str,
) -> None:
    with_metadata(orders, broker)
    moved_out(broker / file, tmp_path / "outside")
    refused = duramen("import", broker)
    assert refused.code == 1
    assert "symbolic link leads out of the directory" in refused.err
    taken = duramen("import", broker, "--follow-links")
    assert taken.code == 0, taken.err
    assert len(duramen("consume", "orders").lines) == 150


def test_a_link_inside_the_directory_is_fine(duramen: Command, broker: Path) -> None:
    moved_out(broker / "orders-0" / "leader-epoch-checkpoint", broker / "orders-0" / "kept")
    assert duramen("import", broker).code == 0


def test_dump_does_not_wait_for_a_fifo(duramen: Command, tmp_path: Path) -> None:
    path = tmp_path / "orders-0" / "00000000000000000000.log"
    path.parent.mkdir()
    for name in (path, path.with_suffix(".index"), path.with_suffix(".timeindex"), path.with_suffix(".snapshot")):
        os.mkfifo(name)
        found = duramen("dump", name)
        assert found.code in (1, 3)
        assert "not a regular file" in found.err + found.out


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for writable in (False, True):
        with pytest.raises(NotRegularFile):
            OS_FILES.open(str(tmp_path / "fifo"), writable=writable)
    with pytest.raises(IsADirectoryError):
        OS_FILES.open(str(tmp_path))
    with pytest.raises(NotRegularFile):
        OS_FILES.open("/dev/null")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="socket"):
            OS_FILES.open(str(tmp_path / "socket"))
