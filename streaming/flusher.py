"""Flushing a little later: one thread a process fsyncs what micro-batches appended and lets their staging go."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from logstore.errors import DuramenError

if TYPE_CHECKING:
    from logstore.commit.driver import Commits

_due: dict[tuple[int, str], tuple[float, Commits[Any]]] = {}
_changed = threading.Condition()
_thread: threading.Thread | None = None
_ending = False
_END_WAIT_S = 60


def flush_later(committer: Commits[Any], topics: list[str], delay_ms: int) -> None:
    """Flush these topics within `delay_ms`; until then their staged files are the redo log."""
    global _thread
    with _changed:
        for topic in topics:
            _due.setdefault((id(committer), topic), (time.monotonic() + delay_ms / 1000, committer))
        if not _ending and (_thread is None or not _thread.is_alive()):
            _thread = threading.Thread(target=_run, name="duramen flush", daemon=True)
            _thread.start()
        _changed.notify()


def flush_now() -> None:
    """Everything that is waiting."""
    with _changed:
        waiting = list(_due.items())
        _due.clear()
    for (_, topic), (_, committer) in waiting:
        _flush(committer, topic)


def _run() -> None:
    while True:
        with _changed:
            if _ending:
                return
            if not _due:
                if not _changed.wait(timeout=60):
                    return
                continue
            key, (at, committer) = min(_due.items(), key=lambda item: item[1][0])
            wait = at - time.monotonic()
            if wait > 0:
                _changed.wait(timeout=wait)
                continue
            del _due[key]
        _flush(committer, key[1])


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
