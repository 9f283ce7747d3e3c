"""Over Spark Connect: the sink is called beside the server and knows its query; source and restore are the same."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.errors.exceptions.connect import SparkException
from pyspark.sql import functions as F

from logstore.commit.committer import Committer
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.store import LogStore
from streaming import LogSink, restore_state
from streaming.sink import APPLY_ON_DRIVER_BYTES

WAIT_S = 300
TEXT = ("cast(key as string) as key", "cast(value as string) as value", "partition")
TEXT_SCHEMA = "key string, value string, partition int"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def queries(connect: Any) -> Iterator[list[Any]]:
    """Queries a test starts; stopped at its end."""
    started: list[Any] = []
    yield started
    for query in started:
        query.stop()


def add_file(folder: Path, number: int, rows: int = 50) -> list[tuple[str, str, int]]:
    """A file of JSON lines; returns its rows as they are to be read from a topic of four partitions."""
    lines = [{"key": f"k{row % 11}", "value": f"{number}-{row}"} for row in range(rows)]
    draft = folder.parent / f"{number}.draft"
    draft.write_text("\n".join(map(json.dumps, lines)))
    os.utime(draft, (1_700_000_000 + number, 1_700_000_000 + number))
    draft.rename(folder / f"{number}.json")
    return [(line["key"], line["value"], partition_for_key(line["key"].encode(), 4)) for line in lines]


def file_stream(connect: Any, folder: Path) -> Any:
    return connect.readStream.schema("key string, value string").option("maxFilesPerTrigger", 1).json(str(folder))


def read_back(connect: Any, store: LogStore, topic: str = "orders") -> Any:
    return connect.read.format("duramen").option("store", store.path).option("subscribe", topic).load()


def assert_rows(connect: Any, found: Any, rows: list[tuple[str, str, int]]) -> None:
    expected = connect.createDataFrame(rows, TEXT_SCHEMA)
    assert_df_equality(found.selectExpr(*TEXT), expected, ignore_row_order=True, ignore_nullable=True)


def start(writer: Any, sink: Any, checkpoint: Path, queries: list[Any]) -> Any:
    """Spark gives the worker of a function ten seconds to come up, fixed; on a busy machine it is asked again."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            queries.append(writer.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).start())
            return queries[-1]
        except SparkException as error:
            if time.monotonic() > end or "worker failed to connect back" not in str(error):
                raise


def test_a_stream_is_written_once_also_when_its_checkpoint_forgot_a_batch(
    connect: Any, store: LogStore, source: Path, tmp_path: Path, queries: list[Any]
) -> None:
    rows = add_file(source, 0) + add_file(source, 1)
    stream = file_stream(connect, source)
    sink = LogSink(store.path, "orders", app_id="app")
    first = start(stream.writeStream.trigger(availableNow=True), sink, tmp_path / "checkpoint", queries)
    assert first.awaitTermination(WAIT_S)
    assert_rows(connect, read_back(connect, store), rows)

    for name in ("1", ".1.crc"):  # Spark runs batch 1 again
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    rows += add_file(source, 2)
    again = start(stream.writeStream.trigger(availableNow=True), sink, tmp_path / "checkpoint", queries)
    assert again.awaitTermination(WAIT_S)
    assert again.exception() is None
    assert_rows(connect, read_back(connect, store), rows)
    found = [(row.app_id, row.batch_id, row.records, row.query_id) for row in Committer(store).ledger.commits()]
    assert found == [("app", batch, 50, first.id) for batch in range(3)]


def test_queries_of_one_session_know_themselves(
    connect: Any, store: LogStore, source: Path, tmp_path: Path, queries: list[Any]
) -> None:
    """Made from one stream, even with the same sink class, they look alike in everything but their ids."""
    store.create_topic("others", partitions=4)
    rows = add_file(source, 0)
    stream = file_stream(connect, source)
    for topic in ("orders", "others"):
        start(stream.writeStream, LogSink(store.path, topic, app_id=f"to-{topic}"), tmp_path / f"at-{topic}", queries)
    for query in queries:
        query.processAllAvailable()
    rows += add_file(source, 1)
    for query in queries:
        query.processAllAvailable()
    for topic in ("orders", "others"):
        assert_rows(connect, read_back(connect, store, topic), rows)
    found = {(row.app_id, row.batch_id, row.query_id) for row in Committer(store).ledger.commits()}
    ids = {f"to-{topic}": query.id for topic, query in zip(("orders", "others"), queries, strict=True)}
    assert found == {(app_id, batch, query_id) for app_id, query_id in ids.items() for batch in range(2)}


