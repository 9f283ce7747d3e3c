"""Several hosts on one store: a log that another host appended to is no power cut, and no host's memory is trusted with
what it did not sync.

`SharedDisk` is a file server with several clients. All of them see every write at once; when a client goes down, what
it wrote and did not sync is gone, whoever else synced the file.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from logstore.commit import redo
from logstore.commit.apply import apply_partitions
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan import Plan
from logstore.commit.plan_folder import Staging
from logstore.commit.produce import table_of
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.directory import tails
from logstore.errors import AppendUnfinished
from logstore.files import File, OsFile, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic
from logstore.upkeep.recovery import recover

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
NOW_MS = 1_700_000_000_000
ROWS = 40


class _Shared:
    """One file: what the server has on disk, and of each byte whose memory it is in; 0: of none, it is on disk."""

    def __init__(self, fd: int) -> None:
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.durable = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
        self.owners = bytearray(len(self.durable))
        self.size = len(self.durable)  # on disk

    def resize(self, size: int) -> None:
        for each in (self.durable, self.owners):
            each[size:] = bytes(max(0, size - len(each)))
        self.size = min(self.size, size)

    def lose(self, host: int) -> int:
        gone = [at for at, owner in enumerate(self.owners) if owner == host]
        for at in gone:
            os.pwrite(self.fd, self.durable[at : at + 1], at)
            self.owners[at] = 0
        if gone:
            others = max((at + 1 for at, owner in enumerate(self.owners) if owner), default=0)
            self.resize(max(self.size, others))
            os.ftruncate(self.fd, len(self.owners))
        return len(gone)


class SharedDisk:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._files: dict[int, _Shared] = {}  # by inode

    def known(self, fd: int) -> _Shared:
        inode = os.fstat(fd).st_ino
        if inode not in self._files:
            self._files[inode] = _Shared(fd)
        return self._files[inode]

    def written(self, fd: int, position: int, size: int, host: int) -> None:
        file = self.known(fd)
        file.resize(max(len(file.owners), position + size))
        file.owners[position : position + size] = bytes([host]) * size

    def synced(self, fd: int, host: int) -> None:
        file = self.known(fd)
        now = os.pread(fd, len(file.owners), 0)
        for at, owner in enumerate(file.owners):
            if owner == host:
                file.durable[at], file.owners[at] = now[at], 0
                file.size = max(file.size, at + 1)

    def lose(self, host: int) -> int:
        """The host goes down; returns how many bytes went with it."""
        return sum(file.lose(host) for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.fd)


class _HostFile(OsFile):
    __slots__ = ("_disk", "_host")

    def __init__(self, fd: int, path: str, disk: SharedDisk, host: int) -> None:
        super().__init__(fd, path)
        self._disk, self._host = disk, host

    def pwrite(self, data: object, position: int) -> None:
        with self._disk.lock:
            self._disk.known(self.fileno())
            super().pwrite(data, position)  # type: ignore[arg-type]
            self._disk.written(self.fileno(), position, memoryview(data).nbytes, self._host)  # type: ignore[arg-type]

    def truncate(self, size: int) -> None:
        with self._disk.lock:
            self._disk.known(self.fileno())
            super().truncate(size)
            self._disk.known(self.fileno()).resize(size)

    def fsync(self) -> None:
        with self._disk.lock:
            self._disk.synced(self.fileno(), self._host)


class HostFiles(OsFileSystem):
    """The shared disk as one host sees it."""

    def __init__(self, disk: SharedDisk, host: int) -> None:
        self.disk, self.host = disk, host

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        file = super().open(path, writable=writable, create=create, exclusive=exclusive)
        return _HostFile(os.dup(file.fileno()), path, self.disk, self.host)


class Hosts:
    """Hosts by name; `at` makes this process run on one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.disk = SharedDisk()
        self._boots: dict[str, int] = {}
        self._here = "driver"
        patch.setattr(tails, "boot_id", self.boot)

    def boot(self) -> str:
        return f"{self._here}-{self._boots.get(self._here, 0)}"

    def files(self) -> HostFiles:
        return HostFiles(self.disk, 1 + sum(self._here.encode()) % 255)

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[HostFiles]:
        before, self._here = self._here, name
        try:
            yield self.files()
        finally:
            self._here = before

    def crash(self, name: str) -> int:
        with self.at(name) as files:
            self._boots[name] = self._boots.get(name, 0) + 1
            return self.disk.lose(files.host)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    made = Hosts(monkeypatch)
    yield made
    made.disk.close()


