"""A Spark stream of its own process, until it is stopped: rows of a rate source through `LogSink`."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from duramen import LogSink

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
}


def main(store: str, topic: str, checkpoint: str) -> None:
    builder = SparkSession.builder.master("local[1]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    rows = spark.readStream.format("rate").option("rowsPerSecond", 200).option("numPartitions", 1).load()
    changes = rows.selectExpr("concat('key-', value % 60) AS key", "repeat('v', 90) AS value")
    query = (
        changes.writeStream.foreachBatch(LogSink(store, topic, app_id="rates"))
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="500 milliseconds")
        .start()
    )
    sys.stdin.readline()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
