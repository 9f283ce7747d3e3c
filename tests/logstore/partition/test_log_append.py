from __future__ import annotations

import base64
import errno
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.errors import (
    AppendTooLarge,
    CorruptBatch,
    DamagedLog,
    DuramenError,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTimestamp,
    InvalidTransactionState,
    NullKey,
    OffsetsOutOfOrder,
    OutOfOrderSequence,
    RecordTooLarge,
    TransactionCoordinatorFenced,
)
from logstore.limits import INT64_MAX
from logstore.partition.producer_state import AppendOrigin
from logstore.records.control import encode_marker
from logstore.records.record import Record, TimestampType
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import (
    NOW_MS,
    as_tuple,
    bases,
    batch,
    contents,
    directory_bytes,
    expected,
    open_log,
    rec,
    recs,
    sized_batch,
    state_path,
)
from simulation.tracing import Call, TracingFileSystem

COMPACT = frozenset({"compact"})
VECTORS = Path(__file__).parents[2] / "vectors"
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def log_with(**settings: object) -> PartitionWriter:
    return open_log(SimulatedFileSystem(), config=LogConfig(**settings))  # type: ignore[arg-type]


def idempotent(sequence: int, count: int = 1, *, pid: int = 7, epoch: int = 0, **options: object) -> bytes:
    records = [rec(f"{pid}:{epoch}:{sequence + n}", f"k{n}") for n in range(count)]
    return batch(records, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, **options)


def transactional(sequence: int, count: int = 1, *, pid: int = 7, epoch: int = 0) -> bytes:
    return idempotent(sequence, count, pid=pid, epoch=epoch, transactional=True)


def arrow(records: list[Record]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([r.key for r in records], pa.binary()),
            "value": pa.array([r.value for r in records], pa.binary()),
            "timestamp": pa.array([r.timestamp_ms for r in records], pa.int64()),
        }
    )


#: the three ways in, for rules that hold whichever is taken
WAYS: dict[str, Callable[[PartitionWriter, list[Record]], object]] = {
    "records": lambda log, records: log.append(records),
    "columns": lambda log, records: log.append_columns(arrow(records)),
    "batches": lambda log, records: log.append_batches(batch(records)),
}
every_way = pytest.mark.parametrize("append", WAYS.values(), ids=WAYS)


def raises_and_leaves_the_log_alone(
    log: PartitionWriter, kind: type[Exception], append: Callable[[], object]
) -> BaseException:
    before = contents(log), log.log_end_offset, log.high_watermark, log.last_stable_offset, log.size_bytes
    with pytest.raises(kind) as refused:
        append()
    assert (contents(log), log.log_end_offset, log.high_watermark, log.last_stable_offset, log.size_bytes) == before
    log.append([rec("goes on")])
    assert contents(log)[-1][2] == b"goes on"
    return refused.value


# --- offsets ----------------------------------------------------------------------------------------------------------


@every_way
def test_offsets_follow_one_another(append: Callable[[PartitionWriter, list[Record]], object]) -> None:
    log = log_with()
    for first in (0, 3, 6):
        append(log, recs(3, first=first))
    assert contents(log) == expected(recs(3) + recs(3, first=3) + recs(3, first=6))
    assert (log.log_end_offset, log.high_watermark) == (9, 9)


def test_an_append_tells_what_it_did() -> None:
    log = log_with(segment_bytes=330)
    info = log.append(recs(5))
    assert (info.first_offset, info.last_offset, info.records, info.rolls, info.duplicate) == (0, 4, 5, 0, False)
    assert info.bytes == log.size_bytes
    info = log.append(recs(8, first=5))
    assert (info.first_offset, info.last_offset, info.records, info.rolls) == (5, 12, 8, 1)
    assert info.log_append_time_ms == -1


def test_appending_nothing_changes_nothing() -> None:
    log = log_with()
    info = log.append([])
    assert (info.records, info.bytes, log.log_end_offset) == (0, 0, 0)
    with pytest.raises(InvalidRecord, match="no whole batch"):
        log.append_batches(b"")


def test_headers_and_nulls_come_back_as_they_went_in() -> None:
    log = log_with()
    records = [
        Record(b"k", None, 5, (("h", b"x"), ("n", None), ("h", b""))),
        Record(None, b"", 6),
        Record(b"", b"v" * 70_000, 7, (("ü", b"\xff"),)),
    ]
    log.append(records)
    assert list(log.records()) == [replace(record, offset=n) for n, record in enumerate(records)]


def test_a_leader_epoch_is_stamped_on_batches_and_noted_with_its_first_offset() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append(recs(2), leader_epoch=3)
    log.append(recs(2), leader_epoch=3)
    log.append(recs(1), leader_epoch=7)
    epochs = [header.leader_epoch for segment in log.segments for header in segment.headers()]
    assert epochs == [3, 3, 7]
    assert directory_bytes(fs)["leader-epoch-checkpoint"] == b"0\n2\n3 0\n7 4\n"


def test_a_batch_cut_off_at_the_end_is_left_out() -> None:
    log = log_with()
    log.append_batches(batch(recs(2)) + batch(recs(2))[:-1])
    assert log.log_end_offset == 2


def test_a_wrong_checksum_refuses_the_whole_append() -> None:
    log = log_with()
    damaged = bytearray(batch(recs(2)))
    damaged[-1] ^= 1
    raises_and_leaves_the_log_alone(log, CorruptBatch, lambda: log.append_batches(batch(recs(2)) + damaged))


def test_client_batches_begin_at_offset_zero() -> None:
    log = log_with()
    raises_and_leaves_the_log_alone(log, InvalidRecord, lambda: log.append_batches(batch(recs(2), base_offset=5)))


def test_control_batches_are_not_taken_from_clients() -> None:
    log = log_with()
    marker = encode_marker(commit=True, producer_id=1, producer_epoch=0, coordinator_epoch=0, timestamp_ms=NOW_MS)
    refused = raises_and_leaves_the_log_alone(log, InvalidRecord, lambda: log.append_batches(marker))
    assert "control" in str(refused)


@pytest.mark.parametrize("field", ["count", "last offset"])
def test_a_batch_whose_counts_disagree_is_refused(field: str) -> None:
    log = log_with()
    data = bytearray(batch(recs(3)))
    if field == "count":
        data[57:61] = (2).to_bytes(4, "big")
    else:
        data[23:27] = (5).to_bytes(4, "big")
    data[17:21] = _crc(data).to_bytes(4, "big")
    raises_and_leaves_the_log_alone(log, DuramenError, lambda: log.append_batches(data))


def _crc(data: bytes | bytearray) -> int:
    from crc32c import crc32c

    return int(crc32c(bytes(data[21:])))


# --- replication ------------------------------------------------------------------------------------------------------


def test_replicated_batches_keep_their_offsets_with_gaps() -> None:
    log = log_with()
    for base in (5, 6, 100):
        log.append_batches(batch([rec(str(base))], base_offset=base, leader_epoch=2), origin=AppendOrigin.REPLICATION)
    assert [row[0] for row in contents(log)] == [5, 6, 100]
    assert log.log_end_offset == 101


@pytest.mark.parametrize("bases_given", [(4,), (0,), (7, 6), (9, 9)])
def test_replicated_batches_must_go_on_from_the_end(bases_given: tuple[int, ...]) -> None:
    log = log_with()
    log.append(recs(5))
    data = b"".join(batch([rec()], base_offset=base) for base in bases_given)
    raises_and_leaves_the_log_alone(
        log, OffsetsOutOfOrder, lambda: log.append_batches(data, origin=AppendOrigin.REPLICATION)
    )


def test_replicated_batches_are_not_held_to_max_message_bytes_but_to_segment_bytes() -> None:
    log = log_with(max_message_bytes=200, segment_bytes=1000)
    log.append_batches(sized_batch(900), origin=AppendOrigin.REPLICATION)
    with pytest.raises(AppendTooLarge):
        log.append_batches(sized_batch(1001, base_offset=1), origin=AppendOrigin.REPLICATION)


# --- keys, sizes, timestamps ------------------------------------------------------------------------------------------


@every_way
def test_a_compacted_topic_takes_no_record_without_key(
    append: Callable[[PartitionWriter, list[Record]], object],
) -> None:
    log = log_with(cleanup_policy=COMPACT)
    append(log, [rec(None, "k")])
    records = [rec("v", "k")] * 9 + [rec("v", None)] + [rec("v", "k")] * 3
    raises_and_leaves_the_log_alone(log, NullKey, lambda: append(log, records))


@every_way
def test_other_topics_take_records_without_key(append: Callable[[PartitionWriter, list[Record]], object]) -> None:
    log = log_with()
    append(log, [rec("v", None)])
    assert contents(log)[0][1] is None


