"""Servers that tests share, each started when the first test asks for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucket import servers
from bucket.servers import Server


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("versitygw")
    with servers.versitygw(folder) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server
