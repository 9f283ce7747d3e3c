"""What a seal or a recovery kept under `quarantine/` comes back as far as it is intact."""

from __future__ import annotations

import contextlib
import os
import random

import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from bucket.test_arriving import LATER_MS
from bucket.test_lost_commits import DAY_MS, copied, everything
from bucket.test_mending import manifest, mended, overwrite, reopened
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.mending import Mended
from logstore.bucket.readmitting import readmit_partition
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.errors import DuramenError
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.records.record import Record

SEAL = MaintenanceRules(seal=SealRules(force=True))


def filled(rng: random.Random, configs: dict[str, str] | None = None) -> BucketStore:
    """A tail of three commits, each a piece of many batches."""
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    store.create_topic("t", configs={"retention.ms": "-1", **(configs or {})})
    for _ in range(3):
        clock.advance(1000)
        store.append("t", [Record(b"k%d" % at, rng.randbytes(3000), LATER_MS) for at in range(60)])
    return store


def content(store: BucketStore) -> dict[int, tuple[int, bytes | None]]:
    return {record.offset: (record.timestamp_ms, record.value) for record in store.reader("t", 0).records(0)}


def readmitted(store: BucketStore, *, dry_run: bool = False) -> Mended:
    topic = store.topic("t")
    done = Mended(topic.partition(0))
    readmit_partition(store, topic, 0, done, dry_run=dry_run)
    return done


def damage(store: BucketStore, rng: random.Random) -> None:
    """Of the second commit, some byte in the middle."""

    def flip(data: bytearray) -> None:
        data[rng.randrange(len(data) // 4, len(data) // 2)] ^= 0x55

    overwrite(store, staged_all(store)[1], flip)


def staged_all(store: BucketStore) -> list[str]:
    rows = [row for row in store.ledger.view.rows if row.plan is not None]
    return [key for row in rows if row.plan for key, _, _ in store.shelf.plans.get(row.plan).files]


@pytest.mark.parametrize("stamp", ["CreateTime", "LogAppendTime"])
def test_sound_batches_of_a_piece_that_was_left_out_come_back(rng: random.Random, stamp: str) -> None:
    store = filled(rng, {"message.timestamp.type": stamp})
    before = content(store)
    damage(store, rng)
    store = reopened(store)
    maintain(store, SEAL)
    store = reopened(store)
    assert set(before) - set(content(store)) == set(range(60, 120))
    keys = dict(everything(store.objects))
    planned = readmitted(store, dry_run=True)
    assert dict(everything(store.objects)) == keys, "a dry run changes nothing"
    done = readmitted(store)
    assert done.readmitted == planned.readmitted
    back = {offset for _, first, end in done.readmitted for offset in range(first, end)}
    assert {60, 119} < back < set(range(60, 120)), "all but one batch"
    store = reopened(store)
    after = content(store)
    assert set(after) == set(range(60)) | back | set(range(120, 180))
    for offset, (at_ms, value) in after.items():
        assert value == before[offset][1]
        assert at_ms == before[offset][0] or stamp == "LogAppendTime"
    lost = {o for each in manifest(store).losses for o in range(each.base_offset, each.end_offset)}
    assert lost == set(before) - set(after)
    topic = store.topic("t")
    assert verify_partition(store, store.source(topic, 0)).findings == ()
    assert readmitted(store).readmitted == []
    assert not mended(store).found_damage
    store.append("t", [Record(b"k", b"v", LATER_MS)])
    for _ in range(3):
        assert not maintain(store, SEAL).failed
        store.clock.advance(2 * DAY_MS)  # type: ignore[attr-defined]
    assert content(reopened(store)).items() >= after.items()


def test_a_whole_object_that_was_put_right_comes_back_as_a_whole(rng: random.Random) -> None:
    store = filled(rng)
    before = content(store)
    sound = store.objects.get(staged_all(store)[1])[0]
    damage(store, rng)
    harmed = store.objects.get(staged_all(store)[1])[0]
    store = reopened(store)
    maintain(store, SEAL)
    ((key, kept),) = [(head.key, store.objects.get(head.key)[0]) for head in store.objects.list("quarantine")]
    position = harmed.index(kept)
    overwrite(store, key, lambda data: data.__setitem__(slice(None), sound[position : position + len(kept)]))
    readmitted(store)
    assert content(reopened(store)) == before
    assert manifest(store).losses == ()


def test_what_was_cut_out_of_a_segment_comes_back_when_it_is_intact(rng: random.Random) -> None:
    store = filled(rng)
    before = content(store)
    maintain(store, SEAL)
    segment = manifest(store).segments[0]
    whole = store.objects.get(segment.key)[0]
    overwrite(store, segment.key, lambda data: data.__setitem__(len(data) // 3, data[len(data) // 3] ^ 0x55))
    store = reopened(store)
    (key,) = mended(store).kept
    assert content(reopened(store)).keys() < before.keys()
    assert readmitted(store).readmitted == []
    harmed = store.objects.get(key)[0]
    at = next(at for at in range(len(whole)) if whole[at : at + 61] == harmed[:61])
    overwrite(store, key, lambda data: data.__setitem__(slice(None), whole[at : at + len(harmed)]))
    assert readmitted(reopened(store)).readmitted
    assert content(reopened(store)) == before


def test_nothing_comes_back_where_compaction_has_been(rng: random.Random) -> None:
    store = filled(rng, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
    damage(store, rng)
    store = reopened(store)
    maintain(store, SEAL)
    maintain(store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    assert manifest(store).first_dirty_offset > 120
    before = content(reopened(store))
    done = readmitted(reopened(store))
    assert done.readmitted == []
    assert done.held_back
    assert content(reopened(store)) == before


def test_a_readmission_that_fails_anywhere_can_be_run_again(rng: random.Random) -> None:
    store = filled(rng)
    damage(store, rng)
    store = reopened(store)
    maintain(store, SEAL)
    sealed = content(store)
    whole = copied(store)
    readmitted(whole)
    after = content(reopened(whole))
    counted = FaultyObjects(copied(store).objects)
    readmitted(over(store, counted))
    calls = len(counted.calls)
    for number in range(calls):
        for fault in EVERY if os.environ.get("DURAMEN_SOAK") else rng.sample(EVERY, 4):
            copy = copied(store)
            faulty = FaultyObjects(copy.objects, {number: fault})
            with contextlib.suppress(DuramenError):
                readmitted(over(copy, faulty))
            faulty.land()
            assert content(reopened(copy)) in (sealed, after)
            if fault is not Fault.MISSING:
                readmitted(reopened(copy))
                assert content(reopened(copy)) == after


def over(store: BucketStore, objects: Objects) -> BucketStore:
    return BucketStore("memory://test", objects=objects, clock=store.clock)
