"""`duramen consume` and `offsets`."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.committer import Committer
from logstore.records.record import Record
from logstore.store import LogStore
from reference.partition_writer import writing
from tests.logstore.restore.test_visibility import Killed, commit

Command = Callable[..., Any]
BASE_MS = 1_700_000_000_000


def test_all_records_one_object_a_line(duramen: Command, orders: Path) -> None:
    found = duramen("consume", "orders")
    assert found.code == 0
    assert len(found.lines) == 150
    assert [each["offset"] for each in found.lines if each["partition"] == 1] == list(range(50))
    assert [(each["partition"], each["offset"]) for each in found.lines[:4]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert found.lines[6] == {
        "partition": 0,
        "offset": 3,
        "timestamp": BASE_MS + 3,
        "key": "k3",
        "value": "v3",
        "headers": [["h", "x"]],
    }
    assert found.lines[18]["value"] is None


def test_output_is_the_same_whatever_output_is_asked_for(duramen: Command, orders: Path) -> None:
    assert duramen("consume", "orders", output="json").out == duramen("consume", "orders").out


@pytest.mark.parametrize(
    ("arguments", "first", "count"),
    [
        (["--partition", 0, "--from-offset", 98], 98, 2),
        (["--partition", 0, "--from-offset", "earliest"], 0, 100),
        (["--partition", 0, "--from-offset", "latest"], None, 0),
        (["--partition", 0, "--from-offset", 100], None, 0),
        (["--partition", 1, "--from-timestamp", BASE_MS + 45], 45, 5),
        (["--partition", 1, "--from-timestamp", BASE_MS + 99], None, 0),
        (["--partition", 0, "--max-records", 7], 0, 7),
        (["--max-records", 0], None, 0),
        (["--partition", 0, "--from-offset", 5000, "--on-out-of-range", "earliest"], 0, 100),
        (["--partition", 0, "--from-offset", 5000, "--on-out-of-range", "latest"], None, 0),
    ],
)
def test_where_to_begin_and_stop(
    duramen: Command, orders: Path, arguments: list[object], first: int | None, count: int
) -> None:
    found = duramen("consume", "orders", *arguments)
    assert found.code == 0, found.err
    assert len(found.lines) == count
    assert (found.lines[0]["offset"] if found.lines else None) == first


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--partition", 0, "--from-offset", 101], 1, "101"),
        (["--partition", 7], 1, "partitions 0 to 1"),
        (["--from-offset", 3], 2, "--partition"),
        (["--partition", 0, "--from-offset", "soon"], 2, "earliest or latest"),
        (["--from-offset", "latest", "--from-timestamp", 5], 2, "exclude"),
        (["--encoding", "ebcdic"], 2, "ebcdic"),
    ],
)
def test_refusals(duramen: Command, orders: Path, arguments: list[object], code: int, says: str) -> None:
    found = duramen("consume", "orders", *arguments)
    assert found.code == code
    assert says in found.err
    assert found.out == ""


def test_bytes_that_are_no_text_are_not_mangled(duramen: Command, orders: Path) -> None:
    with LogStore(orders) as store:
        topic = store.topic("orders")
        with writing(store, topic, 1, what="test") as log:
            log.append([Record(b"\xff\x00", b"\x80", BASE_MS + 100, (("h", b"\xfe"), ("n", None)))])
    as_text = duramen("consume", "orders", "--partition", 1, "--from-offset", 50)
    assert as_text.code == 1
    assert "base64" in as_text.err
    (line,) = duramen("consume", "orders", "--partition", 1, "--from-offset", 50, "--encoding", "base64").lines
    assert [base64.b64decode(line[name]) for name in ("key", "value")] == [b"\xff\x00", b"\x80"]
    assert line["headers"] == [["h", "/g=="], ["n", None]]


def test_aborted_and_open_transactions_are_left_out_when_asked(duramen: Command, store_path: Path) -> None:
    from logstore.partition.producer_state import AppendOrigin
    from logstore.records.columns import columns_of
    from logstore.records.encoder import BatchOptions, encode_batch

    def transactional(value: bytes, producer_id: int) -> bytes:
        options = BatchOptions(transactional=True, producer_id=producer_id, producer_epoch=0, base_sequence=0)
        return encode_batch(columns_of([Record(b"k", value, BASE_MS)]), options)

    with LogStore(store_path, create=True) as store:
        topic = store.create_topic("t", configs={"message.timestamp.before.max.ms": 2**62})
        with writing(store, topic, 0, what="test") as log:
            for producer_id, value in ((1, b"aborted"), (2, b"committed"), (3, b"open")):
                log.append_batches(transactional(value, producer_id), origin=AppendOrigin.CLIENT)
                if producer_id < 3:
                    log.append_marker(commit=producer_id == 2, producer_id=producer_id, producer_epoch=0)
            log.append([Record(b"k", b"plain", BASE_MS)])
    everything = [line["value"] for line in duramen("consume", "t").lines]
    assert everything == ["aborted", "committed", "open", "plain"]
    committed = [line["value"] for line in duramen("consume", "t", "--isolation", "read_committed").lines]
    assert committed == ["committed"]


def test_several_topics_are_told_apart(duramen: Command, store_path: Path) -> None:
    with LogStore(store_path, create=True) as store:
        for name in ("b", "a"):
            store.create_topic(name)
            store.append(name, [Record(b"k", name.encode(), BASE_MS)])
    lines = duramen("consume", "b", "a").lines
    assert [(line["topic"], line["value"]) for line in lines] == [("a", "a"), ("b", "b")]
    assert "topic" not in duramen("consume", "a").lines[0]
    assert duramen("consume", "a", "b", "--from-offset", "1").code == 2


def test_a_commit_whose_writer_died_between_two_topics_is_printed_in_both(
    duramen: Command, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, left = Committer.publish, [1]

    def dying(self: Committer, *given: object) -> object:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return publish(self, *given)  # type: ignore[arg-type]

    with LogStore(store_path, create=True) as store:
        for name in ("a", "b"):
            store.create_topic(name)
        monkeypatch.setattr(Committer, "publish", dying)
        with pytest.raises(Killed):
            commit(Committer(store), ("a", "b"), 1)
        assert sorted(store.ends(store.topic(name)).high_watermarks[0] for name in ("a", "b")) == [0, 1]
    assert [line["value"] for line in duramen("consume", "a", "b").lines] == ["a 1", "b 1"]


def test_offsets(duramen: Command, orders: Path) -> None:
    found = duramen("offsets", output="json").json["offsets"]
    assert found == [
        {"topic": "orders", "partition": 0, "log_start_offset": 0, "high_watermark": 100, "recovery_point": 100},
        {"topic": "orders", "partition": 1, "log_start_offset": 0, "high_watermark": 50, "recovery_point": 50},
    ]
    assert duramen("offsets", "orders", "--partition", 1).out.splitlines()[1].split() == [
        "orders-1",
        "0",
        "50",
        "50",
    ]


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [("earliest", 0), ("latest", 50), ("max-timestamp", 49), (BASE_MS + 20, 20), (BASE_MS + 1000, None)],
)
def test_offsets_by_time(duramen: Command, orders: Path, timestamp: object, expected: int | None) -> None:
    (row,) = duramen("offsets", "orders", "--partition", 1, "--timestamp", timestamp, output="json").json["offsets"]
    assert row["found_offset"] == expected


def test_offsets_refuse_a_time_that_is_none(duramen: Command, orders: Path) -> None:
    assert duramen("offsets", "--timestamp", "yesterday").code == 2


def test_get_of_a_key_that_is_not_base64_is_bad_usage(orders: Path, duramen: Command) -> None:
    assert duramen("get", "orders", "k", "--encoding", "base64").code == 2
