"""Which leader epoch wrote an offset, as a follower asks."""

from __future__ import annotations

from bisect import bisect_right

from logstore.partition.leader_epochs import LeaderEpochs


def epoch_for_offset(epochs: LeaderEpochs, offset: int) -> int | None:
    """The epoch that wrote `offset`, None below the first known one."""
    found = bisect_right(epochs.entries, offset, key=lambda entry: entry.start_offset)
    return epochs.entries[found - 1].epoch if found else None
