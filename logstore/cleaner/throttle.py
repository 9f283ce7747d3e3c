"""A limit on the bytes a second that compaction reads and writes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class Throttle:
    """Keeps the average since the first byte at or below the rate; may be shared by threads."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at: float | None = None  # when the rate allows the next bytes

    def take(self, size_bytes: int) -> None:
        """Account for bytes moved, and wait until the rate allows more."""
        if not math.isfinite(self._rate) or self._rate >= 1e15:
            return
        with self._lock:
            now = self._now()
            start = now if self._free_at is None else max(self._free_at, now - 1.0)  # a pause saves up a second at most
            self._free_at = start + size_bytes / self._rate
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)


UNTHROTTLED = Throttle(math.inf)
