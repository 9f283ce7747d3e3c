"""Something that is wrong with a file, and the report of a whole store. Light: most commands find nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    file: str | None = None
    position: int | None = None
    offset: int | None = None


@dataclass(slots=True)
class StoreReport:
    """What is wrong with the store as a whole, and what was done about it, or would be."""

    findings: list[Finding] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    #: what cannot be known any more
    lost: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.findings

    def add(self, other: StoreReport) -> None:
        self.findings += other.findings
        self.actions += other.actions
        self.lost += other.lost
