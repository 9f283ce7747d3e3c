"""Compaction of a store in a bucket by Spark's tasks: what one process leaves, with receipts that name executors."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bucket import servers
from bucket.servers import Server
from compaction_job import compact, explain
from logstore.bucket.store import BucketStore
from logstore.records.record import Record

CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "4000", "min.cleanable.dirty.ratio": "0.01"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def store(server: Server) -> BucketStore:
    options = {"endpoint": server.endpoint, "region": "us-east-1", "allow_http": "true", "skip_signature": "true"}
    store = BucketStore(server.url(uuid.uuid4().hex), create=True, storage_options=options)
    store.create_topic("orders", partitions=3, configs=CONFIGS)
    return store


def fill(store: BucketStore, turns: int = 4) -> dict[bytes | None, bytes | None]:
    rng, found = random.Random(7), {}
    for _ in range(turns):
        records = [Record(b"k%d" % rng.randrange(40), rng.randbytes(30)) for _ in range(150)]
        store.append("orders", records)
        found.update({each.key: each.value for each in records})
    return found


def state(store: BucketStore) -> dict[bytes | None, bytes | None]:
    records = (each for number in range(3) for each in store.reader("orders", number).records(0))
    return {each.key: each.value for each in records}


def test_executors_compact_and_the_receipts_name_them(spark: SparkSession, store: BucketStore) -> None:
    kept = fill(store)
    report = compact(store, spark=spark, roll_active=True, threads=2)
    assert [run.result for run in report.runs] == ["done"] * 3, [run.reason for run in report.runs]
    assert state(store) == kept
    assert sum(len(list(store.reader("orders", number).records(0))) for number in range(3)) == len(kept)
    runs = store.maintenance().runs()
    assert {(run.partition, run.result, run.engine) for run in runs} == {(n, "done", "spark") for n in range(3)}
    assert all(len(run.workers) == 1 and ":" in run.workers[0] for run in runs)
    assert sum(run.removed["superseded"] for run in runs) == 600 - len(kept)
    assert all((run.after_bytes or 0) < (run.before_bytes or 0) for run in runs)
    assert not any(found.is_due for found in explain(store))


def test_a_pass_that_fails_on_an_executor_is_set_aside(spark: SparkSession, store: BucketStore) -> None:
    fill(store)
    compact(store, roll_active=True, topics=["orders"], partitions=[0])
    fill(store, 1)
    manifest = store.manifests.read(store.topic("orders").id, 0).manifest
    assert manifest is not None
    store.objects.delete([manifest.segments[-1].key])
    report = compact(store, spark=spark, force=True, roll_active=True)
    assert sorted(run.result for run in report.runs) == ["done", "done", "failed"]
    failed = report.failed[0]
    assert "is gone" in failed.reason
    assert failed.plan.partition == 0
    assert [run.plan.partition for run in compact(store, spark=spark, roll_active=True).done] == []
    why = {found.partition: found.why for found in explain(store)}
    assert why[0].startswith("set aside after 1 failures")


def test_the_job_is_submitted_with_a_url(
    store: BucketStore, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    from compaction_job import submit

    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
    }.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)  # the suite's own session
    kept = fill(store)
    report = tmp_path / "report.json"
    words = ["--store", store.url, "--roll-active", "--airflow-run-id", "run-1", "--report", str(report)]
    assert submit.main(words) == 0
    document = json.loads(report.read_text())
    assert [run["result"] for run in document["runs"]] == ["done"] * 3
    assert submit.main(words) == 0
    assert {run["skip"] for run in json.loads(report.read_text())["runs"]} == {"done_before"}
    assert state(store) == kept
