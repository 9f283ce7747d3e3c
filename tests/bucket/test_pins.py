"""Reads of one moment: what they read stays under a pin, and where it does not they begin again or say so."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from bucket.test_maintaining import CONFIGS, DAY_MS, HOUR_MS, NOW_MS, opened, run
from logstore.bucket import pins
from logstore.bucket.files import BlockCache, CacheLimits
from logstore.bucket.freeing import Pin
from logstore.bucket.pins import PIN_MS, Pins, read_pins
from logstore.bucket.reader import Shelf
from logstore.bucket.store import BucketStore
from logstore.bucket.tail import Plans
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.errors import AccessDenied, SegmentsChanged
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects, Version
from logstore.records.record import Record
from logstore.restore.lookup import latest_of_key
from logstore.restore.restore import plan_restore, restore_partition

TINY = CacheLimits(memory_bytes=1, block_bytes=256, ahead_bytes=0, copy_bytes=0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def objects(clock: ManualClock) -> MemoryObjects:
    """A topic with a key that is deleted later, sealed."""
    objects = MemoryObjects(clock)
    store = opened(objects, clock, create=True)
    store.create_topic("orders", configs=CONFIGS)
    for turn in range(4):
        store.append("orders", [Record(b"k%d" % n, b"%d" % turn * 40, NOW_MS + turn) for n in range(30)])
    run(store)
    return objects


def uncached(objects: Objects, clock: ManualClock) -> BucketStore:
    """Nothing that was read is kept: each look at an object is a request."""
    store = opened(objects, clock)
    store.shelf = Shelf(BlockCache(objects, limits=TINY), Plans(objects, store.limits))
    return store


def go_on(objects: MemoryObjects, clock: ManualClock, *, days: int = 3) -> None:
    """Others delete a key and write others; maintenance goes on for some days, and renewals with it."""
    store = opened(objects, clock)
    store.append("orders", [Record(b"k3", None, NOW_MS + 9), *(Record(b"k%d" % n, b"new", NOW_MS) for n in range(3))])
    for _ in range(days):
        run(store)
        clock.advance(DAY_MS + HOUR_MS)
        if pins.PIN_MS < PIN_MS:
            ends = time.monotonic() + 60
            while any(pin.expires_ms < clock.now_ms() for pin in read_pins(objects, NOW_MS)):
                assert time.monotonic() < ends
                time.sleep(0.002)
    run(store)


@pytest.fixture
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PIN_MS", 30)


def as_rows(batches: Iterable[object]) -> dict[bytes, bytes]:
    return {row["key"]: row["value"] for batch in batches for row in batch.to_pylist()}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("renewed_often")
def test_what_a_long_restore_reads_stays_while_it_is_pinned(objects: MemoryObjects, clock: ManualClock) -> None:
    store = uncached(objects, clock)
    plan = plan_restore(store, "orders")
    expected = as_rows(store.restore("orders"))
    assert len(expected) == 30
    reading = restore_partition(store, plan, 0, memory_bytes=1)
    found = dict.fromkeys(next(reading).records())
    listed = {head.key for head in objects.list("logs")}
    go_on(objects, clock)
    assert listed <= {head.key for head in objects.list("logs")}
    for columns in reading:
        found |= dict.fromkeys(columns.records())
    assert {record.key: record.value for record in found} == expected
    store.close()
    go_on(objects, clock)
    assert not listed & {head.key for head in objects.list("logs")}


def test_a_restore_whose_pin_expired_says_so_when_it_has_delivered(objects: MemoryObjects, clock: ManualClock) -> None:
    store = uncached(objects, clock)
    reading = restore_partition(store, plan_restore(store, "orders"), 0)
    next(reading)
    go_on(objects, clock)
    with pytest.raises(SegmentsChanged, match="nothing of this partition counts"):
        list(reading)


def test_a_restore_goes_on_with_what_it_has_kept(objects: MemoryObjects, clock: ManualClock) -> None:
    """Its pin expired and its objects are gone, but it had fetched them: they are the state that was asked for."""
    store = opened(objects, clock)
    plan, expected = plan_restore(store, "orders"), as_rows(store.restore("orders"))
    listed = {head.key for head in objects.list("logs")}
    reading = restore_partition(store, plan, 0, memory_bytes=1)
    found = list(next(reading).records())
    go_on(objects, clock)
    assert not listed & {head.key for head in objects.list("logs")}
    found += [record for columns in reading for record in columns.records()]
    assert {record.key: record.value for record in found} == expected


@pytest.mark.parametrize("kept", [False, True])
def test_a_restore_that_has_delivered_nothing_begins_again(
    objects: MemoryObjects, clock: ManualClock, kept: bool
) -> None:
    """It slept between its first look and its first record: the key that was deleted meanwhile does not come back."""

    class Sleeping(CountedObjects):
        def ranges(self, key: str, spans):  # type: ignore[no-untyped-def]
            if not self.requests["ranges"]:
                self.requests["ranges"] += 1
                go_on(objects, clock)
            return super().ranges(key, spans)

    sleeping = Sleeping(objects)
    store = opened(sleeping, clock) if kept else uncached(sleeping, clock)
    plan = plan_restore(store, "orders", allow_thinned=True)
    found = {record.key: record.value for each in restore_partition(store, plan, 0) for record in each.records()}
    assert sleeping.requests["ranges"] > 1
    assert b"k3" not in found
    assert set(found) <= {b"k%d" % n for n in range(30)}


def test_a_key_is_looked_for_again_when_what_was_read_is_gone(objects: MemoryObjects, clock: ManualClock) -> None:
    class Sleeping(CountedObjects):
        def ranges(self, key: str, spans):  # type: ignore[no-untyped-def]
            if not self.requests["ranges"]:
                self.requests["ranges"] += 1
                go_on(objects, clock)
            return super().ranges(key, spans)

    store = uncached(Sleeping(objects), clock)
    found = latest_of_key(store, store.topic("orders"), b"k1")
    assert found is not None
    assert found.record.value == b"new"


@pytest.mark.usefixtures("renewed_often")
def test_verify_and_get_and_as_of_read_under_the_pin(objects: MemoryObjects, clock: ManualClock) -> None:
    class Slow(CountedObjects):
        def ranges(self, key: str, spans):  # type: ignore[no-untyped-def]
            if self.requests["ranges"] == 1:
                go_on(objects, clock)
            return super().ranges(key, spans)

    def as_of(store: BucketStore) -> bool:
        end = store.high_watermark(store.topic("orders"), 0)
        plan = plan_restore(opened(objects, clock), "orders", as_of_offsets={0: end - 1}, allow_thinned=True)
        with opened(objects, clock) as other:
            expected = sum(len(columns) for columns in restore_partition(other, plan, 0))
        return sum(len(columns) for columns in restore_partition(store, plan, 0)) == expected > 20

    for read in (
        lambda store: verify_partition(store, store.source(store.topic("orders"), 0)).findings == (),
        lambda store: latest_of_key(store, store.topic("orders"), b"k29") is not None,
        as_of,
    ):
        store = uncached(Slow(objects), clock)
        assert read(store)
        store.close()


def test_readers_of_a_process_share_a_pin(objects: MemoryObjects, clock: ManualClock) -> None:
    counted = CountedObjects(objects)
    held = Pins(counted, clock)
    with held.held(), held.held():
        (pin,) = read_pins(objects, clock.now_ms())
        assert pin == Pin(NOW_MS, NOW_MS + PIN_MS)
    clock.advance(PIN_MS // 3)
    with held.held():
        assert counted.requests == {"create": 1}
        clock.advance(PIN_MS // 2)
        with held.held():  # the first one holds back what was garbage before this one began
            assert counted.requests == {"create": 2}
            assert len(read_pins(objects, clock.now_ms())) == 2
    assert len(read_pins(objects, clock.now_ms())) == 1  # the older one went with its last holder
    held.close()
    held.close()
    assert read_pins(objects, clock.now_ms()) == ()


def test_many_partitions_are_restored_under_one_pin(objects: MemoryObjects, clock: ManualClock) -> None:
    counted = CountedObjects(objects)
    with opened(counted, clock) as store:
        store.create_topic("wide", partitions=40, configs=CONFIGS)
        store.append("wide", [Record(b"k%d" % n, b"v", NOW_MS) for n in range(300)])
        before = counted.requests.copy()
        assert len(as_rows(store.restore("wide"))) == 300
        for _ in range(5):
            latest_of_key(store, store.topic("wide"), b"k1")
        assert counted.requests["create"] - before["create"] == 1
    assert counted.requests["delete"] == 1
    assert not counted.requests["list"]


def test_a_reader_by_position_takes_no_pin(objects: MemoryObjects, clock: ManualClock) -> None:
    counted = CountedObjects(objects)
    store = opened(counted, clock)
    assert len(list(store.reader("orders", 0).records(0)))
    assert sum(len(each.records) for each in store.follow("orders", wait=False))
    assert not counted.requests["create"]


def test_who_may_not_write_reads_without_a_pin(objects: MemoryObjects, clock: ManualClock) -> None:
    class ReadOnly(CountedObjects):
        def create(self, key: str, data: bytes) -> Version:
            raise AccessDenied("create was refused (403)", file=key)

    store = opened(ReadOnly(objects), clock)
    assert len(as_rows(store.restore("orders"))) == 30
    assert read_pins(objects, clock.now_ms()) == ()
