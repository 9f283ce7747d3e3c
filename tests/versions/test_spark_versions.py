"""The sink, the source, restores and compaction with every Spark version but the locked one, which all suites use."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from versions.environments import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCKS = sorted(HERE.glob("spark-*.lock"))
#: versions that the locked delta-spark has a jar for
WITH_DELTA = ("4.0", "4.1")
#: as of this version Spark says where a stream is when it asks for the next end
CAN_LIMIT = ("4.2", "4.3")


def version(lock: Path) -> str:
    return lock.stem.removeprefix("spark-")


def test_every_supported_spark_is_tested() -> None:
    supported = re.search(r'"pyspark>=4\.(\d+),<4\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert supported is not None
    wanted = {f"4.{minor}" for minor in range(int(supported[1]), int(supported[2]))}
    locked = re.search(r"^pyspark==(\d+\.\d+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)
    assert locked is not None
    assert {version(lock) for lock in LOCKS} | {locked[1]} == wanted


@pytest.mark.parametrize("lock", LOCKS, ids=version)
def test_sink_source_writes_restore_and_compaction(lock: Path, tmp_path: Path) -> None:
    python = environment(lock)
    arguments = ["delta"] if version(lock) in WITH_DELTA else []
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "PYTHON"))
    }
    done = subprocess.run(
        [str(python), str(HERE / "checks.py"), str(tmp_path), *arguments],
        env=variables | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": str(python)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    found = re.search(r"^ANSWER (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(found[1])
    assert answer.pop("pyspark").startswith(version(lock))
    limited = version(lock) in CAN_LIMIT
    expected = {
        "sink": 20,
        "stream_write": [20, ["x"], [1700000000000.0]],
        "batch_write": {"headers": ["h"], "values": list(range(10))},
        "filters": 10,
        "stream": [10, 20],
        "limits": 3 if limited else "maxOffsetsPerTrigger needs Spark 4.2 or newer",
        "restore": {str(key): str(15 + key) for key in range(5)},
        "compaction": 5,
    }
    if arguments:
        expected["delta"] = {str(key): str(35 + key) for key in range(5)}
    assert answer == expected
