"""Restored state: now and at a moment, alone and merged, and what compaction has made impossible."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duramen import compact
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.directory.state import write_state
from logstore.errors import HistoryCompacted, InvalidConfig, OffsetOutOfRange, UnknownTopic
from logstore.files import OS_FILES
from logstore.partition import latest
from logstore.records.record import Record
from logstore.restore.restore import RESTORED, RestorePlan, plan_restore, restore
from logstore.store import LogStore
from logstore.upkeep.retention import delete_records, retain

Append = Callable[..., None]
State = dict[bytes, bytes | None]


def state_of(store: LogStore, plan: RestorePlan, *, tombstones: bool = False, memory_bytes: int = 1 << 20) -> State:
    found: State = {}
    for batch in restore(store, plan, tombstones=tombstones, memory_bytes=memory_bytes):
        assert batch.schema == RESTORED
        for row in batch.to_pylist():
            assert row["key"] not in found, "a key came twice"
            found[row["key"]] = row["value"]
    return found


def compacted(store: LogStore, name: str, number: int, *, first_dirty: int, dropped: int = 0) -> None:
    """As compaction leaves the partition's state."""
    topic = store.topic(name)
    state = store.partition_state(topic, number)
    changed = replace(
        state, generation=state.generation + 1, first_dirty_offset=first_dirty, dropped_tombstones=dropped
    )
    write_state(OS_FILES, store.layout.partition_state(topic.id, number), changed)


def test_now_is_the_latest_value_of_every_key_without_deleted_ones(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=4, configs={"segment.bytes": 1000})
    oracle: State = {}
    chance = random.Random(1)
    for at in range(10):
        records = []
        for n in range(40):
            key, value = b"k%d" % chance.randrange(60), None if chance.random() < 0.2 else b"v%d-%d" % (at, n)
            records.append(Record(key, value, n))
            oracle[key] = value
        append("t", [*records, Record(None, b"no key", 1)])
    plan = plan_restore(store, "t")
    assert plan.by_partition
    assert "without a shuffle" in plan.explain()
    assert state_of(store, plan) == {key: value for key, value in oracle.items() if value is not None}
    assert state_of(store, plan, tombstones=True) == oracle


def test_it_says_how_far_it_is(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=2)
    append("t", [Record(b"k%d" % n, b"v", n) for n in range(20)])
    plan = plan_restore(store, "t")
    steps: list[int] = []
    list(restore(store, plan, progress=steps.append))
    assert sum(steps) == plan.offsets == 20


def test_as_of_offsets_and_as_of_a_time(store: LogStore, append: Append) -> None:
    store.create_topic("t")
    append("t", [Record(b"a", b"1", 10), Record(b"b", b"1", 20), Record(b"a", None, 30), Record(b"b", b"2", 40)])
    expected = {0: {}, 1: {b"a": b"1"}, 2: {b"a": b"1", b"b": b"1"}, 3: {b"b": b"1"}, 4: {b"b": b"2"}}
    for end, state in expected.items():
        plan = plan_restore(store, "t", as_of_offsets={0: end})
        assert plan.end_offsets == (end,)
        assert state_of(store, plan) == state
    for time_ms, end in ((0, 0), (10, 1), (29, 2), (30, 3), (999, 4)):
        assert state_of(store, plan_restore(store, "t", as_of_timestamp_ms=time_ms)) == expected[end]


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        ({"as_of_offsets": {0: 1}}, InvalidConfig, "lacks partition 1; topic t has partitions 0 to 1"),
        ({"as_of_offsets": {0: 1, 1: 0, 2: 0}}, InvalidConfig, "names partition 2"),
        ({"as_of_offsets": {0: 9, 1: 0}}, OffsetOutOfRange, "asks for 9, the log ends at 1"),
        ({"as_of_offsets": {0: -1, 1: 0}}, OffsetOutOfRange, "asks for -1"),
        ({"as_of_offsets": {0: "1", 1: 0}}, InvalidConfig, "expected a whole number"),
        ({"as_of_timestamp_ms": -1}, InvalidConfig, "from 0 up"),
        ({"as_of_offsets": {0: 0, 1: 0}, "as_of_timestamp_ms": 1}, InvalidConfig, "exclude each other"),
        ({"since_offsets": {0: 9, 1: 0}}, OffsetOutOfRange, "since_offsets asks for 9"),
    ],
)
def test_a_moment_that_makes_no_sense(
    store: LogStore, append: Append, given: dict[str, object], error: type[Exception], expected: str
) -> None:
    store.create_topic("t", partitions=2)
    append("t", [Record(b"k", b"v", 1)], [0])
    with pytest.raises(error, match=expected):
        plan_restore(store, "t", **given)  # type: ignore[arg-type]
    with pytest.raises(UnknownTopic):
        plan_restore(store, "none")


