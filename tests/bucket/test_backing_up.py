"""Backups of stores in buckets, into buckets and directories: stores of their own that know where they are from."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bucket.faulty import READS, WRITES, Fault, FaultyObjects
from bucket.test_arriving import LATER_MS, WEEK_MS
from bucket.test_copying import KINDS, check_whole, content, filled, made
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.manifests import SeenManifest
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.store_face import Store
from logstore.errors import BackupRefused, DuramenError, MissingBatches, NotAStore
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.backing_up import back_up, back_up_into, check_target


def in_bucket(objects: Objects, clock: ManualClock | None = None, *, is_draft: bool = False) -> BucketStore:
    clock = clock or ManualClock(LATER_MS)
    return BucketStore("memory://copy", objects=objects, clock=clock, is_draft=is_draft)


def made_directory(path: str) -> Store:
    return LogStore(path, create=True, clock=ManualClock(LATER_MS))


def backed_up(store: Store, kind: str, path: Path, clock: ManualClock) -> Store:
    if kind == "directory":
        back_up(store, str(path), made_directory)
        return LogStore(path, clock=clock)
    objects = MemoryObjects(clock)
    back_up_into(store, in_bucket(objects, is_draft=True))
    return in_bucket(objects, clock)


@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_a_backup_is_a_store_of_its_own_that_knows_where_it_is_from(
    tmp_path: Path, source_kind: str, target_kind: str
) -> None:
    source, clock = made(source_kind, tmp_path / "source"), ManualClock(LATER_MS)
    filled(source)
    copy = backed_up(source, target_kind, tmp_path / "copy", clock)
    assert [(topic.name, topic.id) for topic in copy.topics()] == [(topic.name, topic.id) for topic in source.topics()]
    for name in ("orders", "accounts"):
        assert content(copy, name) == content(source, name)
    check_whole(copy)
    origin = copy.origin()
    assert origin is not None
    assert (origin.source, origin.taken_ms, origin.restored_ms) == (source.path, LATER_MS, None)
    assert source.origin() is None
    with pytest.raises(MissingBatches, match="is a copy of"):
        copy.append("orders", [Record(b"k", b"v", LATER_MS)], app=AppBatch("one", 9, "query"))
    clock.advance(5_000)
    assert copy.append("orders", [Record(b"k", b"v", LATER_MS)], app=AppBatch("one", 5, "query")).replayed
    copy.append("orders", [Record(b"k", b"new", LATER_MS)], app=AppBatch("one", 6, "query"))
    origin = copy.origin()
    assert origin is not None
    assert origin.restored_ms == LATER_MS + 5_000
    assert sum(map(len, content(copy, "orders"))) == sum(map(len, content(source, "orders"))) + 1


def test_maintenance_of_a_copy_misses_nothing_and_the_original_goes_its_own_way(tmp_path: Path) -> None:
    source = made("bucket", tmp_path / "source")
    assert isinstance(source, BucketStore)
    filled(source)
    source.create_topic("gone")
    source.append("gone", [Record(b"k", b"v", LATER_MS)])
    source.delete_topic("gone")
    source.alter_settings({"log.retention.ms": "-1"})
    expected = content(source, "orders")
    clock = ManualClock(LATER_MS)
    copy = backed_up(source, "bucket", tmp_path / "copy", clock)
    assert isinstance(copy, BucketStore)
    source.delete_topic("orders")
    assert copy.own_settings() == {"log.retention.ms": "-1"}
    for _ in range(3):
        done = maintain(copy, MaintenanceRules(seal=SealRules(force=True)))
        assert not done.failed
        clock.advance(2 * WEEK_MS)
    assert content(copy, "orders") == expected
    check_whole(copy)


def test_a_backup_while_writers_seal_and_collect_is_one_moment(tmp_path: Path) -> None:
    """What the source does between two requests of the backup does not show in it."""
    clock = ManualClock(LATER_MS)
    objects = MemoryObjects(clock)
    source = BucketStore("memory://source", create=True, objects=objects, clock=clock)
    filled(source)
    batches = 6

    class Busy:
        """Objects of the backup's own store: others commit, seal and collect between any two of its requests."""

        def __init__(self) -> None:
            self.calls = 0
            self.one_at_a_time = threading.Lock()

        def __getattr__(self, name: str) -> object:
            with self.one_at_a_time:
                self.others()
            return getattr(objects, name)

        def others(self) -> None:
            nonlocal batches
            self.calls += 1
            if self.calls % 7 == 0:
                source.append("orders", [Record(b"k", b"v", LATER_MS)], app=AppBatch("one", batches, "query"))
                batches += 1
            if self.calls % 11 == 0:
                maintain(source, MaintenanceRules(seal=SealRules(force=True)))

    busy = BucketStore("memory://source", objects=Busy(), clock=clock)  # type: ignore[arg-type]
    target = MemoryObjects(clock)
    back_up_into(busy, in_bucket(target, is_draft=True))
    copy = in_bucket(target)
    check_whole(copy)
    last = copy.commits().last_batch("one")
    assert last is not None
    assert sum(map(len, content(copy, "orders"))) == 6 * 40 + last.batch_id - 5


