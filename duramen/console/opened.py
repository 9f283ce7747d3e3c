"""A console that is being served, with everything it needs: the store, the token, the server."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from duramen.console.actions import Actions
from duramen.console.formats import MessageSchemas
from duramen.console.server import ConsoleServer
from duramen.console.view import View
from logstore.errors import UsageError
from logstore.store import open_store

TOKEN_VARIABLE = "DURAMEN_CONSOLE_TOKEN"
_TOKEN_CHARS_MIN, _TOKEN_CHARS_MAX = 16, 512


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    #: made up now: whoever starts the console has to be told
    is_new: bool


def find_token(file: str | None) -> Token:
    """From the file, else from the environment, else a new one. Raises UsageError, OSError."""
    if file is not None:
        if os.stat(file).st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise UsageError("others may read or change the token's file", file=file, hint=f"chmod 600 {file}")
        with open(file, encoding="utf-8", errors="replace") as opened:
            return _checked(opened.read(_TOKEN_CHARS_MAX + 2).strip(), f"the token in {file}")
    given = os.environ.get(TOKEN_VARIABLE)
    return Token(secrets.token_urlsafe(24), True) if given is None else _checked(given.strip(), TOKEN_VARIABLE)


def _checked(text: str, what: str) -> Token:
    plain = text.isascii() and text.isprintable() and " " not in text
    if not plain or not _TOKEN_CHARS_MIN <= len(text) <= _TOKEN_CHARS_MAX:
        raise UsageError(
            f"{what} is not a token: {_TOKEN_CHARS_MIN} to {_TOKEN_CHARS_MAX} printable ASCII characters, no blanks"
        )
    return Token(text, False)


class OpenConsole:
    """Serves a store from now on; close it. Raises NotAStore and its kind, UsageError."""

    def __init__(
        self,
        path: str,
        *,
        token: Token,
        host: str = "127.0.0.1",
        port: int = 0,
        schemas: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        known = MessageSchemas(schemas)
        self._store = open_store(path)
        try:
            view = View(self._store, schemas=known, actions=Actions(self._store))
            self._server = ConsoleServer(view, host, port, token=token.text, names=names)
        except BaseException:
            self._store.close()
            raise
        self.url = self._server.url
        self.is_read_only = self._store.is_read_only
        #: what people open: with the token where nobody knows it yet
        self.link = f"{self.url}#token={token.text}" if token.is_new and not self.is_read_only else self.url

    def close(self) -> None:
        self._server.close()
        self._store.close()

    def __enter__(self) -> OpenConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
