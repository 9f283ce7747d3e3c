"""A small race of conditional writes, which refuses an endpoint whose conditions do not hold.

Half of the servers that speak S3 ignore conditions, or check them and write in two steps. A store there works until two
writers meet, and then loses what one of them committed. So it is tried before anything is trusted to the endpoint: at
creation, and once a process. A race can be passed by luck; the rounds make that unlikely, not impossible.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from logstore.errors import (
    DuramenError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    RequestConflict,
    UnsuitableObjectStore,
)
from logstore.objects.objects import Objects, Version

_WRITERS = 6
_ROUNDS = 4
#: large enough that a server which checks first and writes then is caught in between
_BODY_BYTES = 16 << 10


def probe_objects(objects: Objects) -> None:
    """Raises UnsuitableObjectStore naming what does not hold. `objects` must not retry: a retry hides who won."""
    key = f"probe/{uuid.uuid4().hex}"
    try:
        _check_conditions(objects, key)
        with ThreadPoolExecutor(_WRITERS) as pool:
            for turn in range(_ROUNDS):
                _race(objects, pool, f"{key}-{turn}")
    finally:
        # Left over where it fails; that says nothing about conditions, and not every writer may delete.
        with contextlib.suppress(DuramenError):
            objects.delete([key, *(f"{key}-{turn}" for turn in range(_ROUNDS))])


def _check_conditions(objects: Objects, key: str) -> None:
    """What one writer alone can see."""
    first, second = _body("first"), _body("second")
    if _wins(lambda: objects.replace(key, first, Version('"0123456789abcdef"'))):
        raise _refused("replaces an object that is not there", key)
    seen = objects.create(key, first)
    if _wins(lambda: objects.create(key, second)):
        raise _refused("ignores If-None-Match: it replaced an object that was to be created", key)
    found, version = objects.get(key)
    if found != first:
        raise _refused("does not return what was written", key)
    newer = objects.replace(key, second, version)
    if _wins(lambda: objects.replace(key, first, seen)):
        raise _refused("ignores If-Match: it replaced an object that had changed", key)
    found, version = objects.get(key)
    if found != second or objects.head(key).size_bytes != len(second):
        raise _refused("returns an old object after it was replaced", key)
    if version != newer:
        raise _refused("gives one object two versions", key)


def _race(objects: Objects, pool: ThreadPoolExecutor, key: str) -> None:
    """Several writers create one object, then replace it: one of them wins, and its bytes are there."""
    _race_once(objects, pool, key, lambda body: objects.create(key, body))
    seen = objects.get(key)[1]
    _race_once(objects, pool, key, lambda body: objects.replace(key, body, seen))


def _race_once(objects: Objects, pool: ThreadPoolExecutor, key: str, write: Callable[[bytes], Version]) -> None:
    start = threading.Barrier(_WRITERS, timeout=60)

    def attempt(number: int) -> bytes | None:
        body = _body(str(number))
        start.wait()
        return body if _wins(lambda: write(body)) else None

    winners = [body for body in pool.map(attempt, range(_WRITERS)) if body is not None]
    if len(winners) > 1:
        raise _refused(f"lets {len(winners)} of {_WRITERS} conditional writes of one object win", key)
    try:
        found = objects.get(key)[0]
    except ObjectMissing:
        found = b""
    if winners and found != winners[0]:
        raise _refused("lets a conditional write win and has other bytes afterwards", key)
    if not winners:
        # Everybody was told to try again, which is allowed. Alone, one must get through.
        body = _body("alone")
        if not found and not _wins(lambda: write(body)):
            raise _refused("refuses a conditional write whose condition holds", key)


def _wins(write: Callable[[], Version]) -> bool:
    try:
        write()
    except (ObjectExists, ObjectChanged, RequestConflict):
        return False
    return True


def _body(name: str) -> bytes:
    return f"{name} {uuid.uuid4().hex}\n".encode().ljust(_BODY_BYTES, b".")


def _refused(fault: str, key: str) -> UnsuitableObjectStore:
    return UnsuitableObjectStore(
        f"the endpoint {fault}",
        file=key,
        hint="A store needs conditional writes (If-None-Match, If-Match) that hold when writers race. Use S3, GCS, "
        "Azure Blob Storage or a server whose conditional writes are atomic",
    )
