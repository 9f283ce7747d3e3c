"""The commands that move and mend, on a store in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucket.test_arriving import broker_directory
from logstore.bucket.store import BucketStore

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