@pytest.mark.parametrize("offset", [0, 1, 3, 7, 8, 9, 17])
def test_a_null_key_is_found_in_a_slice_of_an_arrow_table(offset: int) -> None:
    keys = [None if n == offset + 5 else b"k" for n in range(40)]
    table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array([b"v"] * 40, pa.binary())})
    log = log_with(cleanup_policy=COMPACT)
    log.append_columns(table.slice(offset, 5))
    log.append_columns(table.slice(offset + 6, 4))
    with pytest.raises(NullKey, match="row 5"):
        log.append_columns(table.slice(offset, 6))


def test_an_arrow_table_without_keys_is_refused_on_a_compacted_topic() -> None:
    with pytest.raises(NullKey):
        log_with(cleanup_policy=COMPACT).append_columns(pa.table({"value": pa.array([b"v"], pa.binary())}))


@every_way
def test_a_batch_above_max_message_bytes_is_refused(append: Callable[[PartitionWriter, list[Record]], object]) -> None:
    size = len(batch([rec(b"x" * 100)]))
    append(log_with(max_message_bytes=size), [rec(b"x" * 100)])
    log = log_with(max_message_bytes=size)
    raises_and_leaves_the_log_alone(log, RecordTooLarge, lambda: append(log, [rec(b"x" * 101)]))


def test_records_are_cut_into_batches_that_fit_max_message_bytes() -> None:
    log = log_with(max_message_bytes=200, segment_bytes=500)
    log.append(recs(50))
    sizes = [header.size_bytes for segment in log.segments for header in segment.headers()]
    assert max(sizes) <= 200
    assert contents(log) == expected(recs(50))


@every_way
def test_an_append_larger_than_a_segment_is_refused(append: Callable[[PartitionWriter, list[Record]], object]) -> None:
    size = len(batch([rec(b"x" * 100)]))
    append(log_with(segment_bytes=size), [rec(b"x" * 100)])
    log = log_with(segment_bytes=size)
    raises_and_leaves_the_log_alone(log, AppendTooLarge, lambda: append(log, [rec(b"x" * 101)]))


@every_way
@pytest.mark.parametrize(("at_ms", "taken"), [(NOW_MS - 500, True), (NOW_MS - 501, False), (-1, True)])
def test_a_create_time_too_old_is_refused(
    append: Callable[[PartitionWriter, list[Record]], object], at_ms: int, taken: bool
) -> None:
    log = log_with(message_timestamp_before_max_ms=500)
    records = [rec(at_ms=NOW_MS), rec(at_ms=at_ms), rec(at_ms=-1)]
    if taken:
        append(log, records)
        assert [row[3] for row in contents(log)] == [NOW_MS, at_ms, -1]
    else:
        raises_and_leaves_the_log_alone(log, InvalidTimestamp, lambda: append(log, records))


@every_way
@pytest.mark.parametrize(("at_ms", "taken"), [(NOW_MS + 500, True), (NOW_MS + 501, False)])
def test_a_create_time_too_far_ahead_is_refused(
    append: Callable[[PartitionWriter, list[Record]], object], at_ms: int, taken: bool
) -> None:
    log = log_with(message_timestamp_after_max_ms=500)
    records = [rec(at_ms=-1), rec(at_ms=at_ms)]
    if taken:
        append(log, records)
    else:
        raises_and_leaves_the_log_alone(log, InvalidTimestamp, lambda: append(log, records))


def test_a_null_timestamp_is_now_and_does_not_hide_a_bad_one_beside_it() -> None:
    log = log_with(message_timestamp_before_max_ms=500)

    def table(*timestamps: int | None) -> pa.Table:
        values = [b"v"] * len(timestamps)
        return pa.table({"key": values, "value": values, "timestamp": pa.array(timestamps, pa.int64())})

    log.append_columns(table(None, NOW_MS - 500, None))
    assert [row[3] for row in contents(log)] == [NOW_MS, NOW_MS - 500, NOW_MS]
    raises_and_leaves_the_log_alone(log, InvalidTimestamp, lambda: log.append_columns(table(None, 3, None)))
    raises_and_leaves_the_log_alone(
        log, InvalidTimestamp, lambda: log.append_columns(table(None, NOW_MS + 10**9, None))
    )


def test_a_client_batch_must_not_be_marked_log_append_time() -> None:
    log = log_with()
    raises_and_leaves_the_log_alone(
        log, InvalidTimestamp, lambda: log.append_batches(batch(recs(1), log_append_time=True))
    )


