"""A topic deleted and created again under writers, readers and sweeps: each sees the old one or the new one, never a
mix, or gets a typed error. Every record says for which topic id it was written.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from compaction_job.job import compact
from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.errors import (
    CommitConflict,
    HistoryCompacted,
    LockHeld,
    NotCompacted,
    OffsetOutOfRange,
    TopicChanged,
    TopicExists,
    UnknownTopic,
)
from logstore.records.record import Record
from logstore.restore.lookup import latest_of_key
from logstore.restore.restore import plan_restore, restore
from logstore.store import LogStore

SECONDS = 300 if os.environ.get("DURAMEN_SOAK") == "1" else 5
#: what a topic that goes away may answer to whom
GONE = (
    UnknownTopic,
    TopicChanged,
    TopicExists,
    OffsetOutOfRange,
    LockHeld,
    CommitConflict,
    HistoryCompacted,
    NotCompacted,
)
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": 2000, "min.cleanable.dirty.ratio": 0.01}


class Trial:
    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.over = threading.Event()
        self.mistakes: list[str] = []
        self.acknowledged: dict[str, list[bytes]] = {}
        self.did: Counter[str] = Counter()

    def play(self, name: str, act: Callable[[LogStore, random.Random], None]) -> None:
        rng = random.Random(f"{self.seed}/{name}")
        with LogStore(self.root) as store:
            while not self.over.is_set() and not self.mistakes:
                try:
                    act(store, rng)
                    self.did[name] += 1
                except GONE as error:
                    self.did[f"{name}: {type(error).__name__}"] += 1
                except BaseException:
                    self.mistakes.append(f"{name}: {traceback.format_exc()}")
                time.sleep(rng.uniform(0, 0.02))

    def write(self, store: LogStore, rng: random.Random) -> None:
        committer = Committer(store)
        target = committer.target("t")
        values = [f"{target.id}/{rng.getrandbits(60)}".encode() for _ in range(rng.randrange(1, 20))]
        rows = pa.record_batch({"key": pa.array(values, pa.binary()), "value": pa.array(values, pa.binary())})
        staging = Staging(store)
        try:
            writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=store.clock.now_ms())
            writer.write(target, rows)
            committer.commit(staging, [writer.finish()], {target.id: target})
        finally:
            staging.close()
        self.acknowledged.setdefault(target.id, []).extend(values)
        if rng.random() < 0.3:
            committer.flush(store.topic("t"))

    def read(self, store: LogStore, rng: random.Random) -> None:
        topic = store.topic("t")
        for number in range(topic.partitions):
            reader = store.reader(topic, number)
            for record in reader.records(reader.log_start_offset(), store.high_watermark(topic, number)):
                self.expect(topic.id, record.value)

    def look_up(self, store: LogStore, rng: random.Random) -> None:
        topic = store.topic("t")
        known = self.acknowledged.get(topic.id)
        if not known:
            return
        key = rng.choice(known)
        found = latest_of_key(store, topic, key)
        if found is None:
            store.check_exists(topic)  # else it is gone, and the answer is right
            self.mistakes.append(f"{key!r} is acknowledged and not found")
        else:
            self.expect(topic.id, found.record.value)

    def restore(self, store: LogStore, rng: random.Random) -> None:
        plan = plan_restore(store, "t")
        for batch in restore(store, plan):
            for value in batch.column("value").to_pylist():
                self.expect(plan.topic_id, value)

    def sweep(self, store: LogStore, rng: random.Random) -> None:
        store.sweep()
        Committer(store).sweep()
        compact(store, force=True, roll_active=rng.random() < 0.5)

    def recreate(self, store: LogStore, rng: random.Random) -> None:
        time.sleep(rng.uniform(0, 0.3))
        with contextlib.suppress(UnknownTopic):
            store.delete_topic("t")
        time.sleep(rng.choice((0, rng.uniform(0, 0.05))))
        store.create_topic("t", partitions=rng.randrange(1, 4), configs=CONFIGS)

    def expect(self, topic_id: str, value: bytes | None) -> None:
        if (value or b"").partition(b"/")[0].decode() != topic_id:
            self.mistakes.append(f"a reader of {topic_id} got {value!r}")


@pytest.mark.timeout(SECONDS * 3 + 120)
def test_nobody_sees_a_mix_of_a_topic_and_its_successor(tmp_path: Path, seed: int) -> None:
    trial = Trial(tmp_path / "store", seed)
    with LogStore(trial.root, create=True) as store:
        store.create_topic("t", configs=CONFIGS)
    acts = [trial.write, trial.read, trial.look_up, trial.restore, trial.sweep, trial.recreate]
    threads = [threading.Thread(target=trial.play, args=(act.__name__, act)) for act in acts]
    for thread in threads:
        thread.start()
    trial.over.wait(SECONDS)
    until = time.monotonic() + 60  # on a busy machine little happens in a few seconds
    while time.monotonic() < until and not trial.mistakes and min(trial.did["write"], trial.did["recreate"]) < 1:
        trial.over.wait(0.2)
    trial.over.set()
    for thread in threads:
        thread.join()
    assert not trial.mistakes, "\n".join(trial.mistakes)
    print(dict(trial.did))
    assert trial.did["recreate"]
    assert trial.did["write"]
    with LogStore(trial.root) as store:
        with contextlib.suppress(TopicExists):
            store.create_topic("t", configs=CONFIGS)
        topic = store.topic("t")
        Committer(store).settle_topic(topic)
        found: list[bytes | None] = []
        for number in range(topic.partitions):
            reader = store.reader(topic, number)
            found += [record.value for record in reader.records(0, store.high_watermark(topic, number))]
        assert sorted(map(str, found)) == sorted(map(str, trial.acknowledged.get(topic.id, [])))
        store.sweep()
        assert os.listdir(store.layout.state) == [topic.id]


def test_a_reader_of_a_deleted_topic_does_not_take_its_successor_for_damage(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        before = store.create_topic("t")
        store.append("t", [Record(b"k", b"v")])
        store.delete_topic("t")
        store.create_topic("t")
        assert store.high_watermark(before, 0) == 0
        with pytest.raises(UnknownTopic):
            list(store.reader(before, 0).records(0))
