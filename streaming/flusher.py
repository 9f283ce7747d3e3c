"""Flushing a little later: one thread a process fsyncs what micro-batches appended and lets their staging go."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logstore.errors import DuramenError

if TYPE_CHECKING:
    from logstore.commit.driver import Commits
    from logstore.commit.plan import TopicPlan


@dataclass(slots=True)
class _Waiting:
    """A topic with records that are not flushed; `at` is when they will be, of `time.monotonic`."""

    at: float
    committer: Commits[Any]
    records: int = 0


_due: dict[tuple[int, str], _Waiting] = {}
_changed = threading.Condition()
_thread: threading.Thread | None = None
_ending = False
_END_WAIT_S = 60


def flush_later(committer: Commits[Any], appended: Iterable[TopicPlan], delay_ms: int) -> None:
    """Flush these topics within `delay_ms`, or as `flush.messages` and `flush.ms` have it if that is earlier; until
    then their staged files are the redo log.
    """
    global _thread
    now = time.monotonic()
    with _changed:
        for plan in appended:
            at = now + min(delay_ms, plan.flush_ms) / 1000
            waiting = _due.setdefault((id(committer), plan.topic), _Waiting(at, committer))
            waiting.records += plan.records
            waiting.at = now if waiting.records >= plan.flush_messages else min(waiting.at, at)
        if not _ending and (_thread is None or not _thread.is_alive()):
            _thread = threading.Thread(target=_run, name="duramen flush", daemon=True)
            _thread.start()
        _changed.notify()


def flush_now() -> None:
    """Everything that is waiting."""
    with _changed:
        waiting = list(_due.items())
        _due.clear()
    for (_, topic), each in waiting:
        _flush(each.committer, topic)


def _run() -> None:
    while True:
        with _changed:
            if _ending:
                return
            if not _due:
                if not _changed.wait(timeout=60):
                    return
                continue
            key, first = min(_due.items(), key=lambda item: item[1].at)
            wait = first.at - time.monotonic()
            if wait > 0:
                _changed.wait(timeout=wait)
                continue
            del _due[key]
        _flush(first.committer, key[1])


def _flush(committer: Commits[Any], topic: str) -> None:
    # A failure loses nothing: the staged files stay, and the next holder of the lease flushes.
    with contextlib.suppress(DuramenError, OSError):
        committer.finish(topic)


def _end() -> None:
    """The thread must not be inside a library when the interpreter takes that down: it is waited for."""
    global _ending
    with _changed:
        _ending = True
        _changed.notify()
    if _thread is not None:
        _thread.join(_END_WAIT_S)
    flush_now()


def _forget() -> None:
    """A forked child flushes nothing: its parent does."""
    global _changed, _thread
    _changed, _thread = threading.Condition(), None
    _due.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
