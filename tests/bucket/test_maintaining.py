"""Maintenance of a store in a bucket: what is deleted and when, pins, sweeps, and a fault at every call of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from bucket.small_store import all_keys
from logstore.bucket import committing, inline_seal
from logstore.bucket.collecting import Ages, Collector, decode_floor, encode_floor
from logstore.bucket.commit_file import LOG, Entry, commit_key
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import HOUR_MS, Floor
from logstore.bucket.keys import new_nonce, pin_key
from logstore.bucket.maintaining import Maintained, MaintenanceRules, maintain
from logstore.bucket.pins import encode_pin, read_pins
from logstore.bucket.rows import Kind
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.errors import (
    CommitConflict,
    CommitUnknown,
    DiskFull,
    DuramenError,
    ObjectStoreUnavailable,
    RetriableError,
    UnsuitableObjectStore,
)
from logstore.files import OS_FILES, File, FileSystem
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects, Version
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.records.record import Record

NOW_MS = 1_700_000_000_000
DAY_MS = 24 * HOUR_MS
QUICK = Patience(deadline_s=5, first_wait_s=0.001, sleep=lambda _: None, monotonic=lambda: 0.0)
RULES = MaintenanceRules(seal=SealRules(force=True), force_compaction=True, map_bytes=1 << 20)
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "1500", "delete.retention.ms": "0"}


def opened(objects: Objects, clock: ManualClock, *, create: bool = False) -> BucketStore:
    return BucketStore("memory://test", create=create, objects=objects, clock=clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def objects(clock: ManualClock) -> MemoryObjects:
    return MemoryObjects(clock)


@pytest.fixture
def store(objects: MemoryObjects, clock: ManualClock) -> BucketStore:
    store = opened(objects, clock, create=True)
    store.create_topic("orders", partitions=2, configs=CONFIGS)
    fill(store, 1)
    return store


def fill(store: BucketStore, seed: int, topic: str = "orders", batches: int = 3) -> None:
    rng = random.Random(seed)
    for _ in range(batches):
        store.append(
            topic,
            [Record(b"k%d" % rng.randrange(9), rng.randbytes(40), store.clock.now_ms()) for _ in range(20)],
        )


def run(store: BucketStore, rules: MaintenanceRules = RULES) -> Maintained:
    done = maintain(store, rules)
    assert not done.failed, done.failed
    return done


def latest(store: BucketStore, topic: str = "orders") -> dict[bytes | None, bytes | None]:
    found = {}
    for number in range(store.topic(topic).partitions):
        reader = store.reader(topic, number)
        found.update({each.key: each.value for each in reader.records(reader.log_start_offset())})
    return found


def named_objects(store: BucketStore) -> set[str]:
    """What manifests list, and what rows above the floor name."""
    names = set()
    floors = Collector(store).floors()
    for row in store.ledger.refresh().rows:
        if row.topic_id and row.kind is not Kind.ENDED:
            for number in range(len(row.end_offsets)):
                manifest = store.manifests.read(row.topic_id, number).manifest
                names |= {segment.key for segment in manifest.segments} if manifest else set()
        if row.plan and any(seq > floors.get(topic, Floor()).freed for topic, seq in row.plan.topics):
            names |= {row.plan.key, *(key for key, _, _ in store.shelf.plans.get(row.plan).files)}
    return names


def write_once(objects: MemoryObjects) -> set[str]:
    return {key for key in all_keys(objects) if key.startswith(("data/", "logs/", "pages/"))}


def test_what_nobody_needs_goes_after_the_grace_and_not_before(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    kept = latest(store)
    done = run(store)
    assert len(done.sealed) == 2
    assert done.compacted
    before = write_once(objects)
    clock.advance(DAY_MS - HOUR_MS)
    done = run(store)
    assert (done.garbage, done.plans) == (0, 0)
    assert before <= write_once(objects)
    for _ in range(3):  # garbage gets its time from the run that finds it
        clock.advance(DAY_MS + HOUR_MS)
        run(store)
    assert write_once(objects) == named_objects(store)
    assert not [key for key in write_once(objects) if key.startswith("data/")]
    assert latest(store) == kept
    assert len([row for row in store.ledger.refresh().rows if row.kind is Kind.BATCH]) == 1  # the newest stays
    fill(store, 2)
    assert len(latest(opened(objects, clock))) == len(kept)


def test_a_pin_holds_what_its_reader_may_look_for(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    with store.pins.held():
        (pin,) = read_pins(objects, clock.now_ms())
        frozen = [store.reader("orders", number).frozen() for number in range(2)]
        expected = [list(reader.records(0)) for reader in frozen]
        key = next(head.key for head in objects.list("pins"))
        for _ in range(4):
            run(store)
            clock.advance(DAY_MS + HOUR_MS)
            # As the reader's thread does every twenty minutes.
            seen = objects.get(key)[1]
            objects.replace(key, encode_pin(replace(pin, expires_ms=clock.now_ms() + HOUR_MS)), seen)
        for _, names in ((reader, [*reader.look().view.segments]) for reader in frozen):
            for segment in names:
                store.shelf.cache.forget(segment.key)
        assert [list(reader.records(0)) for reader in frozen] == expected
    store.close()
    assert read_pins(objects, clock.now_ms()) == ()
    for _ in range(3):
        run(store)
        clock.advance(DAY_MS + HOUR_MS)
    assert write_once(objects) == named_objects(store)


def test_a_reader_that_died_leaves_a_pin_that_expires(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    objects.create(pin_key(new_nonce()), b"nobody can read this")
    assert len(read_pins(objects, clock.now_ms())) == 1
    clock.advance(3 * DAY_MS)
    assert read_pins(objects, clock.now_ms()) == ()
    run(store)
    assert not list(objects.list("pins"))


def test_objects_that_no_commit_named_are_swept_after_a_week(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    topic = store.topic("orders")
    orphans = {
        f"data/ab/{new_nonce()}/0-{new_nonce()}.batches",
        f"logs/{topic.id}/1/{7:020d}-{new_nonce()}",
        f"pages/{topic.id}/0/{new_nonce()}",
    }
    foreign = f"logs/{'x' * 22}/0/{0:020d}-{new_nonce()}"
    for key in (*orphans, foreign):
        objects.put(key, [b"left"])
    kept = latest(store)
    clock.advance(6 * DAY_MS)
    assert run(store).swept == []
    fill(store, 3)
    clock.advance(DAY_MS)
    before = store.ledger.refresh()
    generations = [store.manifests.read(topic.id, number).manifest for number in range(2)]
    assert set(run(store).swept) == orphans
    assert foreign in write_once(objects)
    assert len(latest(store)) == len(kept)
    # Who planned before the fence loses.
    assert store.ledger.refresh().sweeps == before.sweeps + 1
    with pytest.raises(CommitConflict):
        store.ledger.commit(before, Entry((), new_nonce()))
    for number, seen in enumerate(generations):
        after = store.manifests.read(topic.id, number).manifest
        assert seen is not None
        assert after is not None
        assert after.generation > seen.generation


def test_a_run_with_nothing_to_do_takes_one_request_for_each_partition(
    objects: MemoryObjects, clock: ManualClock
) -> None:
    counted = CountedObjects(objects)
    store = opened(counted, clock, create=True)
    store.create_topic("orders", partitions=20, configs=CONFIGS)
    fill(store, 1)
    rules = replace(RULES, sweep=False, force_compaction=False)
    run(store, rules)
    counted.requests.clear()
    run(store, replace(rules, seal=SealRules()))
    assert counted.requests.total() <= 20 + 20


def test_a_topic_that_ended_leaves_nothing(store: BucketStore, objects: MemoryObjects, clock: ManualClock) -> None:
    store.create_topic("other", partitions=1, configs=CONFIGS)
    fill(store, 4, "other")
    run(store)
    fill(store, 5, "other")
    store.delete_topic("other")
    kept = latest(store)
    for _ in range(4):
        run(store)
        clock.advance(DAY_MS + HOUR_MS)
    assert write_once(objects) == named_objects(store)
    assert latest(store) == kept


def test_a_clock_that_is_off_deletes_nothing(store: BucketStore, objects: MemoryObjects) -> None:
    before = set(all_keys(objects))
    late = BucketStore("memory://test", objects=objects, clock=ManualClock(NOW_MS + 61_000))
    with pytest.raises(UnsuitableObjectStore, match="clock"):
        maintain(late, RULES)
    assert set(all_keys(objects)) == before


def test_one_partition_with_a_fault_does_not_stop_the_others(store: BucketStore, objects: MemoryObjects) -> None:
    topic = store.topic("orders")
    objects.create(f"manifest/{topic.id}/0", b"not a manifest")
    done = maintain(store, RULES)
    assert {str(partition) for partition, _ in done.failed} >= {"orders-0"}
    assert [str(each.partition) for each in done.sealed] == ["orders-1"]


def test_floors_come_back() -> None:
    floor = Floor(3, "n", 7, NOW_MS, 6, 5)
    assert decode_floor(encode_floor(floor), "floors/x") == floor


def test_a_store_that_nobody_maintains_is_sealed_by_its_writer(
    objects: MemoryObjects, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline_seal, "TAIL_COMMITS", 8)
    monkeypatch.setattr(inline_seal, "LOOK_EVERY", 4)
    store = opened(objects, clock, create=True)
    store.create_topic("orders", partitions=2, configs=CONFIGS)
    for seed in range(12):
        fill(store, seed, batches=2)
    topic = store.topic("orders")
    views = [store.reader("orders", number).look().view for number in range(2)]
    assert all(len(view.tail) <= 12 for view in views)
    assert sum(len(list(store.reader("orders", number).records(0))) for number in range(2)) == 24 * 20
    # What goes wrong with it says nothing about the batch.
    objects.delete([views[0].tail[0].plan.key])  # type: ignore[union-attr]
    ends = store.ends(topic).high_watermarks
    for seed in range(6):
        fill(opened(objects, clock), seed, batches=2)
    assert sum(store.ends(topic).high_watermarks) == sum(ends) + 12 * 20


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_nothing_grows_in_a_store_that_is_maintained(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    """Each day some batches and a topic that comes and goes; a reader that stays open sees all of it."""
    sizes: list[Counter[str]] = []
    cursor, position = store.reader("orders", 0), 0
    follower = opened(objects, clock)
    follower.ledger._elapsed = lambda: Elapsed(clock.now_ms, clock.now_ms)
    follower.ledger._looked = follower.ledger._elapsed()
    for day in range(16):
        fill(opened(objects, clock), day, batches=8)
        store.create_topic("passing", configs=CONFIGS)
        fill(store, day, "passing", batches=2)
        store.delete_topic("passing")
        run(opened(objects, clock), replace(RULES, sweep=day % 8 == 7))
        for record in cursor.records(position):
            assert record.offset >= position
            position = record.offset + 1
        clock.advance(DAY_MS + HOUR_MS)
        sizes.append(Counter(head.key.split("/")[0] for head in objects.list("ledger")))
        sizes[-1].update(key.split("/")[0] for key in all_keys(objects) if not key.startswith(("ledger", "manifest")))
        sizes[-1]["rows"] = len(opened(objects, clock).ledger.view.rows) - day  # an ended topic keeps one row
    assert max(sizes[-1].values()) < 60, sizes[-1]
    for name, count in sizes[-1].items():
        assert count <= sizes[7][name] + 8 * (name == "floors"), (name, sizes)
    assert follower.ledger.refresh().version == opened(objects, clock).ledger.view.version
    assert position == store.ends(store.topic("orders")).high_watermarks[0]
    assert latest(follower) == latest(opened(objects, clock))


def test_topics_that_are_gone_take_no_requests(objects: MemoryObjects, clock: ManualClock) -> None:
    counted = CountedObjects(objects)
    store = opened(counted, clock, create=True)
    store.create_topic("orders", configs=CONFIGS)
    rules, requests = replace(RULES, sweep=False), []
    for day in range(20):
        store.create_topic("passing", partitions=5, configs=CONFIGS)
        fill(store, day, "passing", batches=1)
        store.delete_topic("passing")
        counted.requests.clear()
        run(store, rules)
        requests.append(counted.requests.total())
        clock.advance(DAY_MS + HOUR_MS)
    assert requests[-1] <= requests[9], requests


def test_a_commit_file_that_lands_when_its_version_is_gone_is_swept(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    for day in range(4):
        fill(store, day)
        run(store)
        clock.advance(DAY_MS + HOUR_MS)
    left = [head.key for head in objects.list(LOG)]
    assert commit_key(2) < left[0]
    objects.create(commit_key(2), b"two days late")
    kept = latest(opened(objects, clock))
    run(store)
    assert commit_key(2) not in [head.key for head in objects.list(LOG)]
    assert latest(opened(objects, clock)) == kept


def test_a_batch_without_app_whose_row_may_be_forgotten_is_not_written_again(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost; by the time it looks, the batch is sealed, freed and forgotten."""
    faulty = FaultyObjects(objects)
    asleep = [0]

    class Slept(Elapsed):
        def ms(self) -> int:
            return asleep[0]

    monkeypatch.setattr(committing, "Elapsed", Slept)

    class Sleeping(CountedObjects):
        def create(self, key: str, data: bytes) -> Version:
            if not key.startswith(LOG) or asleep[0]:
                return faulty.create(key, data)
            faulty.create(key, data)
            asleep[0] = 3 * DAY_MS
            for day in range(3):
                fill(store, day, batches=1)
                run(store)
                clock.advance(DAY_MS + HOUR_MS)
            raise ObjectStoreUnavailable("not answered", may_be_applied=True)

    before = sum(store.ends(store.topic("orders")).high_watermarks)
    writer = opened(Sleeping(objects), clock)
    with pytest.raises(CommitUnknown):
        writer.append("orders", [Record(b"k", b"once", NOW_MS)])
    assert sum(store.ends(store.topic("orders")).high_watermarks) == before + 1 + 3 * 20


