from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.files import OS_FILES, File, FileSystem, read_whole, replace_file
from simulation.filesystem import PowerCut, SimulatedFileSystem

# --- without a cut: the same as the operating system


class Session:
    """Runs operations by name against a file system below `base`; an error counts as its number."""

    def __init__(self, fs: FileSystem, base: str) -> None:
        self.fs, self.base = fs, base
        self.files: list[File] = []

    def run(self, operation: tuple[object, ...]) -> object:
        kind, *arguments = operation
        try:
            return getattr(self, f"do_{kind}")(*arguments)
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    def at(self, path: str) -> str:
        return os.path.join(self.base, path)

    def do_open(self, path: str, writable: bool, create: bool, exclusive: bool) -> None:
        if self.is_directory(path) and not (writable or create):
            return  # the operating system lets a directory be opened for reading; of no use to anyone
        self.files.append(self.fs.open(self.at(path), writable=writable, create=create, exclusive=exclusive))

    def is_directory(self, path: str) -> bool:
        try:
            self.fs.listdir(self.at(path))
        except OSError:
            return False
        return True

    def picked(self, number: int) -> File:
        if not self.files:
            raise OSError(errno.EBADF, "nothing open")
        return self.files[number % len(self.files)]

    def do_pread(self, number: int, size: int, position: int) -> bytes:
        return self.picked(number).pread(size, position)

    def do_pread_into(self, number: int, size: int, position: int) -> tuple[int, bytes]:
        buffer = bytearray(b"?" * size)
        return self.picked(number).pread_into(buffer, position), bytes(buffer)

    def do_pwrite(self, number: int, data: bytes, position: int) -> None:
        self.picked(number).pwrite(data, position)

    def do_truncate(self, number: int, size: int) -> None:
        self.picked(number).truncate(size)

    def do_size(self, number: int) -> int:
        return self.picked(number).size()

    def do_fsync(self, number: int) -> None:
        self.picked(number).fsync()

    def do_close(self, number: int) -> None:
        file = self.picked(number)
        file.close()
        self.files.remove(file)

    def do_exists(self, path: str) -> bool:
        return self.fs.exists(self.at(path))

    def do_stat(self, path: str) -> object:
        found = self.fs.stat(self.at(path))
        return "directory" if self.is_directory(path) else found.size_bytes

    def do_listdir(self, path: str) -> list[str]:
        return self.fs.listdir(self.at(path))

    def do_mkdir(self, path: str) -> None:
        self.fs.mkdir(self.at(path))

    def do_rename(self, source: str, target: str) -> None:
        self.fs.rename(self.at(source), self.at(target))

    def do_link(self, source: str, target: str) -> None:
        self.fs.link(self.at(source), self.at(target))

    def do_unlink(self, path: str) -> None:
        self.fs.unlink(self.at(path))

    def do_rmdir(self, path: str) -> None:
        self.fs.rmdir(self.at(path))

    def do_set_mtime(self, path: str, mtime_ms: int) -> int:
        self.fs.set_mtime(self.at(path), mtime_ms)
        return self.fs.stat(self.at(path)).mtime_ms

    def do_fsync_dir(self, path: str) -> None:
        self.fs.fsync_dir(self.at(path))

    def close(self) -> None:
        for file in self.files:
            file.close()


