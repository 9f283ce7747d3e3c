"""Forks and libraries whose work runs on threads of their own: a forked child does not have those.

A call in such a child panics (delta-rs) or hangs (object storage), and opening things again does not help. So the child
is refused first.
"""

from __future__ import annotations

import os

from logstore.errors import ForkedProcess

_SPAWN = "Start processes by multiprocessing's 'spawn' or 'forkserver', or "


class OneProcess:
    """What may be used by the process that used it first, and not by its forked children."""

    def __init__(self, why: str, hint: str) -> None:
        self._why = why
        self._hint = hint
        self._user: int | None = None

    def enter(self) -> None:
        """Call before each use. Raises ForkedProcess in the child of a process that has used it."""
        this = os.getpid()
        if self._user is None:
            self._user = this
        elif self._user != this:
            raise ForkedProcess(
                f"process {this} was forked from process {self._user}, which had used {self._why}", hint=self._hint
            )


DELTA = OneProcess(
    "a ledger; it cannot write to a store", f"{_SPAWN}open stores for writing only after the fork. Reading works"
)
OBJECT_STORAGE = OneProcess("object storage; it would hang", f"{_SPAWN}use the store only after the fork")
