"""Duramen: a Kafka-format, broker-less, compacted log. All a user needs; each name is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compaction_job.job import compact, explain, plan
    from compaction_job.scheduler import Scheduler
    from logstore import errors
    from logstore.records.record import Record
    from logstore.store import LogStore
    from streaming import LogSink, RestoredState, SinkOptions, restore_into_delta, restore_state

__version__ = "0.1.0"
__all__ = [
    "LogSink",
    "LogStore",
    "Record",
    "RestoredState",
    "Scheduler",
    "SinkOptions",
    "__version__",
    "compact",
    "errors",
    "explain",
    "plan",
    "restore_into_delta",
    "restore_state",
]


def __getattr__(name: str) -> object:
    # Import statements, not names in strings: the wheel has these packages under `duramen`.
    if name == "LogStore":
        from logstore.store import LogStore

        return LogStore
    if name == "Record":
        from logstore.records.record import Record

        return Record
    if name == "errors":
        from logstore import errors

        return errors
    if name in ("compact", "explain", "plan"):
        from compaction_job import job

        return getattr(job, name)
    if name == "Scheduler":
        from compaction_job.scheduler import Scheduler

        return Scheduler
    if name in ("LogSink", "RestoredState", "SinkOptions", "restore_into_delta", "restore_state"):
        import streaming

        return getattr(streaming, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
