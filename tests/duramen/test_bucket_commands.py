"""The commands that move and mend, on a store in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucket.test_arriving import broker_directory
from logstore.bucket.store import BucketStore
from logstore.records.record import Record

Command = Callable[..., Any]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, duramen: Command) -> str:
    found = f"memory://{uuid.uuid4().hex}/store"
    monkeypatch.setenv("DURAMEN_STORE", found)
    return found


def test_a_brokers_topics_come_in_and_go_out_again(duramen: Command, url: str, tmp_path: Path) -> None:
    kafka = broker_directory(tmp_path / "kafka")
    planned = duramen("import", kafka, "--dry-run", output="json")
    assert planned.code == 1
    assert "not a store" in planned.err
    done = duramen("import", kafka, output="json")
    assert done.code == 0
    assert done.json["topics"][0]["settings_unknown"]
    assert done.json["topics"][0]["partitions"][0]["log_end_offset"] == 30
    found = duramen("transactions", "list", output="json").json["transactions"]
    assert [(each["producer_id"], each["first_offset"]) for each in found] == [(7, 10), (8, 15)]
    for producer_id in (7, 8):
        assert duramen("transactions", "abort", "t", "--partition", 0, "--producer-id", producer_id, "--yes").code == 0
    assert "No open transactions" in duramen("transactions", "list").out
    read = duramen("consume", "t", "--isolation", "read_committed").lines
    assert [each["offset"] for each in read] == [*range(10), *range(20, 30)]
    out = duramen("export", tmp_path / "out", output="json")
    assert (out.code, out.json["clean"]) == (0, True)
    assert out.json["partitions"][0]["log_end_offset"] == 32
    again = duramen("import", tmp_path / "out", "--dry-run")
    assert again.code == 1
    assert "there is a topic t already" in again.err


def test_backups_and_copies_of_either_kind(duramen: Command, url: str, tmp_path: Path) -> None:
    duramen("import", broker_directory(tmp_path / "kafka"))
    copy = f"{url}-copy"
    assert duramen("backup", copy, "--dry-run", output="json").json["backed_up"] is False
    done = duramen("backup", copy, output="json")
    assert done.json["partitions"][0]["log_end_offset"] == 30
    assert duramen("backup", copy).code == 1
    assert duramen("backup", tmp_path / "directory").code == 0
    for target in (copy, tmp_path / "directory"):
        described = duramen("--store", target, "describe", output="json")
        assert described.json["store"]["origin"]["source"] == url
        assert len(duramen("--store", target, "consume", "t").lines) == 30
        assert duramen("--store", target, "verify", output="json").json["sound"]
    refused = duramen("copy", tmp_path / "other")
    assert refused.code == 1
    copied = duramen("copy", tmp_path / "other", "--create", output="json")
    assert copied.json["partitions"][0]["log_end_offset"] == 30
    assert duramen("copy", tmp_path / "other", "--dry-run").code == 1
    assert duramen("--store", tmp_path / "other", "copy", f"{url}-back", "--create").code == 0
    assert len(duramen("--store", f"{url}-back", "consume", "t").lines) == 30


def test_damage_is_told_given_up_when_agreed_and_remembered(duramen: Command, url: str, tmp_path: Path) -> None:
    duramen("import", broker_directory(tmp_path / "kafka"))
    store = BucketStore(url)
    segment = store.partition_state(store.topic("t"), 0).segments[1]
    (key,) = [h.key for h in store.objects.list("logs") if f"/{segment.base_offset:020d}-" in h.key]
    store.objects.delete([key])
    store.objects.delete(["topics/t"])
    found = duramen("verify", output="json")
    assert (found.code, found.json["sound"]) == (3, False)
    assert found.json["store"]["findings"]
    planned = duramen("recover", "--dry-run", output="json")
    assert planned.code == 3
    (loss,) = planned.json["partitions"][0]["losses"]
    assert loss["base_offset"] == segment.base_offset
    assert duramen("recover").code == 2, "nobody is there to ask"
    assert duramen("verify", output="json").json["sound"] is False
    done = duramen("recover", "--yes")
    assert done.code == 3
    assert f"lost: offsets {loss['base_offset']} to {loss['end_offset'] - 1}" in done.out
    after = duramen("verify", output="json")
    assert (after.code, after.json["sound"]) == (0, True)
    assert [each["base_offset"] for each in after.json["partitions"][0]["losses"]] == [segment.base_offset]
    assert "lost since" in duramen("verify").out
    assert "lost since" in duramen("describe", "t").out
    assert duramen("recover").code == 0


@pytest.mark.parametrize("damage", ["gone", "garbled"])
def test_what_says_that_it_is_a_store_is_made_again_when_asked(duramen: Command, url: str, damage: str) -> None:
    BucketStore(url, create=True).create_topic("t")
    duramen("config", "--set", "log.segment.bytes=2MB")
    store = BucketStore(url)
    store.append("t", [Record(None, b"a"), Record(None, b"b")])
    store.objects.delete(["duramen.json"])
    if damage == "garbled":
        store.objects.put("duramen.json", [b"{}"])
    refused = duramen("consume", "t")
    assert refused.code == 1
    assert "not a store" in refused.err
    planned = duramen("recover", "--dry-run", output="json")
    assert planned.code == 3
    assert "made again with a new id" in planned.json["store"]["actions"][0]
    assert duramen("recover").code == 2, "nobody is there to ask"
    assert duramen("consume", "t").code == 1
    assert duramen("recover", "--yes").code == 3
    assert [each["value"] for each in duramen("consume", "t").lines] == ["a", "b"]
    assert duramen("verify", output="json").json["sound"]
    assert duramen("recover").code == 0
    kept = [store.objects.get(head.key)[0] for head in store.objects.list("quarantine")]
    assert kept == ([b"{}"] if damage == "garbled" else [])


def test_no_store_is_made_where_there_is_none(duramen: Command, url: str) -> None:
    draft = BucketStore(url, is_draft=True)
    draft.objects.put("readme", [b"not ours"])
    assert duramen("recover", "--yes").code == 1
    draft.ledger.make()  # one who makes a store, or copies one, died before the summary
    draft.objects.delete(["ledger/summary"])
    refused = duramen("recover", "--yes")
    assert refused.code == 1
    assert "not a store" in refused.err
    assert [head.key for head in draft.objects.list("duramen")] == []


def test_a_lost_commit_is_given_up_when_agreed_and_the_store_goes_on(duramen: Command, url: str) -> None:
    store = BucketStore(url, create=True)
    store.create_topic("t")
    for value in (b"a", b"b", b"c", b"d"):
        store.append("t", [Record(None, value)])
    rows = [row for row in store.ledger.view.rows if row.plan is not None]
    version = store.ledger.view.version - 1
    assert rows[2].plan is not None
    store.objects.delete([f"ledger/commits/_delta_log/{version:020d}.json", "ledger/summary", rows[2].plan.key])
    planned = duramen("recover", "--dry-run", output="json")
    assert planned.code == 3
    assert "lost with its commit: t-0 offsets 2 to 2" in planned.json["store"]["actions"]
    assert duramen("recover").code == 2, "nobody is there to ask"
    done = duramen("recover", "--yes", output="json")
    assert done.code == 3
    assert [(loss["base_offset"], loss["end_offset"]) for loss in done.json["partitions"][0]["losses"]] == [(2, 3)]
    assert [each["value"] for each in duramen("consume", "t").lines] == ["a", "b", "d"]
    BucketStore(url).append("t", [Record(None, b"e")])
    assert [(each["offset"], each["value"]) for each in duramen("consume", "t").lines][-1] == (4, "e")
    after = duramen("verify", output="json")
    assert (after.code, after.json["sound"]) == (0, True)
    assert duramen("recover").code == 0
