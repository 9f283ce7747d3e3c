"""The Spark application's report: for whoever submitted it, also when it could not run. Spark itself is left out."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from compaction_job import submit

pytest.importorskip("pyspark")


def test_an_application_that_cannot_run_says_why_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = MagicMock()
    session.builder.appName().getOrCreate().sparkContext.defaultParallelism = 2
    monkeypatch.setattr("pyspark.sql.SparkSession", session)
    report = tmp_path / "report.json"
    assert submit.main(["--store", str(tmp_path / "nothing"), "--report", str(report)]) == 1
    said = json.loads(report.read_text())["error"]
    assert said["kind"] == "NotAStore"
    assert capsys.readouterr().err == f"error: {said['message']}\n"