class Checks:
    """Counts logs that are opened whole, and checked from their recovery point on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        opens = OpenStore.open_log

        def opened(*given: object, **named: object) -> object:
            self.count += 1
            return opens(*given, **named)  # type: ignore[arg-type]

        patch.setattr(OpenStore, "open_log", opened)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


def make(root: Path, hosts: Hosts, *, partitions: int = 3, segment_bytes: int = 1500) -> LogStore:
    store = LogStore(root, create=True, lock_wait_ms=2000, fs=hosts.files())
    configs = {"segment.bytes": segment_bytes, "index.interval.bytes": 200}
    store.create_topic("orders", partitions=partitions, configs=configs)
    return store


def rows(batch: int) -> list[Record]:
    return [Record(b"k%d" % row, b"%d-%d" % (batch, row), NOW_MS + batch) for row in range(ROWS)]


ApplyMany = Callable[[Plan, Topic, Sequence[int]], None]


def write(committer: Committer, batch: int, apply_many: ApplyMany | None = None) -> bool:
    app = AppBatch("app", batch, "query")
    if committer.check_replay(app):
        committer.finish_replay(app)
        return False
    target = committer.target("orders")
    staging = Staging(committer.store)
    try:
        options = EncodeOptions(batch_size=250)
        writer = StagedWriter(staging.output(), options=options, now_ms=NOW_MS)
        writer.write(target, table_of(rows(batch)).to_batches()[0])
        committer.commit(staging, [writer.finish()], {target.id: target}, app=app, apply_many=apply_many)
    finally:
        staging.close()
    return True


def by_executor(hosts: Hosts, path: str, name: str = "executor") -> ApplyMany:
    """Appends as the sink's tasks do: on another host, by the driver's order."""
    driver = tails.boot_id()

    def apply_many(plan: Plan, topic: Topic, numbers: Sequence[int]) -> None:
        with hosts.at(name) as files, LogStore(path, fs=files, lock_wait_ms=2000) as store:
            apply_partitions(store, plan, topic, numbers, boot=driver)

    return apply_many


def check_all(store: LogStore, read_all: ReadAll, batches: int) -> None:
    found = read_all(store, "orders")
    for records in found.values():
        assert [record.offset for record in records] == list(range(len(records)))
    values = sorted(record.value or b"" for records in found.values() for record in records)
    assert values == sorted(b"%d-%d" % (batch, row) for batch in range(batches) for row in range(ROWS))


@pytest.mark.parametrize("partitions", [3, 24])  # the usual way, and the one for many partitions
def test_what_an_executor_of_another_host_appended_is_not_checked_for_nothing(
    tmp_path: Path, hosts: Hosts, checks: Checks, read_all: ReadAll, partitions: int
) -> None:
    with make(tmp_path / "store", hosts, partitions=partitions, segment_bytes=4000) as store:
        committer = Committer(store)
        for batch in range(8):
            where = by_executor(hosts, store.path, f"executor-{batch % 3}") if batch % 4 else None
            write(committer, batch, where)
        committer.flush(store.topic("orders"))
        assert checks.count == 0
        assert os.listdir(store.layout.staging) == []
        check_all(store, read_all, 8)


@pytest.mark.parametrize("partitions", [3, 24])
def test_an_executor_syncs_what_it_appended_before_it_reports(
    tmp_path: Path, hosts: Hosts, checks: Checks, read_all: ReadAll, partitions: int
) -> None:
    with make(tmp_path / "store", hosts, partitions=partitions) as store:
        committer = Committer(store)
        for batch in range(6):
            write(committer, batch, by_executor(hosts, store.path) if batch % 3 else None)
            hosts.crash("executor")
            check_all(store, read_all, batch + 1)
        assert checks.count == 0, "nothing was missing"
        committer.flush(store.topic("orders"))
        assert hosts.crash("executor") == 0
        check_all(store, read_all, 6)


def test_on_the_drivers_own_host_a_task_leaves_the_sync_to_the_flush(tmp_path: Path, hosts: Hosts) -> None:
    with make(tmp_path / "store", hosts) as store:
        write(Committer(store), 0, by_executor(hosts, store.path, "driver"))
        assert hosts.crash("driver") > 0


@pytest.mark.parametrize("partitions", [3, 24])
def test_when_the_driver_goes_down_its_own_bytes_come_back_from_staging(
    tmp_path: Path, hosts: Hosts, read_all: ReadAll, partitions: int, seed: int
) -> None:
    """An executor's synced bytes lie behind the driver's unsynced ones; the slot must not vouch for the driver's."""
    rng = random.Random(seed)
    batches = 0
    with make(tmp_path / "store", hosts, partitions=partitions) as store:
        for _ in range(4):
            committer = Committer(store)
            for _ in range(rng.randrange(1, 4)):
                assert write(committer, batches, by_executor(hosts, store.path) if rng.random() < 0.5 else None)
                batches += 1
            if rng.random() < 0.3:
                committer.flush(store.topic("orders"))
            for name in rng.sample(["driver", "executor"], rng.randrange(1, 3)):
                hosts.crash(name)
            if rng.random() < 0.5:
                with hosts.at("another"), LogStore(store.path, fs=hosts.files(), lock_wait_ms=2000) as other:
                    Committer(other).settle_topic(other.topic("orders"))
                    check_all(other, read_all, batches)
            assert not write(Committer(store), batches - 1)
            Committer(store).settle_topic(store.topic("orders"))
            check_all(store, read_all, batches)


