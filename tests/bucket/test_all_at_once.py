"""Writers, maintenance and a reader at once, in threads, over object storage that fails at random; then the oracle."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bucket.faulty import WRITES, Fault, FaultyObjects
from logstore.bucket.freeing import HOUR_MS
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.errors import CommitConflict, CommitUnknown, DuramenError, RetriableError
from logstore.objects.memory import MemoryObjects
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.records.record import Record

NOW_MS = 1_700_000_000_000
SEED = int(os.environ.get("DURAMEN_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
BATCHES = 200 if os.environ.get("DURAMEN_SOAK") else 25
RULES = MaintenanceRules(seal=SealRules(tail_commits=3), sweep=False, map_bytes=1 << 20)
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "delete.retention.ms": "3600000"}


class AtRandom(FaultyObjects):
    """A fault in about every thirtieth call."""

    def __init__(self, inner: MemoryObjects, seed: int) -> None:
        super().__init__(inner)
        self._rng = random.Random(seed)

    def _begin(self, name: str, key: str) -> Fault | None:
        if self._rng.random() < 1 / 30:
            kinds = WRITES if name in ("create", "replace", "put", "delete") else (Fault.BEFORE, Fault.BUSY)
            self.faults[len(self.calls)] = self._rng.choice(kinds)
        return super()._begin(name, key)


class Mix:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(NOW_MS)
        self.objects = MemoryObjects(self.clock)
        self.folder = folder
        self.done = threading.Event()
        self.errors: list[BaseException] = []
        self.acknowledged: dict[str, list[bytes]] = {"log": [], "state": []}
        self.faulty: list[AtRandom] = []
        store = self.store()
        store.create_topic("log", partitions=2, configs={"segment.bytes": "3000"})
        store.create_topic("state", partitions=2, configs=COMPACTED | {"segment.bytes": "3000"})

    def store(self, seed: int | None = None) -> BucketStore:
        objects = self.objects
        if seed is None:
            return BucketStore("memory://test", create=True, objects=objects, clock=self.clock)
        self.faulty.append(AtRandom(objects, seed))
        patience = Patience(deadline_s=10, first_wait_s=0.001, wait_s_max=0.01)
        return BucketStore("memory://test", objects=RetryingObjects(self.faulty[-1], patience), clock=self.clock)

    def write(self, writer: int) -> None:
        rng = random.Random(SEED + writer)
        store = self.store(SEED + writer)
        for number in range(BATCHES):
            topic = rng.choice(["log", "state"])
            values = [b"%d-%d-%d" % (writer, number, n) for n in range(rng.randrange(1, 30))]
            # Keys of a writer are its own, so that its last value is the last.
            records = [Record(b"%d-k%d" % (writer, n % 7), v, self.clock.now_ms()) for n, v in enumerate(values)]
            app = AppBatch(f"writer-{writer}", number, "query")
            while True:
                try:
                    store.append(topic, records, app=app)
                    break
                except (CommitUnknown, CommitConflict):
                    continue  # the app's batch number tells whether it was committed
            self.acknowledged[topic] += values

    def maintain(self, number: int) -> None:
        while not self.done.is_set():
            with contextlib.suppress(DuramenError):
                maintain(self.store(SEED * 7 + number), replace(RULES, folder=str(self.folder)))
            self.clock.advance(HOUR_MS)

    def read(self) -> None:
        """A cursor sees each record of the log once, in the order of the offsets."""
        store = self.store(SEED * 11)
        topic = store.topic("log")
        found: list[list[bytes]] = [[], []]
        while True:
            is_last = self.done.is_set()
            for number in range(2):
                with contextlib.suppress(RetriableError):
                    for record in store.reader("log", number).records(len(found[number])):
                        assert record.offset == len(found[number])
                        assert record.value is not None
                        found[number].append(record.value)
            if is_last and [len(each) for each in found] == list(store.ends(topic).high_watermarks):
                break
        assert sorted(found[0] + found[1]) == sorted(self.acknowledged["log"])

    def run(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
                self.done.set()

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread


def test_nothing_is_lost_doubled_or_brought_back(tmp_path: Path) -> None:
    print(f"DURAMEN_SEED={SEED}")
    mix = Mix(tmp_path)
    others = [mix.run(lambda n=n: mix.maintain(n)) for n in range(2)]  # type: ignore[misc]
    others.append(mix.run(mix.read))
    writers = [mix.run(lambda n=n: mix.write(n)) for n in range(2)]  # type: ignore[misc]
    for thread in writers:
        thread.join()
    mix.done.set()
    for thread in others:
        thread.join()
    for faulty in mix.faulty:
        faulty.land()
    assert not mix.errors, mix.errors
    store = mix.store()
    rules = replace(RULES, seal=SealRules(force=True), force_compaction=True, folder=str(tmp_path))
    for _ in range(3):
        done = maintain(store, rules)
        assert not done.failed, done.failed
        assert not done.lost_records
        mix.clock.advance(30 * HOUR_MS)
    wanted = {}
    for value in mix.acknowledged["state"]:
        writer, _, n = value.split(b"-")
        wanted[b"%s-k%d" % (writer, int(n) % 7)] = value
    found = {}
    for number in range(2):
        reader = store.reader("state", number)
        for record in reader.records(reader.log_start_offset()):
            assert record.key not in found, "compaction left two"
            found[record.key] = record.value
    assert found == wanted
    log = [r.value for number in range(2) for r in store.reader("log", number).records(0)]
    assert sorted(log) == sorted(mix.acknowledged["log"])
