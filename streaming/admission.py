"""The stream reader for Spark 4.2 and newer, where Spark says where the stream is and how much it wants next.

Imports what earlier versions do not have; `streaming.source` picks the reader.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from streaming.columns import ChosenColumn
from streaming.options import ReadOptions
from streaming.ranges import Positions, StreamOffsets, from_stream, limited, stream_start, to_stream
from streaming.source import LogStreamReader


class LimitingStreamReader(LogStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches of at least and at most so many offsets; `availableNow` ends where the log ended when it began."""

    def __init__(self, options: ReadOptions, columns: Sequence[ChosenColumn] = ()) -> None:
        super().__init__(options, columns)
        self._target: Positions | None = None
        #: what `latestOffset` found, for the report of the same trigger
        self._found: Positions | None = None
        #: when a micro-batch was let through last; the first one always is
        self._triggered_ms: int | None = None

    def _check_limits(self) -> None:
        """All of them work."""

    def latestOffset(self, start: StreamOffsets, limit: ReadLimit) -> StreamOffsets:  # type: ignore[override]
        if self._target is None:
            latest = self._found = self._latest()
        else:
            latest = self._target
        begin = stream_start(self.options, from_stream(start), latest)
        # Never back, not even where the log ends before the position because loss is allowed.
        latest = {key: max(end, begin[key]) for key, end in latest.items()}
        if self._waits(sum(latest.values()) - sum(begin.values())):
            return start
        if isinstance(limit, ReadMaxRows):
            latest = limited(begin, latest, limit.max_rows)
        return to_stream(latest)

    def _waits(self, offsets: int) -> bool:
        """Whether there is too little for a micro-batch. What `availableNow` is to read does not wait for more."""
        least = self.options.min_offsets_per_trigger
        if least is None or self._target is not None:
            return False
        now_ms = time.monotonic_ns() // 1_000_000
        is_due = self._triggered_ms is None or now_ms - self._triggered_ms >= self.options.max_trigger_delay_ms
        if offsets < least and not is_due:
            return True
        self._triggered_ms = now_ms
        return False

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self.options.max_offsets_per_trigger
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def reportLatestOffset(self) -> StreamOffsets:
        found, self._found = self._found, None
        return to_stream(self._latest() if found is None else found)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._latest()
