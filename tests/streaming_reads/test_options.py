"""Options of the data source: what each becomes, and what is said about one that is wrong. No Spark runs here."""

from __future__ import annotations

import os
from typing import Any

import pytest

from logstore.commit.apps import Adopt
from logstore.errors import InvalidConfig, UnknownConfig
from streaming.options import EARLIEST, LATEST, Boundary, read_options, write_options


def options(*, streaming: bool = False, **given: str) -> Any:
    chosen = {} if given.keys() & {"subscribePattern", "assign", "subscribe"} else {"subscribe": "orders"}
    return read_options({"store": "/s", **chosen, **given}, streaming=streaming)


def refused(expected: str, *, streaming: bool = False, **given: str) -> InvalidConfig:
    with pytest.raises(InvalidConfig, match=expected) as caught:
        options(streaming=streaming, **given)
    return caught.value


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = options(), options(streaming=True)
    assert (batch.starting, batch.ending) == (Boundary(EARLIEST), Boundary(LATEST))
    assert stream.starting == Boundary(LATEST)
    assert (batch.fail_on_data_loss, batch.include_headers, batch.committed) == (True, False, False)
    assert (batch.max_offsets_per_trigger, batch.min_partitions) == (None, None)


def test_names_are_taken_in_any_case_and_the_path_is_made_absolute() -> None:
    found = read_options({"STORE": "here", "Subscribe": "a, b,,c", "FAILONDATALOSS": "False"}, streaming=False)
    assert found.store == os.path.abspath("here")
    assert found.subscribe == ("a", "b", "c")
    assert found.fail_on_data_loss is False


def test_every_other_option() -> None:
    found = options(
        minPartitions="8", maxOffsetsPerTrigger="100", includeHeaders="true", isolationLevel="read_committed"
    )
    assert (found.min_partitions, found.max_offsets_per_trigger) == (8, 100)
    assert (found.include_headers, found.committed) == (True, True)
    assert options(startingOffsetsByTimestampStrategy="latest").latest_when_no_timestamp


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("subscibe", "subscribe"), ("startingOffset", "startingOffsets"), ("maxOffsetPerTrigger", "maxOffsetsPerTrigger")],
)
def test_a_typo_is_answered_with_the_nearest_name(typo: str, meant: str) -> None:
    with pytest.raises(UnknownConfig, match=f"there is no option '{typo}'") as caught:
        read_options({"store": "/s", typo: "x"}, streaming=False)
    assert caught.value.hint == f"Did you mean {meant}?"


def test_an_option_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(UnknownConfig) as caught:
        read_options({"store": "/s", "zzz": "x"}, streaming=False)
    assert "subscribePattern" in (caught.value.hint or "")


def test_a_store_is_needed() -> None:
    with pytest.raises(InvalidConfig, match="'store' is missing"):
        read_options({"subscribe": "orders"}, streaming=False)


@pytest.mark.parametrize("given", [{}, {"subscribe": "a", "assign": '{"a":[0]}'}])
def test_exactly_one_way_to_choose_topics(given: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig, match="exactly one of subscribe, subscribePattern, assign"):
        read_options({"store": "/s", **given}, streaming=False)


def test_a_pattern_must_be_one() -> None:
    refused("not a regular expression", subscribePattern="a(")


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '{"a": 0}', '{"a": "01"}', '{"a": ["0"]}', '{"a": [1.0]}', "[" * 99999]
)
def test_assign_must_be_topics_with_lists_of_partitions(text: str) -> None:
    refused("assign is not JSON of the form", assign=text)


@pytest.mark.parametrize("text", ["{}", '{"a": []}'])
def test_assign_must_name_a_partition(text: str) -> None:
    refused("names no partition", assign=text)


def test_assign() -> None:
    assert options(assign='{"a": [1, 0], "b": [2]}').assign == {"a": (1, 0), "b": (2,)}


def test_offsets_everywhere_by_partition_and_by_time() -> None:
    assert options(startingOffsets=" Earliest ").starting == Boundary(EARLIEST)
    by_partition = options(startingOffsets='{"a": {"0": 5, "1": -2}, "@ids": {"a": "x"}}').starting
    assert by_partition == Boundary(offsets={"a": {0: 5, 1: -2}}, topic_ids={"a": "x"})
    assert options(endingOffsets='{"a": {"0": -1}}').ending == Boundary(offsets={"a": {0: LATEST}})
    assert options(startingTimestamp="17").starting == Boundary(timestamp_ms=17)
    assert options(endingOffsetsByTimestamp='{"a": {"0": 17}}').ending == Boundary(timestamps={"a": {0: 17}})
    assert options(startingOffsets="{}").starting == Boundary(offsets={})


def test_a_timestamp_wins_over_offsets_as_in_spark() -> None:
    found = options(startingTimestamp="1", startingOffsetsByTimestamp='{"a":{"0":2}}', startingOffsets="earliest")
    assert found.starting == Boundary(timestamp_ms=1)


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets", "startingOffsetsByTimestamp"])
@pytest.mark.parametrize("text", ["soon", "[1]", "5", '{"a": 5}', '{"a": {"x": 5}}', '{"a": {"0": 1, "00": 2}}'])
def test_offsets_must_be_well_formed(name: str, text: str) -> None:
    refused(f"{name} is not JSON of the form", **{name: text})


@pytest.mark.parametrize("offset", ["-3", "1.5", '"1"', "null", "true"])
def test_an_offset_is_a_number_or_one_of_the_two_signs(offset: str) -> None:
    refused("expected a number from -2 up", startingOffsets=f'{{"a": {{"0": {offset}}}}}')


