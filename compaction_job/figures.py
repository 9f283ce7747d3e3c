"""One partition at one moment: its size, which part of it is dirty, why it is due or not. Only reads small files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from logstore.cleaner.eligibility import Cleanable, cleanable
from logstore.commit.store_face import Store
from logstore.compaction.failures import SetAside
from logstore.compaction.maintenance import Counted
from logstore.compaction.partition_view import PartitionView
from logstore.compaction.planning import PartitionPlan
from logstore.config import LogConfig
from logstore.directory.state import PartitionState
from logstore.partition.losses import lost_offsets
from logstore.topics.registry import Topic


class Section(Enum):
    """What compaction makes of a segment."""

    CLEAN = "clean"
    DIRTY = "dirty"
    UNCLEANABLE = "uncleanable"
    ACTIVE = "active"


@dataclass(slots=True)
class PartitionFigures:
    """Bytes of a section are those of its segments; together they are the log's."""

    plan: PartitionPlan
    log_start_offset: int
    log_end_offset: int
    segments: int = 0
    size_bytes: int = 0
    by_section: dict[Section, int] = field(default_factory=dict)
    #: counted by compaction where it was, offsets elsewhere
    records: int = 0
    #: False: `records` has offsets of segments that compaction has thinned, or that damage hit, and nobody counted
    records_exact: bool = True
    #: of the segments compaction has counted; None: none was
    keys: int | None = None
    tombstones: int | None = None
    last_record_ms: int | None = None
    lost_offsets: int = 0

    @property
    def uncleanable_bytes(self) -> int:
        """The active segment included."""
        return self.by_section.get(Section.UNCLEANABLE, 0) + self.by_section.get(Section.ACTIVE, 0)


def figures_of(
    store: Store,
    topic: Topic,
    number: int,
    *,
    config: LogConfig,
    now_ms: int,
    counted: Mapping[int, Counted],
    failures: Mapping[tuple[str, int], SetAside],
) -> PartitionFigures:
    """Raises DuramenError, OSError."""
    view = PartitionView.of(store, topic, number, config)
    state, facts = view.state, view.facts(flushed=True)
    found = cleanable(facts, view.rules(), now_ms=now_ms, looks=view.looks())
    sizes = [segment.size_bytes for segment in facts.segments]
    plan = PartitionPlan(
        topic=topic.name,
        topic_id=topic.id,
        partition=number,
        cleanable=found,
        size_bytes=sum(sizes),
        segments=len(sizes),
        rolls_active=view.rolls_active(now_ms),
        paused=config.duramen_compaction_paused,
        compacted=config.compact,
        settings_unknown=topic.settings_unknown,
        set_aside=failures.get((topic.id, number)),
        next_horizon_ms=facts.next_horizon_ms,
        unfinished=state.swap is not None,
    )
    figures = PartitionFigures(plan, state.log_start_offset, facts.log_end_offset, len(sizes), sum(sizes))
    for section, size in zip(sections_of(state, found, compacted=config.compact), sizes, strict=True):
        figures.by_section[section] = figures.by_section.get(section, 0) + size
    _count(figures, state, counted)
    newest = max([*(segment.largest_timestamp_ms for segment in facts.segments), view.look.newest_ms()])
    figures.last_record_ms = newest if newest >= 0 else None
    figures.lost_offsets = lost_offsets(state.losses)
    return figures


def sections_of(state: PartitionState, found: Cleanable, *, compacted: bool) -> list[Section]:
    """Of each segment, oldest first. One that holds the first dirty offset is dirty."""
    bases = [segment.base_offset for segment in state.segments]
    sections = []
    for at, base in enumerate(bases):
        if at + 1 == len(bases):
            sections.append(Section.ACTIVE)
        elif not compacted:
            sections.append(Section.UNCLEANABLE)
        elif bases[at + 1] <= found.first_dirty_offset:
            sections.append(Section.CLEAN)
        else:
            sections.append(Section.DIRTY if base < found.first_uncleanable_offset else Section.UNCLEANABLE)
    return sections


def counted_in(
    state: PartitionState, counted: Mapping[int, Counted], end_offset: int
) -> Sequence[tuple[int, Counted | None]]:
    """Of each segment how many records it holds at most, and the exact counts where compaction has made them."""
    found: list[tuple[int, Counted | None]] = []
    for at, segment in enumerate(state.segments):
        last = at + 1 == len(state.segments)
        known = None if last else counted.get(segment.base_offset)
        if known is not None and known.size_bytes == segment.size_bytes:
            found.append((known.records, known))
            continue
        end = end_offset if last else state.segments[at + 1].base_offset
        found.append((max(end - max(segment.base_offset, state.log_start_offset), 0), None))
    return found


def _count(figures: PartitionFigures, state: PartitionState, counted: Mapping[int, Counted]) -> None:
    each = counted_in(state, counted, figures.log_end_offset)
    known = [counts for _, counts in each if counts is not None]
    figures.records = sum(records for records, _ in each)
    figures.records_exact = not state.losses and all(
        counts is not None or segment.base_offset >= state.first_dirty_offset or not records
        for segment, (records, counts) in zip(state.segments, each, strict=True)
    )
    if known:
        figures.keys = sum(counts.keys for counts in known)
        figures.tombstones = sum(counts.tombstones for counts in known)
