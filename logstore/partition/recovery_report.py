"""What opening a partition did: what was checked, cut, set aside, rebuilt and removed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that left a segment, and why."""

    file: str
    position: int
    dropped_bytes: int
    reason: str


@dataclass(slots=True)
class RecoveryReport:
    """What opening the partition did; everything empty after a clean stop."""

    clean: bool
    segments_scanned: int = 0
    bytes_scanned: int = 0
    cuts: list[Cut] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dropped_bytes(self) -> int:
        return sum(cut.dropped_bytes for cut in self.cuts)

    @property
    def found_damage(self) -> bool:
        return bool(self.cuts or self.quarantined)
