"""The console's server: the page, and the API, on loopback unless asked otherwise. Every request is checked here once.

Order of the checks: Host (421), Origin (403), path and method (404, 405), token (401), parameters and body (400, 413,
415). Answers are never kept by anybody. What nobody expected is logged and answered with a 500 that says nothing.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Collection
from typing import Any

from compaction_job.bounded_server import BoundedHandler, BoundedServer, ServerThread
from duramen import __version__
from duramen.console.api import act, answer
from duramen.console.contract import PREFIX, openapi
from duramen.console.guard import is_loopback, is_our_host, is_our_origin, is_token
from duramen.console.page_files import page_files
from duramen.console.problems import Refused, bad_request, refusal_of
from duramen.console.requests import BODY_BYTES_MAX, find_operation, read_body, read_call
from duramen.console.view import View

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
}
_JSON = "application/json"
_CONNECTIONS_MAX = 64
#: answers that are made at the same time; the others wait
_AT_ONCE = 4

_log = logging.getLogger("duramen.console")


class _Server(BoundedServer):
    connections_max = _CONNECTIONS_MAX
    request_queue_size = 4 * _CONNECTIONS_MAX


class _Server6(_Server):
    address_family = socket.AF_INET6


class ConsoleServer(ServerThread):
    """Serves one store on threads of its own. Raises UsageError when it cannot listen.

    `names` are host names beside addresses and localhost under which it may be asked. Off loopback, every request
    needs the token.
    """

    def __init__(self, view: View, host: str, port: int, *, token: str, names: Collection[str] = ()) -> None:
        self.token = token
        self._view = view
        site = _Site(view, token, names, protects_reads=not is_loopback(host))

        class Handler(_Handler):
            def site(self) -> _Site:
                return site

        server = _Server6 if ":" in host else _Server
        hint = "Give another --port, or 0 for a free one"
        super().__init__(server, (host, port), Handler, serves="the console", hint=hint)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def close(self) -> None:
        super().close()
        if self._view.actions is not None:
            self._view.actions.close()


class _Site:
    """What all requests share."""

    def __init__(self, view: View, token: str, names: Collection[str], *, protects_reads: bool) -> None:
        self.view = view
        self.token = token
        self.names = frozenset(name.lower() for name in names)
        self.protects_reads = protects_reads
        self.files = page_files()
        self.turns = threading.BoundedSemaphore(_AT_ONCE)


class _Handler(BoundedHandler):
    def site(self) -> _Site:
        raise NotImplementedError

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        try:
            self._check_sender()
            path, _, query = self.path.partition("?")
            if path.startswith("/api/"):
                status, document = self._api(path, query)
                self._say(status, document)
            else:
                self._file(path)
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:
            refused = refusal_of(error)
            if refused is None:
                _log.exception("%s failed", self.requestline[:200])
                refused = Refused(500, "Unexpected", "the console failed; its log says more")
            self._say(refused.status, refused.document())

    def _check_sender(self) -> None:
        host = self.headers.get("Host")
        if len(self.headers.get_all("Host") or ()) != 1 or not is_our_host(host, self.site().names):
            raise Refused(
                421,
                "WrongHost",
                "the Host header names another host",
                hint="Use the address the console was started on, or name the host with --allow-host.",
            )
        if not is_our_origin(self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site"), host or ""):
            navigates = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.headers.get("Origin") is None
            if not (navigates and not self.path.startswith("/api/")):
                raise Refused(403, "WrongOrigin", "the request comes from another site")

    # --- the API ----------------------------------------------------------------------------------------------------

    def _api(self, path: str, query: str) -> tuple[int, dict[str, Any]]:
        site, method = self.site(), "GET" if self.command == "HEAD" else self.command
        if path == f"{PREFIX}/openapi.json":
            if method != "GET":
                raise Refused(405, "MethodNotAllowed", "use GET here")
            return 200, dict(openapi(__version__))
        operation, _ = find_operation(method, path)
        if (operation.needs_token or site.protects_reads) and not is_token(
            self.headers.get("Authorization"), site.token
        ):
            raise Refused(
                401,
                "Unauthorized",
                "the token is missing or wrong",
                hint="`duramen console` prints it at its start; send it as `Authorization: Bearer TOKEN`.",
            )
        body = self._body() if operation.body is not None else b""
        call = read_call(method, path, query)
        if operation.name == "token":
            return 200, {"valid": True}
        with site.turns:
            if operation.body is not None:
                wanted = read_body(operation, body)
                return act(site.view, operation, wanted, dry_run=bool(call.values["dry_run"]))
            return 200, answer(site.view, call)

    def _body(self) -> bytes:
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind != _JSON:
            raise Refused(415, "NotJson", "the body must be application/json")
        length = self.headers.get("Content-Length") or ""
        if self.headers.get("Transfer-Encoding") is not None or not (length.isascii() and length.isdigit()):
            raise bad_request("the body needs a Content-Length")
        if len(length) > 9 or int(length) > BODY_BYTES_MAX:
            raise Refused(413, "TooLarge", f"a body has at most {BODY_BYTES_MAX} bytes")
        body = self.read_body(int(length))
        if body is None:
            raise bad_request("the body is shorter than it says")
        return body

    def _say(self, status: int, document: dict[str, Any]) -> None:
        """ASCII only: no mark of any script reaches whoever shows it raw."""
        body = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
        more = {"WWW-Authenticate": "Bearer"} if status == 401 else {"Allow": "GET, POST"} if status == 405 else {}
        self.answer(status, _JSON, body, {**_HEADERS, "Cache-Control": "no-store", **more})

    # --- the page ---------------------------------------------------------------------------------------------------

    def _file(self, path: str) -> None:
        found = self.site().files.get(path)
        if self.command == "POST":
            raise Refused(405, "MethodNotAllowed", "use GET here")
        if found is None:
            raise Refused(404, "NotFound", "there is nothing at this path")
        self.answer(200, found[1], found[0].read_bytes(), {**_HEADERS, "Cache-Control": "no-cache"})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the parser of requests refuses, in the form of all errors; a method it does not know is no fault of
        ours.
        """
        status = 405 if code == 501 else 400 if code >= 500 or code == 414 else code
        what = {405: "use GET or POST", 431: "the request's head is too large"}.get(status, "not a request")
        kinds = {405: "MethodNotAllowed", 431: "TooLarge"}
        self.close_connection = True
        self.request_version = self.protocol_version  # of a head that was cut, it may be taken for the oldest
        if not hasattr(self, "command") or self.command is None:
            self.command = "GET"
        self._say(status, Refused(status, kinds.get(status, "BadRequest"), what).document())