@every_way
def test_log_append_time_stamps_the_batch_and_asks_no_record(
    append: Callable[[PartitionWriter, list[Record]], object],
) -> None:
    log = log_with(message_timestamp_type="LogAppendTime", message_timestamp_before_max_ms=10)
    append(log, [rec(at_ms=3), rec(at_ms=NOW_MS + 10**9)])
    found = list(log.records())
    assert [(record.timestamp_ms, record.timestamp_type) for record in found] == [
        (NOW_MS, TimestampType.LOG_APPEND_TIME)
    ] * 2
    (header,) = log.segments[0].headers()
    assert header.max_timestamp_ms == NOW_MS
    assert log.offset_for_timestamp(NOW_MS) is not None


def test_the_answer_carries_the_log_append_time() -> None:
    log = log_with(message_timestamp_type="LogAppendTime")
    assert log.append(recs(1)).log_append_time_ms == NOW_MS


def test_a_header_that_claims_another_largest_timestamp_is_corrected() -> None:
    data = bytearray(batch([rec(at_ms=NOW_MS), rec(at_ms=NOW_MS + 5)]))
    data[35:43] = (NOW_MS + 999).to_bytes(8, "big")
    data[17:21] = _crc(data).to_bytes(4, "big")
    log = log_with()
    log.append_batches(data)
    (header,) = log.segments[0].headers()
    assert header.max_timestamp_ms == NOW_MS + 5
    assert contents(log) == [(0, b"k", b"v", NOW_MS), (1, b"k", b"v", NOW_MS + 5)]


# --- compression ------------------------------------------------------------------------------------------------------


def codecs_of(log: PartitionWriter) -> list[int]:
    return [header.codec_id for segment in log.segments for header in segment.headers()]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("topic", ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_batches_are_stored_with_the_topics_codec(codec: str, topic: str) -> None:
    log = log_with(compression_type=topic)
    records = recs(20)
    stored = CODECS[codec] if topic == "producer" else CODECS["none" if topic == "uncompressed" else topic]
    log.append_batches(batch(records, codec_id=CODECS[codec]))
    log.append(recs(20, first=20), codec_id=CODECS[codec])
    assert codecs_of(log) == [stored, stored]
    assert contents(log) == expected(records + recs(20, first=20))


def test_a_batch_with_the_topics_codec_is_stored_as_it_came() -> None:
    sent = batch(recs(20), codec_id=4, level=19)
    log = log_with(compression_type="zstd", compression_zstd_level=1)
    log.append_batches(sent)
    assert log.segments[0].log.pread(log.size_bytes, 0)[61:] == sent[61:]


@pytest.mark.parametrize(("codec", "low", "high"), [("gzip", 1, 9), ("lz4", 1, 17), ("zstd", -50, 19)])
def test_the_level_of_the_topic_is_used_where_the_log_compresses(codec: str, low: int, high: int) -> None:
    text = b" ".join(f"{n * 7919 % 10007:05d} and {n % 17}".encode() for n in range(3000))
    records = [rec(text[at : at + 500], str(at)) for at in range(0, len(text), 500)]
    sizes = []
    for level in (low, high):
        log = log_with(compression_type=codec, **{f"compression_{codec}_level": level})
        log.append_batches(batch(records))
        rebuilt = log.size_bytes
        log.append(records, batch_bytes=1 << 20)
        sizes.append((rebuilt, log.size_bytes - rebuilt))
        assert contents(log) == expected(records + records)
    assert sizes[1][0] < sizes[0][0]
    assert sizes[1][1] < sizes[0][1]


def test_the_size_limit_is_checked_again_after_a_batch_was_rebuilt() -> None:
    packed = batch([rec(b"a" * 5000)], codec_id=4)
    log = log_with(compression_type="uncompressed", max_message_bytes=1000)
    assert len(packed) < 1000
    raises_and_leaves_the_log_alone(log, RecordTooLarge, lambda: log.append_batches(packed))


def test_a_rebuilt_batch_keeps_its_producer() -> None:
    log = log_with(compression_type="lz4")
    log.append_batches(transactional(0, 3))
    (header,) = log.segments[0].headers()
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.transactional) == (7, 0, 0, True)
    assert log.append_batches(transactional(0, 3)).duplicate


