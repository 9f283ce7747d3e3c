"""Counts requests by kind: what a batch, a poll or a day costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from logstore.objects.objects import Bytes, Head, Objects, Version


class CountedObjects:
    """Implements `Objects`; a failed request counts like any other. Lies below retries, to see each attempt."""

    def __init__(self, inner: Objects) -> None:
        self._inner = inner
        self.requests: Counter[str] = Counter()

    def create(self, key: str, data: bytes) -> Version:
        self.requests["create"] += 1
        return self._inner.create(key, data)

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        self.requests["replace"] += 1
        return self._inner.replace(key, data, seen)

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        self.requests["put"] += 1
        return self._inner.put(key, parts)

    def get(self, key: str) -> tuple[bytes, Version]:
        self.requests["get"] += 1
        return self._inner.get(key)

    def head(self, key: str) -> Head:
        self.requests["head"] += 1
        return self._inner.head(key)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        self.requests["ranges"] += 1
        return self._inner.ranges(key, spans)

    def delete(self, keys: Sequence[str]) -> None:
        self.requests["delete"] += 1
        self._inner.delete(keys)

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        self.requests["list"] += 1
        return self._inner.list(prefix, after)
