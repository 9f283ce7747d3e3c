"""Why and when: the rule that makes a partition due or holds it back, and until when."""

from __future__ import annotations

from typing import Any

from compaction_job.figures import PartitionFigures, Section
from duramen.console.figures import TopicLook, state_of, state_of_plan
from duramen.console.view import View
from logstore.cleaner.eligibility import Due, NotDue
from logstore.compaction.planning import PartitionPlan

_RULES = {
    Due.RATIO: ("ratio", "min.cleanable.dirty.ratio"),
    Due.MAX_LAG: ("max_lag", "max.compaction.lag.ms"),
    Due.HORIZON: ("horizon", "delete.retention.ms"),
    Due.EXPIRED: ("expired", "duramen.key.ttl.ms"),
    Due.RECOMPRESS: ("recompress", "duramen.compaction.recompress.after.ms"),
    Due.FORCED: ("forced", None),
}
_HELD = {
    NotDue.EMPTY: ("empty", None),
    NotDue.NOTHING_NEW: ("nothing_new", None),
    NotDue.RATIO: ("ratio", "min.cleanable.dirty.ratio"),
    NotDue.MIN_LAG: ("min_lag", "min.compaction.lag.ms"),
    NotDue.OPEN_TRANSACTION: ("open_transaction", None),
    NotDue.NOT_FLUSHED: ("not_flushed", None),
    NotDue.ACTIVE_ONLY: ("active_only", "segment.ms"),
}
_URGENT = {"set_aside": 1, "unreadable": 1, "waiting": 2}


def explain(view: View, *, topic: str | None, state: str | None, limit: int | None, offset: int = 0) -> dict[str, Any]:
    looks = view.figures.topics() if topic is None else [view.figures.topic(topic)]
    found: list[tuple[tuple[int, ...], TopicLook, int]] = []
    for look in looks:
        for number, each in enumerate(look.partitions):
            known = state_of(each)
            if state is None and topic is None and known == "not_compacted":
                continue
            if state is None or state == known:
                found.append((_urgency(each), look, number))
    found.sort(key=lambda each: (each[0], each[1].name, each[2]))
    page = found[offset:] if limit is None else found[offset : offset + limit]
    return {
        "now_ms": view.now_ms,
        "total": len(found),
        "offset": offset,
        "limit": limit or max(len(found), 1),
        "partitions": [why(look, number) for _, look, number in page],
    }


def _urgency(found: PartitionFigures | str) -> tuple[int, ...]:
    """Smaller comes first: what is late, what is due by ratio, what failed, what waits, by ratio; then the rest."""
    if isinstance(found, str):
        return (_URGENT["unreadable"], 0, 0)
    late, ms, ratio = found.plan.urgency
    state = state_of(found)
    rank = 0 if state == "due" else _URGENT.get(state, 3)
    return (rank, -late, -ms, -int(ratio * 1_000_000))


def why(look: TopicLook, number: int) -> dict[str, Any]:
    """The document of one partition."""
    found = look.partitions[number]
    if isinstance(found, str) or look.config is None:
        return _unreadable(look.name, number, str(found))
    plan, figures = found.plan, found
    rule, held, setting = _rule(plan)
    aside = plan.set_aside
    compacted = plan.compacted
    return {
        "topic": look.name,
        "partition": number,
        "state": state_of_plan(plan),
        "due": plan.is_due,
        "why": plan.why,
        "rule": rule,
        "held_by": held,
        "setting": setting,
        "dirty_ratio": round(plan.cleanable.ratio, 6) if compacted else None,
        "dirty_ratio_max": look.config.min_cleanable_dirty_ratio if compacted else None,
        "next_ms": plan.cleanable.next_ms if compacted and not plan.paused else None,
        "next_rule": _next_rule(plan) if compacted and not plan.paused else None,
        "late_ms": plan.cleanable.late_ms,
        "next_horizon_ms": plan.next_horizon_ms,
        "paused": plan.paused,
        "unfinished": plan.unfinished,
        "set_aside": None
        if aside is None
        else {
            "reason": aside.reason,
            "failures": aside.failures,
            "failed_ms": aside.failed_ms,
            "retry_ms": aside.retry_ms,
        },
        "size_bytes": plan.size_bytes,
        "dirty_bytes": figures.by_section.get(Section.DIRTY, 0),
        "error": None,
    }


def _rule(plan: PartitionPlan) -> tuple[str | None, str | None, str | None]:
    """What makes it due, what holds it back, and the setting behind."""
    found = plan.cleanable
    if plan.settings_unknown or not plan.compacted:
        return None, None, "cleanup.policy"
    if plan.paused:
        return None, None, "duramen.compaction.paused"
    if plan.set_aside is not None:
        return None, None, "duramen.cleaner.retry.ms"
    if found.due is not None:
        rule, setting = _RULES[found.due]
        return rule, None, setting
    if plan.rolls_active:
        return "roll", None, "segment.ms"
    if found.not_due is None:
        return None, None, None
    held, setting = _HELD[found.not_due]
    return None, held, setting


def _next_rule(plan: PartitionPlan) -> str | None:
    found = plan.cleanable
    if found.next_ms is None:
        return None
    return "min_lag" if found.next_due is None else _RULES[found.next_due][0]


def _unreadable(name: str, number: int, error: str) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("rule", "held_by", "setting", "dirty_ratio", "dirty_ratio_max", "next_ms", "next_rule", "next_horizon_ms")
    )
    return nothing | {
        "topic": name,
        "partition": number,
        "state": "unreadable",
        "due": False,
        "why": "it cannot be read; `duramen verify` says more",
        "late_ms": 0,
        "paused": False,
        "unfinished": False,
        "set_aside": None,
        "size_bytes": 0,
        "dirty_bytes": 0,
        "error": error,
    }
