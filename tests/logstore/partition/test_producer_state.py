from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import (
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTransactionState,
    OutOfOrderSequence,
    TransactionCoordinatorFenced,
)
from logstore.files import OS_FILES
from logstore.partition.producer_state import (
    AppendOrigin,
    BatchMetadata,
    EndTransaction,
    ProducerBatch,
    ProducerState,
    decrement_sequence,
    from_snapshot_entry,
    increment_sequence,
    is_expired,
    stray_snapshots,
    to_snapshot_entry,
)
from logstore.partition.producer_state_manager import ProducerStateManager
from logstore.partition.snapshot import read_snapshot
from logstore.segment.txn_index import AbortedTransaction
from logstore.topic import TopicPartition

INT32_MAX = 2**31 - 1
PARTITION = TopicPartition("orders", 0)
PID = 7
NOT_CLIENT = [AppendOrigin.COORDINATOR, AppendOrigin.REPLICATION, AppendOrigin.RECOVERY]
TRUSTED = [AppendOrigin.REPLICATION, AppendOrigin.RECOVERY]


@pytest.fixture
def manager(tmp_path: Path) -> ProducerStateManager:
    return ProducerStateManager(str(tmp_path), OS_FILES, PARTITION, expiration_ms=1000)


def data(
    offset: int, sequence: int, *, count: int = 1, epoch: int = 0, pid: int = PID, txn: bool = False, at_ms: int = 0
) -> ProducerBatch:
    last = increment_sequence(sequence, count - 1) if sequence >= 0 else sequence
    return ProducerBatch(pid, epoch, sequence, last, offset, offset + count - 1, at_ms, txn)


def sequences(manager: ProducerStateManager) -> list[int]:
    """Last sequences of the batches that are remembered of the producer."""
    state = manager.producers.get(PID)
    assert state is not None
    return [batch.last_sequence for batch in state.batches]


def first_undecided_offset(manager: ProducerStateManager) -> int | None:
    """Where the oldest open transaction began."""
    begun = [state.current_txn_first_offset for state in manager.producers.values()]
    return min((offset for offset in begun if offset is not None), default=None)


def expired(manager: ProducerStateManager, now_ms: int) -> list[int]:
    return [pid for pid, state in manager.producers.items() if is_expired(state, now_ms, 1000)]


def end(
    offset: int, *, commit: bool = True, epoch: int = 0, pid: int = PID, coordinator: int = 0, at_ms: int = 0
) -> EndTransaction:
    return EndTransaction(pid, epoch, offset, at_ms, commit, coordinator)


def append(
    manager: ProducerStateManager,
    *batches: ProducerBatch | EndTransaction,
    origin: AppendOrigin = AppendOrigin.CLIENT,
    version: int = 0,
) -> list[AbortedTransaction]:
    prepared = manager.prepare(batches, origin, transaction_version=version)
    assert prepared.duplicate is None
    aborted = manager.apply(prepared)
    last = batches[-1]
    manager.update_map_end_offset((last.last_offset if isinstance(last, ProducerBatch) else last.offset) + 1)
    return aborted


# --- sequences


@pytest.mark.parametrize(("sequence", "by", "after"), [(0, 1, 1), (INT32_MAX, 1, 0), (INT32_MAX - 1, 5, 3), (5, 0, 5)])
def test_sequences_wrap_from_their_maximum_to_zero(sequence: int, by: int, after: int) -> None:
    assert increment_sequence(sequence, by) == after
    assert decrement_sequence(after, by) == sequence


def test_batches_in_sequence_are_taken(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, count=3))
    append(manager, data(3, 3, count=2))
    state = manager.producers.get(PID)
    assert state is not None
    assert (state.last_sequence, state.last_data_offset) == (4, 4)


@pytest.mark.parametrize("sequence", [0, 2, 4, INT32_MAX])
def test_a_gap_or_an_old_sequence_is_refused(manager: ProducerStateManager, sequence: int) -> None:
    append(manager, data(0, 0, count=3))
    with pytest.raises(OutOfOrderSequence, match="where 3 is next") as caught:
        manager.prepare([data(3, sequence)])
    assert (caught.value.offset, caught.value.partition) == (3, "orders-0")


def test_the_sequence_after_the_maximum_is_zero(manager: ProducerStateManager) -> None:
    append(manager, data(0, INT32_MAX - 1, count=2))
    append(manager, data(2, 0))
    append(manager, data(3, 1))
    state = manager.producers.get(PID)
    assert state is not None
    assert state.last_sequence == 1


