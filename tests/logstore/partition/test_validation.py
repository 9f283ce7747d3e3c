from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from logstore.config import LogConfig
from logstore.errors import CorruptBatch, InvalidRecord, InvalidTimestamp, NullKey, RecordTooLarge
from logstore.limits import DEFAULT_LIMITS, INT64_MAX
from logstore.partition.validation import (
    check_columns,
    check_rows,
    check_sizes,
    check_timestamps,
    codec_level,
    topic_codec_id,
)
from logstore.records.arrow import columns_of_batch
from logstore.records.columns import Columns, columns_of
from logstore.records.scan import scan_batches
from logstore.records.table import HEADER_BYTES, LAST_OFFSET, SIZE
from reference.client_batches import client_batches, whole_batches
from simulation.logs import NOW_MS, PARTITION, batch, rec, recs, sized_batch

NAMES = ("uncompressed", "gzip", "snappy", "lz4", "zstd")


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), dtype=np.uint8)


@pytest.mark.parametrize("codec_id", range(5))
def test_the_codec_is_the_producers_or_the_topics(codec_id: int) -> None:
    assert topic_codec_id(LogConfig(compression_type="producer"), codec_id) == codec_id
    for wanted, name in enumerate(NAMES):
        assert topic_codec_id(LogConfig(compression_type=name), codec_id) == wanted


def test_levels_are_the_topics_and_snappy_has_none() -> None:
    config = LogConfig(compression_gzip_level=5, compression_lz4_level=6, compression_zstd_level=7)
    assert [codec_level(config, codec_id) for codec_id in range(5)] == [None, 5, None, 6, 7]


@pytest.mark.parametrize(
    ("smallest", "largest", "refused"),
    [
        (90, 120, False),
        (89, 120, True),
        (90, 121, True),
        (-1, -1, False),
        (-1, 121, True),
        (0, 100, True),
    ],
)
def test_create_times_lie_between_the_bounds(smallest: int, largest: int, refused: bool) -> None:
    config = LogConfig(message_timestamp_before_max_ms=10, message_timestamp_after_max_ms=20)
    if refused:
        with pytest.raises(InvalidTimestamp, match=r"max\.ms"):
            check_timestamps(smallest, largest, config, 100, PARTITION)
    else:
        check_timestamps(smallest, largest, config, 100, PARTITION)


def test_the_widest_bounds_take_every_time() -> None:
    config = LogConfig(message_timestamp_before_max_ms=INT64_MAX, message_timestamp_after_max_ms=INT64_MAX)
    check_timestamps(0, INT64_MAX, config, NOW_MS, PARTITION)


def test_a_batch_may_have_exactly_max_message_bytes() -> None:
    table = scan_batches(array(sized_batch(100) + sized_batch(200))).table
    check_sizes(table, LogConfig(max_message_bytes=200), PARTITION)
    with pytest.raises(RecordTooLarge, match=r"200 bytes; max\.message\.bytes is 199"):
        check_sizes(table, LogConfig(max_message_bytes=199), PARTITION)


def test_a_record_that_no_batch_can_hold_is_found_before_anything_is_encoded() -> None:
    columns = columns_of([rec(b"x" * 10), rec(b"x" * 500), rec(b"x" * 10)])
    with pytest.raises(RecordTooLarge, match="row 1"):
        check_columns(columns, LogConfig(max_message_bytes=300), NOW_MS, 0, PARTITION)
    check_columns(columns, LogConfig(max_message_bytes=300), NOW_MS, 4, PARTITION)  # it may fit once it is compressed


def rows(first: int, *, times: list[int | None] | None = None) -> Columns:
    """Ten rows from `first` on of a larger batch, so that their bits begin anywhere in the bitmaps."""
    keys = [None if row == 12 else b"%d" % row for row in range(40)]
    columns = [pa.array(keys, pa.binary()), pa.array([b"v"] * 40)]
    if times is not None:
        columns.append(pa.array([None] * first + times + [None] * (30 - first), pa.int64()))
    return columns_of_batch(
        pa.RecordBatch.from_arrays(columns, ["key", "value", "timestamp"][: len(columns)]).slice(first, 10)
    )


@pytest.mark.parametrize(
    ("first", "row"), [(0, None), (2, None), (3, 9), (8, 4), (11, 1), (12, 0), (13, None), (29, None)]
)
def test_a_compacted_topic_needs_a_key_in_every_row(first: int, row: int | None) -> None:
    compacted = LogConfig(cleanup_policy=frozenset({"compact"}))
    check_columns(rows(first), LogConfig(), NOW_MS, 0, PARTITION)
    if row is None:
        check_columns(rows(first), compacted, NOW_MS, 0, PARTITION)
        return
    with pytest.raises(NullKey, match=f"row {row} has no key") as refused:
        check_columns(rows(first), compacted, NOW_MS, 0, PARTITION)
    assert refused.value.row == row


