"""Objects in the memory of one process, with the rules of the real ones. Safe for threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.errors import ObjectChanged, ObjectExists, ObjectMissing, ObjectTruncated
from logstore.objects.objects import Bytes, Head, Version, check_key


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    modified_ms: int
    version: Version


class MemoryObjects:
    """Implements `Objects`. A listing shows the moment at which it began."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._stored: dict[str, _Stored] = {}

    def create(self, key: str, data: bytes) -> Version:
        with self._lock:
            if check_key(key) in self._stored:
                raise ObjectExists("an object is already there", file=key)
            return self._write(key, data)

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        with self._lock:
            stored = self._stored.get(check_key(key))
            if stored is None or stored.version != seen:
                raise ObjectChanged("the object is not the one that was seen", file=key)
            return self._write(key, data)

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        data = b"".join(parts)
        with self._lock:
            return self._write(check_key(key), data)

    def get(self, key: str) -> tuple[bytes, Version]:
        stored = self._find(key)
        return stored.data, stored.version

    def head(self, key: str) -> Head:
        return _head(key, self._find(key))

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        data = self._find(key).data
        found: list[Bytes] = [data[begin:end] for begin, end in spans]
        for (begin, end), each in zip(spans, found, strict=True):
            if len(each) != end - begin:
                raise ObjectTruncated(f"the object has {len(data)} bytes, not {end}", file=key)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._stored.pop(check_key(key), None)

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        with self._lock:
            found = sorted(item for item in self._stored.items() if item[0].startswith(check_key(prefix) + "/"))
        return (_head(key, stored) for key, stored in found if key > after)

    def _find(self, key: str) -> _Stored:
        with self._lock:
            stored = self._stored.get(check_key(key))
        if stored is None:
            raise ObjectMissing("no such object", file=key)
        return stored

    def _write(self, key: str, data: bytes) -> Version:
        version = Version(f'"{next(self._numbers)}"')
        self._stored[key] = _Stored(bytes(data), self._clock.now_ms(), version)
        return version


def _head(key: str, stored: _Stored) -> Head:
    return Head(key, len(stored.data), stored.modified_ms, stored.version)
