"""The console under clients that are slow, many, large or silent: bounded, and others are served."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compaction_job import bounded_server
from console.asking import Client
from console.conftest import Serve
from descriptors import open_files
from duramen.console.requests import BODY_BYTES_MAX
from duramen.console.server import _CONNECTIONS_MAX
from logstore.store import LogStore


@pytest.fixture
def client(shop: LogStore, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(bounded_server, "REQUEST_S", 1.0)
    return serve(Path(shop.path))


def is_served(client: Client, path: str, seconds: float) -> None:
    """Whoever is refused while all connections are taken asks again, like a browser."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            client.get(path)
            return
        except ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def comes_true(what: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


def test_a_thousand_connections_take_few_descriptors_and_threads_and_others_are_served(client: Client) -> None:
    client.get("/store")
    files, threads = open_files(), threading.active_count()
    with contextlib.ExitStack() as held:
        for number in range(1000):
            held.enter_context(socket.create_connection(client.address, timeout=60))
            if number % 250 == 249:
                is_served(client, "/topics", 60)
        # Both ends of a connection are in this process: one of them is ours. A thread ends a moment after its
        # connection.
        assert comes_true(lambda: open_files() - 1000 - files <= 2 * _CONNECTIONS_MAX + 8, 60)
        assert comes_true(lambda: threading.active_count() - threads <= 2 * _CONNECTIONS_MAX + 2, 60)
    client.get("/store")


def test_slow_heads_and_slow_bodies_are_given_up_while_others_are_served(client: Client) -> None:
    head = b"GET /api/v1/store HTTP/1.1\r\nHost: localhost\r\n"
    post = (
        b"POST /api/v1/actions/pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        + (client.token or "").encode()
        + b"\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
    )
    with contextlib.ExitStack() as held:
        slow = [held.enter_context(socket.create_connection(client.address, timeout=60)) for _ in range(100)]
        for number, each in enumerate(slow):
            with contextlib.suppress(OSError):  # it may have had to make room already
                each.sendall(post if number % 2 else head)
        deadline = time.monotonic() + 100
        alive = set(slow)
        while alive and time.monotonic() < deadline:
            is_served(client, "/token", 100)
            for each in list(alive):
                try:
                    each.sendall(b"x")
                    each.setblocking(False)
                    if each.recv(4096) == b"":
                        alive.discard(each)
                except BlockingIOError:
                    pass
                except OSError:
                    alive.discard(each)
                finally:
                    with contextlib.suppress(OSError):
                        each.setblocking(True)
            time.sleep(0.1)
        assert not alive


def test_heads_and_bodies_that_are_too_large_are_refused(client: Client) -> None:
    for size in (20_000, 200_000):
        assert client.raw("GET", "/api/v1/store", X_Long="x" * size).status == 431
        assert client.raw("GET", "/api/v1/topics?search=" + "x" * size).status in (400, 414, 431)
    many = {f"X-{number}": "1" for number in range(500)}
    assert client.raw("GET", "/api/v1/store", **many).status == 431
    body = b" " * (BODY_BYTES_MAX + 1)
    assert client.raw("POST", "/api/v1/actions/pause", body, Content_Type="application/json").status == 413
    with contextlib.suppress(OSError):  # nobody reads that much only to say no
        client.raw("POST", "/api/v1/actions/pause", b" " * (8 << 20), Content_Type="application/json")
    deep = b"[" * (BODY_BYTES_MAX // 2)
    assert client.raw("POST", "/api/v1/actions/pause", deep, Content_Type="application/json").status == 400
    client.get("/store")


def test_requests_that_are_none_get_an_error_in_the_form_of_all(client: Client) -> None:
    for sent in (b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"G" * 70_000):
        with socket.create_connection(client.address, timeout=60) as raw:
            answer = b""
            with contextlib.suppress(OSError):  # it may have hung up already; what it said before is read
                raw.sendall(sent + b"\r\n\r\n")
                raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while part := raw.recv(65536):
                    answer += part
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) or not sent.strip(), (sent[:20], answer[:200])
        assert b"Traceback" not in answer
    client.get("/store")
