"""Exactly-once by app_id: empty batches count, gaps are refused, and `adopt` works once, for what it names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.commit.apps import Adopt, AppBatch, is_replay
from logstore.commit.committer import Committer
from logstore.directory.origin import read_origin
from logstore.errors import CommitConflict, InvalidConfig, MissingBatches, NotAStore, ReplayMismatch
from logstore.ledger import AppProgress, CommitRequest, Ledger
from logstore.ledger.ledger import COUNTED
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep import repair
from logstore.upkeep.backup import backup

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]


def append(store: LogStore, batch: int, *, query: str | None = "query-1", rows: int = 1, **more: object) -> bool:
    records = [Record(b"k", b"%s-%d-%d" % (str(query).encode(), batch, at)) for at in range(rows)]
    app = AppBatch("app", batch, query, **more)  # type: ignore[arg-type]
    return store.append("orders", records, app=app).replayed


@pytest.fixture
def topic(store: LogStore) -> LogStore:
    store.create_topic("orders")
    return store


def count(store: LogStore, read_all: ReadAll) -> int:
    return sum(map(len, read_all(store, "orders").values()))


# --- the rule ---------------------------------------------------------------------------------------------------------


def shown(query: str | None, batch: int, *, is_unsure: bool = False) -> AppProgress:
    return AppProgress("app", batch, query, "plan", 0, as_of=1, is_unsure=is_unsure)


@pytest.mark.parametrize(
    ("last", "app", "expected"),
    [
        (None, AppBatch("app", 7, "q"), False),
        (shown("q", 7), AppBatch("app", 7, "q"), True),
        (shown(None, 7), AppBatch("app", 7, "q"), True),
        (shown("q", 7), AppBatch("app", 8, "q"), False),
        (shown("q", 7), AppBatch("app", 9, "q"), MissingBatches),
        (shown("q", 7), AppBatch("app", 9, None), MissingBatches),
        (shown("q", 7), AppBatch("app", 6, "q"), ReplayMismatch),
        (shown("q", 7), AppBatch("app", 8, "r"), ReplayMismatch),
        (shown("q", 7), AppBatch("app", 7, "r"), ReplayMismatch),
        (shown("q", 7), AppBatch("app", 8, "q", adopt=False), False),
        # what adopt names is what the ledger shows
        (shown("q", 7), AppBatch("app", 8, "r", adopt="q:7"), False),
        (shown("q", 7), AppBatch("app", 7, "r", adopt="q:7"), False),
        (shown("q", 7), AppBatch("app", 0, "r", adopt=Adopt("q", 7)), False),
        (shown("q", 7), AppBatch("app", 30, "q", adopt="q:7"), False),
        (shown("q", 7), AppBatch("app", 3, "q", adopt="q:7"), False),
        (shown(None, 7), AppBatch("app", 7, "r", adopt=":7"), False),
        # its own batch again is a replay, whatever adopt says
        (shown("q", 7), AppBatch("app", 7, "q", adopt="q:7"), True),
        (shown("r", 0), AppBatch("app", 0, "r", adopt="q:7"), True),
        # a driver that goes on keeps its adopt, which no longer matters
        (shown("r", 0), AppBatch("app", 1, "r", adopt="q:7"), False),
        # it names what is no more
        (shown("r", 3), AppBatch("app", 0, "r", adopt="q:7"), ReplayMismatch),
        (shown("r", 3), AppBatch("app", 1, "s", adopt="q:7"), ReplayMismatch),
        (shown("r", 7), AppBatch("app", 1, "s", adopt="q:7"), ReplayMismatch),
        (shown("q", 7), AppBatch("app", 1, "s", adopt="nothing"), ReplayMismatch),
        (None, AppBatch("app", 7, "q", adopt="q:6"), ReplayMismatch),
        (None, AppBatch("app", 7, "q", adopt="nothing"), False),
        # commits were lost
        (shown("q", 7, is_unsure=True), AppBatch("app", 7, "q"), True),
        (shown("q", 7, is_unsure=True), AppBatch("app", 8, "q"), ReplayMismatch),
        (shown("q", 7, is_unsure=True), AppBatch("app", 8, "q", adopt="q:7"), False),
        # no names at all
        (shown("q", 7), AppBatch("app", 8, "r", adopt=True), InvalidConfig),
        (None, AppBatch("app", 8, "r", adopt=True), InvalidConfig),
        (shown("q", 7), AppBatch("app", 8, "q", adopt="whatever"), InvalidConfig),
    ],
)
def test_what_may_follow(last: AppProgress | None, app: AppBatch, expected: bool | type[Exception]) -> None:
    if isinstance(expected, bool):
        assert is_replay(last, app, is_counted=lambda: True) is expected
    else:
        with pytest.raises(expected):
            is_replay(last, app, is_counted=lambda: True)


def test_an_app_that_is_not_known_may_not_be_new_after_a_loss() -> None:
    assert not is_replay(None, AppBatch("app", 0, "q"), are_apps_lost=lambda: True)
    with pytest.raises(ReplayMismatch, match=r"batch 3 may be in the log.*adopt='nothing'"):
        is_replay(None, AppBatch("app", 3, "q"), are_apps_lost=lambda: True)
    assert not is_replay(None, AppBatch("app", 3, "q", adopt="nothing"), are_apps_lost=lambda: True)


def test_adopt_as_text_and_back() -> None:
    for adopt in (Adopt("a:b", 7), Adopt(None, 0), Adopt(None, None)):
        assert Adopt.parse(str(adopt)) == adopt
    for text in ("", "7", "q:", "q:-1", "q:x", "True"):
        with pytest.raises(InvalidConfig, match="QUERY_ID:BATCH_ID"):
            Adopt.parse(text)


def test_errors_say_what_to_pass() -> None:
    with pytest.raises(InvalidConfig, match=r"True names none.*pass adopt='q:7'"):
        is_replay(shown("q", 7), AppBatch("app", 8, "r", adopt=True))
    with pytest.raises(ReplayMismatch, match=r"adopt names q:7, but the ledger shows r:3.*adopt='r:3'"):
        is_replay(shown("r", 3), AppBatch("app", 0, "s", adopt="q:7"))
    with pytest.raises(MissingBatches, match=r"at batch 7; batch 10 leaves out 8 to 9\. .*adopt='q:7'"):
        is_replay(shown("q", 7), AppBatch("app", 10, "q"), is_counted=lambda: True)


# --- with a ledger ----------------------------------------------------------------------------------------------------


def test_empty_batches_count(topic: LogStore, read_all: ReadAll) -> None:
    assert not append(topic, 0, rows=0)
    assert append(topic, 0, rows=0)
    assert not append(topic, 1)
    assert not append(topic, 2, rows=0)
    assert not append(topic, 3)
    assert append(topic, 3)
    assert count(topic, read_all) == 2
    last = Committer(topic).ledger.last_batch("app")
    assert last is not None
    assert (last.batch_id, last.query_id) == (3, "query-1")
    assert Committer(topic).ledger.sequence(topic.topic("orders").id) == 2  # no topic counts an empty batch
    Committer(topic).flush(topic.topic("orders"))
    assert os.listdir(topic.layout.staging) == []


def test_a_gap_is_refused_and_adopt_is_the_way_out(topic: LogStore, read_all: ReadAll) -> None:
    append(topic, 0)
    with pytest.raises(MissingBatches, match=r"leaves out 1 to 4") as error:
        append(topic, 5)
    assert "adopt='query-1:0'" in str(error.value)
    with pytest.raises(MissingBatches, match=r"leaves out 1\."):
        append(topic, 2, rows=0)
    assert count(topic, read_all) == 1
    assert not append(topic, 5, adopt="query-1:0")
    assert not append(topic, 6, adopt="query-1:0")  # it may stay in the code
    assert count(topic, read_all) == 3


def test_an_app_of_an_older_release_may_have_left_empty_batches_out(topic: LogStore) -> None:
    append(topic, 0)
    ledger = Committer(topic).ledger
    plain = ledger.commits_table.write

    def without_mark(prepare: Callable[[], object]) -> int:
        def prepared() -> object:
            change = prepare()
            for name in [name for name in change.transactions if name.startswith(COUNTED)]:  # type: ignore[attr-defined]
                del change.transactions[name]  # type: ignore[attr-defined]
            return change

        return plain(prepared)  # type: ignore[arg-type]

    ledger.commits_table.write = without_mark  # type: ignore[method-assign, assignment]
    ledger.commit(CommitRequest("older", (), "app", 1, "query-1", 0))
    assert not ledger.is_counted("app")
    assert not append(topic, 4)  # 2 and 3 were empty, for all we know
    with pytest.raises(MissingBatches):
        append(topic, 6)


def test_a_driver_that_wakes_late_cannot_commit_again(topic: LogStore, read_all: ReadAll) -> None:
    """It adopted, committed, and stalled; meanwhile its query went on elsewhere."""
    append(topic, 5, query="old")
    late = {"query": "new", "adopt": "old:5"}
    assert not append(topic, 0, **late)  # type: ignore[arg-type]
    assert append(topic, 0, **late)  # type: ignore[arg-type]
    for batch in (1, 2):
        append(topic, batch, query="new")
    before = count(topic, read_all)
    for batch in (0, 1):
        with pytest.raises(ReplayMismatch, match="adopt names old:5, but the ledger shows new:2"):
            append(topic, batch, **late)  # type: ignore[arg-type]
    assert count(topic, read_all) == before


def test_the_same_batch_id_again_is_not_the_same_commit(tmp_path: Path) -> None:
    """Somebody adopts and comes to the batch id that we saw: what we saw is gone all the same."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.commit(CommitRequest("a", (), "app", 0, "first"))
    ledger.commit(CommitRequest("b", (), "other", 0, "other"))
    seen = ledger.last_batch("app")
    assert seen is not None
    ledger.commit(CommitRequest("c", (), "app", 1, "second", seen.batch_id, seen.as_of))
    ledger.commit(CommitRequest("d", (), "app", 0, "second", 1))
    with pytest.raises(CommitConflict):
        ledger.commit(CommitRequest("e", (), "app", 1, "first", seen.batch_id, seen.as_of))
    fresh = ledger.last_batch("app")
    assert fresh is not None
    ledger.commit(CommitRequest("f", (), "other", 1, "other", 0))
    ledger.commit(CommitRequest("g", (), "app", 1, "second", fresh.batch_id, fresh.as_of))  # others may commit between


