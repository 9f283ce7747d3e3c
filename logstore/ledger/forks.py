"""Forks and delta-rs: its work runs on threads of one runtime a process, which a forked child does not have.

A call of delta-rs in such a child panics, and opening the table again does not help. So the child is refused first.
"""

from __future__ import annotations

import os

from logstore.errors import ForkedProcess

_user: int | None = None


def enter_delta() -> None:
    """Call before anything of delta-rs. Raises ForkedProcess in the child of a process that has used it."""
    global _user
    this = os.getpid()
    if _user is None:
        _user = this
    elif _user != this:
        raise ForkedProcess(
            f"process {this} was forked from process {_user}, which had used a ledger; it cannot write to a store",
            hint="Start processes by multiprocessing's 'spawn' or 'forkserver', or open stores for writing only after "
            "the fork. Reading works",
        )