def test_a_row_with_a_bad_time_is_named_and_rows_without_a_time_are_not() -> None:
    config = LogConfig(message_timestamp_before_max_ms=1000, message_timestamp_after_max_ms=500)
    good = NOW_MS - 5
    check_columns(rows(3, times=[None, -1, *[good] * 8]), config, NOW_MS, 0, PARTITION)
    for bad in (NOW_MS - 1001, NOW_MS + 501):
        columns = rows(5, times=[good, None, good, bad, *[good] * 6])
        assert columns.timestamps_ms is not None
        with pytest.raises(InvalidTimestamp, match="row 3: timestamp") as refused:
            check_columns(columns, config, NOW_MS, 0, PARTITION)
        assert refused.value.row == 3
        columns.timestamps_ms[1] = bad  # what a null hides may be anything
        with pytest.raises(InvalidTimestamp, match="row 3: timestamp"):
            check_columns(columns, config, NOW_MS, 0, PARTITION)
        stamped = replace(config, message_timestamp_type="LogAppendTime")
        check_columns(columns, stamped, NOW_MS, 0, PARTITION)


def test_a_row_that_no_reader_could_hold_is_refused_whatever_the_topic_allows() -> None:
    columns = columns_of([rec(b"x" * 10), rec(b"x" * 500)])
    smallest = 500 + len(b"k") + HEADER_BYTES + 7
    key_bytes = len(rec(b"").key or b"")
    check_rows(columns, smallest - 1 + key_bytes, PARTITION)
    with pytest.raises(RecordTooLarge, match="row 1 has") as refused:
        check_rows(columns, smallest - 2 + key_bytes, PARTITION)
    assert refused.value.row == 1


def test_no_rows_are_fine() -> None:
    check_columns(columns_of([]), LogConfig(cleanup_policy=frozenset({"compact"})), NOW_MS, 0, PARTITION)


def test_whole_batches_are_taken_and_a_cut_one_is_left_out() -> None:
    config = LogConfig()
    given = whole_batches(array(batch(recs(2)) + batch(recs(3)) + batch(recs(4))[:-3]), config, PARTITION, sized=True)
    assert len(given.table) == 2
    assert len(given.data) == len(batch(recs(2)) + batch(recs(3)))
    with pytest.raises(InvalidRecord, match="no whole batch"):
        whole_batches(array(batch(recs(2))[:-1]), config, PARTITION, sized=True)


def test_the_place_of_a_bad_checksum_is_named() -> None:
    data = bytearray(batch(recs(2)) + batch(recs(3)))
    data[-1] ^= 1
    with pytest.raises(CorruptBatch) as refused:
        whole_batches(array(bytes(data)), LogConfig(), PARTITION, sized=True)
    assert refused.value.position == len(batch(recs(2)))


def test_sizes_of_replicated_batches_are_not_looked_at() -> None:
    given = whole_batches(array(sized_batch(500)), LogConfig(max_message_bytes=100), PARTITION, sized=False)
    assert int(given.table[0, SIZE]) == 500
    with pytest.raises(RecordTooLarge):
        whole_batches(array(sized_batch(500)), LogConfig(max_message_bytes=100), PARTITION, sized=True)


def test_a_client_batch_that_needs_no_change_is_stored_as_sent() -> None:
    sent = batch(recs(3), codec_id=3)
    given = whole_batches(array(sent), LogConfig(), PARTITION, sized=True)
    (ready,) = client_batches(given, LogConfig(), NOW_MS, DEFAULT_LIMITS, PARTITION)
    assert ready.data.tobytes() == sent
    assert int(ready.table[0, LAST_OFFSET]) == 2


def test_every_client_batch_of_an_append_becomes_one_of_its_own() -> None:
    data = batch(recs(3)) + batch(recs(2), codec_id=4) + batch(recs(1), codec_id=1)
    config = LogConfig(compression_type="uncompressed")
    given = whole_batches(array(data), config, PARTITION, sized=True)
    ready = [
        (len(part.table), part.data.tobytes())
        for part in client_batches(given, config, NOW_MS, DEFAULT_LIMITS, PARTITION)
    ]
    assert ready == [(1, batch(recs(count))) for count in (3, 2, 1)]
