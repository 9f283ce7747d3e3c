"""Object storage that misbehaves at chosen calls: answers that get lost, writes that land late, errors of every kind.

`FaultyObjects` lies above one that answers honestly, where the network would be. Faults are given by the number of
the call, so that a test can go through every call of a protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from logstore.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreThrottled,
    ObjectStoreUnavailable,
    ObjectTruncated,
    RequestConflict,
)
from logstore.objects.objects import Bytes, Head, Objects, Version

_T = TypeVar("_T")


class Fault(Enum):
    BEFORE = "fails before it is applied"
    AFTER = "is applied, and the answer is lost"
    LATE = "is applied some calls later, and the answer is lost at once"
    TWICE = "is sent twice, and the second answer arrives"
    MISSING = "404 although it is there"
    CONFLICT = "409 although nothing else happens"
    CHANGED = "412 although nothing changed"
    BUSY = "503"
    SHORT = "a range is cut short"
    STALE = "a listing from before the last write"


WRITES = (
    Fault.BEFORE, Fault.AFTER, Fault.LATE, Fault.TWICE, Fault.CONFLICT, Fault.CHANGED, Fault.BUSY,
)  # fmt: skip
READS = (Fault.BEFORE, Fault.BUSY, Fault.SHORT, Fault.MISSING)
#: each way in which a call can fail; a listing only where something lists
EVERY = tuple(dict.fromkeys((*WRITES, *READS)))


class FaultyObjects:
    """Implements `Objects`. `faults`: what happens to the call of that number, counted from 0."""

    def __init__(self, inner: Objects, faults: Mapping[int, Fault] | None = None, *, late_calls: int = 2) -> None:
        self._inner = inner
        self.faults = dict(faults or {})
        self._late_calls = late_calls
        self._late: list[tuple[int, Callable[[], object]]] = []
        #: name and key of every call, in order
        self.calls: list[tuple[str, str]] = []

    def land(self) -> None:
        """All writes that are still under way arrive."""
        due, self._late = self._late, []
        for _, write in due:
            _drop_answer(write)

    def create(self, key: str, data: bytes) -> Version:
        return self._write("create", key, lambda: self._inner.create(key, data), ObjectExists)

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        return self._write("replace", key, lambda: self._inner.replace(key, data, seen), ObjectChanged)

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        whole = [bytes(part) for part in parts]
        return self._write("put", key, lambda: self._inner.put(key, whole), RequestConflict)

    def get(self, key: str) -> tuple[bytes, Version]:
        return self._read("get", key, lambda: self._inner.get(key))

    def head(self, key: str) -> Head:
        return self._read("head", key, lambda: self._inner.head(key))

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        return self._read("ranges", key, lambda: self._inner.ranges(key, spans))

    def delete(self, keys: Sequence[str]) -> None:
        self._write("delete", keys[0] if keys else "", lambda: self._inner.delete(keys), RequestConflict)

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        fault = self._begin("list", prefix)
        if fault in (Fault.BEFORE, Fault.BUSY):
            raise _failed(fault, writes=False)
        found = [*self._inner.list(prefix, after)]
        if fault is Fault.STALE:
            return iter(sorted(found, key=lambda head: head.modified_ms)[:-1])
        return iter(found)

    def _begin(self, name: str, key: str) -> Fault | None:
        number = len(self.calls)
        self.calls.append((name, key))
        due = [write for at, write in self._late if at <= number]
        self._late = [each for each in self._late if each[0] > number]
        for write in due:
            _drop_answer(write)
        return self.faults.get(number)

    def _write(self, name: str, key: str, apply: Callable[[], _T], refused: type[Exception]) -> _T:
        fault = self._begin(name, key)
        if fault is Fault.AFTER:
            _drop_answer(apply)
        elif fault is Fault.LATE:
            self._late.append((len(self.calls) + self._late_calls, apply))
        elif fault is Fault.TWICE:
            _drop_answer(apply)
            return apply()
        elif fault is Fault.CONFLICT:
            raise RequestConflict("409", file=key)
        elif fault is Fault.CHANGED:
            raise refused("412", file=key)
        elif fault not in (Fault.BEFORE, Fault.BUSY):
            return apply()
        raise _failed(fault, writes=True)

    def _read(self, name: str, key: str, answer: Callable[[], _T]) -> _T:
        fault = self._begin(name, key)
        if fault in (Fault.BEFORE, Fault.BUSY):
            raise _failed(fault, writes=False)
        if fault is Fault.MISSING:
            raise ObjectMissing("404", file=key)
        if fault is Fault.SHORT and name == "ranges":
            raise ObjectTruncated("short", file=key)
        return answer()


def _drop_answer(write: Callable[[], object]) -> None:
    with contextlib.suppress(ObjectExists, ObjectChanged):
        write()


def _failed(fault: Fault, *, writes: bool) -> Exception:
    if fault is Fault.BUSY:
        return ObjectStoreThrottled("503", may_be_applied=False)
    # Whoever sent the request cannot tell these three apart.
    return ObjectStoreUnavailable(fault.value, may_be_applied=writes)
