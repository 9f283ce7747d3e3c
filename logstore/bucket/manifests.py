"""Reading and replacing manifests: one compare-and-set each, and the decision anew whenever somebody else was first.

A change is a function of the manifest just read (see `replacing`). Who loses deletes nothing: where the manifest that
is in force names what was to be named, the loser has won after all; else the function is asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from logstore.bucket.keys import manifest_key, new_nonce, page_key
from logstore.bucket.manifest import Manifest, decode_manifest, encode_manifest, encode_page, free_pages, paged
from logstore.bucket.replacing import check_successor, has_won
from logstore.errors import ObjectChanged, ObjectExists, ObjectMissing, SegmentsChanged
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.objects.objects import Objects, Version

#: (the manifest as read, the time after that, a nonce): the next one, or None where nothing is to be changed
Change = Callable[[Manifest | None, int, str], Manifest | None]
_TRIES_MAX = 100
_PAGES_KEPT = 64


@dataclass(frozen=True, slots=True)
class SeenManifest:
    """A manifest as it was read; None: there is none yet."""

    manifest: Manifest | None
    version: Version | None


class Manifests:
    """Of all partitions of a store. Safe for threads, as far as its objects are."""

    def __init__(self, objects: Objects, now_ms: Callable[[], int], *, limits: Limits = DEFAULT_LIMITS) -> None:
        self._objects = objects
        self._now_ms = now_ms
        self._limits = limits
        self._pages: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def read(self, topic_id: str, partition: int) -> SeenManifest:
        """Raises CorruptState, StoreVersionError."""
        key = manifest_key(topic_id, partition)
        while True:
            try:
                data, version = self._objects.get(key)
            except ObjectMissing:
                return SeenManifest(None, None)
            try:
                return SeenManifest(decode_manifest(data, key, self._page, limits=self._limits), version)
            except ObjectMissing:  # a page that is gone: the manifest is an old one, or the store is damaged
                if self._objects.get(key)[1] == version:
                    raise

    def _page(self, key: str) -> bytes:
        data = self._pages.get(key)
        if data is None:
            data = self._objects.get(key)[0]
            with self._lock:
                while len(self._pages) >= _PAGES_KEPT:
                    del self._pages[next(iter(self._pages))]
                self._pages[key] = data
        return data

    def change(
        self,
        topic_id: str,
        partition: int,
        change: Change,
        *,
        outputs: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Manifest | None, bool]:
        """The manifest that is in force then, and whether this changed it.

        `outputs` are the objects that the change names, `check` is asked after each reading and before they are named.
        Raises what `change` and `check` raise, and SegmentsChanged when others were first too often.
        """
        for _ in range(_TRIES_MAX):
            seen = self.read(topic_id, partition)
            if outputs and has_won(seen.manifest, outputs):
                return seen.manifest, True
            check()
            nonce = new_nonce()
            following = change(seen.manifest, self._now_ms(), nonce)
            if following is None:
                return seen.manifest, False
            check_successor(seen.manifest, following)
            following, pages = paged(following, lambda: page_key(topic_id, partition, new_nonce()))
            following = free_pages(seen.manifest, following)
            for page in pages:
                self._objects.put(page.key, (encode_page(page, limits=self._limits),))
            data = encode_manifest(following, limits=self._limits)
            key = manifest_key(topic_id, partition)
            try:
                if seen.version is None:
                    self._objects.create(key, data)
                else:
                    self._objects.replace(key, data, seen.version)
                return following, True
            except (ObjectExists, ObjectChanged):
                continue
        raise SegmentsChanged(f"others replaced the manifest of partition {partition} {_TRIES_MAX} times in a row")

    def force(self, topic_id: str, partition: int, manifest: Manifest) -> None:
        """Write a manifest in the place of one that cannot be read, or of none. Raises SegmentsChanged when others
        wrote it meanwhile.
        """
        following, pages = paged(manifest, lambda: page_key(topic_id, partition, new_nonce()))
        for page in pages:
            self._objects.put(page.key, (encode_page(page, limits=self._limits),))
        overwrite(self._objects, manifest_key(topic_id, partition), encode_manifest(following, limits=self._limits))

    def reading(self, topic_id: str, partition: int) -> Callable[[], Manifest | None]:
        """Reads the manifest whenever it is called."""
        return partial(self._read_only, topic_id, partition)

    def _read_only(self, topic_id: str, partition: int) -> Manifest | None:
        return self.read(topic_id, partition).manifest


def overwrite(objects: Objects, key: str, data: bytes) -> None:
    """Write an object whatever is there, for repair. Raises SegmentsChanged when others wrote it meanwhile."""
    try:
        try:
            _, version = objects.get(key)
        except ObjectMissing:
            objects.create(key, data)
        else:
            objects.replace(key, data, version)
    except (ObjectExists, ObjectChanged):
        raise SegmentsChanged("others wrote the object meanwhile", file=key) from None
