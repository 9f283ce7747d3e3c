"""The commit path without Spark: what one commit does to a store, and what it refuses before anything is decided."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed, Committer
from logstore.commit.plan import write_plan
from logstore.commit.plan_folder import Staging
from logstore.commit.produce import append_table, table_of
from logstore.commit.staging import EncodeOptions, StagedFile, StagedWriter
from logstore.errors import (
    AppendTooLarge,
    AppendUnfinished,
    CommitConflict,
    CommitUnknown,
    DiskFull,
    DuramenError,
    InvalidPartition,
    InvalidRecord,
    InvalidTimestamp,
    LockHeld,
    NullKey,
    RecordTooLarge,
    ReplayMismatch,
    TopicChanged,
    UnknownTopic,
)
from logstore.ledger import CommitRequest, Ledger
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.store import LogStore

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
NOW_MS = 1_700_000_000_000


def rows(count: int, *, tag: str = "v", keys: int = 7) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([b"k%d" % (n % keys) for n in range(count)]),
            "value": pa.array([b"%s-%d" % (tag.encode(), n) for n in range(count)]),
        }
    )


@pytest.fixture
def committer(store: LogStore) -> Committer:
    store.create_topic("orders", partitions=3, configs={"segment.bytes": 2000})
    return Committer(store)


def staged(store: LogStore) -> list[str]:
    return [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")]


def log_bytes(store: LogStore) -> int:
    return sum(path.stat().st_size for path in Path(store.layout.logs).glob("*/*.log"))


def assert_nothing_happened(committer: Committer) -> None:
    assert committer.ledger.commits() == []
    assert log_bytes(committer.store) == 0
    assert staged(committer.store) == []


# --- what a commit does ----------------------------------------------------------------------------------------------


def test_offsets_are_dense_and_keys_keep_the_order_of_their_rows(committer: Committer, read_all: ReadAll) -> None:
    for batch in range(4):
        append_table(committer, "orders", rows(100, tag=f"b{batch}"))
    found = read_all(committer.store, "orders")
    assert sum(map(len, found.values())) == 400
    for number, records in found.items():
        assert [record.offset for record in records] == list(range(len(records)))
        for record in records:
            assert record.key is not None
            assert partition_for_key(record.key, 3) == number
    for key in {record.key for records in found.values() for record in records}:
        values = [record.value for records in found.values() for record in records if record.key == key]
        wanted = [b"b%d-%d" % (batch, n) for batch in range(4) for n in range(100) if b"k%d" % (n % 7) == key]
        assert values == wanted


def test_the_partition_column_wins_and_null_leaves_it_to_the_key(committer: Committer, read_all: ReadAll) -> None:
    assert committer.store.topic("orders").keyed
    table = pa.table(
        {
            "key": pa.array([b"a", b"a", b"a", None]),
            "value": pa.array([b"1", b"2", b"3", b"4"]),
            "partition": pa.array([2, None, 0, 1], pa.int32()),
        }
    )
    append_table(committer, "orders", table)
    home = partition_for_key(b"a", 3)
    found = {
        (number, record.value) for number, records in read_all(committer.store, "orders").items() for record in records
    }
    assert found == {(2, b"1"), (home, b"2"), (0, b"3"), (1, b"4")}
    assert not committer.store.topic("orders").keyed  # a restore may no longer trust the key's partition


def test_rows_without_key_all_arrive(committer: Committer, read_all: ReadAll) -> None:
    table = pa.table({"key": pa.nulls(50, pa.binary()), "value": pa.array([b"%d" % n for n in range(50)])})
    append_table(committer, "orders", table)
    values = [record.value for records in read_all(committer.store, "orders").values() for record in records]
    assert sorted(values) == sorted(b"%d" % n for n in range(50))


def write_topics(committer: Committer, tables: dict[str, pa.Table], app: AppBatch | None = None) -> Committed:
    """Several topics in one commit, as the sink does it."""
    targets = {name: committer.target(name) for name in tables}
    staging = Staging(committer.store)
    writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=committer.store.clock.now_ms())
    for name, table in tables.items():
        for batch in table.to_batches():
            writer.write(targets[name], batch)
    return committer.commit(staging, [writer.finish()], {target.id: target for target in targets.values()}, app=app)


def test_several_topics_are_one_commit(committer: Committer, read_all: ReadAll) -> None:
    committer.store.create_topic("payments", partitions=2)
    append_table(committer, "payments", rows(5))
    done = write_topics(committer, {"orders": rows(30), "payments": rows(20)}, AppBatch("app", 0))
    assert (done.records, set(done.topics)) == (50, {"orders", "payments"})
    both = committer.ledger.find_plan(done.plan_id)
    assert {(row.topic, row.sequence, row.records, row.batch_id) for row in both} == {
        ("orders", 1, 30, 0),
        ("payments", 2, 20, 0),
    }
    assert len({row.version for row in both}) == 1
    assert sum(map(len, read_all(committer.store, "orders").values())) == 30
    assert sum(map(len, read_all(committer.store, "payments").values())) == 25


def test_an_empty_batch_of_no_app_commits_nothing(committer: Committer) -> None:
    done = append_table(committer, "orders", rows(0))
    assert done.records == 0
    assert_nothing_happened(committer)


def test_a_commit_is_flushed_and_its_staging_goes_with_the_flush_only(committer: Committer) -> None:
    store = committer.store
    topic = store.topic("orders")
    append_table(committer, "orders", rows(40))
    ends = store.ends(topic)
    assert sum(ends.high_watermarks) == 40
    assert (ends.recovery_points, ends.applied_sequence, ends.flushed_sequence) == ((0, 0, 0), 1, 0)
    assert committer.sweep() == []
    assert len(staged(store)) == 1
    flushed = committer.flush(topic)
    assert flushed == store.ends(topic)
    assert (flushed.recovery_points, flushed.flushed_sequence) == (flushed.high_watermarks, 1)
    assert staged(store) == []
    assert committer.flush(topic) == flushed


def test_the_staging_of_two_topics_stays_until_both_are_flushed(committer: Committer) -> None:
    store = committer.store
    store.create_topic("payments")
    write_topics(committer, {"orders": rows(10), "payments": rows(10)})
    committer.flush(store.topic("orders"))
    assert len(staged(store)) == 1
    store.delete_topic("payments")  # a topic that is no more waits for nothing
    assert committer.sweep() == []
    assert staged(store) == []


# --- replay ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_written_once_however_often_it_comes(committer: Committer) -> None:
    app = AppBatch("app", 3, "query-1")
    assert not append_table(committer, "orders", rows(10), app=app).replayed
    before = log_bytes(committer.store)
    for _ in range(3):
        assert append_table(committer, "orders", rows(10), app=app).replayed
    assert append_table(Committer(committer.store), "orders", rows(10), app=app).replayed
    assert log_bytes(committer.store) == before
    assert len(committer.ledger.commits()) == 1


def test_another_query_under_the_same_app_is_refused_by_name(committer: Committer) -> None:
    append_table(committer, "orders", rows(10), app=AppBatch("app", 3, "query-1"))
    before = log_bytes(committer.store)
    for batch_id in (3, 4, 0):
        with pytest.raises(ReplayMismatch) as caught:
            append_table(committer, "orders", rows(10), app=AppBatch("app", batch_id, "query-2"))
        text = str(caught.value)
        assert all(word in text for word in ("'app'", "query-1", "query-2", "adopt='query-1:3'", "new app_id"))
    assert log_bytes(committer.store) == before
    done = append_table(committer, "orders", rows(10), app=AppBatch("app", 0, "query-2", adopt="query-1:3"))
    assert not done.replayed
    assert append_table(committer, "orders", rows(10), app=AppBatch("app", 0, "query-2")).replayed
    assert not append_table(committer, "orders", rows(10), app=AppBatch("app", 1, "query-2")).replayed


def test_a_batch_id_that_went_back_is_refused_with_the_way_out(committer: Committer) -> None:
    append_table(committer, "orders", rows(10), app=AppBatch("app", 5, "query-1"))
    with pytest.raises(ReplayMismatch, match=r"at batch 5; batch 2 is older.*adopt='query-1:5'.*new app_id"):
        append_table(committer, "orders", rows(10), app=AppBatch("app", 2, "query-1"))
    assert not append_table(committer, "orders", rows(1), app=AppBatch("app", 2, "query-1", adopt="query-1:5")).replayed
    assert committer.ledger.last_batch("app").batch_id == 2  # type: ignore[union-attr]


def test_two_queries_that_both_saw_a_free_app_do_not_both_commit(committer: Committer) -> None:
    """The other one commits, to another topic, after we looked: the ledger refuses us, a second look says why."""
    committer.store.create_topic("payments")
    other = Committer(LogStore(committer.store.path))
    looked = committer.ledger.last_batch
    commits = 0

    def late(app_id: str) -> object:
        nonlocal commits
        found = looked(app_id)
        commits += 1
        if commits == 2:  # the look under the lease
            append_table(other, "payments", rows(3), app=AppBatch("app", 0, "query-2"))
        return found

    committer.ledger.last_batch = late  # type: ignore[method-assign, assignment]
    with pytest.raises(ReplayMismatch, match=r"query-2.*query-1"):
        append_table(committer, "orders", rows(10), app=AppBatch("app", 0, "query-1"))
    assert [row.topic for row in other.ledger.commits()] == ["payments"]
    assert len(staged(committer.store)) == 1


def test_a_writer_that_stalls_and_loses_its_lease_cannot_commit_late(committer: Committer, read_all: ReadAll) -> None:
    """Its plan is made on ends that another writer has moved since: the ledger refuses it, and it looks again."""
    store = committer.store
    other = Committer(LogStore(store.path))
    patch = pytest.MonkeyPatch()

    def stall(*given: object, **limits: object) -> None:
        patch.undo()
        append_table(other, "orders", rows(10, tag="other"))
        write_plan(*given, **limits)  # type: ignore[arg-type]

    patch.setattr(store.locks, "lease", lambda *_, **__: contextlib.nullcontext())  # lost, and nobody told it
    patch.setattr("logstore.commit.committer.write_plan", stall)
    append_table(committer, "orders", rows(10, tag="late"), app=AppBatch("app", 0))
    found = read_all(store, "orders")
    values = [record.value for records in found.values() for record in records]
    assert sorted(values) == sorted(b"%s-%d" % (tag, n) for tag in (b"other", b"late") for n in range(10))
    assert all([r.offset for r in records] == list(range(len(records))) for records in found.values())
    assert [row.app_id for row in committer.ledger.commits()] == [None, "app"]


# --- refused before anything is decided ------------------------------------------------------------------------------


def bad(**columns: pa.Array) -> pa.Table:
    good = {"key": pa.array([b"k"] * 3), "value": pa.array([b"v"] * 3)}
    return pa.table(good | columns)


@pytest.mark.parametrize(
    ("error", "table", "message"),
    [
        (NullKey, bad(key=pa.array([b"a", None, b"c"])), "row 4 has no key"),
        (RecordTooLarge, bad(value=pa.array([b"x", b"y" * 2000, b"z"])), "max.message.bytes is 1000"),
        (InvalidTimestamp, bad(timestamp=pa.array([1, NOW_MS, NOW_MS])), "message.timestamp.before.max.ms"),
        (InvalidTimestamp, bad(timestamp=pa.array([NOW_MS, None, -1])), "row 5 has the timestamp -1"),
        (
            InvalidPartition,
            bad(partition=pa.array([0, 1, 3], pa.int32())),
            "row 5 asks for partition 3; the topic has 3",
        ),
        (InvalidPartition, bad(partition=pa.array([0, -1, 1], pa.int32())), "row 4 asks for partition -1"),
        (InvalidRecord, bad(partition=pa.array(["0", "1", "2"])), "'partition' is string"),
    ],
)
def test_a_bad_row_stops_the_whole_batch(root: Path, error: type[DuramenError], table: pa.Table, message: str) -> None:
    with LogStore(root, create=True, clock=ManualClock(NOW_MS)) as store:
        store.create_topic(
            "state",
            partitions=3,
            configs={
                "cleanup.policy": "compact",
                "max.message.bytes": 1000,
                "message.timestamp.before.max.ms": 1_000_000,
            },
        )
        committer = Committer(store)
        with pytest.raises(error) as caught:
            append_table(committer, "state", pa.concat_tables([bad(), table], promote_options="default"))
        assert message in str(caught.value)
        assert_nothing_happened(committer)


def test_a_record_no_segment_takes_is_refused_before_the_commit(committer: Committer) -> None:
    """Once committed it could never be appended, and would stop the topic for good."""
    with pytest.raises(AppendTooLarge, match=r"segment\.bytes is 2000"):
        append_table(committer, "orders", pa.table({"value": pa.array([b"x" * 3000])}))
    assert_nothing_happened(committer)
    append_table(committer, "orders", rows(3))


def test_an_unknown_topic_is_refused(committer: Committer) -> None:
    with pytest.raises(UnknownTopic, match=r"ordres.*Did you mean orders"):
        append_table(committer, "ordres", rows(3))
    assert_nothing_happened(committer)


def test_a_full_disk_before_the_commit_changes_nothing(committer: Committer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1,) * 10))
    with pytest.raises(DiskFull, match="Nothing was committed"):
        append_table(committer, "orders", rows(30))
    assert_nothing_happened(committer)


def test_a_topic_altered_between_encoding_and_commit_is_encoded_again(committer: Committer, read_all: ReadAll) -> None:
    store = committer.store
    finish = StagedWriter.finish
    altered = 0

    def alter_then_finish(writer: StagedWriter, **given: int) -> StagedFile:
        nonlocal altered
        if altered < 2:
            altered += 1
            store.alter_topic("orders", partitions=3 + altered)
        return finish(writer, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedWriter, "finish", alter_then_finish)
        done = append_table(committer, "orders", rows(100))
    assert len(done.topics["orders"].end_offsets) == 5
    for number, records in read_all(store, "orders").items():
        assert all(partition_for_key(record.key or b"", 5) == number for record in records)
    assert len(committer.ledger.commits()) == 1
    assert len(staged(store)) == 1


def test_a_topic_altered_or_recreated_is_noticed_at_the_commit(committer: Committer) -> None:
    store = committer.store

    def commit_after(change: Callable[[], object]) -> None:
        target = committer.target("orders")
        staging = Staging(store)
        writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=0)
        writer.write(target, rows(3).to_batches()[0])
        file = writer.finish()
        change()
        committer.commit(staging, [file], {target.id: target})

    def recreate() -> None:
        store.delete_topic("orders")
        store.create_topic("orders", partitions=3)

    for change in (
        lambda: store.alter_topic("orders", configs={"segment.bytes": 5000}),
        recreate,
        lambda: store.delete_topic("orders"),
    ):
        with pytest.raises(TopicChanged):
            commit_after(change)
    assert_nothing_happened(committer)


def test_a_lease_that_is_held_stops_a_commit_with_its_holder_named(committer: Committer) -> None:
    store = committer.store
    with (
        LogStore(store.path) as other,
        other.locks.lease(store.topic("orders").id, what="a long visit"),
        pytest.raises(LockHeld, match=f"pid {os.getpid()}.*a long visit"),
    ):
        append_table(committer, "orders", rows(3))
    assert_nothing_happened(committer)


# --- an unknown outcome ----------------------------------------------------------------------------------------------


def test_an_unknown_outcome_that_did_commit_goes_on(committer: Committer, read_all: ReadAll) -> None:
    commit = Ledger.commit

    def commit_then_doubt(ledger: Ledger, request: CommitRequest) -> int:
        commit(ledger, request)
        raise CommitUnknown("the line went dead")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "commit", commit_then_doubt)
        done = append_table(committer, "orders", rows(10), app=AppBatch("app", 0))
    assert (done.records, done.replayed) == (10, False)
    assert [row.void for row in committer.ledger.commits()] == [False]
    assert sum(map(len, read_all(committer.store, "orders").values())) == 10


def test_an_unknown_outcome_that_did_not_commit_is_voided_and_tried_again(
    committer: Committer, read_all: ReadAll
) -> None:
    commit = Ledger.commit
    doubts = iter([True, True, False])
    requests: list[CommitRequest] = []

    def doubt(ledger: Ledger, request: CommitRequest) -> int:
        if next(doubts):
            requests.append(request)
            raise CommitUnknown("the line went dead")
        return commit(ledger, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "commit", doubt)
        append_table(committer, "orders", rows(10), app=AppBatch("app", 0))
    assert [row.void for row in committer.ledger.commits()] == [True, True, False]
    for request in requests:  # the one still on its way must fail now
        with pytest.raises(CommitConflict):
            committer.ledger.commit(request)
    append_table(committer, "orders", rows(10), app=AppBatch("app", 1))
    found = read_all(committer.store, "orders")
    assert sum(map(len, found.values())) == 20
    assert all([r.offset for r in records] == list(range(len(records))) for records in found.values())
    ends = committer.flush(committer.store.topic("orders"))
    assert (ends.applied_sequence, ends.flushed_sequence) == (4, 4)
    assert staged(committer.store) == []


# --- after the commit ------------------------------------------------------------------------------------------------


def test_an_append_that_fails_leaves_a_batch_that_the_next_writer_finishes(
    committer: Committer, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    app = AppBatch("app", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logstore.commit.apply.apply_partitions", full)
        with pytest.raises(AppendUnfinished, match=r"is committed.*No space left.*Nothing is lost"):
            append_table(committer, "orders", rows(10), app=app)
    assert log_bytes(committer.store) == 0
    assert committer.sweep() == []  # a commit names it
    assert append_table(committer, "orders", rows(10), app=app).replayed
    assert sum(map(len, read_all(committer.store, "orders").values())) == 10


def test_a_committed_plan_is_settled_after_its_topic_was_widened(committer: Committer, read_all: ReadAll) -> None:
    def die(*_: object) -> None:
        raise OSError(5, "gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logstore.commit.apply.apply_partitions", die)
        with pytest.raises(AppendUnfinished):
            append_table(committer, "orders", rows(30))
    committer.store.alter_topic("orders", partitions=6)
    append_table(committer, "orders", rows(60, tag="w", keys=40))
    found = read_all(committer.store, "orders")
    assert sum(map(len, found.values())) == 90
    assert sum(len(found[number]) for number in (3, 4, 5)) > 0
    assert len(committer.flush(committer.store.topic("orders")).recovery_points) == 6


def test_a_plan_waits_for_the_directory_of_a_topic_that_was_here_before(
    committer: Committer, read_all: ReadAll
) -> None:
    """The old topic's directory lies in the way: a crash came between the deletion and the making of the new one."""
    store = committer.store
    for _ in range(6):  # ids are random: some sort before, some after
        append_table(committer, "orders", rows(9))
        topic = store.topic("orders")
        old = Path(store.layout.partition(topic.partition(0)))
        keep = old.with_name("keep")
        os.rename(old, keep)
        definition = Path(store.layout.topic("orders")).read_bytes()
        store.delete_topic("orders")
        Path(store.layout.topic_mark(topic.id, ".deleted")).write_bytes(definition)
        store.create_topic("orders", partitions=3)
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
        os.rename(keep, old)
        append_table(committer, "orders", rows(30))
        assert sum(map(len, read_all(store, "orders").values())) == 30


