"""Compaction that is killed, or loses power, at every step of rewrite and swap: no key is lost, none comes back."""

from __future__ import annotations

import os
import random

import pytest

from logstore.cleaner.work import CleaningOptions
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, read_state
from logstore.directory.swap import finish_swap
from logstore.errors import DuramenError
from logstore.partition.reader import PartitionReader
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.cleaning import clean_partition
from reference.partition_writer import PartitionWriter
from simulation.filesystem import PowerCut, SimulatedFileSystem

DIRECTORY, STATE, FOLDER = "/store/logs/t-0", "/store/state/0", "/store/staging/run"
PARTITION = TopicPartition("t", 0)
NOW_MS = 1_700_000_000_000
RETENTION_MS = 1000
CONFIG = LogConfig(segment_bytes=900, cleanup_policy=frozenset({"compact"}), delete_retention_ms=RETENTION_MS)
ZSTD = 4
SOAK = 20 if os.environ.get("DURAMEN_SOAK") == "1" else 1


def made(rng: random.Random, *, packed: bool = False) -> tuple[SimulatedFileSystem, list[Record], int]:
    """A durable log of many small segments, its records, and where its active segment begins. A packed one fills more
    segments when it is opened.
    """

    def value() -> bytes:
        return b"v" * 200 if packed else rng.randbytes(rng.randrange(40))

    fs = SimulatedFileSystem(ManualClock(NOW_MS))
    for path in ("/store", "/store/logs", "/store/state", "/store/staging", DIRECTORY):
        fs.mkdir(path)
        fs.fsync_dir(os.path.dirname(path))
    records = []
    with opened(fs) as log:
        for number in range(25):
            batch = [
                Record(b"k%d" % rng.randrange(12), None if rng.random() < 0.2 else value(), NOW_MS)
                for _ in range(rng.randrange(1, 6))
            ]
            if number == 20:
                batch.append(Record(b"gone", b"for a while", NOW_MS))
            if number == 24:
                batch.append(Record(b"gone", None, NOW_MS))
            first = log.append(batch, codec_id=ZSTD if packed else 0).first_offset
            records += [Record(r.key, r.value, r.timestamp_ms, offset=first + i) for i, r in enumerate(batch)]
        log.roll()
        base = log.segments[-1].base_offset
    return fs, records, base


def opened(fs: SimulatedFileSystem, *, clean: bool = True) -> PartitionWriter:
    return PartitionWriter.open(
        DIRECTORY, partition=PARTITION, config=CONFIG, clean=clean, state_path=STATE, fs=fs, clock=ManualClock(NOW_MS)
    )


def compact(fs: SimulatedFileSystem, base: int, now_ms: int, *, unpack: bool = False) -> None:
    clean_partition(
        fs,
        DIRECTORY,
        partition=PARTITION,
        config=CONFIG,
        state_path=STATE,
        first_uncleanable_offset=base,
        now_ms=now_ms,
        map_settings=MapSettings(buffer_bytes=1 << 20),
        producers={},
        folder=FOLDER,
        options=CleaningOptions(recompress_codec_id=0 if unpack else None),
    )


def latest(records: list[Record]) -> dict[bytes | None, bytes | None]:
    return {r.key: r.value for r in records if r.value is not None or r.key is not None}


def live(records: list[Record]) -> dict[bytes | None, bytes | None]:
    return {key: value for key, value in latest(records).items() if value is not None}


def read(fs: SimulatedFileSystem, end: int) -> list[Record]:
    """As another process reads: by the state file's list."""
    reader = PartitionReader(
        PartitionPlace(DIRECTORY, PARTITION, STATE), high_watermark=lambda: end, last_stable_offset=lambda: end, fs=fs
    )
    return list(reader.records(0))