def test_a_moment_compaction_has_thinned_names_partitions_and_the_earliest_exact_offsets(
    store: LogStore, append: Append
) -> None:
    store.create_topic("t", partitions=3)
    append("t", [Record(b"k%d" % n, b"v", n) for n in range(30)], [n % 3 for n in range(30)])
    compacted(store, "t", 0, first_dirty=8)
    compacted(store, "t", 2, first_dirty=5)
    with pytest.raises(HistoryCompacted, match="t-0, t-2 can no longer be restored") as caught:
        plan_restore(store, "t", as_of_offsets={0: 7, 1: 1, 2: 4})
    assert caught.value.earliest == {"t-0": 8, "t-2": 5}
    assert "allow_thinned" in (caught.value.hint or "")
    assert plan_restore(store, "t", as_of_offsets={0: 7, 1: 1, 2: 4}, allow_thinned=True).end_offsets == (7, 1, 4)
    assert plan_restore(store, "t", as_of_offsets={0: 8, 1: 1, 2: 5}).end_offsets == (8, 1, 5)
    assert plan_restore(store, "t", as_of_offsets={0: 0, 1: 0, 2: 0}).end_offsets == (0, 0, 0)
    assert plan_restore(store, "t").end_offsets == (10, 10, 10)
    with pytest.raises(HistoryCompacted):
        plan_restore(store, "t", as_of_timestamp_ms=3)


def test_a_moment_before_the_log_start_is_gone(store: LogStore, append: Append) -> None:
    topic = store.create_topic("t")
    append("t", [Record(b"k%d" % n, b"v", n) for n in range(10)])
    delete_records(store, topic, 0, before_offset=6)
    with pytest.raises(HistoryCompacted) as caught:
        plan_restore(store, "t", as_of_offsets={0: 4})
    assert caught.value.earliest == {"t-0": 6}
    assert set(state_of(store, plan_restore(store, "t", as_of_offsets={0: 8}))) == {b"k6", b"k7"}
    with pytest.raises(OffsetOutOfRange, match="records 2 to 6 are gone"):
        plan_restore(store, "t", since_offsets={0: 2})


def test_a_moment_is_found_behind_a_log_start_that_hides_the_latest_time_of_its_segment(
    store: LogStore, append: Append
) -> None:
    topic = store.create_topic("t", configs={"segment.bytes": 200})
    append("t", [Record(b"a", b"x" * 100, 90), Record(b"b", b"1", 10)])
    append("t", [Record(b"c", b"x" * 100, 50)])
    append("t", [Record(b"d", b"x" * 100, 60)])
    delete_records(store, topic, 0, before_offset=1)
    plan = plan_restore(store, "t", as_of_timestamp_ms=50)
    assert plan.end_offsets == (3,)
    assert set(state_of(store, plan)) == {b"b", b"c"}


