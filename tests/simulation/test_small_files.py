"""The small files of a partition under power cuts: each is as it was, as it became, or known to be broken."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest

from logstore.directory.checkpoint import (
    delete_clean_shutdown,
    read_offset_checkpoint,
    write_clean_shutdown,
    write_offset_checkpoint,
)
from logstore.errors import CorruptIndex
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.producer_state import AppendOrigin, ProducerBatch
from logstore.partition.producer_state_manager import ProducerStateManager
from logstore.segment.txn_index import AbortedTransaction, TxnIndex
from logstore.topic import TopicPartition
from simulation.filesystem import PowerCut, SimulatedFileSystem

DIRECTORY = "/logs/orders-0"
PARTITION = TopicPartition("orders", 0)


def partition_directory() -> SimulatedFileSystem:
    fs = SimulatedFileSystem()
    fs.mkdir(DIRECTORY)
    for path in ("/", "/logs", DIRECTORY):
        fs.fsync_dir(path)
    return fs


def cut_everywhere(
    prepare: Callable[[SimulatedFileSystem], None], change: Callable[[SimulatedFileSystem], None], seed: int
) -> Iterator[tuple[bool, SimulatedFileSystem]]:
    """The file systems after a cut at each step of `change`, and after it returned (True), each drawn many times."""
    rng = random.Random(seed)
    done, step = False, 0
    while not done:
        fs = partition_directory()
        prepare(fs)
        fs.fail_after(step)
        with contextlib.suppress(PowerCut):
            change(fs)
            done = True
        for _ in range(30):
            yield done, fs.crash(rng)
        step += 1


def test_an_offset_checkpoint_is_the_old_or_the_new_one(seed: int) -> None:
    path = "/logs/recovery-point-offset-checkpoint"
    old, new = {PARTITION: 5}, {PARTITION: 700, TopicPartition("other", 3): 12}
    seen = set()
    for done, fs in cut_everywhere(
        lambda fs: write_offset_checkpoint(fs, path, old), lambda fs: write_offset_checkpoint(fs, path, new), seed
    ):
        found = read_offset_checkpoint(fs, path)
        assert found == new if done else found in (old, new)
        seen.add(len(found))
    assert seen == {1, 2}


def test_an_assigned_epoch_is_on_disk_when_the_call_returns(seed: int) -> None:
    def prepare(fs: SimulatedFileSystem) -> None:
        LeaderEpochs.load(fs, DIRECTORY).assign(0, 0)

    def change(fs: SimulatedFileSystem) -> None:
        LeaderEpochs.load(fs, DIRECTORY).assign(1, 10)

    for done, fs in cut_everywhere(prepare, change, seed):
        found = [(entry.epoch, entry.start_offset) for entry in LeaderEpochs.load(fs, DIRECTORY).entries]
        assert found == [(0, 0), (1, 10)] if done else found in ([(0, 0)], [(0, 0), (1, 10)])


def test_the_clean_shutdown_marker_does_not_come_back(seed: int) -> None:
    path = "/logs/.kafka_cleanshutdown"
    for done, fs in cut_everywhere(
        lambda fs: write_clean_shutdown(fs, path), lambda fs: delete_clean_shutdown(fs, path) and None, seed
    ):
        assert not (done and fs.exists(path))


def batch(offset: int) -> ProducerBatch:
    return ProducerBatch(7, 0, offset, offset, offset, offset, 1000 + offset)


def take(fs: SimulatedFileSystem, upto: int, *, sync: bool) -> None:
    producers = ProducerStateManager(DIRECTORY, fs, PARTITION)
    for offset in range(upto):
        producers.apply(producers.prepare([batch(offset)], AppendOrigin.REPLICATION))
    producers.update_map_end_offset(upto)
    producers.take_snapshot(sync=sync)


@pytest.mark.parametrize("sync", [True, False])
def test_producers_come_from_a_sound_snapshot_or_from_the_log(seed: int, sync: bool) -> None:
    ends = set()
    for done, fs in cut_everywhere(lambda fs: take(fs, 5, sync=True), lambda fs: take(fs, 9, sync=sync), seed):
        producers = ProducerStateManager(DIRECTORY, fs, PARTITION)
        corrupt = producers.truncate_and_reload(0, 20, now_ms=2000)
        assert not (sync and corrupt)
        end = producers.map_end_offset
        ends.add(end)
        assert end == 9 if done and sync else end in (5, 9)
        state = producers.producers.get(7)
        assert state is not None
        assert (state.last_data_offset, state.last_timestamp_ms) == (end - 1, 1000 + end - 1)
    assert ends == {5, 9}


def test_flushed_aborted_transactions_stay_and_later_ones_are_whole_or_refused(seed: int) -> None:
    path = f"{DIRECTORY}/00000000000000000000.txnindex"
    entries = [AbortedTransaction(n, 10 * n, 10 * n + 5, 10 * n + 6) for n in range(60)]

    def prepare(fs: SimulatedFileSystem) -> None:
        index = TxnIndex(fs, path, 0)
        for entry in entries[:20]:
            index.append(entry)
        index.flush()
        fs.fsync_dir(DIRECTORY)

    def change(fs: SimulatedFileSystem) -> None:
        index = TxnIndex(fs, path, 0)
        for entry in entries[20:]:
            index.append(entry)

    refused = 0
    for _, fs in cut_everywhere(prepare, change, seed):
        found: list[AbortedTransaction] = []
        try:
            for entry in TxnIndex(fs, path, 0).entries():
                found.append(entry)
            TxnIndex(fs, path, 0).sanity_check()
        except CorruptIndex:
            refused += 1
        assert found[:20] == entries[:20]
    assert refused > 0
