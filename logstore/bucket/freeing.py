"""What may be deleted, and when: garbage of manifests, level 0 that is sealed, orphans that no commit ever named.

Nothing is deleted because somebody lost a race. An object goes because a manifest lists it as garbage, because its
topic's floor has passed it, or because a sweep found it unnamed behind a fence. A live pin holds back what its reader
may still look for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from logstore.bucket.manifest import Garbage, Manifest
from logstore.bucket.rows import NO_TOPIC, Kind, LedgerView, PlanRef, TopicRow
from logstore.errors import StaleObjects
from logstore.objects.objects import Head

HOUR_MS = 3_600_000
GRACE_MS = 24 * HOUR_MS
#: an orphan is this old before it goes; whoever names an object refuses one half as old
ORPHAN_MS = 7 * 24 * HOUR_MS
#: how far clocks of the store may be apart; maintenance refuses to work with one that is further off
CLOCK_OFF_MS_MAX = 60_000


@dataclass(frozen=True, slots=True)
class Pin:
    """A snapshot reader: it put the pin before it read the first manifest."""

    started_ms: int
    expires_ms: int

    def holds(self, since_ms: int, now_ms: int) -> bool:
        """Whether its reader may need what readers after `since_ms` do not."""
        is_live = now_ms <= self.expires_ms + CLOCK_OFF_MS_MAX
        return is_live and self.started_ms <= since_ms + CLOCK_OFF_MS_MAX


# --- garbage of manifests --------------------------------------------------------------------------------------------


def collectable(
    manifest: Manifest, *, now_ms: int, pins: Iterable[Pin], grace_ms: int = GRACE_MS
) -> tuple[Garbage, ...]:
    """Garbage that may be deleted now. The pins were listed *after* the manifest was read."""
    live = tuple(pins)
    return tuple(
        each
        for each in manifest.garbage
        if each.since_ms is not None
        and now_ms - each.since_ms >= grace_ms
        and not any(pin.holds(each.since_ms, now_ms) for pin in live)
    )


# --- level 0 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Floor:
    """How far a topic's rows are sealed, since when, how far they are freed, and how far their objects are deleted.

    Rows up to `freed` name nothing any more; it rises before the first object goes. Rows above `cleared` stay in the
    ledger: they say what is left to delete.
    """

    generation: int = 0
    nonce: str = ""
    sealed: int = 0
    sealed_since_ms: int = 0
    freed: int = 0
    cleared: int = 0


def sealed_sequence(rows: Sequence[TopicRow], manifests: Sequence[Manifest | None]) -> int:
    """The last sequence of a topic up to which every partition is sealed. Manifests are by partition."""
    last = rows[0].sequence - 1 if rows else 0
    for row in rows:
        for partition, end in enumerate(row.end_offsets):
            manifest = manifests[partition] if partition < len(manifests) else None
            if end > (manifest.sealed_offset if manifest else 0):
                return last
        last = row.sequence
    return last


def raise_floor(
    floor: Floor | None, sealed: int, *, now_ms: int, pins: Iterable[Pin], nonce: str, grace_ms: int = GRACE_MS
) -> Floor | None:
    """The next floor, or None when nothing changes.

    `now_ms` is a time asked for after the manifests were read. What was noted as sealed becomes free after the grace,
    unless a pin began before it was noted. Only then is the next sealed sequence noted, so that a busy topic does not
    put its floor off for ever.
    """
    current = floor or Floor()
    live = tuple(pins)
    is_due = (
        current.sealed > current.freed
        and now_ms - current.sealed_since_ms >= grace_ms
        and not any(pin.holds(current.sealed_since_ms, now_ms) for pin in live)
    )
    freed = current.sealed if is_due else current.freed
    if current.sealed == freed and sealed > current.sealed:
        return _next(current, nonce, freed=freed, sealed=sealed, sealed_since_ms=now_ms)
    return _next(current, nonce, freed=freed) if is_due else None


def cleared_floor(floor: Floor, cleared: int, *, nonce: str) -> Floor:
    """After the objects of all rows up to `cleared` were deleted. Files go before their plans."""
    return _next(floor, nonce, cleared=max(floor.cleared, min(cleared, floor.freed)))


def _next(floor: Floor, nonce: str, **changes: int) -> Floor:
    return replace(floor, generation=floor.generation + 1, nonce=nonce, **changes)


def is_free(plan: PlanRef, floors: Mapping[str, Floor], ended: Collection[str]) -> bool:
    """Whether every topic of a plan has freed it, or has ended. `floors` was read after one's own floor rose."""
    return all(
        topic_id in ended or (topic_id in floors and floors[topic_id].freed >= sequence)
        for topic_id, sequence in plan.topics
    )