def test_a_moment_is_found_behind_segments_that_compaction_emptied(tmp_path: Path) -> None:
    """An empty segment has no time but its file's, which is today's."""
    configs = {"cleanup.policy": "compact", "segment.bytes": 200, "min.cleanable.dirty.ratio": 0}
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("t", configs=configs)
        for at_ms in (10, 20, 30, 40):
            store.append("t", [Record(b"a", b"x" * 100, at_ms)])
        compact(store)
        for at_ms in (50, 60):
            store.append("t", [Record(b"a", b"%d" % at_ms, at_ms)])
        empty = [path for path in (tmp_path / "store").rglob("*.log") if not path.stat().st_size]
        assert empty
        plan = plan_restore(store, "t", as_of_timestamp_ms=55)
        assert plan.end_offsets == (5,)
        assert state_of(store, plan)[b"a"] == b"50"


def test_compaction_that_overtakes_a_plan_is_noticed_when_it_is_read(store: LogStore, append: Append) -> None:
    store.create_topic("t")
    append("t", [Record(b"a", b"1", 1), Record(b"b", b"1", 2)])
    plan, thinned = plan_restore(store, "t"), plan_restore(store, "t", allow_thinned=True)
    append("t", [Record(b"a", b"2", 3), Record(b"c", b"1", 4)])
    assert state_of(store, plan) == {b"a": b"1", b"b": b"1"}
    compacted(store, "t", 0, first_dirty=3)
    with pytest.raises(HistoryCompacted):
        state_of(store, plan)
    assert b"b" in state_of(store, thinned)


def test_an_increment_is_what_is_newer_with_its_tombstones(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=2)
    append("t", [Record(b"k%d" % n, b"1", n) for n in range(10)])
    first = plan_restore(store, "t")
    table = state_of(store, first)
    append("t", [Record(b"k3", None, 20), Record(b"k4", b"2", 21), Record(b"new", b"1", 22)])
    more = plan_restore(store, "t", since_offsets=dict(enumerate(first.end_offsets)))
    increment = state_of(store, more, tombstones=True)
    assert increment == {b"k3": None, b"k4": b"2", b"new": b"1"}
    merged = {key: value for key, value in (table | increment).items() if value is not None}
    assert merged == state_of(store, plan_restore(store, "t"))


def test_an_increment_whose_tombstones_were_dropped_is_refused(store: LogStore, append: Append) -> None:
    store.create_topic("t")
    append("t", [Record(b"a", b"1", 1)])
    append("t", [Record(b"a", None, 2), Record(b"b", b"1", 3)])
    plan = plan_restore(store, "t", since_offsets={0: 1})
    compacted(store, "t", 0, first_dirty=2, dropped=1)
    with pytest.raises(HistoryCompacted, match="dropped tombstones"):
        state_of(store, plan)


def test_keys_in_several_partitions_are_merged_by_time_and_never_come_twice(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=3)
    chance = random.Random(2)
    best: dict[bytes, tuple[int, int, int]] = {}
    values: State = {}
    ends = [0, 0, 0]
    for _ in range(10):
        records, partitions = [], []
        for _ in range(30):
            key, number, time_ms = b"k%d" % chance.randrange(40), chance.randrange(3), chance.randrange(50)
            value = None if chance.random() < 0.3 else b"%d" % chance.randrange(10**6)
            records.append(Record(key, value, time_ms))
            partitions.append(number)
        append("t", records, partitions)
        for record, number in zip(records, partitions, strict=True):
            assert record.key is not None
            # Within a partition the last one counts, whatever its time says.
            values[b"%d-" % number + record.key] = record.value
            best[b"%d-" % number + record.key] = (record.timestamp_ms, number, ends[number])
            ends[number] += 1
    oracle: dict[bytes, tuple[int, int, int]] = {}
    for tagged, found in best.items():
        key = tagged.partition(b"-")[2]
        oracle[key] = max(oracle.get(key, (-1, -1, -1)), found)
    expected = {key: values[b"%d-" % number + key] for key, (_, number, _) in oracle.items()}
    plan = plan_restore(store, "t")
    assert not plan.by_partition
    assert "merged across partitions (slower)" in plan.explain()
    assert state_of(store, plan, tombstones=True) == expected
    assert state_of(store, plan) == {key: value for key, value in expected.items() if value is not None}