# --- legacy formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("policy", [COMPACT, frozenset({"delete"})])
def test_legacy_messages_become_v2_batches_with_new_offsets(version: str, policy: frozenset[str]) -> None:
    cases = json.loads((VECTORS / f"batches_{version}.json").read_text())["cases"]
    config = LogConfig(cleanup_policy=policy, message_timestamp_after_max_ms=INT64_MAX)
    taken = 0
    for case in cases:
        if any(b["timestamp_type"] == "LogAppendTime" for b in case["batches"]):
            continue
        rows = [row[1:4] for b in case["batches"] for row in b["records"]]
        if policy is COMPACT and any(row[1] is None for row in rows):
            continue
        log = open_log(SimulatedFileSystem(), config=config, clock=ManualClock(NOW_MS))
        log.append(recs(3))
        log.append_batches(bytes.fromhex(case["hex"]))
        found = list(log.records(3))
        assert [record.offset for record in found] == list(range(3, 3 + len(rows)))
        assert [(r.key, r.value, r.timestamp_ms) for r in found] == [
            (_decoded(key), _decoded(value), at_ms) for at_ms, key, value in rows
        ], case["name"]
        assert {header.magic for header in log.segments[0].headers()} == {2}
        taken += 1
    assert taken > 3


def _decoded(text: str | dict[str, list[object]] | None) -> bytes | None:
    if isinstance(text, dict):
        part, times = text["repeat"]
        return base64.b64decode(str(part)) * int(str(times))
    return None if text is None else base64.b64decode(text)


# --- idempotent producers ---------------------------------------------------------------------------------------------


def test_a_repeat_of_one_of_the_last_five_batches_is_answered_with_its_old_offsets() -> None:
    log = log_with()
    infos = [log.append_batches(idempotent(sequence, 2)) for sequence in range(0, 12, 2)]
    before = contents(log)
    for sequence, info in list(zip(range(0, 12, 2), infos, strict=True))[1:]:
        again = log.append_batches(idempotent(sequence, 2))
        assert again.duplicate
        assert (again.first_offset, again.last_offset, again.bytes) == (info.first_offset, info.last_offset, 0)
    assert contents(log) == before
    raises_and_leaves_the_log_alone(log, OutOfOrderSequence, lambda: log.append_batches(idempotent(0, 2)))


@pytest.mark.parametrize("sequence", [0, 3, 5, 6])
def test_a_sequence_that_does_not_follow_is_refused(sequence: int) -> None:
    log = log_with()
    log.append_batches(idempotent(0, 4))
    raises_and_leaves_the_log_alone(log, OutOfOrderSequence, lambda: log.append_batches(idempotent(sequence, 2)))
    log.append_batches(idempotent(4))


def test_an_older_epoch_is_refused_and_a_newer_one_begins_at_zero() -> None:
    log = log_with()
    log.append_batches(idempotent(0, 2, epoch=3))
    raises_and_leaves_the_log_alone(log, InvalidProducerEpoch, lambda: log.append_batches(idempotent(2, epoch=2)))
    raises_and_leaves_the_log_alone(log, OutOfOrderSequence, lambda: log.append_batches(idempotent(2, epoch=4)))
    log.append_batches(idempotent(0, epoch=4))


def test_sequences_wrap_around() -> None:
    log = log_with()
    log.append_batches(idempotent(2**31 - 2, 2))
    log.append_batches(idempotent(0, 2))
    assert log.log_end_offset == 4


def test_producers_are_remembered_across_a_clean_stop_and_an_unclean_one() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append_batches(idempotent(0, 2))
    log.close()
    log = open_log(fs)
    assert log.append_batches(idempotent(0, 2)).duplicate
    log.append_batches(idempotent(2, 2))
    log = open_log(fs.kill(), clean=False)
    assert log.append_batches(idempotent(2, 2)).duplicate
    raises_and_leaves_the_log_alone(log, OutOfOrderSequence, lambda: log.append_batches(idempotent(7)))


def test_of_two_batches_in_one_append_the_repeated_one_is_left_out() -> None:
    log = log_with()
    log.append_batches(idempotent(0, 2))
    info = log.append_batches(idempotent(0, 2) + idempotent(2, 3))
    assert (info.first_offset, info.last_offset, info.records, info.duplicate) == (2, 4, 3, False)
    assert [row[2] for row in contents(log)] == [f"7:0:{n}".encode() for n in range(5)]
    assert log.high_watermark == 5


def test_a_refused_batch_takes_back_the_one_before_it_in_the_same_append() -> None:
    log = log_with()
    for sequence in range(0, 10, 2):
        log.append_batches(idempotent(sequence, 2))
    raises_and_leaves_the_log_alone(
        log, OutOfOrderSequence, lambda: log.append_batches(idempotent(10, 2) + idempotent(20, 2))
    )
    # the producer is where it was, with all that was remembered of it
    assert all(log.append_batches(idempotent(sequence, 2)).duplicate for sequence in range(0, 10, 2))
    log.append_batches(idempotent(10, 2))


# --- transactions -----------------------------------------------------------------------------------------------------


