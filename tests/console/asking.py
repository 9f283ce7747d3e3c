"""A client for the tests: asks over a real connection, and holds every answer against the API's own document."""

from __future__ import annotations

import functools
import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jsonschema_rs

from duramen.console.contract import PREFIX, openapi
from duramen.console.opened import OpenConsole
from duramen.console.requests import find_operation

TOKEN = "a-token-that-only-the-tests-know"


@functools.cache
def validator(name: str) -> Any:
    document = openapi("0")
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.validator_for(schema)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    served: OpenConsole
    token: str | None = TOKEN
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.served.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def raw(self, method: str, target: str, body: bytes | None = None, **headers: str | None) -> Answer:
        """One request; a header that is None is left out."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        given = {"Authorization": f"Bearer {self.token}" if self.token else None, **self.headers}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        skip_host = "Host" in given
        try:
            connection.putrequest(method, target, skip_host=skip_host, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, *, status: int = 200, **query: object) -> Any:
        """The answer to a GET, checked against the document."""
        given = {k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items() if v is not None}
        target = PREFIX + path + ("?" + urlencode(given, quote_via=quote) if given else "")
        found = self.raw("GET", target)
        assert found.status == status, found.body[:2000]
        if status == 200:
            operation, _ = find_operation("GET", PREFIX + path)
            check(operation.answer, found.json)
        else:
            check("Error", found.json)
        return found.json

    def act(self, name: str, body: dict[str, Any], *, dry_run: bool, status: int | None = None) -> Any:
        found = self.raw(
            "POST",
            f"{PREFIX}/actions/{name}?dry_run={str(dry_run).lower()}",
            json.dumps(body).encode(),
            Content_Type="application/json",
        )
        assert found.status == (status or (200 if dry_run else 202)), found.body
        check("Error" if found.status >= 400 else "DryRun" if dry_run else "Started", found.json)
        return found.json


def check(name: str, document: Any) -> None:
    errors = [f"{error.message} at {error.instance_path}" for error in validator(name).iter_errors(document)]
    assert not errors, (name, errors[:5])
