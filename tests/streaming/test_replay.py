"""Micro-batches that Spark runs again: no record twice, none missing, whatever changed, stalled or died in between.

`Rows` is the oracle: every value it puts into a source folder must be in the topic exactly once, in order by key.
`DURAMEN_SOAK=1` asks for twenty rounds instead of three. Drivers that are killed or stopped are processes of their own
(driver.py); everything else shares one Spark.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table
from logstore.directory.ends import TopicEnds
from logstore.files import OS_FILES
from logstore.records.compression import codec_by_name
from logstore.records.header import BatchHeader, read_header
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.store import LogStore
from replaying import ROUNDS, SOAK, Rows, Spark, drive, forget_last_commit, has_stopped, run, said, start
from streaming.sink import LogSink

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
#: drivers that are killed at each step: some ten starts of Spark each
STREAMS = ROUNDS if SOAK else 1
STEPS = ("staged", "leased", "planned", "committed", "appending", "appended", "published", "synced", "flushed", "any")
COMMITTED = STEPS[3:9]
#: where a driver may fall asleep with the lease in its hands
STALLS = ("leased", "planned", "committed", "appending", "appended")


def check(store: LogStore, read_all: ReadAll, *given: Rows) -> None:
    found = read_all(store, "orders")
    values = [record.value.decode() for records in found.values() for record in records if record.value]
    assert Counter(values) == Counter(value for rows in given for value in rows.values)
    for records in found.values():
        assert [record.offset for record in records] == list(range(len(records)))
        for rows in given:
            for key in {record.key for record in records}:
                mine = [r.value for r in records if r.key == key and (r.value or b"").startswith(rows.name.encode())]
                assert mine == sorted(mine)


def batches_from(store: LogStore, number: int, offset: int) -> list[BatchHeader]:
    found = []
    for path in sorted(Path(store.layout.partition(store.topic("orders").partition(number))).glob("*.log")):
        file = OS_FILES.open(str(path))
        position = 0
        while (header := read_header(file, position, file.size())) is not None:
            found.append(header)
            position = header.end_position
        file.close()
    return [header for header in found if header.begin_offset >= offset]


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_a_batch_run_again_is_recognised(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, adaptive: str, seed: int
) -> None:
    """Also with another number of partitions each time, so that tasks and files are others than the first time."""
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    log_sink = LogSink(store.path, "orders", app_id="app")
    spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        rows.add()
        run(spark, rows, checkpoint, log_sink)
        for round_number in range(ROUNDS):
            forget_last_commit(checkpoint)
            rows.add()
            partitions = rng.randrange(1, 5)
            run(spark, rows, checkpoint, lambda df, batch_id, n=partitions: log_sink(df.coalesce(n), batch_id))
            check(store, read_all, rows)
            assert len(Committer(store).ledger.commits()) == round_number + 2
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_a_shuffled_batch_run_again_with_other_shuffle_partitions_is_recognised(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, adaptive: str, seed: int
) -> None:
    """After a shuffle rows have no order between keys, but each key keeps its own."""
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    log_sink = LogSink(store.path, "orders", app_id="app")
    plans: list[str] = []

    def write(df: Any, batch_id: int) -> None:
        df.sparkSession.conf.set("spark.sql.adaptive.enabled", adaptive)  # the stream has a session of its own
        df.sparkSession.conf.set("spark.sql.shuffle.partitions", rng.randrange(1, 7))
        shuffled = df.repartition("key").sortWithinPartitions("value")
        plans.append(shuffled._jdf.queryExecution().executedPlan().toString())
        log_sink(shuffled, batch_id)

    rows.add()
    for _ in range(ROUNDS):
        run(spark, rows, checkpoint, write)
        forget_last_commit(checkpoint)
        rows.add()
    run(spark, rows, checkpoint, write)
    check(store, read_all, rows)
    assert len(plans) == 2 * ROUNDS + 1
    assert all("Exchange" in plan and ("AdaptiveSparkPlan" in plan) == (adaptive == "true") for plan in plans)


def test_two_queries_take_turns_on_one_topic(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    both = [Rows(tmp_path / name, name, rng) for name in ("a", "b")]
    for _ in range(ROUNDS):
        for rows in both:
            checkpoint = tmp_path / f"checkpoint-{rows.name}"
            rows.add()
            run(spark, rows, checkpoint, LogSink(store.path, "orders", app_id=f"app-{rows.name}"))
            forget_last_commit(checkpoint)
    for rows in both:
        run(spark, rows, tmp_path / f"checkpoint-{rows.name}", LogSink(store.path, "orders", app_id=f"app-{rows.name}"))
    check(store, read_all, *both)


def test_two_queries_at_once_on_one_topic(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    both = [Rows(tmp_path / name, name, rng) for name in ("a", "b")]
    for _ in range(ROUNDS):
        for rows in both:
            rows.add()
            rows.add()
        queries = [
            start(
                spark,
                rows,
                tmp_path / f"checkpoint-{rows.name}",
                LogSink(store.path, "orders", app_id=f"app-{rows.name}"),
            )
            for rows in both
        ]
        assert all(query.awaitTermination(110) for query in queries)
        forget_last_commit(tmp_path / f"checkpoint-{rng.choice('ab')}")
    for rows in both:
        rows.add()
        run(spark, rows, tmp_path / f"checkpoint-{rows.name}", LogSink(store.path, "orders", app_id=f"app-{rows.name}"))
    check(store, read_all, *both)


def test_two_queries_under_one_app_id_one_stops_and_names_the_other(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    """Whoever commits first stays. Both begin at once, the second a random moment later."""
    from pyspark.errors import StreamingQueryException

    rng = random.Random(seed)
    given: list[Rows] = []
    for round_number in range(ROUNDS):
        pair = [Rows(tmp_path / f"{name}{round_number}", f"{name}{round_number}", rng) for name in "ab"]
        app_id = f"app {round_number}"
        queries = []
        for rows in pair:
            rows.add()
            rows.add()
            queries.append(
                start(spark, rows, tmp_path / f"c-{rows.name}", LogSink(store.path, "orders", app_id=app_id))
            )
            time.sleep(rng.choice((0, rng.uniform(0, 0.4))))
        errors: dict[int, str] = {}
        for number, query in enumerate(queries):
            try:
                assert query.awaitTermination(110)
            except StreamingQueryException as error:
                errors[number] = str(error)
        assert len(errors) == 1, errors
        (loser,) = errors
        winner = 1 - loser
        assert str(queries[winner].id) in errors[loser]
        assert str(queries[loser].id) in errors[loser]
        assert f"adopt='{queries[winner].id}:" in errors[loser]
        check(store, read_all, *given, pair[winner])
        again = start(
            spark, pair[loser], tmp_path / f"c-{pair[loser].name}", LogSink(store.path, "orders", app_id=app_id)
        )
        with pytest.raises(StreamingQueryException, match=str(queries[winner].id)):
            again.awaitTermination(110)
        forget_last_commit(tmp_path / f"c-{pair[winner].name}")
        run(spark, pair[winner], tmp_path / f"c-{pair[winner].name}", LogSink(store.path, "orders", app_id=app_id))
        run(
            spark,
            pair[loser],
            tmp_path / f"c-{pair[loser].name}",
            LogSink(store.path, "orders", app_id=f"other {app_id}"),
        )
        given += pair
        check(store, read_all, *given)


def test_a_topic_altered_between_encoding_and_commit_is_encoded_for_again(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """New settings, and more partitions: the batch obeys those it is committed under."""
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    commit = Committer.commit
    tries = 0
    codec, alterations = "", list[dict[str, Any]]()

    def altered(self: Committer, *given: Any, **named: Any) -> Any:
        nonlocal tries
        tries += 1
        if alterations:
            store.alter_topic("orders", **alterations.pop())
        return commit(self, *given, **named)

    monkeypatch.setattr(Committer, "commit", altered)
    for partitions in range(4, 4 + ROUNDS):
        tries = 0
        codec = rng.choice([each for each in ("gzip", "zstd", "lz4") if each != codec])  # else nothing is altered
        alterations += rng.sample(
            [{"partitions": partitions}, {"configs": {"compression.type": codec, "segment.bytes": 5000}}], 2
        )
        before = store.ends(store.topic("orders")).high_watermarks
        rows.add()
        run(spark, rows, checkpoint, LogSink(store.path, "orders", app_id="app"))
        assert tries == 3
        check(store, read_all, rows)
        for number, records in read_all(store, "orders").items():
            base = before[number] if number < len(before) else 0
            assert {partition_for_key(record.key or b"", partitions) for record in records[base:]} <= {number}
            assert {each.codec_id for each in batches_from(store, number, base)} <= {codec_by_name(codec).id}
        forget_last_commit(checkpoint)
    run(spark, rows, checkpoint, LogSink(store.path, "orders", app_id="app"))
    check(store, read_all, rows)


def test_a_topic_altered_at_any_moment_of_a_batch(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    rows, checkpoint = Rows(tmp_path / "in", "a", rng), tmp_path / "checkpoint"
    over = threading.Event()
    failed: list[BaseException] = []

    def alter() -> None:
        mine = random.Random(seed)
        partitions = 3
        try:
            with LogStore(store.path) as other:
                while not over.wait(mine.uniform(0.2, 1.0)):
                    partitions += partitions < 12
                    other.alter_topic(
                        "orders", partitions=partitions, configs={"segment.bytes": mine.randrange(2000, 9000)}
                    )
        except BaseException as error:  # shown by the test
            failed.append(error)

    thread = threading.Thread(target=alter)
    thread.start()
    try:
        for _ in range(ROUNDS):
            rows.add()
            rows.add()
            run(spark, rows, checkpoint, LogSink(store.path, "orders", app_id="app"))
            forget_last_commit(checkpoint)
    finally:
        over.set()
        thread.join()
    assert not failed
    run(spark, rows, checkpoint, LogSink(store.path, "orders", app_id="app"))
    check(store, read_all, rows)


# --- drivers of their own -------------------------------------------------------------------------------------------


class Killed:
    """One stream whose every driver is killed, each at another step; the next one finds what it left."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        root.mkdir()
        self.root = root / "store"
        self.checkpoint = root / "checkpoint"
        self.rows = Rows(root / "in", "a", self.rng)
        with LogStore(self.root, create=True) as store:
            store.create_topic("orders", partitions=3, configs={"segment.bytes": 2000})

    def run(self) -> None:
        for step in self.rng.sample(STEPS, len(STEPS)):
            for _ in range(self.rng.randrange(1, 3)):
                self.rows.add()
            last = self.rows.files - 1
            flush_ms = self.rng.choice((0, 300, 1000))
            driver = drive(self.root, self.rows, self.checkpoint, kill=step, batch=last, seed=last, flush_ms=flush_ms)
            try:
                code = driver.wait(400)
            finally:
                driver.kill()
            with LogStore(self.root) as store:
                commits = len(Committer(store).ledger.commits())
            if step == "any":
                assert code in (0, -signal.SIGKILL), said(self.checkpoint)
                assert commits in (last, last + 1)
            else:
                assert code == -signal.SIGKILL, (step, said(self.checkpoint))
                assert commits == last + (step in COMMITTED), step


