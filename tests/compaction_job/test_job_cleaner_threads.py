"""How many threads a run has, what they share, and what to do when a share is too small."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from compaction.lab import Lab
from compaction_job import compact, plan
from compaction_job.job import Progress
from compaction_job.spark_engine import SparkEngine
from logstore.cleaner.throttle import Throttle
from logstore.clock import ManualClock
from logstore.compaction.budget import Budget, MapAdvice, budget_of, cleaner_threads, map_advice
from logstore.compaction.planning import PartitionPlan
from logstore.compaction.receipts import Run
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine

NOW_MS = 1_700_000_000_000
SETTINGS = {"cleanup.policy": "compact", "segment.bytes": 20_000, "file.delete.delay.ms": 0}


def opened(root: Path, settings: str = "") -> LogStore:
    if settings:
        LogStore(root, create=True).close()
        (root / "duramen.toml").write_text(settings)
    return LogStore(root, create=True, clock=ManualClock(NOW_MS))


def fill(store: LogStore, keys: int, *, partitions: int = 1, turns: int = 2) -> None:
    store.create_topic("t", partitions=partitions, configs=SETTINGS | {"segment.bytes": 1 << 20})
    for turn in range(turns):
        rows = {
            "key": pa.array([b"key-%d" % at for at in range(keys)], pa.binary()),
            "value": pa.array([b"%d" % turn] * keys, pa.binary()),
            "timestamp": pa.array([NOW_MS] * keys, pa.int64()),
        }
        store.append("t", pa.table(rows))


class Watch:
    """Who works at which partition, and how many passes are under way at once."""

    def __init__(self) -> None:
        self.workers: dict[str, set[int]] = defaultdict(set)
        self.under_way: set[str] = set()
        self.most = 0

    def started(self, each: PartitionPlan) -> None:
        self.under_way.add(each.name)
        self.most = max(self.most, len(self.under_way))

    def ended(self, run: Run) -> None:
        self.under_way.discard(run.plan.name)

    def moved(self, name: str, step: str, size_bytes: int) -> None:
        if step == "rewrite":
            self.workers[name].add(threading.get_ident())


@pytest.mark.parametrize(("line", "expected"), [("", None), ("1", 1), ("0", 1), ("3", 3)])
def test_threads_count_where_they_are_set(tmp_path: Path, line: str, expected: int | None) -> None:
    with opened(tmp_path / "store", f"log.cleaner.threads = {line}\n" if line else "") as store:
        assert cleaner_threads(store) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", 4 << 20),
        ("log.cleaner.threads = 2\n", 4 << 20),
        ("log.cleaner.threads = 2\nlog.cleaner.io.buffer.size = 524288\n", 128 << 10),
        ("log.cleaner.threads = 1\nlog.cleaner.io.buffer.size = 1000000000\n", 4 << 20),
        ("log.cleaner.threads = 1\nlog.cleaner.io.buffer.size = 0\n", 1),
    ],
)
def test_a_threads_buffers_are_its_share_where_they_are_set(tmp_path: Path, settings: str, expected: int) -> None:
    with opened(tmp_path / "store", settings) as store:
        assert budget_of(store).piece_bytes == expected


def test_small_buffers_make_small_pieces_and_the_same_survivors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    with monkeypatch.context() as patched:

        def take(throttle: Throttle, size: int) -> None:
            sizes.append(size)

        patched.setattr(Throttle, "take", take)
        left = []
        for number, io_bytes in enumerate((None, 20_000)):
            line = "" if io_bytes is None else f"log.cleaner.io.buffer.size = {io_bytes}\n"
            sizes.clear()
            with opened(tmp_path / f"store-{number}", "log.cleaner.threads = 1\n" + line) as store:
                fill(store, 3_000, turns=40)
                report = compact(store, force=True, roll_active=True, retention=False, now_ms=NOW_MS)
                assert not report.failed
                kept = list(store.reader("t", 0).records(0))
                left.append((max(sizes), [(record.key, record.value) for record in kept]))
    (large, expected), (small, found) = left
    assert found == expected
    assert len(found) == 3_000
    assert small < large / 4


def test_one_thread_means_one(tmp_path: Path) -> None:
    with opened(tmp_path / "store", "log.cleaner.threads = 1\n") as store:
        fill(store, 20_000, partitions=3)
        watch = Watch()
        report = compact(
            store,
            force=True,
            roll_active=True,
            progress=Progress(started=watch.started, ended=watch.ended, moved=watch.moved),
        )
        assert len(report.done) == 3
        assert watch.most == 1
        assert all(len(workers) == 1 for workers in watch.workers.values())


@pytest.mark.parametrize(
    ("wanted", "buffer", "passes", "expected"),
    [
        (150, 100, 1, MapAdvice(150, None)),
        (150, 100, 4, MapAdvice(600, 2)),  # 400 bytes are enough for two
        (300, 100, 4, MapAdvice(1200, 1)),
        (500, 100, 4, MapAdvice(2000, None)),
        (90, 100, 4, MapAdvice(404, 3)),  # it was full all the same: never less than there is
    ],
)
def test_advice_knows_who_shares_the_buffer(wanted: int, buffer: int, passes: int, expected: MapAdvice) -> None:
    assert map_advice(wanted, Budget(buffer * passes).divided(passes)) == expected


def test_advice_that_is_followed_makes_the_pass_work(tmp_path: Path) -> None:
    """Each of two passes has half of the buffer, which is too small for its keys."""
    present = 2_300_000
    settings = "log.cleaner.threads = {}\nlog.cleaner.dedupe.buffer.size = {}\n"
    with opened(tmp_path / "store", settings.format(2, present)) as store:
        fill(store, 130_000, partitions=2, turns=1)
        compact(store, roll_active=True, dry_run=True)
        planned = [estimate for _, estimate in plan(store, force=True) if estimate is not None]
    shutil.copytree(tmp_path / "store", tmp_path / "more memory")
    shutil.copytree(tmp_path / "store", tmp_path / "fewer threads")

    def run(root: Path) -> list[tuple[bool, int | None, int | None]]:
        with LogStore(root, clock=ManualClock(NOW_MS)) as store:
            report = compact(store, force=True, roll_active=True)
            assert len(report.done) == 2
            found = [run.report for run in report.done if run.report is not None]
            return [(each.map_full, each.map_buffer_wanted, each.map_threads_wanted) for each in found]

    advice = run(tmp_path / "store")
    assert all(full for full, _, _ in advice)
    assert all(each.map_full for each in planned)
    for _, buffer, threads in [*advice, *((True, each.map_buffer_wanted, each.map_threads_wanted) for each in planned)]:
        assert buffer is not None
        assert buffer > present
        assert threads == 1
    wanted = max(buffer for _, buffer, _ in advice if buffer is not None)
    (tmp_path / "more memory" / "duramen.toml").write_text(settings.format(2, wanted))
    (tmp_path / "fewer threads" / "duramen.toml").write_text(settings.format(1, present))
    assert [full for full, _, _ in run(tmp_path / "more memory")] == [False, False]
    assert [full for full, _, _ in run(tmp_path / "fewer threads")] == [False, False]


@pytest.mark.parametrize("transactions", [False, True])
def test_an_imported_log_without_transactions_is_recognised(tmp_path: Path, transactions: bool) -> None:
    (tmp_path / "kafka").mkdir()
    lab = Lab(tmp_path / "kafka")
    lab.append(*([Record(b"k%d" % (at % 7), b"v" * 50, NOW_MS)] for at in range(40)))
    with lab.open() as log:
        if transactions:
            log.append_marker(commit=True, producer_id=5, producer_epoch=0)
        log.append([Record(b"k", b"v", NOW_MS)])
        log.roll()
    with opened(tmp_path / "store") as store:
        import_topics(store, examine(store.fs, str(tmp_path / "kafka"), limits=store.limits), SETTINGS)
        topic = store.topic("t")
        assert store.partition_state(topic, 0).transactions, "nobody has looked yet"
        for _ in range(2):  # the second pass looks at what is new only
            assert len(compact(store, force=True, threads=2).done) == 1
            assert store.partition_state(topic, 0).clean_part_plain is not transactions


@pytest.mark.parametrize(("cores", "tasks_max", "expected"), [(8, None, 8), (8, 1, 1), (8, 3, 3), (2, 5, 2)])
def test_sparks_tasks_are_bounded_where_threads_are_set(cores: int, tasks_max: int | None, expected: int) -> None:
    spark = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=cores, master="yarn"))
    assert SparkEngine(spark, tasks_max=tasks_max).tasks_at_once() == expected  # type: ignore[arg-type]
