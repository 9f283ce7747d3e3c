"""A free port for a server that cannot choose one itself."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Below the range that the kernel hands out by itself, so that nobody gets it before the server does."""
    for _ in range(200):
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port on 127.0.0.1")
