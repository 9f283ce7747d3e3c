"""What the drivers of the cluster tests do: one function a scenario, run in a process of its own by `run_driver`.

    python driver.py '{"scenario": …, "master": …, "conf": {…}, "folder": …, "given": {…}, "report": …}'

A scenario compares by itself where Spark is needed for it, and returns what the test compares.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.commit.committer import Committer
from logstore.records.partitioner import partition_for_key
from logstore.store import LogStore
from streaming import LogSink, restore_state
from streaming.flusher import flush_now

VALUE_BYTES = 1000
PARTITIONS = 4


def spark_session(task: dict[str, Any]) -> SparkSession:
    conf = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "1g",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": f"{task['folder']}/warehouse",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{task['folder']}/events",
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        # Both executors are there before the first task.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    os.makedirs(f"{task['folder']}/events", exist_ok=True)
    builder = SparkSession.builder.master(task["master"]).appName(task["scenario"])
    for name, value in (conf | task["conf"]).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def write_stream(task: dict[str, Any], rows: DataFrame, *, runs: int = 1) -> None:
    """Runs the query to its end, `runs` times; each takes what is new."""
    for _ in range(runs):
        query = (
            rows.writeStream.foreachBatch(LogSink(f"{task['folder']}/store", "orders", app_id="app"))
            .option("checkpointLocation", f"{task['folder']}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


def generated(spark: SparkSession, count: int) -> DataFrame:
    """A stream of one micro-batch of `count` rows in PARTITIONS tasks; `value` is the row's number, then filling."""
    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", count)
        .option("numPartitions", PARTITIONS)
        .load()
    )
    return records(rows, "value")


def records(rows: DataFrame, number: str) -> DataFrame:
    key = F.col(number).cast("string")
    return rows.select(key.alias("key"), F.rpad(key, VALUE_BYTES, "0123456789").alias("value"))


def read_back(spark: SparkSession, task: dict[str, Any], topic: str = "orders") -> DataFrame:
    return spark.read.format("duramen").option("store", f"{task['folder']}/store").option("subscribe", topic).load()


def assert_numbered(spark: SparkSession, task: dict[str, Any], count: int) -> None:
    """Every row of `generated` is in the log, once and whole."""
    columns = ("key", F.sha2("value", 256).alias("value"))
    found = read_back(spark, task).selectExpr("cast(key as string) as key", "value").select(*columns)
    truth = records(spark.range(count), "id").selectExpr("key", "cast(value as binary) as value").select(*columns)
    assert_df_equality(found, truth, ignore_row_order=True, ignore_nullable=True)


# --- failures -------------------------------------------------------------------------------------------------------


def executor_pid() -> int:
    """Of the executor this worker belongs to: the daemon's parent."""
    return parent(os.getppid())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def first_time(marker: str) -> bool:
    """True for one caller only, on all executors; the marker holds its stage."""
    from pyspark import TaskContext

    try:
        file = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(file, str(TaskContext.get().stageId()).encode())
    os.close(file)
    return True


def disturbed(rows: DataFrame, marker: str, fault: Callable[[], None]) -> DataFrame:
    """The same rows; in the middle of one task, once, `fault` happens."""
    from pyspark import TaskContext

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 3 and TaskContext.get().partitionId() == 1 and first_time(marker):
                fault()
            yield batch

    return rows.mapInArrow(run, rows.schema)


def kill_executor() -> None:
    os.kill(executor_pid(), signal.SIGKILL)
    time.sleep(60)  # until the daemon notices


# --- scenarios ------------------------------------------------------------------------------------------------------