def committed(log: PartitionWriter) -> list[bytes | None]:
    return [record.value for record in log.records(isolation=Isolation.READ_COMMITTED)]


def test_an_open_transaction_holds_the_last_stable_offset_until_its_marker() -> None:
    log = log_with()
    log.append([rec("before")])
    log.append_batches(transactional(0, 2))
    log.append([rec("after")])
    assert log.last_stable_offset == 1
    assert committed(log) == [b"before"]
    marker = log.append_marker(commit=True, producer_id=7, producer_epoch=0)
    assert (marker.first_offset, marker.last_offset) == (4, 4)
    assert log.last_stable_offset == 5
    assert committed(log) == [b"before", b"7:0:0", b"7:0:1", b"after"]
    assert [row[0] for row in contents(log)] == [0, 1, 2, 3]  # markers are nobody's records


def test_an_aborted_transaction_is_hidden_from_read_committed_only() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append_batches(transactional(0, 2))
    log.append_batches(transactional(0, 1, pid=8))
    log.append_marker(commit=False, producer_id=7, producer_epoch=0)
    log.append_marker(commit=True, producer_id=8, producer_epoch=0)
    log.append_batches(transactional(2, 1))
    log.append_marker(commit=True, producer_id=7, producer_epoch=0)
    assert committed(log) == [b"8:0:0", b"7:0:2"]
    assert len(contents(log)) == 4
    log.close()
    assert committed(open_log(fs)) == [b"8:0:0", b"7:0:2"]
    assert committed(open_log(fs.kill(), clean=False)) == [b"8:0:0", b"7:0:2"]


def test_a_marker_above_the_high_watermark_still_holds_the_last_stable_offset() -> None:
    log = open_log(SimulatedFileSystem(), manual_high_watermark=True)
    log.append_batches(transactional(0, 2))
    log.append_marker(commit=True, producer_id=7, producer_epoch=0)
    log.set_high_watermark(2)
    assert log.last_stable_offset == 0
    log.set_high_watermark(3)
    assert log.last_stable_offset == 3


def test_a_plain_batch_of_a_producer_in_a_transaction_is_refused() -> None:
    log = log_with()
    log.append_batches(transactional(0))
    raises_and_leaves_the_log_alone(log, InvalidTransactionState, lambda: log.append_batches(idempotent(1)))


def test_markers_of_older_producers_and_coordinators_are_refused() -> None:
    log = log_with()
    log.append_batches(transactional(0, epoch=2))
    log.append_marker(commit=True, producer_id=7, producer_epoch=2, coordinator_epoch=5)
    raises_and_leaves_the_log_alone(
        log,
        InvalidProducerEpoch,
        lambda: log.append_marker(commit=True, producer_id=7, producer_epoch=1, coordinator_epoch=5),
    )
    raises_and_leaves_the_log_alone(
        log,
        TransactionCoordinatorFenced,
        lambda: log.append_marker(commit=True, producer_id=7, producer_epoch=2, coordinator_epoch=4),
    )


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(("data", "data", "commit", "abort")), st.integers(1, 3)),
        max_size=25,
    ),
    segment_bytes=st.sampled_from((250, 400, 1 << 20)),
    reopen=st.booleans(),
)
def test_read_committed_shows_exactly_the_committed_records_below_the_oldest_open_one(
    steps: list[tuple[int, str, int]], segment_bytes: int, reopen: bool
) -> None:
    fs = SimulatedFileSystem()
    config = LogConfig(segment_bytes=segment_bytes)
    log = open_log(fs, config=config)
    sequences = [0, 0, 0]
    open_since: dict[int, int] = {}
    rows: list[tuple[int, int, bytes]] = []  # offset, producer, value
    aborted: set[int] = set()
    for pid, what, count in steps:
        if what == "data":
            first = log.append_batches(transactional(sequences[pid], count, pid=pid)).first_offset
            rows += [(first + n, pid, f"{pid}:0:{sequences[pid] + n}".encode()) for n in range(count)]
            open_since.setdefault(pid, first)
            sequences[pid] += count
        else:
            log.append_marker(commit=what == "commit", producer_id=pid, producer_epoch=0)
            since = open_since.pop(pid, None)
            if what == "abort" and since is not None:
                aborted |= {offset for offset, owner, _ in rows if owner == pid and offset >= since}
    stable = min(open_since.values(), default=log.log_end_offset)
    if reopen:
        log = open_log(fs.kill(), config=config, clean=False)
    assert log.last_stable_offset == stable
    visible = [value for offset, _, value in rows if offset < stable and offset not in aborted]
    assert committed(log) == visible
    assert [row[2] for row in contents(log)] == [value for _, _, value in rows]


