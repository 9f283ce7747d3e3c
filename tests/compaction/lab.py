"""A log to compact: appended to, compacted at a time of one's choosing, and read as another process would."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from logstore.cleaner.cleaner import SWAP_BYTES, plan_pass
from logstore.cleaner.eligibility import Cleanable, CleanerFacts, CleanerRules, SegmentAge, cleanable
from logstore.cleaner.filter import LastRecord
from logstore.cleaner.work import CleaningOptions, LogToClean, PassReport, PassWork
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, read_state
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.partition.reader import PartitionReader
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.cleaning import clean_partition
from reference.partition_writer import PartitionWriter

NOW_MS = 1_700_000_000_000


class Lab:
    """One partition; every method opens it and closes it again."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.directory = str(root / "t-0")
        self.state_path = str(root / "state")
        self.folder = str(root / "run")
        os.makedirs(self.directory, exist_ok=True)
        self.partition = TopicPartition("t", 0)
        defaults: dict[str, Any] = {"segment_bytes": 1000, "cleanup_policy": frozenset({"compact"})}
        self.config = LogConfig(**(defaults | config))
        self.clock = ManualClock(NOW_MS)
        self.end = 0
        self.append([])

    def open(self) -> PartitionWriter:
        return PartitionWriter.open(
            self.directory,
            partition=self.partition,
            config=self.config,
            clean=True,
            state_path=self.state_path,
            clock=self.clock,
        )

    def append(self, *batches: Iterable[Record], roll: bool = False, codec_id: int = 0) -> None:
        with self.open() as log:
            for batch in batches:
                records = list(batch)
                if records:
                    log.append(records, codec_id=codec_id)
            if roll:
                log.roll()
            self.end = log.log_end_offset

    @property
    def state(self) -> PartitionState:
        state = read_state(OS_FILES, self.state_path)
        assert state is not None
        return state

    def facts(self) -> CleanerFacts:
        state = self.state
        segments = tuple(SegmentAge(s.base_offset, s.size_bytes, s.largest_timestamp_ms) for s in state.segments)
        return CleanerFacts(
            segments,
            state.log_start_offset,
            self.end,
            self.end,
            state.first_dirty_offset,
            next_horizon_ms=None if state.next_horizon_ms in (None, -1) else state.next_horizon_ms,
            oldest_value_ms=state.oldest_value_ms,
            oldest_other_codec_ms=state.oldest_other_codec_ms,
        )

    def cleanable(self, now_ms: int = NOW_MS, *, forced: bool = False) -> Cleanable:
        rules = CleanerRules(
            self.config.min_cleanable_dirty_ratio, self.config.min_compaction_lag_ms, self.config.max_compaction_lag_ms
        )
        return cleanable(self.facts(), rules, now_ms=now_ms, forced=forced)

    def compact(
        self,
        now_ms: int = NOW_MS,
        *,
        threads: int = 1,
        map_settings: MapSettings | None = None,
        options: CleaningOptions | None = None,
        limits: Limits = DEFAULT_LIMITS,
        swap_bytes: int = SWAP_BYTES,
    ) -> PassReport:
        producers = {}
        if self.state.producers:
            with self.open() as log:
                producers = {producer: LastRecord(*last) for producer, last in log.last_records.items()}
        return clean_partition(
            OS_FILES,
            self.directory,
            partition=self.partition,
            config=self.config,
            state_path=self.state_path,
            first_uncleanable_offset=self.cleanable(now_ms).first_uncleanable_offset,
            now_ms=now_ms,
            map_settings=map_settings or MapSettings(buffer_bytes=1 << 20),
            producers=producers,
            threads=threads,
            folder=self.folder,
            options=options or CleaningOptions(),
            limits=limits,
            swap_bytes=swap_bytes,
        )

    def work(
        self, map_settings: MapSettings, *, now_ms: int = NOW_MS, first_uncleanable_offset: int | None = None
    ) -> PassWork:
        """A pass over all there is, or up to `first_uncleanable_offset`."""
        state = self.state
        first_dirty = max(state.first_dirty_offset, state.log_start_offset)
        end = self.end if first_uncleanable_offset is None else first_uncleanable_offset
        log = LogToClean(self.partition, self.directory, state, self.config, first_dirty, end)
        return plan_pass(OS_FILES, log, now_ms=now_ms, map_settings=map_settings, producers={})

    def reader(self) -> PartitionReader:
        return PartitionReader(
            PartitionPlace(self.directory, self.partition, self.state_path),
            high_watermark=lambda: self.end,
            last_stable_offset=lambda: self.end,
        )

    def records(self, start: int = 0) -> list[Record]:
        return list(self.reader().records(start))

    def reconfigure(self, **config: Any) -> None:
        self.config = replace(self.config, **config)
