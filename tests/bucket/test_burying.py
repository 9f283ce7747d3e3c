"""A topic that ended long ago leaves nothing behind, and nobody who slept brings it back."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import replace

import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from bucket.test_maintaining import opened
from logstore.bucket import freeing, retaining, sealing
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import HOUR_MS
from logstore.bucket.maintaining import MaintenanceRules, Step, delete_up_to, maintain
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules, seal_partition
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.errors import DuramenError, StaleObjects, UnknownTopic
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects, Version
from logstore.records.record import Record

NOW_MS = 1_700_000_000_000
DAY_MS = 24 * HOUR_MS
RULES = MaintenanceRules(seal=SealRules(force=True), compact=False)
RECORDS = [Record(b"%d" % number, b"v", NOW_MS) for number in range(20)]
CONFIGS = {"retention.ms": "-1"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def objects(clock: ManualClock) -> MemoryObjects:
    return MemoryObjects(clock)


@pytest.fixture
def store(objects: MemoryObjects, clock: ManualClock) -> BucketStore:
    found = opened(objects, clock, create=True)
    for name in ("stays", "goes"):
        found.create_topic(name, partitions=2, configs=CONFIGS)
        found.append(name, RECORDS)
    return found


def left(objects: Objects, topic_id: str) -> list[str]:
    prefixes = ("manifest", "logs", "pages", "floors")
    return [head.key for prefix in prefixes for head in objects.list(prefix) if topic_id in head.key]


def days(objects: Objects, clock: ManualClock, count: int) -> None:
    for _ in range(count):
        assert not maintain(opened(objects, clock), RULES).failed
        clock.advance(DAY_MS + HOUR_MS)


def test_after_a_week_nothing_is_left(store: BucketStore, objects: MemoryObjects, clock: ManualClock) -> None:
    topic, stays = store.topic("goes"), store.topic("stays")
    maintain(store, RULES)
    before = [record for number in range(2) for record in store.reader("stays", number).records(0)]
    store.delete_topic("goes")
    days(objects, clock, 6)
    assert f"manifest/{topic.id}/1" in left(objects, topic.id), "sleepers may still be there"
    days(objects, clock, 4)
    assert left(objects, topic.id) == []
    after = opened(objects, clock)
    assert {row.topic_id for row in after.ledger.view.rows} == {stays.id}
    assert [record for number in range(2) for record in after.reader("stays", number).records(0)] == before
    assert len(left(objects, stays.id)) > 2
    again = after.create_topic("goes", configs=CONFIGS)
    assert again.id != topic.id
    after.append("goes", RECORDS)
    assert after.ends(again).high_watermarks == (20,)
    days(objects, clock, 2)
    with pytest.raises(UnknownTopic):
        store.check_exists(topic)  # by a process that had it open all the time


def test_the_end_is_remembered_as_long_as_an_apps_last_batch_is(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    topic = store.topic("goes")
    store.append("goes", RECORDS, app=AppBatch("app", 0, "query"))
    store.delete_topic("goes")
    days(objects, clock, 12)
    kept = opened(objects, clock)
    assert left(objects, topic.id) != []
    assert kept.committer.check_replay(AppBatch("app", 0, "query"))
    kept.append("stays", RECORDS, app=AppBatch("app", 1, "query"))
    days(objects, clock, 4)
    assert left(objects, topic.id) == []


def test_a_batch_that_another_topic_still_holds_is_freed(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    """Its objects go when both topics have freed them, so the floor of the one that ended must stay until then."""
    topic = store.topic("goes")
    view = store.ledger.refresh()
    row = next(row for row in view.rows if row.plan is not None)
    assert row.plan is not None
    shared = replace(row, plan=replace(row.plan, topics=(*row.plan.topics, (topic.id, 2))))
    store.delete_topic("goes")
    days(objects, clock, 6)
    ended = opened(objects, clock).ledger.view
    assert any(each.topic_id == topic.id and not each.end_offsets for each in ended.rows)
    later = clock.now_ms() + 30 * DAY_MS
    assert freeing.over_long_ago(ended, now_ms=later) == (topic.id,)
    assert freeing.over_long_ago(replace(ended, rows=(shared, *ended.rows)), now_ms=later) == ()


@pytest.mark.parametrize("work", ["seal", "retain", "delete"])
def test_who_slept_since_before_the_end_brings_nothing_back(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    topic = store.topic("goes")
    monkeypatch.setattr(sealing, "Elapsed", lambda: Elapsed(clock.now_ms, clock.now_ms))
    monkeypatch.setattr(retaining, "Elapsed", lambda: Elapsed(clock.now_ms, clock.now_ms))
    store.alter_topic("goes", configs={"retention.ms": "1"})
    if work == "retain":
        maintain(store, replace(RULES, steps=frozenset({Step.SEAL})))
    sleeper = opened(objects, clock)
    sleeper.ledger._elapsed = lambda: Elapsed(clock.now_ms, clock.now_ms)
    sleeper.ledger._looked = sleeper.ledger._elapsed()
    change = sleeper.manifests.change

    def late(*args: object, **kwargs: object) -> object:
        """It sleeps in front of the one request that would change something."""
        sleeper.manifests.change = change  # type: ignore[method-assign]
        store.delete_topic("goes")
        days(objects, clock, 10)
        assert left(objects, topic.id) == []
        return change(*args, **kwargs)  # type: ignore[arg-type]

    sleeper.manifests.change = late  # type: ignore[assignment, method-assign]
    environment = MaintenanceEnvironment(sleeper.objects, sleeper.manifests, sleeper.shelf)
    source = sleeper.source(topic, 0)
    config, later_ms = sleeper.log_config(sleeper.topic("goes")), clock.now_ms() + DAY_MS
    works = {
        "seal": lambda: seal_partition(environment, source, topic.id, SealRules(force=True), later_ms),
        "delete": lambda: delete_up_to(sleeper, topic, 0, before_offset=1),
        "retain": lambda: retaining.retain_partition(environment, source, topic.id, config, later_ms),
    }
    with pytest.raises(StaleObjects):
        works[work]()
    assert [key for key in left(objects, topic.id) if key.startswith("manifest")] == []
    days(objects, clock, 1)
    with pytest.raises(UnknownTopic):
        sleeper.append("goes", RECORDS)


def test_a_run_that_fails_anywhere_is_done_again(rng: random.Random) -> None:
    def ripe() -> tuple[MemoryObjects, ManualClock, str]:
        """The next run of maintenance deletes what is left of a topic."""
        clock = ManualClock(NOW_MS)
        objects = MemoryObjects(clock)
        store = opened(objects, clock, create=True)
        for name in ("stays", "goes"):
            store.create_topic(name, partitions=2, configs=CONFIGS)
            store.append(name, RECORDS)
        topic = store.topic("goes")
        store.delete_topic("goes")
        days(objects, clock, 6)
        clock.advance(2 * DAY_MS)
        return objects, clock, topic.id

    objects, clock, topic_id = ripe()
    counted = FaultyObjects(objects)
    maintain(opened(counted, clock), RULES)
    assert left(objects, topic_id) == []
    calls = len(counted.calls)
    soak = bool(os.environ.get("DURAMEN_SOAK"))
    for number in range(calls) if soak else sorted(rng.sample(range(calls), min(calls, 12))):
        for fault in EVERY if soak else rng.sample(EVERY, 3):
            objects, clock, topic_id = ripe()
            faulty = FaultyObjects(objects, {number: fault})
            with contextlib.suppress(DuramenError):
                maintain(opened(faulty, clock), RULES)
            faulty.land()
            days(objects, clock, 2)
            assert left(objects, topic_id) == [], (number, fault)
            after = opened(objects, clock)
            assert {row.topic_id for row in after.ledger.view.rows} == {after.topic("stays").id}
            found = [record.offset for number in range(2) for record in after.reader("stays", number).records(0)]
            assert len(found) == 20


def test_a_manifest_that_is_not_found_behind_the_fence_stops_the_sweep(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    """That a request finds no manifest is no proof that its segments are nobody's."""
    maintain(store, RULES)
    topic = store.topic("stays")
    clock.advance(9 * DAY_MS)
    key = f"manifest/{topic.id}/0"

    class Blind(FaultyObjects):
        """It does not see the manifest at one look."""

        looks = 0
        blind_at = 0

        def get(self, wanted: str) -> tuple[bytes, Version]:
            if wanted == key:
                self.looks += 1
                if self.looks == self.blind_at:
                    self.faults[len(self.calls)] = Fault.MISSING
            return super().get(wanted)

    for at in range(1, 5):
        blind = Blind(objects)
        blind.blind_at = at
        with contextlib.suppress(DuramenError):
            maintain(opened(blind, clock), RULES)
        assert blind.looks >= 3, "at the beginning, in the fence, and behind it"
        assert len([record for n in range(2) for record in opened(objects, clock).reader("stays", n).records(0)]) == 20