# --- all or nothing ---------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_of_a_large_append_leaves_nothing_of_it() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=LogConfig(segment_bytes=20_000, cleanup_policy=COMPACT))
    log.append(recs(100))
    before = contents(log), bases(log)
    good = arrow(recs(3000, value_bytes=100)).to_batches()
    bad = arrow([*recs(10), rec("v", None)]).to_batches()
    with pytest.raises(NullKey):
        log.append_columns(pa.Table.from_batches([*good, *bad]))
    assert (contents(log), bases(log)) == before
    log.append(recs(5, first=100))
    log.close()
    assert contents(open_log(fs)) == expected(recs(100)) + expected(recs(5, first=100), 100)


class FaultCase:
    """A log on real files with something in it, an append that rolls several times, and a fault in one call of it."""

    config = LogConfig(segment_bytes=700, index_interval_bytes=100, cleanup_policy=COMPACT)

    def __init__(self, folder: Path) -> None:
        self.fs = TracingFileSystem()
        self.directory = str(folder / "orders-0")
        self.log = open_log(self.fs, self.directory, self.config)
        self.log.append(recs(10), leader_epoch=1)
        for sequence in range(4):
            self.log.append_batches(idempotent(sequence))
        self.log.append_batches(transactional(0, pid=8))
        self.records = contents(self.log)
        self.end = self.log.log_end_offset

    def append(self) -> None:
        self.log.append(recs(40, first=self.end), batch_bytes=200, leader_epoch=2)

    def append_transaction(self) -> None:
        """Producers, a roll and an entry of the transaction index in one call."""
        data = b"".join(idempotent(4 + 3 * n, 3) for n in range(6))
        self.log.append_batches(data, leader_epoch=2)

    def abort(self) -> None:
        self.log.append_marker(commit=False, producer_id=8, producer_epoch=0, leader_epoch=2)


def fault(error_number: int, at: int, *, times: int = 1) -> Callable[[Call], None]:
    counter = itertools.count()

    def fail(call: Call) -> None:
        if call.kind in ("fsync", "fsync_dir", "listdir"):
            return
        if at <= next(counter) < at + times:
            raise OSError(error_number, os.strerror(error_number), call.path)

    return fail


@pytest.mark.parametrize("what", ["append", "append_transaction", "abort"])
def test_an_append_that_meets_a_full_disk_at_any_point_leaves_the_log_as_it_was(tmp_path: Path, what: str) -> None:
    counting = FaultCase(tmp_path / "count")
    calls_before = len(counting.fs.calls)
    getattr(counting, what)()
    points = len(counting.fs.calls) - calls_before
    reached = 0
    for point in range(points):
        case = FaultCase(tmp_path / str(point))
        case.fs.before = fault(errno.ENOSPC, point)
        try:
            getattr(case, what)()
        except OSError:
            reached += 1
        else:
            continue
        case.fs.before = None
        _check_as_before(case)
    assert reached > (2 if what == "abort" else 15)


def _check_as_before(case: FaultCase) -> None:
    log = case.log
    assert (log.log_end_offset, log.high_watermark) == (case.end, case.end)
    assert contents(log) == case.records
    assert log.last_stable_offset == case.end - 1, "the transaction of producer 8 is still open"
    assert all(log.append_batches(idempotent(sequence)).duplicate for sequence in range(4))
    assert log.append_batches(transactional(0, pid=8)).duplicate
    on_disk = {int(name[:20]) for name in os.listdir(case.directory) if name.endswith(".log")}
    assert on_disk == set(bases(log)), "no file of a segment that is not in the list"
    # what was to be appended can be appended now, and both kinds of stop keep all of it
    case.append_transaction()
    case.append()
    rows = contents(log)
    assert rows[: len(case.records)] == case.records
    assert len(rows) == len(case.records) + 18 + 40
    again = open_log(TracingFileSystem(), case.directory, case.config, clean=False)
    assert contents(again) == rows
    assert not again.recovery.found_damage
    again.close(clean=False)
    log.close()
    again = open_log(TracingFileSystem(), case.directory, case.config)
    assert contents(again) == rows