def test_after_lost_bookkeeping_the_next_batch_needs_adopt(topic: LogStore, read_all: ReadAll) -> None:
    for batch in range(3):
        append(topic, batch)
    Committer(topic).flush(topic.topic("orders"))
    log = Path(topic.layout.ledger) / "commits"
    max((log / "_delta_log").glob("*.json")).unlink()
    max(log.glob("*.parquet")).unlink()
    assert any("last known batch 1" in each for each in repair.repair(topic).lost)
    for batch in (2, 3):
        with pytest.raises(ReplayMismatch, match=r"may be in the log already.*adopt='query-1:1'"):
            append(topic, batch)
    assert append(topic, 1)
    assert not append(topic, 3, adopt="query-1:1")
    assert not append(topic, 4)
    assert count(topic, read_all) == 5


def test_an_app_that_was_lost_with_the_ledger_is_not_taken_for_a_new_one(topic: LogStore) -> None:
    for batch in range(3):
        append(topic, batch)
    Committer(topic).flush(topic.topic("orders"))
    shutil.rmtree(topic.layout.ledger)
    topic._committer = None
    repair.repair(topic)
    with pytest.raises(ReplayMismatch, match="adopt='nothing'"):
        append(topic, 2)
    assert not append(topic, 3, adopt="nothing")
    assert not append(topic, 4)