def write_read_restore(spark: SparkSession, task: dict[str, Any], files: int, rows: int) -> dict[str, Any]:
    """Files of JSON lines, two a micro-batch, each with keys of its own, some of them tombstones."""
    folder = Path(task["folder"], "in")
    folder.mkdir()
    truth = []
    for number in range(files):
        lines = []
        for row in range(rows):
            value = None if row % 7 == 3 else f"{number}-{row}"
            lines.append({"key": f"{number % 2}-{row % 23}", "value": value})
        (folder / f"{number}.json").write_text("\n".join(map(json.dumps, lines)))
        os.utime(folder / f"{number}.json", (1_700_000_000 + number // 2 * 10, 1_700_000_000 + number // 2 * 10))
        truth += [(line["key"], line["value"], partition_for_key(line["key"].encode(), PARTITIONS)) for line in lines]
    stream = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 2).json(str(folder))
    write_stream(task, stream)

    text = ("cast(key as string) as key", "cast(value as string) as value", "partition")
    schema = "key string, value string, partition int"
    expected = spark.createDataFrame(truth, schema)
    found = read_back(spark, task)
    assert_df_equality(found.selectExpr(*text), expected, ignore_row_order=True, ignore_nullable=True)

    (
        spark.readStream.format("duramen")
        .option("store", f"{task['folder']}/store")
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", len(truth) // 3)
        .load()
        .selectExpr(*text)
        .writeStream.format("parquet")
        .option("path", f"{task['folder']}/copy")
        .option("checkpointLocation", f"{task['folder']}/copy-checkpoint")
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )
    copied = spark.read.parquet(f"{task['folder']}/copy")
    assert_df_equality(copied, expected, ignore_row_order=True, ignore_nullable=True)

    latest = {key: (key, value, partition) for key, value, partition in truth}  # files and rows are in order
    kept = spark.createDataFrame([row for row in latest.values() if row[1] is not None], schema)
    state = restore_state(spark, store=f"{task['folder']}/store", topic="orders")
    assert_df_equality(state.df.selectExpr(*text), kept, ignore_row_order=True, ignore_nullable=True)

    writer = found.select("key", "value", "timestamp").write.format("duramen").option("topic", "copy")
    writer.option("store", f"{task['folder']}/store").mode("append").save()
    moved = read_back(spark, task, "copy").selectExpr(*text)
    assert_df_equality(moved, expected, ignore_row_order=True, ignore_nullable=True)
    return {"rows": len(truth), "keys": kept.count()}


def executor_killed_in_encode(spark: SparkSession, task: dict[str, Any], count: int) -> dict[str, Any]:
    marker = f"{task['folder']}/killed"
    write_stream(task, disturbed(generated(spark, count), marker, kill_executor), runs=2)
    assert_numbered(spark, task, 2 * count)
    return {"killed": os.path.exists(marker)}


def written(spark: SparkSession, task: dict[str, Any], count: int) -> dict[str, Any]:
    """What goes wrong is set up by the test."""
    write_stream(task, generated(spark, count), runs=2)
    assert_numbered(spark, task, 2 * count)
    return {}


def speculated(spark: SparkSession, task: dict[str, Any], count: int) -> dict[str, Any]:
    write_stream(task, disturbed(generated(spark, count), f"{task['folder']}/slept", lambda: time.sleep(60)))
    assert_numbered(spark, task, count)
    return {}


def large(spark: SparkSession, task: dict[str, Any], count: int) -> dict[str, Any]:
    heap = spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()
    began = time.monotonic()
    write_stream(task, generated(spark, count))
    wrote = time.monotonic() - began
    sums = [F.count("*"), F.sum(F.length("value")), F.sum(F.crc32("value")), F.sum(F.xxhash64("key", "value") % 1000)]
    rows = read_back(spark, task).selectExpr("cast(key as string) as key", "value")
    truth = records(spark.range(count), "id").selectExpr("key", "cast(value as binary) as value")
    assert_df_equality(rows.agg(*sums), truth.agg(*sums), ignore_nullable=True)
    with LogStore(f"{task['folder']}/store") as store:
        [row] = Committer(store).ledger.commits()
    # host:pid, a process that an executor started; executors are children of their workers
    seen = sorted({parent(parent(int(name.rsplit(":", 1)[1]))) for name in row.workers})
    return {"heap_bytes": heap, "workers": seen, "names": row.workers, "bytes": row.size_bytes, "seconds": wrote}


# --- hosts that share no directory ----------------------------------------------------------------------------------

KEYS = 23


def seen_by_executors(folder: str) -> Callable[[Iterator[int]], Iterator[tuple[int, list[str]]]]:
    def look(_: Iterator[int]) -> Iterator[tuple[int, list[str]]]:
        worker = parent(executor_pid())
        Path(folder, f"was-here-{worker}").touch()
        time.sleep(1)  # so that the other executor takes its share
        yield worker, sorted(path.name for path in Path(folder).glob("was-here-*"))

    return look


def in_a_bucket(spark: SparkSession, task: dict[str, Any], url: str, count: int, batches: int) -> dict[str, Any]:
    """Sink, source, restore and maintenance; what a process leaves in its folder nobody else sees."""
    folder = task["folder"]
    Path(folder, "was-here-driver").touch()
    seen = spark.sparkContext.parallelize(range(6), 6).mapPartitions(seen_by_executors(folder)).collect()

    columns = (
        f"cast(value % {KEYS} as string) as key",
        "if(value % 7 = 3, null, concat('v', value, repeat('.', 9))) as value",
    )
    workers: set[str] = set()
    sink = LogSink(
        url, "orders", app_id="app", create_topics={"partitions": PARTITIONS, "configs": {"cleanup.policy": "compact"}}
    )

    def write(df: DataFrame, batch_id: int) -> None:
        workers.update(sink.write(df, batch_id).workers)

    rate = spark.readStream.format("rate-micro-batch").option("numPartitions", PARTITIONS)
    stream = rate.option("rowsPerBatch", count).load().selectExpr("value as number", *columns)
    for _ in range(batches):
        (
            stream.drop("number")
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        )

    truth = spark.range(count * batches).withColumnRenamed("id", "value").selectExpr("value as number", *columns)
    text = ("cast(key as string) as key", "cast(value as string) as value")
    options = {"store": url, "subscribe": "orders", "startingOffsets": "earliest"}
    found = spark.read.format("duramen").options(**options).load()
    assert_df_equality(found.selectExpr(*text), truth.drop("number"), ignore_row_order=True, ignore_nullable=True)
    (
        spark.readStream.format("duramen")
        .options(**options)
        .load()
        .selectExpr(*text)
        .writeStream.format("memory")
        .queryName("streamed")
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )
    assert_df_equality(spark.table("streamed"), truth.drop("number"), ignore_row_order=True, ignore_nullable=True)

    # A batch's rows of one key come from several tasks, so the log says which is the last.
    latest = found.groupBy("key").agg(F.max_by(F.struct("value"), "offset").alias("last"))
    state = (
        latest.selectExpr("key", "last.value as value").where("value is not null").selectExpr(*text).localCheckpoint()
    )

    def check_restored() -> int:
        restored = restore_state(spark, store=url, topic="orders").df.selectExpr(*text)
        assert_df_equality(restored, state, ignore_row_order=True, ignore_nullable=True)
        return restored.count()

    keys = check_restored()
    with BucketStore(url) as store:
        done = maintain(store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
        assert not done.failed, done.failed
        removed = sum(sum(run.report.removed.values()) for run in done.compacted if run.report is not None)
    assert check_restored() == keys
    assert spark.read.format("duramen").options(**options).load().count() == count * batches - removed
    encoders = {parent(parent(int(name.rsplit(":", 1)[1]))) for name in workers}
    return {"seen": seen, "encoders": sorted(encoders), "keys": keys, "removed": removed}


def main() -> None:
    task = json.loads(sys.argv[1])
    spark = spark_session(task)
    found = globals()[task["scenario"]](spark, task, **task["given"])
    flush_now()
    spark.stop()
    Path(task["report"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
