"""One face for the maintenance of both kinds: what the job, the daemon and the steps of the DAGs do with a bucket."""

from __future__ import annotations

import contextlib
import json
import random
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucket.faulty import WRITES, Fault, FaultyObjects
from bucket.small_store import all_keys
from compaction_job import compact, explain, plan
from compaction_job import outcomes as outcomes_step
from compaction_job import planning as planning_step
from compaction_job import retention as retention_step
from compaction_job.job import Progress
from compaction_job.metrics import StoreCollector
from compaction_job.scheduler import Scheduler
from duramen.cli import run as run_command
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.maintenance import BucketMaintenance
from logstore.bucket.manifest import Manifest, decode_manifest, encode_manifest
from logstore.bucket.receipts import Receipts
from logstore.bucket.replacing import note_run
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.compaction.failures import KIND
from logstore.compaction.maintenance import Job
from logstore.errors import DuramenError, InvalidConfig, NotCompacted, UnknownConfig, UnknownTopic
from logstore.ledger.receipts import KEPT_EACH, KEPT_ERASING_EACH
from logstore.ledger.rows import DONE, FAILED, RunRow
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.records.record import Record
from logstore.store import LogStore

NOW_MS = 1_700_000_000_000
QUICK = Patience(deadline_s=5, first_wait_s=0.001, sleep=lambda _: None, monotonic=lambda: 0.0)
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": 2000, "min.cleanable.dirty.ratio": 0.3}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def store(clock: ManualClock) -> BucketStore:
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    store.create_topic("orders", partitions=2, configs=CONFIGS)
    return store


def fill(store: Any, *, turns: int = 8, seed: int = 1, topic: str = "orders") -> None:
    rng = random.Random(seed)
    for _ in range(turns):
        records = [Record(b"k%d" % rng.randrange(9), rng.randbytes(20), store.clock.now_ms()) for _ in range(40)]
        store.append(topic, records)


def state(store: Any, topic: str = "orders") -> dict[bytes | None, bytes | None]:
    found = {}
    for number in range(store.topic(topic).partitions):
        reader = store.reader(topic, number)
        found.update({each.key: each.value for each in reader.records(reader.log_start_offset())})
    return found


def test_planned_explained_and_compacted_as_in_a_directory(store: BucketStore, tmp_path: Path) -> None:
    """The same records, plans and receipts, but for what only one kind has."""
    with LogStore(tmp_path / "store", create=True, clock=store.clock) as directory:
        directory.create_topic("orders", partitions=2, configs=CONFIGS)
        for each in (store, directory):
            fill(each)
            compact(each, roll_active=True)
            fill(each, turns=3, seed=2)
        kept = state(store)
        assert kept == state(directory)
        for more in ({}, {"config": {"min.cleanable.dirty.ratio": 1.0}}, {"force": True}):
            found = [
                [(p.name, e is not None and e.removed, e is not None and e.records) for p, e in plan(each, **more)]
                for each in (store, directory)
            ]
            assert [name for name, _, _ in found[0]] == [name for name, _, _ in found[1]] == ["orders-0", "orders-1"]
        reports = [compact(each, roll_active=True, force=True) for each in (store, directory)]
        assert state(store) == state(directory) == kept
        removed = [[run.report.removed for run in report.runs if run.report] for report in reports]
        assert removed[0] == removed[1]
        runs = [each.maintenance().runs() for each in (store, directory)]
        alike = [[(r.partition, r.result, r.removed, r.engine, r.reason) for r in found] for found in runs]
        assert sorted(map(str, alike[0])) == sorted(map(str, alike[1]))
        assert json.loads(runs[0][0].details).keys() == json.loads(runs[1][0].details).keys()
    with pytest.raises(UnknownTopic):
        compact(store, topics=["nothing"])
    store.create_topic("plain")
    with pytest.raises(NotCompacted):
        compact(store, topics=["plain"])


