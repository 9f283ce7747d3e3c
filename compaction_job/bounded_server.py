"""An HTTP server for untrusted clients: few connections at a time, short requests, short timeouts.

A client that connects and sends nothing must cost the daemon next to nothing. When all connections are taken, the
oldest one that has not finished its request makes room; a request that is not there after `REQUEST_S`, or an answer
that nobody reads, is given up. Knows nothing of what is served.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

from logstore.errors import UsageError

CONNECTIONS_MAX = 16
#: the whole request has to arrive within this time, however slowly
REQUEST_S = 5.0
ANSWER_S = 30.0
REQUEST_BYTES_MAX = 16 << 10
#: what a refused client still sends is read so long, and so much of it
_LINGER_S = 1.0
_LINGER_BYTES_MAX = 1 << 20

_log = logging.getLogger("duramen.metrics")


@dataclass(slots=True)
class _Connection:
    since: float
    #: until then the client has to act; None while we work on its answer
    deadline: float | None
    dropped: bool = False


class BoundedServer(ThreadingHTTPServer):
    connections_max = CONNECTIONS_MAX
    daemon_threads = True
    # Two daemons on one port would each get half of the scrapes.
    allow_reuse_port = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler]) -> None:
        self._connections: dict[socket.socket, _Connection] = {}
        self._guard = threading.Lock()
        super().__init__(address, handler)

    @property
    def connections(self) -> int:
        with self._guard:
            return len(self._connections)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.1)  # the client stays in the queue; asking again at once would only burn the processor
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Room for one more, if need be by dropping the oldest that has not finished its request."""
        now = time.monotonic()
        with self._guard:
            if len(self._connections) >= self.connections_max:
                waiting = [
                    (each.since, at) for at, each in self._connections.items() if each.deadline and not each.dropped
                ]
                if not waiting or len(self._connections) >= 2 * self.connections_max:
                    return False  # all are at work, or have not ended yet
                self._drop(min(waiting, key=lambda pair: pair[0])[1])
            self._connections[request] = _Connection(now, now + REQUEST_S)
        return True

    def service_actions(self) -> None:
        """Called about twice a second: give up those who take too long."""
        super().service_actions()
        now = time.monotonic()
        with self._guard:
            for at, each in list(self._connections.items()):
                if each.deadline is not None and now > each.deadline and not each.dropped:
                    self._drop(at)

    def _drop(self, request: socket.socket) -> None:
        """Its thread wakes up with an error, and closes it."""
        self._connections[request].dropped = True
        with contextlib.suppress(OSError):  # gone already
            request.shutdown(socket.SHUT_RDWR)

    def expect(self, request: socket.socket, seconds: float | None) -> None:
        """The client has to act within so many seconds; None: we work."""
        with self._guard:
            known = self._connections.get(request)
            if known is not None:
                known.deadline = None if seconds is None else time.monotonic() + seconds

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            self._linger(request)
        with self._guard:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def _linger(self, request: socket.socket) -> None:
        """Hanging up on a client that is still sending would take our answer from it: let it end first."""
        if not request.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return
        self.expect(request, _LINGER_S)
        request.shutdown(socket.SHUT_WR)
        left_bytes = _LINGER_BYTES_MAX
        while left_bytes > 0 and (part := request.recv(1 << 16)):
            left_bytes -= len(part)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client at %s went away", client_address, exc_info=True)


class BoundedHandler(BaseHTTPRequestHandler):
    """Answers one request; subclasses call `answer`."""

    server_version = "duramen"
    sys_version = ""
    timeout = ANSWER_S

    def setup(self) -> None:
        super().setup()
        self.rfile = _Limited(self.rfile, REQUEST_BYTES_MAX)  # type: ignore[assignment]

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed and isinstance(self.rfile, _Limited) and self.rfile.is_used_up:
            self.send_error(431)
            return False
        self._expect(None)  # all of it is here
        return parsed

    def read_body(self, size: int) -> bytes | None:
        """The request's body of so many bytes; None when the client did not send it in time."""
        self._expect(REQUEST_S)
        assert isinstance(self.rfile, _Limited)
        body = self.rfile.read(size)
        self._expect(None)
        return body if len(body) == size else None

    def answer(self, code: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._expect(ANSWER_S)
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _expect(self, seconds: float | None) -> None:
        assert isinstance(self.server, BoundedServer)
        self.server.expect(self.connection, seconds)

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(format, *arguments)


class ServerThread:
    """A server at work on a thread of its own until `close`. Raises UsageError when it cannot listen."""

    def __init__(
        self,
        server: type[BoundedServer],
        address: tuple[str, int],
        handler: type[BoundedHandler],
        *,
        serves: str,
        hint: str,
    ) -> None:
        try:
            self._http = server(address, handler)
        except (OSError, OverflowError) as error:
            where = f"{address[0]}:{address[1]}"
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot serve {serves} on {where}: {reason}", hint=hint) from None
        name = f"duramen-{serves.split()[-1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._http.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


class _Limited:
    """Lines of a request, up to so many bytes; then it ends."""

    def __init__(self, file: BufferedIOBase, left_bytes: int) -> None:
        self._file = file
        self._left_bytes = left_bytes

    def readline(self, size: int = -1) -> bytes:
        line = self._file.readline(self._left_bytes if size < 0 else min(size, self._left_bytes))
        self._left_bytes -= len(line)
        return line

    def read(self, size: int) -> bytes:
        """The caller limits the body."""
        return self._file.read(size)

    @property
    def is_used_up(self) -> bool:
        return self._left_bytes <= 0

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed
