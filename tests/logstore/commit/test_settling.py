"""Settling after a power cut: what was committed is all there, once, whatever the disk forgot."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest

from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table
from logstore.directory import tails
from logstore.errors import CorruptState, DamagedLog
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.recovery import recover

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
SOAK = os.environ.get("DURAMEN_SOAK") == "1"


def load_ledger_files() -> ModuleType:
    """The files with a power switch, which the ledger's tests have."""
    path = Path(__file__).parents[1] / "ledger" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ledger_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(batch: int, count: int = 60) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([b"k%d" % n for n in range(count)]),
            "value": pa.array([b"%d-%d" % (batch, n) for n in range(count)]),
            "timestamp": pa.array([1_700_000_000_000 + batch] * count),
        }
    )


def write(committer: Committer, batch: int) -> bool:
    done = append_table(committer, "orders", rows(batch), app=AppBatch("app", batch, "query"))
    return not done.replayed


def values(store: LogStore, read_all: ReadAll) -> list[bytes]:
    found = read_all(store, "orders")
    for records in found.values():
        assert [record.offset for record in records] == list(range(len(records)))
    return sorted(record.value or b"" for records in found.values() for record in records)


def expected(batches: int) -> list[bytes]:
    return sorted(b"%d-%d" % (batch, n) for batch in range(batches) for n in range(60))


def make(root: Path, **settings: object) -> LogStore:
    store = LogStore(root, create=True, lock_wait_ms=2000)
    store.create_topic("orders", partitions=2, configs={"segment.bytes": 1500, "index.interval.bytes": 200} | settings)
    return store


DAMAGE = {
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "zeros": lambda data, rng: data[: (cut := rng.randrange(len(data)))] + bytes(len(data) - cut),
    "garbage": lambda data, rng: data[: (cut := rng.randrange(len(data)))] + rng.randbytes(len(data) - cut),
    "empty": lambda data, rng: b"",
    "flip": lambda data, rng: bytes(
        byte ^ (0x10 if at == rng.randrange(len(data)) or at == len(data) // 2 else 0) for at, byte in enumerate(data)
    ),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "gone"])
@pytest.mark.parametrize("flushed", [0, 2])
def test_unflushed_bytes_that_were_lost_come_back_from_staging(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll, damage: str, flushed: int, seed: int
) -> None:
    rng = random.Random(seed)
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        for batch in range(4):
            write(committer, batch)
            if batch + 1 == flushed:
                committer.flush(store.topic("orders"))
        before = {path: path.read_bytes() for path in Path(store.layout.logs).glob("orders-*/*.log")}
        topic = store.topic("orders")
        boot()
        for number in range(2):
            recovery_point = store.ends(topic).recovery_points[number]
            logs = sorted(Path(store.layout.partition(topic.partition(number))).glob("*.log"))
            unflushed = [path for path in logs if int(path.stem) >= recovery_point] or logs[-1:]
            for path in rng.sample(unflushed, rng.randrange(1, len(unflushed) + 1)):
                if damage == "gone":
                    path.unlink()
                elif path.stat().st_size:
                    path.write_bytes(DAMAGE[damage](path.read_bytes(), rng))
                if rng.random() < 0.5:
                    path.with_suffix(".index").write_bytes(rng.randbytes(rng.randrange(40)))
        later = Committer(LogStore(store.path))
        assert not write(later, 3)
        assert write(later, 4)
        assert values(store, read_all) == expected(5)
        later.flush(topic)
        assert os.listdir(store.layout.staging) == []
        for path, data in before.items():
            assert path.read_bytes()[: len(data)] == data, "the same bytes, in segments of the same bounds"


@pytest.mark.parametrize("damage", [*DAMAGE, "gone"])
@pytest.mark.parametrize("flushed", [0, 2])
def test_unflushed_bytes_that_were_lost_without_a_restart_come_back_from_staging(
    tmp_path: Path, read_all: ReadAll, damage: str, flushed: int, seed: int
) -> None:
    """A storage box that restarts, a snapshot, a failed write-back: the boot id is the same, the bytes are gone."""
    rng = random.Random(seed)
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        topic = store.topic("orders")
        for batch in range(4):
            write(committer, batch)
            if batch + 1 == flushed:
                committer.flush(topic)
        before = {path: path.read_bytes() for path in Path(store.layout.logs).glob("orders-*/*.log")}
        for number in range(2):
            lose_unflushed(store, number, damage, rng)
        assert write(committer, 4)
        committer.flush(topic)
        assert values(store, read_all) == expected(5)
        assert os.listdir(store.layout.staging) == []
        for path, data in before.items():
            assert path.read_bytes()[: len(data)] == data, "the same bytes, in segments of the same bounds"


def test_garbage_that_only_the_append_meets_is_mended_before_it_goes_on(tmp_path: Path, read_all: ReadAll) -> None:
    """The log is as long as it should be, so nothing is noticed before the commit."""
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        for batch in range(4):
            write(committer, batch)
        for number in range(2):
            folder = Path(store.layout.partition(store.topic("orders").partition(number)))
            newest = max(path for path in folder.glob("*.log") if path.stat().st_size)
            newest.write_bytes(b"|" * newest.stat().st_size)
        assert write(committer, 4)
        assert values(store, read_all) == expected(5)


def lose_unflushed(store: LogStore, number: int, damage: str, rng: random.Random) -> None:
    """Damage some of a partition's bytes above its recovery point."""
    topic = store.topic("orders")
    recovery_point = store.ends(topic).recovery_points[number]
    logs = sorted(Path(store.layout.partition(topic.partition(number))).glob("*.log"))
    unflushed = [path for path in logs if int(path.stem) >= recovery_point and path.stat().st_size]
    assert unflushed
    for path in rng.sample(unflushed, rng.randrange(1, len(unflushed) + 1)):
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(DAMAGE[damage](path.read_bytes(), rng))


@pytest.mark.parametrize("damage", ["cut", "zeros", "flip", "gone"])
def test_the_redo_log_stays_until_the_logs_were_read_back(
    tmp_path: Path, read_all: ReadAll, damage: str, seed: int
) -> None:
    """Nobody writes; the flush alone finds the damage, a reader before it is told where the records still are."""
    rng = random.Random(seed)
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        topic = store.topic("orders")
        for batch in range(3):
            write(committer, batch)
        for number in range(2):
            lose_unflushed(store, number, damage, rng)
        with pytest.raises(DamagedLog, match="staging"):
            values(store, read_all)
        committer.flush(topic)
        assert values(store, read_all) == expected(3)


