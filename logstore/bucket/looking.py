"""A partition in a bucket as planning sees it: the manifest and the ledger at one moment, its objects as files.

The tail stands for the active segment. A seal closes it, by rules of its own; then each of its commits counts as a
segment here, which is what a reader sees of it too.
"""

from __future__ import annotations

from logstore.bucket.reader import BucketReader, Looked, PartitionSource
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules, size_of, tail_commits, why_due
from logstore.config import LogConfig
from logstore.directory.state import SegmentEntry
from logstore.topics.looking import PartitionLook


def look_at(
    environment: MaintenanceEnvironment, source: PartitionSource, looked: Looked, rules: SealRules
) -> PartitionLook:
    """Asks for the plans of the tail only where their sizes are asked for."""
    reader = BucketReader(environment.shelf, source, snapshot=looked)
    log = reader.view(committed=True)

    def active_bytes() -> int:
        return sum(size_of(commit) for commit in tail_commits(environment, looked, source))

    def closed() -> tuple[SegmentEntry, ...]:
        commits = tail_commits(environment, looked, source)
        entries = (SegmentEntry(commit.base_offset, size_of(commit), -1) for commit in commits)
        return (*entries, SegmentEntry(looked.view.high_watermark, 0, -1))

    def closes(config: LogConfig, now_ms: int) -> bool:
        return why_due(looked, config, active_bytes, rules, now_ms) is not None

    def newest_ms() -> int:
        """By when it was committed: the times of its records are read by nobody for this."""
        return looked.view.tail[-1].clock_ms if looked.view.tail else -1

    return PartitionLook(
        source.partition,
        source.directory,
        reader.files,
        looked.state(),
        high_watermark=log.log_end_offset,
        last_stable_offset=log.end_offset,
        recovery_point=log.log_end_offset,  # what is committed is durable
        limits=environment.shelf.limits,
        active_bytes=active_bytes,
        closed=closed,
        newest_ms=newest_ms,
        closes=closes,
        runs=looked.manifest.receipts.runs if looked.manifest else (),
    )
