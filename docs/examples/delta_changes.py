"""A Delta table's change data feed as a compacted topic: rows become records, deleted rows become tombstones.

    python docs/examples/delta_changes.py STORE TABLE CHECKPOINT

The table needs `delta.enableChangeDataFeed = true` and a column `id`. Each run streams what changed since the last one,
exactly once, and ends. Whoever restores the topic has the table again, as of any moment that is still exact.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from duramen import LogSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: columns the feed adds to the table's own
FEED = ("_change_type", "_commit_version", "_commit_timestamp")


def changes(spark: SparkSession, table: str) -> DataFrame:
    """The feed from the table's first version on, as a stream."""
    return spark.readStream.format("delta").option("readChangeFeed", "true").option("startingVersion", 0).load(table)


def as_records(feed: DataFrame, key: str) -> DataFrame:
    """Key, value and time of each change; the state before an update is no news.

    Within one version a row can be deleted and inserted again (as MERGE may do), so deletions come first; the order of
    the rows is the order in the log.
    """
    columns = [name for name in feed.columns if name not in FEED]
    deleted = F.col("_change_type") == "delete"
    return (
        feed.where("_change_type != 'update_preimage'")
        .orderBy("_commit_version", F.when(deleted, 0).otherwise(1))
        .select(
            F.col(key).cast("string").alias("key"),
            F.when(~deleted, F.to_json(F.struct(*columns))).alias("value"),
            F.col("_commit_timestamp").alias("timestamp"),
        )
    )


def replicate(spark: SparkSession, *, store: str, topic: str, table: str, key: str, checkpoint: str) -> None:
    """Bring the topic up to date with the table, and return."""
    sink = LogSink(store, topic, app_id=f"changes-of-{topic}")
    query = (
        changes(spark, table)
        .writeStream.foreachBatch(lambda feed, batch_id: sink(as_records(feed, key), batch_id))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def as_table(restored: DataFrame, schema: str) -> DataFrame:
    """Restored rows as the table had them."""
    return restored.select(F.from_json(F.col("value").cast("string"), schema).alias("row")).select("row.*")


def main(store: str, table: str, checkpoint: str) -> None:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    from duramen import restore_state

    builder = (
        SparkSession.builder.appName("delta-changes")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    )
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    replicate(spark, store=store, topic="changes", table=table, key="id", checkpoint=checkpoint)
    schema = spark.read.format("delta").load(table).schema.simpleString()
    as_table(restore_state(spark, store=store, topic="changes").df, schema).show()


if __name__ == "__main__":
    main(*sys.argv[1:])