# Mostly d is a directory and f a file, but each is used where the other belongs as well.
file_paths = st.sampled_from(["f", "f2", "d/f", "d/f2", "d/d/f", "d2/f", "f/f"])
directory_paths = st.sampled_from(["d", "d2", "d/d", "d2/d", "f/d"])
any_paths = st.one_of(file_paths, directory_paths)
small = st.integers(0, 3)
positions = st.integers(0, 40)
operations = st.one_of(
    st.tuples(st.just("open"), any_paths, st.booleans(), st.booleans(), st.booleans()),
    st.tuples(st.just("open"), file_paths, st.just(True), st.just(True), st.just(False)),
    st.tuples(st.just("pread"), small, positions, positions),
    st.tuples(st.just("pread_into"), small, positions, positions),
    st.tuples(st.just("pwrite"), small, st.binary(max_size=20), positions),
    st.tuples(st.just("truncate"), small, positions),
    st.tuples(st.sampled_from(["size", "fsync", "close"]), small),
    st.tuples(st.sampled_from(["exists", "listdir", "unlink", "rmdir", "fsync_dir"]), any_paths),
    st.tuples(st.just("stat"), any_paths),
    st.tuples(st.just("mkdir"), directory_paths),
    st.tuples(st.just("rename"), file_paths, st.one_of(file_paths, file_paths, directory_paths)),
    st.tuples(st.just("rename"), directory_paths, st.one_of(directory_paths, directory_paths, file_paths)),
    st.tuples(st.just("link"), any_paths, any_paths),
    st.tuples(st.just("set_mtime"), any_paths, st.integers(0, 2_000_000_000_000)),
)


def on_the_os(base: str) -> dict[str, bytes]:
    return {
        "/" + os.path.relpath(os.path.join(folder, name), base): Path(folder, name).read_bytes()
        for folder, _, names in os.walk(base)
        for name in names
    }


@settings(max_examples=400)
@given(st.lists(operations, max_size=40))
def test_every_call_answers_as_the_operating_system_does(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[object, ...]]
) -> None:
    base = str(tmp_path_factory.mktemp("os"))
    simulated = SimulatedFileSystem()
    real, ours = Session(OS_FILES, base), Session(simulated, "/")
    real.do_mkdir("d")
    ours.do_mkdir("d")
    try:
        for step in steps:
            assert ours.run(step) == real.run(step), step
        assert simulated.files() == on_the_os(base)
    finally:
        real.close()


@given(st.lists(operations, max_size=40), st.integers(0, 2**32))
def test_a_killed_process_loses_nothing(steps: list[tuple[object, ...]], seed: int) -> None:
    simulated = SimulatedFileSystem()
    session = Session(simulated, "/")
    for step in steps:
        session.run(step)
    survivor = simulated.kill()
    assert (survivor.files(), survivor.directories()) == (simulated.files(), simulated.directories())
    # what was not synced before the kill is not synced by it
    one, two = simulated.crash(random.Random(seed)), survivor.crash(random.Random(seed))
    assert (one.files(), one.directories()) == (two.files(), two.directories())


# --- with a cut


def write(fs: FileSystem, path: str, data: bytes, *, position: int = 0, sync: bool = False) -> None:
    file = fs.open(path, create=True)
    file.pwrite(data, position)
    if sync:
        file.fsync()
    file.close()


def durable(data: bytes = b"old" * 300, path: str = "/f") -> SimulatedFileSystem:
    fs = SimulatedFileSystem()
    write(fs, path, data, sync=True)
    fs.fsync_dir("/")
    return fs


def outcomes(fs: SimulatedFileSystem, draws: int = 400) -> list[dict[str, bytes]]:
    return [fs.crash(random.Random(seed)).files() for seed in range(draws)]


@given(st.lists(operations, max_size=30), st.integers(0, 2**63))
def test_a_cut_is_drawn_the_same_from_the_same_seed(steps: list[tuple[object, ...]], seed: int) -> None:
    first, second = SimulatedFileSystem(), SimulatedFileSystem()
    for fs in (first, second):
        session = Session(fs, "/")
        for step in steps:
            session.run(step)
    before = first.files()
    drawn = first.crash(random.Random(seed))
    assert drawn.files() == second.crash(random.Random(seed)).files()
    assert drawn.directories() == first.crash(random.Random(seed)).directories()
    assert first.files() == before


