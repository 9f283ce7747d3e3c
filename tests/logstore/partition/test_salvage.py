"""What is kept of a damaged partition: every intact batch, at its offset, whatever happens on the way."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace

import pytest

from logstore.config import LogConfig
from logstore.directory.state import Loss, PartitionState, SegmentEntry, read_state, write_state
from logstore.directory.swap import finish_swap
from logstore.limits import DEFAULT_LIMITS
from logstore.partition.damage import intact_batches
from logstore.partition.quarantine import reasons
from logstore.partition.salvage import Partition, Piece, Salvage
from logstore.partition.salvage_planning import has_wrong_list, plan_salvage
from logstore.partition.salvage_writing import carry_out
from reference.partition_writer import PartitionWriter
from simulation.filesystem import PowerCut, SimulatedFileSystem
from simulation.logs import DIRECTORY, NOW_MS, contents, directory_bytes, open_log, rec, sized_batch, state_path

CONFIG = LogConfig(segment_bytes=300, index_interval_bytes=50)
STATE = state_path(DIRECTORY)
Row = tuple[int, bytes | None, bytes | None, int]


def filled() -> tuple[SimulatedFileSystem, list[Row]]:
    """Batches of 100 bytes and two records, three a segment: bases 0, 6, 12, 18; the log ends at 24. All synced."""
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    for n in range(12):
        log.append_batches(sized_batch(100, count=2, at_ms=1000 + n), leader_epoch=n // 4)
    rows = contents(log)
    log.close()
    return fs, rows


def path(base_offset: int, kind: str = "log") -> str:
    return f"{DIRECTORY}/{base_offset:020d}.{kind}"


def write(fs: SimulatedFileSystem, name: str, data: bytes, position: int = 0) -> None:
    file = fs.open(name, create=True)
    file.pwrite(data, position)
    file.fsync()


def put(fs: SimulatedFileSystem, name: str, data: bytes) -> None:
    file = fs.open(name, create=True)
    file.truncate(0)
    file.pwrite(data, 0)
    file.fsync()


def given(fs: SimulatedFileSystem, committed: int | None = 24, **changes: object) -> Partition:
    state = read_state(fs, STATE)
    if state is not None and state.swap is not None:
        state = finish_swap(fs, DIRECTORY, STATE, state)
    fields: dict[str, object] = {"state": state} | changes
    return Partition(
        fs,
        DIRECTORY,
        "orders-0",
        committed=committed,
        config=CONFIG,
        limits=DEFAULT_LIMITS,
        now_ms=NOW_MS,
        **fields,  # type: ignore[arg-type]
    )


def salvage(fs: SimulatedFileSystem, **options: object) -> tuple[Salvage, PartitionWriter]:
    """Plan, carry out, open with every check; the log must have nothing more to give up."""
    partition = given(fs, **options)  # type: ignore[arg-type]
    plan = plan_salvage(partition)
    if plan.changes or partition.state is None:
        carry_out(partition, plan, STATE)
    log = open_log(fs, config=CONFIG, clean=False, long_lived=False, keep_offset=24)
    assert not log.recovery.found_damage, log.recovery
    return plan, log


def ranges(losses: tuple[Loss, ...]) -> list[tuple[int, int]]:
    return [(each.base_offset, each.end_offset) for each in losses]


def without(rows: list[Row], *lost: tuple[int, int]) -> list[Row]:
    return [row for row in rows if not any(low <= row[0] < high for low, high in lost)]


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(0, 300, 7))
@pytest.mark.parametrize("base", [0, 6, 18])
def test_a_flipped_bit_costs_one_batch_at_most(base: int, at: int) -> None:
    fs, rows = filled()
    data = bytearray(directory_bytes(fs)[f"{base:020d}.log"])
    data[at] ^= 0x10
    put(fs, path(base), bytes(data))
    plan, log = salvage(fs)
    hit = base + 2 * (at // 100)
    lost = [] if at % 100 in range(12, 16) else [(hit, hit + 2)]  # no checksum covers the leader epoch
    assert ranges(plan.losses) == lost
    assert contents(log) == without(rows, *lost)
    assert log.log_end_offset == 24
    assert not any(each.at_most for each in plan.losses)
    log.append([rec("next")])
    assert contents(log)[-1][0] == 24
    log.close()
    state = read_state(fs, STATE)
    assert state is not None
    assert state.losses == plan.losses


def test_damage_of_several_segments_is_told_file_by_file() -> None:
    fs, rows = filled()
    write(fs, path(0), b"\xff" * 50, 120)
    write(fs, path(6), b"\xff" * 150, 70)
    fs.unlink(path(12))
    before = directory_bytes(fs)
    plan = plan_salvage(given(fs))
    assert directory_bytes(fs) == before, "planning changes nothing"
    assert [(each.file, each.position, each.base_offset, each.end_offset) for each in plan.damages] == [
        (path(0), 100, 2, 4),
        (path(6), 0, 6, 12),
        (path(12), 0, 12, 18),
    ]
    done, log = salvage(fs)
    assert (done.losses, done.damages) == (plan.losses, plan.damages)
    assert contents(log) == without(rows, (2, 4), (6, 18))
    assert log.log_start_offset == 0
    folder = f"{DIRECTORY}/quarantine/000001"
    assert fs.files()[f"{folder}/{0:020d}.log.from-100"] == before[f"{0:020d}.log"][100:200]
    reason = json.loads(fs.files()[f"{folder}/reason.json"])
    assert [(cut["file"], cut["position"], cut["base_offset"], cut["end_offset"]) for cut in reason["cuts"]] == [
        (f"{0:020d}.log", 100, 2, 4),
        (f"{6:020d}.log", 0, 6, 12),
        (f"{12:020d}.log", 0, 12, 18),
    ]
    assert ranges(reasons([fs.files()[f"{folder}/reason.json"]])) == [(2, 4), (6, 12), (12, 18)]


def test_the_first_segment_can_go_without_the_log_start_moving() -> None:
    fs, rows = filled()
    fs.unlink(path(0))
    plan, log = salvage(fs)
    assert (log.log_start_offset, ranges(plan.losses)) == (0, [(0, 6)])
    assert contents(log) == without(rows, (0, 6))


def test_a_log_that_lost_its_end_goes_on_at_the_committed_end() -> None:
    fs, rows = filled()
    put(fs, path(18), directory_bytes(fs)[f"{18:020d}.log"][:150])
    plan, log = salvage(fs)
    assert ranges(plan.losses) == [(20, 24)]
    assert contents(log) == without(rows, (20, 24))
    assert log.append([rec("next")]).first_offset == 24


def test_nothing_left_at_all() -> None:
    fs, _ = filled()
    for base in (0, 6, 12, 18):
        fs.unlink(path(base))
    plan, log = salvage(fs)
    assert plan.losses[0].base_offset == 0
    assert plan.losses[-1].end_offset == 24
    assert contents(log) == []
    assert log.append([rec("next")]).first_offset == 24


@pytest.mark.parametrize(
    "state", [None, PartitionState(log_start_offset=3, thinned_offset=24)], ids=["gone", "made again"]
)
def test_without_segments_and_their_list_the_log_start_stays_and_the_loss_is_kept(state: PartitionState | None) -> None:
    fs, _ = filled()
    for base in (0, 6, 12, 18):
        fs.unlink(path(base))
    start = 0
    if state is None:
        fs.unlink(STATE)
    else:
        write_state(fs, STATE, state)
        start = state.log_start_offset
    plan, log = salvage(fs, state=state)
    assert ranges(plan.losses) == [(start, 24)]
    assert log.log_start_offset == start
    assert log.append([rec("next")]).first_offset == 24
    log.close()
    left = read_state(fs, STATE)
    assert left is not None
    assert ranges(left.losses) == [(start, 24)]


def test_batches_in_the_wrong_file_are_put_where_they_belong() -> None:
    fs, rows = filled()
    files = directory_bytes(fs)
    put(fs, path(6), files[f"{12:020d}.log"])
    put(fs, path(12), files[f"{6:020d}.log"])
    plan, log = salvage(fs)
    assert plan.losses == ()
    assert contents(log) == rows


@pytest.mark.parametrize("base", [0, 6, 18])
def test_without_a_list_a_segment_that_was_swapped_with_the_empty_last_one_comes_back(base: int) -> None:
    """In a compacted topic the gap that it leaves looks as if it were compacted."""
    fs, rows = filled()
    put(fs, path(24), directory_bytes(fs)[f"{base:020d}.log"])
    put(fs, path(base), b"")
    fs.unlink(STATE)
    state = PartitionState(first_dirty_offset=24, thinned_offset=24)
    partition = replace(given(fs, state=state), config=replace(CONFIG, cleanup_policy=frozenset({"compact"})))
    plan = plan_salvage(partition)
    assert plan.losses == ()
    carry_out(partition, plan, STATE)
    log = open_log(fs, config=CONFIG, clean=False, long_lived=False, keep_offset=24)
    assert (contents(log), log.log_end_offset) == (rows, 24)


def test_what_compaction_had_taken_from_a_misplaced_file_is_no_loss() -> None:
    fs, rows = filled()
    files = directory_bytes(fs)
    thinned = files[f"{6:020d}.log"]
    put(fs, path(6), files[f"{12:020d}.log"])
    put(fs, path(12), thinned[:100] + thinned[200:])  # offsets 8 and 9 were superseded
    plan, log = salvage(fs, state=PartitionState(thinned_offset=18))
    assert plan.losses == ()
    assert contents(log) == without(rows, (8, 10))


def test_what_nobody_misses_behind_the_committed_end_is_no_damage() -> None:
    """Such bytes were never published, whatever they are; the next append cuts them."""
    fs, rows = filled()
    files = directory_bytes(fs)
    write(fs, path(18), files[f"{6:020d}.log"], len(files[f"{18:020d}.log"]))
    plan = plan_salvage(given(fs))
    assert not plan.damages
    assert not plan.quarantine
    assert not plan.changes
    log = open_log(fs, config=CONFIG, clean=False, long_lived=False, keep_offset=24)
    assert contents(log) == rows


def test_a_misplaced_batch_that_begins_below_the_log_start_comes_back() -> None:
    fs, rows = filled()
    state = read_state(fs, STATE)
    assert state is not None
    write_state(fs, STATE, replace(state, log_start_offset=3))
    files = directory_bytes(fs)
    put(fs, path(0), files[f"{6:020d}.log"])
    put(fs, path(6), files[f"{0:020d}.log"])
    plan, log = salvage(fs)
    assert plan.losses == ()
    assert contents(log) == [row for row in rows if row[0] >= 3]


def test_an_offset_that_lies_is_found_though_the_next_batch_is_damaged() -> None:
    fs, rows = filled()
    write(fs, path(0), struct.pack(">q", 4), 0)  # claims 4 and 5
    write(fs, path(0), b"\xff" * 30, 130)
    plan, log = salvage(fs)
    assert ranges(plan.losses) == [(0, 4)]
    assert contents(log) == without(rows, (0, 4))


def test_a_batch_inside_a_damaged_records_value_is_not_taken_for_a_batch_of_the_log() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append([rec("one")])
    inner = struct.pack(">q", 2) + sized_batch(80)[8:]  # intact, at an offset that would do
    log.append([rec(inner.decode("latin-1"))])
    log.append([rec("three")])
    log.append([rec("four")])
    end = log.segments[0].find_batch(1)
    assert end is not None
    log.close()
    write(fs, path(0), b"\xff", end.end_position - 1)
    partition = given(fs, 4)
    carry_out(partition, plan := plan_salvage(partition), STATE)
    assert ranges(plan.losses) == [(1, 2)]
    assert [row[2] for row in contents(open_log(fs, clean=False))] == [b"one", b"three", b"four"]


def test_without_a_list_gaps_of_a_topic_that_is_never_compacted_are_losses() -> None:
    fs, rows = filled()
    fs.unlink(path(12))
    fs.unlink(STATE)
    plan, log = salvage(fs, state=None)
    assert ranges(plan.losses) == [(12, 18)]
    assert contents(log) == without(rows, (12, 18))


def test_without_a_list_earlier_losses_come_from_the_reasons_in_quarantine() -> None:
    fs, rows = filled()
    write(fs, path(6), b"\xff" * 20, 120)
    _, log = salvage(fs)
    log.close()
    fs.unlink(STATE)
    known = reasons([fs.files()[f"{DIRECTORY}/quarantine/000001/reason.json"]])
    plan, log = salvage(fs, state=None, known_losses=known)
    assert plan.losses == ()
    assert contents(log) == without(rows, (8, 10))
    log.close()
    state = read_state(fs, STATE)
    assert state is not None
    assert ranges(state.losses) == [(8, 10)]


def test_what_is_missing_is_looked_for_below_the_log_start_too() -> None:
    """A deleted segment's file is still there, and holds what belongs into another."""
    fs, rows = filled()
    state = read_state(fs, STATE)
    assert state is not None
    write_state(fs, STATE, replace(state, log_start_offset=8))
    first, third = (directory_bytes(fs)[f"{base:020d}.log"] for base in (0, 12))
    put(fs, path(0), third)
    put(fs, path(12), first)
    plan, log = salvage(fs)
    assert plan.losses == ()
    assert contents(log) == [row for row in rows if row[0] >= 8]