@pytest.mark.parametrize(
    "configs",
    [
        {"duramen.compaction.order": "timestamp"},
        {"duramen.compaction.order": "header"},
        {"min.compaction.lag.ms": 3000, "segment.bytes": 600},
        {"max.compaction.lag.ms": 5000, "min.cleanable.dirty.ratio": 1.0},
        {"delete.retention.ms": 0, "duramen.compaction.merge.bytes": 10_000},
        {"duramen.key.ttl.ms": 6000},
        {"duramen.compaction.recompress.type": "zstd"},
        {"cleanup.policy": "compact,delete", "retention.ms": 9000},
    ],
    ids=lambda configs: "-".join(map(str, configs.values())),
)
def test_what_survives_a_run_is_what_survives_in_a_directory(
    clock: ManualClock, store: BucketStore, tmp_path: Path, configs: dict[str, object]
) -> None:
    """Tails are sealed and active segments rolled before each run, so segments end at the same offsets."""
    rng = random.Random(str(configs))
    with LogStore(tmp_path / "store", create=True, clock=clock) as directory:
        for each in (store, directory):
            each.create_topic("t", configs=CONFIGS | {"file.delete.delay.ms": 0} | configs)
        for _ in range(4):
            for _ in range(3):
                records = [a_record(rng, clock.now_ms()) for _ in range(15)]
                for each in (store, directory):
                    each.append("t", records)
                clock.advance(500)
            for each in (store, directory):
                report = compact(each, topics=["t"], roll_active=True)
                assert not report.failed, report.failed[0].reason
            assert live(store) == live(directory)
            kinds = [each.partition_state(each.topic("t"), 0) for each in (store, directory)]
            assert kinds[0].first_dirty_offset == kinds[1].first_dirty_offset
            assert kinds[0].next_horizon_ms == kinds[1].next_horizon_ms
            clock.advance(rng.randrange(4000))
        runs = [each.maintenance().runs() for each in (store, directory)]
        assert [(r.result, r.removed) for r in runs[0]] == [(r.result, r.removed) for r in runs[1]]
        assert sum(sum(run.removed.values()) for run in runs[0])


def a_record(rng: random.Random, now_ms: int) -> Record:
    value = None if rng.random() < 0.2 else rng.randbytes(rng.randrange(40))
    version = rng.randrange(1000).to_bytes(8, "big")
    return Record(b"k%d" % rng.randrange(12), value, now_ms - rng.randrange(2000), headers=(("version", version),))


def live(store: Any) -> list[Record]:
    reader = store.reader("t", 0)
    return list(reader.records(reader.log_start_offset()))


def test_what_if_is_answered_by_the_tail_too(store: BucketStore) -> None:
    """Nothing is sealed: the plan looks at each partition as the run will find it."""
    fill(store, turns=1)
    assert not any(found.is_due for found, _ in plan(store))
    fill(store)  # now the tail fills a segment
    (first, guess), _ = plan(store)
    assert first.rolls_active
    assert guess is not None
    (larger, _), _ = plan(store, config={"segment.bytes": 1_000_000_000})
    assert not larger.rolls_active
    (young, nothing), _ = plan(store, config={"min.compaction.lag.ms": 1_000_000}, force=True)
    assert (young.cleanable.due, nothing) == (None, None)
    before = len(list(store.reader("orders", 0).records(0)))
    compact(store)
    assert guess.removed == {"superseded": before - len(list(store.reader("orders", 0).records(0)))}


def test_a_dry_run_and_looking_change_nothing_and_need_no_rights(store: BucketStore) -> None:
    fill(store)
    reading = ReadOnly(store.objects)
    looking = BucketStore(store.url, objects=reading, clock=store.clock)
    assert {run.skip.value for run in compact(looking, dry_run=True).runs if run.skip} == {"dry_run"}
    assert len(plan(looking)) == len(explain(looking)) == 2
    assert looking.maintenance().runs() == []
    assert looking.maintenance().failures() == {}


class ReadOnly(CountedObjects):
    def create(self, key: str, data: bytes) -> Any:
        raise AssertionError(f"{key} was created")

    replace = delete = put = create  # type: ignore[assignment]


def test_paused_topics_are_left_alone_by_everybody(store: BucketStore) -> None:
    fill(store)
    store.alter_topic("orders", configs={"duramen.compaction.paused": True})
    assert [run.reason for run in compact(store, force=True, roll_active=True).runs] == [
        "paused; `duramen resume` lets it go on"
    ] * 2
    assert store.maintenance().runs() == []
    store.alter_topic("orders", unset=["duramen.compaction.paused"])
    assert len(compact(store, roll_active=True).done) == 2


