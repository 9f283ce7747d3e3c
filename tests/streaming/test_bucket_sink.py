"""The sink with a store in a bucket: executors and driver share nothing but a server's URL."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from bucket import servers
from bucket.servers import ROOT, Server
from duramen.demo import FILES
from logstore import errors
from logstore.bucket.store import BucketStore
from streaming.options import SinkOptions, StorageOptions
from streaming.restore import restore_state
from streaming.sink import LogSink


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def options(server: Server) -> dict[str, str]:
    """Nothing secret: tasks get them too."""
    return {"endpoint": server.endpoint, "region": "us-east-1", "allow_http": "true", "skip_signature": "true"}


@pytest.fixture
def url(server: Server) -> str:
    return server.url(uuid.uuid4().hex)


def rows(spark: SparkSession, first: int, count: int) -> DataFrame:
    return spark.range(first, first + count, 1, 3).selectExpr(
        "cast(id % 7 as string) as key", "concat('v', id) as value"
    )


def sink(url: str, options: dict[str, str], dead_letter_topic: str | None = None) -> LogSink:
    return LogSink(
        url,
        "orders",
        app_id="app",
        create_topics={"partitions": 2},
        dead_letter_topic=dead_letter_topic,
        options=SinkOptions(storage_options=options),
    )


def values(url: str, options: dict[str, str]) -> list[bytes | None]:
    store = BucketStore(url, storage_options=options)
    return sorted(r.value or b"" for number in range(2) for r in store.reader("orders", number).records(0))


def test_batches_are_written_once_by_tasks(spark: SparkSession, url: str, options: dict[str, str]) -> None:
    mine = sink(url, options)
    for batch in range(3):
        done = mine.write(rows(spark, batch * 100, 100), batch)
        assert (done.records, done.replayed) == (100, False)
    assert sink(url, options).write(rows(spark, 200, 100), 2).replayed
    assert values(url, options) == sorted(b"v%d" % n for n in range(300))
    with pytest.raises(errors.MissingBatches):
        sink(url, options).write(rows(spark, 0, 1), 9)


def test_a_query_goes_on_after_a_restart(
    spark: SparkSession, url: str, options: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    for turn in range(2):
        rows(spark, turn * 50, 50).write.mode("append").parquet(str(folder))
        stream = spark.readStream.schema("key string, value string").parquet(str(folder))
        query = (
            stream.writeStream.foreachBatch(sink(url, options))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert values(url, options) == sorted(b"v%d" % n for n in range(100))


def test_dead_letters_go_into_the_same_commit(spark: SparkSession, url: str, options: dict[str, str]) -> None:
    store = BucketStore(url, create=True, storage_options=options)
    store.create_topic("orders", partitions=2, configs={"cleanup.policy": "compact"})
    store.create_topic("dead")
    some = spark.sql("select 'k' as key, 'v' as value union all select null as key, 'no key' as value")
    done = sink(url, options, dead_letter_topic="dead").write(some, 0)
    assert done.dead_letters == 1
    assert values(url, options) == [b"v"]
    assert [record.value for record in store.reader("dead", 0).records(0)] == [b"no key"]


def test_rows_name_their_topics_and_all_come_at_once(spark: SparkSession, url: str, options: dict[str, str]) -> None:
    """One commit for all topics, one of which is made by the batch; other shuffle partitions make the same batch."""
    some = spark.range(90).selectExpr(
        "cast(id % 7 as string) as key", "concat('v', id) as value", "concat('topic-', id % 3) as topic"
    )
    made = {"create_topics": {"partitions": 2}, "options": SinkOptions(storage_options=options)}
    done = LogSink(url, app_id="app", **made).write(some.repartition(5), 0)
    assert sorted(done.topics) == ["topic-0", "topic-1", "topic-2"]
    store = BucketStore(url, storage_options=options)
    versions = {row.plan.key for row in store.ledger.refresh().rows if row.plan is not None}
    assert len(versions) == 1
    assert LogSink(url, app_id="app", **made).write(some.repartition(2), 0).replayed
    ends = store.ends_at_once(store.topics())
    assert [sum(each.high_watermarks) for each in ends.values()] == [30, 30, 30]


def test_a_query_is_not_mixed_with_another_and_may_be_taken_over(
    spark: SparkSession, url: str, options: dict[str, str]
) -> None:
    def of(query_id: str, adopt: str | None = None) -> LogSink:
        more = SinkOptions(storage_options=options, query_id=query_id)
        return LogSink(url, "orders", app_id="app", create_topics={"partitions": 2}, adopt=adopt, options=more)

    for batch in range(2):
        of("first").write(rows(spark, batch * 10, 10), batch)
    with pytest.raises(errors.ReplayMismatch, match="adopt='first:1'"):
        of("second").write(rows(spark, 20, 10), 0)
    assert not of("second", adopt="first:1").write(rows(spark, 20, 10), 0).replayed
    with pytest.raises(errors.ReplayMismatch):  # it slept, and wakes up late
        of("first").write(rows(spark, 30, 10), 2)
    with pytest.raises(errors.ReplayMismatch):
        of("third", adopt="first:1").write(rows(spark, 30, 10), 0)
    assert values(url, options) == sorted(b"v%d" % n for n in range(30))


def test_what_was_written_is_read_by_tasks(spark: SparkSession, url: str, options: dict[str, str]) -> None:
    sink(url, options).write(rows(spark, 0, 100), 0)
    given = {f"storage.{name}": value for name, value in options.items()} | {"store": url, "subscribe": "orders"}
    found = spark.read.format("duramen").options(**given).load()
    assert sorted(bytes(row.value) for row in found.collect()) == sorted(b"v%d" % n for n in range(100))
    assert 0 < found.where("partition = 1").count() < 100


def given(url: str, options: dict[str, str], **more: str) -> dict[str, str]:
    """Options of the data source."""
    return {f"storage.{name}": value for name, value in options.items()} | {"store": url} | more


def test_a_dataframe_is_written_by_the_data_source(spark: SparkSession, url: str, options: dict[str, str]) -> None:
    store = BucketStore(url, create=True, storage_options=options)
    store.create_topic("orders", partitions=2)
    for _ in range(2):  # the second time it is a replay
        named = given(url, options, topic="orders", app_id="app", batch_id="0")
        rows(spark, 0, 100).write.format("duramen").options(**named).mode("append").save()
    assert values(url, options) == sorted(b"v%d" % n for n in range(100))


def test_the_data_source_has_dead_letters_and_says_what_is_wrong(
    spark: SparkSession, url: str, options: dict[str, str]
) -> None:
    store = BucketStore(url, create=True, storage_options=options)
    store.create_topic("orders", partitions=2)
    store.create_topic("dead")
    refused = spark.sql("select cast(null as string) as key, 'no key' as value")
    store.alter_topic("orders", configs={"cleanup.policy": "compact"})
    named = given(url, options, topic="orders", deadLetterTopic="dead")
    refused.write.format("duramen").options(**named).mode("append").save()
    assert [record.value for record in store.reader("dead", 0).records(0)] == [b"no key"]
    unknown = rows(spark, 0, 1).write.format("duramen").options(**given(url, options, topic="ordres"))
    with pytest.raises(Exception, match="no topic is called ordres"):
        unknown.mode("append").save()


def test_a_stream_is_written_by_the_data_source(
    spark: SparkSession, url: str, options: dict[str, str], tmp_path: Path
) -> None:
    """Once also when Spark forgets that a batch is done; and after the topic was altered."""
    store = BucketStore(url, create=True, storage_options=options)
    store.create_topic("orders", partitions=2)

    def run() -> None:
        stream = spark.readStream.schema("key string, value string").parquet(str(tmp_path / "in"))
        query = (
            stream.writeStream.format("duramen")
            .options(**given(url, options, topic="orders", app_id="app"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    for turn in range(2):
        rows(spark, turn * 50, 50).write.mode("append").parquet(str(tmp_path / "in"))
        run()
        store.alter_topic("orders", configs={"retention.ms": str(10**12 + turn)})
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (newest, newest.with_name(f".{newest.name}.crc")):
        path.unlink(missing_ok=True)
    run()
    assert values(url, options) == sorted(b"v%d" % n for n in range(100))
    progress = LogSink(url, "orders", app_id="app", options=SinkOptions(storage_options=options)).progress()
    assert [(each.batch_id, each.records) for each in progress] == [(0, 50), (1, 50)]


def test_the_sink_tells_how_batches_went(spark: SparkSession, url: str, options: dict[str, str]) -> None:
    mine = sink(url, options)
    counts = (10, 0, 30)
    done = [mine.write(rows(spark, 0, count), batch) for batch, count in enumerate(counts)]
    found = mine.progress()
    assert [(each.batch_id, each.records) for each in found] == list(enumerate(counts))
    assert [each.bytes for each in found] == [each.bytes for each in done]
    assert [each.commit_ms for each in found] == [each.timings_ms["commit"] for each in done]
    assert all(each.workers for each in (found[0], found[2]))
    elsewhere = LogSink(url, "orders", app_id="app", options=SinkOptions(storage_options=options)).progress()
    assert [each.commit_ms for each in elsewhere[:-1]] == [each.commit_ms for each in found[:-1]]
    assert elsewhere[-1].commit_ms is None


def test_a_stream_reads_batch_by_batch(spark: SparkSession, url: str, options: dict[str, str], tmp_path: Path) -> None:
    given = {f"storage.{name}": value for name, value in options.items()} | {"store": url, "subscribe": "orders"}
    for batch in range(2):
        sink(url, options).write(rows(spark, batch * 30, 30), batch)
        query = (
            spark.readStream.format("duramen")
            .options(**given, startingOffsets="earliest")
            .load()
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .option("path", str(tmp_path / "out"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    seen = [bytes(row.value) for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(seen) == sorted(b"v%d" % n for n in range(60))


def test_the_state_is_restored_with_the_credentials_of_the_environment(
    spark: SparkSession, url: str, options: dict[str, str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink(url, options).write(rows(spark, 0, 100), 0)
    environment = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    state = restore_state(spark, store=url, topic="orders")
    assert {bytes(row.key): bytes(row.value) for row in state.df.collect()} == {
        b"%d" % (n % 7): b"v%d" % n for n in range(93, 100)
    }


def test_the_state_is_restored_by_the_options_of_an_open_store(
    spark: SparkSession, url: str, options: dict[str, str]
) -> None:
    sink(url, options).write(rows(spark, 0, 100), 0)
    with BucketStore(url, storage_options=options) as store:
        state = restore_state(spark, store=store, topic="orders")
    assert {bytes(row.value) for row in state.df.collect()} == {b"v%d" % n for n in range(93, 100)}


def test_secrets_do_not_travel(url: str, options: dict[str, str]) -> None:
    mine = sink(url, options | {"secret_access_key": "nobody-may-see"})
    assert b"nobody-may-see" not in pickle.dumps(mine.__getstate__() | {"_mark": None})
    assert "nobody-may-see" not in repr(mine.options)
    storage = StorageOptions(options | {"secret_access_key": "nobody-may-see"})
    assert pickle.loads(pickle.dumps(storage)) == options
    assert "nobody-may-see" not in repr(storage)


@pytest.mark.timeout(300)
def test_the_demo_in_a_bucket_ends_with_the_truth_and_few_requests() -> None:
    command = [sys.executable, "-m", "duramen.demo_bucket"]
    env = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 missing, 0 doubled" in done.stdout
    assert "equal to the truth" in done.stdout
    rows = re.findall(r"^│ +(\d+) │ +5,000 │ +(\d+) │ +(\d+) │.*│$", done.stdout, re.M)
    # Batches about the kill may have been committed without a note.
    assert len(rows) >= FILES - 2
    assert all(int(total) <= int(tasks) + 8 for _, tasks, total in rows)
