"""A small race of conditional writes, which refuses an endpoint whose conditions do not hold.

Half of the servers that speak S3 ignore conditions, or check them and write in two steps. A store there works until two
writers meet, and then loses what one of them committed. So it is tried before anything is trusted to the endpoint: at
creation, and once a process. A race can be passed by luck, so there are many; and on S3 some writes stop halfway while
another one goes through, which a server that looks at the condition first does not survive.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from logstore.errors import (
    DuramenError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    RequestConflict,
    UnsuitableObjectStore,
)
from logstore.objects.held import put_held
from logstore.objects.objects import Objects, Version
from logstore.objects.remote import RemoteObjects

#: More than two get into each other's way more than they meet: by requests, pairs find the most.
_WRITERS = 2
_ROUNDS = 4
_REPLACES = 3
#: large enough that a server which checks first and writes then is caught in between
_BODY_BYTES = 64 << 10
#: so long a server may take to look at a condition, and so long it may hold others up until a write is whole
_LOOK_S, _HELD_S_MAX = 0.03, 1.0
_REPLACED = "lets a conditional write win and has other bytes afterwards"


def probe_objects(objects: Objects) -> None:
    """Raises UnsuitableObjectStore naming what does not hold. `objects` must not retry: a retry hides who won."""
    key = f"probe/{uuid.uuid4().hex}"
    written = [key]
    try:
        _check_conditions(objects, key)
        with ThreadPoolExecutor(_WRITERS) as pool:
            remote = objects if isinstance(objects, RemoteObjects) else None
            for turn in range(_ROUNDS):
                written.append(f"{key}-{turn}")
                _race(objects, pool, written[-1])
                if remote is not None:
                    written.append(f"{key}-{turn}-held")
                    remote = remote if _overtake(remote, pool, written[-1]) else None
    finally:
        # Left over where it fails; that says nothing about conditions, and not every writer may delete.
        with contextlib.suppress(DuramenError):
            objects.delete(written)


def _check_conditions(objects: Objects, key: str) -> None:
    """What one writer alone can see."""
    first, second = _body("first"), _body("second")
    if _written(lambda: objects.replace(key, first, Version('"0123456789abcdef"'))) is not None:
        raise _refused("replaces an object that is not there", key)
    seen = objects.create(key, first)
    if _written(lambda: objects.create(key, second)) is not None:
        raise _refused("ignores If-None-Match: it replaced an object that was to be created", key)
    found, version = objects.get(key)
    if found != first:
        raise _refused("does not return what was written", key)
    newer = objects.replace(key, second, version)
    if _written(lambda: objects.replace(key, first, seen)) is not None:
        raise _refused("ignores If-Match: it replaced an object that had changed", key)
    found, version = objects.get(key)
    if found != second or objects.head(key).size_bytes != len(second):
        raise _refused("returns an old object after it was replaced", key)
    if version != newer:
        raise _refused("gives one object two versions", key)


def _race(objects: Objects, pool: ThreadPoolExecutor, key: str) -> None:
    """Two writers create one object, then replace it again and again: one of them wins, and its bytes are there."""
    body, seen = _race_once(objects, pool, key, lambda body: objects.create(key, body))
    for _ in range(_REPLACES):
        # Who won last must still be there: else this round has no winner, and what is there is looked at.
        replace = partial(_replace, objects, key, seen)
        body, seen = _race_once(objects, pool, key, replace, body)
    if objects.get(key)[0] != body:
        raise _refused(_REPLACED, key)


def _replace(objects: Objects, key: str, seen: Version, body: bytes) -> Version:
    return objects.replace(key, body, seen)


def _race_once(
    objects: Objects,
    pool: ThreadPoolExecutor,
    key: str,
    write: Callable[[bytes], Version],
    before: bytes | None = None,
) -> tuple[bytes, Version]:
    """Returns what is there afterwards."""
    start = threading.Barrier(_WRITERS, timeout=60)

    def attempt(number: int) -> tuple[bytes, Version] | None:
        body = _body(str(number))
        start.wait()
        version = _written(lambda: write(body))
        return None if version is None else (body, version)

    winners = [winner for winner in pool.map(attempt, range(_WRITERS)) if winner is not None]
    if len(winners) > 1:
        raise _refused(f"lets {len(winners)} of {_WRITERS} conditional writes of one object win", key)
    if winners:
        return winners[0]
    # Everybody was told to try again, which is allowed. Alone, one must get through.
    found = _found(objects, key)
    if found != before:
        raise _refused(_REPLACED, key)
    body = _body("alone")
    version = _written(lambda: write(body))
    if version is None:
        raise _refused("refuses a conditional write whose condition holds", key)
    return body, version


def _overtake(objects: RemoteObjects, pool: ThreadPoolExecutor, key: str) -> bool:
    """While a write has come halfway, another one with the same condition is made: one of them wins at most.

    Returns whether that could be tried.
    """
    if not _overtake_once(objects, pool, key, {"If-None-Match": "*"}, lambda body: objects.create(key, body)):
        return False
    try:
        seen = objects.get(key)[1]
    except ObjectMissing:  # both were told to try again, which is allowed
        return True
    return _overtake_once(objects, pool, key, {"If-Match": seen.e_tag or ""}, partial(_replace, objects, key, seen))


def _overtake_once(
    objects: RemoteObjects,
    pool: ThreadPoolExecutor,
    key: str,
    condition: dict[str, str],
    write: Callable[[bytes], Version],
) -> bool:
    overtaking: list[Future[Version | None]] = []

    def overtake() -> None:
        time.sleep(_LOOK_S)
        overtaking.append(pool.submit(_written, lambda: write(_body("overtaking"))))
        # A server may let it wait until the first one is whole.
        wait(overtaking, timeout=_HELD_S_MAX)

    is_taken = put_held(objects, key, condition, _body("held"), overtake)
    wins = [other.result() is not None for other in overtaking]
    if is_taken and any(wins):
        raise _refused("looks at a condition before it has all of the object, and lets two writes win", key)
    return is_taken is not None


def _found(objects: Objects, key: str) -> bytes | None:
    try:
        return objects.get(key)[0]
    except ObjectMissing:
        return None


def _written(write: Callable[[], Version]) -> Version | None:
    """None where the condition did not hold."""
    try:
        return write()
    except (ObjectExists, ObjectChanged, RequestConflict):
        return None


def _body(name: str) -> bytes:
    return f"{name} {uuid.uuid4().hex}\n".encode().ljust(_BODY_BYTES, b".")


def _refused(fault: str, key: str) -> UnsuitableObjectStore:
    return UnsuitableObjectStore(
        f"the endpoint {fault}",
        file=key,
        hint="A store needs conditional writes (If-None-Match, If-Match) that hold when writers race. Use S3, GCS, "
        "Azure Blob Storage or a server whose conditional writes are atomic",
    )
