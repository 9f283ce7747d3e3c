"""Offset ranges that were lost to damage, and the arithmetic of ranges.

A loss is written down so that its gap is never taken for compaction. The list of a partition is sorted, its entries do
not overlap, and it never holds offsets below the log start or above the log end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from logstore.directory.state import Loss

Range = tuple[int, int]
#: of one partition; beyond it neighbours are joined, and say "at most"
LOSSES_MAX = 1000


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """The parts of `ranges` that are in none of `taken`."""
    left = [each for each in ranges if each[0] < each[1]]
    for low, high in taken:
        left = [
            part
            for begin, end in left
            for part in ((begin, min(end, low)), (max(begin, high), end))
            if part[0] < part[1]
        ]
    return sorted(left)


def clipped(losses: Iterable[Loss], low: int, high: int) -> tuple[Loss, ...]:
    """The losses within [low, high): a log start hides the others, a truncation frees their offsets."""
    return tuple(
        replace(each, base_offset=max(each.base_offset, low), end_offset=min(each.end_offset, high))
        for each in losses
        if max(each.base_offset, low) < min(each.end_offset, high)
    )


def without(losses: Iterable[Loss], found: Iterable[Range]) -> tuple[Loss, ...]:
    """The losses less what was found again."""
    found = list(found)
    return tuple(
        replace(each, base_offset=begin, end_offset=end)
        for each in losses
        for begin, end in subtract([(each.base_offset, each.end_offset)], found)
    )


def merged(known: Iterable[Loss], more: Iterable[Loss]) -> tuple[Loss, ...]:
    """Both, sorted; what is known already keeps its entry."""
    known = list(known)
    ranges = [(each.base_offset, each.end_offset) for each in known]
    both = sorted([*known, *without(more, ranges)], key=lambda each: each.base_offset)
    while len(both) > LOSSES_MAX:
        at = min(range(len(both) - 1), key=lambda each: both[each + 1].base_offset - both[each].end_offset)
        first, second = both[at : at + 2]
        both[at : at + 2] = [replace(first, end_offset=second.end_offset, at_most=True)]
    return tuple(both)


def lost_offsets(losses: Sequence[Loss]) -> int:
    return sum(each.end_offset - each.base_offset for each in losses)
