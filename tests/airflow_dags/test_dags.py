"""The DAGs in a real Airflow: dag.test() with spark-submit applications, and the restore DAG started by a scheduler."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compaction_job import plan
from logstore.commit.committer import Committer
from logstore.ledger import Ledger, RunRow
from logstore.store import LogStore

Airflow = Any  # the fixture's class; conftest.py is not to be imported
TOPIC = "orders"
PARTITIONS = 2
# Files that a pass has replaced stay for an hour, so that no later run removes them under a comparison.
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "20000", "file.delete.delay.ms": "3600000"}
# Less for the JVM to compile than it would run.
SPARK_CONF = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
FIRST, SECOND, THIRD = (f"2026-03-0{day}T00:00:00+00:00" for day in (1, 2, 3))


@dataclass
class Filled:
    """A store with one compacted topic, and the truth about it."""

    path: Path
    topic: str = TOPIC
    latest: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def conf(self) -> dict[str, Any]:
        return {"store": str(self.path), "spark_conf": SPARK_CONF}

    def append(self, rounds: int, rng: random.Random) -> None:
        with LogStore(self.path) as store:
            for _ in range(rounds):
                keys = [b"key-%d" % rng.randrange(100) for _ in range(400)]
                values = [None if rng.random() < 0.1 else rng.randbytes(40) for _ in keys]
                store.append(self.topic, pa.table({"key": keys, "value": values}))
                for key, value in zip(keys, values, strict=True):
                    self.latest.pop(key, None)
                    if value is not None:
                        self.latest[key] = value
            Committer(store).flush(store.topic(self.topic))

    def due(self) -> list[str]:
        return sorted(each.name for each, _ in plan(self.path, estimate=False) if each.is_due)

    def receipts(self) -> list[RunRow]:
        with LogStore(self.path) as store:
            return [run for run in Ledger(store.layout.ledger).runs() if run.kind == "compaction"]

    def read(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        with LogStore(self.path) as store:
            topic = store.topic(self.topic)
            for number in range(PARTITIONS):
                for record in store.reader(topic, number).records(0):
                    found.pop(record.key, None)
                    if record.value is not None:
                        found[record.key] = record.value
        return found

    def files(self, below: str = "logs") -> dict[str, tuple[int, int, str]]:
        """Size, time of change and hash of every file.

        But for the one that remembers how the clock stood, and for what was replaced: that goes after a minute.
        """
        listing = {}
        for path in sorted((self.path / below).rglob("*")):
            if path.is_file() and path != self.path / "locks" / "clock" and path.suffix != ".deleted":
                stat = path.stat()
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                listing[str(path.relative_to(self.path))] = (stat.st_size, stat.st_mtime_ns, digest)
        return listing


def filled(path: Path, rng: random.Random, topic: str = TOPIC) -> Filled:
    with LogStore(path, create=True) as store:
        store.create_topic(topic, partitions=PARTITIONS, configs=CONFIGS)
    made = Filled(path, topic)
    made.append(6, rng)
    return made


@pytest.fixture(scope="module")
def compacted(airflow: Airflow, tmp_path_factory: pytest.TempPathFactory) -> tuple[Filled, dict[str, Any]]:
    """A store after one run of the compaction DAG, and what that run came to. A second topic has only retention."""
    store = filled(tmp_path_factory.mktemp("airflow") / "store", random.Random(5))
    with LogStore(store.path) as opened:
        opened.create_topic(
            "audit", partitions=1, configs={"cleanup.policy": "delete", "retention.bytes": "1", "segment.bytes": "2000"}
        )
        for _ in range(3):
            opened.append("audit", pa.table({"key": [b"k"] * 100, "value": [bytes(30)] * 100}))
        Committer(opened).flush(opened.topic("audit"))
    assert store.due() == [f"{TOPIC}-0", f"{TOPIC}-1"]
    return store, airflow.ask("run", dag_id="duramen_compaction", conf=store.conf, at=FIRST)


@pytest.fixture(scope="module")
def failed(airflow: Airflow, tmp_path_factory: pytest.TempPathFactory) -> tuple[Filled, dict[str, Any]]:
    """A store with a damaged partition, which a run left as it was, and what that run came to."""
    store = filled(tmp_path_factory.mktemp("airflow") / "store", random.Random(8), "payments")
    damage(store)
    before = store.files("logs/payments-0")
    run = airflow.ask("run", dag_id="duramen_compaction", conf=store.conf, at=THIRD)
    assert store.files("logs/payments-0") == before
    return store, run


def damage(store: Filled) -> None:
    """Of the first batch's CRC; twice is as before."""
    path = store.path / "logs" / f"{store.topic}-0" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)