def test_a_pass_that_fails_is_noted_and_waits_twice_as_long_each_time(
    store: BucketStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    compact(store, roll_active=True)
    fill(store, seed=2)
    for number in range(2):
        compact(store, topics=["orders"], partitions=[number], roll_active=True, dry_run=True)
    topic = store.topic("orders")
    manifest = store.manifests.read(topic.id, 0).manifest
    assert manifest is not None
    gone = manifest.segments[-1].key
    data = store.objects.get(gone)[0]
    store.objects.delete([gone])
    retry_ms = store.broker_config.duramen_cleaner_retry_ms
    for failures in (1, 2):
        report = compact(store, roll_active=True)
        assert [run.plan.partition for run in report.failed] == [0]
        assert "is gone" in report.failed[0].reason
        aside = store.maintenance().failures()[topic.id, 0]
        assert (aside.failures, aside.retry_ms - aside.failed_ms) == (failures, retry_ms * 2 ** (failures - 1))
        assert compact(store, roll_active=True).failed == []
        assert explain(store)[0].why.startswith(f"set aside after {failures} failures")
        assert not explain(store)[0].is_due
        clock.advance(aside.retry_ms - clock.now_ms() + 1)
    assert store.maintenance().figures().uncleanable() == 1
    store.objects.put(gone, [data])
    assert 0 in [run.plan.partition for run in compact(store, roll_active=True).done]
    assert store.maintenance().failures() == {}


def test_a_run_that_is_stopped_leaves_the_store_as_it_was(store: BucketStore) -> None:
    fill(store)
    kept = state(store)
    asked = False

    def started(_plan: object) -> None:
        nonlocal asked
        asked = True

    report = compact(store, roll_active=True, stopping=lambda: asked, progress=Progress(started=started))
    assert {run.result for run in report.runs} == {"abandoned", "skipped"}
    assert state(store) == kept
    assert [run.result for run in store.maintenance().runs()] == ["abandoned"]
    assert store.maintenance().failures() == {}  # to be stopped is no failure


def receipt(number: int, result: str = DONE, **removed: int) -> RunRow:
    return RunRow(
        f"run-{number}",
        KIND,
        "id",
        "orders",
        0,
        engine="local",
        started_ms=number,
        ended_ms=number,
        result=result,
        removed=removed,
        workers=tuple(f"w{n}" for n in range(100)),
        details=json.dumps({"read_bytes": 10, "written_bytes": 1}),
        reason="x" * 9000,
    )


def test_receipts_are_bounded_and_their_sums_are_not() -> None:
    manifest: Manifest | None = Manifest(0, "n", receipts=Receipts())
    erasing = range(0, 100, 7)
    for number in range(100):
        run = receipt(number, FAILED if number % 10 == 3 else DONE, **({"tombstone": 1} if number in erasing else {}))
        for _ in range(2):  # an answer that was lost: noted once
            noted = note_run(manifest, run, nonce=f"n{number}")
            manifest = noted or manifest
        assert manifest is not None
        manifest = decode_manifest(encode_manifest(manifest), "key", lambda key: b"")
    assert manifest is not None
    kept = manifest.receipts.runs
    assert [run.run_id for run in kept[-KEPT_EACH:]] == [f"run-{n}" for n in range(92, 100)]
    assert [run.run_id for run in kept[:-KEPT_EACH]] == [f"run-{n}" for n in list(erasing)[-KEPT_ERASING_EACH - 1 : -1]]
    assert manifest.receipts.results == {DONE: 90, FAILED: 10}
    assert manifest.receipts.removed == {"tombstone": len(erasing)}
    assert (manifest.receipts.read_bytes, manifest.receipts.written_bytes) == (900, 100)
    assert len(encode_manifest(manifest)) < 20_000
    assert note_run(replace(manifest, ended=True), receipt(1000), nonce="m") is None


def test_a_receipt_is_there_exactly_if_its_pass_is(store: BucketStore) -> None:
    """Another pass wins: the loser's work is void, and so is its receipt."""
    fill(store)
    compact(store, roll_active=True, topics=["orders"], partitions=[1])
    first = store.maintenance().runs()

    def meanwhile(found: Any) -> None:
        if found.partition == 0 and len(store.maintenance().runs()) == len(first):
            compact(store, roll_active=True, topics=["orders"], partitions=[0])

    report = compact(store, roll_active=True, partitions=[0], topics=["orders"], progress=Progress(started=meanwhile))
    assert [run.skip.value for run in report.runs if run.skip] == ["taken"]
    assert sorted(run.partition or 0 for run in store.maintenance().runs()) == [0, 1]


@pytest.fixture
def url() -> str:
    """Of a store that other parts of this process open by its URL."""
    url = f"memory://{uuid.uuid4().hex}"
    with LogStore(url, create=True) as store:
        store.create_topic("orders", partitions=2, configs=CONFIGS)
        store.create_topic("events", configs={"retention.ms": 1, "segment.bytes": 2000})
        fill(store, turns=20)
        fill(store, turns=8, topic="events")
    return url


def test_the_daemon_seals_compacts_retains_and_sweeps(url: str) -> None:
    store = BucketStore(url)
    kept = state(store)
    daemon = Scheduler(url)
    try:
        assert list(daemon.intervals_ms) == ["seal", "compaction", "retention", "sweep"]
        assert daemon.run_once(), {name: each.problems for name, each in daemon.status().items()}
    finally:
        assert daemon.stop()
    assert {run.partition for run in store.maintenance().runs()} == {0, 1}
    assert state(store) == kept
    assert store.reader("events", 0).log_start_offset() == 320
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in StoreCollector(store).collect()
        for sample in metric.samples
    }
    assert samples["duramen_compaction_runs_total", "done"] == 2
    assert samples["duramen_records_removed_total", "superseded"] > 0
    assert samples["duramen_append_batches_total", "committed"] == 28
    assert samples["duramen_log_records", "orders", "0"] + samples["duramen_log_records", "orders", "1"] == len(kept)
    assert samples["duramen_log_keys", "orders", "0"] + samples["duramen_log_keys", "orders", "1"] == len(kept)
    assert samples["duramen_uncleanable_partitions",] == 0
    store.delete_topic("orders")
    after = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in StoreCollector(store).collect()
        for sample in metric.samples
    }
    assert after["duramen_compaction_runs_total", "done"] == 2  # a counter never falls


