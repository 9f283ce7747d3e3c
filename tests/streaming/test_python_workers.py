"""Spark's workers run a Python that has our packages, or the error says how to give them one."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
from pyspark.sql import SparkSession
from driver import SETTINGS
from logstore.errors import PackageMissing
from streaming import LogSink, restore_state

store, bare = sys.argv[1:]
builder = SparkSession.builder.master("local[1]")
for name, value in SETTINGS.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
sink = LogSink(store, "orders", app_id="app", create_topics={"partitions": 1})
rows = spark.sql("select 'k' as key, 'v' as value")
print(sink.write(rows, 0).records, restore_state(spark, store=store, topic="orders").df.count())
os.environ["PYSPARK_PYTHON"] = spark.sparkContext.pythonExec = bare  # as on a cluster whose Python lacks us
try:
    sink.write(rows, 1)
except PackageMissing as error:
    print(error)
"""


def test_a_driver_whose_environment_is_not_activated_works_and_a_bare_python_is_named(tmp_path: Path) -> None:
    """The PATH's `python3` has none of our packages, as a system's has not."""
    venv.create(tmp_path / "bare", with_pip=False)
    bare = tmp_path / "bare" / "bin"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "PYTHON"))}
    variables["PATH"] = f"{bare}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(bare / "python")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["1 1"], done.stdout + done.stderr[-3000:]
    assert "the Python of Spark's workers has no package" in lines[1]
    assert "PYSPARK_PYTHON" in lines[1]


READ = """
import sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
try:
    builder.getOrCreate().read.format("duramen").load(sys.argv[1])
    print("found")
except Exception as error:
    print(error)
"""


def test_the_data_source_is_found_by_the_variable_that_the_docs_name(tmp_path: Path) -> None:
    """Spark looks for it before any code of ours runs; what it says otherwise stands in docs/troubleshooting.md."""
    venv.create(tmp_path / "bare", with_pip=False)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "PYTHON"))}
    variables["PATH"] = f"{tmp_path / 'bare' / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables["PYTHONPATH"] = str(ROOT)
    said = []
    for more in ({}, {"PYSPARK_PYTHON": sys.executable}):
        done = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path / "store")],
            env=variables | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        said.append(done.stdout)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for words in ("DATA_SOURCE_NOT_FOUND", "Failed to find the data source: duramen"):
        assert words in said[0]
        assert words in page
    assert said[1].splitlines()[-1:] == ["found"]
