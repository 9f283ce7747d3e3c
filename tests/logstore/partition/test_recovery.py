from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from logstore.config import LogConfig
from logstore.errors import BufferLimit, CorruptBatch, DamagedLog
from logstore.limits import RELATIVE_OFFSET_MAX, Limits
from logstore.partition.producer_state import AppendOrigin
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import (
    DIRECTORY,
    bases,
    batch,
    contents,
    directory_bytes,
    open_log,
    rec,
    recs,
    sized_batch,
    state_path,
)

CONFIG = LogConfig(segment_bytes=300, index_interval_bytes=50)


def filled(fs: SimulatedFileSystem, batches: int = 10, **options: object) -> PartitionWriter:
    """Batches of 100 bytes and two records, three a segment: bases 0, 6, 12, 18; the log ends at 20."""
    log = open_log(fs, config=CONFIG, **options)  # type: ignore[arg-type]
    for n in range(batches):
        log.append_batches(sized_batch(100, count=2, at_ms=1000 + n), leader_epoch=n // 4)
    return log


def closed(batches: int = 10, **options: object) -> SimulatedFileSystem:
    fs = SimulatedFileSystem()
    filled(fs, batches, **options).close()
    return fs


def recovered(fs: SimulatedFileSystem, **options: object) -> PartitionWriter:
    return open_log(fs, config=CONFIG, clean=False, **options)  # type: ignore[arg-type]


def path(base_offset: int, kind: str = "log") -> str:
    return f"{DIRECTORY}/{base_offset:020d}.{kind}"


def write(fs: SimulatedFileSystem, name: str, data: bytes, position: int = 0) -> None:
    fs.open(name, create=True).pwrite(data, position)


def replace_content(fs: SimulatedFileSystem, name: str, data: bytes) -> None:
    file = fs.open(name, create=True)
    file.truncate(0)
    file.pwrite(data, 0)


# --- clean ------------------------------------------------------------------------------------------------------------


def test_a_clean_reopening_changes_no_file_of_the_log() -> None:
    fs = closed()
    before = directory_bytes(fs)
    log = open_log(fs, config=CONFIG, long_lived=False)
    assert directory_bytes(fs) == before
    report = log.recovery
    assert (report.clean, report.segments_scanned, report.found_damage) == (True, 0, False)
    assert (report.removed, report.rebuilt, report.notes) == ([], [], [])
    assert log.recovery_point == 20
    log.close()
    assert directory_bytes(fs) == before


def test_a_clean_reopening_reads_no_batch_below_the_last_index_entry() -> None:
    fs = closed()
    write(fs, path(6), b"\xff" * 50, 120)  # damage that only a reader meets
    log = open_log(fs, config=CONFIG)
    assert log.log_end_offset == 20
    with pytest.raises((DamagedLog, CorruptBatch)):
        contents(log)


def test_an_unclean_reopening_of_an_intact_log_finds_everything_and_makes_the_same_files() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    log = recovered(fs.kill(), long_lived=False)
    assert not log.recovery.found_damage
    assert (log.recovery.segments_scanned, log.recovery.bytes_scanned) == (4, 1000)
    again = fs.kill()
    survivor = recovered(again, long_lived=False)
    survivor.close()
    rolled = {name: data for name, data in directory_bytes(closed()).items() if not name.startswith(f"{18:020d}")}
    found = directory_bytes(again)
    assert {name: found.get(name) for name in rolled} == rolled


@pytest.mark.parametrize("gone", [(), ("index", "timeindex")])
def test_flushed_segments_that_were_swapped_are_left_as_they_lie(gone: tuple[str, ...]) -> None:
    """Records in front of a segment's base are no offset overflow: splitting it would write over the segment there."""
    fs = closed()
    first, second = directory_bytes(fs)[f"{0:020d}.log"], directory_bytes(fs)[f"{6:020d}.log"]
    replace_content(fs, path(0), second)
    replace_content(fs, path(6), first)
    for kind in gone:
        fs.unlink(path(6, kind))
    damaged = directory_bytes(fs)
    log = recovered(fs, recovery_point=20)
    assert log.recovery.split == []
    log.close()
    logs = {name: data for name, data in directory_bytes(fs).items() if name.endswith(".log")}
    assert logs == {name: data for name, data in damaged.items() if name.endswith(".log")}


def test_only_segments_from_the_recovery_point_on_are_scanned() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    for recovery_point, scanned in ((0, 4), (5, 4), (6, 3), (13, 2), (18, 1), (20, 1), (99, 1)):
        log = recovered(fs.kill(), recovery_point=recovery_point)
        assert log.recovery.segments_scanned == scanned, recovery_point
        assert log.recovery_point == min(recovery_point, 20)
        assert len(contents(log)) == 20


def test_damage_below_the_recovery_point_is_left_for_readers() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    survivor = fs.kill()
    write(survivor, path(0), b"\xff" * 50, 120)
    log = recovered(survivor, recovery_point=6)
    assert not log.recovery.found_damage
    assert log.log_end_offset == 20
    assert len(list(log.records(6))) == 14
    with pytest.raises((DamagedLog, CorruptBatch)):
        contents(log)


def test_an_empty_directory_becomes_an_empty_log() -> None:
    for clean in (True, False):
        fs = SimulatedFileSystem()
        log = open_log(fs, clean=clean, log_start_offset=7)
        assert (bases(log), log.log_start_offset, log.log_end_offset) == ([7], 7, 7)
        log.append(recs(1))
        assert contents(log)[0][0] == 7


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(data: bytearray, at: int) -> None:
    data[at] ^= 0x10


def nonsense(data: bytearray, at: int) -> None:
    data[at : at + 40] = random.Random(at).randbytes(40)[: len(data) - at]


def zeros(data: bytearray, at: int) -> None:
    data[at : at + 40] = bytes(min(40, len(data) - at))


def cut_short(data: bytearray, at: int) -> None:
    del data[at:]


DAMAGES: dict[str, Callable[[bytearray, int], None]] = {
    "flipped bit": flip,
    "nonsense": nonsense,
    "zeros": zeros,
    "short file": cut_short,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("within", [0, 8, 30, 70, 100, 117, 171, 200, 261])
@pytest.mark.parametrize("base", [0, 6, 12])
def test_the_log_ends_before_the_damaged_batch_and_later_segments_are_set_aside(
    damage: Callable[[bytearray, int], None], within: int, base: int
) -> None:
    fs = SimulatedFileSystem()
    rows = contents(filled(fs))
    survivor = fs.kill()
    data = bytearray(directory_bytes(survivor)[f"{base:020d}.log"])
    later = {
        name: found
        for name, found in directory_bytes(survivor).items()
        if base < int(name[:20] if name[0] == "0" else 0)
    }
    before = bytes(data)
    damage(data, within)
    assert bytes(data) != before
    replace_content(survivor, path(base), bytes(data))

    log = recovered(survivor, long_lived=False)
    kept = base + 2 * (within // 100)
    assert contents(log) == rows[:kept]
    assert log.log_end_offset == kept
    (cut,) = log.recovery.cuts
    assert cut.file == path(base)
    assert cut.position == 100 * (within // 100)
    assert cut.dropped_bytes == max(len(data), 0 if damage is not cut_short else 300) - cut.position
    assert log.recovery.dropped_bytes == cut.dropped_bytes
    assert log.recovery.found_damage
    aside = [name.rsplit("/", 1)[1] for name in log.recovery.quarantined]
    assert [name for name in aside if name.endswith(".log")] == [f"{b:020d}.log" for b in (6, 12, 18) if b > base]
    folder = f"{DIRECTORY}/quarantine/000001"
    for name, found in later.items():
        if name.endswith(".log"):
            assert survivor.files()[f"{folder}/{name}"] == found, "set aside untouched"
    tail = bytes(data)[cut.position :].rstrip(b"\0")
    if tail:
        assert survivor.files()[f"{folder}/{base:020d}.log.from-{cut.position}"] == tail
    reason = json.loads(survivor.files()[f"{folder}/reason.json"])
    assert reason["partition"] == "orders-0"
    assert reason["cuts"] == [
        {
            "file": f"{base:020d}.log",
            "position": cut.position,
            "dropped_bytes": cut.dropped_bytes,
            "reason": cut.reason,
        }
    ]
    assert cut.reason
    # the log goes on where it ends, and nothing is found wrong again
    log.append([rec("next")])
    again = recovered(survivor.kill())
    assert contents(again) == [*rows[:kept], (kept, b"k", b"next", rec().timestamp_ms)]
    assert not again.recovery.found_damage


def test_damage_in_the_last_segment_costs_nothing_else() -> None:
    fs = SimulatedFileSystem()
    filled(fs, 11)
    survivor = fs.kill()
    write(survivor, path(18), b"\xff", 170)
    log = recovered(survivor)
    assert log.log_end_offset == 20
    assert [name.rsplit("/", 1)[1] for name in log.recovery.quarantined] == [f"{18:020d}.log.from-100"]


def test_a_second_recovery_with_damage_gets_a_folder_of_its_own() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    survivor = fs.kill()
    write(survivor, path(12), b"\xff", 170)
    recovered(survivor)
    write(survivor, path(6), b"\xff", 170)
    log = recovered(survivor)
    assert log.log_end_offset == 8
    assert survivor.listdir(f"{DIRECTORY}/quarantine") == ["000001", "000002"]
    assert f"{12:020d}.log" in survivor.listdir(f"{DIRECTORY}/quarantine/000002")


def test_offsets_that_do_not_follow_are_damage() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    survivor = fs.kill()
    write(survivor, path(6), struct.pack(">q", 7), 100)  # the second batch claims to begin inside the first
    log = recovered(survivor)
    assert log.log_end_offset == 8
    assert "do not follow" in log.recovery.cuts[0].reason or "contradict" in log.recovery.cuts[0].reason


def test_offsets_that_reach_into_the_next_segment_are_damage() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    survivor = fs.kill()
    write(survivor, path(6), struct.pack(">q", 11), 200)
    log = recovered(survivor)
    assert log.log_end_offset == 10
    assert log.recovery.found_damage


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_any_block_of_nonsense_costs_what_lies_behind_it_and_nothing_before(data: st.DataObject, seed: int) -> None:
    fs = SimulatedFileSystem()
    rows = contents(filled(fs))
    survivor = fs.kill()
    base = data.draw(st.sampled_from((0, 6, 12, 18)))
    size = len(directory_bytes(survivor)[f"{base:020d}.log"])
    position = data.draw(st.integers(0, size))
    block = random.Random(seed).randbytes(data.draw(st.integers(1, 400)))
    before = directory_bytes(survivor)[f"{base:020d}.log"].ljust(position + len(block), b"\0")
    # A batch's own offset and leader epoch lie before its checksum: what hits nothing else cannot be seen.
    assume(
        any(
            old != new and (at % 100 in range(8, 12) or at % 100 >= 16 or at >= size)
            for at, old, new in zip(range(position, size // 100 * 100 + 400), before[position:], block, strict=False)
            if at // 100 == position // 100
        )
    )
    write(survivor, path(base), block, position)
    log = recovered(survivor, long_lived=False)
    whole = base + 2 * (position // 100)
    assert contents(log)[:whole] == rows[:whole]
    assert log.log_end_offset == whole
    assert log.recovery.found_damage
    files = directory_bytes(survivor)
    again = recovered(survivor, long_lived=False)
    assert not again.recovery.found_damage
    assert (again.log_end_offset, contents(again)) == (log.log_end_offset, contents(log))
    assert directory_bytes(survivor) == files, "recovering twice gives the same"


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_sound_batch_above_the_read_buffer_is_not_taken_for_damage() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append(recs(3))
    log.append_batches(sized_batch(50_000))
    before = fs.files()
    with pytest.raises(BufferLimit, match="Raise read_buffer_bytes"):
        open_log(fs.kill(), clean=False, limits=Limits(read_buffer_bytes=10_000))
    survivor = fs.kill()
    assert survivor.files() == before
    assert open_log(survivor, clean=False).log_end_offset == 4


def test_a_damaged_batch_above_the_read_buffer_is_cut() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append(recs(3))
    log.append_batches(sized_batch(50_000))
    survivor = fs.kill()
    write(survivor, path(0), b"\xff", 40_000)
    again = open_log(survivor, clean=False, limits=Limits(read_buffer_bytes=10_000))
    assert again.log_end_offset == 3
    assert again.recovery.found_damage


# --- side files -------------------------------------------------------------------------------------------------------


def idempotent(sequence: int, pid: int = 1, **options: object) -> bytes:
    return batch([rec(str(sequence))], producer_id=pid, producer_epoch=0, base_sequence=sequence, **options)


@pytest.mark.parametrize("clean", [True, False])
def test_a_corrupt_snapshot_is_dropped_and_the_producers_come_from_the_log(clean: bool) -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    for sequence in range(12):
        log.append_batches(idempotent(sequence))
    log.close()
    for name in fs.listdir(DIRECTORY):
        if name.endswith(".snapshot"):
            write(fs, f"{DIRECTORY}/{name}", b"\xff\xff", 10)
    again = open_log(fs, config=CONFIG, clean=clean)
    assert again.append_batches(idempotent(11)).duplicate
    assert again.append_batches(idempotent(12)).first_offset == 12
    assert not again.recovery.found_damage
    if clean:  # otherwise those above the recovery point are not even read
        assert any("snapshot" in note for note in again.recovery.notes)


@pytest.mark.parametrize("clean", [True, False])
def test_without_any_snapshot_the_producers_come_from_the_log(clean: bool) -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    for sequence in range(12):
        log.append_batches(idempotent(sequence))
    log.append_batches(idempotent(0, pid=2, transactional=True))
    log.close()
    for name in fs.listdir(DIRECTORY):
        if name.endswith(".snapshot"):
            fs.unlink(f"{DIRECTORY}/{name}")
    again = open_log(fs, config=CONFIG, clean=clean)
    assert again.append_batches(idempotent(11)).duplicate
    assert again.last_stable_offset == 12


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"0\n9\n0 0\n", b"0\n2\n3 0\n2 5\n"])
def test_leader_epochs_that_cannot_be_read_come_from_the_log(clean: bool, content: bytes) -> None:
    fs = closed()
    assert directory_bytes(fs)["leader-epoch-checkpoint"] == b"0\n3\n0 0\n1 8\n2 16\n"
    replace_content(fs, f"{DIRECTORY}/leader-epoch-checkpoint", content)
    log = open_log(fs, config=CONFIG, clean=clean)
    if content:
        assert any("leader epochs" in note for note in log.recovery.notes)
    if content or not clean:  # an empty file is how a broker leaves one it has cut
        assert directory_bytes(fs)["leader-epoch-checkpoint"] == b"0\n3\n0 0\n1 8\n2 16\n"


@pytest.mark.parametrize("clean", [True, False])
def test_a_corrupt_state_file_is_made_anew_from_the_directory(clean: bool) -> None:
    fs = closed()
    write(fs, state_path(DIRECTORY), b"\xff" * 10, 30)
    log = open_log(fs, config=CONFIG, clean=clean)
    assert any("state file" in note for note in log.recovery.notes)
    assert bases(log) == [0, 6, 12, 18]
    assert len(contents(log)) == 20
    log.close()
    assert open_log(fs, config=CONFIG).recovery.notes == []


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("base", [0, 6, 18])
@pytest.mark.parametrize("kinds", [("index",), ("timeindex",), ("index", "timeindex")])
def test_missing_indexes_are_made_anew(clean: bool, base: int, kinds: tuple[str, ...]) -> None:
    fs = closed()
    before = directory_bytes(fs)
    for kind in kinds:
        fs.unlink(path(base, kind))
    log = open_log(fs, config=CONFIG, clean=clean, long_lived=False)
    assert len(contents(log)) == 20
    assert log.offset_for_timestamp(1003) is not None
    log.close()
    assert {name: data for name, data in directory_bytes(fs).items() if "index" in name} == {
        name: data for name, data in before.items() if "index" in name
    }


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("kind", ["index", "timeindex"])
@pytest.mark.parametrize("content", [b"\xff" * 24, bytes(240), b"\0\0\0", b"\x7f" * 7])
def test_an_index_of_the_active_segment_that_cannot_be_its_own_is_made_anew(
    clean: bool, kind: str, content: bytes
) -> None:
    fs = closed(12)
    before = directory_bytes(fs)
    replace_content(fs, path(18, kind), content)
    log = open_log(fs, config=CONFIG, clean=clean, long_lived=False)
    if clean:
        assert [entry.split(":")[0] for entry in log.recovery.rebuilt] == [path(18, "index")]
    log.close()
    assert {name: data for name, data in directory_bytes(fs).items() if "index" in name} == {
        name: data for name, data in before.items() if "index" in name
    }


def test_the_zero_tail_of_a_killed_process_index_is_not_taken_for_entries() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    survivor = fs.kill()
    assert len(directory_bytes(survivor)[f"{18:020d}.index"]) > 10_000
    log = recovered(survivor, long_lived=False)
    assert log.segments[-1].offset_index.entries == 0
    assert len(directory_bytes(survivor)[f"{18:020d}.index"]) == 0


def test_a_transaction_index_is_made_anew_with_its_segment() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    for pid in range(3):
        log.append_batches(idempotent(0, pid=pid, transactional=True))
        log.append_marker(commit=pid == 1, producer_id=pid, producer_epoch=0)
    log.close()
    before = {name: data for name, data in directory_bytes(fs).items() if name.endswith(".txnindex")}
    assert before
    for name in before:
        replace_content(fs, f"{DIRECTORY}/{name}", b"\xff" * 34)
    again = open_log(fs, config=CONFIG)
    assert {name: data for name, data in directory_bytes(fs).items() if name.endswith(".txnindex")} == before
    assert [record.value for record in again.records(isolation=Isolation.READ_COMMITTED)] == [b"0"]


def test_index_files_without_their_log_and_strays_are_removed() -> None:
    fs = closed()
    for kind in ("index", "timeindex", "txnindex"):
        write(fs, path(3, kind), b"left behind")
    write(fs, path(4, "snapshot"), b"left behind")
    write(fs, f"{DIRECTORY}/leader-epoch-checkpoint.tmp", b"half")
    write(fs, f"{DIRECTORY}/notes.txt", b"not ours")
    log = open_log(fs, config=CONFIG)
    names = set(fs.listdir(DIRECTORY))
    assert not {name for name in names if name.startswith((f"{3:020d}", f"{4:020d}"))}
    assert "leader-epoch-checkpoint.tmp" not in names
    assert "notes.txt" in names
    assert bases(log) == [0, 6, 12, 18]
    assert {name.rsplit("/", 1)[1] for name in log.recovery.removed} >= {f"{3:020d}.index", f"{3:020d}.timeindex"}


def test_damage_in_an_old_segment_does_not_keep_the_log_from_opening() -> None:
    # no snapshot, so the producers are looked for in a segment that recovery does not check
    fs = SimulatedFileSystem()
    filled(fs)
    survivor = fs.kill()
    for name in survivor.listdir(DIRECTORY):
        if name.endswith(".snapshot"):
            survivor.unlink(f"{DIRECTORY}/{name}")
    write(survivor, path(0), b"\xff" * 20, 100)
    survivor.unlink(path(6, "index"))
    log = recovered(survivor, recovery_point=12)
    assert log.log_end_offset == 20
    assert any("incomplete" in note for note in log.recovery.notes)


# --- offsets too far from their base ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_a_segment_whose_offsets_do_not_fit_its_base_is_split(clean: bool) -> None:
    fs = SimulatedFileSystem()
    fs.mkdir(DIRECTORY)
    far = RELATIVE_OFFSET_MAX + 5
    parts = [
        batch(recs(5), base_offset=0),
        batch([rec("aborted")], base_offset=10, producer_id=4, producer_epoch=0, base_sequence=0, transactional=True),
        batch(recs(5), base_offset=far),
        _marker(far + 5),
        batch(recs(2), base_offset=2 * far + 100),
    ]
    write(fs, path(0), b"".join(parts))
    log = open_log(fs, clean=clean)
    assert bases(log) == [0, far, 2 * far + 100]
    assert len(log.recovery.split) == 1
    wanted = [*range(5), 10, *range(far, far + 5), 2 * far + 100, 2 * far + 101]
    assert [row[0] for row in contents(log)] == wanted
    committed = [record.offset for record in log.records(isolation=Isolation.READ_COMMITTED)]
    assert committed == [offset for offset in wanted if offset != 10]
    log.close()
    again = open_log(fs)
    assert [row[0] for row in contents(again)] == wanted
    assert again.recovery.split == []
    assert again.log_end_offset == 2 * far + 102


def _marker(offset: int) -> bytes:
    from logstore.records.control import encode_marker

    made = encode_marker(commit=False, producer_id=4, producer_epoch=0, coordinator_epoch=0, timestamp_ms=5)
    return struct.pack(">q", offset) + made[8:]


def test_replicated_batches_with_gaps_are_recovered_with_their_gaps() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    for base in (0, 10, 20, 35, 50, 65):
        log.append_batches(sized_batch(100, base_offset=base), origin=AppendOrigin.REPLICATION)
    again = recovered(fs.kill())
    assert [row[0] for row in contents(again)] == [0, 10, 20, 35, 50, 65]
    assert not again.recovery.found_damage
