"""Object storage by its URL. `memory://NAME` lives in this process, for tests and for trying things out."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Mapping

from logstore.errors import InvalidConfig
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.objects.remote import SCHEMES, RemoteObjects
from logstore.objects.retrying import Patience, RetryingObjects

MEMORY = "memory://"
_SCHEME = re.compile("([A-Za-z][A-Za-z0-9+.-]*):(/*)")
_FORMS = "Give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or the path of a directory"

_memory: dict[str, MemoryObjects] = {}
_lock = threading.Lock()


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a store's address names object storage, rather than a directory.

    Raises InvalidConfig for what looks like a URL and is none of ours: nobody means a directory of that name.
    """
    text = os.fspath(path)
    found = _SCHEME.match(text)
    if found is None:
        return False
    scheme, slashes = found[1].lower(), len(found[2])
    is_known = scheme in SCHEMES or text.startswith(MEMORY)
    if is_known and slashes == 2:
        return True
    if not is_known and not slashes:
        return False
    rest = text[found.end() :].lstrip("/")
    if scheme == "file":
        raise InvalidConfig(f"{text} is a URL of a directory", hint=f"Give its path: /{rest}")
    near = [scheme] if is_known else difflib.get_close_matches(scheme, ("s3", "gs", "az"), n=1, cutoff=0.5)
    meant = f"Did you mean {near[0]}://{rest}?" if near and "@" not in text else _FORMS
    raise InvalidConfig(f"no store has a URL that begins with {text[: found.end()]}", hint=meant)


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