def test_metrics_are_asked_for_once_a_minute(store: BucketStore) -> None:
    fill(store)
    counted = CountedObjects(store.objects)
    collector = StoreCollector(BucketStore(store.url, objects=counted, clock=store.clock))
    first = list(collector.collect())
    before = counted.requests.total()
    assert list(collector.collect()) == first
    assert counted.requests.total() == before


def test_the_daemon_ends_when_its_store_is_another_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logstore.bucket.maintenance._SAME_S", 0.0)
    store = BucketStore(url)
    maintenance = store.maintenance()
    assert maintenance.is_same()
    store.alter_settings({"log.cleaner.threads": 1})
    assert maintenance.is_same()
    store.objects.delete(["duramen.json"])
    assert not maintenance.is_same()


def test_intervals_go_by_settings_where_somebody_set_them(store: BucketStore) -> None:
    assert store.maintenance().intervals_ms() == {
        Job.SEAL: 300_000,
        Job.COMPACTION: 300_000,
        Job.RETENTION: 300_000,
        Job.SWEEP: 3_600_000,
    }
    store.alter_settings({"log.cleaner.backoff.ms": "15s", "log.retention.check.interval.ms": 60_000})
    again = BucketStore(store.url, objects=store.objects, clock=store.clock)
    assert again.maintenance().intervals_ms()[Job.COMPACTION] == 15_000
    assert again.maintenance().intervals_ms()[Job.RETENTION] == 60_000


