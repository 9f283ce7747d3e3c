"""Stores that processes of Spark have open: drivers, tasks, and the workers that plan and commit for data sources."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from logstore.compaction.maintenance import MaintainedStore
from logstore.objects.opening import is_url
from logstore.store import open_store

_kept: dict[tuple[str, int], MaintainedStore] = {}
_lock = threading.Lock()


def kept_open(path: str, storage_options: Mapping[str, str] | None = None, *, create: bool = False) -> MaintainedStore:
    """One open store a process; opened again after a fork, because neither locks nor connections survive one."""
    with _lock:
        key = (path, os.getpid())
        if key not in _kept:
            _kept[key] = open_store(path, create=create, storage_options=storage_options)
        return _kept[key]


@contextlib.contextmanager
def opened(path: str, storage_options: Mapping[str, str] | None = None) -> Iterator[MaintainedStore]:
    """For one piece of work. In a bucket nothing is held open and opening takes requests, so it is kept."""
    if is_url(path):
        kept = kept_open(path, storage_options)
        kept.topic_names()  # as of now: topics may have been altered since the last piece
        yield kept
        return
    with open_store(path) as store:
        yield store