def test_recover_takes_what_is_staged_although_the_machine_was_not_started_again(
    tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        for batch in range(3):
            write(committer, batch)
        for number in range(2):
            lose_unflushed(store, number, "flip", rng)
        reports = recover(store, store.topic("orders"))
        assert [report.losses for report in reports] == [(), ()]
        assert values(store, read_all) == expected(3)


def test_a_tail_from_before_the_power_cut_is_not_believed(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll
) -> None:
    """Tails are never synced: an older one may be back under the name, though all it speaks of was flushed."""
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        topic = store.topic("orders")
        write(committer, 0)
        old = Path(store.layout.tails(topic.id)).read_bytes()
        write(committer, 1)
        committer.flush(topic)
        boot()
        Path(store.layout.tails(topic.id)).write_bytes(old)
        assert write(committer, 2)
        assert values(store, read_all) == expected(3)


def test_after_a_start_with_everything_flushed_the_logs_are_not_opened(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        write(committer, 0)
        committer.flush(store.topic("orders"))
        boot()
        monkeypatch.setattr(LogStore, "open_log", None)
        write(committer, 1)
        assert values(store, read_all) == expected(2)


def test_a_system_that_does_not_tell_when_it_started_is_never_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "boot_id", lambda: "")
    assert not tails.PartitionTail.of_now(1, 1, tails.Tail()).is_current


def test_what_was_written_above_the_high_watermark_before_the_cut_is_taken_back(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll, seed: int
) -> None:
    """Appended but not published: the ends are as flushed, the bytes behind them anything."""
    rng = random.Random(seed)
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        topic = store.topic("orders")
        write(committer, 0)
        committer.flush(topic)
        ends = Path(store.layout.ends(topic.id)).read_bytes()
        write(committer, 1)
        Path(store.layout.ends(topic.id)).write_bytes(ends)
        boot()
        for path in Path(store.layout.logs).glob("orders-*/*.log"):
            with open(path, "ab") as file:
                file.write(rng.choice([b"", bytes(50), rng.randbytes(70)]))
        assert not write(committer, 1)
        assert write(committer, 2)
        assert values(store, read_all) == expected(3)


def test_damage_below_the_recovery_point_is_told_and_nothing_is_written_over_it(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    with make(tmp_path / "store", **{"segment.bytes": 1 << 20}) as store:
        committer = Committer(store)
        topic = store.topic("orders")
        write(committer, 0)
        committer.flush(topic)
        write(committer, 1)
        boot()
        for path in Path(store.layout.logs).glob("orders-*/*.log"):
            path.write_bytes(b"")
        for _ in range(2):
            with pytest.raises(DamagedLog, match="duramen recover"):
                write(committer, 2)
        assert committer.ledger.sequence(topic.id) == 2
        assert len(os.listdir(store.layout.staging)) == 1, "the redo log stays"


def test_recover_takes_what_is_staged_before_it_speaks_of_loss(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll
) -> None:
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        for batch in range(3):
            write(committer, batch)
        boot()
        for path in Path(store.layout.logs).glob("orders-*/*.log"):
            path.write_bytes(b"")
        reports = recover(store, store.topic("orders"))
        assert [report.losses for report in reports] == [(), ()]
        write(committer, 3)
        assert values(store, read_all) == expected(4)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_topic_whose_ends_are_gone_is_refused_until_it_was_recovered(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll, flushed: bool
) -> None:
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        topic = store.topic("orders")
        write(committer, 0)
        write(committer, 1)
        if flushed:
            committer.flush(topic)
        os.unlink(store.layout.ends(topic.id))
        with pytest.raises(CorruptState, match="duramen recover"):
            write(committer, 2)
        recover(store, topic)
        assert write(committer, 2)
        assert values(store, read_all) == expected(3)


def test_after_a_loss_the_topic_goes_on_behind_it(tmp_path: Path, boot: Callable[[], None]) -> None:
    """What was flushed is lost, what is staged is not."""
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        topic = store.topic("orders")
        write(committer, 0)
        committer.flush(topic)
        write(committer, 1)
        flushed, before = store.ends(topic).recovery_points, store.ends(topic).high_watermarks
        for path in Path(store.layout.logs).glob("orders-*/*.log"):
            path.write_bytes(b"")
        reports = recover(store, topic)
        # what was flushed has left staging; the rest comes back from there
        assert [[(loss.base_offset, loss.end_offset) for loss in report.losses] for report in reports] == [
            [(0, end)] for end in flushed
        ]
        for number, base in enumerate(flushed):
            offsets = [record.offset for record in store.reader(topic, number).records(base)]
            assert offsets == list(range(base, before[number]))
        assert write(committer, 2)
        found = []
        for number, base in enumerate(flushed):
            records = list(store.reader(topic, number).records(base))
            assert [record.offset for record in records] == list(range(base, store.ends(topic).high_watermarks[number]))
            found += [record.value for record in records]
        assert sorted(found) == expected(3)[60:]


def test_staged_files_that_are_gone_are_told(tmp_path: Path, boot: Callable[[], None]) -> None:
    with make(tmp_path / "store") as store:
        committer = Committer(store)
        write(committer, 0)
        boot()
        for path in Path(store.layout.logs).glob("orders-*/*.log"):
            path.write_bytes(b"")
        shutil.rmtree(store.layout.plan(committer.ledger.commits()[0].plan_id))
        with pytest.raises(DamagedLog, match="staged files of commit 1"):
            write(committer, 1)


def test_a_power_cut_at_any_step_keeps_what_was_acknowledged(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll, seed: int
) -> None:
    """The whole store, ledger included, as a cut at some step leaves it: no batch lost, none half, none twice."""
    rng = random.Random(seed)
    files = load_ledger_files().PoweredFiles()
    source, left = tmp_path / "store", tmp_path / "left"
    files.fsync_dir(str(tmp_path))
    acknowledged = cuts = 0
    began = time.monotonic()
    chance = 1.0 if SOAK else 0.04
    one_at_a_time = threading.Lock()

    def cut(kind: str, path: str) -> None:
        with one_at_a_time:  # a flush syncs in several threads
            cut_here(kind, path)

    def cut_here(kind: str, path: str) -> None:
        nonlocal cuts
        if rng.random() > chance or (not SOAK and time.monotonic() - began > 60):
            return
        cuts += 1
        files.leave(str(source), str(left), rng)
        boot()
        # Days later: a folder that lost its owner file is left alone while it is young.
        later = ManualClock(time.time_ns() // 1_000_000 + 7 * 86_400_000)
        with LogStore(left, lock_wait_ms=2000, clock=later) as store:
            survivor = Committer(store)
            last = survivor.ledger.last_batch("app")
            committed = 0 if last is None else last.batch_id + 1
            assert acknowledged <= committed <= acknowledged + 1, (kind, path)
            for batch in range(max(committed - 1, 0), committed + 2):
                assert write(survivor, batch) == (batch >= committed), (kind, path)
            assert values(store, read_all) == expected(committed + 2), (kind, path)
            survivor.flush(store.topic("orders"))
            survivor.sweep()
            assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == [], (kind, path)
        shutil.rmtree(left)

    with LogStore(source, create=True, fs=files) as store:
        store.create_topic("orders", partitions=2, configs={"segment.bytes": 1500, "index.interval.bytes": 200})
        committer = Committer(store)
        files.on_step = cut
        for batch in range(6):
            write(committer, batch)
            acknowledged += 1
            if batch % 2:
                committer.flush(store.topic("orders"))
    files.close()
    assert cuts > 5
