"""Kafka's dump tool over closed logs of ours: it finds nothing, and finds what we break on purpose."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.kafka import Kafka, batch
from conformance.workload import CODECS, NOW_MS, PARTITION, UnsyncedFiles, for_kafka, random_records
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from reference.partition_writer import PartitionWriter

LEVELS: dict[str, tuple[int | None, ...]] = {
    "none": (None,),
    "gzip": (None, 1, 9),
    "snappy": (None,),
    "lz4": (None, 1, 17),
    "zstd": (None, -131072, 22),
}


def open_log(directory: Path, clock: ManualClock, **config: Any) -> PartitionWriter:
    settings = {name.replace("_", "."): value for name, value in config.items()}
    return PartitionWriter.open(
        str(directory),
        partition=PARTITION,
        config=LogConfig.from_mapping(settings),
        clean=True,
        clock=clock,
        fs=UnsyncedFiles(),
    )


def transactional(records: list[Record], codec: str, level: int | None, producer_id: int, sequence: int) -> bytes:
    fields: dict[str, Any] = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence}
    options = BatchOptions(codec_id=CODECS.index(codec), level=level, transactional=True, **fields)
    return encode_batch(columns_of(records), options)


def write(directory: Path, rng: random.Random, codec: str, level: int | None, **config: Any) -> None:
    """Several segments of plain records and transactions, some aborted, one left open."""
    clock = ManualClock(NOW_MS)
    if level is not None:
        config[f"compression_{codec}_level"] = level
    with open_log(directory, clock, **config) as log:
        at = 0
        while at < 30 or len(log.segments) < 4:
            at += 1
            clock.advance(rng.choice((1, 50)))
            records = random_records(rng, clock.now_ms(), most=12, longest=rng.choice((80, 2000)))
            if at % 3 == 0:
                log.append(records, codec_id=CODECS.index(codec), leader_epoch=at // 10)
            elif at % 3 == 1:
                known = log.producers.producers.get(at % 4)
                sequence = 0 if known is None else known.last_sequence + 1
                log.append_batches(transactional(records, codec, level, at % 4, sequence), leader_epoch=at // 10)
            elif at % 5 < 3:
                log.append_marker(
                    commit=at % 2 == 0, producer_id=rng.randrange(4), producer_epoch=0, leader_epoch=at // 10
                )


@pytest.mark.parametrize(("codec", "level"), [(codec, level) for codec in CODECS for level in LEVELS[codec]])
def test_nothing_is_found_in_a_closed_log(
    kafka: Kafka, tmp_path: Path, seed: int, codec: str, level: int | None
) -> None:
    directory = tmp_path / str(PARTITION)
    write(directory, random.Random(seed), codec, level, segment_bytes=28_000, index_interval_bytes=500)
    assert kafka.dump_findings(directory) == []
    assert any(directory.glob("*.txnindex"))


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_found_where_the_log_stamps_and_recompresses(
    kafka: Kafka, tmp_path: Path, seed: int, codec: str
) -> None:
    directory = tmp_path / str(PARTITION)
    config = {"message_timestamp_type": "LogAppendTime", "segment_bytes": 28_000, "index_interval_bytes": 0}
    compression = "uncompressed" if codec == "none" else codec
    write(directory, random.Random(seed), "zstd", None, compression_type=compression, **config)
    assert kafka.dump_findings(directory) == []
    assert {found.codec for found in kafka.read(directory) if not found.control} == {codec}


def test_nothing_is_found_after_truncation_retention_and_many_openings(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    directory = tmp_path / str(PARTITION)
    clock = ManualClock(NOW_MS)
    config = {"segment_bytes": 2000, "index_interval_bytes": 100, "retention_bytes": 9000, "preallocate": True}
    for _ in range(5):
        with open_log(directory, clock, **config) as log:
            for _ in range(60):
                clock.advance(10)
                log.append(random_records(rng, clock.now_ms()))
            log.truncate_to(log.log_end_offset - rng.randrange(10))
            log.apply_retention()
    assert log.log_start_offset > 0
    for leftover in directory.glob("*.deleted"):  # they stay for a minute, by the clock of the files
        leftover.unlink()
    assert kafka.dump_findings(directory, compacted=True) == []


def test_nothing_is_found_in_gaps_and_old_formats(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    """Batches of a leader as a follower takes them: gaps, empty batches, more than 2^31 offsets, formats 0 and 1."""
    rng = random.Random(seed)
    directory = tmp_path / str(PARTITION)
    clock = ManualClock(NOW_MS)
    with open_log(directory, clock, segment_bytes=4000, index_interval_bytes=200) as log:
        for at in range(60):
            base = log.log_end_offset + rng.choice((0, 1, 40, 2**31 if at == 30 else 0))
            fields: dict[str, Any] = {"base_offset": base, "codec": rng.choice(CODECS[:4]), "magic": min(at // 20, 2)}
            records = random_records(rng, NOW_MS + 20 * at, headers=fields["magic"] == 2)
            if fields["magic"] == 2:
                fields |= {"leader_epoch": at // 15, "last_offset": base + 10}
            one = batch(for_kafka(records), **fields)
            if at % 11 == 10 and at >= 40:
                one = batch(empty=True, base_offset=base, last_offset=base + 3, max_timestamp_ms=NOW_MS, leader_epoch=9)
            log.append_batches(kafka.build_batches([one])[0], origin=AppendOrigin.REPLICATION)
    assert kafka.dump_findings(directory, compacted=True) == []


# --- what must be found -----------------------------------------------------------------------------------------------


def change(suffix: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = next(p for p in sorted(directory.glob(f"*.{suffix}")) if p.stat().st_size)
        path.write_bytes(edit(path.read_bytes()))

    return apply


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BREAKAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit in a batch": change("log", flipped(100)),
    "a log cut inside a batch": change("log", lambda data: data[:-7]),
    "nonsense behind the last batch": change("log", lambda data: data + b"\x01" * 40),
    "an offset index that points elsewhere": change("index", flipped(7)),
    "an offset index with a zero tail": change("index", lambda data: data + bytes(8)),
    "an index of a broken length": change("timeindex", lambda data: data + b"\0"),
    "a time index of other times": change("timeindex", flipped(7)),
    "a transaction index that is cut": change("txnindex", lambda data: data[:-1]),
    "a snapshot with a wrong checksum": change("snapshot", flipped(8)),
    "a file left by compaction": lambda directory: (directory / f"{0:020}.log.cleaned").touch(),
}


def test_what_is_broken_is_found(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    whole = tmp_path / "whole" / str(PARTITION)
    write(whole, random.Random(seed), "lz4", None, segment_bytes=28_000, index_interval_bytes=500)
    for name, broken in BREAKAGES.items():
        directory = tmp_path / name.replace(" ", "-") / str(PARTITION)
        shutil.copytree(whole, directory)
        assert kafka.dump_findings(directory) == []
        broken(directory)
        assert kafka.dump_findings(directory) != [], name
