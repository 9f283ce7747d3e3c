"""Compaction of a partition in a bucket: today's cleaner over a local copy, then one compare-and-set for the pass.

Planning goes by the manifest and the same rules as in a directory. The sources are fetched into a folder of the pass,
the cleaner replaces them there, what it wrote is put under new names, and the manifest takes all of it at once: there
is no pass that is half in. Whoever loses the race deletes nothing; the sweep takes what nobody names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from logstore.bucket.elapsed import Elapsed
from logstore.bucket.files import SegmentFiles
from logstore.bucket.freeing import check_age
from logstore.bucket.keys import new_nonce, segment_key
from logstore.bucket.manifest import Manifest, Segment
from logstore.bucket.producers import Producers
from logstore.bucket.reader import Looked, PartitionSource, aborted_by, look
from logstore.bucket.replacing import CompactionPass, Group, apply_pass
from logstore.bucket.sealing import MaintenanceEnvironment
from logstore.bucket.segment_object import LocalSegment, fetch_segment, part_spans, put_segment
from logstore.cleaner.cleaner import plan_pass, run_pass
from logstore.cleaner.eligibility import Cleanable, CleanerFacts, Looks, SegmentAge, cleanable
from logstore.cleaner.engine import Engine, LocalEngine
from logstore.cleaner.topic_rules import options_of, recompress_codec_id, rules_of
from logstore.cleaner.work import Cleaned, LogToClean, PassReport
from logstore.config import LogConfig
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.errors import DiskFull, SegmentsChanged, is_disk_full
from logstore.files import FileSystem, replace_file
from logstore.records.header import BatchHeader, read_header
from logstore.records.offset_map import MapSettings
from logstore.records.table import CODEC_MASK
from logstore.segment.names import FileKind, file_name
from logstore.segment.txn_index import encode_entry


@dataclass(frozen=True, slots=True)
class CompactionRules:
    """What a pass goes by, beside the topic's settings."""

    config: LogConfig
    now_ms: int
    map_settings: MapSettings
    forced: bool = False
    bytes_per_second: float = float("inf")
    #: who does the work; local threads by default
    engine: Callable[[FileSystem], Engine] = field(default=LocalEngine)
    stopping: Callable[[Cleaned], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class CompactedPartition:
    """The receipt: what the cleaner did, and the manifest it became part of."""

    report: PassReport
    manifest: Manifest
    put_bytes: int


def plan_compaction(
    environment: MaintenanceEnvironment, source: PartitionSource, looked: Looked, rules: CompactionRules
) -> Cleanable:
    """What can be compacted now, whether it is due and why, or why not. Reads first headers where a rule needs them."""
    return cleanable(
        _facts(looked, rules.config),
        rules_of(rules.config),
        now_ms=rules.now_ms,
        looks=_looks(environment, source, looked, rules.config),
        forced=rules.forced,
    )


def _facts(looked: Looked, config: LogConfig) -> CleanerFacts:
    manifest, view = looked.manifest, looked.view
    state = looked.state()
    same_codec = state.wanted_codec_id == recompress_codec_id(config)
    ages = [SegmentAge(each.base_offset, each.log_bytes, age_ms(each)) for each in view.segments]
    return CleanerFacts(
        segments=(*ages, SegmentAge(view.sealed_offset, int(bool(view.tail)), -1)),
        log_start_offset=view.log_start_offset,
        log_end_offset=view.high_watermark,
        last_stable_offset=view.last_stable_offset,
        first_dirty_offset=manifest.first_dirty_offset if manifest else 0,
        next_horizon_ms=None if state.next_horizon_ms in (None, -1) else state.next_horizon_ms,
        oldest_value_ms=state.oldest_value_ms,
        oldest_other_codec_ms=state.oldest_other_codec_ms if same_codec else None,
    )


def age_ms(segment: Segment) -> int:
    """The time of its newest record; of its last append where no record has one."""
    if segment.largest_timestamp_ms >= 0 or not segment.log_bytes:
        return segment.largest_timestamp_ms
    return segment.appended_ms


def _looks(environment: MaintenanceEnvironment, source: PartitionSource, looked: Looked, config: LogConfig) -> Looks:
    files = SegmentFiles(environment.shelf.cache, source.directory, looked.view.segments)
    by_base = {segment.base_offset: segment for segment in looked.view.segments}
    codec_id = recompress_codec_id(config)

    def first(base_offset: int) -> BatchHeader | None:
        if base_offset not in by_base:
            return None
        file = files.open(os.path.join(source.directory, file_name(base_offset, FileKind.LOG)))
        return read_header(file, 0, file.size())

    def first_timestamp_ms(base_offset: int) -> int:
        header = first(base_offset)
        return -1 if header is None else header.max_timestamp_ms

    def other_codec_ms(base_offset: int) -> int | None:
        header = first(base_offset)
        if header is None or header.attributes & CODEC_MASK == codec_id:
            return None
        return by_base[base_offset].appended_ms

    return Looks(first_timestamp_ms, other_codec_ms)


def compact_partition(
    environment: MaintenanceEnvironment, source: PartitionSource, topic_id: str, rules: CompactionRules
) -> CompactedPartition | None:
    """One pass, if one is due. Raises SegmentsChanged when others replaced what it read; then nothing was changed."""
    looked = look(source)
    if looked.manifest is None or looked.manifest.ended or not rules.config.compact:
        return None
    try:
        found = plan_compaction(environment, source, looked, rules)
        if found.due is None or rules.config.duramen_compaction_paused:
            return None
        return _pass(environment, source, topic_id, (looked, looked.manifest), found, rules)
    except FileNotFoundError as error:
        raise SegmentsChanged("a segment was replaced while it was looked at", file=error.filename) from None
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull(
                f"no space left for the local copy: {error.strerror}",
                file=error.filename,
                hint="The store stands as it was; make room, or set another folder for temporary files",
            ) from error
        raise


def _pass(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    topic_id: str,
    seen: tuple[Looked, Manifest],
    found: Cleanable,
    rules: CompactionRules,
) -> CompactedPartition:
    made = Elapsed()
    looked, manifest = seen
    with environment.scratch() as scratch:
        directory, folder = os.path.join(scratch, "log"), os.path.join(scratch, "run")
        for each in (directory, folder):
            environment.fs.mkdir(each)
        for segment in looked.view.segments:
            if segment.base_offset < found.first_uncleanable_offset:
                fetch_segment(environment.objects, segment, environment.fs, directory)
        _write_aborted(environment, source, looked, found, directory)
        report, state = _clean(environment, source, looked, found, rules, directory)
        groups = _groups(environment, topic_id, source.number, report, looked.view.segments, directory)
    outputs = [output for group in groups for output in group.outputs]
    done = CompactionPass(
        read=tuple(s for s in looked.view.segments if s.base_offset < report.end_offset),
        groups=groups,
        first_dirty_seen=manifest.first_dirty_offset,
        first_dirty_after=state.first_dirty_offset,
        dropped_tombstones=state.dropped_tombstones - manifest.dropped_tombstones,
        next_horizon_ms=state.next_horizon_ms,
        oldest_value_ms=state.oldest_value_ms,
        wanted_codec_id=state.wanted_codec_id,
        oldest_other_codec_ms=state.oldest_other_codec_ms,
        clean_part_plain=state.clean_part_plain,
    )
    after, _ = environment.manifests.change(
        topic_id,
        source.number,
        lambda seen, now_ms, nonce: apply_pass(seen, done, now_ms=now_ms, nonce=nonce),
        outputs=[output.key for output in outputs],
        check=lambda: check_age(made.ms()),
    )
    assert after is not None
    return CompactedPartition(report, after, sum(output.log_bytes for output in outputs))


def _write_aborted(
    environment: MaintenanceEnvironment, source: PartitionSource, looked: Looked, found: Cleanable, directory: str
) -> None:
    """Segments that are not cleaned are there by name only, with their transaction indexes: these tell which of the
    records in front of them were aborted. So do markers in the tail.
    """
    if not looked.state().transactions:
        return
    ended = [aborted for row in looked.view.tail for aborted in aborted_by(row, source.number)]
    beside = {looked.view.sealed_offset: b"".join(map(encode_entry, ended))}
    for segment in looked.view.segments:
        if segment.base_offset >= found.first_uncleanable_offset:
            spans = [part_spans(segment)[FileKind.TXN_INDEX]]
            beside[segment.base_offset] = bytes(environment.objects.ranges(segment.key, spans)[0])
    for base, entries in beside.items():
        for kind, data in ((FileKind.LOG, b""), (FileKind.TXN_INDEX, entries)):
            replace_file(environment.fs, os.path.join(directory, file_name(base, kind)), data, durable=False)


def _clean(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    looked: Looked,
    found: Cleanable,
    rules: CompactionRules,
    directory: str,
) -> tuple[PassReport, PartitionState]:
    """The cleaner's pass in the local folder; what it did, and the state it would have left in a directory."""
    fs, config, limits = environment.fs, rules.config, environment.shelf.limits
    state_path, folder = (
        os.path.join(os.path.dirname(directory), "state"),
        os.path.join(os.path.dirname(directory), "run"),
    )
    state = looked.state()
    write_state(fs, state_path, state)
    log = LogToClean(
        source.partition, directory, state, config, found.first_dirty_offset, found.first_uncleanable_offset
    )
    work = plan_pass(
        fs,
        log,
        now_ms=rules.now_ms,
        map_settings=rules.map_settings,
        producers=Producers(looked.manifest.producer_snapshot if looked.manifest else b"").last_records(rules.now_ms),
        options=options_of(config),
        bytes_per_second=rules.bytes_per_second,
        limits=limits,
    )
    report = run_pass(fs, work, engine=rules.engine(fs), state_path=state_path, folder=folder, swapped=rules.stopping)
    left = read_state(fs, state_path, limits=limits)
    assert left is not None
    return report, left


def _groups(
    environment: MaintenanceEnvironment,
    topic_id: str,
    number: int,
    report: PassReport,
    listed: Iterable[Segment],
    directory: str,
) -> tuple[Group, ...]:
    """Put the outputs of every group that changed."""
    by_base = {segment.base_offset: segment for segment in listed}
    groups = []
    for done in report.cleaned:
        if not done.changed:
            continue
        sources = tuple(by_base[source.base_offset] for source in done.sources)
        ends = [*(output.base_offset for output in done.outputs[1:]), sources[-1].next_offset]
        appended_ms = max(source.appended_ms for source in sources)
        outputs = []
        for output, next_offset in zip(done.outputs, ends, strict=True):
            entry = Segment(
                segment_key(topic_id, number, output.base_offset, new_nonce()),
                output.base_offset,
                next_offset,
                largest_timestamp_ms=output.largest_timestamp_ms,
                appended_ms=appended_ms,
                records=output.records,
            )
            outputs.append(
                put_segment(environment.objects, LocalSegment(environment.fs, directory, output.base_offset), entry)
            )
        groups.append(Group(sources, tuple(outputs)))
    return tuple(groups)
