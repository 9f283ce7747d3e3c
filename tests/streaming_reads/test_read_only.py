"""Spark reads a store that nothing can be written to."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logstore.records.record import Record
from logstore.store import LogStore
from streaming import restore_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Mounted read-only for root, whom no mode stops; else without the right to write."""
    if os.geteuid() == 0:
        if subprocess.run(["mount", "--bind", path, path], capture_output=True, check=False).returncode:
            pytest.skip("root may not mount here")
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
            yield
        finally:
            subprocess.run(["umount", "--lazy", path], check=True)
        return
    modes = {each: each.stat().st_mode for each in [path, *path.rglob("*")]}
    for each, mode in modes.items():
        each.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.chmod(mode)


def test_source_stream_and_restore_read_a_read_only_store(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with LogStore(path, create=True) as store:
        store.create_topic("t", partitions=2, configs={"cleanup.policy": "compact"})
        store.append("t", [Record(b"k%d" % (number % 3), b"v%d" % number) for number in range(9)])
    with read_only(path):
        assert spark.read.format("duramen").option("store", str(path)).option("subscribe", "t").load().count() == 9
        state = restore_state(spark, store=str(path), topic="t").df.collect()
        assert {bytes(row.key): bytes(row.value) for row in state} == {b"k0": b"v6", b"k1": b"v7", b"k2": b"v8"}
        source = spark.readStream.format("duramen").option("store", str(path)).option("subscribe", "t")
        query = (
            source.option("startingOffsets", "earliest")
            .load()
            .writeStream.format("memory")
            .queryName("read_only")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert spark.table("read_only").count() == 9
        with pytest.raises(Exception, match=r"nothing can be written|may not write"):
            spark.range(1).selectExpr("'k' AS key", "'v' AS value").write.format("duramen").mode("append").option(
                "store", str(path)
            ).option("topic", "t").save()