@given(st.lists(operations, max_size=30), st.integers(0, 2**63))
def test_what_is_synced_survives_whatever_else_happens(steps: list[tuple[object, ...]], seed: int) -> None:
    fs = SimulatedFileSystem()
    session = Session(fs, "/")
    for step in steps:
        session.run(step)
    expected = fs.files()
    for path in fs.directories():
        fs.fsync_dir(path)
    for path in expected:
        file = fs.open(path)
        file.fsync()
        file.close()
    assert fs.crash(random.Random(seed)).files() == expected
    # and what comes out of a cut is on disk for good
    again = fs.crash(random.Random(seed)).crash(random.Random(seed + 1))
    assert again.files() == expected


def test_unsynced_data_may_be_lost_kept_torn_or_replaced() -> None:
    data = bytes(range(1, 256)) * 16
    fs = durable(b"")
    write(fs, "/f", data)
    seen = set()
    for found in (files["/f"] for files in outcomes(fs)):
        if found == b"":
            seen.add("lost")
        elif found == data:
            seen.add("kept")
        elif data.startswith(found):
            seen.add("torn at a sector" if len(found) % 512 == 0 else "torn anywhere")
        elif len(found) == len(data) and not any(found):
            seen.add("grown with zeros")
        elif len(found) == len(data) and found[:512] != data[:512] and any(found[:512]):
            seen.add("grown with nonsense")
        elif found[:512] != data[:512] and found[512:1024] == data[512:1024]:
            seen.add("a later sector without an earlier one")
        assert len(found) <= len(data)
    assert seen == {
        "lost", "kept", "torn at a sector", "torn anywhere", "grown with zeros", "grown with nonsense",
        "a later sector without an earlier one",
    }  # fmt: skip


def test_synced_bytes_stay_when_more_is_written_behind_them() -> None:
    fs = durable(b"a" * 700)
    file = fs.open("/f", writable=True)
    file.pwrite(b"b" * 900, 700)
    file.pwrite(b"c" * 900, 1600)
    assert all(files["/f"][:700] == b"a" * 700 for files in outcomes(fs))


def test_an_overwrite_is_old_or_new_in_every_sector() -> None:
    fs = durable(b"a" * 2048)
    write(fs, "/f", b"b" * 1024, position=512)
    torn = 0
    for files in outcomes(fs):
        found = files["/f"]
        assert len(found) == 2048
        assert found[:512] + found[1536:] == b"a" * 1024
        assert set(found) <= {ord("a"), ord("b")}
        torn += len(set(found[512:1536])) == 2
    assert torn > 10


def test_a_later_write_may_survive_an_earlier_one() -> None:
    fs = durable(b"")
    write(fs, "/f", b"a" * 512)
    write(fs, "/f", b"b" * 512, position=512)
    assert any(files["/f"][512:] == b"b" * 512 and files["/f"][:512] == bytes(512) for files in outcomes(fs))


def test_an_unsynced_truncation_may_be_undone() -> None:
    fs = durable(b"a" * 1000)
    file = fs.open("/f", writable=True)
    file.truncate(10)
    assert {len(files["/f"]) for files in outcomes(fs)} == {10, 1000}


def test_a_name_is_durable_only_by_its_directory() -> None:
    fs = SimulatedFileSystem()
    write(fs, "/f", b"x", sync=True)
    assert {"/f" in files for files in outcomes(fs)} == {True, False}
    fs.fsync_dir("/")
    assert all(files == {"/f": b"x"} for files in outcomes(fs))


def test_a_directory_that_was_not_synced_takes_its_files_with_it() -> None:
    fs = SimulatedFileSystem()
    fs.mkdir("/a/b")
    write(fs, "/a/b/f", b"x", sync=True)
    fs.fsync_dir("/a/b")
    fs.fsync_dir("/a")
    assert {tuple(files) for files in outcomes(fs)} == {(), ("/a/b/f",)}
    fs.fsync_dir("/")
    assert {tuple(files) for files in outcomes(fs)} == {("/a/b/f",)}


