"""The state file of an open log: read when the log is opened, replaced whenever its list or its start changes.

A log without a path has none; that of an export does not need one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from logstore.directory.state import PartitionState, SegmentEntry, read_state, write_state
from logstore.directory.swap import finish_swap
from logstore.directory.unsynced import is_unsynced
from logstore.errors import CorruptState
from logstore.files import FileSystem, make_directory
from logstore.partition.environment import LastKnown, LogEnvironment
from logstore.partition.losses import clipped
from logstore.segment.names import FileKind, parse_file_name
from logstore.segment.segment import LogSegment


class StateFile:
    def __init__(self, directory: str, path: str | None, known: LastKnown, environment: LogEnvironment) -> None:
        """Read it, and finish a replacement of segments that it names. `notes` says when it had to be rebuilt."""
        self.path = path
        self.notes: list[str] = []
        self._fs = fs = environment.fs
        found = None
        if path is not None:
            try:
                found = read_state(fs, path, limits=environment.limits)
            except CorruptState as error:
                self.notes.append(f"state file rebuilt: {error}")
            if found is not None and not known.clean:
                fs.fsync_dir(os.path.dirname(path))  # a killed process may not have: everything after this relies on it
        state = found or _unknown_state(fs, directory, known.log_start_offset)
        if state.swap is not None and path is not None:
            state = finish_swap(fs, directory, path, state)
        #: the segments it listed; none where it cannot be relied on
        self.listed = state.segments if state.swap is None else ()
        self.is_unsynced = path is not None and is_unsynced(fs, path)
        self._state = replace(state, swap=None)  # loading finishes a replacement, or undoes it
        self._short: dict[int, tuple[int, int]] = {}
        # the highest that may stand in a caller's file: it is written there after a flush, and stays when we truncate
        self._told_recovery_point = known.recovery_point

    def corrected(self, known: LastKnown) -> LastKnown:
        """What the caller knows, unless the file knows better."""
        point, point_max = known.recovery_point, self._state.recovery_point_max
        return replace(
            known,
            clean=known.clean and not self.is_unsynced,
            recovery_point=point if point_max is None else min(point, point_max),
            log_start_offset=max(known.log_start_offset, self._state.log_start_offset),
        )

    def check_timestamps(self, segments: Iterable[LogSegment]) -> None:
        """Believe a segment's largest timestamp where list and time index agree; else look into the log.

        Nothing protects an index, and what is taken from it here goes into the list.
        """
        known = {(entry.base_offset, entry.size_bytes, entry.largest_timestamp_ms) for entry in self.listed}
        for segment in segments:
            if (segment.base_offset, segment.size_bytes, segment.largest.timestamp_ms) not in known:
                segment.confirm_largest()

    def keep_sizes(self, short: dict[int, tuple[int, int]]) -> None:
        """What a segment lacks stays in the list, so that readers and `recover` find it: base -> its size, listed."""
        self._short = short

    def _entry(self, segment: LogSegment) -> SegmentEntry:
        there, listed = self._short.get(segment.base_offset, (-1, -1))
        size_bytes = listed if segment.size_bytes == there else segment.size_bytes
        return SegmentEntry(segment.base_offset, size_bytes, segment.largest.timestamp_ms)

    def place(self, *, clean: bool) -> None:
        """Make its folder."""
        folder = None if self.path is None else os.path.dirname(self.path)
        if folder and not (clean and self._fs.exists(folder)):
            make_directory(self._fs, folder)

    def note_recovery_point(self, recovery_point: int) -> None:
        """A caller may have recorded that everything below is on disk."""
        self._told_recovery_point = max(self._told_recovery_point, recovery_point)

    def save(
        self,
        segments: Iterable[LogSegment],
        *,
        log_start_offset: int,
        log_end_offset: int,
        recovery_point: int,
        producers: bool,
        closed: bool,
    ) -> None:
        if self.path is None:
            return
        state = self._state.with_segments(
            tuple(map(self._entry, segments)),
            log_start_offset=log_start_offset,
        )
        self._state = replace(
            state,
            first_dirty_offset=min(max(state.first_dirty_offset, log_start_offset), log_end_offset),
            producers=producers,
            transactions=state.transactions or producers,
            recovery_point_max=None if recovery_point >= self._told_recovery_point else recovery_point,
            closed=closed,
            losses=clipped(state.losses, log_start_offset, log_end_offset),
        )
        write_state(self._fs, self.path, self._state)


def _unknown_state(fs: FileSystem, directory: str, log_start_offset: int) -> PartitionState:
    """Of a log without a state file: anything may have been written to it, and compacted, unless it is new."""
    names = fs.listdir(directory) if fs.exists(directory) else []
    logs = [found for name in names if (found := parse_file_name(name)) is not None and found.kind is FileKind.LOG]
    # Compaction never touches the last segment.
    last_base = max((found.base_offset for found in logs), default=0)
    return PartitionState(log_start_offset=log_start_offset, transactions=bool(logs), thinned_offset=last_base)
