"""How losses are shown, by every command that reports a partition's health."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from duramen.session import time_text

if TYPE_CHECKING:
    from logstore.directory.state import Loss


def loss_documents(losses: Sequence[Loss]) -> list[dict[str, Any]]:
    """The JSON of losses: `end_offset` is the first offset that is not lost."""
    return [
        {
            "base_offset": each.base_offset,
            "end_offset": each.end_offset,
            "at_most": each.at_most,
            "reason": each.reason,
            "since_ms": each.since_ms,
        }
        for each in losses
    ]


def loss_text(loss: dict[str, Any]) -> str:
    return f"{'at most ' if loss['at_most'] else ''}offsets {loss['base_offset']} to {loss['end_offset'] - 1}"


def joined_ranges(found: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Neighbouring ranges of one source as one."""
    out: list[tuple[str, int, int]] = []
    for source, first, end in sorted(found):
        if out and (out[-1][0], out[-1][2]) == (source, first):
            out[-1] = (source, out[-1][1], end)
        else:
            out.append((source, first, end))
    return out


def print_losses(partition: str, losses: Sequence[dict[str, Any]]) -> None:
    for each in losses:
        print(f"{partition}: lost since {time_text(each['since_ms'])}: {loss_text(each)} ({each['reason']})")