@pytest.mark.parametrize("fault", [*{*WRITES, *READS}], ids=lambda fault: fault.name)
def test_a_backup_that_fails_anywhere_is_no_store(tmp_path: Path, fault: Fault) -> None:
    source = made("bucket", tmp_path / "source")
    source.create_topic("orders")
    for batch in range(2):
        source.append("orders", [Record(b"k", b"%d" % batch, LATER_MS)], app=AppBatch("one", batch, "query"))
    counting = FaultyObjects(MemoryObjects(ManualClock(LATER_MS)))
    back_up_into(source, in_bucket(counting, is_draft=True))
    assert counting.calls[-1] == ("create", "duramen.json")
    for number in range(len(counting.calls)):
        inner = MemoryObjects(ManualClock(LATER_MS))
        faulty = FaultyObjects(inner, {number: fault})
        failed = False
        try:
            back_up_into(source, in_bucket(faulty, is_draft=True))
        except DuramenError:
            failed = True
            faulty.land()
            if number < len(counting.calls) - 1:  # the last call is the one that makes it a store
                with pytest.raises(NotAStore):
                    in_bucket(inner)
                continue
        try:
            copy = in_bucket(inner)
        except NotAStore:
            assert failed
            continue
        assert content(copy, "orders") == content(source, "orders")
        check_whole(copy)


def test_targets_that_will_not_do(tmp_path: Path) -> None:
    source = made("bucket", tmp_path / "source")
    filled(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BackupRefused, match="not an empty directory"):
        back_up(source, str(tmp_path / "full"), made_directory)
    url = f"memory:/{tmp_path}/taken"
    BucketStore(url, create=True)
    with pytest.raises(BackupRefused, match="something lies there already"):
        check_target(source, url)
    with pytest.raises(BackupRefused, match="something lies there already"):
        back_up(source, url, made_directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_a_topic_that_is_created_while_a_backup_reads_manifests_is_in_it_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment of a backup is one version of the ledger: topics, records and how far apps are belong together."""
    clock, objects = ManualClock(LATER_MS), MemoryObjects()
    store = BucketStore("memory://source", create=True, objects=objects, clock=clock)
    for name in ("a", "b"):
        store.create_topic(name)
        store.append(name, [Record(b"k", b"v", LATER_MS)])
    other = BucketStore("memory://source", objects=objects, clock=clock)
    read, created = store.manifests.read, []

    def create_first(topic_id: str, partition: int) -> SeenManifest:
        if not created:
            created.append(other.create_topic("c"))
            other.append("c", [Record(b"k", b"v", LATER_MS)], app=AppBatch("app", 0, "query"))
        return read(topic_id, partition)

    monkeypatch.setattr(store.manifests, "read", create_first)
    copy = backed_up(store, "bucket", tmp_path, clock)
    assert copy.topic_names() == ["a", "b", "c"]
    assert [len(content(copy, name)[0]) for name in copy.topic_names()] == [1, 1, 1]
    assert copy.append("c", [Record(b"k", b"v", LATER_MS)], app=AppBatch("app", 0, "query")).replayed
    check_whole(copy)
