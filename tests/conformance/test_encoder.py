"""Our encoder against Kafka's builder, our decoder against what Kafka wrote: golden vectors and fresh batches."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.kafka import Kafka, batch
from conformance.vectors import VECTORS
from conformance.workload import CODECS, NOW_MS, PARTITION, UnsyncedFiles, as_kafka, for_kafka, random_records
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.limits import DEFAULT_LIMITS
from logstore.records.columns import columns_of
from logstore.records.control import encode_marker
from logstore.records.decoder import Decoder
from logstore.records.encoder import BatchOptions, Encoder, encode_batch
from logstore.records.iterate import iter_records
from logstore.records.record import Record, TimestampType
from logstore.records.scan import scan_batches
from reference.empty_batch import encode_empty_batch
from reference.partition_writer import PartitionWriter

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
BATCHES = 20_000 if SOAK else 400
LEVELS: dict[str, tuple[int | None, ...]] = {
    "none": (None,),
    "gzip": (None, 1, 9),
    "snappy": (None,),
    "lz4": (None, 1, 17),
    "zstd": (None, -131072, 22),
}


def shapes(rng: random.Random) -> list[Record]:
    """Records of every kind: few and many, short and long, without key, value or timestamp, far apart in time."""
    kind = rng.randrange(6)
    if kind == 0:
        return random_records(rng, NOW_MS, most=300, longest=20, headers=True)
    if kind == 1:
        return random_records(rng, NOW_MS, most=2, longest=100_000)
    records = random_records(rng, NOW_MS, most=20, longest=300, no_timestamp=0.3)
    if kind == 2:
        far = (0, 1, 2**31, 2**62, 2**63 - 1, -1)
        records = [dataclasses.replace(r, timestamp_ms=rng.choice(far)) for r in records]
    if kind == 3:
        many = tuple((f"h{i}", b"%d" % i) for i in range(rng.choice((63, 64, 70))))
        records[0] = dataclasses.replace(records[0], headers=many)
    return records


def fields_of(rng: random.Random) -> dict[str, Any]:
    """Header fields as `batch()` names them."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.4:
        fields = {
            "producer_id": rng.choice((0, 1, 2**63 - 1)),
            "producer_epoch": rng.choice((0, 32767)),
            "base_sequence": rng.choice((0, 7, 2**31 - 1)),
            "transactional": rng.random() < 0.5,
        }
    if rng.random() < 0.3:
        fields["leader_epoch"] = rng.choice((0, 5, 2**31 - 1))
    if rng.random() < 0.2:
        fields["delete_horizon_ms"] = rng.choice((0, NOW_MS, 2**62))
    if rng.random() < 0.3:
        fields["base_offset"] = rng.choice((1, 2**31, 2**62))
    return fields


def options_of(fields: dict[str, Any], codec: str = "none", level: int | None = None) -> BatchOptions:
    return BatchOptions(codec_id=CODECS.index(codec), level=level, **fields)


