"""What a pass knows of transactions: whether there are any, and the verdict on each batch of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.transactions import Transactions, find_transactions
from logstore.cleaner.work import PassWork
from logstore.errors import CleaningAborted
from logstore.files import OS_FILES
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.control import ControlType
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record
from logstore.segment.txn_index import AbortedTransaction

PRODUCER = 7
ABORTED = AbortedTransaction(PRODUCER, 10, 20, 10)
MARKER_STAYS = (False, ABORTED)
MARKER_GOES = (True, None)


def work(lab: Lab) -> PassWork:
    return lab.work(MapSettings(buffer_bytes=1 << 20))


def fill(lab: Lab, *, transactional: bool, marker: bool) -> None:
    """A segment with a batch of a producer, and its marker; then an empty active one."""
    options = BatchOptions(transactional=transactional, producer_id=PRODUCER, producer_epoch=0, base_sequence=0)
    with lab.open() as log:
        log.append_batches(encode_batch(columns_of([Record(b"a", b"v", NOW_MS)]), options), origin=AppendOrigin.CLIENT)
        if marker:
            log.append_marker(commit=True, producer_id=PRODUCER, producer_epoch=0)
        log.roll()
        lab.end = log.log_end_offset


def test_a_log_of_plain_and_idempotent_batches_has_no_transactions(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.append([Record(b"a", b"v", NOW_MS)], roll=True)
    fill(lab, transactional=False, marker=False)
    assert not find_transactions(OS_FILES, work(lab))


def test_a_batch_of_a_transaction_is_found_and_so_is_a_marker_alone(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.append([Record(b"b", b"v", NOW_MS)], roll=True)
    fill(lab, transactional=True, marker=True)
    found = work(lab)
    assert find_transactions(OS_FILES, found)
    with pytest.raises(CleaningAborted):
        find_transactions(OS_FILES, found, stopping=lambda: True)


def test_the_part_an_earlier_pass_found_plain_is_not_read_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab, transactional=True, marker=True)
    lab.append([Record(b"b", b"v", NOW_MS)], roll=True)
    found = work(lab)
    second = found.segments[1].base_offset
    skipping = replace(found, clean_part_plain=True, first_dirty_offset=second)
    assert not find_transactions(OS_FILES, skipping)
    assert find_transactions(OS_FILES, replace(skipping, clean_part_plain=False))
    assert find_transactions(OS_FILES, replace(skipping, first_dirty_offset=second - 1))


def opened(*aborted: AbortedTransaction) -> Transactions:
    transactions = Transactions()
    transactions.add(aborted)
    return transactions


@pytest.mark.parametrize(
    ("last_offset", "producer_id", "goes"),
    [(9, PRODUCER, False), (10, PRODUCER, True), (15, PRODUCER, True), (15, PRODUCER + 1, False)],
    ids=["before it begins", "where it begins", "within", "of another producer"],
)
def test_data_of_an_aborted_transaction_goes(last_offset: int, producer_id: int, goes: bool) -> None:
    assert opened(ABORTED).data_batch(producer_id, last_offset) is goes


def test_an_abort_marker_stays_while_its_data_is_there_and_ends_the_transaction() -> None:
    transactions = opened(ABORTED, ABORTED)
    assert transactions.data_batch(PRODUCER, 15)
    assert transactions.control_batch(ControlType.ABORT, PRODUCER, 20) == MARKER_STAYS
    assert not transactions.data_batch(PRODUCER, 21), "the producer's next transaction is another one"


def test_an_abort_marker_whose_data_is_gone_may_go() -> None:
    assert opened(ABORTED).control_batch(ControlType.ABORT, PRODUCER, 20) == MARKER_GOES
    assert opened().control_batch(ControlType.ABORT, PRODUCER, 20) == MARKER_GOES


def test_a_commit_marker_stays_once_for_the_data_before_it() -> None:
    transactions = opened()
    assert not transactions.data_batch(PRODUCER, 5)
    assert transactions.control_batch(ControlType.COMMIT, PRODUCER, 6) == (False, None)
    assert transactions.control_batch(ControlType.COMMIT, PRODUCER, 7) == MARKER_GOES


def test_an_emptied_control_batch_may_go_and_an_unknown_kind_stays() -> None:
    assert opened().control_batch(None, PRODUCER, 5) == MARKER_GOES
    assert opened().control_batch(ControlType.UNKNOWN, PRODUCER, 5) == (False, None)


def test_transactions_open_in_the_order_of_their_first_offsets() -> None:
    later = AbortedTransaction(PRODUCER + 1, 12, 30, 10)
    transactions = opened(later, ABORTED)
    assert transactions.data_batch(PRODUCER, 11)
    assert not transactions.data_batch(PRODUCER + 1, 11)
    assert transactions.data_batch(PRODUCER + 1, 13)