def test_settings_of_the_store_are_for_everybody_who_opens_it(store: BucketStore, tmp_path: Path) -> None:
    store.alter_settings({"log.segment.bytes": 5_000_000, "log.cleaner.threads": 3})
    again = BucketStore(store.url, objects=store.objects, clock=store.clock)
    assert again.broker_config.log_cleaner_threads == 3
    again.create_topic("new")
    assert again.log_config(again.topic("new")).segment_bytes == 5_000_000
    assert again.log_config(again.topic("orders")).segment_bytes == 2000
    again.alter_settings({}, unset=["log.cleaner.threads"], dry_run=True)
    again.alter_settings({"log.cleaner.dedupe.buffer.size": "256MB"}, unset=["log.segment.bytes"])
    last = BucketStore(store.url, objects=store.objects, clock=store.clock)
    assert last.given("log.cleaner.threads") == 3
    assert last.log_config(last.topic("new")).segment_bytes == 1 << 30
    for wrong, error in (({"log.cleaner.thread": 1}, UnknownConfig), ({"log.cleaner.threads": "x"}, InvalidConfig)):
        with pytest.raises(error):
            last.alter_settings(wrong)
    with LogStore(tmp_path / "store", create=True) as directory, pytest.raises(InvalidConfig, match="are in a file"):
        directory.alter_settings({"log.cleaner.threads": 1})


def test_the_steps_of_the_dags_take_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def step(module: Any, *words: str) -> Any:
        capsys.readouterr()
        assert module.main(["--store", url, *words]) == 0
        return json.loads(capsys.readouterr().out)

    document = step(planning_step, "--share-bytes", "1")
    assert document["store"] == url
    assert [share["only"] for share in document["shares"]] == [["orders:0"], ["orders:1"]] or document["due"]
    compact(url, topics={"orders": [0]}, airflow_run_id="mine", retention=False)
    found = step(outcomes_step, "--airflow-run-id", "mine")
    assert [(each["partition"], each["result"]) for each in found] == [(0, "done")]
    assert compact(url, topics={"orders": [0]}, airflow_run_id="mine").runs[0].reason.startswith("done already")
    compact(url, roll_active=True, topics=["orders"])
    retained = step(retention_step)
    assert retained["problems"] == []
    assert [each["topic"] for each in retained["retained"]] == ["events"]
    assert BucketStore(url).reader("events", 0).log_start_offset() == 320


def test_commands_take_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        found = run_command(["--store", url, "--output", "json", *words])
        out, err = capsys.readouterr()
        assert found == code, err
        return json.loads(out)

    assert len(command("explain")["partitions"]) == 3
    assert len(command("plan", "--config", "min.cleanable.dirty.ratio=0.9")["partitions"]) == 2
    assert command("pause", "orders")["paused"]
    assert {run["skip"] for run in command("compact", "--roll-active")["runs"]} == {"not_due"}
    command("resume", "orders")
    assert {run["result"] for run in command("compact", "--roll-active", "--topic", "orders")["runs"]} == {"done"}
    runs = command("runs")["runs"]
    assert sorted(run["partition"] for run in runs) == [0, 1]
    assert command("runs", "show", runs[0]["run_id"])["runs"] == [runs[0]]
    jobs = command("schedule", "--once")["jobs"]
    assert {name: job["ok"] for name, job in jobs.items()} == dict.fromkeys(
        ("seal", "compaction", "retention", "sweep"), True
    )
    command("config", "--set", "log.cleaner.threads=2")
    setting = command("config", "log.cleaner.threads")["setting"]
    assert (setting["value"], setting["source"]) == ("2", "store file")
    command("config", "--unset", "log.cleaner.threads")
    assert command("config", "log.cleaner.threads")["setting"]["source"] == "default"
    assert run_command(["--store", url, "config", "--set", "log.cleaner.thread=2"]) == 2


def test_maintain_leaves_receipts_as_well(url: str) -> None:
    run_command(["--store", url, "maintain", "--seal-all"])
    store = BucketStore(url)
    assert {run.partition for run in BucketMaintenance(store).runs()} == {0, 1}


