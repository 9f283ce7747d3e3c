"""Flushing by time: a thread that keeps flush.ms true for a log that is open for long.

Kafka's flush.ms does nothing unless a scheduler looks often enough; here a log that has a flush.ms gets its own,
which sleeps until the oldest unflushed record is due. Short-lived writers need none: they flush before they go.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference.partition_writer import PartitionWriter

_SLEEP_S_MAX = 3600.0


class Flusher:
    """Runs `log.flush_if_due` in time until stopped. A failed flush stops it and is raised by `stop`."""

    def __init__(self, log: PartitionWriter, flush_ms: int) -> None:
        self._log = log
        # A quarter of the age allowed, so that a record waits at most flush.ms even when it just missed a look.
        self._sleep_s = min(max(flush_ms / 4000, 0.001), _SLEEP_S_MAX)
        self._stopped = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name=f"flush {log.partition}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._sleep_s):
            try:
                self._log.flush_if_due(within_ms=int(self._sleep_s * 1000) + 1)
            except OSError as error:
                self._failure = error
                return

    def stop(self) -> None:
        """Raises the OSError a flush ended with, if one did."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