def check(fs: SimulatedFileSystem, records: list[Record], base: int) -> None:
    """What a survivor must show: to readers before anybody finished the swap, and after, and to its next writer."""
    state = read_state(fs, STATE)
    assert isinstance(state, PartitionState)
    as_left = read(fs, base)
    finish_swap(fs, DIRECTORY, STATE, state)
    by_offset = {r.offset: r for r in records}
    for found in (as_left, read(fs, base), _recovered(fs)):
        offsets = [r.offset for r in found]
        assert offsets == sorted(set(offsets))
        assert all((r.key, r.value) == (by_offset[r.offset].key, by_offset[r.offset].value) for r in found)
        assert live(found) == live(records)


def _recovered(fs: SimulatedFileSystem) -> list[Record]:
    with opened(fs.kill(), clean=False) as log:
        assert not log.recovery.cuts
        assert not log.recovery.quarantined
        return list(log.records())


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("second_pass", [False, True], ids=["first pass", "tombstones go"])
def test_every_step_can_be_the_last(power: bool, second_pass: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(SOAK):
        start, records, base = made(rng)
        now_ms = NOW_MS
        if second_pass:
            compact(start, base, now_ms)
            now_ms += RETENTION_MS + 1
        whole = start.kill()
        before = whole.operations
        compact(whole, base, now_ms)
        steps = whole.operations - before
        assert steps > 50
        expected = [(r.offset, r.key, r.value) for r in read(whole, base)]
        assert expected != [(r.offset, r.key, r.value) for r in read(start, base)]
        for step in range(steps):
            fs = start.kill()
            fs.fail_after(step)
            with pytest.raises((PowerCut, DuramenError)):
                compact(fs, base, now_ms)
            survivor = fs.crash(random.Random(rng.random())) if power else fs.kill()
            check(survivor, records, base)
            if step % 7 == 0:  # and the next pass ends as if nothing had happened
                _remove_leftovers(survivor)
                compact(survivor, base, now_ms)
                assert [(r.offset, r.key, r.value) for r in read(survivor, base)] == expected
                assert not any(name.endswith((".cleaned", ".swap")) for name in survivor.listdir(DIRECTORY))


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_any_step_of_a_group_with_several_outputs_can_be_the_last(power: bool, seed: int) -> None:
    rng = random.Random(seed)
    stride = 1 if SOAK > 1 else 4  # there are many; each run takes others
    for _ in range(SOAK):
        start, records, base = made(rng, packed=True)
        whole = start.kill()
        before = whole.operations
        compact(whole, base, NOW_MS, unpack=True)
        steps = whole.operations - before
        state = read_state(whole, STATE)
        assert state is not None
        assert max(entry.size_bytes for entry in state.segments) <= CONFIG.segment_bytes or len(state.segments) > 3
        expected = [(r.offset, r.key, r.value) for r in read(whole, base)]
        for step in range(rng.randrange(stride), steps, stride):
            fs = start.kill()
            fs.fail_after(step)
            with pytest.raises((PowerCut, DuramenError)):
                compact(fs, base, NOW_MS, unpack=True)
            survivor = fs.crash(random.Random(rng.random())) if power else fs.kill()
            check(survivor, records, base)
            if step % 20 < stride:
                _remove_leftovers(survivor)
                compact(survivor, base, NOW_MS, unpack=True)
                assert [(r.offset, r.key, r.value) for r in read(survivor, base)] == expected
                assert not any(name.endswith((".cleaned", ".swap")) for name in survivor.listdir(DIRECTORY))


def _remove_leftovers(fs: SimulatedFileSystem) -> None:
    if fs.exists(FOLDER):
        for name in fs.listdir(FOLDER):
            fs.unlink(os.path.join(FOLDER, name))


def test_a_full_disk_leaves_the_old_segments(seed: int) -> None:
    rng = random.Random(seed)
    start, records, base = made(rng)
    used = sum(map(len, start.files().values()))
    for room in range(0, 4000, 250):
        fs = start.kill()
        fs.capacity_bytes = used + room
        try:
            compact(fs, base, NOW_MS)
        except OSError:
            assert not [name for name in fs.listdir(DIRECTORY) if name.endswith((".cleaned", ".swap"))]
        survivor = fs.kill()
        survivor.capacity_bytes = None
        check(survivor, records, base)
