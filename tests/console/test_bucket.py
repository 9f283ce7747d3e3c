"""The same pages over a store in a bucket: what it has is shown, what it has not is said."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from compaction_job.job import compact
from console.asking import Client
from console.conftest import Serve, fill_orders
from console.test_answers import CACHED_S
from console.test_guard import wait_for_actions
from duramen.cli import run
from logstore.bucket.maintaining import MaintenanceRules, Step, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.records.record import Record

PAGES = (
    "/store",
    "/topics",
    "/explain",
    "/runs",
    "/what-if",
    "/horizons",
    "/apps",
    "/commits",
    "/settings",
    "/actions",
)


def seal(store: BucketStore) -> None:
    maintain(store, MaintenanceRules(steps=frozenset({Step.SEAL}), seal=SealRules(force=True)))


@pytest.fixture
def store() -> Iterator[BucketStore]:
    with BucketStore(f"memory://{uuid.uuid4().hex}/shop", create=True) as opened:
        configs = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.1"}
        opened.create_topic("orders", partitions=2, configs=configs)
        opened.create_topic("empty", partitions=1)
        fill_orders(opened, batches=4)
        seal(opened)
        assert compact(opened, topics=["orders"], force=True).done
        fill_orders(opened, batches=2, first=4)
        seal(opened)
        opened.append("orders", [Record(b"key-3", None)])
        yield opened


@pytest.fixture
def client(store: BucketStore, serve: Serve) -> Client:
    return serve(store.url)


def test_the_header_says_what_nobody_can_know_of_a_bucket(client: Client, store: BucketStore) -> None:
    header = client.get("/store")
    assert (header["store"]["path"], header["store"]["kind"]) == (store.url, "bucket")
    assert (header["space"]["free_bytes"], header["space"]["total_bytes"]) == (None, None)
    assert (header["daemon"]["told"], header["daemon"]["running"], header["running"]) == (False, False, [])
    assert header["history"] == []
    totals, topic = header["totals"], store.topic("orders")
    sizes = totals["clean_bytes"] + totals["dirty_bytes"] + totals["uncleanable_bytes"]
    assert sizes == header["space"]["log_bytes"] == sum(store.log_bytes(topic, number) for number in range(2)) > 0
    for path in PAGES:
        client.get(path)


def test_a_look_at_which_nothing_is_new_takes_few_requests(client: Client, store: BucketStore) -> None:
    client.get("/store")
    requests = client.served._store.requests  # type: ignore[attr-defined]

    def taken() -> int:
        before = sum(requests.values())
        client.get("/store")
        return sum(requests.values()) - before

    assert min(taken() for _ in range(5)) <= 2  # receipts are read now and then
    time.sleep(CACHED_S)
    fill_orders(store, batches=1, first=6)
    # Two partitions of the topic and one of the other: the look at each, the plan of the new batch, receipts.
    assert taken() <= 2 + 3 * 3 + 2 + 3


def test_strips_add_up_to_the_manifests_and_the_tail(client: Client, store: BucketStore) -> None:
    topic = store.topic("orders")
    for number in range(2):
        strip = client.get(f"/topics/orders/partitions/{number}")
        assert sum(each["size_bytes"] for each in strip["segments"]) == strip["size_bytes"]
        assert strip["size_bytes"] == store.log_bytes(topic, number)
        listed = store.partition_state(topic, number).segments
        assert [each["base_offset"] for each in strip["segments"]] == [each.base_offset for each in listed]
        assert {"clean", "active"} <= {each["section"] for each in strip["segments"]}
        assert strip["segments"][0]["keys"] is not None
        assert strip["runs"][0]["result"] == "done"
        assert strip["log_end_offset"] == store.high_watermark(topic, number)


def test_records_commits_runs_and_what_if(client: Client, store: BucketStore) -> None:
    found = client.get("/topics/orders/messages", key="key-3")["messages"]
    assert found[-1]["tombstone"] is True
    assert {each["key"]["text"] for each in found} == {"key-3"}
    apps = {each["app_id"]: each for each in client.get("/apps")["apps"]}
    assert set(apps) == {"shop", None}
    assert (apps["shop"]["last_batch_id"], apps["shop"]["bytes"]) == (5, None)
    seen, position = [], None
    while True:
        page = client.get("/commits", limit=2, position=position)
        seen += [(each["topic"], each["sequence"]) for each in page["commits"]]
        if (position := page["next"]) is None:
            break
    assert len(seen) == len(set(seen))
    # What a batch took is told by commits that this console has seen come.
    fill_orders(store, batches=1, first=6)
    time.sleep(CACHED_S)
    assert client.get("/commits", app="shop")["commits"][0]["encode_ms"] is not None
    runs = client.get("/runs", topic="orders")
    assert runs["total"] == 2
    assert runs["summary"]["removed"]["superseded"] > 0
    then = client.get("/what-if", topic="orders", ratio=0, estimate=True)
    assert then["then"]["due"] == 2
    assert all(each["estimate"] for each in then["partitions"])
    assert client.get("/settings", topic="orders")["store_file"].startswith(store.url)
    refused = client.get("/topics/orders/erasure", key="key-3", status=422)
    assert refused["error"]["kind"] == "NotInABucket"


def act(client: Client, name: str, body: dict[str, object]) -> None:
    shown = client.act(name, body, dry_run=True)
    assert shown["changes"] is True, shown
    client.act(name, body | {"digest": shown["digest"]}, dry_run=False)
    assert wait_for_actions(client)[0]["problems"] == []


def test_actions_are_done_as_shown(client: Client, store: BucketStore) -> None:
    before = len(store.maintenance().runs())
    act(client, "compact", {"topic": "orders", "force": True})
    assert len(store.maintenance().runs()) == before + 2
    act(client, "pause", {"topic": "orders"})
    store.ledger.refresh()
    assert store.topic("orders").configs["duramen.compaction.paused"] == "true"
    assert {each["state"] for each in client.get("/explain", topic="orders")["partitions"]} == {"paused"}
    store.alter_topic("orders", configs={"cleanup.policy": "delete", "retention.bytes": "1"})
    act(client, "retain", {"topic": "orders"})
    topic = store.topic("orders")
    assert max(store.partition_state(topic, number).log_start_offset for number in range(2)) > 0


def test_report_top_and_runs_take_a_url(store: BucketStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    assert run(["--store", store.url, "report", str(file), "--messages", "3"]) == 0
    assert "/topics/orders/partitions/1" in file.read_text(encoding="utf-8")
    capsys.readouterr()
    assert run(["--store", store.url, "--output", "json", "top", "--once"]) == 0
    top = json.loads(capsys.readouterr().out)
    assert (top["free_bytes"], top["passes"], len(top["partitions"])) == (None, [], 3)
    assert top["partitions"][0]["size_bytes"] > 0
    assert run(["--store", store.url, "top", "--once"]) == 0
    assert "free" not in capsys.readouterr().out.splitlines()[0]
    assert run(["--store", store.url, "--output", "json", "runs"]) == 0
    assert {each["result"] for each in json.loads(capsys.readouterr().out)["runs"]} == {"done"}
