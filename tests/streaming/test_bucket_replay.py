"""Micro-batches that Spark runs again, into a store in a bucket: what `test_replay` shows of one in a directory.

The store is on a real server. Drivers that are killed or stopped are processes of their own (driver.py).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from bucket import servers
from bucket.servers import Server
from logstore.bucket.store import BucketStore
from logstore.commit.apps import AppBatch
from replaying import ROUNDS, SOAK, Rows, Spark, drive, forget_last_commit, has_stopped, run, said, start
from streaming.options import SinkOptions
from streaming.sink import LogSink

#: of driver.py
STEPS = ("bucket staged", "bucket planned", "bucket committed", "any")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


class Bucket:
    """A store, and how tasks reach it: nothing secret."""

    def __init__(self, server: Server) -> None:
        self.url = server.url(uuid.uuid4().hex)
        self.options = {
            "endpoint": server.endpoint, "region": "us-east-1", "allow_http": "true", "skip_signature": "true",
        }  # fmt: skip
        BucketStore(self.url, create=True, storage_options=self.options).create_topic("orders", partitions=3)

    def sink(self, app_id: str = "app") -> LogSink:
        return LogSink(self.url, "orders", app_id=app_id, options=SinkOptions(storage_options=self.options))

    def opened(self) -> BucketStore:
        return BucketStore(self.url, storage_options=self.options)

    def commits(self, app_id: str = "app") -> int:
        progress = self.opened().ledger.view.app(app_id)
        return -1 if progress is None else progress.batch_id

    def check(self, *given: Rows) -> None:
        """Each value once, in the order of its key, at offsets without a gap."""
        store = self.opened()
        found = [list(store.reader("orders", number).records(0)) for number in range(3)]
        values = [record.value.decode() for records in found for record in records if record.value]
        assert Counter(values) == Counter(value for rows in given for value in rows.values)
        for records in found:
            assert [record.offset for record in records] == list(range(len(records)))
            for rows in given:
                own = [r for r in records if (r.value or b"").startswith(rows.name.encode())]
                for key in {record.key for record in own}:
                    mine = [record.value for record in own if record.key == key]
                    assert mine == sorted(mine)


@pytest.fixture
def bucket(server: Server) -> Bucket:
    return Bucket(server)


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_a_shuffled_batch_run_again_with_other_shuffle_partitions_is_recognised(
    spark: Spark, bucket: Bucket, tmp_path: Path, adaptive: str, seed: int
) -> None:
    """Spark's note of its last batch is gone each time."""
    rng = random.Random(seed)
    rows, checkpoint, sink = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint", bucket.sink()

    def write(df: Any, batch_id: int) -> None:
        df.sparkSession.conf.set("spark.sql.adaptive.enabled", adaptive)
        df.sparkSession.conf.set("spark.sql.shuffle.partitions", rng.randrange(1, 7))
        sink(df.repartition("key").sortWithinPartitions("value"), batch_id)

    rows.add()
    for _ in range(ROUNDS):
        run(spark, rows, checkpoint, write)
        forget_last_commit(checkpoint)
        rows.add()
    run(spark, rows, checkpoint, write)
    bucket.check(rows)
    assert bucket.commits() == ROUNDS


