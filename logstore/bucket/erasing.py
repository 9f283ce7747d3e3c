"""Where in a bucket a key may still be: every object that lies there, whoever names it, and when it goes.

Reads every byte of the topic's objects, and of staged objects that no commit names, since they may be its. Changes
nothing. Copies that object storage keeps by itself cannot be asked for: `UNSEEN` says which.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from logstore.bucket.examining import read_floor
from logstore.bucket.files import BlockCache, CacheLimits, ObjectFile
from logstore.bucket.freeing import GRACE_MS, ORPHAN_MS, Floor
from logstore.bucket.keys import is_swept
from logstore.bucket.manifest import Manifest, Segment
from logstore.bucket.reader import Looked, look
from logstore.bucket.rows import Kind, TopicRow
from logstore.bucket.segment_object import object_bytes, part_spans
from logstore.bucket.tail import TailCommit, read_placed
from logstore.cleaner.filter import ABORTED, TOMBSTONE
from logstore.commit.staged_reader import StagedReader
from logstore.compaction.erasure import DELETED, LEFTOVER, QUARANTINED, SEGMENT, STAGING, Erasure, Place, leaves
from logstore.compaction.key_scan import Found, KeyScan
from logstore.compaction.planning import PlanOptions, plan_partition
from logstore.errors import DuramenError, ObjectMissing, SegmentsChanged
from logstore.files import OS_FILES
from logstore.ledger.rows import DONE
from logstore.limits import MIB
from logstore.objects.objects import Head
from logstore.records.partitioner import partition_for_key
from logstore.restore.lookup import latest_in_partition
from logstore.segment.batches import Chunk, read_batches
from logstore.segment.names import FileKind
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

#: what object storage may keep of what was deleted, and this cannot see
UNSEEN = (
    "older versions of objects, where the bucket keeps versions",
    "replicas of the bucket, and its backups",
    "caches and local copies of whoever read it",
)
_LOOKS_MAX = 20
_PART_BYTES = 8 * MIB
_CACHE = CacheLimits(memory_bytes=32 * MIB)
_GRACE_TEXT = f"garbage: deleted {GRACE_MS // 3_600_000} hours after it was noted, and not while a pin is live"
_FREED_TEXT = "sealed: freed a day after that was noted"
_ORPHAN_TEXT = f"no commit names it: swept once it is {ORPHAN_MS // 86_400_000} days old"


def find_keys_in_bucket(
    store: BucketStore,
    topic: Topic,
    keys: Sequence[bytes],
    *,
    now_ms: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Erasure]:
    """Look for the keys in everything the bucket has of the topic. Raises UnknownTopic, CorruptState, LedgerError."""
    search = _Search(store, topic, keys, now_ms, progress)
    for number in range(topic.partitions):
        search.partition(number)
    search.level_zero()
    return search.result()


class _Search:
    def __init__(
        self, store: BucketStore, topic: Topic, keys: Sequence[bytes], now_ms: int, progress: Callable[[int], None]
    ) -> None:
        self._store = store
        self._topic = topic
        self._keys = keys
        self._scan = KeyScan(keys, store.limits, progress)
        self._now_ms = now_ms
        self._found = [Erasure(key) for key in keys]
        self._sealed: dict[int, int] = {}

    # --- sealed segments ---------------------------------------------------------------------------------------------

    def partition(self, number: int) -> None:
        """Every object of the partition; again from the start when its list changed meanwhile."""
        for _ in range(_LOOKS_MAX):
            looked = look(self._store.source(self._topic, number))
            listed = {segment.key: segment for segment in looked.view.segments}
            heads = list(self._store.objects.list(f"logs/{self._topic.id}/{number}"))
            try:
                found = {head.key: self._segment(head, listed.get(head.key)) for head in heads}
            except ObjectMissing:
                continue  # garbage that went
            after = look(self._store.source(self._topic, number))
            if after.view.segments == looked.view.segments:
                self._judge(number, looked, {head.key: head for head in heads}, found)
                return
        raise SegmentsChanged(
            "segments were replaced each time they were looked at", partition=self._topic.partition(number)
        )

    def _segment(self, head: Head, listed: Segment | None) -> Found:
        """Of an object that nothing lists nobody knows where its batches end: what is no batch then ends them."""
        cache = BlockCache(self._store.objects, limits=_CACHE)
        end = part_spans(listed)[FileKind.LOG][1] if listed is not None else head.size_bytes
        size = object_bytes(listed) if listed is not None else head.size_bytes
        try:
            file = ObjectFile(cache, head.key, size, (0, end), head.key)
            found = self._scan.chunks(read_batches(file, 0, end, limits=self._store.limits, verify_crc=False))
        except FileNotFoundError:
            raise ObjectMissing("the object is gone", file=head.key) from None
        if listed is None and found.last_offset >= 0:
            found.unreadable = None
        return found

    def _judge(self, number: int, looked: Looked, heads: dict[str, Head], found: dict[str, Found]) -> None:
        store, topic, state = self._store, self._topic, looked.state()
        self._sealed[number] = looked.view.sealed_offset
        plan = plan_partition(store, topic, number, PlanOptions(self._now_ms))
        listed = {segment.key for segment in looked.view.segments}
        garbage = _garbage(looked.manifest)
        latest = [
            -1 if (record := latest_in_partition(store, topic, number, key)) is None else record.offset
            for key in self._keys
        ]
        for key, each in found.items():
            if key in listed:
                for at in range(len(self._keys)):
                    hits = [hit for hit in each.hits if hit.key == at]
                    if hits:
                        last = max(hits, key=lambda hit: (hit.offset == latest[at], hit.offset))
                        goes, goes_ms = leaves(
                            store.log_config(topic), plan, state, last, last.offset == latest[at], False, self._now_ms
                        )
                        self._place(SEGMENT, key, number, at, each, goes, goes_ms)
                self._unreadable(SEGMENT, key, number, each, "see `duramen verify`")
            elif key in garbage:
                since = garbage[key]
                self._add(DELETED, key, number, each, _GRACE_TEXT, None if since is None else since + GRACE_MS)
            else:
                self._add(LEFTOVER, key, number, each, _ORPHAN_TEXT, heads[key].modified_ms + ORPHAN_MS)
        for head in store.objects.list(f"quarantine/{topic.id}/{number}"):
            cache, size = BlockCache(store.objects, limits=_CACHE), head.size_bytes
            data = ObjectFile(cache, head.key, size, (0, size), head.key)
            try:
                scan = self._scan.chunks(read_batches(data, 0, size, limits=store.limits, verify_crc=False))
            except FileNotFoundError:
                continue  # somebody looked at it and deleted it
            self._add(QUARANTINED, head.key, number, scan, "never by itself: look at it, then delete the object")

    # --- staged objects ----------------------------------------------------------------------------------------------

    def level_zero(self) -> None:
        """The tail, what is sealed and not freed yet, and staged objects that no row names."""
        store, topic = self._store, self._topic
        floor = read_floor(store.objects, topic.id) or Floor()
        view = store.ledger.refresh()
        placed: set[str] = set()
        for row in view.topic(topic.id):
            if row.kind is Kind.BATCH and row.plan is not None:
                self._commit(row, floor)
                placed.add(row.plan.key)
        known: set[str] = set()
        #: sealed everywhere and not freed, by this topic or another one; the ledger has forgotten their offsets
        sealed: set[str] = set()
        for row in view.rows:
            if row.plan is None:
                continue
            try:
                files = {key for key, _, _ in store.shelf.plans.get(row.plan).files}
            except ObjectMissing:
                continue  # its files went before it
            known |= files
            if row.plan.key not in placed and any(topic_id == topic.id for topic_id, _ in row.plan.topics):
                sealed |= files
        freed_ms = floor.sealed_since_ms + GRACE_MS
        for head in store.objects.list("data"):
            if not head.key.endswith(".batches") or not is_swept(head.key):
                continue
            if head.key in sealed:
                self._staged(head, _FREED_TEXT, freed_ms)
            elif head.key not in known:
                self._staged(head, _ORPHAN_TEXT, head.modified_ms + ORPHAN_MS)

    def _commit(self, row: TopicRow, floor: Floor) -> None:
        assert row.plan is not None
        store, cache = self._store, BlockCache(self._store.objects, limits=_CACHE)
        freed_ms = floor.sealed_since_ms + GRACE_MS if floor.sealed >= row.sequence else None
        try:
            plan = store.shelf.plans.get(row.plan)
        except ObjectMissing:
            return
        for number in range(len(row.end_offsets)):
            commit = TailCommit.of(plan, row, number, 0)
            is_tail = row.end_offsets[number] > self._sealed.get(number, 0)
            goes = "with the compaction behind its seal" if is_tail else _FREED_TEXT
            for piece, base_offset in commit.pieces():
                key = plan.files[piece.file][0]
                try:
                    chunk = read_placed(cache, commit, piece, base_offset)
                except ObjectMissing:
                    continue
                except DuramenError as error:
                    self._unreadable(STAGING, key, number, Found(unreadable=str(error)), goes)
                    continue
                self._add(STAGING, key, number, self._one(chunk), goes, None if is_tail else freed_ms)

    def _one(self, chunk: Chunk) -> Found:
        return self._scan.chunks(iter([chunk]))

    def _staged(self, head: Head, goes: str, goes_ms: int) -> None:
        """A staged object by its own directory: its offsets are none yet, or nobody knows them any more."""
        with tempfile.TemporaryDirectory(prefix="duramen-") as folder:
            path = os.path.join(folder, "batches")
            try:
                with open(path, "wb") as file:
                    for begin in range(0, head.size_bytes, _PART_BYTES):
                        span = begin, min(begin + _PART_BYTES, head.size_bytes)
                        file.write(self._store.objects.ranges(head.key, [span])[0])
                reader = StagedReader(OS_FILES, path, topic_id=self._topic.id, limits=self._store.limits)
            except ObjectMissing:
                return
            except DuramenError as error:
                return self._unreadable(STAGING, head.key, None, Found(unreadable=str(error)), goes)
            try:
                for number in range(self._topic.partitions):
                    found = self._scan.chunks(reader.chunks(number))
                    self._add(STAGING, head.key, number, found, goes, goes_ms)
            finally:
                reader.release()

    # --- the answer --------------------------------------------------------------------------------------------------

    def _add(
        self, kind: str, key: str, number: int | None, found: Found, goes: str, goes_ms: int | None = None
    ) -> None:
        for at in range(len(self._keys)):
            if any(hit.key == at for hit in found.hits):
                self._place(kind, key, number, at, found, goes, goes_ms)
        self._unreadable(kind, key, number, found, goes, goes_ms)

    def _place(
        self, kind: str, key: str, number: int | None, at: int, found: Found, goes: str, goes_ms: int | None
    ) -> None:
        hits = [hit for hit in found.hits if hit.key == at]
        tombstones = sum(hit.tombstone for hit in hits)
        counts = ((len(hits) - tombstones, "value"), (tombstones, "tombstone"))
        holds = ", ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counts if count)
        offsets = (min(hit.offset for hit in hits), max(hit.offset for hit in hits))
        self._found[at].places.append(Place(kind, key, number, len(hits), offsets, holds, goes, goes_ms))

    def _unreadable(
        self, kind: str, key: str, number: int | None, found: Found, goes: str, goes_ms: int | None = None
    ) -> None:
        if found.unreadable is not None:
            holds = f"cannot be read, so it may hold it: {found.unreadable}"
            for erasure in self._found:
                erasure.places.append(Place(kind, key, number, 0, None, holds, goes, goes_ms, unreadable=True))

    def result(self) -> list[Erasure]:
        topic = self._topic
        for erasure in self._found:
            if not erasure.erased:
                continue
            every = range(topic.partitions)
            numbers = [partition_for_key(erasure.key, topic.partitions)] if topic.keyed else list(every)
            for number in numbers:
                looked = look(self._store.source(topic, number))
                for run in looked.manifest.receipts.runs if looked.manifest else ():
                    if run.result == DONE and (run.removed.get(TOMBSTONE) or run.removed.get(ABORTED)):
                        erasure.removed_by = replace(run, partition=number)
                if looked.view.log_start_offset > 0:
                    erasure.log_starts[number] = looked.view.log_start_offset
        return self._found


def _garbage(manifest: Manifest | None) -> dict[str, int | None]:
    return {each.key: each.since_ms for each in manifest.garbage} if manifest is not None else {}
