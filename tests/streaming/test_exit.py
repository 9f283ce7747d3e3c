"""A script that writes one micro-batch and ends right away: it ends well, and what it wrote is flushed.

The flush is a thread inside native libraries; the interpreter must not be taken down around it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from logstore.store import LogStore

ROOT = Path(__file__).parents[2]
RUNS = 20 if os.environ.get("DURAMEN_SOAK") == "1" else 3

_SCRIPT = """
import sys
from pyspark.sql import SparkSession
from streaming import LogSink, SinkOptions

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.memory", "512m")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
sink = LogSink(sys.argv[1], "orders", app_id=sys.argv[2], options=SinkOptions(flush_ms=int(sys.argv[3])))
sink(spark.range(1000).selectExpr("concat('k', id) as key", "concat('v', id) as value"), 0)
"""
_CRASHES = ("Fatal", "Traceback", "Segmentation", "SIGSEGV", "SIGABRT", "panicked", "core dumped", "terminate called")


@pytest.mark.timeout(0 if RUNS > 3 else 600)
def test_a_script_that_ends_right_after_its_batch_ends_well(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("orders", partitions=3)

        def run(number: int) -> subprocess.CompletedProcess[str]:
            # Some are through with the flush when they end, some are at it, some have not begun.
            return subprocess.run(
                [sys.executable, "-c", _SCRIPT, store.path, f"app {number}", str((0, 50, 60_000)[number % 3])],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )

        with ThreadPoolExecutor(3) as pool:
            for done in pool.map(run, range(RUNS)):
                said = done.stdout + done.stderr
                assert done.returncode == 0, said
                assert not [line for line in said.splitlines() if any(word in line for word in _CRASHES)], said
        ends = store.ends(topic)
        assert sum(ends.high_watermarks) == 1000 * RUNS
        assert ends.recovery_points == ends.high_watermarks
        assert os.listdir(store.layout.staging) == []