def free_plans(
    rows: Iterable[TopicRow], floor: Floor, floors: Mapping[str, Floor], ended: Collection[str]
) -> tuple[PlanRef, ...]:
    """Plans of a topic's rows whose objects may go. One that another topic still needs is deleted by that one."""
    return tuple(
        row.plan
        for row in rows
        if row.plan is not None
        and (floor.cleared < row.sequence <= floor.freed or row.topic_id in ended)
        and is_free(row.plan, floors, ended)
    )


def over_long_ago(view: LedgerView, *, now_ms: int, orphan_ms: int = ORPHAN_MS) -> tuple[str, ...]:
    """Topics that ended so long ago that nobody can seal or retain them any more, and that nothing else speaks of.

    Their garbage and their staged objects are gone: only then a row of an end has no offsets. Whoever writes a manifest
    refuses what it looked at half as long ago (see `check_age`).
    """
    named = {topic_id for row in view.rows if row.plan is not None for topic_id, _ in row.plan.topics}
    counts = Counter(row.topic_id for row in view.rows)
    return tuple(
        row.topic_id
        for row in view.rows
        if row.kind is Kind.ENDED
        and not row.end_offsets
        and counts[row.topic_id] == 1  # an app's last batch may have been in it
        and row.topic_id not in named
        and now_ms - row.clock_ms >= orphan_ms
    )


def kept_rows(
    view: LedgerView, floors: Mapping[str, Floor], sealed: Mapping[str, int], buried: Collection[str] = ()
) -> tuple[TopicRow, ...]:
    """What the ledger must still say: a topic's newest row, an app's newest, and what is not cleared.

    `sealed`: of some topics the sequence up to which every manifest that is in force has sealed them; of an ended one
    that nothing is listed and no garbage left. Nobody asks those rows for offsets any more: whoever has an older
    manifest looks again. `buried`: topics of which nothing is left at all.
    """
    newest_topic = {row.topic_id: row for row in view.rows if row.topic_id != NO_TOPIC}
    newest_app: dict[str | None, TopicRow] = {row.app_id: row for row in view.rows if row.app_id is not None}
    kept = []
    for row in view.rows:
        cleared = floors[row.topic_id].cleared if row.topic_id in floors else 0
        through = sealed.get(row.topic_id, 0)
        if newest_topic.get(row.topic_id) is row:
            if row.kind is Kind.ENDED and row.topic_id in buried:
                continue
            is_over = row.kind is Kind.ENDED and row.sequence <= min(cleared, through)
            kept.append(_without_offsets(row) if is_over else row)
        elif row.sequence > max(cleared, through):
            kept.append(row)
        elif (row.plan is not None and row.sequence > cleared) or newest_app.get(row.app_id) is row:
            kept.append(_without_offsets(replace(row, kind=Kind.SEALED) if row.kind is Kind.BATCH else row))
    return tuple(kept)


def _without_offsets(row: TopicRow) -> TopicRow:
    bare = replace(row, base_offsets=(), end_offsets=(), definition=None, transactions=None)
    return bare if row.end_offsets else row


# --- orphans ---------------------------------------------------------------------------------------------------------


def orphan_candidates(listed: Iterable[Head], *, now_ms: int, orphan_ms: int = ORPHAN_MS) -> tuple[str, ...]:
    """Old enough when they were listed, before the fence. `now_ms` and the ages are the server's."""
    return tuple(head.key for head in listed if now_ms - head.modified_ms >= orphan_ms)


def named(
    view: LedgerView,
    floors: Mapping[str, Floor],
    manifests: Iterable[Manifest],
    files_of: Callable[[PlanRef], Iterable[str]],
) -> frozenset[str]:
    """Every object that a row above its floor or a manifest names, all read behind the fence.

    `files_of` reads a plan; where it fails, nothing may be swept.
    """
    ended = {row.topic_id for row in view.rows if row.kind is Kind.ENDED}
    names: set[str] = set()
    for plan in {row.plan for row in view.rows if row.plan is not None}:
        if not is_free(plan, floors, ended):
            names.update((plan.key, *files_of(plan)))
    for manifest in manifests:
        names |= manifest.names
    return frozenset(names)


def orphans(candidates: Iterable[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(key for key in candidates if key not in names)


def check_age(elapsed_ms: int, *, orphan_ms: int = ORPHAN_MS) -> None:
    """Before objects are named, and *after* what the naming is compared with was loaded. Raises StaleObjects.

    `elapsed_ms` has gone by since the oldest of their names was made, by the clocks of the process that made it: the
    larger of wall and boot time. The server's time of an object will not do: a put that lands late makes it look young.
    A sweep that was fenced before that load may delete what is older than this; one fenced after it voids the naming.
    """
    if elapsed_ms >= orphan_ms // 2:
        raise StaleObjects(
            f"objects were written {elapsed_ms // HOUR_MS} hours ago; a sweep may take them before they are committed",
            hint="Write the batch again",
        )