def test_a_batch_may_wrap_inside(manager: ProducerStateManager) -> None:
    batch = data(0, INT32_MAX, count=3)
    assert batch.last_sequence == 1
    append(manager, batch)
    assert manager.prepare([batch]).duplicate == BatchMetadata(1, 2, 2, 0)
    append(manager, data(3, 2))


def test_an_unknown_producer_may_start_anywhere(manager: ProducerStateManager) -> None:
    append(manager, data(0, 500))
    assert sequences(manager) == [500]


def test_protocol_2_wants_an_unknown_producer_to_start_at_zero(manager: ProducerStateManager) -> None:
    with pytest.raises(OutOfOrderSequence):
        manager.prepare([data(0, 500)], transaction_version=2)
    append(manager, data(0, 0), version=2)
    append(manager, data(1, 1), version=2)


def test_a_new_epoch_starts_at_zero_and_forgets_the_old_batches(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0), data(1, 1))
    with pytest.raises(OutOfOrderSequence, match="where 0 is next"):
        manager.prepare([data(2, 2, epoch=1)])
    append(manager, data(2, 0, epoch=1))
    state = manager.producers.get(PID)
    assert state is not None
    assert (state.producer_epoch, [batch.first_offset for batch in state.batches]) == (1, [2])
    with pytest.raises(InvalidProducerEpoch) as caught:
        manager.prepare([data(3, 2, epoch=0)])
    assert caught.value.kafka_code == 47


@pytest.mark.parametrize("origin", NOT_CLIENT)
def test_only_clients_sequences_are_checked(manager: ProducerStateManager, origin: AppendOrigin) -> None:
    append(manager, data(0, 0), data(1, 50), data(2, 50), data(3, -1), origin=origin)
    assert sequences(manager) == [0, 50, 50, -1]


def test_a_client_batch_without_sequence_is_refused(manager: ProducerStateManager) -> None:
    with pytest.raises(InvalidRecord, match="no sequence"):
        manager.prepare([data(0, -1)])


@pytest.mark.parametrize("origin", AppendOrigin)
def test_a_batch_without_producer_is_a_callers_mistake(manager: ProducerStateManager, origin: AppendOrigin) -> None:
    with pytest.raises(InvalidRecord, match="is not a producer id"):
        manager.prepare([data(0, 0, pid=-1)], origin)


@pytest.mark.parametrize("origin", TRUSTED)
def test_a_lower_epoch_that_is_in_the_log_already_is_taken(manager: ProducerStateManager, origin: AppendOrigin) -> None:
    append(manager, data(0, 0, epoch=3), data(1, 1, epoch=2), end(2, epoch=1), origin=origin)
    state = manager.producers.get(PID)
    assert state is not None
    assert state.producer_epoch == 1
    with pytest.raises(InvalidProducerEpoch):
        manager.prepare([data(3, 0, epoch=0)], AppendOrigin.COORDINATOR)


# --- duplicates


def test_each_of_the_last_five_batches_is_recognised(manager: ProducerStateManager) -> None:
    batches = [data(10 * n, 2 * n, count=2, at_ms=n) for n in range(6)]
    for batch in batches:
        append(manager, batch)
    for batch in batches[1:]:
        repeated = data(100, batch.first_sequence, count=2)
        duplicate = manager.prepare([repeated]).duplicate
        assert duplicate is not None
        assert (duplicate.first_offset, duplicate.last_offset, duplicate.timestamp_ms) == (
            batch.first_offset, batch.last_offset, batch.max_timestamp_ms,
        )  # fmt: skip
    with pytest.raises(OutOfOrderSequence):
        manager.prepare([data(100, 0, count=2)])


def test_another_range_or_epoch_is_no_duplicate(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, count=2))
    for batch in (data(2, 0, count=1), data(2, 1, count=1), data(2, 0, count=3)):
        with pytest.raises(OutOfOrderSequence):
            manager.prepare([batch])
    assert manager.prepare([data(2, 0, count=2, epoch=1)]).duplicate is None


def test_a_duplicate_changes_nothing_and_cannot_be_applied(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0))
    before = manager.producers.get(PID)
    prepared = manager.prepare([data(1, 0)])
    assert prepared.duplicate is not None
    with pytest.raises(ValueError, match="duplicate"):
        manager.apply(prepared)
    assert manager.producers.get(PID) == before


