"""A commit of the ledger that is gone or damaged costs what nothing else tells of, and no store is a dead end."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable

import pyarrow as pa
import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from bucket.small_store import mend_ledger
from bucket.test_arriving import LATER_MS
from bucket.test_mending import flip, overwrite, reopened
from logstore.bucket.commit_file import SUMMARY, commit_key
from logstore.bucket.examining import examine
from logstore.bucket.ledger_mending import carry_out, look_at_ledger
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.mending import mend_partition
from logstore.bucket.rows import Kind
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.errors import DuramenError, LedgerError, ReplayMismatch
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.records.record import Record

DAY_MS = 24 * 3_600_000
TOPICS = {"a": 2, "b": 1}


def filled(rng: random.Random) -> BucketStore:
    """Batches of apps and of nobody, some sealed; every commit from the first on, and no summary but of the newest."""
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    for name, partitions in TOPICS.items():
        store.create_topic(name, partitions=partitions, configs={"retention.ms": "-1"})
    written = 0
    for batch in range(8):
        clock.advance(1000)
        name = rng.choice(list(TOPICS))
        app = AppBatch("app", written, "q") if rng.random() < 0.6 else None
        written += app is not None
        store.append(name, [Record(b"k%d" % rng.randrange(99), rng.randbytes(9), LATER_MS) for _ in range(7)], app=app)
        if batch == rng.randrange(8):
            maintain(store, MaintenanceRules(seal=SealRules(force=True)))
        if batch == 5:
            store.alter_topic("a", configs={"segment.bytes": "4000"})
    store.append("b", [Record(b"last", b"last", LATER_MS)])
    return store


def content(store: BucketStore) -> dict[tuple[str, int], dict[int, bytes | None]]:
    return {
        (name, number): {record.offset: record.value for record in store.reader(name, number).records(0)}
        for name, partitions in TOPICS.items()
        for number in range(partitions)
    }


def draft(store: BucketStore, objects: Objects | None = None) -> BucketStore:
    return BucketStore("memory://test", objects=objects or store.objects, clock=store.clock, is_draft=True)


def batches(store: BucketStore) -> list[int]:
    """Versions that hold a batch with a plan and are not the last."""
    found = []
    for version in range(store.ledger.refresh().version):
        entry = store.ledger._entries.get(version)
        if entry is not None and any(row.kind is Kind.BATCH for row in entry.rows):
            found.append(version)
    return found


def sealed_offset(store: BucketStore, topic_id: str, number: int) -> int:
    manifest = store.manifests.read(topic_id, number).manifest
    return manifest.sealed_offset if manifest else 0


HARMS: dict[str, Callable[[BucketStore, str], None]] = {
    "gone": lambda store, key: store.objects.delete([key]),
    "flipped": lambda store, key: overwrite(store, key, flip),
    "cut": lambda store, key: overwrite(store, key, lambda data: data.__delitem__(slice(len(data) // 3, None))),
    "empty": lambda store, key: overwrite(store, key, lambda data: data.clear()),
}


def goes_on(store: BucketStore) -> None:
    """Appends, seals, passes and clean-up work, and nothing is found damaged."""
    before = content(store)
    ends = {name: store.ends(store.topic(name)).high_watermarks for name in TOPICS}
    for name in TOPICS:
        assert store.topic(name).partitions == TOPICS[name]
        store.append(name, [Record(b"new", b"new", LATER_MS)])
    for _ in range(3):
        assert not maintain(store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True)).failed
        store.clock.advance(2 * DAY_MS)  # type: ignore[attr-defined]
    store = reopened(store)
    assert examine(store) == []
    after = content(store)
    for (name, number), records in before.items():
        new = {offset: value for offset, value in after[name, number].items() if offset not in records}
        assert after[name, number].items() >= records.items()
        assert all(offset >= ends[name][number] and value == b"new" for offset, value in new.items())
        found = verify_partition(store, store.source(store.topic(name), number)).findings
        assert found == ()


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("summary", [True, False])
def test_a_lost_commit_is_brought_back_from_its_plan(rng: random.Random, harm: str, summary: bool) -> None:
    store = filled(rng)
    before, progress = content(store), store.ledger.refresh().app("app")
    newest = store.ledger.refresh().version
    behind = range(store.ledger.summarized() + 1, newest) if summary else batches(store)
    for version in [version for version in behind if version in batches(store)]:
        copy = copied(store)
        HARMS[harm](copy, commit_key(version))
        if not summary:
            copy.objects.delete([SUMMARY])
        keys = dict(everything(copy.objects))
        planned = mend_ledger(draft(copy), dry_run=True)
        assert dict(everything(copy.objects)) == keys, "a dry run changes nothing"
        assert mend_ledger(draft(copy), dry_run=False) == planned != []
        assert mend_ledger(draft(copy), dry_run=False) == [], "what is mended is sound"
        copy = reopened(copy)
        assert content(copy) == before, version
        assert copy.ledger.view.app("app") == progress or progress is not None
        goes_on(copy)


def test_a_commit_that_is_brought_back_does_not_say_where_keys_lie() -> None:
    """Rows placed by hand: that the topic's keys lie anywhere was in the lost commit alone."""
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    store.create_topic("a", partitions=2, configs={"retention.ms": "-1"})
    for partition, value in ((0, b"old"), (1, b"new")):
        clock.advance(1000)
        placed = pa.array([partition], pa.int32())
        store.append("a", pa.table({"key": [b"k"], "value": [value], "partition": placed}))
        if not partition:
            lost = store.ledger.refresh().version
    assert not store.topic("a").keyed
    store.objects.delete([commit_key(lost), SUMMARY])
    mend_ledger(draft(store), dry_run=False)
    store = reopened(store)
    assert not store.topic("a").keyed
    assert [row["value"] for batch in store.restore("a") for row in batch.to_pylist()] == [b"new"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_lost_commit_without_its_plan_costs_that_batch_and_no_other(rng: random.Random, harm: str) -> None:
    store = filled(rng)
    before = content(store)
    entries = dict(store.ledger._entries)
    for version in batches(store):
        copy = copied(store)
        (row,) = entries[version].rows
        assert row.plan is not None
        topic = store.ledger.view.definitions[row.topic_id].name
        spans = enumerate(zip(row.base_offsets, row.end_offsets, strict=True))
        batch = {(topic, number, offset) for number, (base, end) in spans for offset in range(base, end)}
        copy.objects.delete([SUMMARY, row.plan.key])
        HARMS[harm](copy, commit_key(version))
        look = look_at_ledger(draft(copy))
        named = {(t, n, offset) for t, n, base, end in look.lost_offsets for offset in range(base, end)}
        is_last = not any(later.topic_id == row.topic_id for v in entries if v > version for later in entries[v].rows)
        # Nothing tells of the last batch of a topic but what is sealed of it.
        sealed = {each for each in batch if each[2] < sealed_offset(store, row.topic_id, each[1])}
        assert named == batch - sealed or (is_last and named < batch)
        carry_out(draft(copy), look)
        copy = reopened(copy)
        lost = set()
        for name, partitions in TOPICS.items():
            for number in range(partitions):
                done = mend_partition(copy, copy.topic(name), number, dry_run=False)
                lost |= {(name, number, o) for each in done.losses for o in range(each.base_offset, each.end_offset)}
        assert lost <= named
        after, gone = content(reopened(copy)), batch - sealed if is_last else lost
        for (name, number), records in before.items():
            left = {offset: value for offset, value in records.items() if (name, number, offset) not in gone}
            assert after[name, number].items() >= left.items()
            assert not is_last or after[name, number].items() <= records.items()
            assert is_last or after[name, number] == left
        goes_on(reopened(copy))


def test_definitions_that_were_lost_come_back_from_their_copies(rng: random.Random) -> None:
    store = filled(rng)
    before, newest = content(store), store.ledger.refresh().version
    entries, topics = dict(store.ledger._entries), dict(store.ledger.view.definitions)
    defining = [v for v in range(1, newest) if any(row.kind is Kind.DEFINED for row in entries[v].rows)]
    assert len(defining) == 3
    for lost in (*([version] for version in defining), defining):
        copy = copied(store)
        copy.objects.delete([SUMMARY, *(commit_key(version) for version in lost)])
        assert mend_ledger(draft(copy), dry_run=False)
        copy = reopened(copy)
        assert {topic.name: dict(topic.configs) for topic in copy.topics()} == {
            topic.name: dict(topic.configs) for topic in topics.values()
        }
        assert content(copy) == before
        goes_on(copy)


def test_several_neighbours_that_are_gone_are_brought_back(rng: random.Random) -> None:
    store = filled(rng)
    before = content(store)
    versions = batches(store)
    copy = copied(store)
    copy.objects.delete([SUMMARY, *(commit_key(version) for version in versions[:4])])
    overwrite(copy, commit_key(versions[-1]), flip)
    assert mend_ledger(draft(copy), dry_run=False)
    copy = reopened(copy)
    assert content(copy) == before
    goes_on(copy)


def test_an_attempt_that_failed_is_not_taken_for_the_lost_commit(rng: random.Random) -> None:
    """Two writers of one topic, of which one was first; then its commit is lost. The other's plan fits, too."""
    store = filled(rng)
    other = reopened(store)
    before = {name: store.ends(store.topic(name)).high_watermarks for name in TOPICS}
    # Both plan for the same version: the loser's first plan stays.
    first, second = FaultyObjects(store.objects), FaultyObjects(other.objects)
    slow = BucketStore("memory://test", objects=second, clock=store.clock)
    quick = BucketStore("memory://test", objects=first, clock=store.clock)
    commit = slow.ledger.commit

    def late(*args: object, **kwargs: object) -> object:
        slow.ledger.commit = commit  # type: ignore[method-assign]
        quick.append("b", [Record(b"quick", b"quick", LATER_MS)])
        return commit(*args, **kwargs)  # type: ignore[arg-type]

    slow.ledger.commit = late  # type: ignore[assignment, method-assign]
    slow.append("b", [Record(b"slow", b"slow", LATER_MS)])
    store = reopened(store)
    whole, newest = content(store), store.ledger.refresh().version
    assert list(whole["b", 0].values())[before["b"][0] :] == [b"quick", b"slow"]
    store.objects.delete([SUMMARY])
    overwrite(store, commit_key(newest - 1), flip)
    assert mend_ledger(draft(store), dry_run=False)
    assert content(reopened(store)) == whole


def test_recovery_that_fails_anywhere_can_be_run_again(rng: random.Random) -> None:
    store = filled(rng)
    before, version = content(store), batches(store)[-2]
    harm = HARMS[rng.choice(list(HARMS))]

    def damaged() -> BucketStore:
        copy = copied(store)
        harm(copy, commit_key(version))
        copy.objects.delete([SUMMARY])
        return copy

    counted = FaultyObjects(damaged().objects)
    mend_ledger(draft(store, counted), dry_run=False)
    calls = len(counted.calls)
    numbers = range(calls) if os.environ.get("DURAMEN_SOAK") else sorted(rng.sample(range(calls), min(calls, 14)))
    for number in numbers:
        for fault in (*EVERY, None):
            copy = damaged()
            # None: the process dies there.
            faults = {number: fault} if fault else dict.fromkeys(range(number, calls + 99), Fault.BEFORE)
            faulty = FaultyObjects(copy.objects, faults)
            with contextlib.suppress(DuramenError):
                mend_ledger(draft(store, faulty), dry_run=False)
            faulty.land()
            mend_ledger(draft(copy), dry_run=False)
            assert mend_ledger(draft(copy), dry_run=False) == []
            copy = reopened(copy)
            assert content(copy) == before, (number, fault)
    goes_on(copy)


def test_a_writer_that_still_knows_the_lost_commit_is_fenced(rng: random.Random) -> None:
    store = filled(rng)
    newest = store.ledger.refresh().version
    key = [row.plan.key for row in store.ledger.view.rows if row.plan is not None][-1]
    copy = copied(store)
    writer = reopened(copy)  # it has read everything
    copy.objects.delete([SUMMARY, key])
    overwrite(copy, commit_key(newest), lambda data: data.clear())
    assert mend_ledger(draft(copy), dry_run=False)
    for number in range(1):
        mend_partition(reopened(copy), reopened(copy).topic("b"), number, dry_run=False)
    writer.append("b", [Record(b"behind", b"behind", LATER_MS)])
    assert "behind" in str(content(reopened(copy))["b", 0].values())
    goes_on(reopened(copy))


def test_who_wrote_a_lost_batch_is_not_guessed(rng: random.Random) -> None:
    clock = ManualClock(LATER_MS)
    store = BucketStore("memory://test", create=True, objects=MemoryObjects(clock), clock=clock)
    store.create_topic("b")
    record = [Record(b"k", b"v", LATER_MS)]
    for batch in range(3):
        store.append("b", record, app=AppBatch("app", batch, "q"))
    store.append("b", record)
    row, version = store.ledger.view.rows[3], store.ledger.view.version - 1
    assert row.plan is not None
    assert row.batch_id == 2
    store.objects.delete([SUMMARY, row.plan.key, commit_key(version)])
    mend_ledger(draft(store), dry_run=False)
    store = reopened(store)
    mend_partition(store, store.topic("b"), 0, dry_run=False)
    for app in (AppBatch("app", 2, "q"), AppBatch("other", 5, "q")):
        with pytest.raises(ReplayMismatch, match="may be in the log already"):
            store.append("b", record, app=app)
    store.append("b", record, app=AppBatch("app", 2, "q", adopt="q:1"))
    store.append("b", record, app=AppBatch("app", 3, "q"))


@pytest.mark.parametrize("gone", [True, False])
def test_a_summary_is_made_again_long_after_the_first_commits_went(rng: random.Random, gone: bool) -> None:
    store = filled(rng)
    for _ in range(4):
        maintain(store, MaintenanceRules(seal=SealRules(force=True)))
        store.clock.advance(2 * DAY_MS)  # type: ignore[attr-defined]
    assert commit_key(3) not in {head.key for head in store.objects.list("ledger")}
    for _ in range(3):
        store.append("a", [Record(b"k", b"v", LATER_MS)])
    before, view = content(store), store.ledger.refresh()
    if gone:
        store.objects.delete([SUMMARY])
    else:
        overwrite(store, SUMMARY, flip)
    assert mend_ledger(draft(store), dry_run=False)
    store = reopened(store)
    assert content(store) == before
    assert store.ledger.view.definitions == view.definitions
    assert store.ledger.view.app("app") == view.app("app")
    goes_on(store)


def test_without_summary_and_first_commits_nothing_is_made_up(rng: random.Random) -> None:
    store = filled(rng)
    store.objects.delete([SUMMARY, commit_key(0), commit_key(1)])
    with pytest.raises(LedgerError, match="commit 1, which it could be made from, is gone"):
        mend_ledger(draft(store), dry_run=True)


def everything(objects: Objects) -> list[tuple[str, bytes]]:
    prefixes = ("data", "logs", "pages", "manifest", "floors", "quarantine", "ledger", "topics", "duramen.json")
    return [(head.key, objects.get(head.key)[0]) for prefix in prefixes for head in objects.list(prefix)]


def copied(store: BucketStore) -> BucketStore:
    clock = ManualClock(store.clock.now_ms())
    objects = MemoryObjects(clock)
    for key, data in everything(store.objects):
        objects.put(key, [data])
    objects.put("duramen.json", [store.objects.get("duramen.json")[0]])
    return BucketStore("memory://test", objects=objects, clock=clock)
