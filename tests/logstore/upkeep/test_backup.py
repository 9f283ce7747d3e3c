"""A backup is a store of its own: complete as of one moment, sound, and open to appends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.directory.layout import BROKER_GUARD
from logstore.errors import BackupRefused, LockHeld
from logstore.partition.environment import LastKnown
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.transfer.kafka_export import export_topics
from logstore.upkeep.backup import backup
from logstore.upkeep.recovery import recover
from logstore.upkeep.verify import verify_partition
from reference.partition_writer import PartitionWriter, writing

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
SMALL = {"segment.bytes": 800, "index.interval.bytes": 100}


def records(count: int, tag: str = "v") -> list[Record]:
    return [Record(b"k%d" % n, f"{tag}{n}".encode(), 1000 + n, (("h", b"x"),)) for n in range(count)]


def findings(store: LogStore) -> list[object]:
    return [
        finding
        for topic in store.topics()
        for number in range(topic.partitions)
        for finding in verify_partition(
            store.fs,
            store.layout.partition(topic.partition(number)),
            partition=topic.partition(number),
            topic_id=topic.id,
            state_path=store.layout.partition_state(topic.id, number),
            high_watermark=store.high_watermark(topic, number),
        ).findings
    ]


@pytest.fixture
def full(store: LogStore) -> LogStore:
    store.create_topic("a", partitions=3, configs=SMALL)
    store.create_topic("b")
    store.create_topic("empty", partitions=2)
    committer = Committer(store)
    for batch in range(5):
        append_table(committer, "a", table_of(records(40, f"{batch}-")), app=AppBatch("app", batch, "q"))
    append_table(committer, "b", table_of(records(3)))
    return store


@pytest.mark.parametrize("link", [True, False])
def test_it_is_a_store_of_its_own(full: LogStore, tmp_path: Path, link: bool, read_all: ReadAll) -> None:
    target = str(tmp_path / "copy")
    done = backup(full, target, link=link)
    assert sum(each.copied_bytes for each in done.partitions) > 0
    assert (sum(each.linked_bytes for each in done.partitions) > 0) == link
    with LogStore(target) as copy:
        assert copy.topics() == full.topics()
        assert [read_all(copy, name) for name in ("a", "b", "empty")] == [
            read_all(full, name) for name in ("a", "b", "empty")
        ]
        assert findings(copy) == []
        committer = Committer(copy)
        # The ledger came too: a batch that is committed is known, and the next one is taken.
        again = append_table(committer, "a", table_of(records(40)), app=AppBatch("app", 4, "q"))
        assert again.replayed
        more = append_table(committer, "a", table_of(records(40, "new-")), app=AppBatch("app", 5, "q"))
        assert more.records == 40
        committer.flush(copy.topic("a"))
        assert sum(map(len, read_all(copy, "a").values())) == 240
        assert findings(copy) == []
    assert sum(map(len, read_all(full, "a").values())) == 200
    assert findings(full) == []


def test_both_go_their_own_way_afterwards(full: LogStore, tmp_path: Path, read_all: ReadAll) -> None:
    target = str(tmp_path / "copy")
    backup(full, target)
    before = read_all(full, "a")
    append_table(Committer(full), "a", table_of(records(10)))
    full.delete_topic("b")
    with LogStore(target) as copy:
        assert read_all(copy, "a") == before
        assert len(read_all(copy, "b")[0]) == 3
        copy.delete_topic("a")
    assert sum(map(len, read_all(full, "a").values())) == 210
    assert findings(full) == []


def test_settings_and_the_guard_against_brokers_come_along(full: LogStore, tmp_path: Path) -> None:
    with open(full.layout.settings, "w") as file:
        file.write('"log.segment.bytes" = 123456\n')
    target = tmp_path / "copy"
    backup(full, str(target))
    assert (target / "logs" / BROKER_GUARD).is_dir()
    assert (target / "logs" / "meta.properties").exists()
    assert (target / "logs" / "replication-offset-checkpoint").exists()
    assert os.listdir(target / "staging") == []
    with LogStore(target) as copy:
        assert copy.log_config(copy.topic("b")).segment_bytes == 123456


def test_a_commit_that_was_not_appended_yet_is_in_it(full: LogStore, tmp_path: Path, read_all: ReadAll) -> None:
    """A writer that died behind the commit: its batch counts, in the store as in the copy."""

    class Died(BaseException):
        pass

    committer = Committer(full)

    def die(*_: object, **__: object) -> None:
        raise Died

    committer._apply = die  # type: ignore[method-assign]
    with pytest.raises(Died):
        append_table(committer, "b", table_of(records(4, "late-")))
    assert len(read_all(full, "b")[0]) == 3
    target = str(tmp_path / "copy")
    backup(full, target)
    with LogStore(target) as copy:
        assert len(read_all(copy, "b")[0]) == 7


def test_while_appends_go_on_every_copy_is_whole_batches(full: LogStore, tmp_path: Path, read_all: ReadAll) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            with LogStore(full.path) as own:
                committer = Committer(own)
                batch = 5
                while not stop.is_set():
                    rows = table_of(records(40, f"{batch}-"))
                    append_table(committer, "a", rows, app=AppBatch("app", batch, "q"))
                    batch += 1
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with LogStore(full.path) as patient:
            for n in range(3):
                backup(patient, str(tmp_path / f"copy-{n}"))
    finally:
        stop.set()
        writer.join()
    assert failed == []
    sizes = []
    for n in range(3):
        with LogStore(tmp_path / f"copy-{n}") as copy:
            assert findings(copy) == []
            found = [record for part in read_all(copy, "a").values() for record in part]
            last = Committer(copy).ledger.last_batch("app")
            assert last is not None
            batches = {bytes(record.value or b"").split(b"-")[0] for record in found}
            assert len(found) == 40 * (last.batch_id + 1)
            assert len(batches) == last.batch_id + 1
            sizes.append(len(found))
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("place", ["inside", "taken", "file"])
def test_a_target_that_will_not_do(full: LogStore, tmp_path: Path, place: str) -> None:
    targets = {"inside": f"{full.path}/logs/copy", "taken": str(tmp_path), "file": str(tmp_path / "file")}
    (tmp_path / "file").touch()
    with pytest.raises(BackupRefused):
        backup(full, targets[place])


def test_what_stands_in_the_way_leaves_nothing_behind(full: LogStore, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    topic = full.topic("a")
    with LogStore(full.path) as other, other.locks.maintenance(topic.id, 0, what="compact"), pytest.raises(LockHeld):
        backup(full, str(target))
    assert not target.exists()


def _shared(target: Path) -> dict[str, bytes]:
    """What a backup or an export shares with the store, by name."""
    found = {str(path): path.read_bytes() for path in target.rglob("*.log") if path.stat().st_nlink > 1}
    assert found, "nothing is shared"
    return found


@pytest.mark.parametrize("how", ["backup", "export"])
@pytest.mark.parametrize("where", ["flipped", "emptied end"])
def test_recover_of_the_live_store_leaves_its_backups_and_exports_alone(
    store: LogStore, orders: Topic, tmp_path: Path, how: str, where: str
) -> None:
    target = tmp_path / "copy"
    if how == "backup":
        backup(store, str(target))
    else:
        export_topics(store, str(target), [orders])
    directory = Path(store.layout.partition(orders.partition(0)))
    first, last = (store.partition_state(orders, 0).segments[at].base_offset for at in (0, -1))
    own = directory / f"{first:020d}.log"
    data = bytearray(own.read_bytes())
    data[200] ^= 0xFF
    if where == "flipped":  # as the disk does it: in the one inode, and so in the copy, too
        own.write_bytes(data)
    else:
        os.truncate(directory / f"{last:020d}.log", 0)
    before = _shared(target)
    recover(store, orders, [0])
    assert {path: Path(path).read_bytes() for path in before} == before
    with writing(store, orders, 0, what="test") as log:
        log.append([Record(b"k", b"after", 1000)])
    assert {path: Path(path).read_bytes() for path in before} == before


def test_truncation_and_appends_copy_a_shared_segment_first(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    backup(store, str(tmp_path / "copy"))
    before = _shared(tmp_path / "copy")
    base = store.partition_state(orders, 0).segments[2].base_offset
    for inside in (3, 0):  # within a sealed segment, which becomes active, and at its very end
        with store.locks.lease(orders.id, what="test"):
            log = PartitionWriter.of(store.open_log(orders, 0, LastKnown(clean=True)))
            log.truncate_to(base + inside)
            log.append([Record(b"k", b"new", 1000)])
            log.close()
        assert {path: Path(path).read_bytes() for path in before} == before
