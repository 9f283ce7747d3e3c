"""Deleting what nobody can need any more: garbage of manifests, staged objects that are sealed, and orphans.

Every decision is one of `freeing`; here is the order of requests. A time is asked for after what it judges was read,
pins are listed after that, and objects go before what names them forgets them. Each step can be cut anywhere: the next
run finds the same names and goes on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from logstore.bucket.arriving import sweep_arrivals
from logstore.bucket.commit_file import LOG, SUMMARY, SUMMARY_COPY, Entry, commit_key, decode_summary
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import (
    GRACE_MS,
    ORPHAN_MS,
    Floor,
    check_age,
    cleared_floor,
    collectable,
    free_plans,
    named,
    orphan_candidates,
    orphans,
    over_long_ago,
    raise_floor,
    sealed_sequence,
)
from logstore.bucket.judging import check_clock
from logstore.bucket.keys import LOG_FLOOR, MANIFESTS, floor_key, is_swept, new_nonce, partition_of
from logstore.bucket.manifest import Manifest
from logstore.bucket.manifests import Manifests
from logstore.bucket.pins import read_pins
from logstore.bucket.replacing import collected, fence_partition
from logstore.bucket.rows import Kind, LedgerView, PlanRef
from logstore.directory.sealed import seal, unseal, whole_number
from logstore.errors import CommitConflict, LedgerError, ObjectChanged, ObjectExists, ObjectMissing, SegmentsChanged
from logstore.objects.objects import Version

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_TRIES_MAX = 20
_DELETED_AT_ONCE = 500
_FLOOR_VERSION = 1
_SWEPT = ("data", "logs", "pages")


@dataclass(frozen=True, slots=True)
class Ages:
    """How long things wait before they go."""

    grace_ms: int = GRACE_MS
    orphan_ms: int = ORPHAN_MS


#: (the floor as read, a nonce): the next one, or None where nothing changes
FloorChange = Callable[[Floor | None, str], Floor | None]


class Collector:
    """Goes by the server's time: what is deleted is judged by ages that the server noted."""

    def __init__(self, store: BucketStore, ages: Ages | None = None) -> None:
        """Asks the server for the time. Raises UnsuitableObjectStore where this machine's is far off."""
        self._store = store
        self._objects = store.objects
        self._ages = ages or Ages()
        self._ahead_ms = _server_ahead_ms(store)
        #: of topics that `free` looked at: up to where all their manifests have them sealed
        self._sealed: dict[str, int] = {}
        #: topics that have ended, of which nothing is left
        self._buried: set[str] = set()
        self.manifests = Manifests(store.objects, self.now_ms, limits=store.limits)

    def now_ms(self) -> int:
        return self._store.clock.now_ms() + self._ahead_ms

    # --- garbage of manifests -----------------------------------------------------------------------------------

    def collect(self, topic_id: str, partition: int) -> int:
        """Delete the garbage of a partition that is due, and note since when the rest is; returns how many objects."""
        manifest = self.manifests.read(topic_id, partition).manifest
        if manifest is None or not manifest.garbage:
            return 0
        now_ms = self.now_ms()
        pins = read_pins(self._objects, now_ms)
        due = [each.key for each in collectable(manifest, now_ms=now_ms, pins=pins, grace_ms=self._ages.grace_ms)]
        self._delete(due)

        def change(seen: Manifest | None, now_ms: int, nonce: str) -> Manifest | None:
            return None if seen is None else collected(seen, due, now_ms=now_ms, nonce=nonce)

        self.manifests.change(topic_id, partition, change)
        return len(due)

    def has_due(self, manifest: Manifest | None) -> bool:
        """Whether `collect` would find something to do, as far as pins let it."""
        if manifest is None:
            return False
        now_ms = self.now_ms()
        due = collectable(manifest, now_ms=now_ms, pins=(), grace_ms=self._ages.grace_ms)
        return bool(due) or any(each.since_ms is None for each in manifest.garbage)

    # --- level 0 ------------------------------------------------------------------------------------------------

    def floors(self) -> dict[str, Floor]:
        """The floors of all topics with something left, by the ledger."""
        rows = self._store.ledger.view.rows
        topics = {row.topic_id for row in rows if row.end_offsets}
        topics |= {topic_id for row in rows if row.plan is not None for topic_id, _ in row.plan.topics}
        found = {topic_id: self._floor(floor_key(topic_id))[0] for topic_id in topics}
        return {topic_id: floor for topic_id, floor in found.items() if floor is not None}

    def free(self, topic_id: str, manifests: Sequence[Manifest | None] | None = None) -> int:
        """Raise the floor of a topic as far as it may, and delete what lies below it; returns how many plans went.

        `manifests` of all partitions may have been read before, by the same run.
        """
        rows = self._store.ledger.refresh().topic(topic_id)
        if not rows:
            return 0
        is_ended = rows[-1].kind is Kind.ENDED
        if manifests is None:
            numbers = range(len(rows[-1].end_offsets))
            manifests = [self.manifests.read(topic_id, number).manifest for number in numbers]
        now_ms = self.now_ms()
        pins = read_pins(self._objects, now_ms)
        sealed = rows[-1].sequence if is_ended else sealed_sequence(rows, manifests)
        if not is_ended or all(each is not None and each.ended and not each.garbage for each in manifests):
            self._sealed[topic_id] = sealed
        grace_ms = self._ages.grace_ms

        def rise(floor: Floor | None, nonce: str) -> Floor | None:
            return raise_floor(floor, sealed, now_ms=now_ms, pins=pins, nonce=nonce, grace_ms=grace_ms)

        floor = self._change_floor(floor_key(topic_id), rise)
        if floor.freed <= floor.cleared:
            return 0
        return self._clear(topic_id, floor)

    def _clear(self, topic_id: str, floor: Floor) -> int:
        """Files go before their plan, and both before the floor says so. The floors were read after our own rose."""
        rows = [row for row in self._store.ledger.view.rows if row.topic_id == topic_id]
        # An ended topic frees by its floor like any other: its readers have their grace too.
        plans = free_plans(rows, floor, self.floors(), ended=())
        for plan in plans:
            self._delete(self._files_of(plan))
            self._delete([plan.key])
        self._cleared(floor_key(topic_id), floor.freed)
        return len(plans)

    def _cleared(self, key: str, through: int) -> None:
        self._change_floor(
            key,
            lambda seen, nonce: (
                None if seen is None or seen.cleared >= through else cleared_floor(seen, through, nonce=nonce)
            ),
        )

    # --- the ledger itself --------------------------------------------------------------------------------------

    def prune(self) -> int:
        """Let the ledger forget rows whose objects are gone, and offsets that `free` found sealed; returns how many."""
        return self._store.ledger.prune(self.floors(), self._sealed, self._buried)

    def bury(self) -> int:
        """Delete manifests and floors of topics that are over for long; `prune` forgets them. Returns how many."""
        view = self._store.ledger.refresh()
        for topic_id in over_long_ago(view, now_ms=self.now_ms(), orphan_ms=self._ages.orphan_ms):
            if any(next(self._objects.list(f"{prefix}/{topic_id}"), None) for prefix in ("logs", "pages")):
                continue  # what a killed process left: the sweep takes it first, by the manifests
            self._delete([head.key for head in self._objects.list(f"{MANIFESTS}/{topic_id}")])
            self._delete([floor_key(topic_id)])
            self._buried.add(topic_id)
        return len(self._buried)

    def clean_log(self) -> int:
        """Delete commit files a day after a summary had them all; returns how many.

        Whoever begins, begins behind the summary, and who has not looked for an hour begins anew.
        """
        summarized = self._store.ledger.summarized()
        now_ms = self.now_ms()

        def rise(floor: Floor | None, nonce: str) -> Floor | None:
            return raise_floor(floor, summarized, now_ms=now_ms, pins=(), nonce=nonce)

        floor = self._change_floor(LOG_FLOOR, rise)
        if floor.freed <= floor.cleared or not self._copy_summary(floor.freed):
            return 0
        # The last one that the summary has stays: a log is never empty.
        self._delete([commit_key(version) for version in range(floor.cleared, floor.freed)])
        self._cleared(LOG_FLOOR, floor.freed)
        return floor.freed - floor.cleared

    def _copy_summary(self, least: int) -> bool:
        """Copy a summary that has every commit which goes: without the summary, recovery begins there.

        False when others wrote it meanwhile: they go on, or the next run does.
        """
        try:
            seen = self._objects.get(SUMMARY_COPY)[1]
        except ObjectMissing:
            seen = None
        data = self._objects.get(SUMMARY)[0]  # behind that, so the copy never goes back
        version = decode_summary(data, limits=self._store.limits).version
        if version < least:
            raise LedgerError(f"the summary is of version {version}, and was of {least}", file=SUMMARY)
        try:
            if seen is None:
                self._objects.create(SUMMARY_COPY, data)
            else:
                self._objects.replace(SUMMARY_COPY, data, seen)
            return True
        except (ObjectExists, ObjectChanged):
            return False

    def _files_of(self, plan: PlanRef) -> list[str]:
        """None where the plan is gone: its files went before it."""
        try:
            return [key for key, _, _ in self._store.shelf.plans.get(plan).files]
        except ObjectMissing:
            return []

    def _floor(self, key: str) -> tuple[Floor | None, Version | None]:
        try:
            data, version = self._objects.get(key)
        except ObjectMissing:
            return None, None
        return decode_floor(data, key), version

    def _change_floor(self, key: str, change: FloorChange) -> Floor:
        """The floor that is in force then; one that does not change is not written."""
        for _ in range(_TRIES_MAX):
            floor, version = self._floor(key)
            following = change(floor, new_nonce())
            if following is None:
                return floor or Floor()
            try:
                if version is None:
                    self._objects.create(key, encode_floor(following))
                else:
                    self._objects.replace(key, encode_floor(following), version)
                return following
            except (ObjectExists, ObjectChanged):
                continue
        raise SegmentsChanged(f"others replaced a floor {_TRIES_MAX} times in a row", file=key)

    # --- orphans ------------------------------------------------------------------------------------------------

    def sweep_arrivals(self) -> list[str]:
        """Delete what arrivals of topics left that died; returns the keys."""
        return sweep_arrivals(self._store, now_ms=self.now_ms(), orphan_ms=self._ages.orphan_ms, fence=self._fence)

    def sweep(self) -> list[str]:
        """Delete objects that nothing named and nothing can name any more; returns their keys.

        List; fence the ledger and each manifest that could name a candidate; read all names again; delete.
        """
        self._delete(self._stray_commits())
        now_ms = self.now_ms()
        began = Elapsed()
        listed = (head for prefix in _SWEPT for head in self._objects.list(prefix) if is_swept(head.key))
        candidates = orphan_candidates(listed, now_ms=now_ms, orphan_ms=self._ages.orphan_ms)
        known = {row.topic_id for row in self._store.ledger.refresh().rows}
        # What lies below a topic that the ledger does not know is left: nothing fences it.
        of = {key: partition_of(key) for key in candidates}
        candidates = tuple(key for key, partition in of.items() if partition is None or partition[0] in known)
        if not candidates:
            return []
        self._fence()
        concerned = sorted({partition for key in candidates if (partition := of[key]) is not None})
        for topic_id, number in concerned:
            self.manifests.change(
                topic_id,
                number,
                lambda seen, _, nonce: fence_partition(seen, nonce=nonce),
                check=lambda: check_age(began.ms()),
            )
        view = self._store.ledger.refresh()
        manifests = [self.manifests.read(topic_id, number).manifest for topic_id, number in concerned]
        if None in manifests:  # the fence made those that were missing
            raise SegmentsChanged("a manifest is gone behind the fence; nothing was swept")
        found = [each for each in manifests if each is not None]
        names = named(_without_ends(view), self.floors(), found, self._named_files)
        gone = list(orphans(candidates, names))
        self._delete(gone)
        return gone

    def _stray_commits(self) -> list[str]:
        """Commit files that landed after their version was deleted: nobody asks for them."""
        floor, _ = self._floor(LOG_FLOOR)
        first = commit_key(floor.cleared if floor else 0)
        return [head.key for head in itertools.takewhile(lambda head: head.key < first, self._objects.list(LOG))]

    def _named_files(self, plan: PlanRef) -> list[str]:
        """Of a plan that is not free; that it is gone is damage, and nothing may be swept then."""
        if not plan.size_bytes:
            return []  # of a commit that was lost: there never was one
        return [key for key, _, _ in self._store.shelf.plans.get(plan).files]

    def _fence(self) -> None:
        for _ in range(_TRIES_MAX):
            with contextlib.suppress(CommitConflict):
                self._store.ledger.commit(self._store.ledger.refresh(), Entry((), new_nonce(), is_sweep=True))
                return
        raise CommitConflict(f"other writers were faster {_TRIES_MAX} times; nothing was swept", hint="Try again")

    def _delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            self._objects.delete(keys[first : first + _DELETED_AT_ONCE])


