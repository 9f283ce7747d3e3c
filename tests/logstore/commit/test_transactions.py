"""Open transactions of imported topics: found, and ended by a marker that goes the way of every append."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compaction.lab import Lab
from logstore.clock import ManualClock
from logstore.commit.committer import Committer
from logstore.commit.transactions import abort_transaction, open_transactions
from logstore.errors import AppendUnfinished, UnknownTopic, UnknownTransaction
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine
from logstore.upkeep.backup import backup
from reference.partition_writer import writing

NOW_MS = 1_700_000_000_000
SETTINGS = {"cleanup.policy": "compact", "segment.bytes": 1_000, "min.cleanable.dirty.ratio": 0}


def broker_directory(root: Path) -> Path:
    """`t-0`: records 0 to 9, transactions of producer 7 from 10 and of producer 8 from 15 on, records behind them."""
    root.mkdir()
    lab = Lab(root, segment_bytes=1_000, message_timestamp_before_max_ms=1 << 62)
    with lab.open() as log:
        log.append([Record(b"k%d" % at, b"v" * 50, NOW_MS) for at in range(10)], batch_bytes=200)
        for producer_id in (7, 8):
            batch = [Record(b"k%d" % at, b"%d" % producer_id, NOW_MS + producer_id) for at in range(5)]
            options = BatchOptions(transactional=True, producer_id=producer_id, producer_epoch=3, base_sequence=0)
            log.append_batches(encode_batch(columns_of(batch), options), origin=AppendOrigin.CLIENT)
        log.append([Record(b"k%d" % at, b"w" * 50, NOW_MS) for at in range(10, 20)], batch_bytes=200)
    return root


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    opened = LogStore(tmp_path / "store", create=True, clock=ManualClock(NOW_MS + 1_000))
    import_topics(opened, examine(opened.fs, str(broker_directory(tmp_path / "kafka")), limits=opened.limits), SETTINGS)
    return opened


def committed(store: LogStore) -> list[int]:
    return [r.offset for r in store.reader(store.topic("t"), 0).records(0, committed=True)]


def stable(store: LogStore) -> tuple[int, int]:
    ends = store.ends(store.topic("t"))
    return ends.last_stable_offsets[0], ends.high_watermarks[0]


def test_open_transactions_are_listed_by_their_first_offset(store: LogStore) -> None:
    found = open_transactions(store, store.topic("t"), 0)
    assert [(each.producer_id, each.producer_epoch, each.first_offset) for each in found] == [(7, 3, 10), (8, 3, 15)]
    assert [each.last_timestamp_ms for each in found] == [NOW_MS + 7, NOW_MS + 8]
    assert stable(store) == (10, 30)
    assert committed(store) == list(range(10))


def test_aborting_them_lets_readers_and_appends_go_on(store: LogStore) -> None:
    first = abort_transaction(store, "t", 0, 7)
    assert (first.marker_offset, first.last_stable_offset) == (30, 15)
    assert stable(store) == (15, 31)
    assert committed(store) == list(range(10))
    store.append("t", [Record(b"more", b"v", NOW_MS)])
    assert stable(store) == (15, 32), "the other one is still open"
    second = abort_transaction(store, "t", 0, 8)
    assert (second.marker_offset, second.last_stable_offset) == (32, 33)
    assert stable(store) == (33, 33)
    assert committed(store) == [*range(10), *range(20, 30), 31]
    assert open_transactions(store, store.topic("t"), 0) == []
    store.append("t", [Record(b"more", b"w", NOW_MS)])
    assert stable(store) == (34, 34)
    assert [row.sequence for row in Committer(store).ledger.commits_after(store.topic("t").id, 0)] == [1, 2, 3, 4]


def test_compaction_goes_on_and_removes_what_was_aborted(store: LogStore) -> None:
    from compaction_job import compact

    (held,) = compact(store, force=True, roll_active=True).runs
    assert held.plan.cleanable.first_uncleanable_offset <= 10
    for producer_id in (8, 7):  # in any order
        abort_transaction(store, "t", 0, producer_id)
    (run,) = compact(store, force=True, roll_active=True).done
    assert run.report is not None
    assert run.report.removed["aborted"] == 10
    assert committed(store) == [*range(10), *range(20, 30)]


@pytest.mark.parametrize("how", ["backup", "export"])
def test_what_was_aborted_stays_aborted_in_copies(store: LogStore, tmp_path: Path, how: str) -> None:
    """The marker lies in the last segment, which is copied without indexes and is too small for one of offsets."""
    store.append("t", [Record(b"large", b"v" * 900, NOW_MS)])
    for producer_id in (7, 8):
        abort_transaction(store, "t", 0, producer_id)
    if how == "backup":
        backup(store, str(tmp_path / "copy"))
        copy = LogStore(tmp_path / "copy")
    else:
        export_topics(store, str(tmp_path / "out"), store.topics())
        copy = LogStore(tmp_path / "copy", create=True)
        import_topics(copy, examine(store.fs, str(tmp_path / "out"), limits=store.limits), SETTINGS)
    assert committed(copy) == committed(store) == [*range(10), *range(20, 31)]


def test_what_is_not_open_is_refused_before_anything_is_written(store: LogStore) -> None:
    for topic, partition, producer_id, error in (
        ("t", 0, 9, UnknownTransaction),
        ("t", 1, 7, UnknownTopic),
        ("u", 0, 7, UnknownTopic),
    ):
        with pytest.raises(error):
            abort_transaction(store, topic, partition, producer_id)
    abort_transaction(store, "t", 0, 7)
    with pytest.raises(UnknownTransaction, match="producer 7 has no open transaction in t-0"):
        abort_transaction(store, "t", 0, 7)
    assert stable(store) == (15, 31)
    assert not any(name.endswith("-plan") for name in store.fs.listdir(store.layout.staging)[1:])


def test_two_that_abort_the_same_one_write_one_marker(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes between the look and the commit."""
    other = LogStore(store.path, clock=store.clock)
    original = Committer.commit

    def late(self: Committer, *arguments: object, **options: object) -> object:
        monkeypatch.undo()
        abort_transaction(other, "t", 0, 7)
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "commit", late)
    with pytest.raises(UnknownTransaction, match="ended meanwhile"):
        abort_transaction(store, "t", 0, 7)
    assert stable(store) == (15, 31)
    other.close()


