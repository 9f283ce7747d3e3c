from __future__ import annotations

import contextlib
import errno
import itertools
from dataclasses import replace

import numpy as np
import pytest

from logstore.config import LogConfig
from logstore.directory.state import SwapNote, read_state, write_state
from logstore.directory.swap import replace_segments
from logstore.files import FileSystem
from logstore.records.scan import scan_batches
from logstore.segment.names import Transient
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import DIRECTORY, bases, batch, contents, open_log, rec, sized_batch, state_path
from simulation.tracing import Call, TracingFileSystem

CONFIG = LogConfig(segment_bytes=300, index_interval_bytes=50, file_delete_delay_ms=0)
#: which offsets the replacement of the first three segments keeps
KEPT = (2, 7, 8, 15)


def filled(fs: SimulatedFileSystem) -> PartitionWriter:
    """Segments at 0, 6, 12, 18, 24; the log ends at 26."""
    log = open_log(fs, config=CONFIG)
    for _ in range(13):
        log.append_batches(sized_batch(100, count=2))
    return log


def one(offset: int) -> bytes:
    return batch([rec(f"kept {offset}", offset=offset)], base_offset=offset)


def cleaned(fs: SimulatedFileSystem, base_offset: int, *offsets: int) -> None:
    """A complete `.cleaned` output, synced."""
    segment = LogSegment(
        fs, DIRECTORY, base_offset, writable=True, settings=SegmentSettings(50), suffix=Transient.CLEANED
    )
    if offsets:
        data = np.frombuffer(bytearray(b"".join(map(one, offsets))), dtype=np.uint8)
        segment.place(data, scan_batches(data).table, 0)
    segment.seal()
    segment.flush()
    segment.close(clean=False)


def replaced(fs: FileSystem, new_bases: list[int], old_bases: list[int]) -> None:
    """As a compaction does it: noted in the state file first, so that nobody takes the shorter segments for damage."""
    state = read_state(fs, state_path(DIRECTORY))
    assert state is not None
    write_state(fs, state_path(DIRECTORY), replace(state, swap=SwapNote(tuple(new_bases), tuple(old_bases))))
    replace_segments(fs, DIRECTORY, new_bases, old_bases)


def offsets_of(log: PartitionWriter) -> list[int]:
    return [row[0] for row in contents(log)]


OLD = list(range(26))
NEW = [*KEPT, *range(18, 26)]


def test_outputs_take_the_place_of_the_segments_they_replace() -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 0, 2, 7, 8)
    cleaned(fs, 12, 15)
    replaced(fs, [0, 12], [0, 6, 12])
    names = fs.listdir(DIRECTORY)
    assert not [name for name in names if name.endswith((".cleaned", ".swap"))]
    assert f"{6:020d}.snapshot" not in names
    assert f"{12:020d}.snapshot" in names
    log = open_log(fs, config=CONFIG)
    assert (bases(log), offsets_of(log)) == ([0, 12, 18, 24], NEW)
    assert not log.recovery.found_damage
    state = read_state(fs, state_path(DIRECTORY))
    assert state is not None
    assert state.swap is None, "settled by whoever opens the log"


def steps_of_a_replacement() -> int:
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 0, 2, 7, 8)
    cleaned(fs, 12, 15)
    tracing = TracingFileSystem(fs)
    replaced(tracing, [0, 12], [0, 6, 12])
    return len(tracing.calls)


