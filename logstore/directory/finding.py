"""Something that is wrong with a file. Light: many look for findings, and most commands find none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    file: str | None = None
    position: int | None = None
    offset: int | None = None
