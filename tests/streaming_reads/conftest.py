"""One Spark session for the folder, and stores to read from it.

The session has Delta's jars: a JVM takes them only when it starts, and one session is all a process can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delta_session import delta_session
from logstore.store import LogStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BASE_MS = 1_700_000_000_000


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with delta_session(tmp_path_factory.mktemp("warehouse")) as session:
        yield session


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(path: str) -> Iterator[LogStore]:
    with LogStore(path, create=True) as opened:
        yield opened


Append = Callable[..., None]


@pytest.fixture
def read(spark: SparkSession, path: str) -> Callable[..., DataFrame]:
    """A batch read of the store with these options."""

    def run(**options: Any) -> DataFrame:
        reader = spark.read.format("duramen").option("store", path)
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load()

    return run