def test_replicas_and_recovery_take_a_repeated_batch_as_it_is(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0))
    append(manager, data(1, 0), origin=AppendOrigin.REPLICATION)
    append(manager, data(2, 0), origin=AppendOrigin.RECOVERY)
    assert sequences(manager) == [0, 0, 0]


def test_preparing_changes_nothing(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, txn=True))
    before = (dict(manager.producers), manager.first_unstable_offset(), manager.map_end_offset)
    manager.prepare([data(1, 1, txn=True), end(2), data(3, 0, pid=8, txn=True)])
    assert (dict(manager.producers), manager.first_unstable_offset(), manager.map_end_offset) == before


# --- transactions


def test_a_transaction_is_open_from_its_first_batch_to_its_marker(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, pid=1))
    assert manager.first_unstable_offset() is None
    append(manager, data(1, 0, txn=True))
    append(manager, data(2, 1, txn=True))
    assert manager.first_unstable_offset() == first_undecided_offset(manager) == 1
    assert append(manager, end(3, coordinator=4)) == []
    assert first_undecided_offset(manager) is None
    assert manager.first_unstable_offset() == 1  # decided, but the high watermark is not there yet
    manager.on_high_watermark_updated(3)
    assert manager.first_unstable_offset() == 1
    manager.on_high_watermark_updated(4)
    assert manager.first_unstable_offset() is None
    state = manager.producers.get(PID)
    assert state is not None
    assert (state.coordinator_epoch, state.current_txn_first_offset, state.last_sequence) == (4, None, 1)


def test_an_aborted_transaction_becomes_an_index_entry(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, txn=True))
    assert append(manager, end(1, commit=False)) == [AbortedTransaction(PID, 0, 1, 2)]


def test_the_stable_offset_of_an_abort_is_the_oldest_other_open_transaction(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, pid=1, txn=True))
    append(manager, data(1, 0, pid=2, txn=True))
    append(manager, data(2, 0, pid=3, txn=True))
    assert append(manager, end(3, pid=2, commit=False)) == [AbortedTransaction(2, 1, 3, 0)]
    assert append(manager, end(4, pid=1, commit=False)) == [AbortedTransaction(1, 0, 4, 2)]
    assert append(manager, end(5, pid=3, commit=False)) == [AbortedTransaction(3, 2, 5, 6)]


def test_transactions_begun_in_the_same_append_count_as_open_for_its_aborts(manager: ProducerStateManager) -> None:
    batches = [data(0, 0, pid=1, txn=True), end(1, pid=1, commit=False), data(9, 0, pid=2, txn=True)]
    assert append(manager, *batches, origin=AppendOrigin.REPLICATION) == [AbortedTransaction(1, 0, 1, 9)]


def test_one_append_may_end_a_transaction_and_begin_the_next(manager: ProducerStateManager) -> None:
    batches = [data(0, 0, txn=True), end(1, commit=False), data(2, 1, txn=True), end(3, commit=False)]
    found = append(manager, *batches, origin=AppendOrigin.REPLICATION)
    assert found == [AbortedTransaction(PID, 0, 1, 2), AbortedTransaction(PID, 2, 3, 4)]
    assert first_undecided_offset(manager) is None


def test_a_marker_without_data_is_no_transaction(manager: ProducerStateManager) -> None:
    assert append(manager, end(0, commit=False)) == []
    assert manager.first_unstable_offset() is None
    assert manager.producers.get(PID) == ProducerState(PID, 0, 0, 0, None, ())


def test_a_plain_batch_inside_a_transaction_is_refused_unless_it_is_there_already(
    manager: ProducerStateManager,
) -> None:
    append(manager, data(0, 0, txn=True))
    for origin in (AppendOrigin.CLIENT, AppendOrigin.COORDINATOR, AppendOrigin.REPLICATION):
        with pytest.raises(InvalidTransactionState):
            manager.prepare([data(1, 1)], origin)
    append(manager, data(1, 1), origin=AppendOrigin.RECOVERY)
    assert first_undecided_offset(manager) == 0


def test_a_marker_from_an_older_coordinator_is_fenced(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, txn=True), end(1, coordinator=5), data(2, 1, txn=True))
    for origin in (AppendOrigin.CLIENT, AppendOrigin.COORDINATOR):
        with pytest.raises(TransactionCoordinatorFenced):
            manager.prepare([end(3, coordinator=4)], origin)
    append(manager, end(3, coordinator=4), origin=AppendOrigin.REPLICATION)


