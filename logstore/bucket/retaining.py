"""Retention and deletion of records: the log start rises by one compare-and-set, and segments below it become garbage.

The rules are those of a directory. A segment's newest timestamp is the manifest's, which has a checksum and was found
while every batch was placed or rewritten; no index is asked. The tail is never older than a few seals, so it goes only
where not a byte is to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import check_age
from logstore.bucket.manifest import Manifest
from logstore.bucket.reader import Looked, PartitionSource, look
from logstore.bucket.replacing import raise_log_start
from logstore.bucket.sealing import MaintenanceEnvironment, tail_bytes
from logstore.config import LogConfig
from logstore.errors import OffsetOutOfRange
from logstore.limits import INT64_MAX
from logstore.partition.retention import (
    DeletedRecords,
    LogFacts,
    Retention,
    RetentionPass,
    SegmentFacts,
    policies_of,
    retention_passes,
)


@dataclass(frozen=True, slots=True)
class Expiry:
    """What retention is to go by in one partition: settings, time, and the log above what is sealed."""

    config: LogConfig
    now_ms: int
    high_watermark: int
    tail_bytes: int

    def passes(self, manifest: Manifest | None) -> tuple[RetentionPass, ...]:
        """What goes of the segments that are listed."""
        manifest = manifest or Manifest(0, "")
        segments = [SegmentFacts(each.base_offset, each.log_bytes, each.age_ms) for each in manifest.segments]
        if manifest.sealed_offset < self.high_watermark or not segments:
            segments.append(SegmentFacts(manifest.sealed_offset, self.tail_bytes, INT64_MAX))
        log = LogFacts(tuple(segments), manifest.log_start_offset, self.high_watermark, self.high_watermark)
        return tuple(retention_passes(policies_of(self.config), log, self.now_ms))

    def log_start(self, manifest: Manifest | None) -> int:
        """Where the log begins afterwards."""
        gone = {base for each in self.passes(manifest) for base in each.base_offsets}
        start = manifest.log_start_offset if manifest else 0
        for segment in manifest.segments if manifest else ():
            if segment.base_offset in gone:
                start = max(start, segment.next_offset)
        sealed = manifest.sealed_offset if manifest else 0
        return self.high_watermark if sealed in gone else start


def expiry_of(
    environment: MaintenanceEnvironment, source: PartitionSource, looked: Looked, config: LogConfig, now_ms: int
) -> Expiry:
    view = looked.view
    needs_size = config.delete and config.retention_bytes >= 0 and bool(view.tail)
    return Expiry(config, now_ms, view.high_watermark, tail_bytes(environment, looked, source) if needs_size else 0)


def retain_partition(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    topic_id: str,
    config: LogConfig,
    now_ms: int,
    *,
    dry_run: bool = False,
) -> Retention:
    """Run the topic's retention over one partition; the log start is raised for what goes."""
    made = Elapsed()
    looked = look(source)
    expiry = expiry_of(environment, source, looked, config, now_ms)
    passes: tuple[RetentionPass, ...] = expiry.passes(looked.manifest)
    start = expiry.log_start(looked.manifest)
    if not passes or dry_run or (looked.manifest is not None and looked.manifest.ended):
        return Retention(source.partition, start, passes)

    def change(seen: Manifest | None, since_ms: int, nonce: str) -> Manifest | None:
        nonlocal passes
        passes = expiry.passes(seen)  # of the list as it is now: a pass of compaction may have replaced it
        return raise_log_start(
            seen, expiry.log_start(seen), high_watermark=expiry.high_watermark, now_ms=since_ms, nonce=nonce
        )

    after, _ = environment.manifests.change(topic_id, source.number, change, check=lambda: check_age(made.ms()))
    return Retention(source.partition, after.log_start_offset if after else start, passes)


def delete_records(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    topic_id: str,
    *,
    before_offset: int | None,
    dry_run: bool = False,
) -> DeletedRecords:
    """Raise the log start to `before_offset` (None: to the high watermark).

    Raises OffsetOutOfRange beyond the high watermark, SegmentsChanged for a topic that has ended.
    """
    made = Elapsed()
    looked = look(source)
    start, end = looked.view.log_start_offset, looked.view.high_watermark
    target = end if before_offset is None else before_offset
    if not 0 <= target <= end:
        raise OffsetOutOfRange(
            f"cannot delete up to {target}: the high watermark is {end}", partition=source.partition, offset=target
        )
    if dry_run:
        return DeletedRecords(source.partition, start, max(start, target))
    after, _ = environment.manifests.change(
        topic_id,
        source.number,
        lambda seen, now_ms, nonce: raise_log_start(seen, target, high_watermark=end, now_ms=now_ms, nonce=nonce),
        check=lambda: check_age(made.ms()),
    )
    return DeletedRecords(source.partition, start, after.log_start_offset if after else start)
