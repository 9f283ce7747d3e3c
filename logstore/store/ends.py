"""A topic's `ends`: the applied sequence, and of each partition the high watermark, last stable offset, recovery point.

Changed under the topic's lease, as a whole file. Readers take the high watermark from here before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from logstore.errors import CorruptState
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.store.sealed import Parsed, read_sealed_bytes, unseal, whole_number, whole_numbers, write_sealed

VERSION = 1


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
        return _parse(data, path, partitions)
    return parsed.of((path, partitions), data, lambda data: _parse(data, path, partitions))


def _parse(data: bytes, path: str, partitions: int) -> TopicEnds:
    document = unseal(data, version=VERSION, file=path)
    ends = TopicEnds(
        high_watermarks=whole_numbers(document, "high_watermarks", file=path),
        last_stable_offsets=whole_numbers(document, "last_stable_offsets", file=path),
        recovery_points=whole_numbers(document, "recovery_points", file=path),
        applied_sequence=whole_number(document, "applied_sequence", file=path),
        flushed_sequence=whole_number(document, "flushed_sequence", file=path),
    )
    counts = {len(ends.high_watermarks), len(ends.last_stable_offsets), len(ends.recovery_points)}
    if len(counts) != 1 or max(counts) > partitions:
        raise CorruptState(f"holds {max(counts)} partitions, the topic has {partitions}", file=path)
    # A topic is widened in its own file first; the new partitions have nothing yet.
    return ends.grown(partitions)


def write_ends(fs: FileSystem, path: str, ends: TopicEnds, *, durable: bool = True) -> None:
    write_sealed(
        fs,
        path,
        {
            "applied_sequence": ends.applied_sequence,
            "flushed_sequence": ends.flushed_sequence,
            "high_watermarks": list(ends.high_watermarks),
            "last_stable_offsets": list(ends.last_stable_offsets),
            "recovery_points": list(ends.recovery_points),
        },
        version=VERSION,
        durable=durable,
    )