def test_a_marker_of_a_lower_epoch_is_refused(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, epoch=2, txn=True))
    with pytest.raises(InvalidProducerEpoch):
        manager.prepare([end(1, epoch=1)], AppendOrigin.COORDINATOR)


def test_protocol_2_markers_carry_a_higher_epoch(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, epoch=2, txn=True), version=2)
    with pytest.raises(InvalidProducerEpoch):  # a late marker of the transaction before
        manager.prepare([end(1, epoch=2)], AppendOrigin.COORDINATOR, transaction_version=2)
    append(manager, end(1, epoch=3), origin=AppendOrigin.COORDINATOR, version=2)
    state = manager.producers.get(PID)
    assert state is not None
    assert (state.producer_epoch, state.last_data_offset) == (3, -1)
    # the same marker again, with nothing open, is a retry
    append(manager, end(2, epoch=3), origin=AppendOrigin.COORDINATOR, version=2)
    append(manager, data(3, 0, epoch=3, txn=True), version=2)


# --- expiry


def test_producers_expire_by_their_last_timestamp(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, pid=1, at_ms=100))
    append(manager, data(1, 0, pid=2, at_ms=500))
    assert expired(manager, 1099) == []
    assert expired(manager, 1100) == [1]


def test_a_producer_with_an_open_transaction_never_expires(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, txn=True))
    assert expired(manager, 10**12) == []
    append(manager, end(1, at_ms=5))
    assert expired(manager, 1005) == [PID]


def test_an_expired_producer_is_unknown_again(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0))
    manager.update_map_end_offset(1)
    manager.take_snapshot()
    manager.update_map_end_offset(2)  # else the state would be kept as it is
    assert manager.truncate_and_reload(0, 1, now_ms=10**6) == []
    assert manager.producers.get(PID) is None
    append(manager, data(1, 77))
    assert sequences(manager) == [77]


# --- snapshots


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_no_snapshot_without_progress(tmp_path: Path, manager: ProducerStateManager) -> None:
    assert manager.take_snapshot() is None
    append(manager, data(0, 0))
    path = manager.take_snapshot()
    assert path == str(tmp_path / "00000000000000000001.snapshot")
    assert manager.take_snapshot() is None
    manager.update_map_end_offset(5)
    manager.take_snapshot(sync=False)
    assert names(tmp_path) == ["00000000000000000001.snapshot", "00000000000000000005.snapshot"]
    assert manager.snapshot_offsets == (1, 5)


def test_state_is_loaded_from_the_newest_snapshot(tmp_path: Path, manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, count=2, at_ms=10), data(2, 2, at_ms=11))
    append(manager, data(3, 0, pid=8, epoch=4, txn=True))
    manager.take_snapshot()
    again = ProducerStateManager(str(tmp_path), OS_FILES, PARTITION, 1000)
    assert again.truncate_and_reload(0, 10, now_ms=20) == []
    assert again.map_end_offset == 4
    assert again.producers.get(PID) == ProducerState(PID, 0, -1, 11, None, (BatchMetadata(2, 2, 0, 11),))
    assert again.first_unstable_offset() == 3
    assert append(again, end(4, pid=8, epoch=4, commit=False)) == [AbortedTransaction(8, 3, 4, 5)]


def test_expired_producers_are_not_loaded_but_open_transactions_are(
    tmp_path: Path, manager: ProducerStateManager
) -> None:
    append(manager, data(0, 0, pid=1), data(1, 0, pid=2, txn=True))
    manager.take_snapshot()
    again = ProducerStateManager(str(tmp_path), OS_FILES, PARTITION, 1000)
    again.truncate_and_reload(0, 10, now_ms=5000)
    assert list(again.producers) == [2]


def test_a_corrupt_snapshot_is_deleted_reported_and_the_next_older_one_taken(
    tmp_path: Path, manager: ProducerStateManager
) -> None:
    append(manager, data(0, 0))
    manager.take_snapshot()
    append(manager, data(1, 1))
    broken = Path(manager.take_snapshot() or "")
    broken.write_bytes(broken.read_bytes()[:-1])
    again = ProducerStateManager(str(tmp_path), OS_FILES, PARTITION, 1000)
    (error,) = again.truncate_and_reload(0, 2, now_ms=0)
    assert error.file == str(broken)
    assert again.map_end_offset == 1
    assert names(tmp_path) == ["00000000000000000001.snapshot"]


