"""Duramen: a Kafka-format, broker-less, compacted log. Short import names; each is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logstore.store.store import LogStore
    from streaming import LogSink, restore_into_delta, restore_state

__all__ = ["LogSink", "LogStore", "restore_into_delta", "restore_state"]

_HOMES = {
    "LogStore": "logstore.store.store",
    "LogSink": "streaming",
    "restore_state": "streaming",
    "restore_into_delta": "streaming",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
