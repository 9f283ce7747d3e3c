"""How rows get into Python: Spark does not add up bytes for rows that are narrow, wide ones arrive whole all the same,
and the session has its own limits back afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import streaming.sink as sink_module
from logstore.errors import NullKey
from logstore.records.record import Record
from logstore.store import LogStore
from streaming.flusher import flush_now
from streaming.sink import LogSink
from streaming.transfer import WideRows, Width, bounded_by_rows, width_of

Spark = Any
ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
BYTES, RECORDS = "spark.sql.execution.arrow.maxBytesPerBatch", "spark.sql.execution.arrow.maxRecordsPerBatch"
NO_LIMIT = str(2**31 - 1)


def limits(session: Spark) -> tuple[str, str]:
    return session.conf.get(BYTES), session.conf.get(RECORDS)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The limits that each job of the sink ran with."""
    found = []
    run = sink_module._run

    def noting(rows: Any, job: Any) -> Any:
        found.append(limits(rows.sparkSession))
        return run(rows, job)

    monkeypatch.setattr(sink_module, "_run", noting)
    return found


def by_key(read_all: ReadAll, store: LogStore) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for records in read_all(store, "orders").values() for record in records}


def test_narrow_rows_travel_without_adding_up(
    spark: Spark, store: LogStore, read_all: ReadAll, runs: list[tuple[str, str]]
) -> None:
    before = limits(spark)
    rows = {f"k{n}".encode(): f"v{n}".encode() for n in range(100)} | {b"none": None, b"empty": b""}
    sink = LogSink(store.path, "orders", app_id="app")
    sink(spark.createDataFrame(list(rows.items()), "key binary, value binary"), 0)
    assert by_key(read_all, store) == rows
    assert runs == [(NO_LIMIT, "8192")]
    assert limits(spark) == before
    sink(spark.createDataFrame([("later", "v")], "key string, value string"), 1)
    assert runs[1:] == [before]  # so few rows are not worth it
    sink._rows = 1_000_000
    sink(spark.createDataFrame([("last", "v")], "key string, value string"), 2)
    assert runs[2:] == [(NO_LIMIT, "8192")]


@pytest.mark.parametrize("kind", ["binary", "string"])
def test_wide_rows_arrive_whole(
    spark: Spark, store: LogStore, read_all: ReadAll, runs: list[tuple[str, str]], kind: str
) -> None:
    before = limits(spark)
    width = 64 << 20 >> 13 >> 1  # of Spark's 64 MiB, for one of two columns of one of 8192 rows
    text = {f"k{n}": "ä" * (width // 2 + n - 5) for n in range(10)} | {"k" * (width + 1): "v", "small": "v"}
    rows = {key.encode(): value.encode() for key, value in text.items()}
    sink = LogSink(store.path, "orders", app_id="app")
    given = rows if kind == "binary" else text
    sink(spark.createDataFrame(list(given.items()), f"key {kind}, value {kind}"), 0)
    assert by_key(read_all, store) == rows
    assert runs == [(NO_LIMIT, "8192"), before]
    flush_now()
    assert os.listdir(store.layout.staging) == []  # nothing is left of the first try
    sink._rows = 1_000_000
    sink(spark.createDataFrame([("later", "v")], "key string, value string"), 1)
    assert runs[2:] == [before]  # once is enough to know
    assert limits(spark) == before


def test_limits_are_back_after_an_error(spark: Spark, store: LogStore, runs: list[tuple[str, str]]) -> None:
    before = limits(spark)
    store.create_topic("state", configs={"cleanup.policy": "compact"})
    with pytest.raises(NullKey):
        LogSink(store.path, "state", app_id="app")(spark.createDataFrame([(None, "v")], "key string, value string"), 0)
    assert runs == [(NO_LIMIT, "8192")]
    assert limits(spark) == before


def test_limits_are_back_when_the_last_of_several_is_done(spark: Spark) -> None:
    before = limits(spark)
    width = Width(100, 1000, ("value",))
    inside, leave = threading.Barrier(2), threading.Event()

    def stay() -> None:
        with bounded_by_rows(spark, width):
            inside.wait()
            leave.wait()

    other = threading.Thread(target=stay)
    other.start()
    inside.wait()
    with bounded_by_rows(spark, width):
        assert limits(spark) == (NO_LIMIT, "100")
    assert limits(spark) == (NO_LIMIT, "100")
    leave.set()
    other.join()
    assert limits(spark) == before


@pytest.mark.parametrize(
    ("schema", "settings", "expected"),
    [
        ("key string, value string", {}, Width(8192, 4096, ("key", "value"))),
        ("value binary, timestamp timestamp", {}, Width(8192, 8192, ("value",))),
        ("key string, value string, topic string", {BYTES: "96m"}, Width(8192, 4096, ("key", "value", "topic"))),
        ("value binary", {RECORDS: "1000", BYTES: "1000000"}, Width(1000, 1000, ("value",))),
        ("value binary", {RECORDS: "-1"}, Width(8192, 8192, ("value",))),
        ("value binary", {BYTES: "1m"}, None),
        ("value binary", {BYTES: NO_LIMIT}, None),
        ("value binary, headers array<struct<key:string,value:binary>>", {}, None),
    ],
)
def test_a_value_may_have_its_share_of_a_batch(
    spark: Spark, schema: str, settings: dict[str, str], expected: Width | None
) -> None:
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        assert width_of(spark.createDataFrame([], schema)) == expected
    finally:
        for name in settings:
            spark.conf.unset(name)


def test_only_a_clipped_value_is_wide() -> None:
    width = Width(10, 3, ("key", "value"))
    width.check(pa.record_batch({"key": pa.array([None, b"abc"]), "value": pa.array(["", "xyz"])}))
    width.check(pa.record_batch({"key": pa.nulls(2), "value": pa.array([None, None], pa.binary())}))
    with pytest.raises(WideRows):
        width.check(pa.record_batch({"key": pa.array([b"a", b"abcd"]), "value": pa.array(["", ""])}))