# --- faults -----------------------------------------------------------------------------------------------------------


def prepared(clock: ManualClock) -> tuple[MemoryObjects, dict[bytes | None, bytes | None]]:
    """A store with something to do for every step: a tail, garbage that is due, level 0 that is free, orphans."""
    objects = MemoryObjects(clock)
    store = opened(objects, clock, create=True)
    store.create_topic("orders", partitions=1, configs=CONFIGS)
    for seed in range(2):
        fill(store, seed, batches=2)
        run(store)
    objects.put(f"data/ab/{new_nonce()}/0-{new_nonce()}.batches", [b"left"])
    objects.put(f"logs/{store.topic('orders').id}/0/{7:020d}-{new_nonce()}", [b"left"])
    for _ in range(2):
        clock.advance(DAY_MS + HOUR_MS)
        run(store, replace(RULES, sweep=False))
        fill(store, 9, batches=1)
    clock.advance(8 * DAY_MS)
    fill(store, 10, batches=1)
    return objects, latest(store)


def copied(objects: MemoryObjects, clock: ManualClock) -> MemoryObjects:
    """With the times that the objects had."""
    copy = MemoryObjects(clock)
    copy._stored = dict(objects._stored)
    copy._numbers = iter(range(1_000_000, 2_000_000))  # type: ignore[assignment]
    return copy


