"""Nobody but who has the token, from this host and this page, changes anything; and a digest counts once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from console.asking import TOKEN, Client, check
from console.conftest import Serve
from duramen.console.documents import ACTIONS
from duramen.console.guard import host_of, is_our_host, is_our_origin, is_token
from duramen.console.opened import find_token
from logstore.errors import UsageError
from logstore.store import LogStore

BODIES: dict[str, dict[str, Any]] = {
    "compact": {"topic": "orders", "force": True},
    "pause": {"topic": "orders"},
    "resume": {"topic": "orders"},
    "retain": {},
}


def post(client: Client, name: str, dry_run: bool, body: dict[str, Any], **headers: str | None) -> tuple[int, str]:
    found = client.raw(
        "POST",
        f"/api/v1/actions/{name}?dry_run={str(dry_run).lower()}",
        json.dumps(body).encode(),
        **{"Content_Type": "application/json", **headers},
    )
    if found.status >= 400:
        check("Error", found.json)
        return found.status, found.json["error"]["kind"]
    return found.status, ""


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ACTIONS)
def test_no_action_without_the_token_this_host_and_this_origin(
    client: Client, shop: LogStore, name: str, dry_run: bool
) -> None:
    before = {topic.name: topic for topic in shop.topics()}
    body = BODIES[name]
    digest = client.act(name, body, dry_run=True)["digest"]
    body = body | {"digest": digest}
    host = "{}:{}".format(*client.address)
    for wrong in (None, "Bearer wrong", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer "):
        assert post(client, name, dry_run, body, Authorization=wrong) == (401, "Unauthorized")
    for other in ("evil.example", "evil.example:80", f"{host}.evil.example", "localhost.evil.example", "", "a b"):
        assert post(client, name, dry_run, body, Host=other) == (421, "WrongHost")
    for origin in ("http://evil.example", "null", f"https://{host}.evil.example", "http://localhost:1", "x"):
        assert post(client, name, dry_run, body, Origin=origin) == (403, "WrongOrigin")
    assert post(client, name, dry_run, body, Sec_Fetch_Site="cross-site") == (403, "WrongOrigin")
    assert post(client, name, dry_run, body, Content_Type="text/plain") == (415, "NotJson")
    assert post(client, name, dry_run, body | {"more": 1}) == (400, "BadRequest")
    assert client.get("/actions")["actions"] == []
    assert {topic.name: topic for topic in shop.topics()} == before
    status, _ = post(client, name, dry_run, body, Origin=f"http://{host}", Sec_Fetch_Site="same-origin")
    assert status == (200 if dry_run else 202)


def test_an_action_needs_the_digest_of_its_own_dry_run_and_that_counts_once(client: Client, shop: LogStore) -> None:
    assert post(client, "pause", False, {"topic": "orders"}) == (409, "DryRunFirst")
    assert post(client, "pause", False, {"topic": "orders", "digest": "0" * 32}) == (409, "UnknownDigest")
    shown = client.act("pause", {"topic": "orders"}, dry_run=True)
    assert shown["changes"] is True
    assert "false becomes true" in shown["effects"][0]["what"]
    digest = shown["digest"]
    assert post(client, "pause", False, {"topic": "strange", "digest": digest}) == (409, "OtherRequest")
    assert post(client, "resume", False, {"topic": "orders", "digest": digest}) == (409, "OtherRequest")
    assert "duramen.compaction.paused" not in shop.topic("orders").configs
    client.act("pause", {"topic": "orders", "digest": digest}, dry_run=False)
    wait_for_actions(client)
    assert shop.topic("orders").configs["duramen.compaction.paused"] == "true"
    assert post(client, "pause", False, {"topic": "orders", "digest": digest}) == (409, "UnknownDigest")
    again = client.act("pause", {"topic": "orders"}, dry_run=True)
    assert again["changes"] is False
    resume = client.act("resume", {"topic": "orders"}, dry_run=True)
    client.act("resume", {"topic": "orders", "digest": resume["digest"]}, dry_run=False)
    wait_for_actions(client)
    assert "duramen.compaction.paused" not in shop.topic("orders").configs


def wait_for_actions(client: Client) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        actions: list[dict[str, Any]] = client.get("/actions")["actions"]
        if all(each["state"] != "running" for each in actions):
            return actions
        time.sleep(0.05)
    raise AssertionError("an action never ended")


def test_compact_now_does_what_it_showed_and_leaves_a_receipt(client: Client, shop: LogStore) -> None:
    body = {"topic": "orders", "partitions": [1], "force": True}
    shown = client.act("compact", body, dry_run=True)
    assert [(each["topic"], each["partition"]) for each in shown["effects"]] == [("orders", 1)]
    started = client.act("compact", body | {"digest": shown["digest"]}, dry_run=False)
    [action] = wait_for_actions(client)
    assert (action["action_id"], action["state"], action["problems"]) == (started["action_id"], "done", [])
    time.sleep(0.6)
    newest = client.get("/runs", topic="orders")["runs"][0]
    assert newest["run_id"] == f"console-{action['action_id']}-orders-1"
    assert newest["result"] == "done"
    client.act("compact", {"topic": "clicks"}, dry_run=True, status=409)
    client.act("compact", {"topic": "nope"}, dry_run=True, status=404)
    client.act("compact", {"partitions": [0]}, dry_run=True, status=400)
    client.act("compact", {"topic": "orders", "partitions": [9]}, dry_run=True, status=404)


def test_retention_deletes_what_it_showed(client: Client, shop: LogStore) -> None:
    assert client.act("retain", {}, dry_run=True)["changes"] is False
    shop.alter_topic("clicks", configs={"retention.bytes": "4096"})
    shown = client.act("retain", {"topic": "clicks"}, dry_run=True)
    assert shown["changes"] is True
    client.act("retain", {"topic": "clicks", "digest": shown["digest"]}, dry_run=False)
    [action] = wait_for_actions(client)
    assert action["problems"] == []
    assert shop.partition_state(shop.topic("clicks"), 0).log_start_offset > 0


def test_reading_needs_no_token_on_loopback_and_does_elsewhere(shop: LogStore, serve: Serve) -> None:
    near = serve(Path(shop.path))
    near.token = None
    near.get("/store")
    assert near.raw("GET", "/api/v1/token").status == 401
    near.token = TOKEN
    assert near.get("/token") == {"valid": True}
    far = serve(Path(shop.path), host="0.0.0.0")
    far.token = None
    assert far.raw("GET", "/api/v1/store").status == 401
    assert far.raw("GET", "/").status == 200
    far.token = TOKEN
    far.get("/store")


def test_a_page_of_another_site_reads_nothing(client: Client) -> None:
    assert client.raw("GET", "/api/v1/store", Host="evil.example").status == 421
    assert client.raw("GET", "/", Host="evil.example").status == 421
    assert client.raw("GET", "/api/v1/store", Origin="http://evil.example").status == 403
    assert client.raw("GET", "/api/v1/store", Sec_Fetch_Site="cross-site").status == 403
    # A link on another page may lead here.
    assert client.raw("GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200


def test_every_answer_carries_the_policy_and_is_kept_by_nobody(client: Client) -> None:
    for target in ("/api/v1/store", "/api/v1/nope", "/", "/nope", "/index.html"):
        headers = client.raw("GET", target).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        if target.startswith("/api"):
            assert headers["cache-control"] == "no-store"


def test_nothing_outside_of_the_page_is_served(client: Client) -> None:
    for target in ("/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/server.py", "/page/"):
        assert client.raw("GET", target).status == 404
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FROB"):
        for target in ("/", "/api/v1/store"):
            found = client.raw(method, target)
            assert found.status == 405
            check("Error", found.json)
    assert client.raw("POST", "/api/v1/store", b"{}", Content_Type="application/json").status == 405
    assert client.raw("HEAD", "/api/v1/store").body == b""


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost:8787", "localhost"), ("[::1]:80", "::1"), ("127.0.0.1", "127.0.0.1"), ("A.example", "a.example")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_of(header) == name


def test_host_origin_and_token_are_judged_strictly() -> None:
    assert is_our_host("shop.example:80", {"shop.example"})
    for header in (None, "", "shop.example", "localhost@evil.example", "localhost/x", "x:y", "localhost:99999", "[::1"):
        assert not is_our_host(header, {"other.example"})
    assert is_our_origin(None, None, "localhost:1")
    assert is_our_origin("http://LOCALHOST:1", "same-origin", "localhost:1")
    assert not is_our_origin("http://localhost:2", None, "localhost:1")
    assert not is_our_origin("ftp://localhost:1", None, "localhost:1")
    assert is_token("Bearer abc", "abc")
    assert is_token("bearer  abc ", "abc")
    for given in ("Bearer", "Bearer ", "", None, "abc", "Bearer abcd", "Bearer ab\udcff"):
        assert not is_token(given, "abc")
    assert not is_token("Bearer ", "")


def test_a_token_comes_from_a_file_the_environment_or_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURAMEN_CONSOLE_TOKEN", raising=False)
    one, other = find_token(None), find_token(None)
    assert one.is_new
    assert one.text != other.text
    file = tmp_path / "token"
    file.write_text("a-token-in-a-file-000\n")
    file.chmod(0o600)
    assert find_token(str(file)).text == "a-token-in-a-file-000"
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others"):
        find_token(str(file))
    monkeypatch.setenv("DURAMEN_CONSOLE_TOKEN", "short")
    with pytest.raises(UsageError, match="not a token"):
        find_token(None)
