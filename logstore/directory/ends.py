"""A topic's `ends`: the applied sequence, and of each partition the high watermark, last stable offset, recovery point.

Changed under the topic's lease, as a whole file. Readers take the high watermark from here before anything else. After
a commit to several topics the one that is published first also says how far the others are (`joint`), until they are
published themselves; see `visibility`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from logstore.directory.sealed import (
    Parsed,
    read_sealed,
    read_sealed_bytes,
    unseal,
    whole_number,
    whole_numbers,
    write_sealed,
)
from logstore.directory.state import topic_id_of
from logstore.errors import CorruptState
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits

VERSION = 1


@dataclass(frozen=True, slots=True)
class JointEnds:
    """How far another topic is by a commit that both have: everything up to here is in its logs."""

    sequence: int
    end_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicEnds:
    high_watermarks: tuple[int, ...]
    #: where a read_committed reader must stop: the high watermark, or the first offset of an open transaction
    last_stable_offsets: tuple[int, ...]
    recovery_points: tuple[int, ...]
    #: the last commit of the ledger that is in the logs
    applied_sequence: int = 0
    #: the last one that is known to be on disk there; the staged files of later ones are the redo log
    flushed_sequence: int = 0
    #: by topic id, of topics that share a commit with this one and may not be published that far yet
    joint: Mapping[str, JointEnds] = field(default_factory=dict)

    def visible(self, *, committed: bool) -> tuple[int, ...]:
        """Where readers of that isolation must stop, by partition."""
        return self.last_stable_offsets if committed else self.high_watermarks

    def advanced(
        self, end_offsets: tuple[int, ...], sequence: int, stable_offsets: Mapping[int, int] | None = None
    ) -> TopicEnds:
        """The ends once the commit with this sequence, which ends there, is applied. `stable_offsets` are those of
        partitions in which it ends transactions.
        """
        stable_offsets = stable_offsets or {}
        # The topic may have been widened since, or be seen as it was before.
        planned = (*end_offsets, *self.high_watermarks[len(end_offsets) :])[: len(self.high_watermarks)]
        watermarks = tuple(max(*pair) for pair in zip(self.high_watermarks, planned, strict=True))
        stable = tuple(
            max(stable_offsets.get(number, old_stable), new if old_stable == old else old_stable)
            for number, (new, old, old_stable) in enumerate(
                zip(watermarks, self.high_watermarks, self.last_stable_offsets, strict=True)
            )
        )
        return replace(self, high_watermarks=watermarks, last_stable_offsets=stable, applied_sequence=sequence)

    @classmethod
    def empty(cls, partitions: int) -> TopicEnds:
        zeros = (0,) * partitions
        return cls(zeros, zeros, zeros)

    def grown(self, partitions: int) -> TopicEnds:
        """The same with partitions added at zero."""
        more = (0,) * (partitions - len(self.high_watermarks))
        return replace(
            self,
            high_watermarks=self.high_watermarks + more,
            last_stable_offsets=self.last_stable_offsets + more,
            recovery_points=self.recovery_points + more,
        )

    def with_partition(
        self, partition: int, *, high_watermark: int, last_stable_offset: int, recovery_point: int
    ) -> TopicEnds:
        return replace(
            self,
            high_watermarks=_put(self.high_watermarks, partition, high_watermark),
            last_stable_offsets=_put(self.last_stable_offsets, partition, last_stable_offset),
            recovery_points=_put(self.recovery_points, partition, recovery_point),
        )


def _put(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def read_ends(
    fs: FileSystem,
    path: str,
    *,
    partitions: int,
    limits: Limits = DEFAULT_LIMITS,
    parsed: Parsed[TopicEnds] | None = None,
) -> TopicEnds:
    """The ends of a topic with that many partitions; all zero while it has no file. Raises CorruptState."""
    try:
        data = read_sealed_bytes(fs, path, limit=limits.side_file_bytes)
    except FileNotFoundError:
        return TopicEnds.empty(partitions)
    if parsed is None:
        return _fitted(_parse(data, path), path, partitions)
    return parsed.of((path, partitions), data, lambda data: _fitted(_parse(data, path), path, partitions))


def stored_ends(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> TopicEnds:
    """The ends as they were written. Raises FileNotFoundError, CorruptState."""
    return _parse(read_sealed_bytes(fs, path, limit=limits.side_file_bytes), path)


def _fitted(ends: TopicEnds, path: str, partitions: int) -> TopicEnds:
    if len(ends.high_watermarks) > partitions:
        raise CorruptState(f"holds {len(ends.high_watermarks)} partitions, the topic has {partitions}", file=path)
    # A topic is widened in its own file first; the new partitions have nothing yet.
    return ends.grown(partitions)


def _parse(data: bytes, path: str) -> TopicEnds:
    document = unseal(data, version=VERSION, file=path)
    _check_owner(document, path)
    ends = TopicEnds(
        high_watermarks=whole_numbers(document, "high_watermarks", file=path),
        last_stable_offsets=whole_numbers(document, "last_stable_offsets", file=path),
        recovery_points=whole_numbers(document, "recovery_points", file=path),
        applied_sequence=whole_number(document, "applied_sequence", file=path),
        flushed_sequence=whole_number(document, "flushed_sequence", file=path),
        joint=_joint(document.get("joint", {}), path),
    )
    counts = {len(ends.high_watermarks), len(ends.last_stable_offsets), len(ends.recovery_points)}
    if len(counts) != 1:
        raise CorruptState("holds lists of different lengths", file=path)
    return ends


def _check_owner(document: Mapping[str, object], path: str) -> None:
    """The ends of another topic would hide records, or cut them."""
    named, owner = document.get("topic_id"), topic_id_of(path)  # older releases did not write it
    if named is not None and owner is not None and named != owner:
        raise CorruptState(f"these are the ends of topic id {named}", file=path)


def _joint(document: object, path: str) -> dict[str, JointEnds]:
    if not isinstance(document, dict):
        raise CorruptState("joint is not an object", file=path)
    joint = {}
    for topic_id, told in document.items():
        if not isinstance(told, dict):
            raise CorruptState(f"joint has no ends for {topic_id}", file=path)
        joint[topic_id] = JointEnds(
            whole_number(told, "sequence", file=path), whole_numbers(told, "end_offsets", file=path)
        )
    return joint


def read_applied_sequence(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> int | None:
    """The sequence alone, of a topic of which no more is known; None when it has no file. Raises CorruptState."""
    try:
        document = read_sealed(fs, path, version=VERSION, limit=limits.side_file_bytes)
    except FileNotFoundError:
        return None
    _check_owner(document, path)
    return whole_number(document, "applied_sequence", file=path)


def write_ends(fs: FileSystem, path: str, ends: TopicEnds, *, durable: bool = True) -> None:
    write_sealed(
        fs,
        path,
        {
            "topic_id": topic_id_of(path),
            "applied_sequence": ends.applied_sequence,
            "flushed_sequence": ends.flushed_sequence,
            "high_watermarks": list(ends.high_watermarks),
            "last_stable_offsets": list(ends.last_stable_offsets),
            "recovery_points": list(ends.recovery_points),
            "joint": {
                topic_id: {"sequence": told.sequence, "end_offsets": list(told.end_offsets)}
                for topic_id, told in ends.joint.items()
            },
        },
        version=VERSION,
        durable=durable,
    )
