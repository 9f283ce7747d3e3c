"""The job in one process: what is due, in which order, what is left behind when something fails, and the receipts."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from compaction_job import compact, plan
from logstore.clock import ManualClock
from logstore.commit.committer import Committer
from logstore.compaction.receipts import Skip
from logstore.errors import NotCompacted, UnknownTopic
from logstore.ledger import Ledger
from logstore.store import LogStore

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> LogStore:
    return LogStore(tmp_path / "store", create=True, clock=clock)


def topic(store: LogStore, name: str = "t", *, partitions: int = 1, **configs: Any) -> None:
    settings = {"cleanup.policy": "compact", "segment.bytes": 2000, "file.delete.delay.ms": 0}
    settings.update({key.replace("_", "."): value for key, value in configs.items()})
    store.create_topic(name, partitions=partitions, configs=settings)


def fill(
    store: LogStore,
    rng: random.Random,
    name: str = "t",
    *,
    batches: int = 10,
    keys: int = 20,
    at_ms: int = NOW_MS,
    tombstones: float = 0.1,
) -> dict[bytes, bytes | None]:
    written: dict[bytes, bytes | None] = {}
    for _ in range(batches):
        rows = [
            (b"k%d" % rng.randrange(keys), None if rng.random() < tombstones else rng.randbytes(rng.randrange(40)))
            for _ in range(40)
        ]
        written.update(rows)
        table = pa.table(
            {
                "key": pa.array([key for key, _ in rows], pa.binary()),
                "value": pa.array([value for _, value in rows], pa.binary()),
                "timestamp": pa.array([at_ms] * len(rows), pa.int64()),
            }
        )
        store.append(name, table)
    return written


def state_of(store: LogStore, name: str = "t") -> dict[bytes | None, bytes]:
    found: dict[bytes | None, bytes | None] = {}
    chosen = store.topic(name)
    for number in range(chosen.partitions):
        reader = store.reader(chosen, number)
        found.update({r.key: r.value for r in reader.records(reader.log_start_offset())})
    return {key: value for key, value in found.items() if value is not None}


def live(written: dict[bytes, bytes | None]) -> dict[bytes, bytes]:
    return {key: value for key, value in written.items() if value is not None}


def ledger(store: LogStore) -> Ledger:
    return Ledger(store.layout.ledger)


def test_a_run_leaves_a_receipt_and_true_counts(store: LogStore) -> None:
    topic(store, partitions=2)
    written = fill(store, random.Random(1), batches=20)
    report = compact(store)
    assert [run.result for run in report.runs] == ["done", "done"]
    assert state_of(store) == live(written)
    rows = [row for row in ledger(store).runs() if row.kind == "compaction"]
    assert {(row.partition, row.result, row.engine) for row in rows} == {(0, "done", "local"), (1, "done", "local")}
    for row, run in zip(
        sorted(rows, key=lambda r: r.partition or 0), sorted(report.runs, key=lambda r: r.plan.partition), strict=True
    ):
        assert run.report is not None
        assert row.removed == run.report.removed
        assert (row.before_bytes, row.after_bytes) == (run.report.before_bytes, run.report.after_bytes)
        assert row.before_bytes > row.after_bytes > 0
        details = json.loads(row.details)
        assert details["map_keys"] == run.report.map_keys
        assert row.workers
    chosen = store.topic("t")
    for number in range(2):
        counted = ledger(store).segments(chosen.id, number)
        state = store.partition_state(chosen, number)
        records = list(store.reader(chosen, number).records(0))
        for row in counted:
            end = min((s.base_offset for s in state.segments if s.base_offset > row.base_offset), default=1 << 60)
            mine = [r for r in records if row.base_offset <= r.offset < end]
            assert row.records == len(mine)
            assert row.keys == len({r.key for r in mine})
            assert row.tombstones == sum(r.value is None for r in mine)
        assert {row.base_offset for row in counted} == {s.base_offset for s in state.segments[:-1]}


def test_a_dry_run_and_a_plan_change_nothing(store: LogStore, tmp_path: Path) -> None:
    topic(store)
    fill(store, random.Random(2))
    before = _everything(tmp_path)
    report = compact(store, dry_run=True)
    assert [run.reason for run in report.runs] == ["dry run; " + report.plans[0].why]
    assert [run.skip for run in report.runs] == [Skip.DRY_RUN]
    ((found, guess),) = plan(store)
    assert found.is_due
    assert guess is not None
    assert sum(guess.removed.values()) > 0
    assert _everything(tmp_path) == before


def _everything(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and "locks" not in p.parts
    }


def test_estimates_are_near_the_receipts(store: LogStore, seed: int) -> None:
    rng = random.Random(seed)
    near = 0
    for number in range(10):
        name = f"t{number}"
        topic(store, name, segment_bytes=rng.choice([1000, 5000, 20000]))
        for _ in range(rng.randrange(1, 3)):
            fill(
                store,
                rng,
                name,
                batches=rng.randrange(5, 25),
                keys=rng.choice([3, 30, 300, 3000]),
                tombstones=rng.choice([0, 0.5]),
            )
            compact(store, topics=[name])
        fill(store, rng, name, batches=rng.randrange(3, 15), keys=rng.choice([3, 30, 300]))
        ((_, guess),) = plan(store, topics=[name], force=True)
        (run,) = compact(store, topics=[name], force=True).runs
        if run.report is None:
            near += guess is None
            continue
        assert guess is not None
        receipt = run.report.before_bytes - run.report.after_bytes
        removed = guess.before_bytes - guess.after_bytes
        near += abs(removed - receipt) <= 0.25 * max(receipt, 1) or abs(removed - receipt) < 500
    assert near >= 9


def test_what_if_another_ratio(store: LogStore) -> None:
    topic(store, min_cleanable_dirty_ratio=1.0)
    fill(store, random.Random(3))
    ((found, _),) = plan(store)
    assert not found.is_due
    ((found, guess),) = plan(store, config={"min.cleanable.dirty.ratio": 0.1})
    assert found.is_due
    assert guess is not None
    assert store.log_config(store.topic("t")).min_cleanable_dirty_ratio == 1.0


def test_a_failing_partition_is_set_aside_and_stops_nobody(store: LogStore, clock: ManualClock) -> None:
    topic(store, "bad", cleanup_policy="compact,delete", retention_ms=DAY_MS)
    topic(store, "good")
    rng = random.Random(4)
    written = fill(store, rng, "good")
    fill(store, rng, "bad", at_ms=NOW_MS - 2 * DAY_MS)
    fill(store, rng, "bad", at_ms=NOW_MS)
    Committer(store).flush(store.topic("bad"))  # what is staged would come back
    directory = store.layout.partition(store.topic("bad").partition(0))
    victim = sorted(Path(directory).glob("*.log"))[-3]
    data = bytearray(victim.read_bytes())
    data[80] ^= 1
    victim.write_bytes(data)
    report = compact(store)
    results = {run.plan.topic: run for run in report.runs}
    assert results["good"].result == "done"
    assert state_of(store, "good") == live(written)
    assert results["bad"].result == "failed"
    assert "checksum" in results["bad"].reason
    assert [each.partition.topic for each in report.retained] == ["bad"], "its own retention goes on"
    assert bytes(data) == victim.read_bytes(), "and it is left untouched"
    # set aside: not tried again before its time, and explained
    again = {run.plan.topic: run for run in compact(store).runs}
    assert again["bad"].result == "skipped"
    assert "set aside after 1 failures" in again["bad"].reason
    clock.advance(store.broker_config.duramen_cleaner_retry_ms + 1)
    third = {run.plan.topic: run for run in compact(store).runs}
    assert third["bad"].result == "failed"
    ((_, _), *_) = plan(store)
    aside = next(found.set_aside for found, _ in plan(store) if found.topic == "bad")
    assert aside is not None
    assert aside.failures == 2
    assert aside.retry_ms - aside.failed_ms == 2 * store.broker_config.duramen_cleaner_retry_ms
    data[80] ^= 1
    victim.write_bytes(data)
    clock.advance(DAY_MS)
    assert {run.plan.topic: run.result for run in compact(store).runs}["bad"] == "done"


def test_the_latest_by_max_lag_goes_first(store: LogStore, clock: ManualClock) -> None:
    topic(store, "dirty", min_cleanable_dirty_ratio=0.0)
    topic(store, "late", max_compaction_lag_ms=1000, min_cleanable_dirty_ratio=1.0, segment_ms=500)
    topic(store, "later", max_compaction_lag_ms=500, min_cleanable_dirty_ratio=1.0, segment_ms=500)
    rng = random.Random(5)
    for name in ("dirty", "late", "later"):
        fill(store, rng, name)
    clock.advance(5000)
    report = compact(store, threads=1)
    assert [run.plan.topic for run in report.runs] == ["later", "late", "dirty"]
    assert [run.plan.cleanable.late_ms for run in report.runs][:2] == [4500, 4000]
    rows = [json.loads(row.details)["late_ms"] for row in ledger(store).runs() if row.kind == "compaction"]
    assert rows == [4500, 4000, 0]


def test_an_idle_active_segment_that_is_due_is_rolled(store: LogStore, clock: ManualClock) -> None:
    topic(store, segment_bytes=1 << 20, segment_ms=DAY_MS)
    written = fill(store, random.Random(6))
    (run,) = compact(store).runs
    assert (run.result, run.rolled) == ("skipped", False)
    assert "active segment" in run.reason
    clock.advance(2 * DAY_MS)
    (run,) = compact(store).runs
    assert (run.result, run.rolled) == ("done", True)
    assert state_of(store) == live(written)
    assert run.report is not None
    assert run.report.removed["superseded"] > 300


def test_pause_resume_and_the_stores_switch(store: LogStore) -> None:
    topic(store)
    fill(store, random.Random(7))
    store.alter_topic("t", configs={"duramen.compaction.paused": True})
    (run,) = compact(store).runs
    assert (run.result, run.reason) == ("skipped", "paused; `duramen resume` lets it go on")
    store.alter_topic("t", unset=["duramen.compaction.paused"])
    (run,) = compact(store).runs
    assert run.result == "done"


def test_the_stores_switch_stops_scheduled_runs_only(tmp_path: Path) -> None:
    LogStore(tmp_path / "store", create=True).close()
    (tmp_path / "store" / "duramen.toml").write_text("log.cleaner.enable = false\n")
    store = LogStore(tmp_path / "store")
    topic(store)
    fill(store, random.Random(8))
    assert compact(store, scheduled=True).runs == []
    assert [run.result for run in compact(store).runs] == ["done"]


def test_names_that_do_not_fit(store: LogStore) -> None:
    topic(store, "events", cleanup_policy="delete")
    with pytest.raises(NotCompacted, match="events is not compacted"):
        compact(store, topics=["events"])
    with pytest.raises(UnknownTopic):
        compact(store, topics=["nobody"])


def test_the_same_airflow_run_changes_no_file(store: LogStore, tmp_path: Path) -> None:
    topic(store, partitions=2)
    fill(store, random.Random(9))
    compact(store, airflow_run_id="manual__1")
    before = _everything(tmp_path)
    report = compact(store, airflow_run_id="manual__1", force=True)
    assert {run.reason for run in report.runs} == {"done already under this Airflow run id"}
    assert {run["skip"] for run in report.as_dict()["runs"]} == {"done_before"}
    assert _everything(tmp_path) == before


def test_a_run_says_in_a_field_why_it_left_a_partition_out(store: LogStore) -> None:
    topic(store, partitions=2)
    fill(store, random.Random(12))
    assert {run.skip for run in compact(store, stopping=lambda: True).runs} == {Skip.STOPPING}
    with store.locks.maintenance(store.topic("t").id, 0, what="test"):
        skips = {run.plan.partition: run.skip for run in compact(store).runs}
    assert skips == {0: Skip.TAKEN, 1: None}
    assert {run.plan.partition: run.skip for run in compact(store).runs} == {0: None, 1: Skip.NOT_DUE}


def test_runs_that_were_killed_are_closed_and_swept(store: LogStore) -> None:
    from logstore.ledger import RunRow

    topic(store)
    written = fill(store, random.Random(10))
    chosen = store.topic("t")
    ledger(store).record_run(
        RunRow("killed-t-0", "compaction", chosen.id, "t", 0, "local", NOW_MS, result="running", reason="due")
    )
    folder = os.path.join(store.layout.staging, "0123456789abcdef0123456789abcdef-run")
    os.mkdir(folder)
    Path(folder, "00000000000000000000.log.cleaned").write_bytes(b"half")
    report = compact(store)
    assert report.abandoned == ["killed-t-0"]
    assert not os.path.exists(folder)
    assert [run.result for run in report.runs] == ["done"]
    rows = {row.run_id: row.result for row in ledger(store).runs()}
    assert rows["killed-t-0"] == "abandoned"
    assert state_of(store) == live(written)


def test_a_map_that_is_too_small_says_which_would_do(tmp_path: Path) -> None:
    LogStore(tmp_path / "store", create=True).close()
    (tmp_path / "store" / "duramen.toml").write_text(
        "log.cleaner.dedupe.buffer.size = 1200000\nlog.cleaner.io.buffer.load.factor = 0.001\n"
    )
    store = LogStore(tmp_path / "store")
    topic(store)
    written = fill(store, random.Random(11), keys=400, batches=30)
    ((_, guess),) = plan(store)
    assert guess is not None
    assert guess.map_full
    passes = 0
    while True:
        (run,) = compact(store, force=True, threads=1).runs
        assert run.report is not None
        assert state_of(store) == live(written)
        passes += 1
        if not run.report.map_full:
            break
        assert run.report.map_buffer_wanted is not None
        assert run.report.map_buffer_wanted > 1200000 * run.report.map_keys / 400
    assert passes > 2
