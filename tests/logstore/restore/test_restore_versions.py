"""Topics in which the highest timestamp or version counts: a restore finds what compaction would leave, before it ran
and afterwards, and so does a lookup. The oracle looks at every record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

from compaction_job import compact
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.errors import InvalidConfig
from logstore.records.record import Record
from logstore.restore.lookup import latest_of_key
from logstore.restore.restore import plan_restore, restore
from logstore.store import LogStore

NONE = -(1 << 63)
Placed = tuple[int, Record]


def by_timestamp(record: Record) -> int:
    return record.timestamp_ms


def by_header(record: Record) -> int:
    found = [value for name, value in record.headers if name == "v" and value is not None and len(value) == 8]
    return int.from_bytes(found[-1], "big", signed=True) if found else NONE


ORDERS: list[tuple[dict[str, str], Callable[[Record], int]]] = [
    ({"duramen.compaction.order": "timestamp"}, by_timestamp),
    ({"duramen.compaction.order": "header", "duramen.compaction.version.header": "v"}, by_header),
]


def some_record(rng: random.Random) -> Record:
    headers: list[tuple[str, bytes | None]] = [("w", rng.randrange(9).to_bytes(8, "big"))]
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        size = rng.choice([8, 8, 8, 8, 4])
        headers.append(("v", rng.choice([None, rng.randrange(-9, 9).to_bytes(size, "big", signed=True)])))
    rng.shuffle(headers)
    value = None if rng.random() < 0.2 else b"%d" % rng.randrange(1 << 30)
    key = b"k%d" % rng.randrange(25) if rng.random() < 0.95 else None
    return Record(key, value, 1_600_000_000_000 + rng.randrange(40), tuple(headers))


def filled(store: LogStore, rng: random.Random, configs: dict[str, str], *, placed: bool) -> None:
    store.create_topic("t", partitions=3, configs={"segment.bytes": "600", "cleanup.policy": "delete"} | configs)
    committer = Committer(store)
    for _ in range(12):
        table = table_of([some_record(rng) for _ in range(rng.randint(1, 30))])
        if placed:
            numbers = [rng.randrange(3) for _ in range(table.num_rows)]
            table = table.append_column("partition", pa.array(numbers, pa.int32()))
        append_table(committer, "t", table)


def everything(store: LogStore) -> list[Placed]:
    topic = store.topic("t")
    return [(number, record) for number in range(3) for record in store.reader(topic, number).records(0)]


def state_by(records: Iterable[Placed], version: Callable[[Record], int], *, placed: bool) -> dict[bytes, Placed]:
    """Within a partition offsets decide between equal versions; between partitions their winners' timestamps do."""
    best: dict[tuple[bytes, int], Placed] = {}
    for number, record in records:
        if record.key is None:
            continue
        known = best.get((record.key, number))
        if known is None or (version(record), record.offset) > (version(known[1]), known[1].offset):
            best[record.key, number] = number, record
    state: dict[bytes, Placed] = {}
    for (key, number), (_, record) in best.items():
        assert placed or key not in state
        known = state.get(key)
        if known is None or (version(record), record.timestamp_ms, number) > (
            version(known[1]),
            known[1].timestamp_ms,
            known[0],
        ):
            state[key] = number, record
    return state


def values(state: dict[bytes, Placed]) -> dict[bytes, bytes]:
    return {key: record.value for key, (_, record) in state.items() if record.value is not None}


def restored(store: LogStore, **given: Any) -> dict[bytes, bytes]:
    rows = [row for batch in restore(store, plan_restore(store, "t", **given)) for row in batch.to_pylist()]
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["key"]: row["value"] for row in rows}


@pytest.mark.parametrize(("configs", "version"), ORDERS, ids=["timestamp", "header"])
@pytest.mark.parametrize("placed", [False, True], ids=["by key", "keys in several partitions"])
@pytest.mark.parametrize("number", range(5))
def test_a_restore_finds_what_compaction_leaves(
    store: LogStore,
    seed: int,
    number: int,
    configs: dict[str, str],
    version: Callable[[Record], int],
    placed: bool,
) -> None:
    rng = random.Random(f"{seed} {number}")
    filled(store, rng, configs, placed=placed)
    records = everything(store)
    expected = state_by(records, version, placed=placed)
    assert values(expected) != values(state_by(records, lambda record: record.offset, placed=placed))
    assert plan_restore(store, "t").by_partition != placed
    assert restored(store) == values(expected)

    ends = {n: rng.randint(0, max((r.offset for p, r in records if p == n), default=0)) for n in range(3)}
    before = [(n, record) for n, record in records if record.offset < ends[n]]
    assert restored(store, as_of_offsets=ends) == values(state_by(before, version, placed=placed))

    topic = store.topic("t")
    for key, (partition, record) in expected.items():
        found = latest_of_key(store, topic, key)
        assert found is not None
        assert (found.partition, found.record) == (partition, record)

    store.alter_topic("t", configs={"cleanup.policy": "compact"})
    compact(store, force=True, roll_active=True)
    assert len(everything(store)) < len(records)
    assert restored(store) == values(expected)
    assert {key: latest_of_key(store, topic, key).record.offset for key in expected} == {  # type: ignore[union-attr]
        key: record.offset for key, (_, record) in expected.items()
    }


@pytest.mark.parametrize(("configs", "_version"), ORDERS, ids=["timestamp", "header"])
def test_an_increment_is_refused_since_older_records_may_count(
    store: LogStore, configs: dict[str, str], _version: object
) -> None:
    filled(store, random.Random(1), configs, placed=False)
    assert "counts" in plan_restore(store, "t").explain()
    with pytest.raises(InvalidConfig, match="may be an older record"):
        plan_restore(store, "t", since_offsets={0: 0, 1: 0, 2: 0})