@pytest.mark.parametrize("by", ["flush", "recover"])
def test_who_takes_over_from_another_host_makes_its_bytes_durable(
    tmp_path: Path, hosts: Hosts, read_all: ReadAll, by: str
) -> None:
    """The first host wrote and did not sync. The second one's fsync is not for the first one's memory."""
    with make(tmp_path / "store", hosts) as store:
        committer = Committer(store)
        for batch in range(3):
            write(committer, batch)
        with hosts.at("second") as files, LogStore(store.path, fs=files, lock_wait_ms=2000) as other:
            if by == "recover":
                recover(other, other.topic("orders"))
            second = Committer(other)
            write(second, 3)
            second.flush(other.topic("orders"))
            assert os.listdir(other.layout.staging) == [], "nothing could bring the batches back"
            hosts.crash("driver")
            check_all(other, read_all, 4)
        assert write(Committer(store), 4)
        hosts.crash("second")
        check_all(store, read_all, 5)


def test_a_driver_goes_on_without_a_check_behind_another_hosts_flush(
    tmp_path: Path, hosts: Hosts, checks: Checks, read_all: ReadAll
) -> None:
    """A daemon on another host, for instance."""
    with make(tmp_path / "store", hosts) as store:
        committer = Committer(store)
        for batch in range(4):
            write(committer, batch)
            with hosts.at("daemon") as files, LogStore(store.path, fs=files, lock_wait_ms=2000) as other:
                Committer(other).flush(other.topic("orders"))
        assert checks.count == 4 * 3, "by the daemon, of each partition, each time what was new"
        write(committer, 4)
        assert checks.count == 4 * 3
        check_all(store, read_all, 5)


def test_a_late_task_does_not_cut_what_the_next_driver_appended(
    tmp_path: Path, hosts: Hosts, checks: Checks, read_all: ReadAll
) -> None:
    """Its driver is gone, and another host's has finished its plan and appends the next one."""
    held: list[Callable[[], None]] = []

    def hold(plan: Plan, topic: Topic, numbers: Sequence[int]) -> None:
        held.append(lambda: by_first(plan, topic, numbers))
        raise OSError("not now")

    with make(tmp_path / "store", hosts) as store:
        by_first = by_executor(hosts, store.path)
        with pytest.raises(AppendUnfinished):
            write(Committer(store), 0, hold)
        with hosts.at("second") as files, LogStore(store.path, fs=files, lock_wait_ms=2000) as other:
            second = Committer(other)
            assert not write(second, 0)

            def beside(plan: Plan, topic: Topic, numbers: Sequence[int]) -> None:
                apply_partitions(other, plan, topic, numbers)
                held[0]()

            checks.count = 0
            assert write(second, 1, beside)
            assert checks.count == 0
            check_all(other, read_all, 2)


TASK = """
import sys
from streaming.tasks import apply_plan
apply_plan(sys.argv[1], sys.argv[2], "orders", [int(each) for each in sys.argv[4:]], sys.argv[3])
"""


def test_a_process_of_another_host_appends_in_the_drivers_name(
    tmp_path: Path, hosts: Hosts, checks: Checks, read_all: ReadAll
) -> None:
    """A real one: this process's boot id is made up, the other one's is the machine's."""
    with make(tmp_path / "store", hosts) as store:

        def apply_many(plan: Plan, topic: Topic, numbers: Sequence[int]) -> None:
            given = [store.path, plan.plan_id, tails.boot_id(), *map(str, numbers)]
            subprocess.run([sys.executable, "-c", TASK, *given], check=True, timeout=120)

        committer = Committer(store)
        for batch in range(3):
            write(committer, batch, apply_many if batch else None)
        topic = store.topic("orders")
        with store.tails(topic) as slots:
            assert slots.not_of_this_boot(range(topic.partitions)) == []
        assert checks.count == 0
        check_all(store, read_all, 3)


def test_redo_is_asked_for_by_the_slots_alone(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, read_all: ReadAll
) -> None:
    """Where the driver itself went down, its logs are checked once, and not again by each commit after that."""
    restored: list[int] = []
    restore = redo.restore_partition

    def counted(store: OpenStore, topic: Topic, number: int, *rest: object) -> None:
        restored.append(number)
        restore(store, topic, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("logstore.commit.settling.restore_partition", counted)
    with make(tmp_path / "store", hosts) as store:
        write(Committer(store), 0, by_executor(hosts, store.path))
        assert restored == []
        hosts.crash("driver")
        for batch in range(1, 4):
            write(Committer(store), batch, by_executor(hosts, store.path))
        assert sorted(restored) == [0, 1, 2]
        check_all(store, read_all, 4)
