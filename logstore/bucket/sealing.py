"""Sealing: whole commits of a partition become Kafka segments, by one compare-and-set of its manifest.

Commits are replayed in sequence, each with the settings and the clock of its plan, through the append loop of a store
in a directory; so rolls and bytes are the same there and here. The last segment is closed early: objects are not
appended to. Every checksum, count and offset is checked before anything is named. A piece that is damaged does not stop
a partition for ever: its bytes are kept under `quarantine/`, and the log goes on behind it.

Nothing waits for anybody. Whoever finds that others sealed meanwhile has done work for nothing, and deletes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from crc32c import crc32c

from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import check_age
from logstore.bucket.keys import new_nonce, segment_key, staged_quarantine_key
from logstore.bucket.manifest import LOSS_REASON_MAX, Manifest, Segment
from logstore.bucket.manifests import Manifests
from logstore.bucket.plan import PlanPiece
from logstore.bucket.producers import Producers
from logstore.bucket.reader import Looked, PartitionSource, Shelf, aborted_by, leader_epoch, look
from logstore.bucket.replacing import Sealed, SealPlan, plan_seal, seal_segments
from logstore.bucket.rows import TopicRow
from logstore.bucket.scratch import scratch_folder
from logstore.bucket.segment_object import LocalSegment, put_segment
from logstore.bucket.tail import TailCommit, read_placed
from logstore.config import LogConfig
from logstore.directory.state import Loss
from logstore.errors import (
    CorruptBatch,
    CorruptState,
    DamagedLog,
    DuramenError,
    ObjectMissing,
    ObjectStoreUnavailable,
    ObjectTruncated,
    SegmentsChanged,
)
from logstore.files import OS_FILES, FileSystem
from logstore.limits import MIB, Limits
from logstore.objects.objects import Objects
from logstore.partition.appender import place_batches
from logstore.partition.roll import RollReason, jitter_ms
from logstore.segment.batches import Chunk
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings
from logstore.segment.txn_index import AbortedTransaction
from logstore.topic import TopicPartition

MINUTE_MS = 60_000
_PART_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class SealRules:
    """When a tail is sealed, and how much of it at once."""

    #: commits that a tail may have before it is sealed, whatever it holds
    tail_commits: int = 256
    #: how old the oldest unsealed commit may become; never more than the topic's max.compaction.lag.ms
    tail_ms: int = 60 * MINUTE_MS
    #: commits of one seal
    commits_max: int = 1024
    #: whether everything is sealed now
    force: bool = False
    #: whether records whose object is gone are given up: `duramen recover` says so, once somebody agreed
    give_up: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Records of a damaged piece: their offsets, why they could not be read, and where the bytes are kept."""

    partition: TopicPartition
    base_offset: int
    end_offset: int
    reason: str
    quarantine: str | None

    def loss(self, now_ms: int) -> Loss:
        """As the manifest keeps it."""
        return Loss(self.base_offset, self.end_offset, self.reason[:LOSS_REASON_MAX], now_ms)


@dataclass(frozen=True, slots=True)
class SealedPartition:
    """What one seal did."""

    partition: TopicPartition
    from_offset: int
    end_offset: int
    commits: int
    segments: tuple[Segment, ...]
    lost: tuple[Lost, ...] = ()


def why_due(looked: Looked, config: LogConfig, size: Callable[[], int], rules: SealRules, now_ms: int) -> str | None:
    """Why the tail is to be sealed now; None: it can wait. `size` is asked for its bytes where nothing else says."""
    tail = looked.view.tail
    if not tail:
        return None
    if rules.force:
        return "it was asked for"
    if len(tail) >= rules.tail_commits:
        return f"its tail has {len(tail)} commits"
    age_ms = now_ms - tail[0].clock_ms
    if age_ms >= min(rules.tail_ms, config.max_compaction_lag_ms if config.compact else rules.tail_ms):
        return f"its oldest commit is {age_ms // 1000} s old"
    if size() >= config.segment_bytes:
        return "its tail fills a segment"
    return None


