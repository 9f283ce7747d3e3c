"""The latest record of one key: which partitions are read, and what counts as the newest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from logstore.directory.state import PartitionState, SegmentEntry, SwapNote
from logstore.records.record import Record
from logstore.restore.lookup import _lost_records, latest_of_key
from logstore.store import LogStore

Append = Callable[..., None]


def found(store: LogStore, name: str, key: bytes) -> tuple[int, int, bytes | None] | None:
    result = latest_of_key(store, store.topic(name), key)
    return None if result is None else (result.partition, result.record.offset, result.record.value)


def test_the_newest_of_many_segments(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=3, configs={"segment.bytes": 500})
    for n in range(20):
        append("t", [Record(b"k%d" % (n % 4), b"v%d" % n, n), Record(b"other-%d" % n, b"x" * 50, n)])
    for n in range(4):
        result = found(store, "t", b"k%d" % n)
        assert result is not None
        assert result[2] == b"v%d" % (16 + n)
    assert found(store, "t", b"k9") is None


def test_a_tombstone_is_found_and_is_no_value(store: LogStore, append: Append) -> None:
    store.create_topic("t")
    append("t", [Record(b"k", b"v", 1), Record(b"k", None, 2)])
    assert found(store, "t", b"k") == (0, 1, None)


def test_an_empty_key_is_a_key_and_no_key_is_none(store: LogStore, append: Append) -> None:
    store.create_topic("t")
    append("t", [Record(None, b"nobody", 1), Record(b"", b"empty", 2), Record(None, b"nobody", 3)])
    assert found(store, "t", b"") == (0, 1, b"empty")


def test_only_the_keys_own_partition_is_read_where_all_rows_were_placed_by_key(store: LogStore, append: Append) -> None:
    topic = store.create_topic("t", partitions=4)
    append("t", [Record(b"k%d" % n, b"v%d" % n, n) for n in range(40)])
    asked = []
    reader = store.reader
    store.reader = lambda topic, number, **more: asked.append(number) or reader(topic, number, **more)  # type: ignore[method-assign]
    latest_of_key(store, topic, b"k7")
    assert len(asked) == 1


def test_keys_in_several_partitions_go_by_time_and_then_by_partition(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=3)
    append("t", [Record(b"k", b"late", 9), Record(b"k", b"early", 5), Record(b"k", b"tie", 9)], [1, 0, 2])
    assert store.topic("t").keyed is False
    assert found(store, "t", b"k") == (2, 0, b"tie")


SEALED, ACTIVE = SegmentEntry(0, 100, 1), SegmentEntry(10, 50, 2)
BEFORE = PartitionState(generation=3, segments=(SEALED, ACTIVE))


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        pytest.param({"segments": (SEALED, replace(ACTIVE, size_bytes=90))}, False, id="appended"),
        pytest.param({"segments": (SEALED, ACTIVE, SegmentEntry(20, 5, 3))}, False, id="rolled"),
        pytest.param({"segments": (replace(SEALED, size_bytes=60), ACTIVE)}, True, id="rewritten"),
        pytest.param({"segments": (ACTIVE,)}, True, id="deleted or merged"),
        pytest.param({"log_start_offset": 5}, True, id="the log start moved"),
        pytest.param({"thinned_offset": 10}, True, id="a pass took records out"),
        pytest.param({"swap": SwapNote((0,), (0,))}, True, id="a replacement is under way"),
    ],
)
def test_what_may_have_removed_a_record_between_two_looks(changed: dict[str, Any], lost: bool) -> None:
    after = replace(BEFORE, generation=4, **changed)
    assert _lost_records(BEFORE, after) is lost
    assert _lost_records(replace(BEFORE, swap=SwapNote((0,), (0,))), after)
    assert not _lost_records(after, after), "the same generation is the same list"
