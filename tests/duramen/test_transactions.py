"""`duramen transactions`: what it lists, what it asks, what it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.store import LogStore
from reference.partition_writer import writing

Command = Callable[..., Any]
BASE_MS = 1_700_000_000_000


@pytest.fixture
def held(store_path: Path) -> Path:
    """`payments`: five records, an open transaction of producer 42 from offset 5 on."""
    with LogStore(store_path, create=True) as store:
        topic = store.create_topic("payments", partitions=2)
        store.create_topic("others")
        with writing(store, topic, 1, what="test") as log:
            log.append([Record(b"k", b"v", BASE_MS)] * 5)
            options = BatchOptions(transactional=True, producer_id=42, producer_epoch=1, base_sequence=0)
            batch = columns_of([Record(b"k", b"open", BASE_MS)])
            log.append_batches(encode_batch(batch, options), origin=AppendOrigin.CLIENT)
    return store_path


def test_open_transactions_are_listed_and_aborted(held: Path, duramen: Command) -> None:
    (found,) = duramen("transactions", "list", output="json").json["transactions"]
    assert found == {
        "topic": "payments",
        "partition": 1,
        "producer_id": 42,
        "producer_epoch": 1,
        "coordinator_epoch": found["coordinator_epoch"],
        "first_offset": 5,
        "last_timestamp_ms": BASE_MS,
    }
    assert duramen("transactions", "list", "others", output="json").json == {"transactions": []}
    text = duramen("transactions", "list").out
    assert "payments-1" in text
    assert "1 open transaction\n" in text
    command = ("transactions", "abort", "payments", "--partition", 1, "--producer-id", 42)
    dry = duramen(*command, "--dry-run", output="json").json
    assert (dry["aborted"], dry["marker_offset"]) == (False, None)
    refused = duramen(*command)
    assert refused.code == 2
    assert "--yes" in refused.err
    assert len(duramen("transactions", "list", output="json").json["transactions"]) == 1
    done = duramen(*command, "--yes", output="json").json
    assert (done["aborted"], done["marker_offset"], done["last_stable_offset"]) == (True, 6, 7)
    assert duramen("transactions", "list", output="json").json == {"transactions": []}
    read = duramen("consume", "payments", "--isolation", "read_committed", output="json")
    assert len(read.lines) == 5
    assert duramen("verify").code == 0
    again = duramen(*command, "--yes")
    assert again.code == 1
    assert "no open transaction" in again.err
