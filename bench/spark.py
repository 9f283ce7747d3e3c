"""Spark under measurement: one session with two cores, Delta's jars and Spark's own Kafka connector.

Owns `build/connector` (the connector's jars, fetched once with Maven into a cache of its own). Never names a
repository: a mirror goes into Maven's settings, or into the variable MVN_ARGS.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.result import Result, median, rate
from streaming.transfer import bounded_by_rows, width_of

ROOT = Path(__file__).resolve().parent.parent
CONNECTOR = ROOT / "build" / "connector"
MASTER = "local[2]"
#: BENCH_ROWS makes it less; the rows of a claim are these
ROWS = int(os.environ.get("BENCH_ROWS", "10_000_000"))
KEYS = ROWS // 10
#: what pyspark lacks; an older lz4, snappy or slf4j beside its own is a conflict
_JARS = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")


def connector_jars() -> list[str]:
    """The jars of Spark's Kafka connector for the pyspark that is installed."""
    import pyspark

    lib = CONNECTOR / "lib"
    stamp = CONNECTOR / "version"
    CONNECTOR.mkdir(parents=True, exist_ok=True)
    with open(CONNECTOR / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != pyspark.__version__:
            command = ["mvn", "-B", "-q", "-Dstyle.color=never", f"-Dmaven.repo.local={CONNECTOR / 'm2'}"]
            command += [f"-Dspark.version={pyspark.__version__}", *shlex.split(os.environ.get("MVN_ARGS", ""))]
            command += ["dependency:copy-dependencies", f"-DoutputDirectory={lib}"]
            done = subprocess.run(command, cwd=ROOT / "bench" / "connector", capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
            stamp.write_text(pyspark.__version__)
    return sorted(str(jar) for jar in lib.glob("*.jar") if jar.name.startswith(_JARS))


@contextmanager
def session(folder: Path, *, kafka: bool = False, delta: bool = False) -> Iterator[Any]:
    """A SparkSession of its own for the time; the defaults of Spark wherever speed is concerned."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    builder = (
        SparkSession.builder.master(MASTER)
        .appName("duramen bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
    )
    if kafka:
        builder = builder.config("spark.jars", ",".join(connector_jars()))
    if delta:
        from delta import configure_spark_with_delta_pip

        builder = (
            builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
            .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
            .config("spark.databricks.delta.snapshotPartitions", "2")
        )
        builder = configure_spark_with_delta_pip(builder)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    gateway: Any = spark.sparkContext._gateway
    try:
        yield spark
    finally:
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        # The next session of this process starts a JVM of its own, with its own jars.
        from pyspark import SparkContext

        SparkContext._gateway = SparkContext._jvm = None
        SparkSession._instantiatedSession = None


def rows(spark: Any, folder: Path, count: int, keys: int = KEYS) -> Any:
    """Rows of a 10-byte key and a 100-byte value out of uncompressed Parquet files, which Spark reads faster than
    anybody here writes; making them anew each time would be most of the work. The values are digits without a pattern,
    so that everybody has as many bytes to write."""
    from pyspark.sql import functions as f

    path = folder / f"rows-{count}-{keys}.parquet"
    if not path.exists():
        key = f.lpad(f.pmod(f.hash("id"), f.lit(keys)).cast("string"), 10, "0")
        digits = f.concat(*[f.lpad(f.hex(f.xxhash64("id", f.lit(part))), 16, "0") for part in range(7)])
        made = spark.range(count).select(key.alias("key"), f.substring(digits, 1, 100).alias("value"))
        made.write.option("compression", "none").parquet(str(path))
    return spark.read.parquet(str(path))


def consume(df: Any) -> None:
    """Run the rows into Python and drop them there."""
    df.mapInArrow(_consuming, "rows long").collect()


def consume_like_the_sink(df: Any) -> None:
    """The same, and without Spark adding up the bytes: what a sink in Python cannot be faster than."""
    width = width_of(df)
    assert width is not None
    with bounded_by_rows(df.sparkSession, width):
        consume(width.clipped(df))


def _consuming(batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow as pa

    count = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_arrays([pa.array([count], pa.int64())], names=["rows"])


def noop(df: Any) -> None:
    df.write.format("noop").mode("overwrite").save()


@dataclass(slots=True)
class Series:
    """Seconds of each way to do a thing, taken in turns, the processor's share of them, and what others did meanwhile.

    Processor seconds are those of Spark, its Python workers and the broker together; they move less than the wall's
    when the machine has other work to do.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor_s: dict[str, list[float]] = field(default_factory=dict)
    others_cores: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return median(self.seconds[name])

    def ratio(self, faster: str, slower: str) -> float:
        """How many times as fast the first is as the second."""
        return self.median(slower) / self.median(faster)

    def detail(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "processor_s": self.processor_s, "others_cores": self.others_cores}


def in_turns(
    ways: Sequence[tuple[str, Callable[[], object]]],
    *,
    rounds: int,
    discarded: int,
    folder: Path,
    between: Callable[[], object] = lambda: None,
) -> Series:
    """Every way once a round; the first rounds are thrown away. What `between` does behind each is not timed, nor that
    the page cache is filled before it.

    Rounds that others disturbed are measured again, at most as many as count.
    """
    series = Series({name: [] for name, _ in ways}, {name: [] for name, _ in ways})
    patience = machine.Patience(rounds)
    while len(series.others_cores) < rounds:
        began, busy, own = time.perf_counter(), machine.busy_s(), machine.family_s()
        taken = {}
        for name, way in ways:
            machine.fill_cache(folder)
            start, worked = time.perf_counter(), machine.family_s()
            way()
            taken[name] = round(time.perf_counter() - start, 3), round(machine.family_s() - worked, 2)
            between()
            os.sync()  # nobody pays for what another left to be written
        used = machine.busy_s() - busy - (machine.family_s() - own)
        watch = machine.Watch(round(max(used, 0.0) / (time.perf_counter() - began), 2))
        discarded -= 1
        if discarded >= 0 or not patience.takes(watch):
            continue
        for name, (seconds, processor_s) in taken.items():
            series.seconds[name].append(seconds)
            series.processor_s[name].append(processor_s)
        series.others_cores.append(watch.others_cores)
    return series


def compared(
    part: str, name: str, count: int, series: Series, ours: str, theirs: str, at_least: float | None
) -> Result:
    """A line that holds one way to a multiple of another's speed, or only compares them."""
    ratio = series.ratio(ours, theirs)
    return Result(
        part=part,
        name=name,
        ours=rate(count, series.median(ours)),
        theirs=rate(count, series.median(theirs)),
        ratio=ratio,
        target="" if at_least is None else f">= {at_least}x",
        met=None if at_least is None else ratio >= at_least,
        others_cores=max(series.others_cores),
        detail=series.detail()
        | {
            "rows": count,
            "compared": [ours, theirs],
            "processor_ratio": median(series.processor_s[theirs]) / max(median(series.processor_s[ours]), 0.01),
        },
    )
