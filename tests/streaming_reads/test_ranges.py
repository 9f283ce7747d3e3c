"""Which offsets a read covers, and the shares of a micro-batch. A store is read, but no Spark runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StringType, StructType

from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.errors import InvalidConfig, NotAStore, OffsetOutOfRange, StoreVersionError, UnknownTopic
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.recovery import recover
from logstore.upkeep.retention import delete_records
from streaming.admission import LimitingStreamReader
from streaming.columns import chosen_columns
from streaming.options import ReadOptions, read_options
from streaming.ranges import (
    OffsetRange,
    Positions,
    batch_ranges,
    from_stream,
    in_range,
    limited,
    resolve,
    split,
    stream_start,
    subscribed,
    to_stream,
)
from streaming.source import Bounds, LogStreamReader, read_range

BASE_MS = 1_700_000_000_000


@pytest.fixture
def orders(store: LogStore, append: Any) -> LogStore:
    """`orders`: ten records in partition 0 and five in 1, a second apart; `other`: one partition, empty."""
    store.create_topic("orders", partitions=2)
    store.create_topic("other")
    records = [Record(b"k%d" % n, b"v", BASE_MS + 1000 * n) for n in range(15)]
    append("orders", records, [0] * 10 + [1] * 5)
    return store


def options(store: LogStore, *, streaming: bool = False, **given: str) -> ReadOptions:
    chosen = {} if given.keys() & {"subscribePattern", "assign"} else {"subscribe": "orders"}
    return read_options({"store": store.path, **chosen, **given}, streaming=streaming)


def ranges(store: LogStore, **given: str) -> list[tuple[int, int, int]]:
    return [(each.partition, each.start, each.end) for each in batch_ranges(store, options(store, **given))]


def test_all_of_a_topic(orders: LogStore) -> None:
    assert ranges(orders) == [(0, 0, 10), (1, 0, 5)]


def test_by_offsets(orders: LogStore) -> None:
    starting, ending = '{"orders": {"0": 3, "1": -2}}', '{"orders": {"0": 8, "1": -1}}'
    assert ranges(orders, startingOffsets=starting, endingOffsets=ending) == [(0, 3, 8), (1, 0, 5)]


def test_by_timestamps(orders: LogStore) -> None:
    found = ranges(
        orders,
        startingOffsetsByTimestamp=f'{{"orders": {{"0": {BASE_MS + 2500}, "1": 0}}}}',
        endingTimestamp=str(BASE_MS + 12000),
    )
    assert found == [(0, 3, 10), (1, 0, 2)]


def test_a_time_nobody_has_reached(orders: LogStore) -> None:
    far = str(BASE_MS + 10**9)
    with pytest.raises(InvalidConfig, match="no record of orders-0 is at or after"):
        ranges(orders, startingTimestamp=far)
    assert ranges(orders, startingTimestamp=far, startingOffsetsByTimestampStrategy="latest") == []
    assert ranges(orders, endingTimestamp=far) == [(0, 0, 10), (1, 0, 5)]


def test_by_pattern_and_by_assignment(orders: LogStore) -> None:
    names = [(topic.name, number) for topic, number in subscribed(orders, options(orders, subscribePattern="o.*"))]
    assert names == [("orders", 0), ("orders", 1), ("other", 0)]
    assert ranges(orders, assign='{"orders": [1]}') == [(1, 0, 5)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"subscribePattern": "x.*"}, "no topic matches"),
        ({"assign": '{"orders": [2]}'}, "has partitions 0 to 1"),
        ({"assign": '{"order": [0]}'}, "no topic is called order"),
    ],
)
def test_topics_that_are_not_there(orders: LogStore, given: dict[str, str], expected: str) -> None:
    with pytest.raises(UnknownTopic, match=expected):
        ranges(orders, **given)
    with pytest.raises(UnknownTopic):
        batch_ranges(orders, read_options({"store": orders.path, "subscribe": "none"}, streaming=False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"orders": {"0": 1}}', "startingOffsets lacks orders-1"),
        ("{}", "startingOffsets lacks orders-0, orders-1"),
        ('{"orders": {"0": 1, "1": 1, "7": 1}}', "names orders-7, which is not read"),
        ('{"orders": {"0": 1, "1": 1}, "other": {"0": 1}}', "names other-0, which is not read"),
    ],
)
def test_offsets_must_name_what_is_read_and_nothing_else(orders: LogStore, text: str, expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        ranges(orders, startingOffsets=text)


def test_an_end_before_its_start(orders: LogStore) -> None:
    with pytest.raises(InvalidConfig, match="orders-0 would end at 3, before its start 5"):
        ranges(orders, startingOffsets='{"orders":{"0":5,"1":0}}', endingOffsets='{"orders":{"0":3,"1":5}}')


@pytest.mark.parametrize("side", ["startingOffsets", "endingOffsets"])
def test_an_offset_beyond_the_end(orders: LogStore, side: str) -> None:
    with pytest.raises(OffsetOutOfRange, match=f"{side} asks for 11, the log ends at 10") as caught:
        ranges(orders, **{side: '{"orders":{"0":11,"1":5}}'})
    assert caught.value.where() == {"partition": "orders-0", "offset": 11}


def test_offsets_of_a_topic_that_was_created_again(orders: LogStore) -> None:
    stale = '{"orders":{"0":0,"1":0},"@ids":{"orders":"gone"}}'
    with pytest.raises(UnknownTopic, match="deleted and created again"):
        ranges(orders, startingOffsets=stale)


def test_what_was_deleted_is_loss_and_may_be_allowed(orders: LogStore) -> None:
    delete_records(orders, orders.topic("orders"), 0, before_offset=4)
    assert ranges(orders)[0] == (0, 4, 10)
    starting = '{"orders":{"0":2,"1":0}}'
    with pytest.raises(OffsetOutOfRange, match="records 2 to 4 are gone: the log starts at 4"):
        ranges(orders, startingOffsets=starting)
    assert ranges(orders, startingOffsets=starting, failOnDataLoss="false")[0] == (0, 4, 10)


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_what_damage_took_is_loss_and_no_gap_of_compaction(store: LogStore, append: Any, policy: str) -> None:
    topic = store.create_topic("orders", configs={"cleanup.policy": policy})
    for batch in range(4):
        append("orders", [Record(b"k%d" % n, b"%d" % batch, BASE_MS) for n in range(3)])
    Committer(store).flush(topic)
    (log,) = Path(store.layout.partition(topic.partition(0))).glob("*.log")
    data = bytearray(log.read_bytes())
    data[len(data) // 4 + 70] ^= 1  # in the second of four batches of one size
    log.write_bytes(data)
    (report,) = recover(store, topic)
    assert [(loss.base_offset, loss.end_offset) for loss in report.losses] == [(3, 6)]
    for starting in (0, 3, 5):
        with pytest.raises(OffsetOutOfRange, match=f"records {max(starting, 3)} to 6 were lost to damage.*failOnData"):
            ranges(store, startingOffsets=f'{{"orders": {{"0": {starting}}}}}')
    assert ranges(store, startingOffsets='{"orders": {"0": 6}}') == [(0, 6, 12)]
    assert ranges(store, endingOffsets='{"orders": {"0": 3}}') == [(0, 0, 3)]
    allowed = options(store, failOnDataLoss="false")
    (whole,) = batch_ranges(store, allowed)
    columns = chosen_columns(StructType().add("value", StringType()))
    found = [row for batch in read_range(allowed, whole, columns, Bounds()) for row in batch.to_pylist()]
    assert [row["value"] for row in found] == ["0"] * 3 + ["2"] * 3 + ["3"] * 3
    reader = LimitingStreamReader(options(store, streaming=True, startingOffsets="earliest"))
    start = reader.initialOffset()
    with pytest.raises(OffsetOutOfRange, match="records 3 to 6 were lost"):
        reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))


def test_not_a_store_and_a_newer_one(store: LogStore, tmp_path: Any) -> None:
    reader = LimitingStreamReader(read_options({"store": str(tmp_path), "subscribe": "a"}, streaming=True))
    with pytest.raises(NotAStore, match="no store here"):
        reader.initialOffset()
    with open(f"{store.path}/version", "w") as file:
        file.write("99\n")
    reader = LimitingStreamReader(read_options({"store": store.path, "subscribe": "a"}, streaming=True))
    with pytest.raises(StoreVersionError, match="format version 99"):
        reader.initialOffset()


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_range_is_split_in_proportion_and_loses_nothing() -> None:
    wanted = [OffsetRange("t", "i", 0, 0, 90), OffsetRange("t", "i", 1, 5, 15), OffsetRange("t", "i", 2, 0, 1)]
    pieces = split(wanted, 10)
    assert len(pieces) >= 10
    assert [(p.partition, p.start) for p in pieces[:2]] == [(0, 0), (0, 10)]
    for each in wanted:
        own = [p for p in pieces if p.partition == each.partition]
        assert (own[0].start, own[-1].end) == (each.start, each.end)
        assert all(a.end == b.start for a, b in itertools.pairwise(own))
    assert split(wanted, 3) == wanted
    assert split(wanted, None) == wanted


sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


@given(sizes, st.integers(1, 500))
def test_a_micro_batch_is_exactly_as_large_as_it_may_be(sizes: list[int], rows_max: int) -> None:
    start: Positions = {("t", "i", number): 7 * number for number in range(len(sizes))}
    latest = {key: start[key] + size for key, size in zip(start, sizes, strict=True)}
    ends = limited(start, latest, rows_max)
    assert all(start[key] <= ends[key] <= latest[key] for key in latest)
    assert sum(ends[key] - start[key] for key in ends) == min(rows_max, sum(sizes))


def test_offsets_of_a_stream_are_kafkas_with_the_topics_ids() -> None:
    positions: Positions = {("a", "x", 10): 3, ("a", "x", 2): 4, ("b", "y", 0): 5}
    assert to_stream(positions) == {"a": {"2": 4, "10": 3}, "b": {"0": 5}, "@ids": {"a": "x", "b": "y"}}
    assert from_stream(to_stream(positions)) == positions
    assert list(to_stream(positions)["a"]) == ["2", "10"]  # the same text each time: Spark compares texts


def stream(store: LogStore, **given: str) -> LimitingStreamReader:
    return LimitingStreamReader(options(store, streaming=True, **given))


def test_partitions_and_topics_that_came_since_are_read_from_their_beginning(orders: LogStore) -> None:
    reader = stream(orders, subscribePattern="o.*")
    before = {"orders": {"0": 8, "1": 5}}
    latest = reader.latestOffset(before, reader.getDefaultReadLimit())
    assert latest["other"] == {"0": 0}
    found = [each.value for each in reader.partitions({"orders": {"0": 8}}, latest)]
    assert [(each.partition, each.start, each.end) for each in found] == [(0, 8, 10), (1, 0, 5)]


def test_a_stream_notices_a_topic_that_was_created_again(orders: LogStore, append: Any) -> None:
    reader = stream(orders)
    start = reader.reportLatestOffset()
    orders.delete_topic("orders")
    orders.create_topic("orders", partitions=2)
    append("orders", [Record(b"k", b"new", BASE_MS)], [1])
    with pytest.raises(UnknownTopic, match="deleted and created again"):
        reader.latestOffset(start, reader.getDefaultReadLimit())
    going_on = stream(orders, failOnDataLoss="false")
    end = going_on.latestOffset(start, going_on.getDefaultReadLimit())
    found = [each.value for each in going_on.partitions(start, end)]
    assert [(each.partition, each.start, each.end) for each in found] == [(1, 0, 1)]
    stale = OffsetRange("orders", "gone", 0, 0, 1)
    with pytest.raises(UnknownTopic):
        in_range(orders, options(orders), stale)
    assert in_range(orders, options(orders, failOnDataLoss="false"), stale).start == 1


def test_a_stream_notices_a_topic_that_is_gone_and_a_log_that_ends_too_early(orders: LogStore) -> None:
    reader = stream(orders, subscribePattern="orders|other")
    latest = reader._latest()
    start = latest | {("third", "x", 0): 4}
    with pytest.raises(UnknownTopic, match="topic third is gone"):
        stream_start(reader.options, start, latest)
    allowed = stream(orders, failOnDataLoss="false")
    assert stream_start(allowed.options, start, latest) == latest
    ahead = {key: offset + 1 for key, offset in latest.items()}
    with pytest.raises(OffsetOutOfRange, match="the stream is at 11, the log ends at 10"):
        stream_start(reader.options, ahead, latest)
    assert allowed.latestOffset(to_stream(ahead), allowed.getDefaultReadLimit())["orders"] == {"0": 11, "1": 6}


def test_available_now_ends_where_it_began_even_if_more_comes(orders: LogStore, append: Any) -> None:
    reader = stream(orders, startingOffsets="earliest", maxOffsetsPerTrigger="4")
    reader.prepareForTriggerAvailableNow()
    append("orders", [Record(b"k", b"late", BASE_MS)], [0])
    at, steps = reader.initialOffset(), []
    while True:
        end = reader.latestOffset(at, reader.getDefaultReadLimit())
        if end == at:
            break
        steps.append(sum(from_stream(end).values()) - sum(from_stream(at).values()))
        at = end
    assert at["orders"] == {"0": 10, "1": 5}
    assert steps == [4, 4, 4, 3]


def test_a_micro_batch_waits_for_enough_offsets_or_for_the_delay(orders: LogStore, append: Any) -> None:
    reader = stream(orders, startingOffsets="earliest", minOffsetsPerTrigger="20", maxTriggerDelay="1h")
    first = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert first["orders"] == {"0": 10, "1": 5}  # the first one never waits, as with Kafka's source
    append("orders", [Record(b"k", b"%d" % n, BASE_MS) for n in range(19)], [0] * 19)
    assert reader.latestOffset(first, reader.getDefaultReadLimit()) == first
    append("orders", [Record(b"k", b"enough", BASE_MS)], [1])
    second = reader.latestOffset(first, reader.getDefaultReadLimit())
    assert second["orders"] == {"0": 29, "1": 6}
    append("orders", [Record(b"k", b"late", BASE_MS)], [1])
    assert reader.latestOffset(second, reader.getDefaultReadLimit()) == second
    reader._triggered_ms -= 3_600_000  # an hour passes
    assert reader.latestOffset(second, reader.getDefaultReadLimit())["orders"] == {"0": 29, "1": 7}


def test_available_now_does_not_wait_for_more(orders: LogStore) -> None:
    reader = stream(orders, startingOffsets="earliest", minOffsetsPerTrigger="4", maxOffsetsPerTrigger="6")
    reader.prepareForTriggerAvailableNow()
    at, steps = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        steps.append(sum(from_stream(end).values()) - sum(from_stream(at).values()))
        at = end
    assert steps == [6, 6, 3]


def test_no_task_reads_more_than_its_records_and_there_are_as_many_as_asked_for(orders: LogStore) -> None:
    sizes = {}
    for name, asked in {
        "records": {"maxRecordsPerPartition": "4"},
        "both": {"maxRecordsPerPartition": "4", "minPartitions": "8"},
        "few": {"maxRecordsPerPartition": "4", "minPartitions": "2"},
    }.items():
        found = batch_ranges(orders, options(orders, **asked))
        sizes[name] = [each.end - each.start for each in found]
        assert [(each.partition, each.start) for each in found] == sorted(
            (each.partition, each.start) for each in found
        )
    assert sizes["records"] == sizes["few"] == [3, 3, 4, 2, 3]
    assert len(sizes["both"]) >= 8
    assert sum(sizes["both"]) == 15


def test_spark_before_4_2_is_told_that_it_cannot_limit(orders: LogStore) -> None:
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"):
        with pytest.raises(InvalidConfig, match=f"{name} needs Spark 4.2 or newer"):
            LogStreamReader(options(orders, streaming=True, **{name: "5"}))
    reader = LogStreamReader(options(orders, streaming=True))
    assert reader.latestOffset()["orders"] == {"0": 10, "1": 5}


def test_resolve_begins_a_stream_at_the_end_by_default(orders: LogStore) -> None:
    found = resolve(orders, stream(orders).options, stream(orders).options.starting, "starting")
    assert [offset for _, _, offset in found] == [10, 5]


def test_a_batch_whose_writer_died_between_two_topics_is_read_in_both(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    for name in ("orders", "payments"):
        store.create_topic(name)
    publish, left = Committer.publish, [1]

    def dying(self: Committer, *given: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return publish(self, *given)

    committer = Committer(store)
    targets = {name: committer.target(name) for name in ("orders", "payments")}
    staging = Staging(store)
    writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=BASE_MS)
    for target in targets.values():
        writer.write(target, pa.record_batch({"key": pa.array([b"k"]), "value": pa.array([b"v"])}))
    with monkeypatch.context() as patched:
        patched.setattr(Committer, "publish", dying)
        with pytest.raises(Killed):
            committer.commit(staging, [writer.finish()], {target.id: target for target in targets.values()})
    assert sorted(store.ends(store.topic(name)).high_watermarks[0] for name in targets) == [0, 1]
    both = options(store, subscribe="orders,payments")
    assert [(each.topic, each.end) for each in batch_ranges(store, both)] == [("orders", 1), ("payments", 1)]
    reader = LimitingStreamReader(
        options(store, streaming=True, subscribe="orders,payments", startingOffsets="earliest")
    )
    start = reader.initialOffset()
    latest = reader.latestOffset(start, ReadAllAvailable())
    assert [latest[name] for name in targets] == [{"0": 1}, {"0": 1}]
    columns = chosen_columns(StructType().add("key", BinaryType()).add("topic", StringType()))
    rows = [
        row
        for each in reader.partitions(start, latest)
        for batch in read_range(both, each.value, columns, Bounds())
        for row in batch.to_pylist()
    ]
    assert [row["topic"] for row in rows] == ["orders", "payments"]
