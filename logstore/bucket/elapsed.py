"""How long ago something was, for rules that must not be fooled by a suspended machine or a clock that was set."""

from __future__ import annotations

import time
from collections.abc import Callable


def _boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000  # goes on while the machine sleeps


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Elapsed:
    """Time since it was made: the larger of what two clocks say."""

    def __init__(self, boot_ms: Callable[[], int] = _boot_ms, wall_ms: Callable[[], int] = _wall_ms) -> None:
        self._clocks = (boot_ms, wall_ms)
        self._began = (boot_ms(), wall_ms())

    @classmethod
    def since(cls, wall_ms: int) -> Elapsed:
        """Of what another process began at that time by its clock; clocks of a store are at most a minute apart."""
        elapsed = cls()
        boot_ms, own_ms = elapsed._began
        elapsed._began = (boot_ms - max(own_ms - wall_ms, 0), min(wall_ms, own_ms))
        return elapsed

    def ms(self) -> int:
        return max(clock() - began for clock, began in zip(self._clocks, self._began, strict=True))