# --- backups ----------------------------------------------------------------------------------------------------------


def test_a_restored_backup_says_so_and_misses_what_came_after(topic: LogStore, tmp_path: Path) -> None:
    for batch in range(5):
        append(topic, batch)
    backup(topic, str(tmp_path / "copy"))
    assert read_origin(topic.fs, topic.layout) is None
    for batch in range(5, 10):
        append(topic, batch)
    with LogStore(tmp_path / "copy") as copy:
        origin = read_origin(copy.fs, copy.layout)
        assert origin is not None
        assert (origin.source, origin.restored_ms) == (topic.path, None)
        assert origin.taken_ms <= copy.clock.now_ms()
        with pytest.raises(MissingBatches, match=r"leaves out 5 to 9") as error:
            append(copy, 10)
        assert topic.path in str(error.value)
        assert read_origin(copy.fs, copy.layout) == origin  # nothing was written to it yet
        append(copy, 10, adopt="query-1:4")
        restored = read_origin(copy.fs, copy.layout)
        assert restored is not None
        assert restored.restored_ms is not None
        append(copy, 11)
        assert read_origin(copy.fs, copy.layout) == restored
        assert repair.examine(copy).sound


def test_a_damaged_origin_stops_no_commit(topic: LogStore, tmp_path: Path) -> None:
    append(topic, 0)
    backup(topic, str(tmp_path / "copy"))
    (tmp_path / "copy" / "origin").write_bytes(b"garbage")
    with LogStore(tmp_path / "copy") as copy:
        append(copy, 1)
        assert not repair.examine(copy).sound
        assert not repair.repair(copy).sound
        assert repair.examine(copy).sound


def test_a_backup_that_was_not_finished_is_no_store(topic: LogStore, tmp_path: Path) -> None:
    append(topic, 0)
    backup(topic, str(tmp_path / "copy"))
    (tmp_path / "copy" / "version").unlink()
    (tmp_path / "copy" / "unfinished").write_bytes(b"")
    with pytest.raises(NotAStore, match="not finished"):
        LogStore(tmp_path / "copy")
