from __future__ import annotations

import pytest

from logstore.directory.state import Loss, PartitionState, decode_state, encode_state
from logstore.partition.losses import LOSSES_MAX, clipped, lost_offsets, merged, subtract, without


def loss(base: int, end: int, **options: bool) -> Loss:
    return Loss(base, end, "test", 7, **options)


@pytest.mark.parametrize(
    ("ranges", "taken", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(5, 5)], [], []),
        ([(0, 10)], [(10, 20), (-5, 0)], [(0, 10)]),
    ],
)
def test_subtract(ranges: list[tuple[int, int]], taken: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert subtract(ranges, taken) == left


def test_what_is_known_keeps_its_entry_and_nothing_overlaps() -> None:
    both = merged([loss(5, 10)], [loss(0, 7, at_most=True), loss(20, 30)])
    assert both == (loss(0, 5, at_most=True), loss(5, 10), loss(20, 30))
    assert lost_offsets(both) == 20


def test_a_log_start_passes_losses_by_and_what_is_found_again_is_no_loss() -> None:
    assert clipped([loss(0, 10), loss(20, 30)], 5, 25) == (loss(5, 10), loss(20, 25))
    assert clipped([loss(0, 10)], 10, 50) == ()
    assert without([loss(0, 10)], [(2, 4)]) == (loss(0, 2), loss(4, 10))


def test_the_list_is_bounded() -> None:
    many = merged((), [loss(10 * n, 10 * n + 1) for n in range(LOSSES_MAX + 5)])
    assert len(many) == LOSSES_MAX
    assert any(each.at_most for each in many)


def test_losses_are_kept_in_the_state_file() -> None:
    state = PartitionState(losses=(loss(3, 9), loss(12, 13, at_most=True)))
    assert decode_state(encode_state(state)) == state
