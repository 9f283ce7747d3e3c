"""A bucket's store as another store in a bucket: the same objects under the same names, as of one moment.

    pin → manifests, then the ledger at one version → what they name → manifests, floors, ledger → duramen.json

Under the pin nothing of that is deleted. What is sealed lies in segments, so staged objects are copied only where a
partition's tail still needs them; floors say so in the copy. `duramen.json` comes last: before it there is no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from logstore.bucket.collecting import encode_floor
from logstore.bucket.commit_file import LOG, SUMMARY, SUMMARY_COPY, commit_key, encode_summary
from logstore.bucket.departing import BucketDepartures, bucket_departures
from logstore.bucket.freeing import Floor, is_free, sealed_sequence
from logstore.bucket.keys import floor_key, manifest_key, new_nonce, page_key, topic_key
from logstore.bucket.manifest import Manifest, encode_manifest, encode_page, paged
from logstore.bucket.rows import Kind
from logstore.errors import BackupRefused, ObjectMissing, SegmentsChanged
from logstore.objects.objects import Bytes, Objects
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_PART_BYTES = 8 << 20
_THREADS = 8


@dataclass(frozen=True, slots=True)
class BackedUp:
    """`partitions`: log start, high watermark and the bytes of batches of each."""

    partitions: tuple[tuple[TopicPartition, int, int, int], ...]
    ledger_version: int
    taken_ms: int


@dataclass(frozen=True, slots=True)
class _Copied:
    """An object as the parts of another; they can be read again, as a retry needs."""

    objects: Objects
    key: str
    size_bytes: int

    def __iter__(self) -> Iterator[Bytes]:
        for begin in range(0, self.size_bytes, _PART_BYTES):
            yield self.objects.ranges(self.key, [(begin, min(begin + _PART_BYTES, self.size_bytes))])[0]


def check_empty(target: Objects, url: str) -> None:
    """Raises BackupRefused unless nothing lies where a store would."""
    for prefix in ("ledger", "data", "logs", "manifest", "topics", "arriving"):
        for head in target.list(prefix):
            raise BackupRefused(
                "something lies there already",
                file=f"{url}/{head.key}",
                hint="Give another prefix, or delete what a backup that was not finished left there",
            )


def copy_objects(store: BucketStore, target: Objects, progress: Callable[[int], None]) -> BackedUp:
    """Everything but `duramen.json`. Raises BackupRefused, SegmentsChanged where the pin did not hold."""
    with bucket_departures(store, None, what="backup") as leaving:
        copier = _Copier(store.objects, target, progress)
        try:
            copier.copy(_named(store, leaving))
        except ObjectMissing as error:
            raise SegmentsChanged(
                "an object was deleted while it was copied", file=error.file, hint="Take the backup again"
            ) from error
        _write_manifests(store, target, leaving)
        _write_floors(target, leaving)
        copier.copy([topic_key(topic.name) for topic in leaving.topics], may_lack=True)
        _write_ledger(store, copier, target, leaving)
    return BackedUp(
        tuple(
            (
                topic.partition(number),
                leaving.looked[topic.id, number].view.log_start_offset,
                leaving.looked[topic.id, number].view.high_watermark,
                sum(segment.log_bytes for segment in leaving.looked[topic.id, number].view.segments),
            )
            for topic in leaving.topics
            for number in range(topic.partitions)
        ),
        leaving.view.version,
        leaving.taken_ms,
    )


@dataclass(frozen=True, slots=True)
class _Copier:
    source: Objects
    target: Objects
    progress: Callable[[int], None]

    def copy(self, keys: Sequence[str], *, may_lack: bool = False) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda key: self._copy(key, may_lack), keys))

    def _copy(self, key: str, may_lack: bool) -> None:
        try:
            size = self.source.head(key).size_bytes
            self.target.put(key, _Copied(self.source, key, size))
            self.progress(size)
        except ObjectMissing:
            if not may_lack:
                raise


def _floors(leaving: BucketDepartures) -> dict[str, Floor]:
    """What the copy needs no staged objects of: all that is sealed, and all of topics that have ended."""
    found = {}
    for topic_id in {row.topic_id for row in leaving.view.rows if row.topic_id}:
        rows = leaving.view.topic(topic_id)
        if rows[-1].kind is Kind.ENDED:
            sealed = rows[-1].sequence
        else:
            partitions = range(len(rows[-1].end_offsets))
            sealed = sealed_sequence(rows, [leaving.looked[topic_id, number].manifest for number in partitions])
        if sealed > 0:
            found[topic_id] = Floor(1, new_nonce(), sealed, leaving.taken_ms, sealed, sealed)
    return found


def _named(store: BucketStore, leaving: BucketDepartures) -> list[str]:
    """Segments, and the plans and staged objects of tails."""
    floors = _floors(leaving)
    keys = {segment.key for looked in leaving.looked.values() for segment in looked.view.segments}
    for plan in {row.plan for row in leaving.view.rows if row.plan is not None}:
        if not is_free(plan, floors, ended=()):
            keys.add(plan.key)
            keys.update(key for key, _, _ in store.shelf.plans.get(plan).files)
    return sorted(keys)


def _write_manifests(store: BucketStore, target: Objects, leaving: BucketDepartures) -> None:
    """As they were, without garbage: that was not copied."""
    for (topic_id, number), looked in leaving.looked.items():
        if looked.manifest is not None:
            _write_manifest(store, target, topic_id, number, replace(looked.manifest, garbage=(), pages=()))


def _write_manifest(store: BucketStore, target: Objects, topic_id: str, number: int, manifest: Manifest) -> None:
    manifest, pages = paged(manifest, lambda: page_key(topic_id, number, new_nonce()))
    for page in pages:
        target.put(page.key, (encode_page(page, limits=store.limits),))
    target.create(manifest_key(topic_id, number), encode_manifest(manifest, limits=store.limits))


def _write_floors(target: Objects, leaving: BucketDepartures) -> None:
    for topic_id, floor in _floors(leaving).items():
        target.create(floor_key(topic_id), encode_floor(floor))


def _write_ledger(store: BucketStore, copier: _Copier, target: Objects, leaving: BucketDepartures) -> None:
    """The commit files up to the version, for SQL, and its summary, which is what a store begins from."""
    last = commit_key(leaving.view.version)
    copier.copy([head.key for head in store.objects.list(LOG) if head.key <= last or not head.key.endswith(".json")])
    # Old commit files may be gone: recovery would need it.
    target.create(SUMMARY_COPY, encode_summary(leaving.view, new_nonce(), limits=store.limits))
    target.create(SUMMARY, encode_summary(leaving.view, new_nonce(), limits=store.limits))
