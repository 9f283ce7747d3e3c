"""Secrets among the options of Spark's data source are in nothing that Spark shows, logs or keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from bucket import servers
from bucket.servers import ROOT
from logstore.bucket.store import BucketStore

SECRETS = {"secret_access_key": "a-key-that-nobody-may-see", "token": "a-token-that-nobody-may-see"}


@pytest.mark.timeout(1200)
def test_no_secret_is_in_plans_pages_logs_events_and_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with servers.ministack(tmp_path) as server:
        url, options = server.url(uuid.uuid4().hex), server.options | SECRETS
        BucketStore(url, create=True, storage_options=options).create_topic("orders")
        named = {f"storage.{name}": value for name, value in options.items()}
        told = {"folder": str(run), "options": named | {"store": url}}
        # The commit runs in a process of its own, which takes its credentials from the environment.
        env = os.environ | {
            "AWS_ACCESS_KEY_ID": options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": SECRETS["secret_access_key"],
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        }
        command = [sys.executable, str(Path(__file__).with_name("secrets_driver.py")), json.dumps(told)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "40 rows were read" in done.stdout
    assert "no topic is called ordres" in done.stdout
    found = {"output": done.stdout, "log": done.stderr}
    found |= {str(path): path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()}
    events = [text for path, text in found.items() if "/events/" in path]
    assert any("SparkListenerSQLExecutionStart" in text and "duramen" in text for text in events)
    assert any("/checkpoint/" in path for path in found)
    for place, text in found.items():
        for secret in SECRETS.values():
            assert secret not in text, place
