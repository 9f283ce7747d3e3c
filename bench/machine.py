"""The machine under the measurement: one core for both sides, and how much anybody else kept it busy.

Owns nothing but what it reads from /proc. Two virtual cores may share one real core, so work of others on the other
core counts too: every figure carries how many cores strangers used while it was taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: above this many cores of strangers' work a figure says more about them than about us
NOISY_CORES = 0.2


def take_one_core() -> int:
    """Bind this process, and all it starts from now on, to one core; returns its number."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def busy_s() -> float:
    """Seconds that all cores together have worked."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _wait, irq, soft_irq, stolen, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + soft_irq + stolen) / TICKS_PER_S


def _own_s(processes: tuple[int, ...]) -> float:
    """Seconds that this process and those given have worked."""
    ticks = 0
    for process in (os.getpid(), *processes):
        with open(f"/proc/{process}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # user, system, and both of children that have ended
    return ticks / TICKS_PER_S


def take_all_cores() -> None:
    """Undo `take_one_core`: Spark is measured with two."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def family_s() -> float:
    """Seconds that this process and all that descend from it have worked; its own more exactly than theirs."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:  # it has just ended; its parent has its time
                continue
            parents[int(name)] = int(fields[1])
            ticks[int(name)] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while True:
        more = {child for child, parent in parents.items() if parent in family} - family
        if not more:
            return time.process_time() + sum(ticks[member] for member in family - {os.getpid()}) / TICKS_PER_S
        family |= more


@dataclass(slots=True)
class Watch:
    """What others did meanwhile, known once the watch is over."""

    others_cores: float = 0.0


@contextmanager
def watching(*processes: int) -> Iterator[Watch]:
    """Watch what others do besides this process and those given."""
    watch = Watch()
    began, busy, own = time.perf_counter(), busy_s(), _own_s(processes)
    yield watch
    seconds = max(time.perf_counter() - began, 1 / TICKS_PER_S)
    watch.others_cores = max(busy_s() - busy - (_own_s(processes) - own), 0.0) / seconds


class Patience:
    """Rounds that others disturbed are measured again, but not for ever: at most `again` of them."""

    def __init__(self, again: int) -> None:
        self._left = again

    def takes(self, watch: Watch) -> bool:
        """Whether the round that was watched counts."""
        if watch.others_cores <= NOISY_CORES or self._left == 0:
            return True
        self._left -= 1
        return False


def rss_anon_bytes() -> int:
    """Anonymous memory of this process that is really there: not files, not what was only reserved."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise OSError("this system does not tell RssAnon")


_FILLER_STEP_BYTES = 4 << 20
_ENOUGH_BYTES = 1 << 30
_filler_at = 0


def fill_cache(folder: str | os.PathLike[str]) -> None:
    """Fill the system's page cache with pages nobody needs, as it is on a machine that has run for a while.

    A virtual machine gives free memory back to its host within seconds, and to get it again takes up to ten times as
    long as to write into it: whoever came first behind a pause would pay for that. The pages are those of a hole in a
    file, which take no disk.
    """
    global _filler_at
    path = os.path.join(folder, "cache-filler")
    size = _meminfo_bytes("MemTotal") // _FILLER_STEP_BYTES * _FILLER_STEP_BYTES
    buffer = bytearray(_FILLER_STEP_BYTES)
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        os.ftruncate(fd, size)
        least, since = _meminfo_bytes("MemFree"), 0
        for _ in range(0, size, _FILLER_STEP_BYTES):
            os.preadv(fd, [buffer], _filler_at % size)
            _filler_at += _FILLER_STEP_BYTES
            since += _FILLER_STEP_BYTES
            free = _meminfo_bytes("MemFree")
            if free < least - (_ENOUGH_BYTES >> 4):
                least, since = free, 0
            elif since >= _ENOUGH_BYTES:  # it is other pages of the cache that go for these
                return
    finally:
        os.close(fd)


def _meminfo_bytes(name: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"this system does not tell {name}")
