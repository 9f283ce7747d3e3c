"""What the API says of a live store is true: figures add up, change with the store, and pages show each thing once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_job.figures import figures_of
from compaction_job.job import compact
from compaction_job.sampling import take_samples
from console.asking import Client
from console.conftest import HOSTILE, Serve, fill_orders
from logstore.records.record import Record
from logstore.store import LogStore

#: what is cached is at most so old
CACHED_S = 0.6


def test_the_header_sums_up_the_store(client: Client, shop: LogStore) -> None:
    header = client.get("/store")
    assert header["store"] == {
        "path": shop.path,
        "kind": "directory",
        "read_only": False,
        "id": None,
        "origin": None,
    }
    assert header["totals"]["topics"] == 4
    assert header["totals"]["partitions"] == sum(header["totals"]["states"].values()) == 7
    sections = [header["totals"][name] for name in ("clean_bytes", "dirty_bytes", "uncleanable_bytes")]
    logs = sum(shop.log_bytes(topic, n) for topic in shop.topics() for n in range(topic.partitions))
    assert sum(sections) == header["space"]["log_bytes"] == logs > 0
    assert header["health"]["status"] == "ok"
    assert header["actions"] == {"enabled": True, "why": None}
    assert header["daemon"]["running"] is False


def test_the_strip_of_segments_adds_up_and_a_compaction_changes_it(client: Client, shop: LogStore) -> None:
    topic = shop.topic("orders")
    for number in range(2):
        strip = client.get(f"/topics/orders/partitions/{number}")
        assert sum(each["size_bytes"] for each in strip["segments"]) == strip["size_bytes"]
        assert strip["size_bytes"] == shop.log_bytes(topic, number)
        sections = [each["section"] for each in strip["segments"]]
        assert sections[0] == "clean"
        assert sections[-1] == "active"
        assert "dirty" in sections
        bases = [each["base_offset"] for each in strip["segments"]]
        assert bases == [each.base_offset for each in shop.partition_state(topic, number).segments]
        assert [each["end_offset"] for each in strip["segments"]] == [*bases[1:], strip["log_end_offset"]]
        assert strip["segments"][0]["keys"] is not None
    stamp = client.get("/store")["stamp"]
    compact(shop, topics=["orders"], force=True)
    time.sleep(CACHED_S)
    after = client.get("/topics/orders/partitions/0")
    assert "dirty" not in [each["section"] for each in after["segments"]]
    assert after["runs"][0]["result"] == "done"
    assert client.get("/store")["stamp"] != stamp


def test_topics_are_searched_sorted_and_paged(client: Client) -> None:
    assert [each["name"] for each in client.get("/topics")["topics"]] == ["clicks", "empty", "orders", "strange"]
    assert [each["name"] for each in client.get("/topics", search="R", order="desc")["topics"]] == ["strange", "orders"]
    sizes = [each["size_bytes"] for each in client.get("/topics", sort="size", order="desc")["topics"]]
    assert sizes == sorted(sizes, reverse=True)
    pages = [client.get("/topics", limit=1, offset=at)["topics"][0]["name"] for at in range(4)]
    assert pages == ["clicks", "empty", "orders", "strange"]
    assert client.get("/topics", state="not_compacted")["total"] == 2
    orders = client.get("/topics/orders")
    assert orders["topic"]["policy"] == "compact"
    assert orders["configs"]["segment.bytes"] == "1500"
    assert len(orders["partitions"]) == 2
    assert sum(each["size_bytes"] for each in orders["partitions"]) == orders["topic"]["size_bytes"]
    client.get("/topics/nope", status=404)


def test_why_and_when_is_what_explain_says(client: Client, shop: LogStore) -> None:
    from compaction_job.job import explain

    said = {(each.topic, each.partition): each for each in explain(shop)}
    answer = client.get("/explain")
    assert {(each["topic"], each["partition"]) for each in answer["partitions"]} == set(said)
    for each in answer["partitions"]:
        plan = said[each["topic"], each["partition"]]
        assert (each["due"], each["why"]) == (plan.is_due, plan.why)
        assert each["dirty_ratio"] == pytest.approx(plan.cleanable.ratio, abs=1e-6)
    assert client.get("/explain", topic="clicks")["partitions"][0]["state"] == "not_compacted"
    due = [each["due"] for each in answer["partitions"]]
    assert due == sorted(due, reverse=True)


def test_a_paused_topic_says_so_everywhere(client: Client, shop: LogStore) -> None:
    shop.alter_topic("orders", configs={"duramen.compaction.paused": True})
    time.sleep(CACHED_S)
    assert client.get("/topics", search="orders")["topics"][0]["paused"] is True
    assert {each["state"] for each in client.get("/explain", topic="orders")["partitions"]} == {"paused"}
    assert client.get("/store")["totals"]["states"]["paused"] == 2


def test_runs_are_paged_each_once_and_have_their_receipts(client: Client, shop: LogStore) -> None:
    for batch in range(8, 11):
        fill_orders(shop, batches=1, first=batch)
        compact(shop, topics=["orders"], force=True)
    time.sleep(CACHED_S)
    everything = client.get("/runs", limit=1000)
    assert everything["total"] == len(everything["runs"]) == 8
    seen, position = [], None
    while True:
        page = client.get("/runs", limit=3, position=position)
        seen += [each["run_id"] for each in page["runs"]]
        if (position := page["next"]) is None:
            break
    assert seen == [each["run_id"] for each in everything["runs"]]
    started = [each["started_ms"] for each in everything["runs"]]
    assert started == sorted(started, reverse=True)
    one = everything["runs"][0]
    assert client.get(f"/runs/{one['run_id']}") == one
    assert one["details"]["segments_before"] >= 1
    superseded = sum(each["removed"].get("superseded", 0) for each in everything["runs"])
    assert everything["summary"]["removed"]["superseded"] == superseded > 0
    assert client.get("/runs", topic="orders", partition=1)["total"] == 4
    assert client.get("/runs", result="failed")["total"] == 0
    client.get("/runs/nope", status=404)
    client.get("/runs", position="x1.2", status=400)


def test_what_if_says_that_a_paused_topic_is_paused(client: Client, shop: LogStore) -> None:
    shop.alter_topic("orders", configs={"duramen.compaction.paused": "true"})
    found = client.get("/what-if", topic="orders", ratio=0)["partitions"]
    assert {(each["state_now"], each["state"], each["due"]) for each in found} == {("paused", "paused", False)}


def test_what_if_a_lower_ratio_makes_more_due_and_a_pass_then_saves_about_that(client: Client, shop: LogStore) -> None:
    now = client.get("/what-if", topic="orders", ratio=0.99, min_lag_ms=0)
    assert now["then"]["due"] == 0
    then = client.get("/what-if", topic="orders", ratio=0, estimate=True)
    assert then["then"]["due"] == 2
    assert then["left_off"] == 0
    guessed = then["then"]["saved_bytes"]
    assert all(each["due"] and each["estimate"] for each in then["partitions"])
    report = compact(shop, topics=["orders"], force=True, retention=False)
    saved = sum(run.report.before_bytes - run.report.after_bytes for run in report.done if run.report)
    assert guessed == pytest.approx(saved, rel=0.2)
    assert client.get("/what-if", topic="clicks")["partitions"] == []


def test_horizons_are_the_delete_horizons_of_the_state(client: Client, shop: LogStore) -> None:
    shop.append("orders", [Record(b"gone", None)])
    compact(shop, topics=["orders"], force=True, roll_active=True)
    time.sleep(CACHED_S)
    topic = shop.topic("orders")
    wanted = {shop.partition_state(topic, n).next_horizon_ms for n in range(2)} - {None, -1}
    answer = client.get("/horizons", topic="orders")
    found = [each for each in answer["events"] if each["kind"] == "delete_horizon"]
    assert {each["time_ms"] for each in found} == wanted != set()
    assert sum(day["counts"]["delete_horizon"] for day in answer["days"]) == len(found)
    assert client.get("/horizons", topic="orders", to_ms=1)["total"] == 0


def test_an_erasure_deadline_comes_with_max_lag(client: Client, shop: LogStore) -> None:
    shop.alter_topic("strange", configs={"max.compaction.lag.ms": "600000"})
    time.sleep(CACHED_S)
    kinds = {each["kind"] for each in client.get("/horizons", topic="strange")["events"]}
    assert "erasure_deadline" in kinds


def test_apps_show_what_they_committed(client: Client, shop: LogStore) -> None:
    answer = client.get("/apps")
    apps = {each["app_id"]: each for each in answer["apps"]}
    assert set(apps) == {"shop", None}
    assert apps["shop"]["commits"] == 8
    assert apps["shop"]["rows"] == 8 * 60
    assert apps["shop"]["last_batch_id"] == 7
    assert sum(step["rows"] for step in apps["shop"]["series"]) == 8 * 60
    for step in ("encode", "plan", "commit", "append"):
        assert apps["shop"]["timings"][step]["p50"] is not None
    seen, position = [], None
    while True:
        page = client.get("/commits", limit=3, position=position)
        seen += [(each["topic"], each["sequence"]) for each in page["commits"]]
        if (position := page["next"]) is None:
            break
    assert len(seen) == len(set(seen)) == len(shop.ledger().commits())
    mine = client.get("/commits", app="shop", limit=200)["commits"]
    assert [each["batch_id"] for each in mine] == list(range(7, -1, -1))
    # A row tells of the batch before it, so nobody has told of the newest yet.
    assert [each["append_ms"] is not None for each in mine] == [False, True, True, True, True, True, True, True]


def all_messages(client: Client, topic: str, **query: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    position = None
    for _ in range(1000):
        page = client.get(f"/topics/{topic}/messages", position=position, **query)
        found += page["messages"]
        if (position := page["next"]) is None:
            return found
    raise AssertionError("it never ends")


@pytest.mark.parametrize("limit", [1, 7, 50])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_paging_shows_every_record_once_in_order(client: Client, shop: LogStore, limit: int, direction: str) -> None:
    wanted = [record.offset for record in shop.reader("orders", 1).records(0)]
    found = [each["offset"] for each in all_messages(client, "orders", partition=1, limit=limit, direction=direction)]
    assert found == (wanted if direction == "forward" else wanted[::-1])


def test_messages_by_offset_time_and_key(client: Client, shop: LogStore) -> None:
    records = list(shop.reader("orders", 0).records(0))
    middle = records[len(records) // 2]
    page = client.get("/topics/orders/messages", partition=0, at_offset=middle.offset, limit=1)
    assert page["messages"][0]["offset"] == middle.offset
    for number in range(2):
        for record in (records := list(shop.reader("orders", number).records(0)))[::7]:
            wanted_offset = next(each.offset for each in records if each.timestamp_ms >= record.timestamp_ms)
            by_time = client.get("/topics/orders/messages", partition=number, at_ms=record.timestamp_ms, limit=1)
            assert by_time["messages"][0]["offset"] == wanted_offset
    records = list(shop.reader("orders", 0).records(0))
    far = client.get("/topics/orders/messages", partition=0, at_ms=1 << 60)
    assert (far["messages"], far["next"]) == ([], None)
    newest = client.get("/topics/orders/messages", partition=0)
    assert newest["messages"][0]["offset"] == records[-1].offset
    found = all_messages(client, "orders", key="key-3", limit=2)
    wanted = [
        (number, record.offset)
        for number in range(2)
        for record in shop.reader("orders", number).records(0)
        if record.key == b"key-3"
    ]
    assert [(each["partition"], each["offset"]) for each in found] == wanted
    assert found[-1]["tombstone"] is True
    assert found[-1]["value"] is None
    backward = all_messages(client, "orders", key="key-3", limit=2, direction="backward")
    assert sorted((each["partition"], each["offset"]) for each in backward) == sorted(wanted)
    assert found[0]["headers"] == [{"name": "source", "value": shown("shop")}]


def shown(text: str, form: str = "text") -> dict[str, object]:
    size = len(text.encode())
    return {"format": form, "text": text, "length": size, "cut": False, "shown": size, "error": None}


def test_strange_bytes_come_out_as_they_went_in_and_as_json(client: Client) -> None:
    answer = client.raw("GET", "/api/v1/topics/strange/messages?direction=forward&limit=100")
    assert answer.body.isascii()
    found = answer.json["messages"]
    for message, written in zip(found, HOSTILE, strict=False):
        value = message["value"]
        back = bytes.fromhex(value["text"]) if value["format"] == "hex" else value["text"].encode()
        assert back == written
        assert message["headers"][0]["name"] == "<b>\u202e"
    assert found[6]["value"]["format"] == "hex"
    assert found[4]["value"]["format"] == "json"
    large = found[len(HOSTILE)]["value"]
    assert (large["length"], large["cut"], large["shown"]) == (1_050_000, True, 2046)
    assert large["text"] == "\u20ac" * 682
    whole = client.get(f"/topics/strange/partitions/0/messages/{len(HOSTILE)}", value_bytes=1 << 20)
    assert whole["value"]["shown"] == 1048575
    as_long = client.get("/topics/strange/messages", direction="forward", value_as="long")["messages"]
    assert as_long[6]["value"]["text"] == "42"
    assert "8 bytes" in as_long[0]["value"]["error"]
    by_hex = client.get("/topics/strange/messages", key=HOSTILE[2].hex(), key_format="hex")["messages"]
    assert [each["offset"] for each in by_hex] == [2]
    client.get("/topics/strange/partitions/0/messages/99", status=404)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from(["auto", "text", "json", "hex", "long"]), st.integers(16, 64))
def test_any_bytes_can_be_shown(data: bytes, how: str, limit: int) -> None:
    from console.asking import check
    from duramen.console.formats import shown

    document = shown(data, how, limit, {})
    assert document is not None
    check("Bytes", document)
    assert document["length"] == len(data)
    assert document["cut"] == (document["shown"] < len(data))
    if document["format"] == "hex":
        assert bytes.fromhex(document["text"]) == data[: document["shown"]]
    elif document["format"] in ("text", "json"):
        assert document["text"].encode() == data[: document["shown"]]


def test_erasure_names_every_place_and_then_the_run_that_removed_the_key(client: Client, shop: LogStore) -> None:
    found = client.get("/topics/orders/erasure", key="key-3")
    assert found["erased"] is False
    assert {each["kind"] for each in found["places"]} >= {"segment"}
    assert all(os.path.exists(os.path.join(shop.path, each["file"])) for each in found["places"])
    shop.alter_topic("orders", configs={"delete.retention.ms": "0", "file.delete.delay.ms": "0"})
    for _ in range(3):
        compact(shop, topics=["orders"], force=True, roll_active=True)
        time.sleep(0.05)
    gone = client.get("/topics/orders/erasure", key="key-3")
    assert gone["erased"] is True, gone["places"]
    assert gone["removed_by"]["result"] == "done"
    assert gone["removed_by"]["removed"]["tombstone"] >= 1


def test_settings_have_values_sources_and_docs(client: Client) -> None:
    own = {each["name"]: each for each in client.get("/settings", topic="orders")["settings"]}
    assert own["segment.bytes"]["value"] == "1500"
    assert own["segment.bytes"]["source"] == "topic override"
    assert all(each["doc"] for each in own.values())
    everywhere = {each["name"]: each for each in client.get("/settings")["settings"]}
    assert everywhere["segment.bytes"]["source"] == "default"
    assert set(everywhere) == set(own)


def test_the_history_grows_by_samples(client: Client, shop: LogStore) -> None:
    before = client.get("/topics/orders/history")["points"]
    assert len(before) == 1  # of the compaction
    take_samples(shop)
    fill_orders(shop, batches=1, first=8)
    take_samples(shop)
    after = client.get("/topics/orders/history")["points"]
    assert after[-1]["size_bytes"] > before[-1]["size_bytes"]
    assert after[-1]["size_bytes"] == client.get("/topics/orders")["topic"]["size_bytes"]
    assert client.get("/topics", search="orders")["topics"][0]["growth"] == after
    assert client.get("/store")["history"]
    for name in ("2d", "30d"):
        assert len(client.get("/topics/orders/history", range=name)["points"]) >= 1


def test_a_store_that_cannot_be_written_is_shown_and_not_touched(shop: LogStore, serve: Serve, tmp_path: Path) -> None:
    from logstore.files import OS_FILES
    from logstore.read_only import ReadOnlyFiles, refused

    before = {path: path.stat().st_mtime_ns for path in Path(shop.path).rglob("*")}
    from duramen.console.actions import Actions
    from duramen.console.formats import MessageSchemas
    from duramen.console.server import ConsoleServer
    from duramen.console.view import View

    with LogStore(shop.path) as opened:
        opened.fs = ReadOnlyFiles(OS_FILES, refused(PermissionError(13, "no"), shop.path))
        server = ConsoleServer(
            View(opened, schemas=MessageSchemas(), actions=Actions(opened)), "127.0.0.1", 0, token="t" * 20
        )
        try:
            client = Client(server, token="t" * 20)  # type: ignore[arg-type]
            assert client.get("/store")["actions"]["enabled"] is False
            client.get("/topics")
            client.get("/topics/orders/partitions/0")
            client.get("/topics/orders/messages")
            client.act("pause", {"topic": "orders"}, dry_run=True, status=403)
            client.act("compact", {}, dry_run=True, status=403)
        finally:
            server.close()
    after = {path: path.stat().st_mtime_ns for path in Path(shop.path).rglob("*")}
    assert {path for path in after if after[path] != before.get(path) and "locks" not in path.parts} == set()


def test_damage_is_told_and_does_not_stop_the_rest(client: Client, shop: LogStore) -> None:
    Path(shop.layout.partition_state(shop.topic("orders").id, 1)).write_bytes(b"rubbish")
    time.sleep(CACHED_S)
    header = client.get("/store")
    assert header["health"]["status"] == "error"
    assert header["totals"]["states"]["unreadable"] == 1
    assert client.get("/topics/orders")["partitions"][1]["state"] == "unreadable"
    assert client.get("/topics/orders/partitions/1")["why"]["error"]
    assert client.get("/topics/orders/partitions/0")["segments"]
    client.get("/topics/orders/messages", partition=1, status=422)
    client.get("/explain")
    client.get("/horizons")


def test_a_store_without_anything_has_empty_pages_and_gets_no_ledger(store: LogStore, serve: Serve) -> None:
    client = serve(Path(store.path))
    for path in ("/store", "/topics", "/explain", "/runs", "/what-if", "/horizons", "/apps", "/commits", "/settings"):
        client.get(path)
    assert not store.has_ledger


def test_records_that_nobody_counted_are_a_bound(client: Client, shop: LogStore) -> None:
    assert client.get("/topics/clicks")["topic"]["records_exact"] is True
    compact(shop, topics=["orders"], force=True, roll_active=True)
    topic, now_ms = shop.topic("orders"), shop.clock.now_ms()
    ends = shop.ends(topic).high_watermarks
    exact = [
        each
        for number in range(topic.partitions)
        for each in [
            figures_of(shop, topic, number, config=shop.log_config(topic), now_ms=now_ms, counted=counts, failures={})
            for counts in ({}, shop.maintenance().counts().get((topic.id, number), {}))
        ]
    ]
    assert [each.records_exact for each in exact] == [False, True] * topic.partitions
    assert [each.records for each in exact[::2]] == list(ends)
    assert sum(each.records for each in exact[1::2]) < sum(ends)
    time.sleep(CACHED_S)
    found = client.get("/topics/orders")
    assert found["topic"]["records_exact"] is True
    assert found["topic"]["records"] == sum(each.records for each in exact[1::2])
