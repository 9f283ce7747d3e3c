"""`prove-erased` of a bucket: every object that may hold a key, until none does."""

from __future__ import annotations

from pathlib import Path

from bucket.test_arriving import LATER_MS
from logstore.bucket.committing import ObjectBatch
from logstore.bucket.erasing import find_keys_in_bucket
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.rows import Kind
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.produce import table_of
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.compaction.erasure import DELETED, LEFTOVER, SEGMENT, STAGING, Erasure
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record

HOUR_MS = 3_600_000
CONFIGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0, "delete.retention.ms": 1000}
FORCED = MaintenanceRules(seal=SealRules(force=True), force_compaction=True)


def kinds(found: Erasure) -> set[str]:
    return {place.kind for place in found.places}


def test_a_key_is_found_wherever_it_lies_until_nothing_holds_it(tmp_path: Path) -> None:
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    topic = store.create_topic("t", configs=CONFIGS)

    def look() -> Erasure:
        (found,) = find_keys_in_bucket(store, topic, [b"alice"], now_ms=clock.now_ms())
        return found

    assert look().erased
    store.append("t", [Record(b"alice", b"secret", clock.now_ms()), Record(b"bob", b"1", clock.now_ms())])
    assert kinds(look()) == {STAGING}
    maintain(store, MaintenanceRules(seal=SealRules(force=True), compact=False))
    assert kinds(look()) == {SEGMENT, STAGING}, "what is sealed is not freed yet"
    store.append("t", [Record(b"alice", None, clock.now_ms())])
    maintain(store, FORCED)
    found = look()
    assert {SEGMENT, STAGING, DELETED} == kinds(found)
    assert any("tombstone" in place.holds for place in found.places)
    for _ in range(8):
        clock.advance(25 * HOUR_MS)
        store.append("t", [Record(b"bob", b"%d" % clock.now_ms(), clock.now_ms())])
        assert not maintain(store, FORCED).failed
    found = look()
    assert found.erased, found.places
    assert found.removed_by is not None
    assert found.removed_by.removed.get("tombstone")
    (never,) = find_keys_in_bucket(store, topic, [b"carol"], now_ms=clock.now_ms())
    assert never.erased


def test_staged_objects_that_the_ledger_has_forgotten_the_offsets_of_are_looked_through() -> None:
    """A run that seals all of a batch lets the ledger forget its offsets; its objects stay for a day."""
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    topic = store.create_topic("t", configs=CONFIGS)
    store.create_topic("other", configs=CONFIGS)
    store.append("t", [Record(b"alice", b"secret", LATER_MS)])
    for _ in range(2):
        maintain(store, MaintenanceRules(seal=SealRules(force=True), compact=False))
        store.append("t", [Record(b"bob", b"1", LATER_MS)])
    assert any(row.kind is Kind.SEALED for row in store.ledger.view.rows)
    (found,) = find_keys_in_bucket(store, topic, [b"alice"], now_ms=LATER_MS)
    assert kinds(found) == {SEGMENT, STAGING}
    (staged,) = [place for place in found.places if place.kind == STAGING]
    assert "freed a day after" in staged.goes


def test_objects_that_no_commit_and_no_manifest_names_are_looked_through(tmp_path: Path) -> None:
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    topic = store.create_topic("t", configs=CONFIGS)
    writer = StagedWriter(ObjectBatch(store.objects).output(), options=EncodeOptions(), now_ms=LATER_MS)
    for batch in table_of([Record(b"alice", b"secret", LATER_MS)]).to_batches():
        writer.write(store.committer.target("t"), batch)
    writer.finish()
    store.append("t", [Record(b"bob", b"1", LATER_MS)])
    maintain(store, MaintenanceRules(seal=SealRules(force=True), compact=False))
    (segment,) = [head.key for head in store.objects.list("logs")]
    store.objects.put(f"{segment}-copy", [store.objects.get(segment)[0]])
    alice, bob = find_keys_in_bucket(store, topic, [b"alice", b"bob"], now_ms=LATER_MS)
    assert kinds(alice) == {STAGING}
    assert "no commit names it" in alice.places[0].goes
    assert kinds(bob) == {SEGMENT, STAGING, LEFTOVER}
