"""A metadata log, replayed: topics, settings, deletions, transactions, snapshots, and what is not believed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from logstore.errors import CorruptBatch, DuramenError, UnsupportedFormat
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.topic import format_uuid
from logstore.transfer.import_settings import topic_settings
from logstore.transfer.kraft_metadata import ClusterMetadata, read_cluster_metadata
from metadata_log import ABORT, BEGIN, END, config, message, partition, remove, string, topic, uvarint, write_log

A, B = uuid.UUID(int=10), uuid.UUID(int=11)


def read(directory: Path) -> ClusterMetadata:
    return read_cluster_metadata(OS_FILES, str(directory), limits=DEFAULT_LIMITS)


STORY = [
    topic("orders", A),
    partition(0, A),
    partition(1, A),
    config(2, "orders", "retention.ms", "5"),
    config(2, "orders", "cleanup.policy", "compact"),
    config(2, "orders", "retention.ms", "-1"),
    config(2, "orders", "cleanup.policy", None),
    config(4, "", "log.retention.ms", "77"),
    config(4, "1", "log.retention.ms", "88"),
]


@pytest.mark.parametrize("snapshot_at", [None, 1, 5, len(STORY)])
def test_the_last_word_on_each_setting_counts(tmp_path: Path, snapshot_at: int | None) -> None:
    write_log(tmp_path / "__cluster_metadata-0", STORY, snapshot_at=snapshot_at)
    found = read(tmp_path / "__cluster_metadata-0")
    orders = found.topic("orders")
    assert orders is not None
    assert (orders.topic_id, orders.partitions, orders.configs) == (format_uuid(A), 2, {"retention.ms": "-1"})
    assert found.broker_settings(None) == found.broker_settings(7) == {"log.retention.ms": "77"}
    assert found.broker_settings(1) == {"log.retention.ms": "88"}
    assert found.topic("payments") is None


def test_a_topic_that_was_deleted_takes_its_settings_along(tmp_path: Path) -> None:
    write_log(tmp_path / "m-0", [*STORY, remove(A), topic("orders", B), partition(0, B)])
    orders = read(tmp_path / "m-0").topic("orders")
    assert orders is not None
    assert (orders.topic_id, orders.partitions, orders.configs) == (format_uuid(B), 1, {})


@pytest.mark.parametrize(("end", "value"), [(END, "9"), (ABORT, "-1"), (None, "-1")])
def test_a_metadata_transaction_counts_when_it_ended(tmp_path: Path, end: bytes | None, value: str) -> None:
    inside = [BEGIN, config(2, "orders", "retention.ms", "9"), *([] if end is None else [end])]
    write_log(tmp_path / "m-0", [*STORY, *inside])
    orders = read(tmp_path / "m-0").topic("orders")
    assert orders is not None
    assert orders.configs == {"retention.ms": value}


@pytest.mark.parametrize(
    "bad",
    [
        message(2, string("x"), frame=2),
        message(4, b"\x02", version=1),
        message(2, uvarint(100), b"short"),
        message(2, b"\xff\xff\xff\xff\xff\xff"),
        b"\x01",
        message(2, uvarint(3), b"\xff\xff", A.bytes),
    ],
)
def test_what_is_not_understood_is_an_error_and_no_guess(tmp_path: Path, bad: bytes) -> None:
    write_log(tmp_path / "m-0", [*STORY, bad])
    with pytest.raises((CorruptBatch, UnsupportedFormat)):
        read(tmp_path / "m-0")


def test_a_damaged_log_is_an_error_also_at_its_end(tmp_path: Path) -> None:
    write_log(tmp_path / "m-0", STORY)
    (path,) = (tmp_path / "m-0").glob("*.log")
    data = path.read_bytes()
    for damaged in (data[:-3], data[:-1] + bytes([data[-1] ^ 1]), data + b"\0" * 20):
        path.write_bytes(damaged)
        with pytest.raises(DuramenError):
            read(tmp_path / "m-0")


def test_a_log_that_begins_behind_its_snapshot_is_an_error(tmp_path: Path) -> None:
    write_log(tmp_path / "m-0", STORY)
    (path,) = (tmp_path / "m-0").glob("*.log")
    path.rename(path.with_name(f"{5:020}.log"))
    with pytest.raises(CorruptBatch, match="begins at 5"):
        read(tmp_path / "m-0")


# --- which settings follow -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "broker", "is_static_known", "expected", "is_known"),
    [
        ({"retention.ms": "-1"}, {}, False, {"retention.ms": "-1"}, True),
        ({}, {}, False, {}, False),  # server.properties may say log.retention.ms=-1
        ({}, {}, True, {}, True),
        ({}, {"log.retention.ms": "-1"}, False, {"retention.ms": "-1"}, True),
        ({}, {"log.retention.hours": "2"}, False, {"retention.ms": "7200000"}, True),
        ({}, {"log.retention.hours": "2", "log.retention.ms": "5"}, False, {"retention.ms": "5"}, True),
        ({"retention.ms": "9"}, {"log.retention.ms": "5"}, False, {"retention.ms": "9"}, True),
        ({"cleanup.policy": "compact"}, {}, False, {"cleanup.policy": "compact"}, True),
        ({"cleanup.policy": "compact,delete"}, {}, False, {"cleanup.policy": "compact,delete"}, False),
        ({}, {"log.cleanup.policy": "compact"}, False, {"cleanup.policy": "compact"}, True),
        ({"retention.ms": "1", "remote.storage.enable": "true"}, {}, False, {"retention.ms": "1"}, True),
        ({"retention.ms": "soon"}, {}, False, {}, False),
    ],
)
def test_settings_are_known_where_nothing_unknown_could_keep_records(
    configs: dict[str, str], broker: dict[str, str], is_static_known: bool, expected: dict[str, str], is_known: bool
) -> None:
    metadata = ClusterMetadata(topics={"orders": "id"}, configs={(2, "orders"): configs})
    found = topic_settings(metadata, "orders", "id", broker, is_static_known=is_static_known, notes=[])
    assert (dict(found.configs), found.unknown is None) == (expected, is_known)


def test_a_topic_that_the_log_does_not_mean_is_unknown() -> None:
    metadata = ClusterMetadata(topics={"orders": "id"}, configs={(2, "orders"): {"retention.ms": "-1"}})
    for name, topic_id in (("orders", "another"), ("payments", None)):
        found = topic_settings(metadata, name, topic_id, {}, is_static_known=True, notes=[])
        assert found.unknown is not None
        assert not found.configs