def test_more_partitions_mean_merging(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=1)
    append("t", [Record(b"k%d" % n, b"old", n) for n in range(20)])
    store.alter_topic("t", partitions=4)
    append("t", [Record(b"k%d" % n, b"new" if n % 2 else None, 100 + n) for n in range(10)])
    expected = {b"k%d" % n: b"new" if n < 10 else b"old" for n in range(20) if n >= 10 or n % 2}
    assert state_of(store, plan_restore(store, "t")) == expected


def test_little_memory_gives_the_same_state(store: LogStore, append: Append, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "_MEMORY_BYTES_MIN", 24 * 16)
    store.create_topic("t", partitions=2)
    append("t", [Record(b"k%d" % (n % 300), b"v%d" % n, n) for n in range(900)])
    found = state_of(store, plan_restore(store, "t"), memory_bytes=1)
    assert found == {b"k%d" % n: b"v%d" % (600 + n) for n in range(300)}


def test_a_topic_created_again_is_not_the_one_that_was_planned(store: LogStore, append: Append) -> None:
    store.create_topic("t")
    append("t", [Record(b"a", b"1", 1)])
    plan = plan_restore(store, "t")
    store.delete_topic("t")
    store.create_topic("t")
    with pytest.raises(UnknownTopic, match="created again"):
        state_of(store, plan)


def test_the_end_offsets_are_where_a_reader_goes_on(store: LogStore, append: Append) -> None:
    store.create_topic("t", partitions=2)
    append("t", [Record(b"k%d" % n, b"1", n) for n in range(10)])
    plan = plan_restore(store, "t")
    append("t", [Record(b"k%d" % n, b"2", n) for n in range(5, 15)])
    state = state_of(store, plan)
    topic = store.topic("t")
    for number, end in enumerate(plan.end_offsets):
        for record in store.reader(topic, number).records(end):
            assert record.key is not None
            state[record.key] = record.value
    assert state == state_of(store, plan_restore(store, "t"))
    assert state == {b"k%d" % n: b"1" if n < 5 else b"2" for n in range(15)}


def test_while_records_come_and_go_every_result_is_that_of_its_end_offset(store: LogStore) -> None:
    """The record at offset n has key n % 17 and value n; a thread appends, and deletes from the front."""
    seconds = 60 if os.environ.get("DURAMEN_SOAK") == "1" else 4
    store.create_topic("t", configs={"segment.bytes": 600})
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            with LogStore(store.path) as own:
                committer, at = Committer(own), 0
                while not stop.is_set():
                    records = [Record(b"%d" % (n % 17), b"%d" % n, n) for n in range(at, at + 30)]
                    append_table(committer, "t", table_of(records))
                    at += 30
                    if at % 90 == 0:
                        delete_records(own, own.topic("t"), 0, before_offset=max(at - 100, 0))
                        retain(own, own.topic("t"), 0, now_ms=at)
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    results = 0
    deadline = time.monotonic() + seconds
    try:
        while (time.monotonic() < deadline or not results) and not failed:
            topic = store.topic("t")
            began = store.partition_state(topic, 0).log_start_offset
            plan = plan_restore(store, "t")
            (end,) = plan.end_offsets
            try:
                found = {int(key): int(value or b"") for key, value in state_of(store, plan).items()}
                read = [record.offset for record in store.reader(topic, 0).records(began, end)]
            except (HistoryCompacted, OffsetOutOfRange):
                continue
            ended = store.partition_state(topic, 0).log_start_offset
            newest = {n % 17: n for n in range(max(end - 17, 0), end)}
            assert found.items() <= newest.items()
            assert {key for key, n in newest.items() if n >= ended} <= found.keys()
            assert all(n >= began for n in found.values())
            assert read == list(range(began, end))
            results += 1
    finally:
        stop.set()
        writer.join()
    assert failed == []
    assert results > 0