def test_an_emptied_segment_that_was_overwritten_has_lost_nothing() -> None:
    """Compaction leaves empty segments; the list says so, whatever bytes turn up in one."""
    fs, rows = filled()
    state = read_state(fs, STATE)
    assert state is not None
    emptied = tuple(replace(entry, size_bytes=0) if entry.base_offset == 6 else entry for entry in state.segments)
    write_state(fs, STATE, replace(state, segments=emptied, first_dirty_offset=12, thinned_offset=12))
    put(fs, path(6), directory_bytes(fs)[f"{18:020d}.log"])
    plan, log = salvage(fs)
    assert plan.losses == ()
    assert [damage.reason for damage in plan.damages] == ["what it holds belongs to another segment"]
    assert contents(log) == without(rows, (6, 12))


def thinned_to_its_first_batch(log_start_offset: int) -> tuple[SimulatedFileSystem, list[Row]]:
    """Compaction left offsets 0 and 1 of the first segment, 100 bytes of 300."""
    fs, rows = filled()
    state = read_state(fs, STATE)
    assert state is not None
    entries = tuple(replace(entry, size_bytes=100) if entry.base_offset == 0 else entry for entry in state.segments)
    thinned = {"first_dirty_offset": 12, "thinned_offset": 12, "log_start_offset": log_start_offset}
    write_state(fs, STATE, replace(state, segments=entries, **thinned))  # type: ignore[arg-type]
    put(fs, path(0), directory_bytes(fs)[f"{0:020d}.log"][:100])
    return fs, [row for row in without(rows, (2, 6)) if row[0] >= log_start_offset]