def test_both_dags_are_imported_without_errors(airflow: Airflow) -> None:
    found = airflow.ask("import")
    assert found["home"] == str(airflow.home)
    assert found["errors"] == {}
    assert sorted(found["dags"]) == ["duramen_compaction", "duramen_restore"]
    assert found["dags"]["duramen_restore"]["tasks"] == ["choose_topics", "restore_topic"]


def test_a_run_compacts_all_that_is_due_by_one_spark_application(compacted: tuple[Filled, dict[str, Any]]) -> None:
    store, run = compacted
    assert run["state"] == "success"
    assert run["tasks"] == {
        "plan_shares": "success",
        f"compact_share/{TOPIC}:0-1": "success",
        "apply_retention": "success",
        "publish_topics": "success",
        "all_compacted": "success",
    }
    receipts = store.receipts()
    assert sorted(receipt.partition for receipt in receipts) == [0, 1]
    for receipt in receipts:
        assert (receipt.engine, receipt.result, receipt.airflow_run_id) == ("spark", "done", run["run_id"])
        assert receipt.after_bytes < receipt.before_bytes
        assert receipt.removed["superseded"] > 0
    assert store.read() == store.latest


def test_each_compacted_topic_is_an_asset_with_what_was_done(compacted: tuple[Filled, dict[str, Any]]) -> None:
    store, run = compacted
    (event,) = run["events"]
    assert event["uri"] == f"x-duramen://{store.path}/{TOPIC}"
    extra = event["extra"]
    assert (extra["topic"], extra["partitions"], extra["airflow_run_id"]) == (TOPIC, [0, 1], run["run_id"])
    assert extra["before_bytes"] == sum(receipt.before_bytes for receipt in store.receipts())
    assert extra["after_bytes"] == sum(receipt.after_bytes for receipt in store.receipts())


def test_retention_runs_with_it_for_topics_that_are_not_compacted(compacted: tuple[Filled, dict[str, Any]]) -> None:
    store, run = compacted
    (retained,) = [result["value"] for result in run["results"] if result["task"] == "apply_retention"]
    assert [(each["topic"], each["partition"]) for each in retained] == [("audit", 0)]
    with LogStore(store.path) as opened:
        assert opened.partition_state(opened.topic("audit"), 0).log_start_offset == retained[0]["log_start_offset"] > 0


def test_the_same_run_id_again_changes_no_file(airflow: Airflow, compacted: tuple[Filled, dict[str, Any]]) -> None:
    store, run = compacted
    store.append(6, random.Random(6))
    assert store.due() == [f"{TOPIC}-0", f"{TOPIC}-1"]  # there would be work
    with LogStore(store.path) as opened:
        opened.project_checkpoints()  # of what was appended since
    before = store.files()
    again = airflow.ask("run", dag_id="duramen_compaction", conf=store.conf, at=FIRST)
    assert again["run_id"] == run["run_id"]
    assert (again["state"], again["tasks"]) == (run["state"], run["tasks"])
    assert [event["extra"] for event in again["events"]][-1] == run["events"][0]["extra"]  # it tells the same again
    assert store.files() == before
    assert len(store.receipts()) == PARTITIONS
    assert store.due() == [f"{TOPIC}-0", f"{TOPIC}-1"]


def test_a_dry_run_says_what_is_due_and_changes_nothing(airflow: Airflow, tmp_path: Path) -> None:
    store = filled(tmp_path / "store", random.Random(7))
    before = store.files(".")
    run = airflow.ask("run", dag_id="duramen_compaction", conf=store.conf | {"dry_run": True}, at=SECOND)
    assert run["state"] == "success"
    assert run["tasks"] == {
        "plan_shares": "success",
        "compact_share": "skipped",
        "apply_retention": "skipped",
        "publish_topics": "success",
        "all_compacted": "success",
    }
    assert run["events"] == []
    assert store.files(".") == before