@dataclass(slots=True)
class MaintenanceEnvironment:
    """What maintenance of a store's partitions works with. Makes folders below `folder`, and removes them."""

    objects: Objects
    manifests: Manifests
    shelf: Shelf
    folder: str | None = None
    fs: FileSystem = field(default=OS_FILES)

    def scratch(self) -> AbstractContextManager[str]:
        """Raises DiskFull, RetriableError."""
        return scratch_folder(self.folder)


def seal_partition(
    environment: MaintenanceEnvironment, source: PartitionSource, topic_id: str, rules: SealRules, now_ms: int
) -> SealedPartition | None:
    """Seal the tail if it is due; None: it is not, or there is none.

    Raises SegmentsChanged when others sealed meanwhile, DamagedLog where an object that is named is gone.
    """
    looked = look(source)
    if not looked.view.tail or (looked.manifest is not None and looked.manifest.ended):
        return None
    if seal_due(environment, source, looked, rules, now_ms) is None:
        return None
    plan = plan_seal(looked.manifest, looked.rows, source.number, commits_max=rules.commits_max)
    return None if plan is None else _seal(environment, source, topic_id, looked, plan, now_ms, rules.give_up)


def seal_due(
    environment: MaintenanceEnvironment, source: PartitionSource, looked: Looked, rules: SealRules, now_ms: int
) -> str | None:
    """Why the tail is to be sealed now, by the settings of its newest commit; None: it can wait."""
    if not looked.view.tail:
        return None
    if rules.force:  # whatever became of the plan that has the settings
        return "it was asked for"
    newest = looked.view.tail[-1]
    topic_plan = _commit(environment, newest, looked.manifest, source.number).topic
    return why_due(looked, topic_plan.log_config(), lambda: tail_bytes(environment, looked, source), rules, now_ms)


def tail_bytes(environment: MaintenanceEnvironment, looked: Looked, source: PartitionSource) -> int:
    """Bytes of the batches that are not sealed; a request for each plan that was not read yet."""
    return sum(size_of(commit) for commit in tail_commits(environment, looked, source))


def tail_commits(environment: MaintenanceEnvironment, looked: Looked, source: PartitionSource) -> list[TailCommit]:
    """The same, commit by commit."""
    return [_commit(environment, row, looked.manifest, source.number) for row in looked.view.tail]


def size_of(commit: TailCommit) -> int:
    """Bytes of the commit's batches."""
    return sum(piece.size_bytes for piece, _ in commit.pieces())


def _commit(environment: MaintenanceEnvironment, row: TopicRow, manifest: Manifest | None, number: int) -> TailCommit:
    assert row.plan is not None
    return TailCommit.of(environment.shelf.plans.get(row.plan), row, number, leader_epoch(manifest))


def _seal(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    topic_id: str,
    looked: Looked,
    plan: SealPlan,
    now_ms: int,
    give_up: bool,
) -> SealedPartition:
    made = Elapsed()
    with environment.scratch() as directory:
        log = SealedLog(environment.fs, directory, source.partition, plan.from_offset, environment.shelf.limits)
        log.leader_epoch = leader_epoch(looked.manifest)
        before = looked.manifest
        producers = Producers(before.producer_snapshot if before else b"")
        lost: list[Lost] = []
        for row in plan.rows:
            try:
                commit = _commit(environment, row, looked.manifest, source.number)
            except (ObjectMissing, CorruptState) as error:
                if not give_up:
                    raise
                lost.append(_without_plan(source, log, row, error))
                continue
            lost += _replay(environment, source, log, commit, producers if row.transactions else None, give_up)
            for aborted in aborted_by(row, source.number):
                log.note_aborted(aborted)
        segments = tuple(
            put_segment(environment.objects, LocalSegment(environment.fs, directory, entry.base_offset), entry)
            for entry in log.finish(topic_id, source.number)
        )
    epochs = before.leader_epochs if before and before.leader_epochs else ((0, plan.from_offset),)
    sealed = Sealed(segments, producers.snapshot(), epochs, tuple(each.loss(now_ms) for each in lost))
    environment.manifests.change(
        topic_id,
        source.number,
        lambda seen, now_ms, nonce: seal_segments(seen, plan, sealed, now_ms=now_ms, nonce=nonce),
        outputs=[segment.key for segment in segments],
        check=lambda: check_age(made.ms()),
    )
    return SealedPartition(source.partition, plan.from_offset, plan.end_offset, len(plan.rows), segments, tuple(lost))