def test_a_second_failure_while_taking_back_breaks_the_log_until_it_is_opened_again(tmp_path: Path) -> None:
    case = FaultCase(tmp_path)
    writes = itertools.count()

    def fail(call: Call) -> None:
        if (
            call.kind == "truncate"
            if failing
            else str(call).startswith("pwrite") and call.name.endswith(".log") and next(writes) == 1
        ):
            failing.append(call)
            raise OSError(errno.EIO, "worn out", call.path)

    failing: list[Call] = []

    case.fs.before = fail
    with pytest.raises(OSError, match="worn out"):
        case.append()
    case.fs.before = None
    assert [call.kind for call in failing] == ["pwrite", "truncate"]
    for attempt in (
        lambda: case.log.append([rec()]),
        lambda: case.log.append_batches(batch([rec()])),
        case.log.roll,
        lambda: case.log.truncate_to(0),
        lambda: case.log.advance_log_start(1),
        case.log.apply_retention,
        case.log.flush,
    ):
        with pytest.raises(DamagedLog, match="worn out"):
            attempt()
    case.log.close()
    again = open_log(TracingFileSystem(), case.directory, case.config, clean=False)
    assert contents(again)[: len(case.records)] == case.records
    again.append([rec("goes on")])


def test_a_roll_that_fails_half_way_leaves_no_file_behind(tmp_path: Path) -> None:
    for point in range(60):
        fs = TracingFileSystem()
        directory = str(tmp_path / str(point) / "orders-0")
        log = open_log(fs, directory)
        log.append(recs(5))
        fs.before = fault(errno.ENOSPC, point)
        try:
            log.roll()
        except OSError:
            failed = True
        else:
            failed = False
        fs.before = None
        log.append(recs(5, first=5))
        rows = contents(log)
        assert rows == expected(recs(5)) + expected(recs(5, first=5), 5)
        on_disk = {int(name[:20]) for name in os.listdir(directory) if name.endswith(".log")}
        assert on_disk == set(bases(log))
        state = json.loads(Path(state_path(directory)).read_text().splitlines()[1])
        assert [entry[0] for entry in state["segments"]] == bases(log), "readers see the segment that is written to"
        log.close()
        assert contents(open_log(TracingFileSystem(), directory)) == rows
        if not failed:
            assert point > 5
            return
    raise AssertionError("the roll never succeeded")


def test_an_epoch_that_could_not_be_written_is_written_by_the_next_append(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory)
    log.append(recs(2), leader_epoch=1)

    def fail(call: Call) -> None:
        if "leader-epoch" in call.path:
            raise OSError(errno.ENOSPC, "full", call.path)

    fs.before = fail
    with pytest.raises(OSError, match="full"):
        log.append(recs(1), leader_epoch=2)
    fs.before = None
    log.append(recs(1), leader_epoch=2)
    assert Path(directory, "leader-epoch-checkpoint").read_text() == "0\n2\n1 0\n2 2\n"


def test_a_closed_log_takes_nothing() -> None:
    log = log_with()
    log.append(recs(1))
    log.close()
    log.close()
    for attempt in (lambda: log.append([rec()]), log.roll, lambda: log.truncate_to(0), log.apply_retention):
        with pytest.raises(InvalidRecord, match="closed"):
            attempt()


# --- property ---------------------------------------------------------------------------------------------------------


ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.binary(max_size=6)),
        st.one_of(st.none(), st.binary(max_size=40)),
        st.one_of(st.just(-1), st.integers(0, INT64_MAX >> 20)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200)
@given(
    appends=st.lists(st.tuples(ROWS, st.sampled_from(sorted(WAYS)), st.integers(0, 4)), max_size=6),
    compression=st.sampled_from(("producer", "lz4", "uncompressed")),
    segment_bytes=st.sampled_from((1000, 1 << 20)),
)
def test_what_was_appended_is_read_back_in_order(
    appends: list[tuple[list[tuple[bytes | None, bytes | None, int]], str, int]], compression: str, segment_bytes: int
) -> None:
    fs = SimulatedFileSystem()
    config = LogConfig(
        compression_type=compression, segment_bytes=segment_bytes, message_timestamp_after_max_ms=INT64_MAX
    )
    log = open_log(fs, config=config)
    oracle: list[Record] = []
    for rows, way, codec_id in appends:
        records = [Record(*row) for row in rows]
        if way == "records":
            log.append(records, codec_id=codec_id, batch_bytes=100)
        elif way == "columns":
            log.append_columns(arrow(records), codec_id=codec_id)
        else:
            log.append_batches(batch(records, codec_id=codec_id))
        oracle += records
    rows_expected = [as_tuple(record, n) for n, record in enumerate(oracle)]
    assert contents(log) == rows_expected
    log.close()
    assert contents(open_log(fs, config=config)) == rows_expected
