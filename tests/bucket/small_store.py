"""A store in a bucket with one topic and a ledger that is a list: for tests of what goes by rows, plans and objects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from crc32c import crc32c

from logstore.bucket.files import BlockCache, CacheLimits
from logstore.bucket.keys import new_nonce, plan_key, staged_key
from logstore.bucket.ledger_mending import carry_out, look_at_ledger
from logstore.bucket.manifests import Manifests
from logstore.bucket.output import ObjectOutput
from logstore.bucket.plan import PlanFile, encode_plan
from logstore.bucket.reader import BucketReader, PartitionSource, Shelf
from logstore.bucket.rows import Kind, PlanRef, TopicRow
from logstore.bucket.sealing import MaintenanceEnvironment, SealedPartition, SealRules, seal_partition
from logstore.bucket.store import BucketStore
from logstore.bucket.tail import Plans
from logstore.clock import ManualClock
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.produce import table_of
from logstore.commit.staging import EncodeOptions, StagedWriter, TopicTarget
from logstore.config import LogConfig
from logstore.limits import DEFAULT_LIMITS
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.records.record import Record
from logstore.topic import TopicPartition
from logstore.topics.registry import Topic

TOPIC = "orders"
TOPIC_ID = "orders-id"
NOW_MS = 1_700_000_000_000


PREFIXES = ("data", "logs", "pages", "manifest", "floors", "pins", "quarantine", "ledger")


def mend_ledger(store: BucketStore, *, dry_run: bool) -> list[str]:
    """Look and carry out; what was done, or would be."""
    repair = look_at_ledger(store)
    if not dry_run:
        carry_out(store, repair)
    return repair.notes


def all_keys(objects: Objects) -> list[str]:
    return [head.key for prefix in PREFIXES for head in objects.list(prefix)]


@dataclass
class SmallStore:
    """`objects` is what the code under test sees; `inner` answers honestly, and has what was written."""

    folder: Path
    configs: dict[str, str] = field(default_factory=dict)
    partitions: int = 1
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS))
    inner: MemoryObjects = None  # type: ignore[assignment]
    objects: Objects = None  # type: ignore[assignment]
    rows: list[TopicRow] = field(default_factory=list)
    files_per_batch: int = 1
    cache: CacheLimits = field(default_factory=lambda: CacheLimits(block_bytes=1 << 12, ahead_bytes=1 << 14))

    def __post_init__(self) -> None:
        self.inner = self.inner or MemoryObjects(self.clock)
        self.objects = self.objects or self.inner
        if not self.rows:
            zeros = (0,) * self.partitions
            self.rows.append(TopicRow(TOPIC_ID, 1, Kind.DEFINED, 1, zeros, zeros, NOW_MS))

    # --- the parts ----------------------------------------------------------------------------------------------

    def manifests(self) -> Manifests:
        return Manifests(self.objects, self.clock.now_ms)

    def shelf(self) -> Shelf:
        return Shelf(BlockCache(self.objects, limits=self.cache), Plans(self.objects, DEFAULT_LIMITS))

    def environment(self) -> MaintenanceEnvironment:
        return MaintenanceEnvironment(self.objects, self.manifests(), self.shelf(), str(self.folder))

    def source(self, number: int = 0) -> PartitionSource:
        partition = TopicPartition(TOPIC, number)
        manifests = self.manifests()
        return PartitionSource(
            partition, number, f"logs/{TOPIC_ID}/{number}", manifests.reading(TOPIC_ID, number), lambda: self.rows
        )

    def topic(self) -> Topic:
        return Topic(TOPIC, TOPIC_ID, self.partitions, dict(self.configs), 1, NOW_MS, keyed=True)

    def reader(self, number: int = 0) -> BucketReader:
        return BucketReader(self.shelf(), self.source(number))

    def seal(self, number: int = 0, rules: SealRules = SealRules(force=True)) -> SealedPartition | None:  # noqa: B008
        return seal_partition(self.environment(), self.source(number), TOPIC_ID, rules, self.clock.now_ms())

    # --- writing ------------------------------------------------------------------------------------------------

    def append(self, table: pa.Table | list[Record], options: EncodeOptions = EncodeOptions()) -> TopicRow:  # noqa: B008
        """One batch, as `files_per_batch` tasks would write it, committed."""
        table = table_of(table) if isinstance(table, list) else table
        config = LogConfig.from_mapping(self.configs)
        target = TopicTarget(TOPIC, TOPIC_ID, self.partitions, config, 1)
        plan_id, now_ms = new_nonce(), self.clock.now_ms()
        rows = -(-table.num_rows // self.files_per_batch)
        files = []
        for task in range(self.files_per_batch):
            part = table.slice(task * rows, rows)
            if part.num_rows:
                files.append(self._stage(target, part, plan_id, task, options))
        newest = self.rows[-1]
        counts = [0] * self.partitions
        for file in files:
            for _, partition, _, records in file.pieces:
                counts[partition] += records
        ends = tuple(base + count for base, count in zip(newest.end_offsets, counts, strict=True))
        sequence, bases = newest.sequence + 1, newest.end_offsets
        topic_plan = TopicPlan(
            TOPIC, TOPIC_ID, self.partitions, 1, dict(self.configs), sequence, bases, ends, sum(counts), 0
        )
        plan = Plan(plan_id, now_ms, tuple(file.key for file in files), (topic_plan,))
        data = encode_plan(plan, files, limits=DEFAULT_LIMITS)
        key = plan_key(plan_id, new_nonce())
        self.inner.put(key, [data])
        ref = PlanRef(key, len(data), crc32c(data), ((TOPIC_ID, sequence),))
        row = TopicRow(TOPIC_ID, sequence, Kind.BATCH, 1, bases, ends, now_ms, ref)
        self.rows.append(row)
        return row

    def _stage(self, target: TopicTarget, part: pa.Table, plan_id: str, task: int, options: EncodeOptions) -> PlanFile:
        output = ObjectOutput(self.inner, staged_key(plan_id, task, new_nonce()))
        writer = StagedWriter(output, options=options, now_ms=self.clock.now_ms())
        for batch in part.to_batches():
            given = batch.column("partition") if "partition" in batch.schema.names else None
            writer.write(target, batch.drop_columns(["partition"]) if given is not None else batch, given)
        staged = writer.finish()
        assert staged.stored is not None
        return PlanFile(staged.name, staged.stored.size_bytes, staged.stored.crc, staged.stored.pieces)

    # --- looking ------------------------------------------------------------------------------------------------

    def log_bytes(self, number: int = 0) -> bytes:
        """The `.log` bytes of all sealed segments."""
        manifest = self.manifests().read(TOPIC_ID, number).manifest
        if manifest is None:
            return b""
        return b"".join(self.inner.get(s.key)[0][: s.log_bytes] for s in manifest.segments)

    def records(self, number: int = 0) -> list[Record]:
        return list(self.reader(number).records(0))

    def copied(self) -> SmallStore:
        """A store of its own with the same content."""
        inner = MemoryObjects(self.clock)
        for key in all_keys(self.inner):
            inner.put(key, [self.inner.get(key)[0]])
        return replace(self, inner=inner, objects=inner, rows=list(self.rows))

    def over(self, objects: Objects) -> SmallStore:
        """The same store through other eyes."""
        return replace(self, objects=objects)


def some_records(rng: random.Random, count: int, *, keys: int = 50, at_ms: int = NOW_MS) -> list[Record]:
    return [
        Record(
            key=f"key-{rng.randrange(keys)}".encode(),
            value=None if rng.random() < 0.1 else rng.randbytes(rng.randrange(1, 200)),
            timestamp_ms=at_ms + rng.randrange(1000),
            headers=(("h", rng.randbytes(3)),) if rng.random() < 0.2 else (),
        )
        for _ in range(count)
    ]
