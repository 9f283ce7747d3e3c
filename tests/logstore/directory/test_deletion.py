from __future__ import annotations

import time
from pathlib import Path

from logstore.clock import ManualClock
from logstore.directory.deletion import mark_deleted, sweep_deleted
from logstore.files import OS_FILES
from simulation.filesystem import SimulatedFileSystem

KINDS = ("log", "index", "timeindex", "txnindex", "snapshot")


def made(folder: Path, base_offset: int = 7, kinds: tuple[str, ...] = KINDS) -> None:
    for kind in kinds:
        (folder / f"{base_offset:020d}.{kind}").write_bytes(kind.encode())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_marking_renames_the_log_first_and_leaves_the_snapshot_unless_told(tmp_path: Path) -> None:
    made(tmp_path)
    renamed = mark_deleted(OS_FILES, str(tmp_path), 7)
    assert renamed == [str(tmp_path / f"{7:020d}.{kind}.deleted") for kind in KINDS[:4]]
    assert f"{7:020d}.snapshot" in names(tmp_path)
    assert mark_deleted(OS_FILES, str(tmp_path), 7, snapshot=True) == [str(tmp_path / f"{7:020d}.snapshot.deleted")]


def test_marking_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    made(tmp_path, kinds=("index", "timeindex"))
    assert len(mark_deleted(OS_FILES, str(tmp_path), 7)) == 2
    assert mark_deleted(OS_FILES, str(tmp_path), 7) == []


def test_marking_replaces_what_was_marked_before(tmp_path: Path) -> None:
    (tmp_path / f"{7:020d}.log.deleted").write_bytes(b"older")
    made(tmp_path)
    mark_deleted(OS_FILES, str(tmp_path), 7)
    assert (tmp_path / f"{7:020d}.log.deleted").read_bytes() == b"log"


def test_the_delay_counts_from_the_rename_not_from_the_last_write(tmp_path: Path) -> None:
    made(tmp_path)
    old_ms = 1_000_000_000_000
    OS_FILES.set_mtime(str(tmp_path / f"{7:020d}.log"), old_ms)
    mark_deleted(OS_FILES, str(tmp_path), 7, snapshot=True)
    now_ms = time.time_ns() // 1_000_000
    assert sweep_deleted(OS_FILES, str(tmp_path), delay_ms=60_000, now_ms=now_ms) == []
    swept = sweep_deleted(OS_FILES, str(tmp_path), delay_ms=60_000, now_ms=now_ms + 60_001)
    assert len(swept) == 5
    assert names(tmp_path) == []


def test_only_deleted_files_are_swept(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / f"{7:020d}.log.swap").write_bytes(b"")
    (tmp_path / f"{7:020d}.log.cleaned").write_bytes(b"")
    before = names(tmp_path)
    assert sweep_deleted(OS_FILES, str(tmp_path), delay_ms=0, now_ms=2**53) == []
    assert names(tmp_path) == before


def test_a_file_that_another_sweeper_took_is_no_error() -> None:
    class Racing(SimulatedFileSystem):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            super().unlink(path)

    fs = Racing(ManualClock(1000))
    fs.open(f"/{7:020d}.log.deleted", create=True)
    assert sweep_deleted(fs, "/", delay_ms=0, now_ms=1000) == []
    assert fs.listdir("/") == []