@pytest.fixture(scope="module")
def base() -> tuple[MemoryObjects, dict[bytes | None, bytes | None], int]:
    clock = ManualClock(NOW_MS)
    objects, kept = prepared(clock)
    return objects, kept, clock.now_ms()


@pytest.mark.parametrize("fault", [*EVERY, Fault.STALE], ids=lambda fault: fault.name)
def test_a_run_that_fails_anywhere_deletes_nothing_that_is_named(
    base: tuple[MemoryObjects, dict[bytes | None, bytes | None], int], fault: Fault, tmp_path: Path
) -> None:
    original, kept, now_ms = base
    rules = replace(RULES, ages=Ages(), folder=str(tmp_path))
    every = 1 if os.environ.get("DURAMEN_SOAK") else 3
    at, calls = -1, 1  # first without a fault
    while at < calls:
        clock = ManualClock(now_ms)
        objects = copied(original, clock)
        faulty = FaultyObjects(objects, {at: fault})
        store = opened(RetryingObjects(faulty, QUICK), clock)
        with contextlib.suppress(DuramenError):  # before the first partition, and behind the last
            maintain(store, rules)
        calls = max(calls, len(faulty.calls))
        faulty.faults.clear()
        faulty.land()
        after = opened(objects, clock)
        assert named_objects(after) <= write_once(objects), (fault, at)
        assert latest(after) == kept, (fault, at)
        at += every if at >= 0 else 1 + [*EVERY, Fault.STALE].index(fault) % every
    for _ in range(4):
        clock.advance(8 * DAY_MS)
        run(after)
    assert latest(after) == kept
    assert write_once(objects) == named_objects(after)
    assert calls > 30