# --- sweep -----------------------------------------------------------------------------------------------------------


def test_a_sweep_takes_only_what_no_commit_names_and_nobody_fills(root: Path) -> None:
    clock = ManualClock(0)
    with LogStore(root, create=True) as store:
        clock.set(store.clock.now_ms())
        store.clock = clock
        store.create_topic("orders", partitions=2)
        committer = Committer(store)
        committed = append_table(committer, "orders", rows(10)).plan_id
        live = Staging(store)
        dead = Staging(store)
        dead._lock.release()  # as a killed process leaves it
        batch_write = store.layout.plan("0" * 32)
        os.mkdir(batch_write)
        assert committer.sweep() == [dead.plan_id]
        assert sorted(name.split("-")[0] for name in staged(store)) == sorted([committed, live.plan_id, "0" * 32])
        clock.advance(25 * 3_600_000)
        assert committer.sweep() == ["0" * 32]
        live.close()
        assert [name.split("-")[0] for name in staged(store)] == [committed]


# --- order of what is made durable -----------------------------------------------------------------------------------


def test_everything_is_durable_before_what_depends_on_it(root: Path) -> None:
    """Design 4: staged files, then the plan and their folder, then the decision, ends at publish, staging last."""
    from logstore.files import OsFile, OsFileSystem

    trace: list[str] = []

    def note(kind: str, path: str) -> None:
        parts = Path(path).relative_to(root).parts
        where = "".join(parts) if len(parts) < 2 else f"{parts[0]}/{Path(path).suffix or Path(path).name[-4:]}"
        trace.append(f"{kind} {where}")

    class Noted(OsFile):
        def fsync(self) -> None:
            note("fsync", self.path)
            super().fsync()

    class Files(OsFileSystem):
        def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> OsFile:
            file = super().open(path, writable=writable, create=create, exclusive=exclusive)
            return Noted(os.dup(file.fileno()), path)

        def fsync_dir(self, path: str) -> None:
            note("fsync_dir", path)
            super().fsync_dir(path)

        def unlink(self, path: str) -> None:
            note("unlink", path)
            super().unlink(path)

    with LogStore(root, create=True) as store:
        store.create_topic("orders", partitions=1)
        append_table(Committer(store), "orders", rows(1))
    with LogStore(root, fs=Files()) as store:
        committer = Committer(store)
        trace.clear()
        append_table(committer, "orders", rows(5))
        first = {step: trace.index(step) for step in trace}
        chain = [
            "fsync staging/.batches",
            "fsync_dir staging/plan",
            "fsync staging/.tmp",  # the plan, before it gets its name
            "fsync_dir staging",
            "fsync ledger/.parquet",
            "fsync ledger/.json",
            "fsync state/.tmp",  # the ends
        ]
        assert sorted(chain, key=first.__getitem__) == chain
        assert not any(step.startswith(("fsync logs", "unlink staging")) for step in trace)
        trace.clear()
        committer.flush(store.topic("orders"))
        steps = [step for step in trace if not step.startswith("fsync ledger")]
        assert max(n for n, step in enumerate(steps) if step.startswith("fsync logs")) < steps.index("fsync state/.tmp")
        assert steps.index("fsync_dir logs/rs-0") < steps.index("fsync state/.tmp")
        assert steps.index("fsync state/.tmp") < min(n for n, s in enumerate(steps) if s.startswith("unlink staging"))


# --- LogStore and plain records --------------------------------------------------------------------------------------


def test_plain_records_keep_headers_and_times(committer: Committer, read_all: ReadAll, seed: int) -> None:
    rng = random.Random(seed)
    given = [
        Record(b"k%d" % n, None if n % 5 == 0 else rng.randbytes(20), NOW_MS + n, (("h", b"%d" % n), ("h", None)))
        for n in range(50)
    ]
    committer.store.append("orders", given[:25])
    committer.store.append("orders", table_of(given[25:]))
    found = [record for records in read_all(committer.store, "orders").values() for record in records]
    wanted = {record.key: (record.value, record.timestamp_ms, record.headers) for record in given}
    assert {record.key: (record.value, record.timestamp_ms, tuple(record.headers)) for record in found} == wanted


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_producer_compression_is_used_and_read_back(committer: Committer, read_all: ReadAll, codec: str) -> None:
    table = pa.table({"key": pa.array([b"k"] * 200), "value": pa.array([b"the same again " * 5] * 200)})
    done = append_table(committer, "orders", table, options=EncodeOptions(compression_type=codec))
    assert done.bytes < 200 * 75 / 3
    assert sum(map(len, read_all(committer.store, "orders").values())) == 200
