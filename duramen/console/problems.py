"""What goes wrong with a request, as the one document every error has. The only place where errors become statuses."""

from __future__ import annotations

from typing import Any

from logstore import errors

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (errors.ReadOnlyStore, 403),
    (errors.AccessDenied, 403),
    (errors.UnknownTopic, 404),
    (errors.OffsetOutOfRange, 404),
    (errors.NotCompacted, 409),
    (errors.RetriableError, 409),
    (errors.BufferLimit, 422),
    (errors.DamageError, 422),
    (errors.UsageError, 400),
)


class Refused(Exception):
    """A request that is answered with an error; `kind` is stable, `what` is for people."""

    def __init__(self, status: int, kind: str, what: str, *, hint: str | None = None, **where: str | int) -> None:
        super().__init__(what)
        self.status, self.kind, self.what, self.hint, self.where = status, kind, what, hint, where

    def document(self) -> dict[str, Any]:
        return {
            "error": {
                "status": self.status,
                "kind": self.kind,
                "what": _plain(self.what),
                "where": {name: _plain(value) for name, value in self.where.items()},
                "hint": None if self.hint is None else _plain(self.hint),
            }
        }


def bad_request(what: str, *, hint: str | None = None, **where: str | int) -> Refused:
    return Refused(400, "BadRequest", what, hint=hint, **where)


def refusal_of(error: Exception) -> Refused | None:
    """The answer to a typed error; None for one that nobody expected."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, errors.DuramenError):
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        where = {name: value for name, value in error.where().items() if isinstance(value, (str, int))}
        return Refused(status, type(error).__name__, error.what, hint=error.hint, **where)
    return None


def _plain(value: Any) -> Any:
    """Text that JSON can carry: file names may hold bytes that are no text."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
