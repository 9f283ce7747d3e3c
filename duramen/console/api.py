"""Operations of the contract and what answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duramen.console import commits, erasure, horizons, messages, overview, runs, settings, topics, what_if, why
from duramen.console.contract import Operation
from duramen.console.problems import Refused
from duramen.console.requests import Call
from duramen.console.view import View


def _actions(view: View) -> dict[str, Any]:
    return {"now_ms": view.now_ms, "actions": [] if view.actions is None else view.actions.documents()}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "store": overview.store,
    "topics": topics.topics,
    "topic": topics.topic,
    "history": topics.history,
    "partition": topics.partition,
    "explain": why.explain,
    "runs": runs.runs,
    "run": runs.run,
    "what_if": what_if.what_if,
    "horizons": horizons.horizons,
    "apps": commits.apps,
    "commits": commits.commits,
    "messages": messages.messages,
    "message": messages.message,
    "erasure": erasure.erasure,
    "settings": settings.settings,
    "actions": _actions,
}


def answer(view: View, call: Call) -> dict[str, Any]:
    """The document of a question. Raises Refused, DuramenError."""
    return _ANSWERS[call.operation.name](view, **call.values)


def act(view: View, operation: Operation, body: dict[str, Any], *, dry_run: bool) -> tuple[int, dict[str, Any]]:
    """The status and document of an action; the caller has checked the token. Raises Refused, DuramenError."""
    if view.actions is None or view.store.is_read_only:
        raise Refused(403, "ReadOnlyStore", "the store can only be read here")
    name = operation.name.removeprefix("action_")
    if dry_run:
        return 200, view.actions.dry_run(name, body)
    return 202, view.actions.do(name, body)
