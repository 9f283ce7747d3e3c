"""What must work with every version of Spark: run as `python checks.py FOLDER [delta]`, prints one JSON object.

A program of its own, because it runs in environments that have neither pytest nor this version's neighbours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from compaction_job import compact
from logstore.store import LogStore
from streaming import LogSink, restore_into_delta, restore_state

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    # It lives for seconds: nothing pays off that takes time to prepare.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
}
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
}


def session(folder: Path, with_delta: bool) -> SparkSession:
    builder = SparkSession.builder.master("local[1]").config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    for name, value in (SETTINGS | (DELTA if with_delta else {})).items():
        builder = builder.config(name, value)
    if with_delta:
        from delta import configure_spark_with_delta_pip

        builder = configure_spark_with_delta_pip(builder)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


class Checks:
    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.store = str(folder / "store")
        with LogStore(self.store, create=True) as store:
            for name in ("sunk", "streamed", "written", "copied"):
                store.create_topic(name, partitions=2, configs={"cleanup.policy": "compact"})

    def rows(self, low: int, high: int) -> DataFrame:
        return self.spark.range(low, high).selectExpr(
            "cast(id % 5 as string) key",
            "cast(id as string) value",
            "timestamp_millis(1700000000000 + id) timestamp",
            "array(struct('h' as key, cast('x' as binary) as value)) headers",
        )

    def run(self, stream: DataFrame, name: str, write: Callable[[Any], Any]) -> int:
        """Runs what is there through what `write` makes of a writer; returns in how many micro-batches."""
        for attempt in range(5):
            query = (
                write(stream.writeStream)
                .option("checkpointLocation", str(self.folder / f"checkpoint-{name}"))
                .trigger(availableNow=True)
                .start()
            )
            try:
                query.awaitTermination()
                break
            except StreamingQueryException as error:
                # Spark gives a source's process 10 s to start, which is too little on a machine that is busy.
                if "failed to connect back" not in str(error) or attempt == 4:
                    raise
        return len([each for each in query.recentProgress if each["numInputRows"]])

    def twice(self, topic: str, write: Callable[[Any], Any]) -> int:
        """Files through `write` into a topic, in two runs of the query; then the second one's batch again."""
        source = str(self.folder / f"files-{topic}")
        for low in (0, 10):
            self.rows(low, low + 10).coalesce(1).write.mode("append").parquet(source)
            stream = self.spark.readStream.schema(self.rows(0, 1).schema).parquet(source)
            self.run(stream, topic, write)
        commits = self.folder / f"checkpoint-{topic}" / "commits"
        for path in (commits / "1", commits / ".1.crc"):
            path.unlink()
        self.run(stream, topic, write)
        return self.read(topic).count()

    def sink(self) -> Any:
        return self.twice("sunk", lambda writer: writer.foreachBatch(LogSink(self.store, "sunk", app_id="sunk")))

    def stream_write(self) -> Any:
        options = {"store": self.store, "topic": "streamed", "app_id": "streamed"}
        count = self.twice("streamed", lambda writer: writer.format("duramen").options(**options))
        rows = self.read("streamed", includeHeaders=True).collect()
        times = {row.timestamp.timestamp() * 1000 - int(row.value) for row in rows}
        return [count, sorted({bytes(row.headers[0].value).decode() for row in rows}), sorted(times)]

    def read(self, topic: str, **options: Any) -> DataFrame:
        return self.spark.read.format("duramen").option("store", self.store).options(subscribe=topic, **options).load()

    def batch_write(self) -> Any:
        for _ in range(2):  # the second time it is there
            options = {"store": self.store, "topic": "written", "app_id": "written", "batch_id": 0}
            self.rows(0, 10).write.format("duramen").options(**options).mode("append").save()
        rows = self.read("written", includeHeaders=True).collect()
        return {
            "headers": sorted({row.headers[0].key for row in rows}),
            "values": sorted(int(row.value) for row in rows),
        }

    def filters(self) -> Any:
        self.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        try:
            return self.read("written").where("partition = 0 and offset >= 1").count() + (
                self.read("written").where("partition = 1 or offset < 1").count()
            )
        finally:
            self.spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")

    def stream(self) -> Any:
        """The source as a stream: what is there, then what came since, from the checkpoint."""
        sink = LogSink(self.store, "copied", app_id="copied")
        counts = []
        for low in (10, 20):
            options = {"store": self.store, "subscribe": "written", "startingOffsets": "earliest"}
            stream = self.spark.readStream.format("duramen").options(**options).load()
            self.run(stream.select("key", "value", "timestamp"), "copied", lambda writer: writer.foreachBatch(sink))
            counts.append(self.read("copied").count())
            if low == 10:
                more = self.rows(low, low + 10).write.format("duramen").option("store", self.store)
                more.option("topic", "written").mode("append").save()
        return counts

    def limits(self) -> Any:
        """Micro-batches of a stream with a limit, or what is said where Spark cannot limit."""
        options = {"store": self.store, "subscribe": "written", "startingOffsets": "earliest"}
        stream = self.spark.readStream.format("duramen").options(maxOffsetsPerTrigger=8, **options).load()
        try:
            count = lambda df, batch_id: df.count()  # noqa: E731
            return self.run(stream, "limits", lambda writer: writer.foreachBatch(count))
        except Exception as error:
            return str(error).partition("InvalidConfig: ")[2].partition(";")[0] or str(error)

    def restore(self) -> Any:
        state = restore_state(self.spark, store=self.store, topic="copied")
        return {row.key.decode(): row.value.decode() for row in state.df.collect()}

    def compaction(self) -> Any:
        with LogStore(self.store) as store:
            compact(store, spark=self.spark, topics=["copied"], roll_active=True, force=True)
        return self.read("copied").count()

    def delta(self) -> Any:
        path = str(self.folder / "table")
        for low in (30, 35):
            options = {"store": self.store, "topic": "written"}
            self.rows(low, low + 5).write.format("duramen").options(**options).mode("append").save()
            restore_into_delta(self.spark, store=self.store, topic="written", path=path)
        table = self.spark.read.format("delta").load(path)
        return {row.key.decode(): row.value.decode() for row in table.collect()}


def main(folder: Path, with_delta: bool) -> None:
    spark = session(folder, with_delta)
    checks = Checks(spark, folder)
    names = ["sink", "stream_write", "batch_write", "filters", "stream", "limits", "restore", "compaction"]
    answer: dict[str, Any] = {"pyspark": pyspark.__version__}
    for name in names + ["delta"] * with_delta:
        try:
            answer[name] = getattr(checks, name)()
        except Exception as error:  # the next ones are worth knowing, too
            answer[name] = f"{type(error).__name__}: {error}"[:2000]
    print("ANSWER " + json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "delta" in sys.argv[2:])
