"""A damaged time index: nothing fresh is deleted for it, and lookups by time answer as if it were whole."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from logstore.errors import CorruptBatch
from logstore.records.record import Record
from logstore.segment.time_index import TimestampOffset
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.retention import retain
from reference.partition_writer import writing

BASE_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def filled(store: LogStore, seed: int, **configs: object) -> tuple[Topic, list[Record]]:
    """Several segments of records whose times go up and down."""
    topic = store.create_topic("t", configs={"segment.bytes": 1500, "index.interval.bytes": 200, **configs})
    chance = random.Random(seed)
    records = [Record(b"k%d" % n, b"v" * 20, BASE_MS + 10 * n + chance.randrange(60)) for n in range(200)]
    with writing(store, topic, 0, what="test") as log:
        log.append(records, batch_bytes=300)
        assert len(log.segments) > 4
    return topic, records


def time_indexes(store: LogStore, topic: Topic) -> list[Path]:
    return sorted(Path(store.layout.partition(topic.partition(0))).glob("*.timeindex"))


def damage(path: Path, how: str, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    entries = len(data) // 12
    if how == "last too old":
        data[-12:-4] = struct.pack(">q", 1)
    elif how == "last too new":
        data[-12:-4] = struct.pack(">q", BASE_MS + 999 * DAY_MS)
    elif how == "emptied":
        data.clear()
    elif how == "cut":
        del data[12 * max(entries // 2, 1) :]
    elif how == "zeros":
        data[:] = bytes(len(data))
    elif how == "offset":
        data[-4:] = struct.pack(">i", 2)
    elif how == "nonsense":
        data[:] = chance.randbytes(len(data))
    elif how == "bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


HOW = ["last too old", "last too new", "emptied", "cut", "zeros", "offset", "nonsense", "bit", "gone"]


def expected(records: list[Record], timestamp_ms: int) -> TimestampOffset | None:
    for offset, record in enumerate(records):
        if record.timestamp_ms >= timestamp_ms:
            return TimestampOffset(record.timestamp_ms, offset)
    return None


@pytest.mark.parametrize("how", HOW)
def test_retention_deletes_by_what_the_log_says_and_says_so_before(store: LogStore, seed: int, how: str) -> None:
    topic, records = filled(store, seed, **{"retention.ms": DAY_MS})
    chance = random.Random(seed)
    for path in time_indexes(store, topic):
        damage(path, how, chance)
    now_ms = BASE_MS + 2 * DAY_MS - 1
    assert retain(store, topic, 0, now_ms=BASE_MS + DAY_MS - 1, dry_run=True).passes == ()
    assert retain(store, topic, 0, now_ms=BASE_MS + DAY_MS - 1).passes == ()
    reader = store.reader(topic, 0)
    assert len(list(reader.records(0))) == len(records)
    reader.close()
    planned = retain(store, topic, 0, now_ms=now_ms, dry_run=True)
    assert planned.passes
    assert retain(store, topic, 0, now_ms=now_ms) == planned


def test_a_segment_whose_age_cannot_be_read_is_not_deleted_by_it(store: LogStore, seed: int) -> None:
    topic, _ = filled(store, seed, **{"retention.ms": DAY_MS})
    first = sorted(Path(store.layout.partition(topic.partition(0))).glob("*.log"))[0]
    data = bytearray(first.read_bytes())
    data[8:12] = struct.pack(">i", 1)
    first.write_bytes(data)
    for dry_run in (True, False):
        with pytest.raises(CorruptBatch):
            retain(store, topic, 0, now_ms=BASE_MS + 9 * DAY_MS, dry_run=dry_run)
    assert first.exists()


@pytest.mark.parametrize("opened", ["by another process", "to write"])
@pytest.mark.parametrize("how", HOW)
def test_lookups_by_time_answer_from_the_log(store: LogStore, seed: int, how: str, opened: str) -> None:
    topic, records = filled(store, seed)
    chance = random.Random(seed)
    for path in time_indexes(store, topic):
        damage(path, how, chance)
    asked = [BASE_MS - 5, BASE_MS, *(chance.randrange(BASE_MS, BASE_MS + 2100) for _ in range(60)), BASE_MS + 5000]
    largest = max(record.timestamp_ms for record in records)
    of_largest = next(n for n, record in enumerate(records) if record.timestamp_ms == largest)
    if opened == "to write":
        with writing(store, topic, 0, what="test") as log:
            found = [log.offset_for_timestamp(at) for at in asked]
            assert log.offset_for_timestamp(-3) == TimestampOffset(largest, of_largest)
    else:
        reader = store.reader(topic, 0)
        found = [reader.offset_for_timestamp(at) for at in asked]
        assert reader.offset_for_timestamp(-3) == TimestampOffset(largest, of_largest)
        reader.close()
    assert found == [expected(records, at) for at in asked]


def test_the_segment_list_does_not_take_over_what_a_damaged_index_says(store: LogStore, seed: int) -> None:
    topic, _ = filled(store, seed)
    before = store.partition_state(topic, 0).segments
    for path in time_indexes(store, topic):
        damage(path, "last too old", random.Random(seed))
    with store.writing(topic, 0, what="test"):
        pass
    assert store.partition_state(topic, 0).segments == before
