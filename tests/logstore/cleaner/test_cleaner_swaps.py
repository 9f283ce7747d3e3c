"""Small groups share a swap: what a swap costs must not be paid for each of ten thousand segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.directory.state import PartitionState
from logstore.errors import CorruptBatch
from logstore.records.record import Record


def many(folder: Path, keys: list[int]) -> Lab:
    """A record a segment, and a last segment that is active."""
    lab = Lab(folder, segment_bytes=120)
    lab.append(*([Record(b"%d" % key, b"v" * 50, NOW_MS)] for key in keys), roll=True)
    return lab


def swaps(before: PartitionState, after: PartitionState) -> int:
    """A swap writes the list twice, and the pass writes it once at its end."""
    return (after.generation - before.generation - 1) // 2


def keys_left(lab: Lab) -> list[bytes | None]:
    return [record.key for record in lab.reader().records(0, lab.end)]


@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_that_change_are_swapped_in_together(tmp_path: Path, threads: int) -> None:
    lab = many(tmp_path, [*range(100), *range(100)])
    before = lab.state
    report = lab.compact(threads=threads)
    assert report.groups_changed == 100
    assert swaps(before, lab.state) == 1
    assert keys_left(lab) == [b"%d" % key for key in range(100)]


def test_a_swap_does_not_reach_across_a_group_that_stays(tmp_path: Path) -> None:
    """A broker that finds a swap half done takes all between the new segments for replaced."""
    lab = many(tmp_path, [1, 2, 3, 9, 4, 5, 1, 2, 3, 4, 5])
    before = lab.state
    report = lab.compact()
    assert report.groups_changed == 5
    assert swaps(before, lab.state) == 2
    assert keys_left(lab) == [b"9", b"1", b"2", b"3", b"4", b"5"]


def test_what_was_done_before_one_failed_is_in(tmp_path: Path) -> None:
    lab = many(tmp_path, list(range(40)))
    lab.compact()
    lab.append(*([Record(b"%d" % key, b"new", NOW_MS)] for key in range(40)), roll=True)
    path = sorted(Path(lab.directory).glob("*.log"))[20]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatch):
        lab.compact(NOW_MS + 1)
    sizes = {entry.base_offset: entry.size_bytes for entry in lab.state.segments}
    assert [sizes[base] for base in range(20)] == [0] * 20
    assert sizes[20] == len(data)


def test_no_more_wait_for_each_other_than_there_is_room_for(tmp_path: Path) -> None:
    lab = many(tmp_path, [*range(10), *range(10)])
    before = lab.state
    lab.compact(swap_bytes=0)
    assert swaps(before, lab.state) == 10