def test_uncompressed_batches_are_kafkas_byte_for_byte(kafka: Kafka, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(0, BATCHES, 50):
        cases = [(shapes(rng), fields_of(rng)) for _ in range(50)]
        built = kafka.build_batches([batch(for_kafka(records), **fields) for records, fields in cases])
        for (records, fields), expected in zip(cases, built, strict=True):
            assert encode_batch(columns_of(records), options_of(fields)) == expected, (fields, records)


def test_offset_gaps_are_kafkas_byte_for_byte(kafka: Kafka, seed: int) -> None:
    """As compaction leaves them: offsets that are not consecutive, a base offset below the first record's."""
    rng = random.Random(seed)
    for _ in range(20):
        records = random_records(rng, NOW_MS)
        offset = base = rng.choice((0, 100))
        spread = []
        for r in records:
            spread.append(dataclasses.replace(r, offset=offset))
            offset += rng.choice((1, 2, 70, 5000))
        described = [d | {"offset": r.offset} for d, r in zip(for_kafka(spread), spread, strict=True)]
        expected = kafka.build_batches([batch(described, base_offset=base)])[0]
        assert encode_batch(columns_of(spread, first_offset=base), BatchOptions(base_offset=base)) == expected


@pytest.mark.parametrize("control", [True, False])
def test_empty_batches_are_kafkas_byte_for_byte(kafka: Kafka, control: bool) -> None:
    fields: dict[str, Any] = {"producer_id": 9, "producer_epoch": 3, "base_sequence": 4, "leader_epoch": 2}
    fields |= {"transactional": control, "control": control, "base_offset": 100}
    span: dict[str, Any] = {"last_offset": 117, "max_timestamp_ms": NOW_MS}
    expected = kafka.build_batches([batch(empty=True, **fields, **span)])[0]
    assert encode_empty_batch(BatchOptions(**fields), **span) == expected


@pytest.mark.parametrize("commit", [True, False])
def test_markers_are_kafkas_byte_for_byte(kafka: Kafka, commit: bool) -> None:
    fields: dict[str, Any] = {"producer_id": 9, "producer_epoch": 3}
    marker = {"type": "commit" if commit else "abort", "coordinator_epoch": 11, "timestamp_ms": NOW_MS}
    expected = kafka.build_batches([batch(marker=marker, **fields, transactional=True, leader_epoch=7)])[0]
    ours = encode_marker(commit=commit, coordinator_epoch=11, timestamp_ms=NOW_MS, leader_epoch=7, **fields)
    assert ours == expected


@pytest.mark.parametrize(("codec", "level"), [(codec, level) for codec in CODECS for level in LEVELS[codec]])
def test_kafka_reads_what_we_compress(kafka: Kafka, seed: int, codec: str, level: int | None) -> None:
    rng = random.Random(seed)
    cases = [(shapes(rng), fields_of(rng)) for _ in range(BATCHES // 20)]
    plain = kafka.build_batches([batch(for_kafka(records), codec=codec, **fields) for records, fields in cases])
    ours = [encode_batch(columns_of(records), options_of(fields, codec, level)) for records, fields in cases]
    for mine, theirs in zip(kafka.read(b"".join(ours)), kafka.read(b"".join(plain)), strict=True):
        assert mine.codec == codec
        same = {"position": 0, "size_bytes": 0, "crc": 0}
        assert dataclasses.replace(mine, **same) == dataclasses.replace(theirs, **same)
    # What Kafka compressed, we read.
    for (records, fields), data in zip(cases, plain, strict=True):
        base = fields.get("base_offset", 0)
        expected = [dataclasses.replace(r, offset=base + i) for i, r in enumerate(records)]
        assert list(iter_records(data)) == expected


def test_many_batches_of_one_encoder_are_read_by_kafka(kafka: Kafka, seed: int) -> None:
    """Cut by size, each batch goes on where the last one ended."""
    rng = random.Random(seed)
    records = random_records(rng, NOW_MS, most=1, longest=200)
    while len(records) < 5000:
        records += random_records(rng, NOW_MS, most=20, longest=200)
    for codec in CODECS:
        encoder = Encoder(BatchOptions(codec_id=CODECS.index(codec), batch_bytes=rng.choice((300, 4096, 16384))))
        data = b"".join(encoded.data.tobytes() for encoded in encoder.encode(columns_of(records)))
        batches = list(kafka.read(data))
        assert len(batches) > 20
        found = [record for one in batches for record in one.records or ()]
        assert found == [as_kafka(dataclasses.replace(r, offset=i)) for i, r in enumerate(records)]


# --- golden vectors ---------------------------------------------------------------------------------------------------


def golden(name: str) -> Iterator[dict[str, Any]]:
    yield from json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def unpacked(data: Any) -> bytes | None:
    if isinstance(data, dict):
        text, times = data["repeat"]
        return base64.b64decode(text) * int(times)
    return None if data is None else base64.b64decode(data)


def golden_records(case: dict[str, Any], *, control: bool) -> list[Record]:
    return [
        Record(
            unpacked(key),
            unpacked(value),
            timestamp_ms,
            tuple((name, unpacked(data)) for name, data in headers),
            offset,
            TimestampType(found["timestamp_type"] == "LogAppendTime"),
        )
        for found in case["batches"]
        if control or not found["control"]
        for offset, timestamp_ms, key, value, headers in found["records"]
    ]


@pytest.mark.parametrize("name", ["batches_v2", "batches_v1", "batches_v0"])
@pytest.mark.parametrize("control", [True, False])
def test_golden_batches_are_read_as_kafka_reads_them(name: str, control: bool) -> None:
    for case in golden(name):
        expected = golden_records(case, control=control)
        data = bytes.fromhex(case["hex"])
        assert list(iter_records(data, control=control)) == expected, case["name"]
        array = np.frombuffer(data, dtype=np.uint8)
        decoder = Decoder(limits=DEFAULT_LIMITS, control=control)
        columns = [r for part in decoder.columns(array, scan_batches(array).table) for r in part.records()]
        assert columns == expected, case["name"]


def test_golden_headers_are_read_as_kafka_reads_them() -> None:
    from logstore.records import table as t

    names = {
        "position": t.POSITION,
        "size_bytes": t.SIZE,
        "base_offset": t.BASE_OFFSET,
        "last_offset": t.LAST_OFFSET,
        "leader_epoch": t.LEADER_EPOCH,
        "magic": t.MAGIC,
        "attributes": t.ATTRIBUTES,
        "base_timestamp_ms": t.BASE_TIMESTAMP,
        "max_timestamp_ms": t.MAX_TIMESTAMP,
        "producer_id": t.PRODUCER_ID,
        "producer_epoch": t.PRODUCER_EPOCH,
        "base_sequence": t.BASE_SEQUENCE,
        "count": t.COUNT,
        "crc": t.CRC,
    }
    for case in golden("batches_v2"):
        table = scan_batches(np.frombuffer(bytes.fromhex(case["hex"]), dtype=np.uint8)).table
        for row, found in zip(table.tolist(), case["batches"], strict=True):
            assert {name: row[column] for name, column in names.items()} == {name: found[name] for name in names}


def test_up_conversion_gives_kafkas_bytes(tmp_path: Path) -> None:
    """What a leader stores of an old client's messages: equal bytes, or where it compresses them equal records."""
    for case in golden("upconverted"):
        directory = tmp_path / case["name"] / str(PARTITION)
        with PartitionWriter.open(
            str(directory),
            partition=PARTITION,
            config=LogConfig.from_mapping(case["config"]),
            clean=True,
            clock=ManualClock(case["now_ms"]),
            fs=UnsyncedFiles(),
        ) as log:
            log.append_batches(bytes.fromhex(case["source_hex"]), leader_epoch=4)
        ours, theirs = (directory / f"{0:020}.log").read_bytes(), bytes.fromhex(case["hex"])
        compressed = any(found["codec"] != "none" for found in case["batches"])
        if compressed:
            # Everything of the header but size and checksum, and the records.
            assert ours[:8] + ours[12:17] + ours[21:61] == theirs[:8] + theirs[12:17] + theirs[21:61], case["name"]
            assert list(iter_records(ours)) == list(iter_records(theirs))
        else:
            assert ours == theirs, case["name"]
