"""The metrics port under clients that say nothing, say it slowly, say too much, or do not listen."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from compaction_job import bounded_server
from compaction_job.bounded_server import CONNECTIONS_MAX
from compaction_job.metrics_server import Health, MetricsServer
from descriptors import open_files


class OneGauge(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("answer", "of it all", value=42)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(bounded_server, "REQUEST_S", 0.5)
    serving = MetricsServer("127.0.0.1", 0, collector=OneGauge(), health=lambda: Health(True, {"status": "ok"}))
    yield serving
    serving.close()


def get(server: MetricsServer, path: str = "/metrics") -> bytes:
    host, port = server.address
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=60) as answer:
        return bytes(answer.read())


def test_hundreds_of_idle_connections_take_few_descriptors_and_scrapes_go_on(server: MetricsServer) -> None:
    before = open_files()
    with contextlib.ExitStack() as held:
        for number in range(300):
            held.enter_context(socket.create_connection(server.address, timeout=60))
            if number % 100 == 99:
                assert b"answer 42.0" in get(server)
        deadline = time.monotonic() + 60  # a thread closes its connection a moment later
        while open_files() - 300 - before > 2 * CONNECTIONS_MAX + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert open_files() - 300 - before <= 2 * CONNECTIONS_MAX + 2
    assert b"ok" in get(server, "/healthz")


def test_a_request_that_comes_byte_by_byte_is_given_up(server: MetricsServer) -> None:
    with socket.create_connection(server.address, timeout=60) as slow:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 60:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 60


def test_a_request_without_end_is_not_kept_in_memory(server: MetricsServer) -> None:
    with socket.create_connection(server.address, timeout=60) as talker, contextlib.suppress(OSError):
        talker.sendall(b"GET /metrics HTTP/1.0\r\n")
        for number in range(400):
            talker.sendall(b"X-%d: %s\r\n" % (number, b"x" * 1000))
        talker.settimeout(20)
        assert b"42.0" not in talker.recv(1 << 16)
    assert b"answer 42.0" in get(server)


def test_everything_but_the_two_pages_is_not_found(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/etc/passwd")