def test_two_queries_at_once_on_one_topic(spark: Spark, bucket: Bucket, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    both = [Rows(tmp_path / name, name, rng) for name in ("a", "b")]
    for _ in range(ROUNDS):
        queries = []
        for rows in both:
            rows.add()
            rows.add()
            queries.append(start(spark, rows, tmp_path / f"checkpoint-{rows.name}", bucket.sink(f"app-{rows.name}")))
        assert all(query.awaitTermination(110) for query in queries)
        forget_last_commit(tmp_path / f"checkpoint-{rng.choice('ab')}")
    for rows in both:
        rows.add()
        run(spark, rows, tmp_path / f"checkpoint-{rows.name}", bucket.sink(f"app-{rows.name}"))
    bucket.check(*both)


def test_two_queries_under_one_app_id_one_stops_and_names_the_other(
    spark: Spark, bucket: Bucket, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    pair = [Rows(tmp_path / name, name, rng) for name in "ab"]
    queries = []
    for rows in pair:
        rows.add()
        rows.add()
        queries.append(start(spark, rows, tmp_path / f"c-{rows.name}", bucket.sink()))
    errors: dict[int, str] = {}
    for number, query in enumerate(queries):
        try:
            assert query.awaitTermination(110)
        except StreamingQueryException as error:
            errors[number] = str(error)
    (loser,) = errors
    winner = 1 - loser
    assert f"adopt='{queries[winner].id}:" in errors[loser]
    bucket.check(pair[winner])
    forget_last_commit(tmp_path / f"c-{pair[winner].name}")
    run(spark, pair[winner], tmp_path / f"c-{pair[winner].name}", bucket.sink())
    bucket.check(pair[winner])


@pytest.mark.timeout(0 if SOAK else 600)
def test_a_driver_killed_at_each_step_loses_and_doubles_nothing(
    spark: Spark, bucket: Bucket, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    for _ in range(ROUNDS if SOAK else 1):
        for step in rng.sample(STEPS, len(STEPS)):
            for _ in range(rng.randrange(1, 3)):
                rows.add()
            last = rows.files - 1
            told = {"kill": step, "batch": last, "seed": last, "storage_options": bucket.options}
            driver = drive(bucket.url, rows, checkpoint, **told)  # type: ignore[arg-type]
            try:
                code = driver.wait(400)
            finally:
                driver.kill()
            if step == "any":
                assert code in (0, -signal.SIGKILL), said(checkpoint)
                assert bucket.commits() in (last - 1, last)
            else:
                assert code == -signal.SIGKILL, (step, said(checkpoint))
                assert bucket.commits() == last - (step != "bucket committed"), step
    rows.add()
    run(spark, rows, checkpoint, bucket.sink())
    bucket.check(rows)
    assert bucket.commits() == rows.files - 1


@pytest.mark.timeout(0 if SOAK else 400)
def test_a_driver_that_stalled_is_told_that_it_is_late(bucket: Bucket, tmp_path: Path, seed: int) -> None:
    """While it sleeps, another writes its batch, and others; it recognises what is its own and goes on."""
    rng = random.Random(seed)
    rows, others = Rows(tmp_path / "in", "a", rng), Rows(tmp_path / "other", "b", rng)
    stalls = dict(enumerate(STEPS[:3]))
    for _ in stalls:
        rows.add()
    driver = drive(  # type: ignore[call-arg]
        bucket.url, rows, tmp_path / "checkpoint", stalls=stalls, storage_options=bucket.options  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        for batch, step in stalls.items():
            deadline = time.monotonic() + 200
            while not has_stopped(driver):
                assert driver.poll() is None, said(tmp_path / "checkpoint")
                assert time.monotonic() < deadline, "it never stalled"
                time.sleep(0.02)
            assert bucket.commits() == batch - (step != "bucket committed")
            others.add()
            bucket.opened().append("orders", others.last_table(), app=AppBatch("other", batch))
            driver.send_signal(signal.SIGCONT)
        assert driver.wait(200) == 0, said(tmp_path / "checkpoint")
    finally:
        driver.kill()
        driver.wait()
    bucket.check(rows, others)
    assert bucket.commits() == len(stalls) - 1


@pytest.mark.timeout(0 if SOAK else 300)
def test_workers_that_are_killed_in_a_batch_leave_no_half_of_it(
    spark: Spark, bucket: Bucket, tmp_path: Path, seed: int
) -> None:
    """The query fails, or not if it was through; it is started again until its batch is in."""
    rng = random.Random(seed)
    rows, checkpoint, kills = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint", 0
    for _ in range(ROUNDS):
        rows.add()
        rows.add()
        query = start(spark, rows, checkpoint, bucket.sink())
        time.sleep(rng.uniform(0, 1.5))
        for worker in python_workers():
            with_kill = rng.random() < 0.7
            if with_kill and query.isActive:
                kills += 1
                os.kill(worker, signal.SIGKILL)
        try:
            query.awaitTermination(110)
        except StreamingQueryException:
            run(spark, rows, checkpoint, bucket.sink())
    print(f"{kills} workers killed")
    bucket.check(rows)
    assert bucket.commits() == rows.files - 1


def python_workers() -> list[int]:
    """Of this test's own Spark: children of the daemon that its Java process started."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    lines = (line.split(None, 2) for line in listed.splitlines()[1:])
    parents = {int(pid): (int(parent), args) for pid, parent, args in lines}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid][0]
        return pid == os.getpid()

    daemons = {pid for pid, (_, args) in parents.items() if "pyspark.daemon" in args and is_ours(pid)}
    return [pid for pid in daemons if parents[pid][0] in daemons]
