"""What can be kept of a damaged partition, as a plan: damage costs the batches it hit and no others.

Which segments must be written again, which bytes go to quarantine, which offsets are lost. `salvage_planning.py` makes
the plan, `salvage_writing.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from logstore.config import LogConfig
from logstore.directory.state import Loss, PartitionState
from logstore.files import FileSystem
from logstore.limits import INT64_MAX, Limits
from logstore.partition.damage import FileScan
from logstore.partition.losses import Range
from logstore.partition.quarantine import QuarantinedRegion


@dataclass(frozen=True, slots=True)
class Piece:
    """Sound batches of a file that belong into a segment.

    `epoch` is given where they come without offsets (from staging): they get theirs from `first_offset` on, and, on a
    topic with LogAppendTime, the time `stamp_ms`.
    """

    path: str
    position: int
    end: int
    first_offset: int
    end_offset: int
    epoch: int | None = None
    stamp_ms: int | None = None


class Source(Protocol):
    """Batches that may fill a loss: staged ones that were never flushed, or a quarantine."""

    name: str

    def pieces(self, low: int, high: int) -> Iterable[Piece]:
        """Those with all their offsets in [low, high)."""
        ...


@dataclass(frozen=True, slots=True)
class Damage:
    """Something wrong with a file, and the offsets it cost (`base_offset` None: no record)."""

    file: str
    position: int
    size_bytes: int
    reason: str
    base_offset: int | None = None
    end_offset: int | None = None
    at_most: bool = False


@dataclass(slots=True)
class SegmentSalvage:
    """One segment as it is to be: the pieces it is made of, in order of offsets."""

    base_offset: int
    high: int
    listed: bool
    scan: FileScan | None  # None: the file is missing
    pieces: list[Piece] = field(default_factory=list)
    rewrite: bool = False
    #: all of the file goes to quarantine: what is in it belongs elsewhere, or nowhere
    displaced: bool = False


@dataclass(slots=True)
class Salvage:
    """The plan for one partition."""

    directory: str
    log_start_offset: int
    committed: int | None
    segments: list[SegmentSalvage] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    losses: tuple[Loss, ...] = ()  # new ones
    #: earlier losses that were not recorded
    earlier_losses: list[Loss] = field(default_factory=list)
    refilled: list[tuple[str, int, int]] = field(default_factory=list)  # source, from, to
    #: written down as lost, but the log has them: a recovery was killed, or the list was, that knew they are back
    found_again: list[Range] = field(default_factory=list)
    quarantine: list[QuarantinedRegion] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)  # files that are not segments, set aside as they are
    begin_at: int | None = None  # an empty segment here, after the loss at the end
    bytes_scanned: int = 0
    notes: list[str] = field(default_factory=list)
    #: the list has sizes that are no longer true
    relisted: bool = False

    @property
    def rewritten(self) -> list[SegmentSalvage]:
        return [segment for segment in self.segments if segment.rewrite]

    @property
    def changes(self) -> bool:
        changed = self.rewritten or self.strays or self.losses or self.found_again
        return bool(changed or self.begin_at is not None or self.relisted)


@dataclass(frozen=True, slots=True)
class Partition:
    """What a plan is made from. `state` None: it is gone, and the directory is all there is."""

    fs: FileSystem
    directory: str
    name: str
    state: PartitionState | None
    #: the high watermark; None: not known, everything found is committed
    committed: int | None
    config: LogConfig
    limits: Limits
    now_ms: int
    #: what the state file had, where it is gone: from the reasons in quarantine
    known_losses: tuple[Loss, ...] = ()
    #: it comes from a broker: gaps between its segments are as they were there
    imported: bool = False
    #: nothing above was ever compacted or deleted, and staging may still have it; None: not known
    flushed_offset: int | None = None

    @property
    def log_start_offset(self) -> int:
        return self.state.log_start_offset if self.state else 0

    @property
    def losses(self) -> tuple[Loss, ...]:
        return self.state.losses if self.state else self.known_losses

    @property
    def is_listed(self) -> bool:
        """Whether there is a list of segments; one that was rebuilt has none yet."""
        return self.state is not None and bool(self.state.segments)

    @property
    def compacted_offset(self) -> int:
        """Below this compaction may have left offsets out."""
        most = INT64_MAX if self.flushed_offset is None else self.flushed_offset
        if self.state is not None:
            return min(max(self.state.first_dirty_offset, self.state.thinned_offset), most)
        return most if "compact" in self.config.cleanup_policy else 0
