"""What opening a partition's log needs: the environment it works in, and what is known of the log."""

from __future__ import annotations

from dataclasses import dataclass

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.files import OS_FILES, FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.partition.producer_state import DEFAULT_EXPIRATION_MS


@dataclass(frozen=True, slots=True)
class LogEnvironment:
    """A log of many segments has more files than a process may open: give it `FewFiles`, and each log its own."""

    fs: FileSystem = OS_FILES
    clock: Clock = SYSTEM_CLOCK
    limits: Limits = DEFAULT_LIMITS
    producer_expiration_ms: int = DEFAULT_EXPIRATION_MS


@dataclass(frozen=True, slots=True)
class LastKnown:
    """`clean` says that the last writer closed the log; otherwise everything from `recovery_point` on is checked.

    Damage below `keep_offset` that would cost records is an error, and nothing is given up.
    """

    clean: bool
    recovery_point: int = 0
    log_start_offset: int = 0
    #: None: the log's end
    high_watermark: int | None = None
    keep_offset: int = 0
    #: another host's memory may hold what lies above; None: nothing is in another's
    unsynced_offset: int | None = None
