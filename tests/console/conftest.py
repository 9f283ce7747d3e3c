"""A store with something of everything, and its console, served for real."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compaction_job.job import compact
from console.asking import TOKEN, Client
from duramen.console.opened import OpenConsole, Token
from logstore.commit.apps import AppBatch
from logstore.records.record import Record
from logstore.store import LogStore

Serve = Callable[..., Client]

#: nothing of this may ever be taken for markup, or for the direction of writing
HOSTILE = (
    b"<script>alert(1)</script>",
    "\u202egnp.exe\u2066".encode(),
    b"\xff\xfe\x00\x80",
    b"</script><!--",
    b'{"a": "\\u2028<img src=x onerror=alert(1)>"}',
    b"",
    b"\x00\x00\x00\x00\x00\x00\x00\x2a",
)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a store for the length of a test."""
    opened: list[OpenConsole] = []

    def start(path: Path, **options: object) -> Client:
        opened.append(OpenConsole(str(path), token=Token(TOKEN, False), **options))  # type: ignore[arg-type]
        return Client(opened[-1])

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    with LogStore(tmp_path / "store", create=True) as opened:
        yield opened


def fill_orders(store: LogStore, *, batches: int = 6, records: int = 60, first: int = 0) -> None:
    now_ms = int(time.time() * 1000)
    for batch in range(first, first + batches):
        rows = [
            Record(b"key-%d" % (n % 20), b"value-%d-%d" % (batch, n), now_ms - 1000 + batch, (("source", b"shop"),))
            for n in range(records)
        ]
        store.append("orders", rows, app=AppBatch("shop", batch, "query"))


@pytest.fixture(scope="session")
def shop_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Orders in several segments, of which some were compacted; clicks that are only deleted; a topic with strange
    keys and values; and one that is empty.
    """
    path = tmp_path_factory.mktemp("shop") / "store"
    with LogStore(path, create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": "1500", "min.cleanable.dirty.ratio": "0.4"}
        store.create_topic("orders", partitions=2, configs=configs)
        store.create_topic("clicks", partitions=1, configs={"cleanup.policy": "delete", "segment.bytes": "2048"})
        large = {"cleanup.policy": "compact", "max.message.bytes": "2097152"}
        store.create_topic("strange", partitions=1, configs=large)
        store.create_topic("empty", partitions=3)
        fill_orders(store)
        compact(store, topics=["orders"], force=True)
        fill_orders(store, batches=2, first=6)
        store.append("orders", [Record(b"key-3", None)])
        store.append("clicks", [Record(None, b"x" * 500) for _ in range(40)])
        store.append("strange", [Record(each, each, headers=(("<b>\u202e", each),)) for each in HOSTILE])
        store.append("strange", [Record(b"large", b"\xe2\x82\xac" * 350_000), Record(b"<script>", None)])
    return path


@pytest.fixture
def shop(shop_template: Path, tmp_path: Path) -> Iterator[LogStore]:
    shutil.copytree(shop_template, tmp_path / "store")
    with LogStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def client(shop: LogStore, serve: Serve) -> Client:
    return serve(Path(shop.path))