def test_names_survive_in_the_order_they_were_made() -> None:
    fs = SimulatedFileSystem()
    for name in "abcd":
        write(fs, f"/{name}", b"", sync=True)
    fs.rename("/a", "/e")
    fs.unlink("/b")
    seen = {"".join(sorted(path[1:] for path in files)) for files in outcomes(fs)}
    assert seen == {"", "a", "ab", "abc", "abcd", "bcde", "cde"}


def test_a_rename_across_directories_is_there_or_not() -> None:
    fs = SimulatedFileSystem()
    for path in ("/a", "/b"):
        fs.mkdir(path)
    write(fs, "/a/f", b"x", sync=True)
    for path in ("/", "/a", "/b"):
        fs.fsync_dir(path)
    write(fs, "/b/other", b"", sync=True)
    fs.rename("/a/f", "/b/f")
    seen = {tuple(files) for files in outcomes(fs)}
    assert seen == {("/a/f",), ("/a/f", "/b/other"), ("/b/f", "/b/other")}
    fs.fsync_dir("/a")  # either directory brings it, and what came before it, to disk
    assert {tuple(files) for files in outcomes(fs)} == {("/b/f", "/b/other")}


def test_a_replaced_file_keeps_its_own_content() -> None:
    fs = durable(b"old")
    write(fs, "/f.tmp", b"new", sync=True)
    fs.rename("/f.tmp", "/f")
    assert {files["/f"] for files in outcomes(fs)} == {b"old", b"new"}


def test_an_unlinked_file_may_come_back() -> None:
    fs = durable(b"x")
    fs.unlink("/f")
    assert {tuple(files.items()) for files in outcomes(fs)} == {(), (("/f", b"x"),)}


# --- the protocol the engine relies on, cut at every step


def cut_at_every_step(replace: Callable[[FileSystem], None]) -> set[bytes | None]:
    """The content of /f after a cut at each step of `replace`, drawn a hundred times each."""
    found: set[bytes | None] = set()
    step = 0
    while True:
        fs = durable(b"old" * 300)
        fs.fail_after(step)
        try:
            replace(fs)
        except PowerCut:
            pass
        else:
            return found
        for seed in range(100):
            after = fs.crash(random.Random(seed))
            found.add(read_whole(after, "/f", limit=10_000) if after.exists("/f") else None)
        step += 1


def test_replacing_a_file_leaves_the_old_or_the_new_one_wherever_it_is_cut() -> None:
    assert cut_at_every_step(lambda fs: replace_file(fs, "/f", b"new!" * 400)) == {b"old" * 300, b"new!" * 400}


def test_replacing_a_file_without_syncing_it_is_found_out() -> None:
    found = cut_at_every_step(lambda fs: replace_file(fs, "/f", b"new!" * 400, durable=False))
    assert found > {b"old" * 300, b"new!" * 400}


def test_a_replaced_file_is_durable_once_the_call_returns() -> None:
    fs = durable(b"old")
    replace_file(fs, "/f", b"new")
    assert all(files == {"/f": b"new"} for files in outcomes(fs))


# --- faults


def test_after_the_cut_nothing_works_and_no_except_clause_hides_it() -> None:
    fs = SimulatedFileSystem()
    file = fs.open("/f", create=True)
    fs.fail_after(1)
    file.pwrite(b"x", 0)

    def careless() -> None:
        try:
            file.pwrite(b"y", 1)
        except Exception:
            pytest.fail("swallowed")

    with pytest.raises(PowerCut, match="pwrite"):
        careless()
    for call in (lambda: fs.exists("/f"), lambda: file.pread(1, 0), lambda: fs.listdir("/"), file.fsync):
        with pytest.raises(PowerCut):
            call()
    file.close()


def test_the_operation_under_way_may_or_may_not_be_done() -> None:
    fs = durable(b"old")
    fs.fail_after(0)
    with pytest.raises(PowerCut):
        fs.rename("/f", "/g")
    assert {tuple(files) for files in outcomes(fs)} == {("/f",), ("/g",)}


