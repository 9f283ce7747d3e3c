"""Locks between threads, processes and a process with classic locks (as a JVM takes them); order, waiting, naming."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from descriptors import open_files
from logstore.clock import ManualClock
from logstore.directory.layout import Layout
from logstore.directory.locks import FileLock, StoreLocks, holder
from logstore.errors import LockHeld, StoreInUse
from logstore.files import OS_FILES, File, OsFileSystem
from logstore.topic import new_topic_id

ROOT = Path(__file__).resolve().parents[3]

HOLD_OURS = """
import sys
from logstore.clock import SYSTEM_CLOCK
from logstore.files import OS_FILES, File, OsFileSystem
from logstore.directory.locks import FileLock
lock = FileLock(OS_FILES, sys.argv[1], exclusive=sys.argv[2] == "exclusive")
assert lock.try_acquire()
if lock.exclusive:
    lock.sign(SYSTEM_CLOCK, "a test")
print("held", flush=True)
sys.stdin.readline()
"""
HOLD_LEASE = """
import sys
from logstore.files import OS_FILES
from logstore.directory.layout import Layout
from logstore.directory.locks import StoreLocks
with StoreLocks(OS_FILES, Layout(sys.argv[1])).lease(sys.argv[2], what="a test"):
    print("held", flush=True)
    sys.stdin.readline()
"""
HOLD_CLASSIC = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


class Holder:
    """Another process that holds a lock until it is let go."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate("go\n", timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def make_locks(tmp_path: Path, wait_ms: int = 50) -> StoreLocks:
    layout = Layout(str(tmp_path))
    for directory in layout.directories:
        OS_FILES.mkdir(directory)
    return StoreLocks(OS_FILES, layout, wait_ms=wait_ms)


def test_exclusive_excludes_two_open_files_of_one_process(tmp_path: Path) -> None:
    first, second = (FileLock(OS_FILES, str(tmp_path / "lock")) for _ in range(2))
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def test_closing_another_descriptor_of_the_file_keeps_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    first, second = (FileLock(OS_FILES, path) for _ in range(2))
    assert first.try_acquire()
    os.close(os.open(path, os.O_RDWR))  # a classic lock would be gone now
    assert not second.try_acquire()
    first.release()


