"""One measured figure with what it is held to, as a line of the table and as a line of JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """`met` is None where nothing is claimed; `detail` has the single runs and whatever else explains the figure."""

    part: str
    name: str
    ours: str
    theirs: str = ""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None
    others_cores: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: ""}[self.met]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def rate(records: int, seconds: float) -> str:
    return f"{records / seconds / 1e6:.2f} M rec/s"