@pytest.mark.timeout(0 if ROUNDS > 3 else 1800)
def test_a_driver_killed_at_each_step_loses_and_doubles_nothing(
    spark: Spark, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    streams = [Killed(tmp_path / str(number), seed + number) for number in range(STREAMS)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Killed.run, streams))
    for stream in streams:
        stream.rows.add()
        run(spark, stream.rows, stream.checkpoint, LogSink(stream.root, "orders", app_id="app"))
        with LogStore(stream.root) as store:
            check(store, read_all, stream.rows)
            assert len(Committer(store).ledger.commits()) == stream.rows.files


def check_not_back(before: TopicEnds, now: TopicEnds) -> None:
    """What readers were shown, and what a flush let go, stays."""
    assert now.applied_sequence >= before.applied_sequence
    assert now.flushed_sequence >= before.flushed_sequence
    assert all(map(int.__ge__, now.high_watermarks, before.high_watermarks))
    assert all(map(int.__ge__, now.recovery_points, before.recovery_points))


@pytest.mark.timeout(0 if ROUNDS > 3 else 900)
def test_a_driver_that_stalled_and_lost_its_lease_cannot_do_harm(
    spark: Spark, store: LogStore, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    """While it sleeps, another takes the lease, writes, flushes. Its own commit is refused then and made anew."""
    rng = random.Random(seed)
    rows, others = Rows(tmp_path / "in", "a", rng), Rows(tmp_path / "other", "b", rng)
    stalls: dict[int, str] = {}
    for _ in range(ROUNDS):
        for step in rng.sample(STALLS, len(STALLS)):
            for _ in range(rng.randrange(1, 3)):
                rows.add()
            stalls[rows.files - 1] = step
    checkpoint = tmp_path / "checkpoint"
    driver = drive(Path(store.path), rows, checkpoint, stalls=stalls, flush_ms=rng.choice((0, 60_000)))
    committer = Committer(store)
    topic = store.topic("orders")
    lease = Path(store.layout.locks, "leases")
    ends = store.ends(topic)
    try:
        for number, (batch, step) in enumerate(sorted(stalls.items())):
            deadline = time.monotonic() + 300
            while not has_stopped(driver):
                assert driver.poll() is None, said(checkpoint)
                assert time.monotonic() < deadline, "it never stalled"
                check_not_back(ends, ends := store.ends(topic))
                time.sleep(0.005)
            last = committer.ledger.last_batch("app")
            assert (last.batch_id if last else -1) == batch - (step not in COMMITTED), step
            lease.unlink()  # as a lock service takes one back from a client it no longer hears
            others.add()
            append_table(committer, "orders", others.last_table(), app=AppBatch("other", number))
            if rng.random() < 0.5:
                committer.flush(topic)
            ends = store.ends(topic)
            driver.send_signal(signal.SIGCONT)
        while driver.poll() is None:
            check_not_back(ends, ends := store.ends(topic))
            time.sleep(0.005)
        assert driver.wait() == 0, said(checkpoint)
    finally:
        driver.kill()
        driver.wait()
    committer.flush(topic)
    check(store, read_all, rows, others)
    assert len(committer.ledger.commits()) == rows.files + others.files
    assert os.listdir(store.layout.staging) == []
