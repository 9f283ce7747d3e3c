"""Death at any step of a commit: whoever comes next finishes it, and the logs hold what an undisturbed run writes.

Every change of a file goes through `KillableFiles`, which dies at a chosen one: in this process (everything after
raises, nothing is cleaned up) or for real, in a child that kills itself.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.clock import ManualClock
from logstore.commit.apply import apply_partition
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan import Plan, read_plan
from logstore.commit.plan_folder import Staging
from logstore.commit.produce import append_table
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.errors import DuramenError
from logstore.files import File, OsFile, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
ROOT = Path(__file__).parents[3]
SOAK = os.environ.get("DURAMEN_SOAK") == "1"
NOW_MS = 1_700_000_000_000
TOPICS = ("orders", "payments")


class Killed(BaseException):
    """Not an Exception: nothing may catch it and go on."""


class KillableFiles(OsFileSystem):
    """The operating system's files until step `kill_at`; in the middle of it, if it writes."""

    def __init__(self, kill_at: int = 0, *, for_real: bool = False) -> None:
        self.kill_at = kill_at
        self.for_real = for_real
        self.trace: list[tuple[str, str]] = []
        self.dead = False

    def step(self, kind: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        if self.dead:
            raise Killed
        self.trace.append((kind, path))
        if len(self.trace) == self.kill_at:
            half()
            if self.for_real:
                os.kill(os.getpid(), signal.SIGKILL)
            self.dead = True
            raise Killed

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if create and not os.path.exists(path):
            self.step("create", path)
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _KillableFile(os.dup(file.fileno()), path, self)

    def mkdir(self, path: str) -> None:
        if not os.path.exists(path):
            self.step("mkdir", path)
        super().mkdir(path)

    def rename(self, source: str, target: str) -> None:
        self.step("rename", target)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self.step("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self.step("unlink", path)
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self.step("rmdir", path)
        super().rmdir(path)

    def fsync_dir(self, path: str) -> None:
        self.step("fsync_dir", path)


class _KillableFile(OsFile):
    __slots__ = ("_files",)

    def __init__(self, fd: int, path: str, files: KillableFiles) -> None:
        super().__init__(fd, path)
        self._files = files

    def pwrite(self, data: object, position: int) -> None:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._files.step("pwrite", self.path, lambda: os.pwrite(self.fileno(), view[: len(view) // 2], position))
        super().pwrite(view, position)

    def truncate(self, size: int) -> None:
        self._files.step("truncate", self.path)
        super().truncate(size)

    def fsync(self) -> None:
        self._files.step("fsync", self.path)


def rows(batch: int, topic: str, count: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % (n % 9) for n in range(count)]),
            "value": pa.array([b"%s %d %d" % (topic.encode(), batch, n) for n in range(count)]),
        }
    )


def write(committer: Committer, batch: int) -> None:
    """One batch to both topics, as the sink does it; large enough to roll segments in the middle."""
    committer.store.clock.set(NOW_MS + batch)  # type: ignore[attr-defined]
    app = AppBatch("app", batch, "query")
    if committer.check_replay(app):
        committer.finish_replay(app)
        return
    targets = {name: committer.target(name) for name in TOPICS}
    staging = Staging(committer.store)
    try:
        writer = StagedWriter(staging.output(), options=EncodeOptions(batch_size=250), now_ms=NOW_MS + batch)
        for name in TOPICS:
            writer.write(targets[name], rows(batch, name, 70))
        committer.commit(staging, [writer.finish()], {target.id: target for target in targets.values()}, app=app)
    finally:
        staging.close()


def run(root: Path, batches: range, files: KillableFiles) -> None:
    """Write the batches, then flush: everything there is on the way."""
    with LogStore(root, fs=files, clock=ManualClock(NOW_MS), lock_wait_ms=5000) as store:
        committer = Committer(store)
        for batch in batches:
            write(committer, batch)
        for name in TOPICS:
            committer.flush(store.topic(name))


def make(root: Path) -> None:
    with LogStore(root, create=True, fs=KillableFiles(), clock=ManualClock(NOW_MS)) as store:
        for name in TOPICS:
            store.create_topic(name, partitions=2, configs={"segment.bytes": 900, "index.interval.bytes": 200})
        write(Committer(store), 0)  # applied, not flushed


def contents(root: Path) -> dict[str, bytes]:
    """Everything in the logs but the names topics were given."""
    files = {}
    for name in TOPICS:
        for path in sorted((root / "logs").glob(f"{name}-*/*")):
            if path.is_file() and path.name != "partition.metadata":
                files[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    return files


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("begun") / "store"
    make(root)
    return root


@pytest.fixture(scope="module")
def undisturbed(
    begun: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], list[tuple[str, str]]]:
    """What the logs hold after batches 1 and 2, and the steps of batch 1 with its flush."""
    root = tmp_path_factory.mktemp("undisturbed") / "store"
    shutil.copytree(begun, root)
    files = KillableFiles()
    run(root, range(1, 2), files)
    steps = [(kind, os.path.relpath(path, root)) for kind, path in files.trace]
    run(root, range(2, 3), KillableFiles())
    found = contents(root)
    assert len([name for name in found if name.endswith(".log")]) > 12, "several rolls in every partition"
    return found, steps


def die(root: Path, step: int) -> None:
    files = KillableFiles(step)
    try:
        run(root, range(1, 2), files)
        raise AssertionError(f"there is no step {step}")
    except Killed:
        pass
    gc.collect()  # what the dead one had open, locks among it


def check(root: Path, wanted: dict[str, bytes]) -> None:
    """The replay of batch 1 and the next batch: then the logs are what they would have been anyway."""
    run(root, range(1, 3), KillableFiles())
    # Days later: a folder that nobody had made his own yet is left alone while it is young.
    later = ManualClock(time.time_ns() // 1_000_000 + 7 * 86_400_000)
    with LogStore(root, clock=later) as store:
        committer = Committer(store)
        committer.sweep()
        store.sweep()
        assert os.listdir(store.layout.staging) == []
        assert [row.batch_id for row in committer.ledger.commits() if row.topic == "orders"] == [0, 1, 2]
        for name in TOPICS:
            topic = store.topic(name)
            assert sum(store.ends(topic).high_watermarks) == 210
            assert store.ends(topic).flushed_sequence == 3
    assert contents(root) == wanted


def chosen_steps(steps: list[tuple[str, str]], rng: random.Random) -> list[int]:
    """One of each sort of step (the last of it, and a random one), or all of them."""
    if SOAK:
        return list(range(1, len(steps) + 1))
    sorts: dict[str, list[int]] = {}
    for number, (kind, path) in enumerate(steps, 1):
        sorts.setdefault(f"{kind} {re.sub(r'[0-9a-f-]{20,}|[A-Za-z0-9_-]{22}|[0-9]+', '#', path)}", []).append(number)
    return sorted({number for found in sorts.values() for number in (found[-1], rng.choice(found))})


def test_death_at_each_sort_of_step_is_made_good(
    tmp_path: Path, begun: Path, undisturbed: tuple[dict[str, bytes], list[tuple[str, str]]], seed: int
) -> None:
    wanted, steps = undisturbed
    places = {path.split(os.sep)[0] for _, path in steps}
    assert places >= {"staging", "ledger", "state", "logs"}
    chosen = chosen_steps(steps, random.Random(seed))
    began = time.monotonic()
    for done, step in enumerate(random.Random(seed).sample(chosen, len(chosen))):
        if not SOAK and time.monotonic() - began > 60 and done >= 15:
            break  # a busy machine; another run takes others
        root = tmp_path / str(step)
        shutil.copytree(begun, root)
        print(f"killed at step {step} of {len(steps)}: {steps[step - 1]}")
        die(root, step)
        check(root, wanted)
        shutil.rmtree(root)


def test_death_and_death_again_while_making_good(
    tmp_path: Path, begun: Path, undisturbed: tuple[dict[str, bytes], list[tuple[str, str]]], seed: int
) -> None:
    wanted, steps = undisturbed
    rng = random.Random(seed)
    appends = [number for number, (kind, path) in enumerate(steps, 1) if path.endswith(".log") and kind == "pwrite"]
    for _ in range(20 if SOAK else 4):
        root = tmp_path / "store"
        shutil.copytree(begun, root)
        die(root, rng.choice(appends))
        for _ in range(3):
            files = KillableFiles(rng.randrange(1, 60))
            try:
                run(root, range(1, 2), files)
            except Killed:
                gc.collect()
        check(root, wanted)
        shutil.rmtree(root)


_CHILD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("crash", sys.argv[1])
crash = importlib.util.module_from_spec(spec); sys.modules["crash"] = crash; spec.loader.exec_module(crash)
crash.child(*sys.argv[2:])
"""


def start(*words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CHILD, __file__, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def child(what: str, root: str, *words: str) -> None:
    if what == "die":
        run(Path(root), range(1, 2), KillableFiles(int(words[0]), for_real=True))
        raise AssertionError("alive")
    if what == "produce":
        with LogStore(root) as store:
            committer = Committer(store)
            for batch in range(int(words[1])):
                table = pa.table({"key": pa.array([b"k"] * 5), "value": [f"{words[0]} {batch} {n}" for n in range(5)]})
                append_table(committer, "orders", table, app=AppBatch(words[0], batch))
                if batch % 4 == 3:
                    committer.flush(store.topic("orders"))
    if what == "apply":
        with LogStore(root) as store:
            plan = read_plan(store.fs, store.layout.plan(words[0]), limits=store.limits)
            topic = store.topic("orders")
            done = [apply_partition(store, plan, topic, number).was_done for number in (0, 1)]
            print(json.dumps(done))


@pytest.mark.parametrize(
    "sort", ["staging .batches fsync", "ledger .json fsync", "logs .log pwrite", "state .tmp fsync"]
)
def test_a_killed_process_is_made_good(
    tmp_path: Path, begun: Path, undisturbed: tuple[dict[str, bytes], list[tuple[str, str]]], sort: str, seed: int
) -> None:
    wanted, steps = undisturbed
    place, suffix, kind = sort.split()
    found = [
        number
        for number, (each, path) in enumerate(steps, 1)
        if each == kind and path.startswith(place) and path.endswith(suffix)
    ]
    root = tmp_path / "store"
    shutil.copytree(begun, root)
    process = start("die", root, random.Random(seed).choice(found))
    assert process.wait(100) == -signal.SIGKILL
    check(root, wanted)


# --- applying twice, at once, late ------------------------------------------------------------------------------------


def hold_plan(root: Path) -> tuple[LogStore, Committer, Plan, Topic]:
    """A store with a committed plan of 600 rows that nobody has applied."""
    store = LogStore(root, create=True, clock=ManualClock(NOW_MS), lock_wait_ms=5000)
    topic = store.create_topic("orders", partitions=2, configs={"segment.bytes": 2000})
    committer = Committer(store)
    append_table(committer, "orders", rows(0, "orders", 50))
    held: list[Plan] = []

    def keep(plan: Plan, topic: Topic, numbers: object) -> None:
        held.append(plan)
        raise OSError("not now")

    target = committer.target("orders")
    staging = Staging(store)
    writer = StagedWriter(staging.output(), options=EncodeOptions(batch_size=300), now_ms=NOW_MS)
    writer.write(target, rows(1, "orders", 600))
    with pytest.raises(DuramenError, match="not now"):
        committer.commit(staging, [writer.finish()], {target.id: target}, apply_many=keep)
    return store, committer, held[0], topic


def logs_of(store: LogStore) -> dict[str, bytes]:
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in sorted(Path(store.layout.logs).glob("orders-*/*"))
        if path.is_file()
    }


def test_applying_twice_changes_nothing_the_second_time(tmp_path: Path) -> None:
    store, _, plan, topic = hold_plan(tmp_path / "store")
    with store:
        first = [apply_partition(store, plan, topic, number) for number in (0, 1)]
        before = logs_of(store)
        second = [apply_partition(store, plan, topic, number) for number in (0, 1)]
        assert logs_of(store) == before
        assert [each.was_done for each in first + second] == [False, False, True, True]
        assert [each.end_offset for each in first] == [each.end_offset for each in second]


def test_a_late_twin_finds_the_work_done_after_others_went_on(tmp_path: Path, read_all: ReadAll) -> None:
    store, committer, plan, topic = hold_plan(tmp_path / "store")
    with store:
        append_table(committer, "orders", rows(2, "orders", 40))  # settles the held plan first
        before = logs_of(store)
        assert all(apply_partition(store, plan, topic, number).was_done for number in (0, 1))
        committer.flush(topic)
        store.forget_tail(topic, 0)
        assert all(apply_partition(store, plan, topic, number).was_done for number in (0, 1))
        after = logs_of(store)
        assert {name: data for name, data in after.items() if name.endswith(".log")} == {
            name: data for name, data in before.items() if name.endswith(".log")
        }
        assert sum(map(len, read_all(store, "orders").values())) == 690
        store.delete_topic("orders")
        with pytest.raises(DuramenError, match="no topic is called"):
            apply_partition(store, plan, topic, 0)
        assert list(Path(store.layout.logs).glob("orders-*")) == []


def test_two_processes_apply_one_plan_at_once(tmp_path: Path, read_all: ReadAll) -> None:
    store, committer, plan, topic = hold_plan(tmp_path / "store")
    twins = [start("apply", store.path, plan.plan_id) for _ in range(2)]
    assert [twin.wait(100) for twin in twins] == [0, 0]
    with store:
        committer.settle_topic(topic)
        found = read_all(store, "orders")
        assert sum(map(len, found.values())) == 650
        for records in found.values():
            assert [record.offset for record in records] == list(range(len(records)))
            assert len({record.value for record in records}) == len(records)


def test_two_processes_append_to_one_topic_at_once(tmp_path: Path, read_all: ReadAll) -> None:
    count = 60 if SOAK else 12
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("orders", configs={"segment.bytes": 3000})
        writers = [start("produce", store.path, name, count) for name in ("a", "b")]
        assert [writer.wait(110) for writer in writers] == [0, 0]
        records = read_all(store, "orders")[0]
        assert [record.offset for record in records] == list(range(2 * 5 * count))
        for name in ("a", "b"):
            mine = [
                record.value.decode() for record in records if record.value and record.value.startswith(name.encode())
            ]
            assert mine == [f"{name} {batch} {n}" for batch in range(count) for n in range(5)]
        committer = Committer(store)
        committer.flush(store.topic("orders"))
        assert committer.sweep() == []
        assert os.listdir(store.layout.staging) == []
