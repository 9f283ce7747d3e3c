"""Whether a process with a limit on its address space (`ulimit -v`) has room for the libraries that abort without it.

delta-rs ends the process when an allocation fails, and waits forever for a thread that cannot be started. So what is
left is looked at once, before it is used for the first time.
"""

from __future__ import annotations

import resource

from logstore.errors import NotEnoughMemory

#: stacks and heaps of the threads that delta-rs, Arrow and a pass of compaction start; touched only in part
WANTED_BYTES = 1 << 30
_enough = False


def left_bytes() -> int | None:
    """Address space this process may still take; None without a limit, or where the system does not tell."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return None
    return limit - pages * resource.getpagesize()


def check_address_space() -> None:
    """Raises NotEnoughMemory. Looks once: what was allowed then is in use later."""
    global _enough
    if _enough:
        return
    left = left_bytes()
    if left is not None and left < WANTED_BYTES:
        raise NotEnoughMemory(
            f"the limit on the process's address space leaves {max(left, 0) >> 20} MiB; it takes {WANTED_BYTES >> 20}",
            hint="Raise it (`ulimit -v`); limit memory by a cgroup instead, which counts what is used",
        )
    _enough = True
