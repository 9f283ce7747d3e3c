"""The clock of one of several processes is wrong by days: nothing goes that should stay, nothing stays for ever."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from compaction_job.job import compact
from logstore.clock import SYSTEM_CLOCK, ManualClock
from logstore.commit.committer import Committer
from logstore.directory import shared_clock as module
from logstore.directory.shared_clock import (
    AGREES_MS,
    JUMP_HELD_BACK_MS,
    JUMP_MS,
    SharedClock,
    Sighting,
    agreed_ms,
    believed,
    clock_warning,
)
from logstore.files import File, FileStat, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SOAK = os.environ.get("DURAMEN_SOAK") == "1"


class WrongClock:
    """A system clock that is off, as that of one process or host may be."""

    def __init__(self, off_ms: int = 0) -> None:
        self.off_ms = off_ms

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms() + self.off_ms

    def monotonic_ms(self) -> int:
        return SYSTEM_CLOCK.monotonic_ms()


class FilesOf(OsFileSystem):
    """A file system on the machine of that clock: it is off by as much."""

    def __init__(self, clock: WrongClock) -> None:
        self.clock = clock

    def stat(self, path: str) -> FileStat:
        found = super().stat(path)
        return FileStat(found.size_bytes, found.mtime_ms + self.clock.off_ms, found.ctime_ms + self.clock.off_ms)


@pytest.mark.parametrize(
    ("now_ms", "up_ms", "seen", "expected"),
    [
        (1000, 5, None, Sighting(5, 1000)),
        (1000 + JUMP_MS, 5, Sighting(5, 1000), Sighting(5, 1000 + JUMP_MS)),  # an hour is no jump
        (1001 + JUMP_MS, 5, Sighting(5, 1000), Sighting(5, 1000, 5)),  # more is: time goes on from where it was
        (DAY_MS * 9, 70, Sighting(5, 1000, 5), Sighting(70, 1065, 5)),
        (
            DAY_MS * 9,
            5 + JUMP_HELD_BACK_MS,
            Sighting(70, 1065, 5),
            Sighting(5 + JUMP_HELD_BACK_MS, DAY_MS * 9),
        ),  # it holds for a day
        (900, 70, Sighting(5, 1000), Sighting(70, 900)),  # set back: believed at once
        (1066, 70, Sighting(5, 1000, 5), Sighting(70, 1066)),  # and right again
        (DAY_MS * 9, 4, Sighting(5, 1000), Sighting(4, DAY_MS * 9)),  # nothing known of this boot
    ],
)
def test_what_is_believed(now_ms: int, up_ms: int, seen: Sighting | None, expected: Sighting) -> None:
    assert believed(now_ms, up_ms, seen) == expected


def test_whose_time_counts() -> None:
    assert agreed_ms(1000, 1000 + AGREES_MS) == 1000
    assert agreed_ms(1000, 1001 + AGREES_MS) == 1001 + AGREES_MS
    assert agreed_ms(1001 + AGREES_MS, 1000) == 1000


def open_as(root: Path, off_ms: int, *, create: bool = False) -> LogStore:
    return LogStore(root, create=create, clock=WrongClock(off_ms))


def values_of(store: LogStore, name: str = "t") -> list[bytes | None]:
    topic = store.topic(name)
    reader = store.reader(topic, 0)
    return [record.value for record in reader.records(reader.log_start_offset(), store.high_watermark(topic, 0))]


def test_a_clock_ahead_by_days_deletes_nothing_by_time(tmp_path: Path) -> None:
    root = tmp_path / "store"
    configs = {"cleanup.policy": "compact,delete", "retention.ms": 7 * DAY_MS, "segment.bytes": 200}
    with LogStore(root, create=True) as store:
        store.create_topic("t", configs=configs)
        now = SYSTEM_CLOCK.now_ms()
        for number in range(5):
            store.append("t", [Record(b"k%d" % number, b"v%d" % number, timestamp_ms=now - DAY_MS)])
        store.append("t", [Record(b"gone", None, timestamp_ms=now - DAY_MS)])
        before = values_of(store)
    with open_as(root, 10 * DAY_MS) as store:
        for _ in range(2):
            report = compact(store, force=True, roll_active=True)
        assert not report.problems
        assert any("240.0 hours ahead" in note for note in report.notes)
        assert abs(report.now_ms - SYSTEM_CLOCK.now_ms()) < AGREES_MS
        assert values_of(store) == before


def test_a_clock_behind_by_days_writes_no_record_that_is_old_and_no_early_horizon(tmp_path: Path) -> None:
    root = tmp_path / "store"
    configs = {"cleanup.policy": "compact,delete", "retention.ms": 7 * DAY_MS, "segment.bytes": 200}
    with LogStore(root, create=True) as store:
        store.create_topic("t", configs=configs)
        store.create_topic("stamped", configs=configs | {"message.timestamp.type": "LogAppendTime"})
    with open_as(root, -10 * DAY_MS) as store:
        for name in ("t", "stamped"):
            store.append(name, [Record(b"a", b"1"), Record(b"gone", b"2")])
            store.append(name, [Record(b"gone", None)])
        compact(store, force=True, roll_active=True)
    with LogStore(root) as store:
        compact(store, force=True, roll_active=True)
        for name in ("t", "stamped"):
            assert sorted(values_of(store, name), key=str) == [None, b"1"]
        assert clock_warning(store.clock) is None


def test_sweeps_go_by_the_times_of_files(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with LogStore(root, create=True) as store:
        fresh = Path(store.layout.plan("a" * 32))
        fresh.mkdir()
        draft = Path(store.layout.staging) / f"{'b' * 32}-import"
        draft.mkdir()
    for off_ms in (100 * DAY_MS, -100 * DAY_MS):
        with open_as(root, off_ms) as store:
            assert Committer(store).sweep() == []
            store.sweep()
            assert fresh.exists()
            assert draft.exists()
    for old in (fresh, draft):
        os.utime(old, (1, 1))
    with open_as(root, -100 * DAY_MS) as store:  # and what is old goes, whose clock ever is behind
        assert Committer(store).sweep() == ["a" * 32]
        store.sweep()
        assert not draft.exists()


def test_a_jump_of_the_whole_machine_is_doubted_for_a_day_and_then_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, clock = tmp_path / "store", WrongClock()
    files = FilesOf(clock)
    with LogStore(root, create=True, fs=files, clock=clock) as store:
        store.create_topic("t", configs={"retention.ms": 7 * DAY_MS, "segment.bytes": 200})
        for number in range(5):
            store.append("t", [Record(b"k", b"v%d" % number)])
        clock.off_ms = 10 * DAY_MS
        compact(store)
        assert len(values_of(store)) == 5
    with LogStore(root, fs=files, clock=clock) as store:  # another process finds the sighting
        report = compact(store)
        assert any("ahead" in note for note in report.notes)
        assert len(values_of(store)) == 5
    up = module.uptime_ms
    monkeypatch.setattr(module, "uptime_ms", lambda: up() + JUMP_HELD_BACK_MS + 1000)
    clock.off_ms += JUMP_HELD_BACK_MS
    with LogStore(root, fs=files, clock=clock) as store:
        report = compact(store)
        assert report.notes == []
        assert len(values_of(store)) == 0


def test_a_manual_clock_is_somebody_s_word(tmp_path: Path) -> None:
    clock = ManualClock(12_345)
    with LogStore(tmp_path / "store", create=True, clock=clock) as store:
        assert store.clock is clock
        assert clock_warning(clock) is None


def test_a_look_that_fails_leaves_the_own_clock(tmp_path: Path) -> None:
    clock = SharedClock(OsFileSystem(), str(tmp_path / "missing" / "clock"), WrongClock(DAY_MS), "boot")
    assert abs(clock.now_ms() - SYSTEM_CLOCK.now_ms() - DAY_MS) < AGREES_MS


class FailingClockFile(OsFileSystem):
    error_number = 0

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if self.error_number:
            raise OSError(self.error_number, os.strerror(self.error_number), path)
        return super().open(path, writable=writable, create=create, exclusive=exclusive)


@pytest.mark.parametrize(
    "error_number", [errno.EIO, errno.EMFILE, errno.ENOMEM], ids=lambda each: errno.errorcode[each]
)
def test_an_error_of_the_system_is_no_reason_to_believe_a_wrong_clock(tmp_path: Path, error_number: int) -> None:
    files, own = FailingClockFile(), WrongClock(30 * DAY_MS)
    files.error_number = error_number
    clock = SharedClock(files, str(tmp_path / "clock"), own, "boot")
    with pytest.raises(OSError, match=os.strerror(error_number)):
        clock.now_ms()
    files.error_number = 0
    assert abs(clock.now_ms() - SYSTEM_CLOCK.now_ms()) < AGREES_MS
    files.error_number = error_number
    own.off_ms = 60 * DAY_MS  # a jump, so that it looks again
    assert abs(clock.now_ms() - SYSTEM_CLOCK.now_ms()) < AGREES_MS
    files.error_number = 0
    own.off_ms = 90 * DAY_MS
    assert abs(clock.now_ms() - SYSTEM_CLOCK.now_ms()) < AGREES_MS


def test_a_sighting_file_that_grew_is_cut_and_used_again(tmp_path: Path) -> None:
    (tmp_path / "clock").write_bytes(b"x" * 100_000)
    clock = SharedClock(OsFileSystem(), str(tmp_path / "clock"), WrongClock(30 * DAY_MS), "boot")
    assert abs(clock.now_ms() - SYSTEM_CLOCK.now_ms()) < AGREES_MS
    assert (tmp_path / "clock").stat().st_size == 4096


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"boot": [1]}', b'{"boot": ["x", {}, []]}', b"\xff" * 5000])
def test_a_damaged_sighting_is_none(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "clock").write_bytes(garbage)
    clock = SharedClock(OsFileSystem(), str(tmp_path / "clock"), SYSTEM_CLOCK, "boot")
    assert abs(clock.now_ms() - SYSTEM_CLOCK.now_ms()) < AGREES_MS


@pytest.mark.timeout(0 if SOAK else 120)
def test_random_clocks_of_several_processes_lose_nothing_and_keep_nothing_for_ever(tmp_path: Path, seed: int) -> None:
    """The oracle knows the true time: what is younger than retention.ms stays, what is older goes with the next pass
    of whichever process.
    """
    for case in range(200 if SOAK else 1):
        rng = random.Random(f"{seed}/{case}")
        root = tmp_path / f"store-{case}"
        with LogStore(root, create=True) as store:
            store.create_topic("t", configs={"retention.ms": 2 * DAY_MS, "segment.bytes": 150})
            store.create_topic("c", configs={"cleanup.policy": "compact", "segment.bytes": 150})
        clocks = [WrongClock() for _ in range(3)]
        stores = [LogStore(root, clock=clock) for clock in clocks]
        try:
            written: dict[bytes, int] = {}
            for step in range(30):
                at = rng.randrange(3)
                if rng.random() < 0.5:
                    clocks[at].off_ms = rng.choice((0, rng.randint(-30, 30) * DAY_MS))
                store = stores[at]
                act = rng.random()
                if act < 0.6:
                    # With a time of its own, as a client gives it, or without: then it is now, whatever a clock says.
                    age_ms = rng.choice((0, DAY_MS, 0))
                    given = SYSTEM_CLOCK.now_ms() - age_ms if age_ms else -1
                    value = b"%d" % step
                    store.append("t", [Record(b"k", value, timestamp_ms=given)])
                    written[value] = SYSTEM_CLOCK.now_ms() - age_ms
                    store.append("c", [Record(b"%d" % rng.randrange(4), None if rng.random() < 0.3 else value)])
                else:
                    compact(store, force=rng.random() < 0.5, roll_active=rng.random() < 0.5)
                    Committer(store).sweep()
                    store.sweep()
            assert values_of(stores[0]) == list(written)
            tombstones = [record for record in values_of(stores[0], "c") if record is None]
            deleted = {k for k in range(4) if _last(stores[0], b"%d" % k) is None}
            assert len(tombstones) >= len(deleted)  # their horizon is a day off, by any clock that counts
            topic = stores[0].create_topic("old", configs={"retention.ms": 2 * DAY_MS, "segment.bytes": 150})
            stores[0].append("old", [Record(b"k", b"old", timestamp_ms=SYSTEM_CLOCK.now_ms() - 3 * DAY_MS)])
            stores[0].append("old", [Record(b"k", b"x" * 75)])
            clocks[1].off_ms = -30 * DAY_MS
            compact(stores[1])
            assert stores[0].partition_state(topic, 0).log_start_offset == 1
        finally:
            for store in stores:
                store.close()


def _last(store: LogStore, key: bytes) -> bytes | None:
    from logstore.restore.lookup import latest_of_key

    found = latest_of_key(store, store.topic("c"), key)
    return b"" if found is None else found.record.value
