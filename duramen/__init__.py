"""Duramen: a Kafka-format, broker-less, compacted log. Short import names; each is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logstore.store.store import LogStore
    from streaming import LogSink, restore_into_delta, restore_state

__version__ = "0.1.0"
__all__ = ["LogSink", "LogStore", "__version__", "restore_into_delta", "restore_state"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Import statements, not names in strings: the wheel has these packages under `duramen`.
    if name == "LogStore":
        from logstore.store.store import LogStore

        return LogStore
    import streaming

    return getattr(streaming, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