def test_a_cut_fsync_may_have_done_nothing() -> None:
    fs = durable(b"")
    file = fs.open("/f", writable=True)
    file.pwrite(b"x", 0)
    fs.fail_after(0)
    with pytest.raises(PowerCut):
        file.fsync()
    assert {files["/f"] for files in outcomes(fs)} >= {b"", b"x"}


def test_every_operation_is_counted_and_traced() -> None:
    fs = SimulatedFileSystem()
    fs.mkdir("/a/b")
    replace_file(fs, "/a/b/f", b"xyz")
    fs.link("/a/b/f", "/a/g")
    fs.set_mtime("/a/g", 5)
    fs.unlink("/a/g")
    fs.mkdir("/a/c")
    fs.rmdir("/a/c")
    assert fs.exists("/a/b/f")
    fs.listdir("/a")
    kinds = [operation.kind for operation in fs.trace]
    assert kinds == [
        "mkdir", "mkdir", "create", "truncate", "pwrite", "fsync", "rename", "fsync_dir", "link", "set_mtime",
        "unlink", "mkdir", "rmdir",
    ]  # fmt: skip
    assert fs.operations == len(kinds)
    assert str(fs.trace[4]) == "    4 pwrite    /a/b/f.tmp 3 bytes at 0"


def test_a_full_disk_takes_what_fits() -> None:
    fs = SimulatedFileSystem()
    fs.capacity_bytes = 10
    file = fs.open("/f", create=True)
    file.pwrite(b"123456", 0)
    with pytest.raises(OSError, match="No space") as caught:
        file.pwrite(b"abcdef", 6)
    assert caught.value.errno == errno.ENOSPC
    assert fs.files() == {"/f": b"123456abcd"}
    file.pwrite(b"XY", 0)  # an overwrite needs no space
    fs.unlink("/f")
    write(fs, "/g", b"0123456789")


def test_an_error_can_be_ordered_for_later() -> None:
    fs = SimulatedFileSystem()
    fs.fail_with(errno.EIO, after=1, times=2)
    file = fs.open("/f", create=True)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output") as caught:
            file.pwrite(b"abcd", 0)
        assert caught.value.errno == errno.EIO
    assert fs.files() == {"/f": b"ab"}
    file.pwrite(b"abcd", 0)
    fs.fail_with(errno.ENOSPC, times=None)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            fs.mkdir("/d")
    fs.heal()
    fs.mkdir("/d")


def test_times_come_from_the_clock() -> None:
    clock = ManualClock(1000)
    fs = SimulatedFileSystem(clock)
    file = fs.open("/f", create=True)
    clock.advance(5)
    file.pwrite(b"x", 0)
    assert (fs.stat("/f").mtime_ms, fs.stat("/f").ctime_ms) == (1005, 1005)
    clock.advance(5)
    fs.rename("/f", "/g")
    assert (fs.stat("/g").mtime_ms, fs.stat("/g").ctime_ms) == (1005, 1010)
    clock.advance(5)
    fs.set_mtime("/g", 7)
    assert (fs.stat("/g").mtime_ms, fs.stat("/g").ctime_ms) == (7, 1015)
    assert fs.kill().stat("/g") == fs.stat("/g")


def test_a_simulated_file_has_no_descriptor() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        SimulatedFileSystem().open("/f", create=True).fileno()


def test_it_can_be_written_out_for_real(tmp_path: Path) -> None:
    fs = SimulatedFileSystem()
    fs.mkdir("/a/empty")
    write(fs, "/a/f", b"x")
    fs.set_mtime("/a/f", 5000)
    fs.copy_to(str(tmp_path))
    assert (tmp_path / "a/empty").is_dir()
    assert (tmp_path / "a/f").read_bytes() == b"x"
    assert OS_FILES.stat(str(tmp_path / "a/f")).mtime_ms == 5000
