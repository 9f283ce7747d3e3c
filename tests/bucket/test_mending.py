"""Damage of a store in a bucket costs what it hit, is told before anything is given up, and is remembered."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bucket.small_store import all_keys, mend_ledger
from bucket.test_arriving import LATER_MS
from logstore.bucket.commit_file import commit_key
from logstore.bucket.examining import examine, mend_store
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.manifest import Manifest
from logstore.bucket.mending import Mended, mend_partition
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.errors import LedgerError
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record

DAY_MS = 24 * 3_600_000


def filled(rng: random.Random, *, freed: bool = False) -> BucketStore:
    """Three segments and more, and a tail of three commits; with `freed` the staged objects of what is sealed went."""
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    store.create_topic("t", configs={"segment.bytes": "3000", "retention.ms": "-1"})

    def append() -> None:
        store.append("t", [Record(b"k%d" % rng.randrange(9), rng.randbytes(60), LATER_MS) for _ in range(10)])

    for _ in range(12):
        append()
    maintain(store, MaintenanceRules(seal=SealRules(force=True)))
    if freed:
        for _ in range(3):
            clock.advance(2 * DAY_MS)
            maintain(store)
    for _ in range(3):
        append()
    return store


def offsets(store: BucketStore) -> list[int]:
    reader = store.reader("t", 0)
    return [record.offset for record in reader.records(reader.log_start_offset())]


def manifest(store: BucketStore) -> Manifest:
    found = store.manifests.read(store.topic("t").id, 0).manifest
    assert found is not None
    return found


def overwrite(store: BucketStore, key: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray(store.objects.get(key)[0])
    change(data)
    store.objects.delete([key])
    store.objects.put(key, [bytes(data)])


def flip(data: bytearray) -> None:
    data[len(data) // 3] ^= 0x55


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def staged(store: BucketStore) -> list[str]:
    """Keys of the tail's staged objects."""
    sealed = manifest(store).sealed_offset
    tail = [row for row in store.ledger.view.rows if row.plan is not None and row.end_offsets[0] > sealed]
    return [key for row in tail if row.plan for key, _, _ in store.shelf.plans.get(row.plan).files]


def plans(store: BucketStore) -> list[str]:
    sealed = manifest(store).sealed_offset
    return [row.plan.key for row in store.ledger.view.rows if row.plan and row.end_offsets[0] > sealed]


DAMAGES: dict[str, tuple[Callable[[BucketStore], str], Callable[[BucketStore, str], None], int]] = {
    "flipped segment": (lambda s: manifest(s).segments[1].key, lambda s, key: overwrite(s, key, flip), 10),
    "cut segment": (lambda s: manifest(s).segments[1].key, lambda s, key: overwrite(s, key, cut), 60),
    "segment gone": (lambda s: manifest(s).segments[0].key, lambda s, key: s.objects.delete([key]), 60),
    "flipped staged object": (lambda s: staged(s)[1], lambda s, key: overwrite(s, key, flip), 10),
    "staged object gone": (lambda s: staged(s)[0], lambda s, key: s.objects.delete([key]), 10),
    "plan gone": (lambda s: plans(s)[2], lambda s, key: s.objects.delete([key]), 10),
    "plan flipped": (lambda s: plans(s)[0], lambda s, key: overwrite(s, key, flip), 10),
}


def reopened(store: BucketStore) -> BucketStore:
    return BucketStore("memory://test", objects=store.objects, clock=store.clock)


