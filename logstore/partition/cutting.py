"""Ending a log early: what lies after the cut goes to `quarantine/` before it leaves the log.

One folder a recovery. The damaged segment is cut last, so that a crash before that finds the same damage again.
"""

from __future__ import annotations

import os

from logstore.clock import Clock
from logstore.files import FileSystem
from logstore.partition.quarantine import copy_range, new_folder, region_name, write_reason
from logstore.partition.recovery_report import Cut, RecoveryReport
from logstore.segment.names import SEGMENT_KINDS, FileKind
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition

_BLOCK_BYTES = 1 << 20


class LogCutter:
    """Cuts the log in `directory`, and says in `report` what it did."""

    def __init__(
        self, fs: FileSystem, directory: str, partition: TopicPartition, report: RecoveryReport, clock: Clock
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._partition = partition
        self._report = report
        self._clock = clock
        self._folder: str | None = None

    def end_log(self, segments: list[LogSegment], at: int, cut: Cut) -> None:
        """Let the log end in segment `at`, where `cut` says; later segments leave the list, and the log."""
        segment = segments[at]
        self._report.cuts.append(cut)
        end = data_end(segment, cut.position)
        if end > cut.position:
            target = os.path.join(self._quarantine(), region_name(cut.file, cut.position))
            copy_range(self._fs, segment.log, cut.position, end, target)
            self._report.quarantined.append(target)
        for later in segments[at + 1 :]:
            self._move_away(later)
        del segments[at + 1 :]
        if self._folder is not None:
            self._write_reason(self._folder)
            self._fs.fsync_dir(self._folder)
        self._fs.fsync_dir(self._directory)
        segment.cut_bytes(cut.position)
        segment.log.fsync()

    def _quarantine(self) -> str:
        if self._folder is None:
            self._folder = new_folder(self._fs, self._directory)
        return self._folder

    def _move_away(self, segment: LogSegment) -> None:
        """Move a segment after the cut out of the log: its offsets will be used again."""
        keep = data_end(segment, 0) > 0
        segment.close(clean=False)
        for kind in (*SEGMENT_KINDS, FileKind.SNAPSHOT):
            source = segment.path(kind)
            if not self._fs.exists(source):
                continue
            if not keep:
                self._fs.unlink(source)
                self._report.removed.append(source)
                continue
            target = os.path.join(self._quarantine(), os.path.basename(source))
            self._fs.rename(source, target)
            if kind is FileKind.LOG:
                self._report.quarantined.append(target)

    def _write_reason(self, folder: str) -> None:
        cuts = [
            {
                "file": os.path.basename(cut.file),
                "position": cut.position,
                "dropped_bytes": cut.dropped_bytes,
                "reason": cut.reason,
            }
            for cut in self._report.cuts
        ]
        text = {"partition": str(self._partition), "time_ms": self._clock.now_ms(), "cuts": cuts}
        write_reason(self._fs, folder, text)


def data_end(segment: LogSegment, position: int) -> int:
    """Where the zeros at the end of the file begin, at least `position`: they are not worth keeping."""
    end = segment.log.size()
    while position < end:
        size = min(_BLOCK_BYTES, end - position)
        data = segment.log.pread(size, end - size).rstrip(b"\0")
        if data:
            return end - size + len(data)
        end -= size
    return position
