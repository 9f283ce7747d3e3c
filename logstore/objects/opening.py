"""Object storage by its URL. `memory://NAME` lives in this process, for tests and for trying things out."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.objects.remote import SCHEMES, RemoteObjects
from logstore.objects.retrying import Patience, RetryingObjects

MEMORY = "memory://"

_memory: dict[str, MemoryObjects] = {}
_lock = threading.Lock()


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a store's address names object storage, known or not; `file:` and paths are none."""
    text = os.fspath(path)
    scheme, colon, _ = text.partition("://")
    return bool(colon) and (scheme in SCHEMES or text.startswith(MEMORY) or (scheme.isalnum() and scheme != "file"))


def open_raw(url: str, options: Mapping[str, str] | None = None) -> Objects:
    """Each call is one request. Opens no connection. Raises InvalidConfig for a URL of another kind."""
    if not url.startswith(MEMORY):
        return RemoteObjects(url, options)
    with _lock:
        return _memory.setdefault(url, MemoryObjects())


def open_objects(
    url: str, options: Mapping[str, str] | None = None, patience: Patience | None = None
) -> RetryingObjects:
    """What a store works on. Opens no connection."""
    return RetryingObjects(CountedObjects(open_raw(url, options)), patience)