def _replay(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    log: SealedLog,
    commit: TailCommit,
    producers: Producers | None,
    give_up: bool,
) -> list[Lost]:
    """Append a commit; `producers` of one that ends transactions. With `give_up`, an object that is gone is a loss.

    Raises SegmentsChanged, DamagedLog.
    """
    log.begin(commit)
    lost = []
    for piece, base_offset in commit.pieces():
        try:
            chunk = _read(environment, commit, piece, base_offset)
        except ObjectMissing as error:
            gone = _gone(source, log, error)
            if not give_up or isinstance(gone, SegmentsChanged):
                raise gone from error
            lost.append(Lost(source.partition, base_offset, base_offset + piece.records, error.what, None))
            log.continue_at(base_offset + piece.records)
            continue
        except (CorruptBatch, ObjectTruncated) as error:
            lost.append(_set_aside(environment, source, commit, piece, base_offset, error))
            log.continue_at(base_offset + piece.records)
            continue
        if producers is not None:
            producers.take(chunk, environment.shelf.limits)
        place_batches(log, chunk.data, chunk.table)
    if log.end_offset != commit.end_offset:
        raise DamagedLog(
            f"the batches end at {log.end_offset}, their commit at {commit.end_offset}", partition=source.partition
        )
    return lost


def _without_plan(source: PartitionSource, log: SealedLog, row: TopicRow, error: DuramenError) -> Lost:
    """Nothing of a commit can be found without its plan."""
    base, end = row.base_offsets[source.number], row.end_offsets[source.number]
    log.now_ms = row.clock_ms
    log.continue_at(end)
    return Lost(source.partition, base, end, error.what, None)


def _read(environment: MaintenanceEnvironment, commit: TailCommit, piece: PlanPiece, base_offset: int) -> Chunk:
    """A piece with its offsets. Raises ObjectMissing; CorruptBatch, ObjectTruncated where the object is damaged.

    ObjectStoreUnavailable where it is not, and only what was fetched of it: then nothing may be given up.
    """
    cache, (key, size, crc) = environment.shelf.cache, commit.plan.files[piece.file]
    try:
        return read_placed(cache, commit, piece, base_offset, ahead=cache.limits.ahead_bytes)
    except (CorruptBatch, ObjectTruncated) as error:
        if environment.objects.head(key).size_bytes < size:
            raise
        try:
            if _crc_of(environment.objects, key, size) != crc:
                raise
            return read_placed(cache, commit, piece, base_offset)  # still not sound: it was written like that
        except ObjectTruncated:
            raise ObjectStoreUnavailable(
                f"the object is whole, but answers are cut short: {error.what}", file=key, hint="Try again"
            ) from error


def _crc_of(objects: Objects, key: str, size: int) -> int:
    crc = 0
    for begin in range(0, size, _PART_BYTES):
        (part,) = objects.ranges(key, [(begin, min(begin + _PART_BYTES, size))])
        crc = crc32c(part, crc)
    return crc


def _gone(source: PartitionSource, log: SealedLog, error: ObjectMissing) -> DuramenError:
    manifest = source.manifest()
    if manifest is not None and manifest.sealed_offset > log.base_offset:
        return SegmentsChanged(f"others sealed up to {manifest.sealed_offset}", partition=source.partition)
    return DamagedLog(
        "an object that the ledger names is gone",
        partition=source.partition,
        file=error.file,
        offset=log.end_offset,
        hint="Bring the object back from a backup or an older version of the bucket; `duramen recover` gives it up",
    )


def _set_aside(
    environment: MaintenanceEnvironment,
    source: PartitionSource,
    commit: TailCommit,
    piece: PlanPiece,
    base: int,
    error: DuramenError,
) -> Lost:
    """Keep the bytes of a damaged piece under a name that nothing sweeps."""
    key = commit.plan.files[piece.file][0]
    kept = staged_quarantine_key(commit.topic.topic_id, source.number, base)
    try:
        (data,) = environment.objects.ranges(key, [(piece.position, piece.position + piece.size_bytes)])
    except ObjectTruncated:
        end = min(piece.position + piece.size_bytes, environment.objects.head(key).size_bytes)
        (data,) = environment.objects.ranges(key, [(min(piece.position, end), end)])
    environment.objects.put(kept, (data,))
    return Lost(source.partition, base, base + piece.records, str(error), kept)


