"""Which neighbouring segments become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from logstore.limits import RELATIVE_OFFSET_MAX


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """A segment as it is before it is cleaned."""

    base_offset: int
    size_bytes: int
    index_bytes: int = 0
    time_index_bytes: int = 0


def group_segments(
    segments: Sequence[SourceSegment],
    *,
    segment_bytes: int,
    segment_index_bytes: int,
    first_uncleanable_offset: int,
) -> list[tuple[SourceSegment, ...]]:
    """Neighbours are joined while log and both indexes fit one segment, and all offsets count from its base.

    Sizes are those before cleaning, and a segment that exceeds a limit alone is a group of its own, as in Kafka.
    """
    groups: list[tuple[SourceSegment, ...]] = []
    group: list[SourceSegment] = []
    size = index = time_index = 0
    for number, segment in enumerate(segments):
        following = segments[number + 1].base_offset if number + 1 < len(segments) else first_uncleanable_offset
        if group and not (
            size + segment.size_bytes <= segment_bytes
            and index + segment.index_bytes <= segment_index_bytes
            and time_index + segment.time_index_bytes <= segment_index_bytes
            and (not segment.size_bytes or following - 1 - group[0].base_offset <= RELATIVE_OFFSET_MAX)
        ):
            groups.append(tuple(group))
            group = []
            size = index = time_index = 0
        group.append(segment)
        size += segment.size_bytes
        index += segment.index_bytes
        time_index += segment.time_index_bytes
    if group:
        groups.append(tuple(group))
    return groups
