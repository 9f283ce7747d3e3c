"""Kafka's four checkpoint files lie in every store, and every run leaves them as the state is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compaction_job import compact, retention
from compaction_job.scheduler import Scheduler
from logstore.directory.checkpoint import read_offset_checkpoint
from logstore.directory.state import read_state, write_state
from logstore.records.record import Record
from logstore.store import LogStore

FILES = (
    "recovery-point-offset-checkpoint",
    "replication-offset-checkpoint",
    "log-start-offset-checkpoint",
    "cleaner-offset-checkpoint",
)


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore(tmp_path / "store", create=True)


def entries(store: LogStore) -> dict[str, dict[str, int]]:
    return {
        name.split("-offset")[0]: {
            str(partition): offset
            for partition, offset in read_offset_checkpoint(store.fs, os.path.join(store.layout.logs, name)).items()
        }
        for name in FILES
    }


def fill(store: LogStore) -> None:
    now_ms = time.time_ns() // 1_000_000
    settings = {"segment.bytes": 1000, "min.cleanable.dirty.ratio": 0}
    store.create_topic("accounts", configs=settings | {"cleanup.policy": "compact"})
    store.create_topic("events", configs=settings | {"retention.bytes": 1000})
    for topic in ("accounts", "events"):
        for _ in range(5):
            store.append(topic, [Record(b"k%d" % at, b"v" * 30, now_ms) for at in range(20)])


def test_a_new_store_has_all_four(store: LogStore) -> None:
    assert entries(store) == {"recovery-point": {}, "replication": {}, "log-start": {}, "cleaner": {}}


def by_python(store: LogStore) -> None:
    assert not compact(store).problems


def by_the_daemon(store: LogStore) -> None:
    daemon = Scheduler(store.path)
    assert daemon.run_once()
    daemon.stop()


def by_the_retention_job(store: LogStore) -> None:
    compact(store, retention=False)
    for name in FILES:
        os.unlink(os.path.join(store.layout.logs, name))
    assert retention.main(["--store", store.path]) == 0


@pytest.mark.parametrize("run", [by_python, by_the_daemon, by_the_retention_job], ids=lambda run: run.__name__)
def test_every_run_leaves_them_as_the_state_is(store: LogStore, run: Callable[[LogStore], None]) -> None:
    fill(store)
    run(store)
    found = entries(store)
    assert found["replication"] == {"accounts-0": 100, "events-0": 100}
    assert found["recovery-point"] == {"accounts-0": 100, "events-0": 100}
    state = store.partition_state(store.topic("accounts"), 0)
    assert found["cleaner"] == {"accounts-0": state.first_dirty_offset}
    assert state.first_dirty_offset > 0
    # A log start above the first segment's base only: retention deletes whole segments.
    assert found["log-start"] == {}
    assert store.partition_state(store.topic("events"), 0).log_start_offset > 0


def test_a_dry_run_leaves_them_alone(store: LogStore) -> None:
    fill(store)
    compact(store, dry_run=True)
    assert entries(store)["replication"] == {}


def test_a_damaged_partition_does_not_keep_the_others_out(store: LogStore) -> None:
    fill(store)
    path = store.layout.partition_state(store.topic("events").id, 0)
    Path(path).write_bytes(b"nonsense")
    store.project_checkpoints()
    assert set(entries(store)["replication"]) == {"accounts-0"}


def test_ten_thousand_partitions_take_a_moment(store: LogStore) -> None:
    """Each costs one small file; the topic's ends are read once."""
    topic = store.create_topic("many", partitions=1)
    state = read_state(store.fs, store.layout.partition_state(topic.id, 0))
    assert state is not None
    reads: list[str] = []
    plain = type(store).ends

    class Counted(LogStore):
        def ends(self, topic: object) -> object:  # type: ignore[override]
            reads.append("ends")
            return plain(self, topic)  # type: ignore[arg-type]

    store.create_topic("wide", partitions=40)
    for number in range(40):
        write_state(store.fs, store.layout.partition_state(store.topic("wide").id, number), state)
    with Counted(store.path) as counted:
        counted.project_checkpoints()
    assert len(reads) == 2
    assert len(entries(store)["replication"]) == 41