# --- verify -----------------------------------------------------------------------------------------------------------


def verified(store: BucketStore) -> dict[str, tuple[int, tuple[str, ...]]]:
    topic = store.topic("orders")
    results = [verify_partition(store, store.source(topic, number)) for number in range(topic.partitions)]
    return {str(each.partition): (each.records, tuple(str(finding) for finding in each.findings)) for each in results}


def test_what_is_sound_is_found_sound_and_each_damage_where_it_is(
    store: BucketStore, objects: MemoryObjects, clock: ManualClock
) -> None:
    assert [findings for _, findings in verified(store).values()] == [(), ()]
    assert sum(records for records, _ in verified(store).values()) == 60
    run(store, replace(RULES, topics=("orders",)))
    fill(store, 7)
    readers = {f"orders-{number}": store.reader("orders", number) for number in range(2)}
    counts = {name: len(list(reader.records(0))) for name, reader in readers.items()}
    assert verified(store) == {name: (count, ()) for name, count in counts.items()}
    topic = store.topic("orders")
    sealed = {n: store.manifests.read(topic.id, n).manifest for n in range(2)}
    assert sealed[0] is not None
    assert sealed[1] is not None
    flipped, missing = sealed[0].segments[0], sealed[1].segments[-1]
    data = bytearray(objects.get(flipped.key)[0])
    data[flipped.log_bytes // 2] ^= 1
    objects.put(flipped.key, [data])
    objects.delete([missing.key])
    plan = next(row.plan for row in reversed(store.ledger.view.rows) if row.plan)
    found = verified(opened(objects, clock))
    assert flipped.key in found["orders-0"][1][0]
    assert missing.key in found["orders-1"][1][0]
    objects.delete([plan.key])
    assert any(plan.key in finding for finding in verified(opened(objects, clock))["orders-0"][1])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get)