@pytest.mark.parametrize("kept", [61, 83, 99])
@pytest.mark.parametrize(("start", "lost"), [(0, [(0, 2)]), (1, [(1, 2)]), (2, []), (3, [])])
def test_a_torn_batch_that_was_its_segments_last_costs_no_offset_behind_it(
    start: int, lost: list[tuple[int, int]], kept: int
) -> None:
    """The header ends where the list says the file ended, so no batch came after it."""
    fs, rows = thinned_to_its_first_batch(start)
    put(fs, path(0), directory_bytes(fs)[f"{0:020d}.log"][:kept])
    plan, log = salvage(fs)
    assert ranges(plan.losses) == lost
    assert [(each.position, each.size_bytes) for each in plan.damages] == [(0, kept)]
    assert contents(log) == without(rows, *lost)


@pytest.mark.parametrize(
    ("kept", "position", "lie"),
    [
        (60, 0, b""),  # too little of the header is left
        (83, 8, struct.pack(">i", 87)),  # shorter than the list says: another batch may have come after it
        (83, 8, struct.pack(">i", 89)),
        (83, 23, struct.pack(">i", 0)),  # fewer offsets than records
        (83, 57, struct.pack(">i", 0)),  # no record, but bytes of some
        (83, 23, struct.pack(">i", 9)),  # offsets of the next segment
    ],
)
def test_a_torn_batch_whose_header_does_not_fit_may_have_cost_all_of_its_segment(
    kept: int, position: int, lie: bytes
) -> None:
    fs, rows = thinned_to_its_first_batch(0)
    write(fs, path(0), lie, position)
    put(fs, path(0), directory_bytes(fs)[f"{0:020d}.log"][:kept])
    plan, log = salvage(fs)
    assert [(each.base_offset, each.end_offset, each.at_most) for each in plan.losses] == [(0, 6, True)]
    assert contents(log) == without(rows, (0, 6))


