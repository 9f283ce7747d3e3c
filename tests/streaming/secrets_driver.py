"""Reads and writes a store in a bucket with secrets among the options, and shows all that Spark shows.

A process of its own: the tests look through its output, its event log and its checkpoints. What the UI has is printed.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession


def shown(spark: SparkSession) -> str:
    """What the UI has of the queries."""
    address = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}"
    found = []
    for path in ("/sql?details=true&planDescription=true&length=1000", "/environment", "/stages", "/jobs"):
        with urllib.request.urlopen(address + path, timeout=60) as answer:
            found.append(answer.read().decode())
    return "\n".join(found)


def main(told: dict[str, Any]) -> None:
    folder, options = Path(told["folder"]), told["options"]
    (folder / "events").mkdir()
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.port", "0")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", f"file://{folder / 'events'}")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("INFO")
    rows = spark.range(20).selectExpr("cast(id as string) as key", "concat('v', id) as value")
    rows.write.format("duramen").options(**options, topic="orders").mode("append").save()
    read = spark.read.format("duramen").options(**options, subscribe="orders").load()
    read.explain("extended")
    read.explain("formatted")
    print(read._jdf.queryExecution().toString(), repr(read), read.count())
    rows.write.mode("append").parquet(str(folder / "in"))
    stream = spark.readStream.schema("key string, value string").parquet(str(folder / "in"))
    writing = (
        stream.writeStream.format("duramen")
        .options(**options, topic="orders", app_id="app")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    writing.awaitTermination()
    reading = (
        spark.readStream.format("duramen")
        .options(**options, subscribe="orders", startingOffsets="earliest")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint-2"))
        .option("path", str(folder / "out"))
        .trigger(availableNow=True)
        .start()
    )
    reading.awaitTermination()
    for query in (writing, reading):
        query.explain(extended=True)
        print(query.status, query.recentProgress)
    wrong = rows.write.format("duramen").options(**options, topic="ordres").mode("append")
    try:
        wrong.save()
    except Exception as error:
        print(error)
    print(spark.read.parquet(str(folder / "out")).count(), "rows were read")
    print(shown(spark))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
