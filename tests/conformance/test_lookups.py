"""Where a record is found: lookups by time and fetched byte ranges are Kafka's, on logs that are the same in both."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path
from typing import Any

import pytest

from conformance.kafka import Kafka, Op, OpResult
from conformance.workload import CODECS, ERRORS, LEGACY_CODECS, NOW_MS, Twins, random_records
from logstore.errors import DuramenError
from logstore.records.header import BatchHeader, read_header
from logstore.records.record import Record
from reference.fetching import Fetched, Isolation

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
LOGS = 200 if SOAK else 12
ISOLATIONS = {
    "log_end": Isolation.LOG_END,
    "high_watermark": Isolation.READ_UNCOMMITTED,
    "read_committed": Isolation.READ_COMMITTED,
}


def grow(rng: random.Random, twins: Twins) -> None:
    """Records in and out of order of time, transactions, gaps as compaction leaves them, some in old formats."""
    legacy = rng.random() < 0.2
    spread_ms = rng.choice((5, 300, 5000))
    for at in range(rng.randint(20, 80)):
        now_ms = NOW_MS + 20 * at
        twins.set_clock(now_ms)
        records = [
            r if r.timestamp_ms < 0 else Record(r.key, r.value, r.timestamp_ms - rng.randint(0, spread_ms), r.headers)
            for r in random_records(rng, now_ms, no_timestamp=0.05, headers=not legacy)
        ]
        end = twins.log.log_end_offset
        kind = rng.random()
        if legacy:
            fields: dict[str, Any] = {"magic": rng.choice((0, 1)), "codec": rng.choice(LEGACY_CODECS)}
            twins.replicate(twins.build(records, base_offset=end + rng.choice((0, 0, 9)), **fields))
        elif kind < 0.4:
            twins.append_batch(twins.build(records, codec=rng.choice(CODECS)))
        elif kind < 0.6:
            fields = {"base_offset": end + rng.choice((0, 1, 30)), "leader_epoch": 0, "codec": rng.choice(CODECS)}
            fields["last_offset"] = fields["base_offset"] + len(records) + rng.choice((-1, 0, 10))
            twins.replicate(twins.build(records, **fields))
        elif kind < 0.85:
            producer_id = rng.randrange(4)
            known = twins.log.producers.producers.get(producer_id)
            fields = {"producer_id": producer_id, "producer_epoch": 0, "transactional": True}
            fields["base_sequence"] = 0 if known is None else known.last_sequence + 1
            twins.append_batch(twins.build(records, codec=rng.choice(CODECS), **fields))
        else:
            twins.marker(rng.choice(("commit", "abort")), rng.randrange(4), 0)
    twins.set_high_watermark(twins.log.log_end_offset)
    if rng.random() < 0.5:
        twins.advance_log_start(rng.randrange(twins.log.log_end_offset // 2 + 1))


def timestamps(rng: random.Random, twins: Twins) -> list[int]:
    known = sorted({r.timestamp_ms for r in twins.log.records(isolation=Isolation.LOG_END) if r.timestamp_ms >= 0})
    some = rng.sample(known, min(len(known), 60))
    return [-1, -2, -3, 0, NOW_MS - 10**6, *some, *(t + 1 for t in some), *(t - 1 for t in some), NOW_MS + 10**6]


def reads(rng: random.Random, twins: Twins) -> list[dict[str, Any]]:
    start, end = twins.log.log_start_offset, twins.log.log_end_offset
    out = []
    for _ in range(120):
        offset = rng.choice((start - 1, start, end, end + 1, *(rng.randrange(start, end + 1) for _ in range(12))))
        size = rng.choice((0, 1, 60, 61, 100, 200, 700, 3000, 2**31 - 1))
        out.append(Op.read(max(offset, 0), size, rng.choice(list(ISOLATIONS)), rng.random() < 0.7, with_bytes=True))
    return out


def test_lookups_by_time_and_fetched_ranges_are_kafkas(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    found = aborted = incomplete = 0
    for number in range(LOGS):
        rng = random.Random(f"{seed} {number}")
        config = {"segment.bytes": rng.choice((700, 2000, 100_000)), "index.interval.bytes": rng.choice((0, 150, 4096))}
        twins = Twins(kafka, tmp_path / str(number), config, hold_high_watermark=True)
        grow(rng, twins)
        assert not twins.errors
        twins.check()
        bases = [found.base_offset for found in kafka.read(twins.kafka_directory, records=False)]
        visible = [base for base in bases if base >= twins.log.log_start_offset]
        high_watermark = rng.choice((*visible, twins.log.log_end_offset))
        twins.log.set_high_watermark(high_watermark)
        asked, ranges = timestamps(rng, twins), reads(rng, twins)
        operations = [Op.high_watermark(high_watermark), *map(Op.offset_for_timestamp, asked), *ranges]
        run = kafka.append(
            twins.kafka_directory,
            operations,
            config,
            now_ms=twins.clock.now_ms(),
            hold_high_watermark=True,
            log_start_offset=twins.log.log_start_offset,
        )
        # Of a transaction from below the log start Kafka says where the batch at the log start begins.
        same_end = run.closed.last_stable_offset == twins.log.last_stable_offset
        assert same_end or twins.log.last_stable_offset == twins.log.log_start_offset
        where = f"log {number}, DURAMEN_SEED={seed}"
        for timestamp_ms, result in zip(asked, run.results[1:], strict=False):
            ours = twins.log.offset_for_timestamp(timestamp_ms, isolation=Isolation.LOG_END)
            theirs = (result["timestamp_ms"], result["offset"]) if "offset" in result.fields else None
            assert (ours and (ours.timestamp_ms, ours.offset)) == theirs, f"{where}, time {timestamp_ms}"
            found += theirs is not None
        for read, result in zip(ranges, run.results[1 + len(asked) :], strict=True):
            if read["isolation"] == "read_committed" and not same_end:
                continue
            assert_same_range(twins, read, result, f"{where}, {read}, high watermark {high_watermark}")
            aborted += bool(result.error is None and result.fields.get("aborted"))
            incomplete += bool(result.error is None and result["first_entry_incomplete"])
        twins.close()
    assert min(found, aborted, incomplete) > 0


def assert_same_range(twins: Twins, read: dict[str, Any], result: OpResult, where: str) -> None:
    def fetch() -> Fetched:
        options: dict[str, Any] = {"isolation": ISOLATIONS[read["isolation"]], "min_one_batch": read["min_one"]}
        return twins.log.fetch(read["offset"], read["max_bytes"], **options)

    if result.error is not None:
        with pytest.raises(DuramenError) as refused:
            fetch()
        assert type(refused.value).__name__ in ERRORS[result.error], where
        return
    ours = fetch()
    assert ours.size_bytes == result["size_bytes"], where
    if ours.file is not None:  # in a gap before the end Kafka speaks of a batch that may not be seen yet
        assert ours.first_batch_incomplete == result["first_entry_incomplete"], where
    if ours.size_bytes:
        assert (ours.segment_base_offset, ours.position) == (result["segment"], result["position"]), where
        assert ours.file is not None

        assert ours.file.pread(ours.size_bytes, ours.position) == base64.b64decode(result["bytes"]), where
    # Kafka's search for the first index entry behind the range steps over one at slot 0: more than it needs to say.
    theirs = [tuple(pair) for pair in result.fields.get("aborted", [])]
    mine = [(a.producer_id, a.first_offset) for a in ours.aborted]
    assert [pair for pair in theirs if pair in mine] == mine, where
    last_offset = max((found.last_offset for found in whole_batches(ours)), default=-1)
    assert all(first_offset > last_offset for _, first_offset in theirs[len(mine) :]), where


def whole_batches(fetched: Fetched) -> list[BatchHeader]:
    out: list[BatchHeader] = []
    position, end = fetched.position, fetched.position + fetched.size_bytes
    while fetched.file is not None and (header := read_header(fetched.file, position, end)) is not None:
        out.append(header)
        position = header.end_position
    return out


@pytest.mark.parametrize("scenario", ["whole", "compacted away"])
def test_reading_every_offset_gives_what_kafka_gives(kafka: Kafka, tmp_path: Path, seed: int, scenario: str) -> None:
    """A consumer that fetches on from offset to offset, a little at a time, sees every record once."""
    rng = random.Random(seed)
    twins = Twins(kafka, tmp_path, {"segment.bytes": 1500, "index.interval.bytes": 100})
    for at in range(40):
        base = twins.log.log_end_offset + (rng.choice((0, 0, 25)) if scenario == "compacted away" else 0)
        records = random_records(rng, NOW_MS + at)
        twins.replicate(twins.build(records, base_offset=base, leader_epoch=0, codec=rng.choice(CODECS)))
    twins.check()
    offset, seen = 0, []
    while offset < twins.log.log_end_offset:
        got = twins.log.fetch(offset, rng.choice((1, 300, 5000)))
        assert got.file is not None
        data = got.file.pread(got.size_bytes, got.position)
        for found in kafka.read(data):  # a partial batch at the end is left out
            seen += [r for r in found.records or () if r.offset >= offset]
            offset = found.last_offset + 1
    assert seen == list(kafka.records(twins.kafka_directory))
    twins.close()