def test_a_second_query_under_an_app_id_is_stopped_with_the_name_of_the_first(
    connect: Any, store: LogStore, source: Path, tmp_path: Path, queries: list[Any]
) -> None:
    rows = add_file(source, 0)
    stream = file_stream(connect, source)
    sink = LogSink(store.path, "orders", app_id="app")  # one object for both: each query gets its own copy
    first = start(stream.writeStream, sink, tmp_path / "first", queries)
    first.processAllAvailable()
    second = start(stream.writeStream, sink, tmp_path / "second", queries)
    with pytest.raises(Exception, match="app 'app' was last written by query") as stopped:
        second.awaitTermination(WAIT_S)
    assert first.id in str(stopped.value)
    assert second.id in str(stopped.value)
    rows += add_file(source, 1)
    first.processAllAvailable()
    assert_rows(connect, read_back(connect, store), rows)


def test_a_sink_that_cannot_know_its_query_says_so(
    connect: Any, store: LogStore, source: Path, tmp_path: Path, queries: list[Any]
) -> None:
    path = store.path

    def made_inside(batch: Any, batch_id: int) -> None:
        LogSink(path, "orders", app_id="inside")(batch, batch_id)

    rows = add_file(source, 0)
    stream = file_stream(connect, source)
    other = start(stream.writeStream, LogSink(path, "orders", app_id="app"), tmp_path / "first", queries)
    other.processAllAvailable()
    query = start(stream.writeStream, made_inside, tmp_path / "second", queries)
    with pytest.raises(Exception, match="2 queries are active in this Spark Connect session"):
        query.awaitTermination(WAIT_S)
    assert_rows(connect, read_back(connect, store), rows)


def test_a_batch_that_executors_append_arrives_whole(
    connect: Any, store: LogStore, tmp_path: Path, queries: list[Any]
) -> None:
    count = APPLY_ON_DRIVER_BYTES // 1000 + 2000
    stream = connect.readStream.format("rate-micro-batch").option("rowsPerBatch", count).load()
    key = F.col("value").cast("string")
    stream = stream.select(key.alias("key"), F.rpad(key, 1000, "0123456789").alias("value"))
    sink = LogSink(store.path, "orders", app_id="app")
    query = start(stream.writeStream.trigger(availableNow=True), sink, tmp_path / "checkpoint", queries)
    assert query.awaitTermination(WAIT_S)
    assert query.exception() is None
    text = ("cast(key as string) as key", "sha2(value, 256) as value")
    number = F.col("id").cast("string")
    truth = connect.range(count).select(number.alias("key"), F.rpad(number, 1000, "0123456789").alias("value"))
    truth = truth.selectExpr("key", "sha2(cast(value as binary), 256) as value")
    found = read_back(connect, store).selectExpr(*text)
    assert_df_equality(found, truth, ignore_row_order=True, ignore_nullable=True)


def test_a_topic_is_read_and_restored(connect: Any, store: LogStore, tmp_path: Path, queries: list[Any]) -> None:
    values = [(f"k{n % 20}", None if n % 7 == 3 else f"v{n}") for n in range(300)]
    store.append("orders", [Record(key.encode(), None if value is None else value.encode()) for key, value in values])
    rows = [(key, value, partition_for_key(key.encode(), 4)) for key, value in values]
    assert_rows(connect, read_back(connect, store), rows)

    stream = connect.readStream.format("duramen").option("store", store.path).option("subscribe", "orders")
    stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 100).load()
    query = (
        stream.writeStream.format("parquet")
        .option("path", str(tmp_path / "copy"))
        .option("checkpointLocation", str(tmp_path / "copy-checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    queries.append(query)
    assert query.awaitTermination(WAIT_S)
    assert query.exception() is None
    assert_rows(connect, connect.read.parquet(str(tmp_path / "copy")), rows)

    state = restore_state(connect, store=store.path, topic="orders")
    latest = {row[0]: row for row in rows}
    assert_rows(connect, state.df, [row for row in latest.values() if row[1] is not None])
    assert sum(state.end_offsets.values()) == 300
