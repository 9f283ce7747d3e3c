"""State restoration with Spark: the latest value of every key, now or at a moment that is still exact.

One task a partition reads the log twice, first for the keys and then for the records that count; only those reach
Spark. Topics whose keys may live in several partitions are merged afterwards by timestamp, which costs a shuffle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from logstore.errors import PackageMissing
from logstore.objects.opening import is_url
from logstore.python_workers import use_this_python
from logstore.restore.restore import RestorePlan, plan_restore, restore_partition, restored_batch, versions_of
from logstore.spark_tasks import Batches, numbered, numbers
from streaming.opened import opened
from streaming.options import IDS, StorageOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from logstore.topics.readable import ReadableStore

SCHEMA = "key binary, value binary, partition int, offset long, timestamp timestamp"
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_HISTORY_MAX = 20
#: where a store is, and how its bucket is reached
Address: TypeAlias = tuple[str, StorageOptions]


@dataclass(frozen=True, slots=True)
class RestoredState:
    """A topic's state as a DataFrame, and the offsets where it ends.

    `restore_state` and `restore_into_delta` return it.

        state = restore_state(spark, store="/data/store", topic="accounts")
        state.df.show()
        changes = spark.readStream.format("duramen").option("store", "/data/store").option("subscribe", "accounts")
        changes.option("startingOffsets", state.starting_offsets).load()  # what comes after it
    """

    #: key, value, partition, offset, timestamp
    df: DataFrame
    #: what is read of each partition; `plan.explain()` has it in words
    plan: RestorePlan

    @property
    def end_offsets(self) -> dict[int, int]:
        """Partition → the first offset that is not part of the state; `since_offsets` of the next restore."""
        return dict(enumerate(self.plan.end_offsets))

    @property
    def starting_offsets(self) -> str:
        """The same as JSON: the option `startingOffsets` with which a stream misses nothing and repeats nothing."""
        ends = {str(number): end for number, end in self.end_offsets.items()}
        return json.dumps({self.plan.topic: ends, IDS: {self.plan.topic: self.plan.topic_id}})


def restore_state(
    spark: SparkSession,
    *,
    store: str | os.PathLike[str] | ReadableStore,
    topic: str,
    as_of_timestamp_ms: int | None = None,
    as_of_offsets: Mapping[int, int] | None = None,
    since_offsets: Mapping[int, int] | None = None,
    allow_thinned: bool = False,
    tombstones: bool = False,
) -> RestoredState:
    """Latest value per key, now or at a moment, as a DataFrame with the offsets where it ends.

    With `since_offsets` only what is newer is read: an increment to apply, for which `tombstones=True` also delivers
    deleted keys, with a null value.

    `store` is a path, a URL, or an open store, which need not stay open: tasks reach its bucket by the same options,
    with credentials of their own.

    The DataFrame is read when an action needs it, again each time, always up to the same offsets; if compaction has
    overtaken them by then, the action fails with HistoryCompacted.
    Raises UnknownTopic, InvalidConfig, OffsetOutOfRange, HistoryCompacted.

        state = restore_state(spark, store="/data/store", topic="accounts", as_of_timestamp_ms=1_700_000_000_000)
        state.df.count(), state.end_offsets
    """
    address = _address(store)
    with opened(*address) as open_store:
        plan = plan_restore(
            open_store,
            topic,
            as_of_offsets=as_of_offsets,
            as_of_timestamp_ms=as_of_timestamp_ms,
            since_offsets=since_offsets,
            allow_thinned=allow_thinned,
        )
    return RestoredState(_restored(spark, address, plan, tombstones=tombstones), plan)


def _address(store: str | os.PathLike[str] | ReadableStore) -> Address:
    """A path that means the same to tasks, or a URL; an open store also knows how its bucket is reached."""
    if isinstance(store, (str, os.PathLike)):
        path, options = os.fspath(store), StorageOptions()
    else:
        path, options = store.path, StorageOptions(store.storage_options)
    return path if is_url(path) else os.path.abspath(path), options


def _restored(spark: SparkSession, address: Address, plan: RestorePlan, *, tombstones: bool) -> DataFrame:
    use_this_python(spark)
    # A tombstone of one partition may be what removes a key from another.
    task = _restore_task(address, plan, tombstones or not plan.by_partition)
    schema = SCHEMA if plan.by_partition else f"{SCHEMA}, version long"
    rows = numbered(spark, plan.partitions).mapInArrow(task, schema)
    return rows if plan.by_partition else _merged(rows, tombstones)


def _restore_task(address: Address, plan: RestorePlan, tombstones: bool) -> Callable[[Batches], Batches]:
    """Rows of the partitions it is given; with their versions where they are to be merged."""
    headers = not plan.by_partition and plan.order.needs_headers

    def run(batches: Batches) -> Batches:
        with opened(*address) as store:
            for number in numbers(batches):
                for columns in restore_partition(store, plan, number, tombstones=tombstones, headers=headers):
                    rows = restored_batch(columns, number)
                    if not plan.by_partition:
                        rows = rows.append_column("version", pa.array(versions_of(columns, plan.order)))
                    yield rows

    return run


def _merged(rows: DataFrame, tombstones: bool) -> DataFrame:
    """One row a key: by version, where versions decide, then by timestamp; offsets of different partitions say nothing
    about order.
    """
    from pyspark.sql import functions as F

    newest = F.max_by(F.struct(*rows.columns), F.struct("version", "timestamp", "partition", "offset")).alias("row")
    merged = rows.groupBy("key").agg(newest).select("row.*").drop("version")
    return merged if tombstones else merged.where("value is not null")


def restore_into_delta(
    spark: SparkSession, *, store: str | os.PathLike[str] | ReadableStore, topic: str, path: str, full: bool = False
) -> RestoredState:
    """Bring a Delta table to the topic's present state; returns the table, and the offsets it is at.

    The first call writes the table, later ones merge what is new. The offsets are part of the table's own commit, so
    table and position never disagree. The table is rewritten with `full`, and where an increment cannot tell what
    went: tombstones were dropped, the log start moved, partitions were added, the topic was created again, its keys
    are merged across partitions, or another order than that of offsets decides.
    Raises UnknownTopic, PackageMissing.

        table = restore_into_delta(spark, store="/data/store", topic="accounts", path="/data/tables/accounts")
        table.df.count(), table.end_offsets, table.plan.is_increment
    """
    DeltaTable = _delta_table(spark)
    address = _address(store)
    known = None if full else _position(spark, path)
    with opened(*address) as open_store:
        plan = plan_restore(open_store, topic)
        if known is not None and _continues(plan, known):
            since = dict(enumerate(known["end_offsets"]))
            # Not newer than what was just compared: a tombstone dropped in between is noticed when it is read.
            now = dict(enumerate(plan.end_offsets))
            plan = plan_restore(open_store, topic, since_offsets=since, as_of_offsets=now)
            if plan.dropped_tombstones != tuple(known["dropped_tombstones"]):
                plan = plan_restore(open_store, topic)
    rows = _restored(spark, address, plan, tombstones=plan.is_increment)
    with _metadata(spark, plan):
        if plan.is_increment:
            (
                DeltaTable.forPath(spark, path)
                .alias("t")
                .merge(rows.alias("s"), "t.key = s.key")
                .whenMatchedDelete("s.value is null")
                .whenMatchedUpdateAll()
                .whenNotMatchedInsertAll("s.value is not null")
                .execute()
            )
        else:
            rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(path)
    return RestoredState(spark.read.format("delta").load(path), plan)


def _delta_table(spark: SparkSession) -> Any:
    """Raises PackageMissing for a Spark without Delta: the Python package, or the jar in its session."""
    try:
        from delta.tables import DeltaTable
    except ImportError:
        raise PackageMissing(
            "Delta tables need the package delta-spark, which is not installed",
            hint="pip install 'duramen[delta]' (for Spark 4.0 to 4.2), and make the session with its "
            "configure_spark_with_delta_pip",
        ) from None
    jvm = getattr(spark, "_jvm", None)  # Spark Connect has none
    if jvm is not None and type(jvm.io.delta.tables.DeltaTable).__name__ == "JavaPackage":
        raise PackageMissing(
            "this Spark session was started without Delta's jar",
            hint="Make it with delta.configure_spark_with_delta_pip(builder), spark.sql.extensions="
            "io.delta.sql.DeltaSparkSessionExtension and spark.sql.catalog.spark_catalog="
            "org.apache.spark.sql.delta.catalog.DeltaCatalog; a session that runs already must be stopped first",
        )
    return DeltaTable


def _continues(plan: RestorePlan, known: dict[str, Any]) -> bool:
    """Whether what is newer than `known` is all that changed."""
    return (
        plan.by_partition
        and plan.order.by_offset
        and known.get("topic_id") == plan.topic_id
        and known.get("log_start_offsets") == list(plan.log_start_offsets)
        and known.get("dropped_tombstones") == list(plan.dropped_tombstones)
        and len(known["end_offsets"]) == plan.partitions
    )


def _position(spark: SparkSession, path: str) -> dict[str, Any] | None:
    DeltaTable = _delta_table(spark)
    if not DeltaTable.isDeltaTable(spark, path):
        return None
    for row in DeltaTable.forPath(spark, path).history(_HISTORY_MAX).select("userMetadata").collect():
        try:
            found: dict[str, Any] = json.loads(row.userMetadata or "")["duramen"]
            return found if isinstance(found["end_offsets"], list) else None
        except (ValueError, KeyError, TypeError):
            continue  # another writer's commit, such as OPTIMIZE
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
                    "log_start_offsets": list(plan.log_start_offsets),
                }
            }
        )

    def __enter__(self) -> None:
        self._before = self._spark.conf.get(_USER_METADATA, None)
        self._spark.conf.set(_USER_METADATA, self._text)

    def __exit__(self, *failure: object) -> None:
        if self._before is None:
            self._spark.conf.unset(_USER_METADATA)
        else:
            self._spark.conf.set(_USER_METADATA, self._before)