def test_a_time_has_no_signs() -> None:
    refused("expected a number from 0 up", startingOffsetsByTimestamp='{"a": {"0": -1}}')
    refused("expected a number from 0 up", startingTimestamp="-1")
    refused("expected a number from 0 up", endingTimestamp="yesterday")


@pytest.mark.parametrize("offsets", ["earliest", '{"a": {"0": -2}}'])
def test_nothing_ends_at_the_beginning(offsets: str) -> None:
    refused("endingOffsets cannot be earliest", endingOffsets=offsets)


def test_a_batch_does_not_begin_at_the_end() -> None:
    refused("startingOffsets cannot be latest", startingOffsets="latest")
    assert options(streaming=True, startingOffsets="latest").starting == Boundary(LATEST)


@pytest.mark.parametrize("name", ["endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    refused(f"{name} is for batch reads", streaming=True, **{name: "1"})


@pytest.mark.parametrize("name", ["minPartitions", "maxOffsetsPerTrigger"])
@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "٣"])
def test_counts_are_numbers_above_zero(name: str, text: str) -> None:
    refused("expected a number", **{name: text})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("failOnDataLoss", "expected true or false"),
        ("includeHeaders", "expected true or false"),
        ("isolationLevel", "expected read_uncommitted or read_committed"),
        ("startingOffsetsByTimestampStrategy", "expected error or latest"),
    ],
)
def test_choices_are_named(name: str, expected: str) -> None:
    refused(expected, **{name: "perhaps"})


def test_write_options() -> None:
    found = write_options({"store": "/s", "topic": "a", "compression.type": "zstd", "batchSize": "100", "path": "/s"})
    assert (found.topic, found.compression_type, found.batch_size, found.adopt) == ("a", "zstd", 100, None)
    found = write_options({"store": "/s", "app_id": "x", "batch_id": "7", "compressionType": "lz4"})
    assert (found.app_id, found.batch_id, found.compression_type) == ("x", 7, "lz4")
    assert write_options({"store": "/s", "adopt": "0b-c:41"}).adopt == Adopt("0b-c", 41)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"batch_id": "-1", "app_id": "x"}, "expected a number from 0 up"),
        ({"batch_id": "1"}, "give both or none"),
        ({"batch.size": "0"}, "above 0"),
        ({"adopt": "maybe"}, "QUERY_ID:BATCH_ID"),
    ],
)
def test_write_options_that_are_wrong(given: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        write_options({"store": "/s", **given})


def test_every_option_has_one_name_and_may_be_spelled_as_spark_kafka_or_python_do() -> None:
    for names in (("app_id", "batch_id"), ("appId", "batchId"), ("app.id", "BATCH-ID")):
        found = write_options(dict(zip(names, ("a", "3"), strict=True)) | {"store": "/s", "compression_type": "lz4"})
        assert (found.app_id, found.batch_id, found.compression_type) == ("a", 3, "lz4")
    assert read_options({"store": "/s", "subscribe": "a", "fail_on_data_loss": "false"}, streaming=False) == (
        read_options({"store": "/s", "subscribe": "a", "failOnDataLoss": "false"}, streaming=False)
    )
    with pytest.raises(InvalidConfig, match="option app_id is given twice: 'a' and 'b'"):
        write_options({"store": "/s", "app_id": "a", "appId": "b"})


def test_a_path_names_the_store() -> None:
    assert read_options({"path": "/s", "subscribe": "a"}, streaming=True).store == "/s"
    assert write_options({"path": "/s/", "store": "/s", "topic": "a"}).store == "/s"
    with pytest.raises(InvalidConfig, match="option 'store' is '/s', but the path is '/other'"):
        write_options({"path": "/other", "store": "/s"})


def test_the_options_of_kafkas_source_that_came_later() -> None:
    given = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "2m", "maxRecordsPerPartition": "7", "groupIdPrefix": "x"}
    found = read_options({"store": "/s", "subscribe": "a"} | given, streaming=True)
    assert (found.min_offsets_per_trigger, found.max_trigger_delay_ms) == (10, 120_000)
    assert found.max_records_per_partition == 7
    for text, milliseconds in (("500", 500), ("500ms", 500), ("30s", 30_000), ("1h", 3_600_000)):
        options = {"store": "/s", "subscribe": "a", "maxTriggerDelay": text}
        assert read_options(options, streaming=True).max_trigger_delay_ms == milliseconds
    for wrong in ("", "soon", "5 parsecs", "-1s"):
        with pytest.raises(InvalidConfig, match="expected a duration such as 500ms"):
            read_options({"store": "/s", "subscribe": "a", "maxTriggerDelay": wrong}, streaming=True)
    with pytest.raises(InvalidConfig, match="minOffsetsPerTrigger is 9, above maxOffsetsPerTrigger, which is 8"):
        read_options(
            {"store": "/s", "subscribe": "a", "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, streaming=True
        )


def test_a_stream_is_written_under_an_app_id_and_spark_counts_its_batches() -> None:
    with pytest.raises(InvalidConfig, match="a stream needs the option app_id"):
        write_options({"store": "/s", "topic": "a"}, streaming=True)
    with pytest.raises(InvalidConfig, match="batch_id is for batch writes"):
        write_options({"store": "/s", "topic": "a", "app_id": "b", "batch_id": "1"}, streaming=True)
    found = write_options({"path": "/s", "app_id": "b", "checkpointLocation": "/c"}, streaming=True)
    assert (found.store, found.app_id) == ("/s", "b")