def _server_ahead_ms(store: BucketStore) -> int:
    """How far the server's clock is ahead of ours."""
    key = f"data/clock/{new_nonce()}"  # where the sweep finds what a killed process left
    store.objects.put(key, (b"what time is it?",))
    try:
        own_ms = store.clock.now_ms()
        return check_clock(own_ms, store.objects.head(key).modified_ms) - own_ms
    finally:
        store.objects.delete([key])


def _without_ends(view: LedgerView) -> LedgerView:
    """For `named`: what an ended topic's rows name goes by its floor, after the grace."""
    return replace(view, rows=tuple(row for row in view.rows if row.kind is not Kind.ENDED))


def encode_floor(floor: Floor) -> bytes:
    names: Iterable[str] = ("generation", "nonce", "sealed", "sealed_since_ms", "freed", "cleared")
    return seal({name: getattr(floor, name) for name in names}, version=_FLOOR_VERSION)


def decode_floor(data: bytes, key: str) -> Floor:
    """Raises CorruptState, StoreVersionError."""
    document = unseal(data, version=_FLOOR_VERSION, file=key)
    numbers = (whole_number(document, name, file=key) for name in ("sealed", "sealed_since_ms", "freed", "cleared"))
    return Floor(whole_number(document, "generation", file=key), str(document.get("nonce")), *numbers)
