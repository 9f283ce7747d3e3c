"""The fixtures of the conformance suite: one JVM for the whole run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("conformance.workload")

from conformance.build import INSTALL_COMMAND, missing_tools  # noqa: E402
from conformance.kafka import Kafka  # noqa: E402


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """Apache Kafka behind a driver. Without Java or Maven the tests are skipped; where CI=true they fail."""
    missing = missing_tools()
    if missing:
        reason = f"{' and '.join(missing)} not found; install with: {INSTALL_COMMAND}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with Kafka() as running:
        yield running


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """In memory where the machine has such a place: Kafka waits for the disk at every roll and close."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="duramen-scratch-", dir=memory) as name:
        yield Path(name)
