"""Directories that Kafka wrote, opened and read by us: the same records, record for record, and the same offsets."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.kafka import Kafka, KafkaRecord, LogRun, Op, batch, record
from conformance.workload import (
    CODECS,
    LEGACY_CODECS,
    NOW_MS,
    PARTITION,
    UnsyncedFiles,
    as_kafka,
    assert_same_files,
    assert_same_state,
    for_kafka,
    random_records,
    state_of,
)
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.partition.reader import PartitionReader
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter

SMALL: dict[str, Any] = {"segment.bytes": 3000, "index.interval.bytes": 200}
Operations = list[dict[str, Any]]


def one_format(kafka: Kafka, rng: random.Random, magic: int) -> Operations:
    ops: Operations = []
    for at in range(60):
        records = random_records(rng, NOW_MS + 10 * at, most=9, headers=magic == 2)
        codec = rng.choice(CODECS if magic == 2 else LEGACY_CODECS)
        fields: dict[str, Any] = {"as_magic": magic} if magic < 2 else {}
        ops.append(Op.append_records(for_kafka(records), at // 25, magic=magic, codec=codec, **fields))
    return ops


def mixed_formats(kafka: Kafka, rng: random.Random) -> Operations:
    """A log that went through two upgrades, some batches arriving late in the old form."""
    ops = []
    for at in range(60):
        magic = rng.choices((0, 1, 2), ((4, 1, 0), (1, 4, 1), (0, 1, 4))[at // 20])[0]
        ops += one_format(kafka, rng, magic)[:1]
    return ops


def transactions(kafka: Kafka, rng: random.Random) -> Operations:
    """Producers whose transactions overlap, commit, abort; some stay open."""
    ops: Operations = []
    sequences = dict.fromkeys(range(1, 6), 0)
    for at in range(120):
        producer = rng.choice(list(sequences))
        now_ms = NOW_MS + 10 * at
        ops.append(Op.clock(now_ms))
        if rng.random() < 0.35:
            ops.append(Op.marker(rng.choice(("commit", "abort")), producer, 0, leader_epoch=at // 30))
            continue
        # Without a time a producer counts as expired at once, and what is left of it depends on who looked when.
        records = random_records(rng, now_ms, no_timestamp=0)
        fields: dict[str, Any] = {}
        if producer != 5 or rng.random() < 0.5:
            fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequences[producer]}
            fields["transactional"] = producer != 5
            sequences[producer] += len(records)
        ops.append(Op.append_records(for_kafka(records), at // 30, codec=rng.choice(CODECS), **fields))
    return ops


def compacted(kafka: Kafka, rng: random.Random) -> Operations:
    """What compaction leaves behind: gaps inside and between batches, emptied batches, delete horizons."""
    batches = []
    offset = 0
    for at in range(60):
        offset += rng.choice((0, 0, 1, 30, 5000))
        records = for_kafka(random_records(rng, NOW_MS + 10 * at))
        at_offset = offset
        for each in records:
            each["offset"] = at_offset
            at_offset += rng.choice((1, 1, 2, 9))
        last = at_offset + rng.choice((-1, 0, 20))
        last = max(last, records[-1]["offset"])
        fields: dict[str, Any] = {"base_offset": offset, "last_offset": last, "leader_epoch": at // 25}
        if at % 9 == 3:
            fields |= {"empty": True, "max_timestamp_ms": NOW_MS, "producer_id": 3, "producer_epoch": 0}
            fields["base_sequence"] = 5
            records = []
        elif at % 7 == 2:
            fields["delete_horizon_ms"] = NOW_MS + 10**6
        elif at % 5 == 1:
            fields = {"base_offset": offset, "producer_id": 4, "producer_epoch": 0, "leader_epoch": at // 25}
            fields["transactional"] = True
            fields["marker"] = {"type": rng.choice(("commit", "abort")), "timestamp_ms": NOW_MS}
            records, last = [], offset
        batches.append(batch(records, codec="none" if not records else rng.choice(CODECS), **fields))
        offset = last + 1
    return [Op.append(data, origin="replication", leader_epoch=99) for data in kafka.build_batches(batches)]


def control_records(kafka: Kafka, rng: random.Random) -> Operations:
    """Kinds of control records that are none of a consumer's business, among data."""
    change = [record(b"\x00\x00\x00\x02", b"\x01\x02\x03", NOW_MS)]
    ops: Operations = []
    for at in range(20):
        ops.append(Op.append_records(for_kafka(random_records(rng, NOW_MS + at)), at // 5))
        if at % 4 == 0:
            ops.append(Op.append_records(change, at // 5, control=True, origin="coordinator"))
    return ops


def append_time(kafka: Kafka, rng: random.Random) -> Operations:
    return [op for at, each in enumerate(transactions(kafka, rng)) for op in (Op.clock(NOW_MS + 7 * at), each)]


SCENARIOS: dict[str, tuple[Callable[[Kafka, random.Random], Operations], dict[str, Any]]] = {
    "format 0": (lambda kafka, rng: one_format(kafka, rng, 0), {}),
    "format 1": (lambda kafka, rng: one_format(kafka, rng, 1), {}),
    "format 1 append time": (lambda kafka, rng: one_format(kafka, rng, 1), {"message.timestamp.type": "LogAppendTime"}),
    "format 2": (lambda kafka, rng: one_format(kafka, rng, 2), {}),
    "mixed formats": (mixed_formats, {}),
    "transactions": (transactions, {}),
    "append time": (append_time, {"message.timestamp.type": "LogAppendTime"}),
    "compacted": (compacted, {"cleanup.policy": "compact"}),
    "control records": (control_records, {}),
    "recompressed": (transactions, {"compression.type": "zstd"}),
}


def written(kafka: Kafka, directory: Path, rng: random.Random, scenario: str, *, crash: bool = False) -> LogRun:
    operations, settings = SCENARIOS[scenario]
    config = SMALL | settings
    run = kafka.append(directory, operations(kafka, rng), config, now_ms=NOW_MS, crash=crash)
    errors = {result.error for result in run.results}
    assert errors == {None}, errors
    assert len(run.closed.segments) > 1
    return run


def opened(directory: Path, scenario: str, *, clean: bool) -> PartitionWriter:
    return PartitionWriter.open(
        str(directory),
        partition=PARTITION,
        config=LogConfig.from_mapping(SMALL | SCENARIOS[scenario][1]),
        clean=clean,
        clock=ManualClock(NOW_MS + 10_000),
        fs=UnsyncedFiles(),
        state_path=str(directory.parent / "state"),
    )


def assert_reads_the_same(
    kafka: Kafka, log: PartitionWriter, directory: Path, run: LogRun, rng: random.Random, state_path: Path
) -> None:
    everything, committed = list(kafka.records(directory)), list(kafka.records(directory, committed=True))
    assert everything
    ours = [as_kafka(r) for r in log.records()]
    assert ours == everything
    visible = [r for r in everything if r.offset < run.closed.last_stable_offset]
    assert {r.offset for r in committed} <= {r.offset for r in visible}
    assert [as_kafka(r) for r in log.records(isolation=Isolation.READ_COMMITTED)] == committed
    reader = PartitionReader(
        PartitionPlace(str(directory), PARTITION, str(state_path)),
        high_watermark=lambda: log.high_watermark,
        last_stable_offset=lambda: log.last_stable_offset,
    )
    start, end = log.log_start_offset, log.log_end_offset
    for first in (start, *(rng.randrange(start, end) for _ in range(5)), end):
        last = rng.choice((None, rng.randrange(first, end + 1)))
        for which, is_committed in ((everything, False), (committed, True)):
            expected = _between(which, first, last)
            assert [as_kafka(r) for r in reader.records(first, last, committed=is_committed)] == expected
    reader.close()


def _between(records: list[KafkaRecord], first: int, last: int | None) -> list[KafkaRecord]:
    return [r for r in records if first <= r.offset and (last is None or r.offset < last)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_clean_directory_is_read_as_kafka_reads_it(kafka: Kafka, tmp_path: Path, seed: int, scenario: str) -> None:
    rng = random.Random(seed)
    directory = tmp_path / str(PARTITION)
    run = written(kafka, directory, rng, scenario)
    untouched = tmp_path / "untouched" / str(PARTITION)
    shutil.copytree(directory, untouched)
    log = opened(directory, scenario, clean=True)
    assert not log.recovery.found_damage
    loaded = kafka.load(tmp_path / "untouched" / str(PARTITION), SMALL, now_ms=NOW_MS + 10_000)
    assert_same_state(state_of(log), loaded)
    assert_reads_the_same(kafka, log, untouched, run, rng, tmp_path / "state")
    log.close()
    assert_same_files(directory, untouched)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_crashed_directory_is_read_as_kafka_reads_it(kafka: Kafka, tmp_path: Path, seed: int, scenario: str) -> None:
    rng = random.Random(seed)
    directory = tmp_path / str(PARTITION)
    run = written(kafka, directory, rng, scenario, crash=True)
    theirs = tmp_path / "kafka" / str(PARTITION)
    shutil.copytree(directory, theirs)
    log = opened(directory, scenario, clean=False)
    assert not log.recovery.found_damage
    loaded = kafka.load(theirs, SMALL | SCENARIOS[scenario][1], now_ms=NOW_MS + 10_000, unclean=True)
    assert_same_state(state_of(log), loaded, restored_at_ms=NOW_MS + 10_000)
    assert_reads_the_same(kafka, log, theirs, run, rng, tmp_path / "state")
    log.close()
    assert_same_files(directory, theirs)