def test_without_a_snapshot_the_state_begins_at_the_log_start(manager: ProducerStateManager) -> None:
    assert manager.truncate_and_reload(5, 10, now_ms=0) == []
    assert (manager.map_end_offset, manager.is_empty) == (5, True)


def test_snapshots_outside_the_log_are_deleted(tmp_path: Path, manager: ProducerStateManager) -> None:
    for offset in (3, 5, 7, 9):
        manager.update_map_end_offset(offset)
        manager.take_snapshot()
    manager.truncate_and_reload(3, 7, now_ms=0)
    assert manager.snapshot_offsets == (5, 7)
    assert names(tmp_path) == ["00000000000000000005.snapshot", "00000000000000000007.snapshot"]
    assert manager.map_end_offset == 7


def test_state_that_ends_where_the_log_ends_is_kept(manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, txn=True), end(1))
    append(manager, data(2, 1))
    assert manager.first_unstable_offset() == 0
    manager.truncate_and_reload(2, 3, now_ms=10**9)
    assert list(manager.producers) == [PID]
    assert manager.first_unstable_offset() is None  # its marker lies below the log start


def test_a_log_start_beyond_the_state_moves_it(manager: ProducerStateManager) -> None:
    manager.on_log_start_offset_incremented(9)
    assert manager.map_end_offset == 9
    assert manager.take_snapshot() is None


def test_starting_anew_forgets_everything(tmp_path: Path, manager: ProducerStateManager) -> None:
    append(manager, data(0, 0, txn=True))
    manager.take_snapshot()
    manager.truncate_fully_and_start_at(50)
    assert (manager.is_empty, manager.first_unstable_offset(), manager.map_end_offset) == (True, None, 50)
    assert names(tmp_path) == []
    assert manager.take_snapshot() == str(tmp_path / "00000000000000000050.snapshot")


@pytest.mark.parametrize(
    ("snapshots", "bases", "strays"),
    [
        ([], [0], []),
        ([5, 10, 20], [0, 5, 10], []),
        ([5, 7, 10, 20], [0, 5, 10], [7]),
        ([5, 7, 10, 15, 20], [0, 5, 10], [7, 15]),
        ([3, 7], [0, 10], [3, 7]),
        ([3, 7], [], [3]),
    ],
)
def test_strays_are_all_but_the_bases_and_the_one_of_a_clean_close(
    tmp_path: Path, snapshots: list[int], bases: list[int], strays: list[int]
) -> None:
    assert stray_snapshots(snapshots, bases) == strays
    for offset in snapshots:
        (tmp_path / f"{offset:020d}.snapshot").write_bytes(b"")
    manager = ProducerStateManager(str(tmp_path), OS_FILES, PARTITION)
    assert manager.remove_stray_snapshots(bases) == strays
    assert manager.snapshot_offsets == tuple(sorted(set(snapshots) - set(strays)))
    assert names(tmp_path) == [f"{offset:020d}.snapshot" for offset in manager.snapshot_offsets]


def test_a_snapshot_goes_with_its_segment(tmp_path: Path, manager: ProducerStateManager) -> None:
    for offset in (3, 5, 7):
        manager.update_map_end_offset(offset)
        manager.take_snapshot()
    assert manager.delete_snapshot(5)
    assert not manager.delete_snapshot(5)
    assert manager.snapshot_offsets == (3, 7)
    assert names(tmp_path) == ["00000000000000000003.snapshot", "00000000000000000007.snapshot"]
    again = ProducerStateManager(str(tmp_path), OS_FILES, PARTITION)
    assert again.snapshot_offsets == (3, 7)


def test_a_partition_directory_that_is_not_there_has_no_snapshots(tmp_path: Path) -> None:
    assert ProducerStateManager(str(tmp_path / "absent"), OS_FILES, PARTITION).snapshot_offsets == ()


# --- properties


