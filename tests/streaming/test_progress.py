"""Rows, bytes, dead letters and times of every micro-batch: in the ledger, and beside the query's own progress."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.committer import Committed, Committer
from logstore.ledger import CommitRow
from logstore.store import LogStore
from streaming.progress import batch_progress
from streaming.sink import LogSink

Spark = Any


def test_a_query_tells_how_its_batches_went(spark: Spark, store: LogStore, tmp_path: Path) -> None:
    store.create_topic("dead")
    source = tmp_path / "in"
    source.mkdir()
    sizes = (10, 20, 30)
    for number, count in enumerate(sizes):
        given = [{"key": f"k{n:03}", "value": "x" * 7, "partition": 9 if n == 0 else None} for n in range(count)]
        lines = [json.dumps(row) for row in given]
        path = source / f"part-{number}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    sink = LogSink(store.path, "orders", app_id="app", dead_letter_topic="dead")
    stream = spark.readStream.schema("key string, value string, partition int").option("maxFilesPerTrigger", 1)
    query = (
        sink.observed(stream.json(str(source)))
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)

    found = sink.progress(query)
    assert [(each.batch_id, each.records, each.dead_letters) for each in found] == [
        (number, count, 1) for number, count in enumerate(sizes)
    ]
    for each, count in zip(found, sizes, strict=True):
        assert each.bytes > count * 11
        for ms in (each.encode_ms, each.plan_ms, each.commit_ms, each.append_ms):
            assert ms is not None
            assert 0 <= ms <= each.query.durationMs["addBatch"]
        observed = each.query.observedMetrics["duramen.app"]
        assert (observed["rows"], observed["bytes"]) == (count, count * 11)
        assert each.workers

    # The same from the ledger alone; only the newest batch's commit and append are known to nobody but the sink.
    rows = Committer(store).ledger.commits()
    assert {(row.batch_id, row.topic, row.records) for row in rows} == {
        (number, topic, records)
        for number, count in enumerate(sizes)
        for topic, records in (("orders", count - 1), ("dead", 1))
    }
    for row in rows:
        before = {"previous_commit", "previous_append"}
        assert set(row.timings_ms) == {"encode", "plan"} | (before if row.batch_id else set())
    elsewhere = LogSink(store.path, "orders", app_id="app").progress()
    assert [each.append_ms for each in elsewhere[:-1]] == [each.append_ms for each in found[:-1]]
    assert elsewhere[-1].append_ms is None
    assert elsewhere[-1].query is None


def test_times_are_told_of_the_batch_they_belong_to(spark: Spark, store: LogStore) -> None:
    """An empty batch counts, too, and appends nothing; after a replay nothing is known of the batch before."""
    rows = spark.sql("select 'k' as key, 'v' as value")
    sink = LogSink(store.path, "orders", app_id="app")
    first = sink.write(rows, 0)
    sink.write(rows.where("false"), 1)
    sink.write(rows, 2)
    assert sink.write(rows, 2).replayed
    sink.write(rows, 3)
    timings = [row.timings_ms for row in Committer(store).ledger.commits()]
    assert timings[1]["previous_append"] == first.timings_ms["append"]
    assert timings[2]["previous_append"] == 0
    assert "previous_append" not in timings[3]
    assert [(each.batch_id, each.records) for each in sink.progress()] == [(0, 1), (1, 0), (2, 1), (3, 1)]
    assert [each.append_ms is None for each in sink.progress()] == [False, False, True, False]


def test_a_batch_of_several_topics_is_one_and_a_void_row_none() -> None:
    def row(plan: str, batch_id: int, records: int, *, void: bool = False, **timings: int) -> CommitRow:
        return CommitRow(
            0,
            "id",
            "t",
            1,
            plan,
            "app",
            batch_id,
            None,
            (0,),
            (1,),
            records,
            10 * records,
            3,
            timings,
            ("w",),
            void,
            0,
            "",
        )

    rows = [row("a", 0, 5, encode=7), row("a", 0, 1, encode=7), row("b", 1, 9, void=True), row("c", 1, 2)]
    last = Committed("c", timings_ms={"commit": 4, "append": 6})
    found = batch_progress(rows, last, {0: "progress"})
    assert [(each.batch_id, each.records, each.bytes, each.dead_letters) for each in found] == [
        (0, 6, 60, 3),
        (1, 2, 20, 3),
    ]
    assert [(each.encode_ms, each.append_ms, each.query) for each in found] == [(7, None, "progress"), (None, 6, None)]


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_output_modes_become_the_changelog_the_documentation_says(
    spark: Spark, store: LogStore, tmp_path: Path, mode: str
) -> None:
    """Update sends what changed, complete everything every time; both restore to the same state."""
    from streaming.restore import restore_state

    source = tmp_path / "in"
    source.mkdir()
    for number, keys in enumerate((["a", "b"], ["b", "c"])):
        path = source / f"part-{number}.json"
        path.write_text("\n".join(json.dumps({"key": key}) for key in keys))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    counts = (
        spark.readStream.schema("key string")
        .option("maxFilesPerTrigger", 1)
        .json(str(source))
        .groupBy("key")
        .count()
        .selectExpr("key", "cast(count as string) as value")
    )
    query = (
        counts.writeStream.outputMode(mode)
        .foreachBatch(LogSink(store.path, "orders", app_id="app"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    rows = Committer(store).ledger.commits()
    assert [row.records for row in rows] == ([2, 2] if mode == "update" else [2, 3])
    state = restore_state(spark, store=store.path, topic="orders").df.collect()
    assert {bytes(row.key): bytes(row.value) for row in state} == {b"a": b"1", b"b": b"2", b"c": b"1"}
