"""Rows that no topic takes: an error before anything is committed, or dead letters in the same commit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from logstore.commit.committer import Committer
from logstore.commit.staging import EncodeOptions, TopicTarget
from logstore.errors import DuramenError, InvalidConfig, UnknownTopic
from logstore.records.record import Record
from logstore.store import LogStore
from streaming.dead_letters import PREFIX, faults
from streaming.sink import LogSink

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
Spark = Any
LIMIT = 4096
DAY_MS = 86_400_000


@pytest.fixture
def strict(store: LogStore) -> LogStore:
    """A topic that refuses much, and one for what it refuses."""
    store.create_topic(
        "strict",
        partitions=3,
        configs={
            "cleanup.policy": "compact",
            "max.message.bytes": str(LIMIT),
            "message.timestamp.before.max.ms": str(DAY_MS),
            "message.timestamp.after.max.ms": str(DAY_MS),
        },
    )
    store.create_topic("dead", partitions=2, configs={"retention.ms": "-1"})
    return store


def bad_rows(spark: Spark, now_ms: int) -> Any:
    """Eight good rows, and one of each sort that is not."""
    good = spark.range(8).selectExpr(
        "concat('k', id) as key",
        "'v' as value",
        f"case when id % 2 = 0 then cast(null as bigint) else {now_ms} end as timestamp",
        "cast(null as string) as topic",
        "cast(null as int) as partition",
    )
    bad = spark.sql(
        f"""select * from values
        (cast(null as string), 'no key', {now_ms}, cast(null as string), cast(null as int)),
        ('large', repeat('x', {LIMIT}), cast(null as bigint), null, null),
        ('old', 'v', {now_ms - 3 * DAY_MS}, null, null),
        ('early', 'v', {now_ms + 3 * DAY_MS}, null, null),
        ('negative', 'v', -5, null, null),
        ('elsewhere', 'v', null, null, 3),
        ('nowhere', 'v', null, 'nothing', null) as t(key, value, timestamp, topic, partition)"""
    )
    return good.unionByName(bad).coalesce(1)


def dead(read_all: ReadAll, store: LogStore) -> dict[str, tuple[Record, dict[str, str]]]:
    """Dead letters by key, with what their headers say."""
    return {
        (record.key or b"").decode(): (
            record,
            {name.removeprefix(PREFIX): (value or b"").decode() for name, value in record.headers},
        )
        for records in read_all(store, "dead").values()
        for record in records
    }


def test_bad_rows_become_dead_letters_in_the_same_commit(spark: Spark, strict: LogStore, read_all: ReadAll) -> None:
    now_ms = strict.clock.now_ms()
    sink = LogSink(strict.path, "strict", app_id="app", dead_letter_topic="dead")
    done = sink.write(bad_rows(spark, now_ms), 7)
    assert (done.records, done.dead_letters) == (15, 7)
    written = [record for records in read_all(strict, "strict").values() for record in records]
    assert {record.key for record in written} == {b"k%d" % n for n in range(8)}
    found = dead(read_all, strict)
    assert {key: said["reason"] for key, (_, said) in found.items()} == {
        "": "null_key",
        "large": "record_too_large",
        "old": "invalid_timestamp",
        "early": "invalid_timestamp",
        "negative": "invalid_timestamp",
        "elsewhere": "invalid_partition",
        "nowhere": "unknown_topic",
    }
    for record, said in found.values():
        assert (said["app_id"], said["batch_id"]) == ("app", "7")
        assert said["topic"] == ("nothing" if record.key == b"nowhere" else "strict")
    assert found["elsewhere"][1]["partition"] == "3"
    assert found[""][0].value == b"no key"
    assert found["large"][0].value == b"x" * LIMIT  # the dead-letter topic takes more
    # A time the dead-letter topic takes stays; any other is told.
    assert found["old"][0].timestamp_ms == now_ms - 3 * DAY_MS
    assert found["negative"][0].timestamp_ms >= now_ms - 1000
    assert found["negative"][1]["timestamp"] == "-5"
    rows = Committer(strict).ledger.commits()
    assert {(row.topic, row.records, row.dead_letters) for row in rows} == {("strict", 8, 7), ("dead", 7, 7)}
    assert len({(row.plan_id, row.app_id, row.batch_id) for row in rows}) == 1
    # Spark runs the batch again: neither is doubled.
    assert sink.write(bad_rows(spark, now_ms), 7).replayed
    assert len(dead(read_all, strict)) == 7
    assert sum(map(len, read_all(strict, "dead").values())) == 7


def test_without_a_dead_letter_topic_nothing_is_committed(spark: Spark, strict: LogStore) -> None:
    now_ms = strict.clock.now_ms()
    for key in ("large", "old", "early", "negative", "elsewhere", "nowhere"):
        rows = bad_rows(spark, now_ms).where(f"key = '{key}' or key like 'k%'")
        with pytest.raises(DuramenError):
            LogSink(strict.path, "strict", app_id="app").write(rows, 0)
    assert Committer(strict).ledger.commits() == []
    assert not any(name.endswith("-plan") for name in os.listdir(strict.layout.staging))


def test_what_does_not_fit_is_left_out_and_said(spark: Spark, strict: LogStore, read_all: ReadAll) -> None:
    strict.alter_topic("dead", configs={"max.message.bytes": str(LIMIT)})
    rows = spark.sql(
        f"select * from values ('a', repeat('x', {LIMIT}), 'h'), ('b', 'v', repeat('y', {LIMIT})) as t(key, value, h)"
    ).selectExpr("key", "value", "array(named_struct('key', 'h', 'value', cast(h as binary))) as headers")
    done = LogSink(strict.path, "strict", app_id="app", dead_letter_topic="dead").write(rows, 0)
    assert (done.records, done.dead_letters) == (2, 2)
    found = dead(read_all, strict)
    assert found["a"][0].value is None
    assert (found["a"][1]["h"], found["a"][1]["left_out"]) == ("h", f"value of {LIMIT} bytes")
    assert found["b"][1]["left_out"] == "value of 1 bytes,1 headers"
    assert "h" not in found["b"][1]


def test_a_batch_of_nothing_but_dead_letters_and_a_batch_write(
    spark: Spark, strict: LogStore, read_all: ReadAll
) -> None:
    rows = spark.sql("select cast(null as string) as key, cast(id as string) as value from range(3)")
    done = LogSink(strict.path, "strict", app_id="app", dead_letter_topic="dead").write(rows, 0)
    assert (list(done.topics), done.dead_letters) == (["dead"], 3)
    writer = rows.write.format("duramen").mode("append").option("store", strict.path).option("topic", "strict")
    for _ in range(2):
        writer.option("deadLetterTopic", "dead").option("app_id", "nightly").option("batch_id", 4).save()
    said = [dict(record.headers) for records in read_all(strict, "dead").values() for record in records]
    assert len(said) == 6
    assert sum(each[f"{PREFIX}batch_id"] == b"4" and each[f"{PREFIX}app_id"] == b"nightly" for each in said) == 3


def test_a_dead_letter_topic_must_take_everything(spark: Spark, strict: LogStore) -> None:
    rows = spark.sql("select 'k' as key, 'v' as value")
    for name, expected in (("strict", "its own dead letters"), ("orders", None), ("missing", "no topic")):
        sink = LogSink(strict.path, "strict" if name == "strict" else "orders", app_id="app", dead_letter_topic=name)
        with pytest.raises((InvalidConfig, UnknownTopic), match=expected):
            sink.write(rows, 0)
    with pytest.raises(InvalidConfig, match=r"compacted.*cleanup.policy=delete"):
        LogSink(strict.path, "orders", app_id="app", dead_letter_topic="strict").write(rows, 0)
    assert Committer(strict).ledger.commits() == []


def test_topics_are_created_where_that_was_asked_for_and_their_names_can_be(
    spark: Spark, strict: LogStore, read_all: ReadAll
) -> None:
    rows = spark.sql("select * from values ('a', 'v', 'fresh'), ('b', 'v', 'not/legal') as t(key, value, topic)")
    sink = LogSink(strict.path, None, app_id="app", dead_letter_topic="dead", create_topics={"partitions": 1})
    assert sink.write(rows, 0).dead_letters == 1
    assert [record.key for record in read_all(strict, "fresh")[0]] == [b"a"]
    assert dead(read_all, strict)["b"][1]["topic"] == "not/legal"


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_is_found_is_what_the_encoder_would_refuse(strict: LogStore, codec: str) -> None:
    """Around the limit byte by byte, and far above it where compression makes it fit."""
    target: TopicTarget = Committer(strict).target("strict")
    noise = np.random.default_rng(1).integers(0, 256, LIMIT + 200, dtype=np.uint8).tobytes()
    values = [noise[:n] for n in range(LIMIT - 120, LIMIT + 20)] + [b"x" * (10 * LIMIT)]
    now_ms = strict.clock.now_ms()
    expected = []
    for value in values:
        batch = pa.record_batch({"key": pa.array([b"k"]), "value": pa.array([value])})
        expected.append(_is_refused(strict, target, batch, codec))
    rows = pa.record_batch({"key": pa.array([b"k"] * len(values)), "value": pa.array(values)})
    codes = faults(rows, None, target, EncodeOptions(codec), now_ms)
    assert codes is not None
    assert (codes != 0).tolist() == expected
    assert any(expected)
    assert not all(expected)
    assert expected[-1] == (codec == "none")


def _is_refused(store: LogStore, target: TopicTarget, batch: pa.RecordBatch, codec: str) -> bool:
    from logstore.commit.plan_folder import Staging
    from logstore.commit.staging import StagedWriter

    staging = Staging(store)
    try:
        writer = StagedWriter(staging.output(), options=EncodeOptions(codec), now_ms=store.clock.now_ms())
        try:
            writer.write(target, batch)
        except DuramenError:
            return True
        finally:
            writer.abandon()
        return False
    finally:
        staging.close()


def test_good_rows_are_not_touched(strict: LogStore) -> None:
    target = Committer(strict).target("strict")
    now_ms = strict.clock.now_ms()
    headers = pa.array([[("h", b"1")], None, []], pa.map_(pa.string(), pa.binary())).cast(
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    rows = pa.record_batch(
        {
            "key": pa.array(["a", "b", ""]),
            "value": pa.array(["v", None, ""]),
            "timestamp": pa.array([None, now_ms * 1000, None], pa.timestamp("us", "UTC")),
            "headers": headers,
        }
    )
    partitions = pa.array([0, None, 2], pa.int32())
    assert faults(rows, partitions, target, EncodeOptions(), now_ms) is None
    nameless = rows.set_column(
        3,
        "headers",
        pa.array([[{"key": None, "value": b"1"}], None, [{"key": "h", "value": None}]], headers.type),
    )
    codes = faults(nameless, partitions, target, EncodeOptions(), now_ms)
    assert codes is not None
    assert (codes != 0).tolist() == [True, False, False]