def test_a_failing_partition_fails_the_task_of_its_share_and_stops_nothing_else(
    failed: tuple[Filled, dict[str, Any]],
) -> None:
    store, run = failed
    assert run["state"] == "failed"
    assert run["tasks"] == {
        "plan_shares": "success",
        "compact_share/payments:0-1": "failed",
        "apply_retention": "success",
        "publish_topics": "success",
        "all_compacted": "upstream_failed",
    }
    receipts = {receipt.partition: receipt for receipt in store.receipts()}
    assert (receipts[0].result, receipts[1].result) == ("failed", "done")
    assert "checksum" in receipts[0].reason
    (event,) = run["events"]
    assert event["extra"]["partitions"] == [1]


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic with fifty small partitions, all of them due."""
    path = tmp_path_factory.mktemp("airflow") / "store"
    with LogStore(path, create=True) as store:
        store.create_topic("wide", partitions=50, configs=CONFIGS | {"segment.bytes": "2000"})
        for _ in range(3):
            numbers = [number % 50 for number in range(4000)]
            keys = [b"key-%d" % (number // 50 % 10) for number in range(4000)]
            store.append(
                "wide", pa.table({"key": keys, "value": [bytes(60)] * 4000, "partition": pa.array(numbers, pa.int32())})
            )
        Committer(store).flush(store.topic("wide"))
    return path


def test_fifty_small_partitions_take_few_applications_and_little_time(airflow: Airflow, fifty: Path) -> None:
    due = [each.name for each, _ in plan(fifty, estimate=False) if each.is_due]
    assert len(due) == 50
    began = time.monotonic()
    conf = {"store": str(fifty), "spark_conf": SPARK_CONF}
    run = airflow.ask("run", dag_id="duramen_compaction", conf=conf, at="2026-03-05T00:00:00+00:00")
    seconds = time.monotonic() - began
    assert run["state"] == "success"
    applications = [name for name in run["tasks"] if name.startswith("compact_share/")]
    assert 1 <= len(applications) <= 4
    (event,) = run["events"]
    assert event["extra"]["partitions"] == list(range(50))
    assert seconds < 180


def test_the_spark_provider_submits_shares_of_the_asked_size_to_its_connection(
    airflow: Airflow, tmp_path: Path
) -> None:
    store = filled(tmp_path / "store", random.Random(9))
    connection = {"conn_type": "spark", "host": "local[1]", "extra": {"spark-binary": "spark-submit"}}
    provided = airflow.with_env(
        DURAMEN_SPARK_CONN="duramen_spark",
        AIRFLOW_CONN_DURAMEN_SPARK=json.dumps(connection),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{airflow.env['PATH']}",
    )
    conf = store.conf | {"share_bytes": 1}
    run = provided.ask("run", dag_id="duramen_compaction", conf=conf, at="2026-03-06T00:00:00+00:00")
    assert run["state"] == "success"
    assert run["tasks"] == {
        "plan_shares": "success",
        f"compact_share/{TOPIC}:0": "success",
        f"compact_share/{TOPIC}:1": "success",
        "apply_retention": "success",
        "publish_topics": "success",
        "all_compacted": "success",
    }
    assert [(receipt.engine, receipt.result) for receipt in store.receipts()] == [("spark", "done")] * 2
    assert store.read() == store.latest


BAD_CONFS: list[tuple[str, Any]] = [
    ("ratio", 2),
    ("ratio", -0.1),
    ("ratio", "0.5"),
    ("topics", "orders"),
    ("topics", ["../orders"]),
    ("topics", ["orders", "orders"]),
    ("dry_run", "yes"),
    ("force", 1),
    ("store", "relative/path"),
    ("master", "local[0]"),
    ("master", "local --conf x"),
    ("share_bytes", 0),
    ("spark_conf", {"not.spark": "1"}),
    ("spark_conf", {"spark.executor.cores": 2}),
]


def test_a_param_outside_its_schema_is_refused_before_anything_runs(airflow: Airflow) -> None:
    confs = [{name: value} for name, value in BAD_CONFS]
    answer = airflow.ask("refuse", dag_id="duramen_compaction", confs=confs)
    for (name, value), told in zip(BAD_CONFS, answer["told"], strict=True):
        assert told is not None, f"{name}={value!r} was taken"
        assert told.startswith(f"Invalid input for param {name}: ")
    assert not [conf for conf in answer["confs_of_runs"] if conf in confs]


def test_what_no_schema_can_tell_is_a_plain_error_of_the_first_task(
    airflow: Airflow, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("duramen_compaction", "plan_shares", {"topic": [TOPIC]}, "no param is called topic"),
        ("duramen_compaction", "plan_shares", {"store": "/nowhere/at/all"}, "no store here (file /nowhere/at/all"),
        ("duramen_restore", "choose_topics", {}, "no topics: give the param topics"),
    ]
    runs = [
        {"dag_id": dag_id, "conf": conf, "at": f"2026-03-04T0{hour}:00:00+00:00"}
        for hour, (dag_id, _, conf, _) in enumerate(cases)
    ]
    answers = airflow.ask("runs", runs=runs)["runs"]
    log = capsys.readouterr().out
    for (_, task, _, told), answer in zip(cases, answers, strict=True):
        assert answer["state"] == "failed"
        assert answer["tasks"][task] == "failed"
        assert told in log


Api = Callable[..., tuple[int, Any]]


def task_states(api: Api, dag_id: str, run_id: str = "~") -> dict[str, dict[str, Any]]:
    """By the name of a mapped task's partition or topic; of the others, by their own."""
    code, answer = api("GET", f"/api/v2/dags/{dag_id}/dagRuns/{quote(run_id)}/taskInstances")
    assert code == 200, answer
    return {each["rendered_map_index"] or each["task_id"]: each for each in answer["task_instances"]}


