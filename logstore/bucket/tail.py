"""The tail of a partition: committed batches that are not sealed yet, with the offsets that their commit gives them.

`place` is the one function that does it, for readers and for the sealer: base offset, leader epoch and, where the topic
wants that, the time of the append; all of that lies outside what a writer's checksum covers, or is summed anew. A piece
is believed only if every batch of it is sound and it holds as many records as the plan says.
A reader sees each commit as a segment of its own, whose bytes are placed as they are asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from logstore.bucket.files import BlockCache, ReadOnlyFile, as_missing_file
from logstore.bucket.plan import BucketPlan, PlanPiece, decode_plan
from logstore.bucket.rows import PlanRef, TopicRow
from logstore.commit.plan import TopicPlan
from logstore.errors import CorruptBatch, CorruptState, DamagedLog
from logstore.limits import INT64_MAX, Limits
from logstore.objects.objects import Objects
from logstore.records import slots
from logstore.records.native import address_of, kernels
from logstore.records.scan import scan_batches
from logstore.records.table import COUNT, LAST_OFFSET, BatchTable
from logstore.segment.batches import Chunk

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NEVER = INT64_MAX // 2
_PLANS_KEPT = 256
_PIECES_KEPT = 4


class Plans:
    """Plans by their key; they never change, so those that were read lately are kept."""

    def __init__(self, objects: Objects, limits: Limits) -> None:
        self._objects = objects
        self._limits = limits
        self._kept: OrderedDict[str, BucketPlan] = OrderedDict()

    def get(self, ref: PlanRef) -> BucketPlan:
        """Raises ObjectMissing, CorruptState."""
        plan = self._kept.pop(ref.key, None)
        if plan is None:
            plan = decode_plan(self._objects.get(ref.key)[0], ref, limits=self._limits)
        self._kept[ref.key] = plan
        while len(self._kept) > _PLANS_KEPT:
            self._kept.popitem(last=False)
        return plan


@dataclass(frozen=True, slots=True)
class TailCommit:
    """What one commit gives one partition."""

    plan: BucketPlan
    topic: TopicPlan
    partition: int
    leader_epoch: int

    @classmethod
    def of(cls, plan: BucketPlan, row: TopicRow, partition: int, leader_epoch: int) -> TailCommit:
        """Raises CorruptState where the plan is not that of the row."""
        topic = plan.plan.topic(row.topic_id)
        if (
            topic is None
            or topic.sequence != row.sequence
            or topic.base_offsets != row.base_offsets
            or topic.end_offsets != row.end_offsets
            or plan.plan.now_ms != row.clock_ms
        ):
            raise CorruptState(f"the plan contradicts row {row.sequence} of topic {row.topic_id}", file=plan_key(row))
        return cls(plan, topic, partition, leader_epoch)

    @property
    def base_offset(self) -> int:
        return self.topic.base_offsets[self.partition]

    @property
    def end_offset(self) -> int:
        return self.topic.end_offsets[self.partition]

    @property
    def now_ms(self) -> int:
        return self.plan.plan.now_ms

    def pieces(self) -> list[tuple[PlanPiece, int]]:
        """Each piece with its base offset."""
        found, offset = [], self.base_offset
        for piece in self.plan.pieces(self.topic.topic_id, self.partition):
            found.append((piece, offset))
            offset += piece.records
        return found

    @property
    def stamps(self) -> bool:
        return self.topic.configs.get("message.timestamp.type") == "LogAppendTime"


def plan_key(row: TopicRow) -> str:
    return row.plan.key if row.plan is not None else ""


def place(commit: TailCommit, piece: PlanPiece, base_offset: int, data: npt.NDArray[np.uint8]) -> BatchTable:
    """Give the batches of a piece their offsets, in place. Raises CorruptBatch where they are not sound."""
    key = commit.plan.files[piece.file][0]
    scan = scan_batches(data)
    if scan.next_position != len(data):
        raise scan.error(file=key, base_position=piece.position)
    table = scan.table
    if int(table[:, COUNT].sum()) != piece.records:
        raise CorruptBatch(
            f"{int(table[:, COUNT].sum())} records in a piece of {piece.records}", file=key, position=piece.position
        )
    if commit.stamps:
        kernels().stamp_append_time(address_of(data), address_of(table), len(table), commit.now_ms)
    block = np.zeros(slots.A_SLOTS, dtype=np.int64)
    block[slots.A_BASE_OFFSET] = block[slots.A_NEXT_OFFSET] = base_offset
    block[slots.A_EPOCH] = commit.leader_epoch
    for never in (
        slots.A_SEGMENT_BYTES,
        slots.A_MAX_SEGMENT_MS,
        slots.A_INDEX_INTERVAL,
        slots.A_INDEX_MAX,
        slots.A_TIME_MAX,
    ):
        block[never] = _NEVER
    placed = kernels().place(address_of(data), address_of(table), 0, len(table), 1, address_of(block))
    if placed != len(table) or int(table[-1, LAST_OFFSET]) + 1 != base_offset + piece.records:
        raise CorruptBatch("a piece whose batches are not dense", file=key, position=piece.position)
    return table


def read_placed(cache: BlockCache, commit: TailCommit, piece: PlanPiece, base_offset: int, *, ahead: int = 0) -> Chunk:
    """A piece with its offsets. One that is not sound is fetched once more: the fault may lie on the way.

    Raises CorruptBatch, ObjectMissing, ObjectTruncated.
    """
    key, size, _ = commit.plan.files[piece.file]
    for is_last in (False, True):
        data = np.empty(piece.size_bytes, dtype=np.uint8)
        cache.read_into(key, size, data.data, piece.position, ahead=ahead)
        try:
            return Chunk(data, place(commit, piece, base_offset, data), piece.position, key)
        except CorruptBatch:
            cache.forget(key)
            if is_last:
                raise
    raise AssertionError("the last attempt returns or raises")


def warm(cache: BlockCache, commits: Sequence[TailCommit]) -> None:
    """Fetch what many partitions need by object: one request each, however many partitions lie in it."""
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for commit in commits:
        for piece, _ in commit.pieces():
            key, size, _crc = commit.plan.files[piece.file]
            spans.setdefault((key, size), []).append((piece.position, piece.position + piece.size_bytes))
    for (key, size), wanted in spans.items():
        cache.warm(key, size, wanted)


class TailFile(ReadOnlyFile):
    """A commit's batches of one partition as a `.log` file."""

    def __init__(self, cache: BlockCache, commit: TailCommit, path: str) -> None:
        super().__init__(path)
        self._cache = cache
        self._commit = commit
        self._pieces = commit.pieces()
        self._starts = [0]
        for piece, _ in self._pieces:
            self._starts.append(self._starts[-1] + piece.size_bytes)
        self._kept: OrderedDict[int, npt.NDArray[np.uint8]] = OrderedDict()

    def pread_into(self, buffer: Buffer, position: int) -> int:
        view = self.view_of(buffer, position)
        done = 0
        while done < len(view):
            number = bisect_right(self._starts, position + done) - 1
            begin = position + done - self._starts[number]
            part = self._placed(number)[begin : begin + len(view) - done]
            view[done : done + len(part)] = part.data
            done += len(part)
        return done

    def _placed(self, number: int) -> npt.NDArray[np.uint8]:
        data = self._kept.get(number)
        if data is None:
            piece, base_offset = self._pieces[number]
            try:
                with as_missing_file(self.path):
                    data = read_placed(self._cache, self._commit, piece, base_offset).data
            except CorruptBatch as error:
                raise DamagedLog(
                    f"a committed batch is damaged: {error.what}",
                    file=error.file,
                    position=error.position,
                    offset=base_offset,
                    hint="Run `duramen maintain`: it keeps a copy of the damaged bytes and goes on behind them",
                ) from error
            self._kept[number] = data
            if len(self._kept) > _PIECES_KEPT:
                self._kept.popitem(last=False)
        return data

    def size(self) -> int:
        return self._starts[-1]

    def close(self) -> None:
        self._kept.clear()
