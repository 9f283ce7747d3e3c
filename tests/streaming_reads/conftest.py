"""One Spark session for the folder, and stores to read from it.

The session has Delta's jars: a JVM takes them only when it starts, and one session is all a process can have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.records.record import Record
from logstore.store import LogStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BASE_MS = 1_700_000_000_000


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.databricks.delta.snapshotPartitions", "1")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    )
    session = configure_spark_with_delta_pip(builder).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(path: str) -> Iterator[LogStore]:
    with LogStore(path, create=True) as opened:
        yield opened


Append = Callable[..., None]


@pytest.fixture
def append(store: LogStore) -> Append:
    """Appends records to a topic as one batch; `partitions` names theirs."""
    committer = Committer(store)

    def run(topic: str, records: list[Record], partitions: list[int] | None = None) -> None:
        import pyarrow as pa

        table = table_of(records)
        if partitions is not None:
            table = table.append_column("partition", pa.array(partitions, pa.int32()))
        append_table(committer, topic, table)

    return run


@pytest.fixture
def read(spark: SparkSession, path: str) -> Callable[..., DataFrame]:
    """A batch read of the store with these options."""

    def run(**options: Any) -> DataFrame:
        reader = spark.read.format("duramen").option("store", path)
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load()

    return run
