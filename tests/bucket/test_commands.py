"""The commands that work with a store in a bucket, on a server, with the credentials of the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from bucket.servers import Server, chosen
from duramen.cli import run


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        found = run([*words])
        out, err = self._capsys.readouterr()
        assert found == code, err
        self.err = err
        return out

    def json(self, *words: str) -> Any:
        return json.loads(self("--output", "json", *words))


@pytest.fixture(scope="module", params=chosen("ministack"))
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def duramen(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    for name, value in {"DURAMEN_STORE": server.url(uuid.uuid4().hex), **server.environment}.items():
        monkeypatch.setenv(name, value)
    return Command(capsys)


def test_a_topic_from_creation_to_deletion(duramen: Command, tmp_path: Path) -> None:
    duramen("topics", "create", "orders", "--partitions", "2", "--config", "cleanup.policy=compact")
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"key": f"k{n % 5}", "value": f"v{n}"}) + "\n" for n in range(20)))
    assert duramen.json("produce", "orders", str(lines), "--app-id", "file")["records"] == 20
    assert duramen.json("produce", "orders", str(lines), "--app-id", "file")["records"] == 0
    assert duramen.json("get", "orders", "k3")["value"] == "v18"
    assert len(duramen("consume", "orders").splitlines()) == 20
    assert {json.loads(line)["value"] for line in duramen("restore", "orders").splitlines()} == {
        f"v{n}" for n in range(15, 20)
    }
    assert sum(each["high_watermark"] for each in duramen.json("offsets", "orders")["offsets"]) == 20
    topic = duramen.json("describe", "orders")["topics"][0]
    assert sum(each["size_bytes"] for each in topic["partitions"]) > 0
    assert all(each["largest_timestamp_ms"] > 0 for each in topic["partitions"] if each["high_watermark"])
    listed = duramen.json("topics", "list")["topics"][0]
    assert (listed["name"], listed["records"]) == ("orders", 20)
    duramen("topics", "alter", "orders", "--partitions", "3")
    assert duramen.json("topics", "describe", "orders")["topic"]["partitions"] == 3
    duramen("topics", "delete", "orders", "--yes")
    assert duramen.json("topics", "list")["topics"] == []


def test_the_console_of_a_store_on_a_server(duramen: Command, tmp_path: Path) -> None:
    duramen("topics", "create", "orders", "--partitions", "2", "--config", "cleanup.policy=compact")
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"key": f"k{n % 5}", "value": f"v{n}"}) + "\n" for n in range(20)))
    duramen("produce", "orders", str(lines))
    file = tmp_path / "report.html"
    assert duramen.json("report", str(file))["size_bytes"] == file.stat().st_size
    assert sorted(each["records"] for each in duramen.json("top", "--once")["partitions"]) == [8, 12]
    command = [sys.executable, "-m", "duramen", "--output", "json", "console", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]

            def get(path: str) -> Any:
                with urllib.request.urlopen(f"{url}api/v1{path}", timeout=60) as answer:
                    return json.loads(answer.read())

            header = get("/store")
            assert (header["store"]["kind"], header["totals"]["records"]) == ("bucket", 20)
            strip = get("/topics/orders/partitions/0")
            assert sum(each["size_bytes"] for each in strip["segments"]) == strip["size_bytes"] > 0
            assert get("/topics/orders/messages?key=k3")["messages"][-1]["value"]["text"] == "v18"
        finally:
            process.terminate()


def test_text_for_people(duramen: Command) -> None:
    duramen("topics", "create", "orders")
    for words in (["topics", "list"], ["describe"], ["offsets"], ["topics", "describe", "orders"]):
        assert "orders" in duramen(*words)


def test_a_store_is_maintained_and_verified(duramen: Command, tmp_path: Path) -> None:
    duramen("topics", "create", "orders", "--config", "cleanup.policy=compact")
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"key": f"k{n % 5}", "value": f"v{n}"}) + "\n" for n in range(100)))
    duramen("produce", "orders", str(lines))
    assert duramen.json("maintain")["sealed"] == []
    done = duramen.json("maintain", "--seal-all", "orders")
    assert [(each["partition"], each["end_offset"]) for each in done["sealed"]] == [(0, 100)]
    assert [each["removed"] for each in done["compacted"]] == [{"superseded": 95}]
    assert (done["failed"], done["lost"]) == ([], [])
    found = duramen.json("verify")
    assert found["sound"]
    assert found["partitions"][0]["records"] == 5
    assert "sound" in duramen("verify", "orders")
    assert "Deleted" in duramen("maintain")
    assert duramen.json("get", "orders", "k3")["value"] == "v98"
    duramen("maintain", "nothing", code=1)
    assert duramen.json("retain", "--dry-run")["partitions"][0]["deleted"] == []
    assert duramen.json("retain", "orders")["partitions"][0]["log_start_offset"] == 0
    done = duramen.json("delete-records", "orders", "--partition", "0", "--before-offset", "97", "--yes")
    assert (done["log_start_offset_before"], done["log_start_offset"]) == (0, 97)
    assert len(duramen("consume", "orders").splitlines()) == 3
    done = duramen.json("export", str(tmp_path / "broker"))
    assert [(each["topic"], each["log_end_offset"]) for each in done["partitions"]] == [("orders", 100)]
    assert (tmp_path / "broker" / "orders-0" / f"{0:020d}.log").stat().st_size > 0


def test_maintain_is_for_buckets(duramen: Command, tmp_path: Path) -> None:
    duramen("--store", str(tmp_path), "maintain", code=2)
    assert "is a directory" in duramen.err


def test_a_place_without_a_store_is_told(duramen: Command) -> None:
    duramen("offsets", code=1)
    assert "is not a store" in duramen.err


@pytest.mark.parametrize("words", [("recover",), ("verify",), ("prove-erased", "orders", "k")], ids=" ".join)
def test_no_command_takes_a_place_for_a_store(duramen: Command, server: Server, words: tuple[str, ...]) -> None:
    duramen(*words, code=1)
    assert "is not a store" in duramen.err
    assert server.secret not in duramen.err


def test_a_store_is_moved_and_mended(duramen: Command, tmp_path: Path) -> None:
    """What tests in memory show in detail, on a server."""
    url, other = os.environ["DURAMEN_STORE"], str(tmp_path / "directory")
    duramen("topics", "create", "orders", "--partitions", "2")
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"key": f"k{n}", "value": f"v{n}"}) + "\n" for n in range(50)))
    duramen("produce", "orders", str(lines))
    duramen("maintain", "--seal-all")
    duramen("produce", "orders", str(lines))
    assert sum(each["log_end_offset"] for each in duramen.json("backup", f"{url}-copy")["partitions"]) == 100
    assert duramen.json("--store", f"{url}-copy", "describe")["store"]["origin"]["source"] == url
    assert duramen.json("--store", f"{url}-copy", "verify")["sound"]
    assert len(duramen("--store", f"{url}-copy", "consume", "orders").splitlines()) == 100
    duramen("export", str(tmp_path / "broker"))
    duramen("topics", "delete", "orders", "--yes")
    assert duramen.json("import", str(tmp_path / "broker"))["imported"]
    assert len(duramen("consume", "orders").splitlines()) == 100
    assert duramen.json("copy", other, "--create")["copied"]
    assert len(duramen("--store", other, "consume", "orders").splitlines()) == 100
    assert duramen.json("recover")["sound"]
    found = json.loads(duramen("--output", "json", "prove-erased", "orders", "k3", code=1))
    assert {each["kind"] for each in found["keys"][0]["places"]} == {"segment"}
    assert found["unseen"]


def test_what_only_a_directory_needs_says_so(duramen: Command, server: Server) -> None:
    duramen("set-aside", "orders", code=2)
    assert "is in a bucket, and this needs a store in a directory" in duramen.err
    assert server.secret not in duramen.err