def test_where_compaction_has_not_been_a_torn_batch_cost_all_of_its_segment_whatever_it_says() -> None:
    fs, _ = filled()
    write(fs, path(6), struct.pack(">i", 0), 223)  # one offset
    write(fs, path(6), struct.pack(">i", 1), 257)  # one record
    put(fs, path(6), directory_bytes(fs)[f"{6:020d}.log"][:283])
    assert ranges(plan_salvage(given(fs)).losses) == [(10, 12)]


@pytest.mark.parametrize("bases", [(0, 7, 14, 20), (0, 6, 8, 18), (0, 6, 12, 18, 21)])
def test_a_list_of_another_partition_is_recognised(bases: tuple[int, ...]) -> None:
    fs, _ = filled()
    assert not has_wrong_list(given(fs))
    fs.unlink(path(6))
    assert not has_wrong_list(given(fs)), "a segment is missing, nothing more"
    fs, _ = filled()
    wrong = PartitionState(segments=tuple(SegmentEntry(base, 300, -1) for base in bases))
    assert has_wrong_list(given(fs, state=wrong))
    fs.unlink(path(12))
    fs.unlink(path(18))
    assert has_wrong_list(
        given(fs, state=PartitionState(segments=(SegmentEntry(0, 300, -1), SegmentEntry(4, 300, -1))))
    )


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_every_step_can_be_the_last(power: bool, seed: int) -> None:
    rng = random.Random(seed)
    start, rows = filled()
    write(start, path(0), b"\xff" * 50, 120)
    write(start, path(6), b"\xff" * 150, 70)
    start.unlink(path(12))
    put(start, path(18), directory_bytes(start)[f"{18:020d}.log"][:150])
    start.fsync_dir(DIRECTORY)
    lost = [(2, 4), (6, 12), (12, 18), (20, 24)]
    whole = start.kill()
    before = whole.operations
    salvage(whole)
    steps = whole.operations - before
    for step in range(steps):
        fs = start.kill()
        fs.fail_after(step)
        with pytest.raises(PowerCut):
            salvage(fs)
        survivor = fs.crash(random.Random(rng.random())) if power else fs.kill()
        _, log = salvage(survivor)
        assert contents(log) == without(rows, *lost), f"step {step} of {steps}, DURAMEN_SEED={seed}"
        log.close()
        state = read_state(survivor, STATE)
        assert state is not None
        found = [offset for each in state.losses for offset in range(each.base_offset, each.end_offset)]
        assert found == [offset for low, high in lost for offset in range(low, high)], f"step {step}"
        assert not any(name.endswith((".cleaned", ".swap")) for name in survivor.listdir(DIRECTORY))


