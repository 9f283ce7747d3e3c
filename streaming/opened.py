"""Stores that processes of Spark have open: drivers, tasks, and the workers that plan and commit for data sources."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping

from logstore.bucket.store import BucketStore
from logstore.compaction.maintenance import MaintainedStore
from logstore.objects.opening import is_url
from logstore.store import open_store

#: so long a trigger that finds nothing takes the store at a URL for the one it was
_BELIEVED_S = 60.0

_kept: dict[tuple[object, ...], MaintainedStore] = {}
#: when each of those in a bucket was last found to be the one that was opened
_checked: dict[tuple[object, ...], float] = {}
_lock = threading.Lock()


def kept_open(path: str, storage_options: Mapping[str, str] | None = None, *, create: bool = False) -> MaintainedStore:
    """One open store a process; opened again after a fork, because neither locks nor connections survive one."""
    with _lock:
        key = _key(path, storage_options)
        if key not in _kept:
            _kept[key] = open_store(path, create=create, storage_options=storage_options)
        return _kept[key]


@contextlib.contextmanager
def opened(path: str, storage_options: Mapping[str, str] | None = None) -> Iterator[MaintainedStore]:
    """The store as of now, for one piece of work. Raises what opening it raises.

    Opening one in a bucket takes requests, so it is kept: tasks and triggers come again, and ask for what is new alone.
    """
    if not is_url(path):
        with open_store(path) as store:
            yield store
        return
    with _lock:
        key = _key(path, storage_options)
        kept = _kept.get(key)
        if not isinstance(kept, BucketStore) or not kept.is_unchanged():
            kept = _kept[key] = open_store(path, storage_options=storage_options)
        _checked[key] = time.monotonic()
    with kept:  # closing it gives up what was fetched, and keeps its connections
        yield kept


@contextlib.contextmanager
def polled(path: str, storage_options: Mapping[str, str] | None = None) -> Iterator[MaintainedStore]:
    """The same for who looks again and again whether there is more, which should take one request.

    What to read is planned with `opened`, so nothing is read from another store that took its place.
    """
    with _lock:
        key = _key(path, storage_options)
        kept = _kept.get(key)
        is_believed = key in _checked and time.monotonic() - _checked[key] < _BELIEVED_S
    if isinstance(kept, BucketStore) and is_believed:
        yield kept
        return
    with opened(path, storage_options) as store:
        yield store


def _key(path: str, storage_options: Mapping[str, str] | None) -> tuple[object, ...]:
    return (os.getpid(), path, *sorted((storage_options or {}).items()))