@pytest.mark.parametrize("dies", ["append", "publish"])
def test_a_marker_that_was_committed_is_appended_by_the_next_writer(
    store: LogStore, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    def dead(*arguments: object, **options: object) -> None:
        raise RuntimeError("as if killed")

    monkeypatch.setattr(Committer, "_apply" if dies == "append" else "publish", dead)
    with pytest.raises(AppendUnfinished):
        abort_transaction(store, "t", 0, 7)
    assert stable(store) == (10, 30)
    monkeypatch.undo()
    with LogStore(store.path, clock=store.clock) as later:
        Committer(later).settle_topic(later.topic("t"))
        assert stable(later) == (15, 31)
        abort_transaction(later, "t", 0, 8)
        assert stable(later) == (32, 32)
        assert committed(later) == [*range(10), *range(20, 30)]


def test_a_transaction_that_began_below_the_log_start_can_be_ended(store: LogStore) -> None:
    from logstore.upkeep.retention import delete_records

    topic = store.topic("t")
    with writing(store, topic, 0, what="test") as log:
        log.advance_log_start(10)
    assert [each.first_offset for each in open_transactions(store, topic, 0)] == [10, 15]
    abort_transaction(store, "t", 0, 7)
    abort_transaction(store, "t", 0, 8)
    delete_records(store, topic, 0, before_offset=25)
    assert stable(store) == (32, 32)


def test_random_ends_leave_what_a_model_says(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with LogStore(tmp_path / "random", create=True, clock=ManualClock(NOW_MS)) as store:
        topic = store.create_topic("t", configs={"segment.bytes": 2_000})
        opened: dict[int, list[int]] = {}
        plain: list[int] = []
        with writing(store, topic, 0, what="test") as log:
            for _ in range(60):
                producer_id = rng.randrange(6)
                batch = [Record(b"k", b"v", NOW_MS)] * rng.randint(1, 4)
                if rng.random() < 0.4:
                    info = log.append(batch)
                    plain += range(info.first_offset, info.last_offset + 1)
                    continue
                sequence = len(opened.get(producer_id, ()))
                options = BatchOptions(
                    transactional=True, producer_id=producer_id, producer_epoch=0, base_sequence=sequence
                )
                info = log.append_batches(encode_batch(columns_of(batch), options), origin=AppendOrigin.CLIENT)
                opened.setdefault(producer_id, []).extend(range(info.first_offset, info.last_offset + 1))
        for producer_id in rng.sample(sorted(opened), len(opened)):
            assert {each.producer_id for each in open_transactions(store, topic, 0)} == set(opened)
            done = abort_transaction(store, "t", 0, producer_id)
            del opened[producer_id]
            end = store.ends(topic).high_watermarks[0]
            expected = min((offsets[0] for offsets in opened.values()), default=end)
            assert done.last_stable_offset == stable(store)[0] == expected
            assert committed(store) == [offset for offset in plain if offset < expected]
