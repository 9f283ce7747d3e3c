"""A proxy on the loopback that makes a server look far away: each request waits a while before it goes on.

A request begins where the client speaks first, or again after the server has answered, as HTTP/1.1 without pipelining
has it; the rest of its body follows at once. Connections are kept, and wait beside one another.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_PIECE_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.slow_proxy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int, help="of the server, on the loopback")
    parser.add_argument("--delay-ms", type=float, default=30.0)
    chosen = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            _Connection(client, chosen.port, chosen.delay_ms / 1000).start()


class _Connection:
    """Two threads, one a direction. That the other end closes ends both."""

    def __init__(self, client: socket.socket, port: int, delay_s: float) -> None:
        self._client = client
        self._server = socket.create_connection(("127.0.0.1", port))
        self._delay_s = delay_s
        self._is_new = True
        for each in (self._client, self._server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        threading.Thread(target=self._requests, daemon=True).start()
        threading.Thread(target=self._answers, daemon=True).start()

    def _requests(self) -> None:
        for piece in _pieces(self._client, self._server):
            if self._is_new:
                self._is_new = False
                time.sleep(self._delay_s)
            self._server.sendall(piece)

    def _answers(self) -> None:
        for piece in _pieces(self._server, self._client):
            self._is_new = True
            self._client.sendall(piece)


def _pieces(source: socket.socket, target: socket.socket) -> Iterator[memoryview]:
    """What comes until the end, which is passed on."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.suppress(OSError):
        while size := source.recv_into(buffer):
            yield buffer[:size]
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def slow_proxy(port: int, delay_ms: float) -> Iterator[str]:
    """The endpoint of one in a process of its own."""
    command = [sys.executable, "-m", "bench.slow_proxy", str(port), "--delay-ms", str(delay_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