def test_shared_locks_stand_together_and_keep_exclusive_ones_out(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    readers = [FileLock(OS_FILES, path, exclusive=False) for _ in range(3)]
    assert all(lock.try_acquire() for lock in readers)
    writer = FileLock(OS_FILES, path)
    assert not writer.try_acquire()
    for lock in readers:
        lock.release()
    assert writer.try_acquire()
    writer.release()


def test_another_process_is_excluded_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    lock = FileLock(OS_FILES, path)
    with Holder(HOLD_OURS, path, "exclusive") as other:
        assert not lock.try_acquire()
        assert f"pid {other.process.pid}" in holder(OS_FILES, path)
        assert "for a test" in holder(OS_FILES, path)
        other.kill()
        assert lock.acquire(60_000)
    lock.release()


def test_a_classic_lock_as_a_jvm_takes_it_excludes_both_ways(tmp_path: Path) -> None:
    path = str(tmp_path / ".lock")
    Path(path).touch()
    shared = FileLock(OS_FILES, path, exclusive=False)
    with Holder(HOLD_CLASSIC, path) as jvm:
        assert not shared.try_acquire()
        assert f"process {jvm.process.pid}" in holder(OS_FILES, path)
    assert shared.try_acquire()
    probe = "import fcntl,sys; fcntl.lockf(open(sys.argv[1],'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    assert subprocess.run([sys.executable, "-c", probe, path], capture_output=True).returncode == 1
    shared.release()
    assert subprocess.run([sys.executable, "-c", probe, path], capture_output=True).returncode == 0


def test_waiting_ends_with_the_holders_name(tmp_path: Path) -> None:
    locks, topic_id = make_locks(tmp_path), new_topic_id()
    with Holder(HOLD_LEASE, str(tmp_path), topic_id) as other:
        began = time.monotonic()
        with pytest.raises(LockHeld) as caught, locks.lease(topic_id, what="a test"):
            pytest.fail("the lease was given twice")
        assert 0.04 <= time.monotonic() - began < 60
    text = str(caught.value)
    assert f"pid {other.process.pid}" in text
    assert "since 20" in text
    assert caught.value.file == str(tmp_path / "locks" / f"lease-{topic_id}")


def test_waiting_ends_when_the_holder_is_done(tmp_path: Path) -> None:
    locks, topic_id = make_locks(tmp_path, wait_ms=60_000), new_topic_id()
    order: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with locks.partition(topic_id, 0, what="first"):
            inside.set()
            time.sleep(0.05)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with locks.partition(topic_id, 0, what="second"):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_locks_are_taken_in_their_order_only(tmp_path: Path) -> None:
    locks = make_locks(tmp_path)
    low, high = sorted([new_topic_id(), new_topic_id()])
    with (
        locks.maintenance(low, 0, what="t"),
        locks.maintenance(high, 3, what="t"),
        locks.lease(low, what="t"),
        locks.lease(high, what="t"),
        locks.partition(low, 0, what="t"),
        locks.checkpoint(),
    ):
        pass
    with locks.lease(high, what="t"):
        for wrong in (
            locks.lease(low, what="t"),
            locks.lease(high, what="t"),
            locks.maintenance(low, 0, what="t"),
        ):
            with pytest.raises(RuntimeError, match="deadlock"), wrong:
                pass
    with locks.lease(low, what="t"):  # a refused order leaves nothing behind
        pass


def test_a_thread_knows_which_leases_it_holds(tmp_path: Path) -> None:
    locks = make_locks(tmp_path)
    mine, other = new_topic_id(), new_topic_id()
    with locks.lease(mine, what="t"):
        assert [locks.holds_lease(topic_id) for topic_id in (mine, other)] == [True, False]
        of_another_thread: list[bool] = []
        thread = threading.Thread(target=lambda: of_another_thread.append(locks.holds_lease(mine)))
        thread.start()
        thread.join()
        assert of_another_thread == [False]
    assert not locks.holds_lease(mine)


def test_an_error_inside_gives_the_lock_back(tmp_path: Path) -> None:
    locks, topic_id = make_locks(tmp_path), new_topic_id()
    with pytest.raises(KeyError), locks.lease(topic_id, what="t"):
        raise KeyError
    with locks.lease(topic_id, what="t"):
        pass


def test_a_lock_file_removed_while_it_is_waited_for_is_opened_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    old, new = FileLock(OS_FILES, path), FileLock(OS_FILES, path)
    assert old.try_acquire()
    OS_FILES.unlink(path)
    assert new.try_acquire()  # another file: whoever holds the old one holds a ghost
    third = FileLock(OS_FILES, path)
    old.release()
    assert not third.try_acquire()
    new.release()


def test_a_lock_won_on_a_removed_file_does_not_count(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")

    class RemovesAfterOpening(OsFileSystem):
        def open(self, path: str, **how: bool) -> File:
            file = super().open(path, **how)
            self.unlink(path)
            return file

    assert not FileLock(RemovesAfterOpening(), path).try_acquire()


def test_a_broker_keeps_the_store_from_opening(tmp_path: Path) -> None:
    locks = make_locks(tmp_path)
    path = tmp_path / "logs" / ".lock"
    path.touch()
    with Holder(HOLD_CLASSIC, str(path)) as broker, pytest.raises(StoreInUse, match=f"process {broker.process.pid}"):
        locks.enter()
    locks.enter()
    with path.open("r+b") as file, pytest.raises(OSError, match=r".*"):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    locks.leave()


def test_a_torn_or_foreign_note_is_an_unknown_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for content in (b"", b"{", b"[]", b"\xff" * 5000, b'{"host":"h","pid":"x","since_ms":1,"what":""}', b"[" * 4000):
        path.write_bytes(content)
        assert holder(OS_FILES, str(path)) == "an unknown process"
    assert holder(OS_FILES, str(tmp_path / "missing")) == "an unknown process"


def test_the_note_has_the_clocks_time(tmp_path: Path) -> None:
    lock = FileLock(OS_FILES, str(tmp_path / "lock"))
    assert lock.try_acquire()
    lock.sign(ManualClock(1_700_000_000_000), "compaction")
    assert "since 2023-11-14T22:13:20Z, for compaction" in holder(OS_FILES, lock.path)
    lock.release()


def test_locks_of_thousands_of_partitions_cost_one_descriptor(tmp_path: Path) -> None:
    locks, topics = make_locks(tmp_path), sorted(new_topic_id() for _ in range(50))
    before = open_files()
    with contextlib.ExitStack() as held:
        for topic_id in topics:
            held.enter_context(locks.maintenance_of(topic_id, what="t"))
        held.enter_context(locks.partitions(topics[0], range(0, 20_000, 2), what="t"))
        assert open_files() == before + 1
    assert open_files() == before
    assert {path.name.partition("-")[0] for path in (tmp_path / "locks").iterdir()} == {
        "maintenance",
        "partition",
        "partitions",
    }


def test_all_partitions_of_a_topic_exclude_each_of_them_and_no_other_topic(tmp_path: Path) -> None:
    locks, (one, two) = make_locks(tmp_path), (new_topic_id(), new_topic_id())

    def blocked(take: Callable[[], contextlib.AbstractContextManager[None]]) -> str | None:
        found: list[str | None] = [None]

        def other() -> None:
            try:
                with take():
                    pass
            except LockHeld as error:
                found[0] = str(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return found[0]

    with locks.maintenance_of(one, what="a long visit"):
        for partition in (0, 7, 99_999):
            said = blocked(lambda number=partition: locks.maintenance(one, number, what="t", wait_ms=0))  # type: ignore[misc]
            assert said is not None
            assert f"pid {os.getpid()}" in said
            assert "for a long visit" in said
        assert blocked(lambda: locks.maintenance(two, 7, what="t", wait_ms=0)) is None
        assert blocked(lambda: locks.partition(one, 7, what="t", wait_ms=0)) is None
    with locks.partitions(one, [3, 4, 9], what="an append"):
        assert blocked(lambda: locks.partitions(one, [5, 8, 10], what="t", wait_ms=0)) is None
        assert "for an append" in str(blocked(lambda: locks.partitions(one, [8, 9], what="t", wait_ms=0)))
    assert blocked(lambda: locks.partitions(one, [8, 9], what="t", wait_ms=0)) is None
    assert blocked(lambda: locks.maintenance_of(one, what="t", wait_ms=0)) is None


def test_a_thread_never_takes_what_it_holds_a_part_of(tmp_path: Path) -> None:
    """Its ranges share an open file, so giving the part back would give back what lies around it."""
    locks, topic_id = make_locks(tmp_path), new_topic_id()
    with (
        locks.maintenance_of(topic_id, what="t"),
        pytest.raises(RuntimeError),
        locks.maintenance(topic_id, 3, what="t", wait_ms=0),
    ):
        pass


def test_another_process_is_kept_out_and_named(tmp_path: Path) -> None:
    locks, topic_id = make_locks(tmp_path), new_topic_id()
    script = (
        "import sys; from logstore.files import OS_FILES; from logstore.directory.layout import Layout;"
        "from logstore.directory.locks import StoreLocks\n"
        "with StoreLocks(OS_FILES, Layout(sys.argv[1])).partitions(sys.argv[2], [2, 3], what='append to t'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), topic_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with locks.partition(topic_id, 4, what="t", wait_ms=0):
            pass
        with pytest.raises(LockHeld, match=f"pid {other.pid}.*append to t"), locks.partition(topic_id, 3, what="t"):
            pass
        other.communicate("")
    with locks.partition(topic_id, 3, what="t", wait_ms=0):
        pass