@pytest.mark.parametrize("clean", [True, False])
def test_a_replacement_interrupted_anywhere_is_finished_or_undone(clean: bool) -> None:
    outcomes = set()
    for step in range(steps_of_a_replacement() + 1):
        fs = SimulatedFileSystem()
        filled(fs).close()
        cleaned(fs, 0, 2, 7, 8)
        cleaned(fs, 12, 15)
        tracing = TracingFileSystem(fs)
        counter = itertools.count()

        def stop(call: Call, counter: itertools.count[int] = counter, step: int = step) -> None:
            if next(counter) == step:
                raise OSError(errno.EINTR, "killed", call.path)

        tracing.before = stop
        with contextlib.suppress(OSError):
            replaced(tracing, [0, 12], [0, 6, 12])
        outputs_left = [name for name in fs.listdir(DIRECTORY) if name.endswith(".log.cleaned")]
        survivor = fs.kill()
        log = open_log(survivor, config=CONFIG, clean=clean)
        found = offsets_of(log)
        assert found in (OLD, NEW), step
        if outputs_left:  # until the last output has its new name the old segments stand
            assert found == OLD, step
        outcomes.add(len(found))
        names = survivor.listdir(DIRECTORY)
        assert not [name for name in names if name.endswith((".cleaned", ".swap"))], step
        assert not log.recovery.found_damage, step
        log.append([rec("goes on")])
        rows = contents(log)
        log.close()
        again = open_log(survivor, config=CONFIG)
        assert contents(again) == rows, step
        assert again.recovery.removed == [] or all("deleted" in name for name in again.recovery.removed)
    assert outcomes == {len(OLD), len(NEW)}


def test_a_replacement_by_nothing_leaves_an_empty_segment_at_its_base() -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 0)
    replaced(fs, [0], [0, 6])
    log = open_log(fs, config=CONFIG)
    assert (bases(log), offsets_of(log)) == ([0, 12, 18, 24], list(range(12, 26)))


def interrupted(fs: SimulatedFileSystem, *renames: tuple[str, str]) -> SimulatedFileSystem:
    for source, target in renames:
        fs.rename(f"{DIRECTORY}/{source}", f"{DIRECTORY}/{target}")
    return fs


def test_an_empty_swap_replaces_the_file_of_its_own_base_only() -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 6)
    interrupted(fs, *((f"{6:020d}.{kind}.cleaned", f"{6:020d}.{kind}.swap") for kind in ("log", "index", "timeindex")))
    log = open_log(fs, config=CONFIG)
    assert bases(log) == [0, 6, 12, 18, 24]
    assert offsets_of(log) == [*range(6), *range(12, 26)]


def test_outputs_that_were_never_named_swap_are_removed() -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 0, 2)
    cleaned(fs, 12, 15)
    interrupted(fs, (f"{12:020d}.log.cleaned", f"{12:020d}.log.swap"))
    log = open_log(fs, config=CONFIG)
    assert offsets_of(log) == OLD
    assert bases(log) == [0, 6, 12, 18, 24]


def test_a_swap_below_the_first_output_that_is_not_complete_is_finished() -> None:
    # renaming goes from the highest base down: a `.cleaned` says nothing about a replacement at a lower base
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 0, 2)
    interrupted(fs, *((f"{0:020d}.{kind}.cleaned", f"{0:020d}.{kind}.swap") for kind in ("log", "index", "timeindex")))
    cleaned(fs, 12, 15)
    log = open_log(fs, config=CONFIG)
    assert offsets_of(log) == [2, *range(6, 26)]


def test_index_files_that_alone_are_still_named_swap_get_their_names() -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    interrupted(fs, (f"{6:020d}.timeindex", f"{6:020d}.timeindex.swap"))
    log = open_log(fs, config=CONFIG)
    assert offsets_of(log) == OLD
    assert f"{6:020d}.timeindex" in fs.listdir(DIRECTORY)


def test_an_old_segment_beyond_the_replacements_last_record_survives_a_crash_and_does_no_harm() -> None:
    # everything of the segment at 6 was superseded, so the output ends at offset 2: Kafka's repair keeps it, too
    fs = SimulatedFileSystem()
    filled(fs).close()
    cleaned(fs, 0, 2)
    interrupted(fs, *((f"{0:020d}.{kind}.cleaned", f"{0:020d}.{kind}.swap") for kind in ("log", "index", "timeindex")))
    log = open_log(fs, config=CONFIG)
    assert bases(log) == [0, 6, 12, 18, 24]
    assert offsets_of(log) == [2, *range(6, 26)]
