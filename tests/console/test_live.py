"""The commands themselves: a daemon with its console in one process, and a stream of appends beside it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import fastavro
import pytest
from google.protobuf import descriptor_pb2

from console.asking import Client
from console.conftest import Serve
from duramen.cli import run
from logstore.records.record import Record
from logstore.store import LogStore


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}api/v1{path}", timeout=60) as answer:
        return json.loads(answer.read())


def wait_for(what: Any, seconds: float = 150.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError("it never came")


def test_a_daemon_with_a_console_beside_a_stream_of_appends(store: LogStore) -> None:
    configs = {"cleanup.policy": "compact", "segment.bytes": "20000", "min.cleanable.dirty.ratio": "0.3"}
    store.create_topic("orders", partitions=2, configs=configs)
    command = [sys.executable, "-m", "duramen", "--store", store.path, "schedule", "--console", "--console-port", "0"]
    command += ["--metrics-port", "0", "--interval", "compaction=500", "--interval", "flush=500"]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stop = threading.Event()

    def write() -> None:
        batch = 0
        while not stop.wait(0.1):
            store.append("orders", [Record(b"%d" % (n % 50), b"v" * 100) for n in range(300)])
            batch += 1

    writer = threading.Thread(target=write)
    try:
        assert daemon.stderr is not None
        url = next(found.group(1) for line in daemon.stderr if (found := re.search(r"(http://\S+/)#token=", line)))
        threading.Thread(target=lambda: [None for _ in daemon.stderr or ()], daemon=True).start()
        writer.start()
        header = wait_for(lambda: (found := get(url, "/store"))["daemon"]["running"] and found)
        jobs = {each["name"]: each for each in header["daemon"]["jobs"]}
        assert set(jobs) == {"compaction", "retention", "flush", "ledger"}
        assert jobs["compaction"]["interval_ms"] == 500
        assert wait_for(lambda: jobs_of(url)["compaction"]["next_ms"])
        runs = wait_for(lambda: (found := get(url, "/runs?result=done"))["total"] >= 3 and found)
        assert runs["summary"]["removed"]["superseded"] > 0
        strip = get(url, "/topics/orders/partitions/0")
        assert sum(each["size_bytes"] for each in strip["segments"]) == strip["size_bytes"] > 0
        assert wait_for(lambda: get(url, "/topics/orders/history")["points"])
        found = get(url, "/topics/orders/messages?key=7&limit=5")
        assert {each["key"]["text"] for each in found["messages"]} == {"7"}
        assert get(url, "/store")["health"]["status"] == "ok"
    finally:
        stop.set()
        if writer.ident is not None:
            writer.join(30)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
        if daemon.stderr is not None:
            daemon.stderr.close()
    assert not [path for path in Path(store.layout.locks).iterdir() if path.name.startswith("activity.")]


def jobs_of(url: str) -> dict[str, Any]:
    return {each["name"]: each for each in get(url, "/store")["daemon"]["jobs"]}


def test_the_command_prints_its_link_and_ends_when_told(store: LogStore) -> None:
    command = [sys.executable, "-m", "duramen", "--store", store.path, "console", "--port", "0"]
    console = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert console.stdout is not None
    link = next(found.group(0) for line in console.stdout if (found := re.search(r"http://\S+", line)))
    url, _, token = link.partition("#token=")
    request = urllib.request.Request(f"{url}api/v1/token", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read()) == {"valid": True}
    console.send_signal(signal.SIGINT)
    console.communicate(timeout=60)
    assert console.returncode == 0


def test_bad_options_are_told_before_anything_is_served(store: LogStore, tmp_path: Path) -> None:
    schema = tmp_path / "x.avsc"
    schema.write_text("{")
    for options in (
        ["--schema", "orders"],
        ["--schema", f"orders={schema}"],
        ["--schema", f"orders={tmp_path / 'missing.avsc'}"],
        ["--schema", f"orders={schema}#shop.Order"],
        ["--schema", f"orders={tmp_path / 'x.proto'}"],
        ["--token-file", str(tmp_path / "none")],
        ["--host", "999.1.2.3"],
    ):
        assert run(["--store", store.path, "console", "--port", "0", *options]) in (1, 2)
    assert run(["--store", str(tmp_path / "nowhere"), "console"]) != 0


@pytest.mark.parametrize("header", [b"", b"\0\0\0\0\7"])
def test_avro_and_protobuf_values_are_shown_by_their_schema_files(
    store: LogStore, serve: Serve, tmp_path: Path, header: bytes
) -> None:
    import io

    schema = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": "string"}],
    }
    (tmp_path / "order.avsc").write_text(json.dumps(schema))
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema, {"id": 42, "who": "<b>Ada"})
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Order")
    message.field.add(name="id", number=1, type=3, label=1)
    (tmp_path / "shop.desc").write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    store.create_topic("avro", partitions=1)
    store.create_topic("proto", partitions=1)
    store.append("avro", [Record(b"k", header + buffer.getvalue()), Record(b"k", b"\xff\xfe")])
    store.append("proto", [Record(b"k", header + (b"\0" if header else b"") + b"\x08\x2a")])
    schemas = [f"avro={tmp_path / 'order.avsc'}", f"proto={tmp_path / 'shop.desc'}#shop.Order"]
    client: Client = serve(Path(store.path), schemas=schemas)
    first, second = client.get("/topics/avro/messages", direction="forward", value_as="avro")["messages"]
    assert (first["value"]["format"], json.loads(first["value"]["text"])) == ("avro", {"id": 42, "who": "<b>Ada"})
    assert second["value"]["format"] == "hex"
    assert "not avro" in second["value"]["error"]
    assert client.get("/topics/avro/messages", direction="forward")["messages"][0]["value"]["format"] == "avro"
    [found] = client.get("/topics/proto/messages", value_as="protobuf")["messages"]
    assert (found["value"]["format"], json.loads(found["value"]["text"])) == ("protobuf", {"id": "42"})
    [none] = client.get("/topics/proto/messages", value_as="avro")["messages"]
    assert "no avro schema" in none["value"]["error"]
