"""What belongs to no partition of a store in a bucket, looked through: ledger, plans, floors, pins, copies of
definitions. `examine` changes nothing; `mend_store` writes again what the rest of the store tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from logstore.bucket.collecting import decode_floor, encode_floor
from logstore.bucket.commit_file import LOG, SUMMARY, commit_key, decode_commit, decode_summary
from logstore.bucket.definitions import read_projection, write_projection
from logstore.bucket.freeing import Floor, is_free
from logstore.bucket.keys import FLOORS, LOG_FLOOR, floor_key, new_nonce, topic_key
from logstore.bucket.manifests import overwrite
from logstore.bucket.rows import Kind, LedgerView, check_chain
from logstore.errors import CorruptState, DamageError, DuramenError, LedgerError, ObjectMissing
from logstore.objects.objects import Objects

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore


def examine(store: BucketStore) -> list[DuramenError]:
    """Everything that is wrong with it."""
    view = store.ledger.refresh()
    found = [*_ledger(store, view), *_floors(store, view), *_plans(store, view), *_projections(store, view)]
    return sorted(found, key=lambda error: error.file or "")


def _ledger(store: BucketStore, view: LedgerView) -> Iterator[DuramenError]:
    """Chains of rows, the summary, and every commit file that is there."""
    for topic_id in {row.topic_id for row in view.rows if row.topic_id}:
        try:
            check_chain(view.topic(topic_id))
        except LedgerError as error:
            yield error
    try:
        summary = decode_summary(store.objects.get(SUMMARY)[0], limits=store.limits)
        if summary.version > view.version:
            yield LedgerError(f"the summary is of version {summary.version}, beyond the ledger's end", file=SUMMARY)
    except ObjectMissing:
        yield LedgerError("the summary is gone; opening reads every commit", file=SUMMARY)
    except LedgerError as error:
        yield error
    try:
        floor = decode_floor(store.objects.get(LOG_FLOOR)[0], LOG_FLOOR)
    except ObjectMissing:
        floor = Floor()
    except CorruptState as error:
        yield error
        floor = Floor()
    # What landed below the floor is swept; nobody asks for it.
    versions = [int(head.key[len(LOG) + 1 : -len(".json")]) for head in store.objects.list(LOG) if _is_commit(head.key)]
    versions = [version for version in versions if version >= floor.cleared]
    for before, after in pairwise(versions):
        if after != before + 1:
            yield LedgerError(f"commits {before + 1} to {after - 1} are gone", file=commit_key(before + 1))
    for version in versions:
        try:
            decode_commit(store.objects.get(commit_key(version))[0], version, limits=store.limits)
        except ObjectMissing:
            continue  # cleaned up meanwhile
        except LedgerError as error:
            yield error


def _is_commit(key: str) -> bool:
    name = key[len(LOG) + 1 :]
    return len(name) == 25 and name.endswith(".json") and name[:20].isdigit()


def _floors(store: BucketStore, view: LedgerView) -> Iterator[DuramenError]:
    for topic_id in {row.topic_id for row in view.rows if row.topic_id}:
        try:
            floor = read_floor(store.objects, topic_id)
        except CorruptState as error:
            yield error
            continue
        newest = view.newest(topic_id)
        if floor is not None and newest is not None and max(floor.sealed, floor.freed, floor.cleared) > newest.sequence:
            yield CorruptState(
                f"a floor at {floor.sealed}, above the topic's newest row {newest.sequence}", file=floor_key(topic_id)
            )


def read_floor(objects: Objects, topic_id: str) -> Floor | None:
    """None: nothing was noted yet. Raises CorruptState."""
    key = floor_key(topic_id)
    try:
        return decode_floor(objects.get(key)[0], key)
    except ObjectMissing:
        return None


def _plans(store: BucketStore, view: LedgerView) -> Iterator[DuramenError]:
    """Plans that some topic may still need, and the staged objects they name, by their sizes."""
    floors = {}
    for topic_id in {row.topic_id for row in view.rows if row.topic_id}:
        try:
            floor = read_floor(store.objects, topic_id)
        except CorruptState:
            continue  # told already
        if floor is not None:
            floors[topic_id] = floor
    ended = {row.topic_id for row in view.rows if row.kind is Kind.ENDED}
    for plan in {row.plan for row in view.rows if row.plan is not None and not row.is_lost}:
        if is_free(plan, floors, ended):
            continue
        try:
            files: Iterable[tuple[str, int, int]] = store.shelf.plans.get(plan).files
        except (ObjectMissing, DamageError) as error:
            yield error
            continue
        for key, size_bytes, _ in files:
            try:
                found = store.objects.head(key).size_bytes
            except ObjectMissing as error:
                yield error
            else:
                if found != size_bytes:
                    yield CorruptState(f"an object of {found} bytes, where its plan says {size_bytes}", file=key)


def _projections(store: BucketStore, view: LedgerView) -> Iterator[DuramenError]:
    for topic in view.definitions.values():
        try:
            read_projection(store, topic.name)
        except (CorruptState, ObjectMissing) as error:
            yield error.at(file=topic_key(topic.name))


# --- repair ----------------------------------------------------------------------------------------------------------


def mend_store(store: BucketStore, *, dry_run: bool) -> list[str]:
    """Floors and copies of definitions that cannot be read; returns what was done, or would be."""
    view, done = store.ledger.refresh(), []
    for head in list(store.objects.list(FLOORS)):
        topic_id = head.key.rpartition("/")[2]
        try:
            read_floor(store.objects, topic_id)
        except CorruptState as error:
            done.append(f"{error}: made again from what lies there")
            if not dry_run:
                _mend_floor(store, view, topic_id)
    for topic in view.definitions.values():
        try:
            read_projection(store, topic.name)
        except (CorruptState, ObjectMissing) as error:
            done.append(f"{error.at(file=topic_key(topic.name))}: written again")
            if not dry_run:
                write_projection(store, topic)
    return done


def _mend_floor(store: BucketStore, view: LedgerView, topic_id: str) -> None:
    """Rows whose plans are gone were freed: a plan goes last, and only below the floor."""
    freed = 0
    for row in view.topic(topic_id):
        if row.plan is not None:
            try:
                store.objects.head(row.plan.key)
                break
            except ObjectMissing:
                freed = row.sequence
    floor = Floor(1, new_nonce(), freed, store.clock.now_ms(), freed, freed)
    overwrite(store.objects, floor_key(topic_id), encode_floor(floor))