def test_a_local_disk_that_is_full_or_refuses_a_file_costs_one_partition_its_turn(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """At some of the files that seals and passes open here: a typed failure, and the store stands as it was."""
    opened_files, failing, seen = type(OS_FILES).open, -1, 0

    def open_or_fail(self: FileSystem, path: str, **how: bool) -> File:
        nonlocal seen
        seen += 1
        if seen == failing:
            raise OSError(error, os.strerror(error), path)
        return opened_files(self, path, **how)  # type: ignore[arg-type]

    def maintained() -> Maintained:
        nonlocal seen
        store = opened(MemoryObjects(clock), clock, create=True)
        store.create_topic("orders", partitions=2, configs=CONFIGS)
        fill(store, 1)
        wanted, seen = latest(store), 0
        done = maintain(store, RULES)
        assert latest(store) == wanted
        for number in range(2):
            assert not verify_partition(store, store.source(store.topic("orders"), number)).findings
        return done

    monkeypatch.setattr(type(OS_FILES), "open", open_or_fail)
    assert not maintained().failed
    files = seen
    every = 1 if os.environ.get("DURAMEN_SOAK") else files // 8
    for failing in range(1, files, every):
        done = maintained()
        assert [type(each) for _, each in done.failed] in ([DiskFull], [RetriableError]), (failing, done.failed)
        assert done.sealed
