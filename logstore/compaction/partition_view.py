"""One partition of a store as planning and metrics see it: by what is listed. Opens no log and changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from logstore.cleaner.cleaner import plan_pass
from logstore.cleaner.eligibility import Cleanable, CleanerFacts, CleanerRules, Lookups, SegmentAge
from logstore.cleaner.topic_rules import options_of, recompress_codec_id, rules_of
from logstore.cleaner.versions import Order
from logstore.cleaner.work import LogToClean, PassWork
from logstore.compaction.budget import Budget, map_settings
from logstore.config import LogConfig
from logstore.directory.state import PartitionState, SegmentEntry
from logstore.records.header import BatchHeader
from logstore.records.table import CODEC_MASK
from logstore.segment.names import FileKind, file_name
from logstore.topics.looking import PartitionLook, first_header
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class PartitionView:
    look: PartitionLook
    config: LogConfig

    @classmethod
    def of(cls, store: ReadableStore, topic: Topic, number: int, config: LogConfig | None = None) -> PartitionView:
        """As it is now; `config` instead of the topic's own answers what-if. Raises CorruptState."""
        return cls(store.look(topic, number), config or store.log_config(topic))

    @property
    def state(self) -> PartitionState:
        return self.look.state

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.state.segments[:-1]) + self.look.active_bytes()

    def rolls_active(self, now_ms: int) -> bool:
        """Whether the active segment is old enough to roll, which only the next append would do."""
        return self.config.compact and self.look.closes(self.config, now_ms)

    def rolled(self) -> PartitionView:
        """With the active segment closed, and none after it yet."""
        return replace(self, look=self.look.rolled())

    def facts(self, *, flushed: bool = False) -> CleanerFacts:
        """What the cleaner's rules decide by; `flushed`: as it will be once it is flushed."""
        state, look = self.state, self.look
        segments = [SegmentAge(s.base_offset, s.size_bytes, self._largest_timestamp_ms(s)) for s in state.segments]
        if segments:
            segments[-1] = replace(segments[-1], size_bytes=look.active_bytes())
        # What was recorded for another codec does not count.
        same_codec = state.wanted_codec_id == recompress_codec_id(self.config)
        return CleanerFacts(
            segments=tuple(segments),
            log_start_offset=state.log_start_offset,
            log_end_offset=look.high_watermark,
            last_stable_offset=look.last_stable_offset,
            first_dirty_offset=state.first_dirty_offset,
            recovery_point=look.high_watermark if flushed else look.recovery_point,
            next_horizon_ms=None if state.next_horizon_ms in (None, -1) else state.next_horizon_ms,
            oldest_value_ms=state.oldest_value_ms,
            oldest_other_codec_ms=state.oldest_other_codec_ms if same_codec else None,
        )

    def rules(self) -> CleanerRules:
        return rules_of(self.config)

    def looks(self) -> Lookups:
        """How the rules look into the partition's files, where they need to."""
        codec_id = recompress_codec_id(self.config)

        def other_codec_ms(base_offset: int) -> int | None:
            header = self._first_header(base_offset)
            if header is None or header.attributes & CODEC_MASK == codec_id:
                return None
            return self._mtime_ms(base_offset)

        return Lookups(self.first_timestamp, other_codec_ms)

    def work(self, found: Cleanable, *, now_ms: int, budget: Budget) -> PassWork:
        """The work of a pass, without what only an open log knows of its producers."""
        config = self.config
        log = LogToClean(
            self.look.partition,
            self.look.directory,
            self.state,
            config,
            found.first_dirty_offset,
            found.first_uncleanable_offset,
        )
        return plan_pass(
            self.look.fs,
            log,
            now_ms=now_ms,
            map_settings=map_settings(budget, Order.of(config)),
            producers={},
            options=options_of(config),
            bytes_per_second=budget.bytes_per_second,
            limits=self.look.limits,
        )

    def first_timestamp(self, base_offset: int) -> int:
        """The largest timestamp of a segment's first batch; -1 when there is none."""
        header = self._first_header(base_offset)
        return -1 if header is None else header.max_timestamp_ms

    def _first_header(self, base_offset: int) -> BatchHeader | None:
        """None when there is no batch, or the segment was replaced since the list was read."""
        return first_header(self.look.fs, self._log_file(base_offset))

    def _largest_timestamp_ms(self, entry: SegmentEntry) -> int:
        """A segment's age: of its newest record, or of its file where no record has a time."""
        if entry.largest_timestamp_ms >= 0 or not entry.size_bytes:
            return entry.largest_timestamp_ms
        found = self._mtime_ms(entry.base_offset)
        return entry.largest_timestamp_ms if found is None else found

    def _mtime_ms(self, base_offset: int) -> int | None:
        """None when the segment was replaced since the list was read."""
        try:
            return self.look.fs.stat(self._log_file(base_offset)).mtime_ms
        except FileNotFoundError:
            return None

    def _log_file(self, base_offset: int) -> str:
        return os.path.join(self.look.directory, file_name(base_offset, FileKind.LOG))
