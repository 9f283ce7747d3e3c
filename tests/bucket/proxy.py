"""A proxy in front of a server on the loopback, which gives answers of its own where a test says so."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bucket.servers import Server

#: (how many came before, method, path) → status and code, or None: what the server says
Judge = Callable[[int, str, str], "tuple[int, str] | None"]


@dataclass
class Proxy:
    server: Server
    judge: Judge = lambda number, method, path: None
    #: method and path of every request
    seen: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def proxy_of(server: Server) -> Iterator[Proxy]:
    """Answers of its own have an error's code and, in their text, all that the request had in its headers."""
    target = urlsplit(server.endpoint)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with proxy.lock:
                number = len(proxy.seen)
                proxy.seen.append((self.command, self.path))
            told = proxy.judge(number, self.command, self.path)
            if told is not None:
                headers = "".join(f"{name}: {value} " for name, value in self.headers.items())
                text = f"<Error><Code>{told[1]}</Code><Message>{headers}</Message></Error>".encode()
                return self._say(told[0], {}, text)
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                self._say(answer.status, dict(answer.getheaders()), answer.read())
            finally:
                connection.close()

        def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

        def log_message(self, *_: object) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    proxy = Proxy(Server(f"http://127.0.0.1:{listening.server_address[1]}"))
    thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