def workload(rng: random.Random, size: int) -> list[ProducerBatch | EndTransaction]:
    """A valid log of a few producers, some of them transactional."""
    offset, log = 0, []
    epochs, sequences, is_open = [0] * 4, [0] * 4, [False] * 4
    for _ in range(size):
        pid = rng.randrange(4)
        transactional = pid >= 2
        if is_open[pid] and rng.random() < 0.4:
            if rng.random() < 0.3:  # a protocol 2 marker
                epochs[pid], sequences[pid] = epochs[pid] + 1, 0
            log.append(end(offset, pid=pid, epoch=epochs[pid], commit=rng.random() < 0.5, at_ms=offset))
            is_open[pid] = False
            offset += 1 + rng.randrange(2)
            continue
        count = 1 + rng.randrange(3)
        batch = data(offset, sequences[pid], count=count, pid=pid, epoch=epochs[pid], txn=transactional, at_ms=offset)
        log.append(batch)
        sequences[pid] = increment_sequence(sequences[pid], count)
        is_open[pid] = transactional
        offset += count + rng.randrange(2)
    return log


@given(st.integers(0, 2**32), st.integers(1, 40), st.data())
def test_a_reload_and_replay_gives_the_state_of_an_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, draw: st.DataObject
) -> None:
    log = workload(random.Random(seed), size)
    snapshot_at = draw.draw(st.integers(0, size))
    directory = str(tmp_path_factory.mktemp("state"))
    whole = ProducerStateManager(directory, OS_FILES, PARTITION)
    index: list[AbortedTransaction] = []
    replay_index: list[AbortedTransaction] = []
    for at, batch in enumerate(log):
        if at == snapshot_at:
            whole.take_snapshot(sync=False)
            replay_index = list(index)
        index += append(whole, batch)
    again = ProducerStateManager(directory, OS_FILES, PARTITION)
    again.truncate_and_reload(0, 10**9, now_ms=0)
    replay_from = again.map_end_offset
    for batch in log:
        if (batch.first_offset if isinstance(batch, ProducerBatch) else batch.offset) >= replay_from:
            replay_index += append(again, batch, origin=AppendOrigin.RECOVERY)
    if replay_from:
        assert replay_index == index
    newest = {pid: to_snapshot_entry(state) for pid, state in whole.producers.items()}
    assert {pid: to_snapshot_entry(state) for pid, state in again.producers.items()} == newest
    assert first_undecided_offset(again) == first_undecided_offset(whole)
    again.on_high_watermark_updated(10**9)
    whole.on_high_watermark_updated(10**9)
    assert again.first_unstable_offset() == whole.first_unstable_offset() == first_undecided_offset(whole)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_the_first_unstable_offset_is_the_oldest_transaction_not_below_the_high_watermark(seed: int, size: int) -> None:
    rng = random.Random(seed)
    manager = ProducerStateManager("nowhere", OS_FILES, PARTITION)
    transactions: dict[int, list[int | None]] = {}  # first offset -> [producer, marker's offset]
    high_watermark = 0
    for batch in workload(rng, size):
        append(manager, batch)
        still_open = {first for first, (pid, done) in transactions.items() if pid == batch.producer_id and done is None}
        if isinstance(batch, EndTransaction):
            for first in still_open:
                transactions[first][1] = batch.offset
        elif batch.transactional and not still_open:
            transactions[batch.first_offset] = [batch.producer_id, None]
        if rng.random() < 0.3:
            high_watermark = rng.randint(high_watermark, manager.map_end_offset)
            manager.on_high_watermark_updated(high_watermark)
        unstable = [first for first, (_, done) in transactions.items() if done is None or done >= high_watermark]
        assert manager.first_unstable_offset() == min(unstable, default=None)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_a_snapshot_entry_and_a_state_are_the_same(seed: int, size: int) -> None:
    manager = ProducerStateManager("nowhere", OS_FILES, PARTITION)
    append(manager, *workload(random.Random(seed), size))
    for state in manager.producers.values():
        entry = to_snapshot_entry(state)
        assert to_snapshot_entry(from_snapshot_entry(entry)) == entry


def test_a_snapshot_has_the_newest_batch_and_the_open_transaction(manager: ProducerStateManager) -> None:
    append(manager, data(5, 3, count=4, epoch=2, txn=True, at_ms=99))
    (entry,) = read_snapshot(OS_FILES, manager.take_snapshot() or "")
    assert (entry.producer_id, entry.producer_epoch, entry.last_sequence) == (PID, 2, 6)
    assert (entry.last_offset, entry.offset_delta, entry.timestamp_ms) == (8, 3, 99)
    assert (entry.coordinator_epoch, entry.current_txn_first_offset) == (-1, 5)
