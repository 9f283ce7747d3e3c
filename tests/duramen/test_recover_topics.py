"""Small files of a store are lost, emptied or garbled: `verify` says so, `recover` brings them back, records stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.clock import ManualClock
from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import BASE_MS, Command

Damage = Callable[[Path], object]


def garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 3):
        data[at] ^= 0x55
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Damage] = {
    "lost": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "garbled": garble,
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}
FILES = {
    "topic file": "topics/orders.t",
    "partition.metadata": "logs/orders-0/partition.metadata",
    "ends": "state/{id}/ends",
    "segment list": "state/{id}/0",
    "leader epochs": "logs/orders-0/leader-epoch-checkpoint",
    "copy": "state/{id}/topic",
}
#: without it no epoch is known, which a reader of a log needs not; verify and recover take it for what it is
NO_DAMAGE = {("leader epochs", "lost"), ("leader epochs", "emptied"), ("copy", "lost")}


def consumed(duramen: Command) -> list[str]:
    found = duramen("consume", "orders")
    assert found.code == 0, found.err
    return sorted(found.out.splitlines())


def topic_id(store: Path) -> str:
    with LogStore(store) as opened:
        return opened.topic("orders").id


def works(duramen: Command, store: Path, before: list[str]) -> None:
    """Everything is there, sound, and goes on."""
    assert consumed(duramen) == before
    verified = duramen("verify")
    assert verified.code == 0, verified.out
    with LogStore(store) as opened:
        opened.append("orders", [Record(b"new-%d" % at, b"v", BASE_MS + 1000) for at in range(20)])
    assert len(consumed(duramen)) == len(before) + 20
    assert duramen("recover", "--yes").code == 0


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_small_file_is_damaged_and_recover_brings_it_back(
    duramen: Command, orders: Path, file: str, kind: str
) -> None:
    with LogStore(orders) as opened:
        opened.append("orders", [Record(b"k", b"v", BASE_MS + 500)])
    before, described = consumed(duramen), duramen("topics", "describe", "orders", output="json").json["topic"]
    DAMAGE[kind](orders / FILES[file].format(id=described["id"]))
    harmless = (file, kind) in NO_DAMAGE
    verified = duramen("verify", output="json")
    assert verified.code == (0 if harmless else 3), verified.out
    assert verified.json["sound"] is harmless
    looked = duramen("recover", "--dry-run")
    assert looked.code == (0 if harmless else 3), looked.out
    recovered = duramen("recover", "--yes", output="json")
    assert recovered.code == (0 if harmless else 3), recovered.out + recovered.err
    works(duramen, orders, before)
    now = duramen("topics", "describe", "orders", output="json").json["topic"]
    assert {name: now[name] for name in ("id", "configs", "partitions", "kafka_id", "settings_unknown")} == {
        name: described[name] for name in ("id", "configs", "partitions", "kafka_id", "settings_unknown")
    }


def test_a_topic_without_file_and_copy_comes_back_with_its_settings_unknown(duramen: Command, orders: Path) -> None:
    before, known = consumed(duramen), topic_id(orders)
    (orders / "topics" / "orders.t").unlink()
    (orders / "state" / known / "topic").unlink()
    listed = duramen("topics", "list", output="json").json
    assert listed["topics"] == []
    assert {each["topic"] for each in listed["strays"]} == {"orders", None}
    looked = duramen("recover", "--dry-run", output="json")
    assert looked.code == 3
    assert [(each["id"], each["partitions"]) for each in looked.json["topics"]] == [(known, 2)]
    assert duramen("topics", "list", output="json").json == listed

    assert duramen("recover", "--yes").code == 3
    topic = duramen("topics", "describe", "orders", output="json").json["topic"]
    assert (topic["id"], topic["partitions"], topic["settings_unknown"]) == (known, 2, True)
    assert "settings unknown" in duramen("topics", "list").out
    assert "settings unknown" in duramen("explain", "orders").out
    much_later = BASE_MS + 10**12
    assert "settings unknown" in duramen("retain", "--now-ms", much_later).out
    refused = duramen("compact", "--topic", "orders", "--engine", "local", "--force")
    assert refused.code == 1
    assert "the settings of topic" in refused.err
    works(duramen, orders, before)

    duramen("topics", "alter", "orders", "--config", "cleanup.policy=delete")
    assert duramen("topics", "describe", "orders", output="json").json["topic"]["settings_unknown"] is False
    duramen("retain", "--now-ms", much_later)
    assert consumed(duramen) == []


def test_settings_can_be_given_when_a_topic_is_brought_back(duramen: Command, orders: Path) -> None:
    known = topic_id(orders)
    (orders / "topics" / "orders.t").unlink()
    (orders / "state" / known / "topic").unlink()
    assert duramen("recover", "--topic-config", "cleanup.policy=compact").code == 3
    topic = duramen("topics", "describe", "orders", output="json").json["topic"]
    assert (topic["configs"], topic["settings_unknown"]) == ({"cleanup.policy": "compact"}, False)


def test_a_staged_batch_tells_the_settings(duramen: Command, orders: Path) -> None:
    with LogStore(orders) as opened:
        opened.append("orders", [Record(b"k", b"v", BASE_MS)])
        opened._own_flush = None  # as a killed process leaves it
    assert list((orders / "staging").glob("*-plan"))
    known = topic_id(orders)
    (orders / "topics" / "orders.t").unlink()
    (orders / "state" / known / "topic").unlink()
    assert duramen("recover", "--yes").code == 3
    topic = duramen("topics", "describe", "orders", output="json").json["topic"]
    assert (topic["configs"], topic["settings_unknown"]) == (
        {"segment.bytes": "1000", "index.interval.bytes": "100"},
        False,
    )


def test_a_topic_of_which_only_directories_are_left(duramen: Command, orders: Path) -> None:
    before = consumed(duramen)
    (orders / "topics" / "orders.t").unlink()
    shutil.rmtree(orders / "state")
    (orders / "state").mkdir()
    for path in (orders / "logs").glob("orders-*/partition.metadata"):
        path.unlink()
    assert duramen("recover", "--yes").code == 3
    works(duramen, orders, before)


@pytest.mark.parametrize("with_copy", [True, False])
def test_a_topic_comes_back_though_one_of_its_directories_carries_the_id_of_another(
    duramen: Command, orders: Path, with_copy: bool
) -> None:
    with LogStore(orders) as store:
        store.create_topic("payments")
        store.append("payments", [Record(b"p%d" % at, b"v", BASE_MS) for at in range(30)])
    before, paid = consumed(duramen), sorted(duramen("consume", "payments").out.splitlines())
    known = topic_id(orders)
    mine, theirs = (orders / "logs" / name / "partition.metadata" for name in ("orders-1", "payments-0"))
    swapped = mine.read_bytes(), theirs.read_bytes()
    theirs.write_bytes(swapped[0])
    mine.write_bytes(swapped[1])
    (orders / "topics" / "orders.t").unlink()
    if not with_copy:
        (orders / "state" / known / "topic").unlink()
    assert duramen("recover", "--yes").code == 3
    assert topic_id(orders) == known
    assert sorted(duramen("consume", "payments").out.splitlines()) == paid
    works(duramen, orders, before)


def test_a_partition_directory_is_gone_and_its_records_are_reported_lost(duramen: Command, orders: Path) -> None:
    shutil.rmtree(orders / "logs" / "orders-0")
    assert duramen("verify").code == 3
    recovered = duramen("recover", "--yes", output="json")
    assert recovered.code == 3
    assert len(consumed(duramen)) == 50
    with LogStore(orders) as opened:
        opened.append("orders", [Record(b"new-%d" % at, b"v", BASE_MS + 1000) for at in range(20)])
    offsets = [json.loads(line)["offset"] for line in consumed(duramen) if json.loads(line)["partition"] == 0]
    assert min(offsets) >= 100


def test_a_directory_of_another_topic_is_set_aside_as_a_broker_does(duramen: Command, orders: Path) -> None:
    path = orders / "logs" / "orders-0"
    shutil.rmtree(path)
    shutil.copytree(orders / "logs" / "orders-1", path)
    (path / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAQACAAAAAAAAAAQ")
    assert duramen("verify").code == 3
    assert duramen("recover", "--yes").code == 3
    (aside,) = (orders / "logs").glob("orders-0.*-stray")
    assert list(aside.glob("*.log"))


def test_the_log_start_of_a_lost_segment_list_comes_from_kafkas_checkpoint(duramen: Command, orders: Path) -> None:
    assert duramen("delete-records", "orders", "--partition", 0, "--before-offset", 42, "--yes").code == 0
    before = consumed(duramen)
    (orders / "state" / topic_id(orders) / "0").unlink()
    assert duramen("recover", "--yes").code == 3
    assert consumed(duramen) == before


def test_the_log_start_of_a_topic_without_its_file_and_state_comes_from_kafkas_checkpoint(
    duramen: Command, orders: Path
) -> None:
    """The topic that is made again is as old as its directories, so the checkpoint is about it."""
    assert duramen("delete-records", "orders", "--partition", 0, "--before-offset", 42, "--yes").code == 0
    before = consumed(duramen)
    shutil.rmtree(orders / "state" / topic_id(orders))
    (orders / "topics" / "orders.t").unlink()
    assert duramen("recover", "--yes").code == 3
    assert consumed(duramen) == before


@pytest.mark.parametrize("other", ["recovery-point", "replication", "cleaner"])
@pytest.mark.parametrize("how", ["swapped", "overwritten"])
def test_a_checkpoint_of_another_kind_is_not_taken_for_the_log_start(
    duramen: Command, orders: Path, other: str, how: str
) -> None:
    """They all look the same; a log start that is too high would hide every record."""
    assert duramen("delete-records", "orders", "--partition", 0, "--before-offset", 42, "--yes").code == 0
    before = set(consumed(duramen))
    starts, others = (orders / "logs" / f"{name}-offset-checkpoint" for name in ("log-start", other))
    mine, its = starts.read_bytes(), others.read_bytes()
    assert mine != its
    starts.write_bytes(its)
    if how == "swapped":
        others.write_bytes(mine)
    (orders / "state" / topic_id(orders) / "0").unlink()
    assert duramen("recover", "--yes").code == 3
    assert before <= set(consumed(duramen))
    assert duramen("verify").code == 0


@pytest.mark.parametrize("damaged", [("list",), ("list", "metadata")], ids="-".join)
@pytest.mark.parametrize("arguments", [("--dry-run",), ("orders", "--dry-run"), ("orders", "--yes")], ids=" ".join)
def test_what_is_lost_of_a_topic_is_looked_for_while_the_file_of_another_is_damaged(
    duramen: Command, orders: Path, damaged: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    with LogStore(orders) as store:
        store.create_topic("payments")
    assert duramen("delete-records", "orders", "--partition", 0, "--before-offset", 42, "--yes").code == 0
    before = consumed(duramen)
    garble(orders / "topics" / "payments.t")
    id_ = topic_id(orders)
    (orders / "state" / id_ / "0").unlink()
    if "metadata" in damaged:
        other = id_[:5] + ("A" if id_[5] != "A" else "B") + id_[6:]
        (orders / "logs" / "orders-0" / "partition.metadata").write_text(f"version: 0\ntopic_id: {other}")
    told = duramen("recover", *arguments, output="json")
    assert told.code == 3
    assert told.out, told.err
    (mine, _) = [each for each in json.loads(told.out)["partitions"] if each["topic"] == "orders"]
    assert mine["repaired"]
    assert not mine["losses"]
    assert duramen("recover", "--yes").code in (0, 3)
    assert consumed(duramen) == before
    assert duramen("verify").code == 0


def test_a_sweep_gives_topics_of_older_releases_their_copy(orders: Path) -> None:
    with LogStore(orders, clock=ManualClock(10**15)) as store:
        topic = store.topic("orders")
        copy = Path(store.layout.topic_copy(topic.id))
        copy.unlink()
        assert store.sweep() == []
        assert store.registry.read_copy(topic.id) == topic
