"""Restored state as a DataFrame and as a Delta table, the stream that follows on, and Delta's changes as a source."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from chispa import assert_df_equality
from pyspark.errors import PySparkException

from logstore.directory.state import write_state
from logstore.errors import HistoryCompacted
from logstore.files import OS_FILES
from logstore.records.record import Record
from logstore.store import LogStore
from streaming import restore_into_delta, restore_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BASE_MS = 1_700_000_000_000
ROOT = Path(__file__).resolve().parent.parent.parent


def state_df(spark: SparkSession, state: dict[str, str]) -> DataFrame:
    rows = [(bytearray(key.encode()), bytearray(value.encode())) for key, value in state.items()]
    return spark.createDataFrame(rows, "key binary, value binary")


def assert_state(spark: SparkSession, found: DataFrame, state: dict[str, str]) -> None:
    assert_df_equality(found.select("key", "value"), state_df(spark, state), ignore_row_order=True)


def change(store: LogStore, name: str, number: int, **fields: int) -> None:
    """As compaction changes a partition's state."""
    topic = store.topic(name)
    state = store.partition_state(topic, number)
    changed = replace(state, generation=state.generation + 1, **fields)
    write_state(OS_FILES, store.layout.partition_state(topic.id, number), changed)


@pytest.fixture
def accounts(store: LogStore, append: Any) -> LogStore:
    store.create_topic("accounts", partitions=3, configs={"cleanup.policy": "compact", "segment.bytes": 400})
    append("accounts", [Record(b"k%d" % n, b"1", BASE_MS + n) for n in range(10)])
    append("accounts", [Record(b"k%d" % n, None if n == 3 else b"2", BASE_MS + 100 + n) for n in range(5)])
    return store


NOW = {f"k{n}": "2" if n < 5 else "1" for n in range(10) if n != 3}


