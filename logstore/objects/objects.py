"""`Objects`: all that a store in a bucket asks of object storage.

Two kinds of keys exist. *Write-once* keys carry a nonce in their name and are put once, never replaced. All other keys
change only by compare-and-set: `create` (nothing may be there) and `replace` (exactly the version that was seen may be
there). There is no rename, no append and no lock.

Implementations are stacked: `RemoteObjects` and `MemoryObjects` answer each call with one request, and say when an
answer was lost; `RetryingObjects` on top of one of them retries and settles doubts; `CountedObjects` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

#: anything with the buffer protocol; Python has a name for it from 3.12 on
Bytes: TypeAlias = bytes | bytearray | memoryview

KEY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Version:
    """Which content of a key was seen. Opaque: an entity tag on S3 and Azure, a generation on GCS.

    A tag may come from the content alone, so whoever compares versions puts a nonce into what is written.
    """

    e_tag: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What the server says of an object without its content. The time is the server's."""

    key: str
    size_bytes: int
    modified_ms: int
    version: Version


class Objects(Protocol):
    """Every call may raise ObjectStoreUnavailable, ObjectStoreThrottled, AccessDenied and UnknownBucket.

    A write that raises one of the first two has `may_be_applied`: whether it may happen still, or have happened.
    """

    def create(self, key: str, data: bytes) -> Version:
        """Write an object where none is. Raises ObjectExists, RequestConflict."""

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        """Write an object where `seen` is. Raises ObjectChanged (also where nothing is), RequestConflict."""

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        """Write an object under a write-once key. `parts` may be gone through more than once. Raises RequestConflict.

        Nothing is visible before all of it is. An error of `parts` itself leaves nothing and is passed on.
        """

    def get(self, key: str) -> tuple[bytes, Version]:
        """Raises ObjectMissing; CorruptState for one that is much larger than any that is read at once."""

    def head(self, key: str) -> Head:
        """Raises ObjectMissing."""

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        """The bytes of each span (begin, end). Raises ObjectMissing; ObjectTruncated where the object is shorter."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a key that is not there is none to remove."""

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        """All objects below `prefix/` with keys above `after`, in order. For sweeps: nothing else may depend on it."""


def check_key(key: str) -> str:
    """`key` itself. Raises ValueError for one that some object storage would change, or take for another."""
    segments = key.split("/")
    if not key.isascii() or not key.isprintable() or any(each in ("", ".", "..") for each in segments):
        raise ValueError(f"{key!r} is not a key: segments of printable ASCII, with one slash between them")
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"a key of {len(key)} bytes; object storage takes {KEY_BYTES_MAX}")
    return key
