"""One clock for all processes of a store: the file system's, and no jumps of days believed at once.

Retention, delete horizons, sweeps and the times of records without one go by it. Each process has a clock of its own,
and one that is wrong by days must neither delete what should stay nor write records that are old when they arrive. So:

- Where a process's clock differs from the file system's by more than a minute, the file system's counts. All processes
  see that one, wherever they run.
- On one machine the two are the same clock. So the file `locks/clock` remembers for each boot how the clock stood and
  how long the machine was up. A clock that has since moved ahead of the uptime by more than an hour is not believed for
  a day; until then time goes on from where it was. One that was set back is believed at once: that deletes nothing.

A `ManualClock` was given on purpose, and is left alone. No lock protects the file: a lost sighting costs one more look
at the file system's clock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from dataclasses import dataclass

from logstore.clock import Clock, ManualClock
from logstore.files import FileSystem, read_whole

AGREES_MS = 60_000
JUMP_MS = 3_600_000
JUMP_HELD_BACK_MS = 86_400_000
#: how long one look at the file system's clock holds, while this process's own does not jump
LOOK_MS = 10_000
_OWN_JUMP_MS = 1_000
_BOOTS_MAX = 16
_FILE_BYTES = 4096
_READS = 3
#: a process that may not write the file, or finds no room for it, uses its own time; other errors say nothing about the
#: file
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class Sighting:
    """How the clock stood (`now_ms`, as believed) when the machine was up for `up_ms`."""

    up_ms: int
    now_ms: int
    #: uptime when the clock was seen to have jumped ahead
    jumped_up_ms: int | None = None


def agreed_ms(own_ms: int, file_ms: int) -> int:
    """This process's time, or the file system's where they do not agree."""
    return own_ms if abs(own_ms - file_ms) <= AGREES_MS else file_ms


def believed(now_ms: int, up_ms: int, seen: Sighting | None) -> Sighting:
    """What to believe of a clock that says `now_ms`, after what was seen of it in this boot."""
    if seen is None or up_ms < seen.up_ms:
        return Sighting(up_ms, now_ms)
    expected_ms = seen.now_ms + up_ms - seen.up_ms
    if now_ms - expected_ms <= JUMP_MS:
        return Sighting(up_ms, now_ms)
    since = up_ms if seen.jumped_up_ms is None else seen.jumped_up_ms
    return Sighting(up_ms, now_ms) if up_ms - since >= JUMP_HELD_BACK_MS else Sighting(up_ms, expected_ms, since)


def uptime_ms() -> int:
    """Since the machine was started, also while it slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class SharedClock:
    """The store's clock as this process sees it."""

    def __init__(self, fs: FileSystem, path: str, clock: Clock, boot_id: str) -> None:
        self._fs = fs
        self._path = path
        self._clock = clock
        self._boot_id = boot_id
        self._mutex = threading.Lock()
        self._correction_ms = 0
        #: this process's time and uptime at the last look
        self._looked: tuple[int, int] | None = None

    def now_ms(self) -> int:
        own_ms, up_ms = self._clock.now_ms(), uptime_ms()
        with self._mutex:
            if self._is_stale(own_ms, up_ms):
                self._correction_ms = self._look(own_ms, up_ms)
                self._looked = (own_ms, up_ms)
            return own_ms + self._correction_ms

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    @property
    def warning(self) -> str | None:
        """Why this process's clock is not believed, in words; None where it is."""
        self.now_ms()
        if abs(self._correction_ms) <= AGREES_MS:
            return None
        way = "ahead of" if self._correction_ms < 0 else "behind"
        hours = abs(self._correction_ms) / 3_600_000
        return (
            f"this process's clock is {hours:.1f} hours {way} the store's, which counts; set the clock right, or give "
            "the time with --now-ms"
        )

    def _is_stale(self, own_ms: int, up_ms: int) -> bool:
        if self._looked is None:
            return True
        passed_ms = up_ms - self._looked[1]
        return passed_ms >= LOOK_MS or abs(own_ms - self._looked[0] - passed_ms) > _OWN_JUMP_MS

    def _look(self, own_ms: int, up_ms: int) -> int:
        """How far the store's time is from this process's. Where nothing can be written, its own is all there is.

        An error of the system is no reason to believe a clock that may be wrong: after a look that succeeded time goes
        on from there, before one the error is raised.
        """
        try:
            known = self._read()
            document = {boot: [each.up_ms, each.now_ms, each.jumped_up_ms] for boot, each in known.items()}
            file_ms = self._write(document)
            sighting = believed(agreed_ms(own_ms, file_ms), up_ms, known.get(self._boot_id))
            document.pop(self._boot_id, None)
            document[self._boot_id] = [sighting.up_ms, sighting.now_ms, sighting.jumped_up_ms]
            self._write(dict(list(document.items())[-_BOOTS_MAX:]))
            return sighting.now_ms - own_ms
        except OSError as error:
            if self._looked is not None:
                return self._looked[0] + self._correction_ms + up_ms - self._looked[1] - own_ms
            if error.errno not in _CANNOT_WRITE:
                raise
            return 0

    def _read(self) -> dict[str, Sighting]:
        for _ in range(_READS):  # another process may be writing it
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
                found = json.loads(self._read_text())
                sightings = {}
                for boot, (up_ms, now_ms, jumped) in found.items():
                    if type(up_ms) is int and type(now_ms) is int and (jumped is None or type(jumped) is int):
                        sightings[str(boot)] = Sighting(up_ms, now_ms, jumped)
                return sightings
        return {}

    def _read_text(self) -> bytes:
        try:
            return read_whole(self._fs, self._path, limit=_FILE_BYTES)
        except OSError as error:
            if error.errno == errno.EFBIG:
                return b""  # too long: the next write cuts it
            raise

    def _write(self, document: dict[str, list[int | None]]) -> int:
        """Returns the file system's time. One write of always the same size, so that no reader finds half of two."""
        file = self._fs.open(self._path, create=True)
        try:
            file.pwrite(json.dumps(document).encode().ljust(_FILE_BYTES), 0)
            if file.size() > _FILE_BYTES:
                file.truncate(_FILE_BYTES)
        finally:
            file.close()
        return self._fs.stat(self._path).mtime_ms


def shared_clock(fs: FileSystem, locks: str, clock: Clock, boot_id: str) -> Clock:
    """The clock of a store."""
    return clock if isinstance(clock, ManualClock) else SharedClock(fs, os.path.join(locks, "clock"), clock, boot_id)


def clock_warning(clock: Clock) -> str | None:
    return clock.warning if isinstance(clock, SharedClock) else None