def until(seconds: float, found: Callable[[], dict[str, Any]], name: str, *states: str) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while (tasks := found()).get(name, {}).get("state") not in states:
        assert time.monotonic() < deadline, f"{name} is not {' or '.join(states)}: {tasks}"
        time.sleep(1)
    return tasks


@pytest.mark.usefixtures("compacted", "failed")  # before there is a scheduler that would meddle with dag.test()
class TestWithAScheduler:
    """With the scheduler, the API server and the executor that Airflow comes with."""

    def test_a_param_outside_its_schema_is_told_to_who_asked(self, api: Api) -> None:
        run = {"logical_date": None, "conf": {"ratio": 2}}
        code, refusal = api("POST", "/api/v2/dags/duramen_compaction/dagRuns", run)
        assert code == 400
        assert "Invalid input for param ratio: 2 is greater than the maximum of 1" in str(refusal)

    def test_a_compaction_starts_the_restore_of_its_topics(
        self, compacted: tuple[Filled, dict[str, Any]], api: Api
    ) -> None:
        store, _ = compacted
        # Compactions of other tests start the restore of other topics.
        tasks = until(300, lambda: task_states(api, "duramen_restore"), TOPIC, "success", "failed")
        assert tasks[TOPIC]["state"] == "success"
        assert tasks[TOPIC]["dag_run_id"].startswith("asset_triggered__")
        restored = pq.read_table(f"{store.path}.restored/{TOPIC}.parquet").to_pylist()
        assert {row["key"]: row["value"] for row in restored} == store.latest
        assert len(restored) == len(store.latest)
        assert os.listdir(f"{store.path}.restored") == [f"{TOPIC}.parquet"]

    def test_a_failed_task_that_is_cleared_does_not_wait_for_the_back_off(
        self, failed: tuple[Filled, dict[str, Any]], api: Api
    ) -> None:
        store, run = failed
        damage(store)  # mended
        cleared = {"dag_run_id": run["run_id"], "dry_run": False, "only_failed": True}
        code, answer = api("POST", "/api/v2/dags/duramen_compaction/clearTaskInstances", cleared)
        assert code == 200, answer

        def tasks() -> dict[str, Any]:
            return task_states(api, "duramen_compaction", run["run_id"])

        found = until(300, tasks, "all_compacted", "success", "failed")
        assert {name: each["state"] for name, each in found.items() if name != "all_compacted"} == {
            "plan_shares": "success",
            "payments:0-1": "success",
            "apply_retention": "success",
            "publish_topics": "success",
        }
        assert found["payments:0-1"]["try_number"] == 2
        receipts = [(each.partition, each.result, each.airflow_run_id) for each in store.receipts()]
        assert sorted(receipts) == [
            (0, "done", run["run_id"]),
            (0, "failed", run["run_id"]),
            (1, "done", run["run_id"]),
        ]
        assert store.read() == store.latest