@dataclass(slots=True)
class _Finished:
    base_offset: int
    next_offset: int
    largest_timestamp_ms: int
    appended_ms: int
    records: int


class SealedLog:
    """Segments in a local folder that batches are placed into, as a partition of a directory would have them."""

    def __init__(
        self, fs: FileSystem, directory: str, partition: TopicPartition, base_offset: int, limits: Limits
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._limits = limits
        self._partition = partition
        self._config = LogConfig()
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.leader_epoch = 0
        self.now_ms = 0
        #: offsets of the active segment that have no record: damage took it, or they are a marker's
        self._without = 0
        self._finished: list[_Finished] = []
        self._active = self._segment(base_offset)

    @property
    def partition(self) -> TopicPartition:
        return self._partition

    @property
    def config(self) -> LogConfig:
        return self._config

    @property
    def active(self) -> LogSegment:
        return self._active

    @property
    def bases(self) -> list[int]:
        """Of all segments, the active one included."""
        return [*(each.base_offset for each in self._finished), self._active.base_offset]

    def begin(self, commit: TailCommit) -> None:
        """Go by the commit's settings and clock, as if the segment were opened for it. Raises DamagedLog."""
        if commit.base_offset != self.end_offset:
            raise DamagedLog(
                f"a commit that begins at {commit.base_offset}; the log ends at {self.end_offset}",
                partition=self._partition,
                offset=self.end_offset,
            )
        self._config = commit.topic.log_config()
        self.now_ms = commit.now_ms
        if not self._active.size_bytes:
            self._active.close(clean=False)
            self._active = self._segment(self._active.base_offset)
            return
        settings = self._settings(self._active.base_offset)
        self._active.created_ms = settings.created_ms
        self._active.jitter_ms = settings.jitter_ms
        self._active.index_interval_bytes = settings.index_interval_bytes
        for index in (self._active.offset_index, self._active.time_index):
            index.max_entries = settings.index_bytes // index.entry_bytes

    def _settings(self, base_offset: int) -> SegmentSettings:
        jitter = jitter_ms(self._config, str(self._partition), base_offset)
        return SegmentSettings.under(self._config, created_ms=self.now_ms, jitter_ms=jitter)

    def _segment(self, base_offset: int) -> LogSegment:
        return LogSegment(
            self._fs,
            self._directory,
            base_offset,
            settings=self._settings(base_offset),
            writable=True,
            limits=self._limits,
        )

    def continue_at(self, offset: int) -> None:
        """Leave out what is lost."""
        self._without += offset - self.end_offset
        self.end_offset = offset

    def note_aborted(self, aborted: AbortedTransaction) -> None:
        """What was just placed is the marker of this one."""
        self._active.txn_index.append(aborted)
        self._without += 1

    def roll(self, reason: RollReason | None = None) -> None:
        """Close the active segment and begin one at the end."""
        if self._active.base_offset != self.end_offset:
            self._close_active()
        else:
            self._active.close(clean=False)
        self._active = self._segment(self.end_offset)

    def _close_active(self) -> None:
        active = self._active
        active.seal()
        active.close(clean=False)
        records = self.end_offset - active.base_offset - self._without
        self._finished.append(
            _Finished(active.base_offset, self.end_offset, active.largest.timestamp_ms, self.now_ms, records)
        )
        self._without = 0

    def close(self) -> None:
        """Close the active segment's files; it stays the active one."""
        self._active.close()

    def finish(self, topic_id: str, number: int) -> list[Segment]:
        """Close the last segment; the entries of all, without the sizes of their objects."""
        if self._active.base_offset != self.end_offset:
            self._close_active()
        return [
            Segment(
                segment_key(topic_id, number, each.base_offset, new_nonce()),
                each.base_offset,
                each.next_offset,
                largest_timestamp_ms=each.largest_timestamp_ms,
                appended_ms=each.appended_ms,
                records=each.records,
            )
            for each in self._finished
        ]
