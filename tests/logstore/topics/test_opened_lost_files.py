"""A small file is lost: nothing follows from its absence. What it belonged to stays; what cannot be known is said."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore.clock import ManualClock
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.errors import AppendUnfinished, CorruptState, DamagedLog, LedgerError, StrayDirectory
from logstore.files import File, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topic import new_topic_id
from logstore.topics.registry import Topic
from logstore.upkeep.recovery import recover

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
LATER = ManualClock(10**15)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def append(store: LogStore, topic: str, count: int = 5) -> None:
    store.append(topic, [Record(b"key-%d" % number, b"new", 1_700_000_100_000) for number in range(count)])


@pytest.fixture
def later(store: LogStore, root: Path) -> Iterator[LogStore]:
    """The same store, long after everything was made."""
    with LogStore(root, clock=LATER, lock_wait_ms=50) as opened:
        yield opened


def test_a_topic_whose_file_is_gone_keeps_its_partitions_and_its_state(
    later: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    expected = read_all(later, "orders")
    file = root / "topics" / "orders.t"
    kept = file.read_bytes()
    file.unlink()
    before = tree(root / "logs"), tree(root / "state")
    assert later.sweep() == []
    assert (tree(root / "logs"), tree(root / "state")) == before
    with pytest.raises(StrayDirectory, match=f"orders-0 belongs to topic id {orders.id}"):
        later.create_topic("orders")
    assert later.topic_names() == []
    file.write_bytes(kept)
    assert read_all(later, "orders") == expected


def test_staged_batches_of_a_topic_whose_file_is_gone_are_kept(later: LogStore, root: Path) -> None:
    later.create_topic("orders")
    append(later, "orders")
    (plan,) = (root / "staging").glob("*-plan")
    kept = (root / "topics" / "orders.t").read_bytes()
    (root / "topics" / "orders.t").unlink()
    Committer(later).sweep()
    assert plan.is_dir()
    (root / "topics" / "orders.t").write_bytes(kept)
    later.delete_topic("orders")
    Committer(later).sweep()
    assert not plan.exists()


def test_staged_batches_whose_commit_the_ledger_has_lost_are_kept(later: LogStore, root: Path) -> None:
    later.create_topic("orders")
    append(later, "orders")
    append(later, "orders")
    plans = sorted((root / "staging").glob("*-plan"))
    assert len(plans) == 2
    max((root / "ledger" / "commits" / "_delta_log").glob("*.json")).unlink()
    with contextlib.suppress(LedgerError):
        Committer(later).sweep()
    assert sorted((root / "staging").glob("*-plan")) == plans


def test_an_append_gives_a_partition_its_metadata_back(
    store: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    expected = read_all(store, "orders")
    for number, damage in enumerate((Path.unlink, lambda path: path.write_bytes(b"\x00" * 43))):
        path = root / "logs" / f"orders-{number}" / "partition.metadata"
        kept = path.read_bytes()
        damage(path)
        append(store, "orders")
        assert path.read_bytes() == kept
        assert len(kept) == 43
    found = read_all(store, "orders")
    assert all(found[number][: len(expected[number])] == expected[number] for number in (0, 1))
    assert sum(map(len, found.values())) == sum(map(len, expected.values())) + 10
    assert list((root / "staging").glob("*-stray")) == []


def test_a_directory_that_names_another_topic_is_left_and_nothing_is_committed(
    store: LogStore, orders: Topic, root: Path
) -> None:
    append(store, "orders")
    path = root / "logs" / "orders-0" / "partition.metadata"
    path.write_text(f"version: 0\ntopic_id: {new_topic_id()}")
    before = tree(root / "logs")
    sequence = Committer(store).ledger.sequence(orders.id)
    with pytest.raises(StrayDirectory, match="orders-0 belongs to topic id"):
        append(store, "orders", 50)
    assert tree(root / "logs") == before
    assert Committer(store).ledger.sequence(orders.id) == sequence


def test_a_directory_without_metadata_that_holds_another_log_is_left(
    store: LogStore, orders: Topic, root: Path
) -> None:
    shutil.rmtree(root / "logs" / "orders-0")
    shutil.copytree(root / "logs" / "orders-1", root / "logs" / "orders-0")
    (root / "logs" / "orders-0" / "partition.metadata").unlink()
    before = tree(root / "logs")
    with pytest.raises(StrayDirectory, match="orders-0 does not say whose it is"):
        append(store, "orders", 50)
    assert tree(root / "logs") == before


def test_a_partition_directory_that_is_gone_is_not_replaced_by_an_empty_one(
    store: LogStore, orders: Topic, root: Path
) -> None:
    shutil.rmtree(root / "logs" / "orders-0")
    with pytest.raises(DamagedLog, match="directory is gone"):
        append(store, "orders", 50)
    with pytest.raises(DamagedLog, match="directory is gone"), store.writing(orders, 0, what="test"):
        pass
    assert not (root / "logs" / "orders-0").exists()


def test_without_its_ends_a_topic_with_records_is_not_empty(store: LogStore, orders: Topic, root: Path) -> None:
    """An imported topic has no commits in the ledger that would tell."""
    (root / "state" / orders.id / "ends").unlink()
    before = tree(root / "logs")
    for what in (lambda: store.ends(orders), lambda: append(store, "orders"), lambda: store.high_watermark(orders, 0)):
        with pytest.raises(CorruptState, match="nothing says which are committed"):
            what()
    assert tree(root / "logs") == before


def test_ends_of_another_topic_are_not_believed(store: LogStore, orders: Topic, root: Path, read_all: ReadAll) -> None:
    other = store.create_topic("other", partitions=orders.partitions)
    append(store, "other", 50)
    expected = read_all(store, "orders"), read_all(store, "other")
    mine, its = (root / "state" / topic.id / "ends" for topic in (orders, other))
    mine_was, its_was = mine.read_bytes(), its.read_bytes()
    mine.write_bytes(its_was)
    its.write_bytes(mine_was)
    for topic in (orders, other):
        with pytest.raises(CorruptState, match="ends of topic id"):
            append(store, topic.name)
    for topic in (orders, other):
        recover(store, topic)
    assert (read_all(store, "orders"), read_all(store, "other")) == expected
    append(store, "other")


def test_recover_does_not_empty_a_topic_that_lost_its_state_and_has_no_commits(
    store: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    """Lists of segments are made again before the ends are; an empty list is no proof that nothing is committed."""
    store.create_topic("other")
    append(store, "other")  # so that there is a ledger, which knows nothing of the imported topic
    expected = read_all(store, "orders")
    shutil.rmtree(root / "state" / orders.id)
    recover(store, orders)
    assert read_all(store, "orders") == expected


def test_without_its_segment_list_a_partition_is_not_empty(store: LogStore, orders: Topic, root: Path) -> None:
    (root / "state" / orders.id / "0").unlink()
    before = tree(root / "logs")
    with pytest.raises(CorruptState, match="segment list is gone"):
        store.partition_state(orders, 0)
    with pytest.raises(CorruptState, match="segment list is gone"), store.writing(orders, 0, what="test"):
        pass
    with pytest.raises(AppendUnfinished, match="segment list is gone"):
        append(store, "orders", 50)
    assert tree(root / "logs") == before


def test_a_deletion_takes_a_partition_that_lost_its_metadata_too(store: LogStore, orders: Topic, root: Path) -> None:
    (root / "logs" / "orders-0" / "partition.metadata").unlink()
    store.delete_topic("orders")
    assert list((root / "logs").glob("orders-*")) == []
    assert list((root / "topics").iterdir()) == []
    assert list((root / "state").iterdir()) == []
    assert store.create_topic("orders", partitions=2).id != orders.id


def test_a_deletion_leaves_what_another_topic_owns(store: LogStore, orders: Topic, root: Path) -> None:
    path = root / "logs" / "orders-1" / "partition.metadata"
    path.write_text(f"version: 0\ntopic_id: {new_topic_id()}")
    store.delete_topic("orders")
    assert [each.name for each in (root / "logs").glob("orders-*")] == ["orders-1"]


def test_a_damaged_id_costs_a_damaged_log_no_more_than_its_damage(
    store: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    """One bit makes an id another one, of no topic; it is nearly this topic's all the same."""
    Committer(store).flush(orders)
    expected = read_all(store, "orders")
    folder = root / "logs" / "orders-0"
    other = ("A" if orders.id[5] != "A" else "B").join((orders.id[:5], orders.id[6:]))
    (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {other}\n")
    *sealed, _ = sorted(folder.glob("*.log"))
    for path in sealed:  # no segment is as the list has it
        os.truncate(path, path.stat().st_size - 1)
    recover(store, orders)
    left = read_all(store, "orders")
    assert left[1] == expected[1]
    assert len(expected[0]) > len(left[0]) > len(expected[0]) / 2


def test_swapped_metadata_costs_a_damaged_log_no_more_than_its_damage(
    store: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    """The file names a topic that lives under another name: it is the file that is wrong, not the directory."""
    store.create_topic("other")
    append(store, "other")
    append(store, "orders")
    committer = Committer(store)
    committer.flush(orders)
    committer.flush(store.topic("other"))
    expected = read_all(store, "orders")
    ours, others = (root / "logs" / name for name in ("orders-0", "other-0"))
    given, taken = (each / "partition.metadata" for each in (ours, others))
    given_text, taken_text = given.read_bytes(), taken.read_bytes()
    given.write_bytes(taken_text)
    taken.write_bytes(given_text)
    first, *rest = sorted(ours.glob("*.log"))
    assert rest
    os.truncate(first, first.stat().st_size - 3)
    for name in ("orders", "other"):
        recover(store, store.topic(name))
    found = read_all(store, "orders")
    lost = [record.offset for record in expected[0] if record not in found[0]]
    assert found[1] == expected[1]
    assert [record for record in expected[0] if record.offset not in lost] == found[0]
    assert lost
    assert max(lost) < int(rest[0].stem)
    assert len(read_all(store, "other")[0]) == 5


def test_a_dry_run_without_a_segment_list_says_what_the_recovery_does(
    store: LogStore, orders: Topic, root: Path
) -> None:
    Committer(store).flush(orders)
    (root / "state" / orders.id / "0").write_bytes(b"")
    first = min((root / "logs" / "orders-0").glob("*.log"))
    os.truncate(first, first.stat().st_size - 3)

    def told(dry_run: bool) -> list[tuple[int, int, bool]]:
        losses = [loss for report in recover(store, orders, dry_run=dry_run) for loss in report.losses]
        return [(loss.base_offset, loss.end_offset, loss.at_most) for loss in losses]

    planned = told(dry_run=True)
    assert planned
    assert told(dry_run=False) == planned


def test_a_dry_run_knows_what_staging_has_of_a_partition_that_is_gone(store: LogStore, root: Path) -> None:
    topic = store.create_topic("late", configs={"cleanup.policy": "compact"})
    append(store, "late")
    Committer(store).flush(topic)
    append(store, "late")  # still in staging
    shutil.rmtree(root / "logs" / "late-0")
    (root / "state" / topic.id / "0").unlink()
    told = [
        [
            (loss.base_offset, loss.end_offset)
            for report in recover(store, topic, dry_run=dry_run)
            for loss in report.losses
        ]
        for dry_run in (True, False)
    ]
    assert told == [[(0, 5)], [(0, 5)]]


class Unreadable(OsFileSystem):
    """Every read of a file with that ending fails, as it does when a process has no descriptors left."""

    def __init__(self, ending: str, number: int) -> None:
        self.ending, self.number = ending, number

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if path.endswith(self.ending) and not create:
            raise OSError(self.number, os.strerror(self.number), path)
        return super().open(path, writable=writable, create=create, exclusive=exclusive)


@pytest.mark.parametrize("how", [lambda path: os.truncate(path, 0), Path.unlink], ids=["emptied", "missing"])
def test_a_segment_lost_together_with_the_list_is_reported(
    store: LogStore, orders: Topic, root: Path, how: Callable[[Path], None]
) -> None:
    """In a topic that is not compacted a gap is a loss, even where no list tells of the segment."""
    Committer(store).flush(orders)
    _, second, third, *_ = sorted((root / "logs" / "orders-0").glob("*.log"))
    (root / "state" / orders.id / "0").unlink()
    how(second)
    losses = [loss for report in recover(store, orders) for loss in report.losses]
    assert [(loss.base_offset, loss.end_offset) for loss in losses] == [(int(second.stem), int(third.stem))]


@pytest.mark.parametrize("policy", ["compact", "delete"])
@pytest.mark.parametrize("gone", ["first", "middle", "last", "all"])
@pytest.mark.parametrize("flushed", [0, 2])
def test_what_was_not_flushed_was_not_compacted_either_and_comes_from_staging_without_a_list(
    store: LogStore, root: Path, read_all: ReadAll, flushed: int, gone: str, policy: str
) -> None:
    topic = store.create_topic("late", configs={"cleanup.policy": policy, "segment.bytes": 100, "retention.ms": -1})
    committer = Committer(store)
    for batch in range(6):
        append_table(
            committer, "late", table_of([Record(b"k%d" % at, b"%d" % batch, 1_700_000_000_000) for at in range(3)])
        )
        if batch + 1 == flushed:
            committer.flush(topic)
    before = {record.offset: record for record in read_all(store, "late")[0]}
    recovery_point = store.ends(topic).recovery_points[0]
    logs = sorted((root / "logs" / "late-0").glob("*.log"))
    assert len(logs) > 4
    unflushed = [path for path in logs if int(path.stem) >= recovery_point]
    chosen = {"first": unflushed[:1], "middle": unflushed[1:3], "last": unflushed[-1:], "all": logs}[gone]
    for path in chosen:
        path.unlink()
    (root / "state" / topic.id / "0").unlink()
    told = [
        [
            (loss.base_offset, loss.end_offset)
            for report in recover(store, topic, dry_run=dry_run)
            for loss in report.losses
        ]
        for dry_run in (True, False)
    ]
    lost = [(0, recovery_point)] if gone == "all" and recovery_point else []
    assert told == [lost, lost]
    left = {record.offset: record for record in read_all(store, "late")[0]}
    assert left == {at: record for at, record in before.items() if not lost or at >= recovery_point}
    assert not any(report.found_damage for report in recover(store, topic))


@pytest.mark.parametrize("ends", ["there", "damaged", "gone with the state"])
def test_without_list_and_directory_the_loss_is_said_as_an_upper_bound(
    store: LogStore, orders: Topic, root: Path, ends: str
) -> None:
    """What compaction or retention had removed before is not known any more; the ledger still knows the end."""
    append(store, "orders", 50)
    Committer(store).flush(orders)
    high_watermark = store.high_watermark(orders, 0)
    shutil.rmtree(root / "logs" / "orders-0")
    (root / "state" / orders.id / "0").unlink()
    if ends == "damaged":
        (root / "state" / orders.id / "ends").write_bytes(b"no ends")
    elif ends != "there":
        shutil.rmtree(root / "state" / orders.id)
    planned = recover(store, orders, dry_run=True)
    recovered = recover(store, orders)
    for reports in (planned, recovered):
        losses = reports[0].losses
        assert [(each.base_offset, each.end_offset, each.at_most) for each in losses] == [(0, high_watermark, True)]


def test_without_ends_directory_and_ledger_kafkas_checkpoint_tells_where_a_partition_ended(
    store: LogStore, orders: Topic, root: Path
) -> None:
    high_watermark = store.high_watermark(orders, 0)
    assert high_watermark
    assert not store.has_ledger
    store.project_checkpoints()
    (root / "state" / orders.id / "ends").write_bytes(b"no ends")
    shutil.rmtree(root / "logs" / "orders-0")
    for reports in (recover(store, orders, dry_run=True), recover(store, orders)):
        lost = [offset for each in reports[0].losses for offset in range(each.base_offset, each.end_offset)]
        assert lost == list(range(high_watermark))
    assert store.high_watermark(orders, 0) == high_watermark


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("ending", ["orders.t", "partition.metadata", "ends"])
def test_an_error_of_the_system_is_no_sign_of_damage(
    store: LogStore, orders: Topic, root: Path, ending: str, number: int
) -> None:
    before = tree(root / "logs"), tree(root / "state"), tree(root / "topics")
    with LogStore(root, fs=Unreadable(ending, number), clock=LATER, lock_wait_ms=50) as failing:
        with pytest.raises(OSError, match=os.strerror(number)):
            append(failing, "orders", 50)
        with contextlib.suppress(OSError):
            failing.sweep()
    assert (tree(root / "logs"), tree(root / "state"), tree(root / "topics")) == before