class _Refound:
    """The batches of an untouched copy of the log."""

    name = "quarantine"

    def __init__(self, fs: SimulatedFileSystem, source: str) -> None:
        self._fs, self._source = fs, source

    def pieces(self, low: int, high: int) -> list[Piece]:
        file = self._fs.open(self._source)
        found = [
            Piece(self._source, b.position, b.end, b.first_offset, b.end_offset)
            for b in intact_batches(file, limits=DEFAULT_LIMITS)
        ]
        return [each for each in found if low <= each.first_offset and each.end_offset <= high]


@pytest.mark.parametrize("power", [True, False])
def test_a_loss_stays_written_down_until_it_is_put_back_whatever_step_is_the_last(power: bool, seed: int) -> None:
    rng = random.Random(seed)
    start, rows = filled()
    good = f"{DIRECTORY}/good"
    put(start, good, directory_bytes(start)[f"{6:020d}.log"])
    write(start, path(6), b"\xff" * 20, 120)
    salvage(start)[1].close()
    start.fsync_dir(DIRECTORY)

    def put_back(fs: SimulatedFileSystem) -> None:
        partition = given(fs)
        plan = plan_salvage(partition, [_Refound(fs, good)])
        if plan.changes:
            carry_out(partition, plan, STATE)

    def lost(fs: SimulatedFileSystem) -> list[tuple[int, int]]:
        state = read_state(fs, STATE)
        assert state is not None
        return ranges(state.losses)

    assert lost(start) == [(8, 10)]
    whole = start.kill()
    before = whole.operations
    put_back(whole)
    assert lost(whole) == []
    steps = whole.operations - before
    for step in range(steps):
        fs = start.kill()
        fs.fail_after(step)
        with pytest.raises(PowerCut):
            put_back(fs)
        survivor = fs.crash(random.Random(rng.random())) if power else fs.kill()
        log = open_log(survivor, config=CONFIG, clean=False, long_lived=False, keep_offset=24)
        missing = [row for row in rows if row not in contents(log)]
        log.close()
        covered = {offset for low, high in lost(survivor) for offset in range(low, high)}
        assert {row[0] for row in missing} <= covered, f"step {step} of {steps}, DURAMEN_SEED={seed}"
        put_back(survivor)
        log = open_log(survivor, config=CONFIG, clean=False, long_lived=False, keep_offset=24)
        assert (contents(log), lost(survivor)) == (rows, []), f"step {step} of {steps}, DURAMEN_SEED={seed}"
        log.close()