@pytest.mark.parametrize("retries", [True, False], ids=["retried", "not-retried"])
@pytest.mark.parametrize("fault", [*WRITES, Fault.SHORT], ids=lambda fault: fault.name)
def test_a_run_that_fails_anywhere_has_a_receipt_of_what_is_in_force(
    store: BucketStore, clock: ManualClock, fault: Fault, *, retries: bool
) -> None:
    """Each request of a run: no pass without its receipt, no receipt without its pass, no key back."""
    store.alter_topic("orders", configs={"delete.retention.ms": 0})
    fill(store, turns=2)
    compact(store, roll_active=True, topics={"orders": [0]})
    fill(store, turns=1, seed=2)
    topic, kept = store.topic("orders"), state(store)
    before = manifest_of(store, topic.id)
    at, calls = -1, 0  # without a fault first
    while at < calls:
        inner = copied(store.objects, clock)
        faulty = FaultyObjects(inner, {})
        seen = RetryingObjects(faulty, QUICK) if retries else faulty
        failing = BucketStore(store.url, objects=seen, clock=clock)
        faulty.calls.clear()
        faulty.faults[at] = fault
        with contextlib.suppress(DuramenError):
            compact(failing, roll_active=True, topics={"orders": [0]}, retention=False, run_name="this")
        calls = max(calls, len(faulty.calls))
        faulty.faults.clear()
        faulty.land()
        after = BucketStore(store.url, objects=inner, clock=clock)
        assert state(after) == kept, (fault, at)
        manifest = manifest_of(after, topic.id)
        done = [run for run in manifest.receipts.runs if run.run_id == "this-orders-0" and run.result == DONE]
        assert bool(done) == (manifest.first_dirty_offset > before.first_dirty_offset), (fault, at)
        assert manifest.receipts.results[DONE] == before.receipts.results[DONE] + len(done), (fault, at)
        at += 1
    assert calls > 20


def manifest_of(store: BucketStore, topic_id: str) -> Manifest:
    manifest = store.manifests.read(topic_id, 0).manifest
    assert manifest is not None
    return manifest


def copied(objects: Any, clock: ManualClock) -> MemoryObjects:
    inner = MemoryObjects(clock)
    for key in [*all_keys(objects), "duramen.json"]:
        inner.put(key, [objects.get(key)[0]])
    return inner


@pytest.mark.parametrize("fault", WRITES, ids=lambda fault: fault.name)
def test_settings_are_old_or_new_whatever_fails(store: BucketStore, clock: ManualClock, fault: Fault) -> None:
    store.alter_settings({"log.cleaner.threads": 1})
    at, calls = 0, 1
    while at < calls:
        inner = copied(store.objects, clock)
        faulty = FaultyObjects(inner, {})
        failing = BucketStore(store.url, objects=RetryingObjects(faulty, QUICK), clock=clock)
        faulty.calls.clear()
        faulty.faults[at] = fault
        told = 3
        try:
            failing.alter_settings({"log.cleaner.threads": 3})
        except DuramenError:
            told = 1
        calls = len(faulty.calls)
        faulty.faults.clear()
        faulty.land()
        found = BucketStore(store.url, objects=inner, clock=clock).broker_config.log_cleaner_threads
        assert found == told or (told, found) == (1, 3), (fault, at)  # an error does not say that nothing was done
        at += 1
    assert calls == 2


def test_a_look_at_a_partition_takes_two_requests_and_a_pass_few_writes(clock: ManualClock) -> None:
    inner = MemoryObjects(clock)
    made = BucketStore("memory://test", create=True, objects=inner, clock=clock)
    made.create_topic("orders", partitions=10, configs=CONFIGS)
    fill(made, turns=2)
    maintain(made, MaintenanceRules(seal=SealRules(force=True)))
    counted = CountedObjects(inner)
    store = BucketStore("memory://test", objects=counted, clock=clock)
    compact(store, retention=False)  # learns the clock and the plans
    counted.requests.clear()
    assert {run.result for run in compact(store, retention=False).runs} == {"skipped"}
    assert counted.requests.total() <= 2 * 10 + 6, counted.requests
    counted.requests.clear()
    store.maintenance().tidy(Job.SEAL, lambda: False, wait_for_idle=False)
    assert counted.requests.total() <= 10 + 8, counted.requests
    fill(made, turns=3, seed=2)
    maintain(made, MaintenanceRules(seal=SealRules(force=True), compact=False))
    counted.requests.clear()
    report = compact(store, force=True, retention=False)
    puts = sum(run.report.segments_after for run in report.done if run.report)
    assert len(report.done) > 4
    assert counted.requests["put"] <= puts + 1
    assert counted.requests["replace"] == len(report.done)  # the receipt comes with it
