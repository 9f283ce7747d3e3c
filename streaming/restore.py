"""State restoration with Spark: the latest value of every key, now or at a moment that is still exact.

One task a partition reads the log twice, first for the keys and then for the records that count; only those reach
Spark. Topics whose keys may live in several partitions are merged afterwards by timestamp, which costs a shuffle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from logstore.store.restore import RestorePlan, plan_restore, restore_partition
from logstore.store.store import LogStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "key binary, value binary, partition int, offset long, timestamp timestamp"
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
Batches = Iterator[pa.RecordBatch]


def restore_state(
    spark: SparkSession,
    *,
    store: str | os.PathLike[str],
    topic: str,
    as_of_timestamp_ms: int | None = None,
    as_of_offsets: Mapping[int, int] | None = None,
    since_offsets: Mapping[int, int] | None = None,
    allow_thinned: bool = False,
    tombstones: bool = False,
) -> DataFrame:
    """Latest value per key as a DataFrame: key, value, partition, offset, timestamp.

    The DataFrame carries `end_offsets` (partition → offset), `starting_offsets` (the same as the JSON that a following
    stream takes as startingOffsets) and `plan`. With `since_offsets` only what is newer is read: an increment to apply,
    for which `tombstones=True` also delivers deleted keys, with a null value.
    Raises UnknownTopic, InvalidConfig, OffsetOutOfRange, HistoryCompacted.
    """
    path = os.path.abspath(os.fspath(store))
    with LogStore(path) as opened:
        plan = plan_restore(
            opened,
            topic,
            as_of_offsets=as_of_offsets,
            as_of_timestamp_ms=as_of_timestamp_ms,
            since_offsets=since_offsets,
            allow_thinned=allow_thinned,
        )
    partitions = len(plan.end_offsets)
    keep_tombstones = tombstones or not plan.by_partition
    tasks = spark.range(0, partitions, 1, partitions)
    rows = tasks.mapInArrow(_restore_task(path, plan, keep_tombstones), SCHEMA)
    if not plan.by_partition:
        rows = _merged(rows, tombstones)
    rows.end_offsets = dict(enumerate(plan.end_offsets))  # type: ignore[attr-defined]
    rows.starting_offsets = json.dumps({topic: {str(n): end for n, end in enumerate(plan.end_offsets)}})  # type: ignore[attr-defined]
    rows.plan = plan  # type: ignore[attr-defined]
    return rows


def _restore_task(store: str, plan: RestorePlan, tombstones: bool) -> Callable[[Batches], Batches]:
    def run(batches: Batches) -> Batches:
        with LogStore(store) as opened:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    for columns in restore_partition(opened, plan, number, tombstones=tombstones):
                        yield _rows(columns, number)

    return run


def _rows(columns: Any, partition: int) -> pa.RecordBatch:
    from logstore.records.arrow import to_arrow

    decoded = to_arrow(columns)
    micros = pa.array(columns.timestamps_ms * 1000, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    arrays = {
        "key": decoded.column("key"),
        "value": decoded.column("value"),
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), len(columns)),
        "offset": decoded.column("offset"),
        "timestamp": micros,
    }
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _merged(rows: DataFrame, tombstones: bool) -> DataFrame:
    """One row a key: the newest by timestamp; offsets of different partitions say nothing about order."""
    from pyspark.sql import functions as F

    newest = F.max_by(F.struct(*rows.columns), F.struct("timestamp", "partition", "offset")).alias("row")
    merged = rows.groupBy("key").agg(newest).select("row.*")
    return merged if tombstones else merged.where("value is not null")


def restore_into_delta(
    spark: SparkSession, *, store: str | os.PathLike[str], topic: str, path: str, full: bool = False
) -> dict[int, int]:
    """Bring a Delta table to the topic's present state; returns the end offsets it stands at.

    The first call writes the table, later ones merge what is new. The offsets are part of the table's own commit, so
    table and position never disagree. If compaction dropped tombstones since, or `full`, the table is written anew.
    """
    from delta.tables import DeltaTable

    known = None if full else _position(spark, path, topic)
    path_of_store = os.path.abspath(os.fspath(store))
    if known is not None:
        with LogStore(path_of_store) as opened:
            now = plan_restore(opened, topic)
        if list(now.dropped_tombstones) != known["dropped_tombstones"] or len(known["end_offsets"]) != len(
            now.end_offsets
        ):
            known = None
    if known is None:
        rows = restore_state(spark, store=store, topic=topic)
        with _metadata(spark, rows.plan):  # type: ignore[attr-defined]
            rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(path)
        return rows.end_offsets  # type: ignore[attr-defined, no-any-return]
    since = dict(enumerate(known["end_offsets"]))
    rows = restore_state(spark, store=store, topic=topic, since_offsets=since, tombstones=True)
    with _metadata(spark, rows.plan):  # type: ignore[attr-defined]
        (
            DeltaTable.forPath(spark, path)
            .alias("t")
            .merge(rows.alias("s"), "t.key = s.key")
            .whenMatchedDelete("s.value is null")
            .whenMatchedUpdateAll()
            .whenNotMatchedInsertAll("s.value is not null")
            .execute()
        )
    return rows.end_offsets  # type: ignore[attr-defined, no-any-return]


def _position(spark: SparkSession, path: str, topic: str) -> dict[str, Any] | None:
    from delta.tables import DeltaTable

    if not DeltaTable.isDeltaTable(spark, path):
        return None
    for row in DeltaTable.forPath(spark, path).history(10).select("userMetadata").collect():
        try:
            found: dict[str, Any] = json.loads(row.userMetadata or "")["duramen"]
        except (ValueError, KeyError, TypeError):
            continue
        return found if found.get("topic") == topic else None
    return None


class _metadata:
    """The restore's position as metadata of the Delta commit made inside."""

    def __init__(self, spark: SparkSession, plan: RestorePlan) -> None:
        self._spark = spark
        self._text = json.dumps(
            {
                "duramen": {
                    "topic": plan.topic,
                    "topic_id": plan.topic_id,
                    "end_offsets": list(plan.end_offsets),
                    "dropped_tombstones": list(plan.dropped_tombstones),
                }
            }
        )

    def __enter__(self) -> None:
        self._spark.conf.set(_USER_METADATA, self._text)

    def __exit__(self, *failure: object) -> None:
        self._spark.conf.unset(_USER_METADATA)