def mended(store: BucketStore, *, dry_run: bool = False) -> Mended:
    return mend_partition(store, store.topic("t"), 0, dry_run=dry_run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_costs_what_it_hit_and_is_remembered(rng: random.Random, damage: str) -> None:
    store = filled(rng)
    before = offsets(store)
    key_of, harm, most = DAMAGES[damage]
    harm(store, key_of(store))
    store = reopened(store)
    keys = {key: store.objects.get(key)[0] for key in all_keys(store.objects)}
    planned = mended(store, dry_run=True)
    assert {key: store.objects.get(key)[0] for key in all_keys(store.objects)} == keys, "a dry run changes nothing"
    store = reopened(store)
    done = mended(store)
    assert done.found_damage
    assert [(each.base_offset, each.end_offset) for each in done.losses] == [
        (each.base_offset, each.end_offset) for each in planned.losses
    ]
    lost = {offset for each in done.losses for offset in range(each.base_offset, each.end_offset)}
    assert 0 < len(lost) <= most
    store = reopened(store)
    assert offsets(store) == [offset for offset in before if offset not in lost]
    topic = store.topic("t")
    assert verify_partition(store, store.source(topic, 0)).findings == ()
    known = store.partition_state(topic, 0).losses
    assert {offset for each in known for offset in range(each.base_offset, each.end_offset)} == lost
    assert not mended(store).found_damage
    store.append("t", [Record(b"k", b"v", LATER_MS)])
    maintain(store, MaintenanceRules(seal=SealRules(force=True)))
    assert offsets(store)[-1] == before[-1] + 1
    assert store.partition_state(topic, 0).losses == known
    if "flipped segment" in damage or "cut" in damage:
        assert all(store.objects.head(key).size_bytes for key in done.kept)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("freed", [False, True])
def test_a_manifest_is_made_again_from_what_lies_there(rng: random.Random, gone: bool, freed: bool) -> None:
    store = filled(rng, freed=freed)
    before = offsets(store)
    key = f"manifest/{store.topic('t').id}/0"
    if gone:
        store.objects.delete([key])
    else:
        overwrite(store, key, flip)
    store = reopened(store)
    done = mended(store)
    if freed or not gone:
        assert done.found_damage
    assert done.losses == []
    store = reopened(store)
    assert offsets(store) == before
    assert verify_partition(store, store.source(store.topic("t"), 0)).findings == ()
    store.append("t", [Record(b"k", b"v", LATER_MS)])
    assert not maintain(store, MaintenanceRules(seal=SealRules(force=True))).failed
    assert offsets(store)[-1] == before[-1] + 1


def test_without_manifest_and_without_one_segment_the_gap_is_named(rng: random.Random) -> None:
    store = filled(rng, freed=True)
    before, segment = offsets(store), manifest(store).segments[1]
    store.objects.delete([segment.key, f"manifest/{store.topic('t').id}/0"])
    store = reopened(store)
    done = mended(store)
    assert [(each.base_offset, each.end_offset) for each in done.losses] == [(segment.base_offset, segment.next_offset)]
    assert offsets(reopened(store)) == [o for o in before if not segment.base_offset <= o < segment.next_offset]


def test_compacted_segments_win_over_what_they_were_made_of(rng: random.Random) -> None:
    store = filled(rng)
    store.alter_topic("t", configs={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0})
    maintain(store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    before = offsets(store)
    assert manifest(store).garbage, "the sources still lie there"
    overwrite(store, f"manifest/{store.topic('t').id}/0", flip)
    store = reopened(store)
    assert mended(store).found_damage
    assert set(before) <= set(offsets(reopened(store)))
    maintain(store, MaintenanceRules(force_compaction=True))
    assert offsets(reopened(store)) == before


WHOLE: dict[str, tuple[str, bool]] = {
    "ledger/summary": ("summary", True),
    "topics/t": ("topics/t", False),
    "floors/": ("floor", False),
}


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("gone", [False, True])
def test_what_belongs_to_no_partition_is_found_and_made_again(rng: random.Random, key: str, gone: bool) -> None:
    store = filled(rng)
    before = offsets(store)
    key = f"floors/{store.topic('t').id}" if key == "floors/" else key
    assert examine(store) == []
    if gone:
        store.objects.delete([key])
    else:
        overwrite(store, key, flip)
    if gone and key.startswith("floors/"):
        assert examine(store) == [], "one that is not there yet says the same"
        return
    assert [finding.file for finding in examine(store)] == [key]
    draft = BucketStore("memory://test", objects=store.objects, clock=store.clock, is_draft=True)
    for dry_run in (True, False):
        told = mend_ledger(draft, dry_run=dry_run)
        assert bool(told) == (key == "ledger/summary")
        if not told:
            assert mend_store(reopened(store), dry_run=dry_run)
    store = reopened(store)
    assert examine(store) == []
    assert mend_store(store, dry_run=False) == []
    assert offsets(store) == before
    for _ in range(3):
        store.clock.advance(2 * DAY_MS)  # type: ignore[attr-defined]
        assert not maintain(store).failed
    assert offsets(store) == before


def test_staged_objects_that_are_gone_or_short_are_found(rng: random.Random) -> None:
    store = filled(rng)
    first, second = staged(store)[:2]
    store.objects.delete([first])
    overwrite(store, second, cut)
    assert {finding.file for finding in examine(reopened(store))} == {first, second}


def test_a_summary_whose_commits_are_gone_too_is_an_error(rng: random.Random) -> None:
    store = filled(rng)
    overwrite(store, "ledger/summary", flip)
    store.objects.delete([commit_key(version) for version in range(3)])
    with pytest.raises(LedgerError, match="commit 2, which it could be made from, is gone"):
        mend_ledger(BucketStore("memory://test", objects=store.objects, clock=store.clock, is_draft=True), dry_run=True)
