"""The work of one pass over one partition, as plain data that can be sent to another process, and what came of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from logstore.cleaner.filter import Counts, FilterSettings, LastRecord
from logstore.cleaner.grouping import SourceSegment
from logstore.config import LogConfig
from logstore.directory.state import PartitionState
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, Limits
from logstore.records.offset_map import MapSettings
from logstore.topic import TopicPartition

#: what a thread reads and writes at a time: large enough that the fixed cost of a piece does not count
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CleaningOptions:
    """What goes beyond Kafka's rules; off unless the topic asks for it."""

    merge_bytes: int = 0
    #: codec for what is older than `recompress_after_ms`; None: as it was
    recompress_codec_id: int | None = None
    recompress_after_ms: int = 0
    #: 0: forever
    key_ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogToClean:
    """A partition's log as a pass finds it; it is dirty between the two offsets."""

    partition: TopicPartition
    directory: str
    state: PartitionState
    config: LogConfig
    first_dirty_offset: int
    first_uncleanable_offset: int


@dataclass(frozen=True, slots=True)
class PassWork:
    """One pass: the segments from the log start up to the first that must not be touched, and all rules."""

    directory: str
    partition: TopicPartition
    segments: tuple[SourceSegment, ...]
    #: bases of all segments of the log, also those that are not cleaned: their indexes list aborted transactions
    bases: tuple[int, ...]
    first_dirty_offset: int
    first_uncleanable_offset: int
    now_ms: int
    delete_retention_ms: int
    segment_bytes: int
    segment_index_bytes: int
    index_interval_bytes: int
    map_settings: MapSettings
    last_records: Mapping[int, LastRecord] = field(default_factory=dict)
    #: whether there may be transactions: then groups are cleaned one after the other
    has_transactions: bool = True
    #: whether the part below the first dirty offset is known to have none
    clean_part_plain: bool = False
    options: CleaningOptions = field(default_factory=CleaningOptions)
    limits: Limits = DEFAULT_LIMITS
    bytes_per_second: float = float("inf")
    #: a thread reads at most so much at a time, and writes as much
    piece_bytes: int = PIECE_BYTES

    @property
    def dirty(self) -> tuple[SourceSegment, ...]:
        """Segments that hold offsets from the first dirty one on."""
        return tuple(s for s in self.segments if self.following(s) > self.first_dirty_offset)

    @property
    def end_offset(self) -> int:
        """Where the pass ends unless the map is full before."""
        return self.following(self.segments[-1]) if self.segments else self.first_dirty_offset

    def following(self, segment: SourceSegment) -> int:
        """Where the segment after this one begins: one past the last offset it can hold."""
        at = bisect_right(self.segments, segment.base_offset, key=lambda each: each.base_offset)
        return self.segments[at].base_offset if at < len(self.segments) else self.first_uncleanable_offset

    @property
    def expired_before_ms(self) -> int:
        """Records older than this lose their value; 0: none do."""
        return self.now_ms - self.options.key_ttl_ms if self.options.key_ttl_ms else 0

    def filter_settings(self, end_offset: int) -> FilterSettings:
        """The rules of the pass, whose map ends at `end_offset`."""
        return FilterSettings(
            now_ms=self.now_ms,
            delete_retention_ms=self.delete_retention_ms,
            end_offset=end_offset,
            first_uncleanable_offset=self.first_uncleanable_offset,
            last_records=self.last_records,
            expired_before_ms=self.expired_before_ms,
        )


@dataclass(frozen=True, slots=True)
class Indexed:
    """What building the map found; `end_offset` is where the pass ends."""

    end_offset: int
    keys: int
    is_full: bool
    records: int = 0
    keyless: int = 0
    read_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """A segment that was written. `largest_timestamp_ms` is -1 where no record has a time."""

    base_offset: int
    size_bytes: int
    largest_timestamp_ms: int
    records: int


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A group after cleaning. Without outputs nothing was written: the source stands.

    There is one output, but for a group that no longer fits a segment: it was recompressed, or joined, or its
    batches need more index entries than one has room for.
    """

    sources: tuple[SourceSegment, ...]
    outputs: tuple[Output, ...]
    counts: Counts
    read_bytes: int
    #: distinct keys, where that is known
    keys: int | None = None
    #: file time of its youngest source, where batches of it are yet to be recompressed
    other_codec_ms: int | None = None
    seconds: float = 0.0
    worker: str = ""
    #: where its output lies
    folder: str = ""

    @property
    def changed(self) -> bool:
        return bool(self.outputs)

    @property
    def written_bytes(self) -> int:
        return sum(output.size_bytes for output in self.outputs)

    @property
    def segments(self) -> tuple[Output, ...]:
        """What lies in the log afterwards."""
        if self.outputs:
            return self.outputs
        return tuple(Output(s.base_offset, s.size_bytes, -1, self.counts.records) for s in self.sources)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def base_offset(self) -> int:
        return self.sources[0].base_offset


@dataclass(slots=True)
class PassReport:
    """The receipt of a pass over one partition."""

    partition: TopicPartition
    first_dirty_offset: int
    end_offset: int
    first_uncleanable_offset: int
    groups: int = 0
    groups_changed: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    segments_before: int = 0
    segments_after: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    counts: Counts = field(default_factory=Counts)
    map_keys: int = 0
    map_keys_max: int = 0
    map_full: bool = False
    #: the buffer that would be enough for a whole pass, when this one was too small
    map_buffer_wanted: int | None = None
    #: with the present one, how few threads would be enough, if any
    map_threads_wanted: int | None = None
    index_seconds: float = 0.0
    seconds: float = 0.0
    workers: tuple[str, ...] = ()
    cleaned: tuple[Cleaned, ...] = ()

    @property
    def removed(self) -> dict[str, int]:
        return self.counts.removed

    @property
    def next_horizon_ms(self) -> int | None:
        horizon = self.counts.next_horizon_ms
        return None if horizon == INT64_MAX else horizon

    @property
    def oldest_value_ms(self) -> int | None:
        oldest = self.counts.oldest_value_ms
        return None if oldest == INT64_MAX else oldest

    @property
    def oldest_other_codec_ms(self) -> int | None:
        return min((each.other_codec_ms for each in self.cleaned if each.other_codec_ms is not None), default=None)
