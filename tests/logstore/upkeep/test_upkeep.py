"""Changes to a store's partition, retention, deletion of records, recovery."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compaction_job import compact
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.directory.checkpoint import read_offset_checkpoint
from logstore.directory.state import SegmentEntry, write_state
from logstore.errors import CorruptState, DamagedLog, DuramenError, LockHeld, OffsetOutOfRange, UnknownTopic
from logstore.records.header import read_header
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.recovery import recover
from logstore.upkeep.retention import delete_records, retain
from reference.partition_writer import writing

BASE_MS = 1_700_000_000_000
WEEK_MS = 604_800_000
ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]


def records(count: int, mark: str = "x") -> list[Record]:
    return [Record(b"k", f"{mark}{number}".encode(), BASE_MS + number) for number in range(count)]


class Crash(BaseException):
    pass


def append_and_die(store: LogStore, topic: Topic, given: list[Record]) -> None:
    with writing(store, topic, 0, what="test") as log:
        log.append(given)
        log.flush()
        raise Crash


def values(found: list[Record]) -> list[bytes | None]:
    return [record.value for record in found]


# --- writing -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_published_and_read_by_others(
    store: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    ends = store.ends(orders)
    assert ends.high_watermarks == ends.last_stable_offsets == ends.recovery_points == (300, 200)
    with LogStore(root) as other:
        found = read_all(other, "orders")
    assert [len(found[number]) for number in (0, 1)] == [300, 200]
    assert found[1][7].value == b"value-1-7"


def test_a_new_topic_reads_as_empty(store: LogStore, read_all: ReadAll) -> None:
    store.create_topic("new", partitions=2)
    assert read_all(store, "new") == {0: [], 1: []}


def test_an_error_while_writing_publishes_nothing(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    with pytest.raises(Crash):
        append_and_die(store, orders, records(5))
    assert store.ends(orders).high_watermarks == (300, 200)
    assert len(read_all(store, "orders")[0]) == 300


def test_what_was_never_published_is_cut_before_the_next_write(
    store: LogStore, orders: Topic, read_all: ReadAll
) -> None:
    with pytest.raises(Crash):
        append_and_die(store, orders, records(5, "lost"))
    with writing(store, orders, 0, what="test") as log:
        assert log.log_end_offset == 300
        log.append(records(3, "kept"))
    assert values(read_all(store, "orders")[0][300:]) == [b"kept0", b"kept1", b"kept2"]


def test_a_clean_close_needs_no_scan(store: LogStore, orders: Topic) -> None:
    with writing(store, orders, 0, what="test") as log:
        assert log.recovery.clean
        assert log.recovery.segments_scanned == 0


def test_one_writer_at_a_time(store: LogStore, orders: Topic, root: Path) -> None:
    with (
        store.writing(orders, 0, what="the first"),
        LogStore(root, lock_wait_ms=20) as other,
        pytest.raises(LockHeld, match="for the first"),
        other.writing(orders, 1, what="the second"),
    ):
        pytest.fail("two writers")


def test_a_deleted_topic_takes_no_more_writes(store: LogStore, orders: Topic) -> None:
    store.delete_topic("orders")
    with pytest.raises(UnknownTopic), store.writing(orders, 0, what="test"):
        pytest.fail("written to nothing")
    store.create_topic("orders")
    with pytest.raises(UnknownTopic, match="created again"), store.writing(orders, 0, what="test"):
        pytest.fail("written to another topic")
    assert store.ends(store.topic("orders")).high_watermarks == (0,)


def test_records_without_ends_are_not_cut_off(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    os.unlink(store.layout.ends(orders.id))
    with pytest.raises(CorruptState, match="recover"), store.writing(orders, 0, what="test"):
        pytest.fail("would have cut 300 records")
    recover(store, orders)
    assert [len(found) for found in read_all(store, "orders").values()] == [300, 200]


def test_checkpoint_files_are_a_projection(store: LogStore, orders: Topic, root: Path) -> None:
    delete_records(store, orders, 1, before_offset=40)
    store.project_checkpoints()

    def entries(name: str) -> dict[str, int]:
        found = read_offset_checkpoint(store.fs, str(root / "logs" / name))
        return {str(partition): offset for partition, offset in found.items()}

    assert entries("replication-offset-checkpoint") == {"orders-0": 300, "orders-1": 200}
    assert entries("recovery-point-offset-checkpoint") == {"orders-0": 300, "orders-1": 200}
    assert entries("log-start-offset-checkpoint") == {"orders-1": 40}
    assert entries("cleaner-offset-checkpoint") == {}, "the cleaner has nothing to do with it"


# --- retention -----------------------------------------------------------------------------------------------------


def test_retention_by_time_tells_before_what_it_does(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    now_ms = BASE_MS + WEEK_MS + 151
    planned = retain(store, orders, 0, now_ms=now_ms, dry_run=True)
    assert [each.policy for each in planned.passes] == ["time"]
    assert len(read_all(store, "orders")[0]) == 300
    assert retain(store, orders, 0, now_ms=now_ms) == planned
    left = read_all(store, "orders")[0]
    assert left[0].offset == planned.log_start_offset
    assert left[-1].offset == 299
    assert 0 < left[0].offset <= 151
    assert retain(store, orders, 0, now_ms=now_ms).passes == ()
    assert len(read_all(store, "orders")[1]) == 200


def test_retention_can_take_everything_and_the_offsets_go_on(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    planned = retain(store, orders, 0, now_ms=BASE_MS + 2 * WEEK_MS, dry_run=True)
    assert retain(store, orders, 0, now_ms=BASE_MS + 2 * WEEK_MS) == planned
    assert read_all(store, "orders")[0] == []
    with writing(store, orders, 0, what="test") as log:
        assert log.append(records(1)).first_offset == 300


def test_retention_by_size(store: LogStore, orders: Topic) -> None:
    store.alter_topic("orders", configs={"retention.ms": -1, "retention.bytes": 5000})
    topic = store.topic("orders")
    planned = retain(store, topic, 0, now_ms=BASE_MS, dry_run=True)
    assert [each.policy for each in planned.passes] == ["size"]
    assert retain(store, topic, 0, now_ms=BASE_MS) == planned
    left = sum(segment.size_bytes for segment in store.partition_state(topic, 0).segments)
    assert 5000 <= left < 10000


def test_retention_waits_for_other_maintenance(store: LogStore, orders: Topic, root: Path) -> None:
    with (
        store.locks.maintenance(orders.id, 0, what="compaction"),
        LogStore(root, lock_wait_ms=20) as other,
        pytest.raises(LockHeld, match="for compaction"),
    ):
        retain(other, orders, 0, now_ms=BASE_MS)


# --- delete-records ------------------------------------------------------------------------------------------------


def test_deleted_records_are_hidden_at_once_and_for_good(
    store: LogStore, orders: Topic, root: Path, read_all: ReadAll
) -> None:
    planned = delete_records(store, orders, 0, before_offset=123, dry_run=True)
    assert (planned.log_start_offset_before, planned.log_start_offset) == (0, 123)
    assert store.partition_state(orders, 0).log_start_offset == 0
    assert delete_records(store, orders, 0, before_offset=123) == planned
    assert read_all(store, "orders")[0][0].offset == 123
    with LogStore(root) as other:
        assert read_all(other, "orders")[0][0].offset == 123
    assert delete_records(store, orders, 0, before_offset=5).log_start_offset == 123


def test_all_records_can_be_deleted_but_not_more(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    with pytest.raises(OffsetOutOfRange, match="high watermark is 300"):
        delete_records(store, orders, 0, before_offset=301)
    delete_records(store, orders, 0, before_offset=None)
    assert read_all(store, "orders")[0] == []


# --- recovery ------------------------------------------------------------------------------------------------------


def first_log(store: LogStore, topic: Topic, number: int, at: int = 0) -> str:
    state = store.partition_state(topic, number)
    name = f"{state.segments[at].base_offset:020d}.log"
    return os.path.join(store.layout.partition(topic.partition(number)), name)


def test_recovery_of_a_sound_topic_changes_no_record(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    before = read_all(store, "orders")
    reports = recover(store, orders)
    assert [report.found_damage for report in reports] == [False, False]
    assert all(report.segments_scanned > 3 for report in reports)
    assert read_all(store, "orders") == before
    assert store.ends(orders).high_watermarks == (300, 200)


def test_one_bad_batch_costs_its_own_records_and_no_others(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    before = read_all(store, "orders")
    path = first_log(store, orders, 0, at=2)
    with open(path, "r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 20)
    (planned,) = recover(store, orders, [0], dry_run=True)
    with pytest.raises(DuramenError):
        read_all(store, "orders")
    (report,) = recover(store, orders, [0])
    assert planned.cuts == report.cuts
    assert report.cuts[0]["file"] == path
    (loss,) = report.losses
    assert 0 < loss.end_offset - loss.base_offset < 20
    assert not loss.at_most
    left = read_all(store, "orders")
    assert left[0] == [each for each in before[0] if not loss.base_offset <= each.offset < loss.end_offset]
    assert left[1] == before[1]
    assert all(os.path.exists(each) for each in report.quarantined)
    with writing(store, orders, 0, what="test") as log:
        assert log.append(records(2)).first_offset == 300  # no offset is ever given twice
    assert [record.offset for record in read_all(store, "orders")[0][-2:]] == [300, 301]
    assert store.partition_state(orders, 0).losses == (loss,)
    assert [each.found_damage for each in recover(store, orders)] == [False, False]
    assert store.partition_state(orders, 0).losses == (loss,)


def test_a_log_that_lost_its_end_is_refused_until_recovered(store: LogStore, orders: Topic) -> None:
    path = first_log(store, orders, 0, at=-1)
    os.truncate(path, 10)
    with pytest.raises(DamagedLog, match="recover"), store.writing(orders, 0, what="test"):
        pytest.fail("appended over lost records")
    (report,) = recover(store, orders, [0])
    assert report.losses[-1].end_offset == 300
    with writing(store, orders, 0, what="test") as log:
        assert log.append(records(1)).first_offset == 300


@pytest.mark.parametrize("opened_by", ["settle", "flush", "writing"])
def test_a_flushed_segment_that_lost_bytes_is_still_missed_after_somebody_opened_the_log(
    store: LogStore, orders: Topic, opened_by: str
) -> None:
    """Opening writes the segment list again; what is listed is the only trace of bytes that are gone without a hole."""
    committer = Committer(store)
    committer.flush(orders)
    append_table(committer, "orders", table_of(records(40)))  # not flushed: this part of the log is looked through
    bases = [entry.base_offset for entry in store.partition_state(orders, 0).segments]
    os.truncate(first_log(store, orders, 0, at=1), 0)
    store.forget_tail(orders, 0)
    with contextlib.suppress(DamagedLog):
        if opened_by == "settle":
            Committer(store).settle_topic(orders)
        elif opened_by == "flush":
            Committer(store).flush(orders)
        else:
            with store.writing(orders, 0, what="test"):
                pass
    planned, done = (recover(store, orders, [0], dry_run=dry_run)[0] for dry_run in (True, False))
    for report in (planned, done):
        assert [(loss.base_offset, loss.end_offset) for loss in report.losses] == [(bases[1], bases[2])]
    assert not recover(store, orders, [0])[0].found_damage


def test_damage_of_a_flushed_segment_does_not_stand_in_the_way_of_what_was_not_flushed(
    store: LogStore, orders: Topic, read_all: ReadAll
) -> None:
    """After a power cut the log is looked through from the recovery point on, and no further back."""
    committer = Committer(store)
    committer.flush(orders)
    append_table(committer, "orders", table_of(records(40)))  # not flushed
    whole = read_all(store, "orders")
    path = Path(first_log(store, orders, 0))
    path.write_bytes(b"\xff" * path.stat().st_size)
    os.unlink(store.layout.tails(orders.id))
    Committer(store).settle_topic(orders)
    append_table(Committer(store), "orders", table_of(records(2)))
    os.unlink(store.layout.tails(orders.id))
    (report, _) = recover(store, orders)
    (loss,) = report.losses
    assert loss.base_offset == 0
    found = read_all(store, "orders")
    assert [each for each in found[0] if each.value not in (b"x0", b"x1")][-1] == whole[0][-1]
    assert sum(map(len, found.values())) == sum(map(len, whole.values())) - loss.end_offset + 2


def test_recovery_makes_damaged_state_anew(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    before = read_all(store, "orders")
    for path in (store.layout.partition_state(orders.id, 0), store.layout.ends(orders.id)):
        with open(path, "r+b") as file:
            file.write(b"garbage")
    with pytest.raises(CorruptState):
        store.ends(orders)
    reports = recover(store, orders, [0])
    assert len(reports) == 2, "without the ends all partitions are looked at"
    assert any("ends were rebuilt" in note for note in reports[0].notes)
    assert read_all(store, "orders") == before


@pytest.mark.parametrize("position", [0, 200, 700])
def test_a_batch_that_was_mended_in_quarantine_goes_back_between_its_neighbours(
    store: LogStore, orders: Topic, read_all: ReadAll, position: int
) -> None:
    before = read_all(store, "orders")
    path = Path(first_log(store, orders, 0, at=1))
    whole = path.read_bytes()
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
    (report,) = recover(store, orders, [0])
    assert report.losses
    (region,) = (Path(each) for each in report.quarantined)
    begin = int(region.name.split("-")[-1])
    region.write_bytes(whole[begin : begin + region.stat().st_size])
    (again,) = recover(store, orders, [0], readmit=True)
    assert not again.found_damage
    assert read_all(store, "orders") == before
    assert store.partition_state(orders, 0).losses == ()
    assert path.read_bytes() == whole


def test_what_was_put_back_is_not_a_loss_again_when_the_list_is_lost(
    store: LogStore, orders: Topic, read_all: ReadAll
) -> None:
    """The reasons in quarantine still speak of it: they tell of losses where the list cannot."""
    before = read_all(store, "orders")
    path = Path(first_log(store, orders, 0, at=1))
    whole = path.read_bytes()
    path.write_bytes(whole[:700] + bytes([whole[700] ^ 0xFF]) + whole[701:])
    (report,) = recover(store, orders, [0])
    (region,) = (Path(each) for each in report.quarantined)
    begin = int(region.name.split("-")[-1])
    region.write_bytes(whole[begin : begin + region.stat().st_size])
    recover(store, orders, [0], readmit=True)
    os.unlink(store.layout.partition_state(orders.id, 0))
    planned, done = (recover(store, orders, [0], dry_run=dry_run)[0] for dry_run in (True, False))
    assert planned.losses == done.losses == ()
    assert store.partition_state(orders, 0).losses == ()
    assert read_all(store, "orders") == before


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_a_segment_list_of_an_older_copy_is_made_again_from_the_directory(
    store: LogStore, read_all: ReadAll, policy: str
) -> None:
    """As `cp -r` of a store in use leaves it: the list was copied long before the last log file."""
    configs = {"cleanup.policy": policy, "segment.bytes": 1000, "file.delete.delay.ms": 0, "retention.ms": -1}
    topic = store.create_topic("keyed", configs=configs | {"min.cleanable.dirty.ratio": 0})
    list_path = Path(store.layout.partition_state(topic.id, 0))
    store.append("keyed", records(10))
    older = list_path.read_bytes()
    for number in range(8):
        store.append("keyed", records(20, mark=f"{number}-"))
    if policy == "compact":
        compact(store=store, topics=["keyed"], force=True)
    store.append("keyed", records(20))
    before = read_all(store, "keyed")
    list_path.write_bytes(older)
    planned, done = (recover(store, topic, dry_run=dry_run)[0] for dry_run in (True, False))
    assert planned.losses == done.losses == ()
    assert planned.found_damage
    assert done.found_damage
    assert read_all(store, "keyed") == before
    store.append("keyed", records(3))
    assert read_all(store, "keyed")[0][:-3] == before[0]
    assert not recover(store, topic)[0].found_damage


def test_what_an_older_version_set_aside_is_put_back(store: LogStore, orders: Topic, read_all: ReadAll) -> None:
    """It cut at the first bad batch, moved all later segments to quarantine, and began an empty one at the end."""
    before = read_all(store, "orders")
    directory = store.layout.partition(orders.partition(0))
    state = store.partition_state(orders, 0)
    bases = [entry.base_offset for entry in state.segments]
    folder = os.path.join(directory, "quarantine", "000001")
    os.makedirs(folder)
    cut = os.path.join(directory, f"{bases[1]:020d}.log")
    data = bytearray(Path(cut).read_bytes())
    file = store.fs.open(cut)
    second = read_header(file, 0, file.size())
    assert second is not None
    third = read_header(file, second.end_position, file.size())
    file.close()
    assert third is not None
    data[second.end_position + 70] ^= 0xFF
    os.truncate(cut, second.end_position)
    Path(folder, f"{bases[1]:020d}.log.from-{second.end_position}").write_bytes(data[second.end_position :])
    Path(folder, "reason.json").write_text('{"partition": "orders-0", "time_ms": 1, "cuts": []}')
    for base in bases[2:]:
        for path in Path(directory).glob(f"{base:020d}.*"):
            path.rename(Path(folder, path.name))
    Path(directory, f"{300:020d}.log").touch()
    kept = tuple(entry for entry in state.segments if entry.base_offset < bases[1])
    listed = (*kept, SegmentEntry(bases[1], second.end_position, -1), SegmentEntry(300, 0, -1))
    write_state(store.fs, store.layout.partition_state(orders.id, 0), replace(state, segments=listed))
    assert [each.offset for each in read_all(store, "orders")[0]] == list(range(second.next_offset))

    lost = (third.base_offset, third.next_offset)
    (planned,) = recover(store, orders, [0], readmit=True, dry_run=True)
    (report,) = recover(store, orders, [0], readmit=True)
    assert planned.readmitted == report.readmitted
    assert {source for source, _, _ in report.readmitted} == {"quarantine"}
    assert report.losses == (), "they were lost before"
    assert read_all(store, "orders")[0] == [each for each in before[0] if not lost[0] <= each.offset < lost[1]]
    state = store.partition_state(orders, 0)
    assert [(each.base_offset, each.end_offset) for each in state.losses] == [lost]
    assert max(entry.size_bytes for entry in state.segments) <= 2000, "rolled as an append would have"
    assert not recover(store, orders, [0], readmit=True)[0].readmitted


@pytest.mark.parametrize("list_is_lost", [False, True])
def test_a_batch_does_not_return_behind_tombstones_that_are_gone(
    store: LogStore, read_all: ReadAll, list_is_lost: bool
) -> None:
    """A deleted key would come back: its tombstone, which was newer than the batch, was compacted away."""
    configs = {"cleanup.policy": "compact", "segment.bytes": 1000, "delete.retention.ms": 0, "file.delete.delay.ms": 0}
    topic = store.create_topic("keyed", configs=configs)
    with writing(store, topic, 0, what="test") as log:
        log.append([Record(b"gone", b"value", BASE_MS)])
        log.append([Record(b"other", b"value", BASE_MS)])
    path = first_log(store, topic, 0)
    whole = Path(path).read_bytes()
    os.truncate(path, 0)
    Path(path).write_bytes(b"\xff" * 40 + whole[40:])
    (report,) = recover(store, topic)
    (loss,) = report.losses
    assert (loss.base_offset, loss.end_offset) == (0, 1)
    with writing(store, topic, 0, what="test") as log:
        log.append([Record(b"gone", None, BASE_MS)])
    for number in range(3):
        with writing(store, topic, 0, what="test") as log:
            log.append([Record(b"more%d" % number, b"x", BASE_MS)])
        compact(store=store, topics=["keyed"], force=True, roll_active=True, now_ms=BASE_MS + number * 100_000_000)
    assert b"gone" not in {each.key for each in read_all(store, "keyed")[0]}
    (region,) = Path(store.layout.partition(topic.partition(0)), "quarantine").glob("*/*.from-0")
    region.write_bytes(whole[: len(region.read_bytes())])
    if list_is_lost:
        os.unlink(store.layout.partition_state(topic.id, 0))
    (again,) = recover(store, topic, readmit=True)
    assert again.readmitted == []
    assert [(low, high) for low, high, _ in again.held_back] == [(0, 1)]
    assert b"gone" not in {each.key for each in read_all(store, "keyed")[0]}


def test_a_dry_run_of_retention_says_of_a_missing_segment_what_is_the_matter(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("t", configs={"cleanup.policy": "delete", "retention.ms": "1"})
        store.append("t", [Record(b"k", b"v")])
        (file,) = (tmp_path / "store" / "logs" / "t-0").glob("*.log")
        aside = file.with_suffix(".aside")
        file.rename(aside)
        with pytest.raises(DamagedLog, match=r"a segment of the list is missing.*duramen recover"):
            retain(store, topic, 0, now_ms=store.clock.now_ms(), dry_run=True)
        back = threading.Timer(0.2, aside.rename, [file])  # as a replacement looks from outside
        back.start()
        assert retain(store, topic, 0, now_ms=store.clock.now_ms(), dry_run=True).partition.partition == 0
        back.join()
