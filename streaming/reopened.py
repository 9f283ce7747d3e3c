"""Stores in a bucket that a process of Spark keeps open: tasks and triggers come again, and ask for what is new alone.

A store in a directory is opened each time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from logstore.commit.store_face import Store
from logstore.objects.opening import is_url
from logstore.store import open_store

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_kept: dict[tuple[object, ...], BucketStore] = {}
_lock = threading.Lock()


def open_again(address: str, options: Mapping[str, str]) -> Store:
    """The store as of now; close it, which keeps its connections. Raises what opening it raises."""
    if not is_url(address):
        return open_store(address, storage_options=options)
    from logstore.bucket.store import BucketStore

    key = (os.getpid(), address, *sorted(options.items()))
    with _lock:
        found = _kept.get(key)
        if found is None or not found.is_unchanged():
            found = _kept[key] = BucketStore(address, storage_options=options)
    return found
