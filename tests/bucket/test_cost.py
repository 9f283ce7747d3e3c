"""What `duramen cost` counts by is what the store asks for: requests of each step, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from duramen.commands import cost
from duramen.commands.cost import Requests
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.commit.apps import AppBatch
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.retrying import RetryingObjects
from logstore.records.record import Record

PARTITIONS = 8
RECORDS = [Record(b"%d" % number, b"v") for number in range(20 * PARTITIONS)]
_WRITES = ("create", "put", "replace", "list")
_READS = ("get", "head", "ranges")


class Counted:
    """A store that several have open; each counts its own requests."""

    def __init__(self) -> None:
        self._raw = MemoryObjects()
        self.writer = self.opened(create=True)
        self.writer.create_topic("t", partitions=PARTITIONS, configs={"cleanup.policy": "compact"})
        self._batches = 0
        self.commit(3)  # definitions and the first summary are behind us

    def opened(self, *, create: bool = False) -> BucketStore:
        return BucketStore("memory://cost", create=create, objects=RetryingObjects(CountedObjects(self._raw)))

    def commit(self, times: int = 1) -> None:
        for _ in range(times):
            self.writer.append("t", RECORDS, app=AppBatch("app", self._batches, "query"))
            self._batches += 1


def took(store: BucketStore, work: Callable[[], object], *, times: int = 1) -> Requests:
    before = Counter(store.requests)
    work()
    made = store.requests - before
    return Requests(*(sum(made[kind] for kind in kinds) / times for kinds in (_WRITES, _READS)))


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_commit(counted: Counted) -> None:
    one_task = Requests(writes=1)
    assert took(counted.writer, lambda: counted.commit(8), times=8) == cost.COMMIT + one_task


def test_a_reader(counted: Counted) -> None:
    reader = counted.opened()
    position = None

    def read() -> None:
        nonlocal position
        for followed in reader.follow("t", position, wait=False):
            position = followed.position

    read()
    assert took(reader, read) == cost.POLL
    counted.commit()
    one_task = Requests(reads=1)
    assert took(reader, read) == cost.READING + one_task


def test_maintenance(counted: Counted) -> None:
    upkeep = counted.opened()

    def run(**rules: bool) -> Requests:
        given = MaintenanceRules(
            seal=SealRules(force=rules.get("seal", False)),
            compact=rules.get("compact", False),
            force_compaction=True,
            sweep=False,
        )
        return took(upkeep, lambda: maintain(upkeep, given))

    def check(found: Requests, said: Requests) -> None:
        """What earlier runs left to be freed, and a summary now and then, are not counted."""
        assert 0 <= found.writes - said.writes <= 1
        assert 0 <= found.reads - said.reads <= 3

    run(seal=True)
    idle = cost.RUN + cost.LOOK.times(PARTITIONS)
    check(run(), idle)
    counted.commit()
    commit_plan_object = Requests(reads=3)
    check(run(seal=True), idle + cost.SEAL.times(PARTITIONS) + commit_plan_object)
    sources = 2
    check(run(compact=True), idle + (cost.COMPACTION + cost.FETCH.times(sources)).times(PARTITIONS))