def test_the_state_and_the_stream_that_follows_on(
    spark: SparkSession, accounts: LogStore, path: str, append: Any, tmp_path: Path
) -> None:
    found = restore_state(spark, store=path, topic="accounts")
    assert found.plan.by_partition
    assert "Exchange" not in found.df._jdf.queryExecution().executedPlan().toString()
    append("accounts", [Record(b"k0", b"3", BASE_MS), Record(b"new", b"1", BASE_MS), Record(b"k9", None, BASE_MS)])
    assert_state(spark, found.df, NOW)  # of the moment it was planned

    seen: list[tuple[str, str | None]] = []

    def take(df: DataFrame, batch_id: int) -> None:
        seen.extend((bytes(row.key).decode(), row.value and bytes(row.value).decode()) for row in df.collect())

    query = (
        spark.readStream.format("duramen")
        .option("store", path)
        .option("subscribe", "accounts")
        .option("startingOffsets", found.starting_offsets)
        .load()
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(seen, key=str) == sorted([("k0", "3"), ("new", "1"), ("k9", None)], key=str)


def test_as_of_offsets_and_times_and_what_was_thinned(spark: SparkSession, accounts: LogStore, path: str) -> None:
    first = restore_state(spark, store=path, topic="accounts", as_of_timestamp_ms=BASE_MS + 50)
    assert_state(spark, first.df, {f"k{n}": "1" for n in range(10)})
    again = restore_state(spark, store=path, topic="accounts", as_of_offsets=first.end_offsets)
    assert_state(spark, again.df, {f"k{n}": "1" for n in range(10)})
    now = restore_state(spark, store=path, topic="accounts")
    thinned = next(number for number, end in now.end_offsets.items() if end > first.end_offsets[number] > 0)
    change(accounts, "accounts", thinned, first_dirty_offset=now.end_offsets[thinned])
    with pytest.raises(HistoryCompacted, match=f"accounts-{thinned}"):
        restore_state(spark, store=path, topic="accounts", as_of_offsets=first.end_offsets)
    with pytest.raises(PySparkException, match="can no longer be restored"):
        first.df.collect()
    left = restore_state(spark, store=path, topic="accounts", as_of_offsets=first.end_offsets, allow_thinned=True)
    assert left.df.count() == 10
    assert_state(spark, now.df, NOW)


def test_keys_in_several_partitions_are_merged(spark: SparkSession, store: LogStore, path: str, append: Any) -> None:
    store.create_topic("mixed", partitions=2)
    rows = [(b"a", b"old", 0, 5), (b"a", b"new", 1, 9), (b"b", b"x", 0, 1), (b"b", None, 1, 2), (b"c", b"y", 0, 3)]
    append(
        "mixed", [Record(key, value, BASE_MS + ms) for key, value, _, ms in rows], [number for *_, number, _ in rows]
    )
    found = restore_state(spark, store=path, topic="mixed")
    assert "merged" in found.plan.explain()
    assert_state(spark, found.df, {"a": "new", "c": "y"})


@pytest.mark.parametrize("placed", [False, True], ids=["by key", "keys in several partitions"])
def test_where_versions_decide_a_late_record_does_not_count(
    spark: SparkSession, store: LogStore, path: str, append: Any, tmp_path: Path, placed: bool
) -> None:
    configs = {"duramen.compaction.order": "header", "duramen.compaction.version.header": "v"}
    store.create_topic("versions", partitions=2, configs=configs)
    table = str(tmp_path / "table")

    def send(*rows: tuple[bytes, bytes | None, int, int]) -> None:
        records = [
            Record(key, value, BASE_MS - version, (("v", version.to_bytes(8, "big")),))
            for key, value, version, _ in rows
        ]
        append("versions", records, [number for *_, number in rows] if placed else None)

    def check(expected: dict[str, str]) -> None:
        found = restore_state(spark, store=path, topic="versions")
        assert found.plan.by_partition != placed
        assert "the highest version in the header 'v'" in found.plan.explain()
        assert found.df.columns == ["key", "value", "partition", "offset", "timestamp"]
        assert_state(spark, found.df, expected)
        restore_into_delta(spark, store=path, topic="versions", path=table)
        assert_state(spark, spark.read.format("delta").load(table), expected)

    send((b"a", b"3", 3, 0), (b"a", b"1", 1, 1), (b"b", b"2", 2, 1), (b"b", None, 5, 0), (b"c", b"1", 1, 0))
    check({"a": "3", "c": "1"})
    send((b"a", b"2", 2, 1), (b"b", b"4", 4, 1), (b"c", b"7", 7, 1))
    check({"a": "3", "c": "7"})


def test_a_delta_table_follows_by_increments_and_is_written_anew_when_they_do_not_tell_all(
    spark: SparkSession, accounts: LogStore, path: str, append: Any, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")

    def check(expected: dict[str, str], operation: str) -> None:
        restored = restore_into_delta(spark, store=path, topic="accounts", path=table)
        assert_state(spark, restored.df, expected)
        assert_state(spark, spark.read.format("delta").load(table), expected)
        assert restored.plan.is_increment == (operation == "MERGE")
        last = spark.sql(f"describe history delta.`{table}` limit 1").collect()[0]
        assert last.operation == operation
        assert json.loads(last.userMetadata)["duramen"]["end_offsets"] == list(restored.end_offsets.values())

    check(NOW, "WRITE")
    append("accounts", [Record(b"k0", b"3", BASE_MS), Record(b"k9", None, BASE_MS), Record(b"new", b"1", BASE_MS)])
    later = {**NOW, "k0": "3", "new": "1"}
    del later["k9"]
    check(later, "MERGE")
    # A tombstone that compaction dropped is in no increment.
    append("accounts", [Record(b"k1", b"4", BASE_MS)])
    change(accounts, "accounts", 0, dropped_tombstones=1)
    check({**later, "k1": "4"}, "WRITE")
    accounts.delete_topic("accounts")
    accounts.create_topic("accounts", partitions=3)
    append("accounts", [Record(b"other", b"1", BASE_MS)])
    check({"other": "1"}, "WRITE")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("delta_changes", ROOT / "docs" / "examples" / "delta_changes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_delta_tables_changes_become_a_topic_that_restores_the_table(
    spark: SparkSession, store: LogStore, path: str, tmp_path: Path
) -> None:
    delta_changes = example()
    table = str(tmp_path / "source")
    store.create_topic("changes", partitions=2, configs={"cleanup.policy": "compact"})
    spark.sql(
        f"create table delta.`{table}` (id long, name string, balance double) using delta "
        "tblproperties (delta.enableChangeDataFeed = true)"
    )

    def replicate() -> None:
        delta_changes.replicate(
            spark, store=path, topic="changes", table=table, key="id", checkpoint=str(tmp_path / "checkpoint")
        )

    def check() -> None:
        source = spark.read.format("delta").load(table)
        restored = delta_changes.as_table(
            restore_state(spark, store=path, topic="changes").df, source.schema.simpleString()
        )
        assert_df_equality(restored, source, ignore_row_order=True)

    spark.sql(f"insert into delta.`{table}` values (1, 'ann', 1.5), (2, 'bob', 2.5), (3, null, 0)")
    replicate()
    check()
    spark.sql(f"update delta.`{table}` set balance = balance + 1 where id = 1")
    spark.sql(f"delete from delta.`{table}` where id = 2")
    spark.sql(
        f"merge into delta.`{table}` t using (select 3 id, 'cy' name union all select 4, 'dee') s on t.id = s.id "
        "when matched then update set name = s.name "
        "when not matched then insert (id, name, balance) values (s.id, s.name, 9)"
    )
    replicate()
    replicate()  # nothing new: nothing is written
    check()
    records = spark.read.format("duramen").option("store", path).option("subscribe", "changes").load()
    assert records.where("value is null").selectExpr("cast(key as string)").collect() == [("2",)]
    assert records.count() == 3 + 1 + 1 + 2
