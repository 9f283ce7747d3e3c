"""What if a topic had other settings: what would be due, and what would it save. Changes nothing."""

from __future__ import annotations

import math
import time
from typing import Any

from compaction_job.due import passes_at_once, plan, threads_of
from compaction_job.estimate import Estimate, estimate_partition
from duramen.console.figures import state_of_plan
from duramen.console.view import View
from logstore.compaction.budget import budget_of
from logstore.compaction.planning import PartitionPlan
from logstore.setting import format_value

#: one request reads no more records than that, nor for longer
_READ_BYTES, _SECONDS = 64 << 20, 10.0
_READ_BYTES_EACH = 16 << 20
#: of the parameters
SETTINGS = {
    "ratio": "min.cleanable.dirty.ratio",
    "min_lag_ms": "min.compaction.lag.ms",
    "max_lag_ms": "max.compaction.lag.ms",
    "segment_bytes": "segment.bytes",
}

_Found = tuple[PartitionPlan, PartitionPlan | None, Estimate | None]


def what_if(
    view: View,
    *,
    topic: str | None = None,
    estimate: bool = False,
    limit: int | None = None,
    offset: int = 0,
    **tried: Any,
) -> dict[str, Any]:
    """`tried` has the settings by their parameters' names."""
    store, now_ms = view.store, view.now_ms
    config = {SETTINGS[name]: value for name, value in tried.items() if value is not None}
    topics = None if topic is None else [topic]
    if topic is not None and not config and not store.log_config(store.topic(topic)).compact:
        topics = []  # nothing was asked for, and nothing is compacted
    then = [each for each, _ in plan(store, topics=topics, config=config, now_ms=now_ms, estimate=False)]
    now = (
        {(each.topic, each.partition): each for each, _ in plan(store, topics=topics, now_ms=now_ms, estimate=False)}
        if config and topics is None
        else _now(view, then, now_ms)
        if config
        else {(each.topic, each.partition): each for each in then}
    )
    then.sort(key=lambda each: (not each.is_due, -each.cleanable.ratio, each.topic, each.partition))
    estimates = _estimates(view, [each for each in then if each.is_due]) if estimate else {}
    found: list[_Found] = [
        (each, now.get((each.topic, each.partition)), estimates.get((each.topic, each.partition))) for each in then
    ]
    page = found[offset:] if limit is None else found[offset : offset + limit]
    segment_bytes = config.get("segment.bytes")
    return {
        "now_ms": now_ms,
        "config": {name: format_value(value) for name, value in config.items()},
        "total": len(found),
        "left_off": sum(each.is_due for each in then) - len(estimates) if estimate else 0,
        "now": _totals([(before, each) for _, before, each in found if before is not None and before.is_due]),
        "then": _totals([(after, each) for after, _, each in found if after.is_due]),
        "partitions": [_document(view, *each, segment_bytes) for each in page],
    }


def _now(view: View, then: list[PartitionPlan], now_ms: int) -> dict[tuple[str, int], PartitionPlan]:
    """The plans of the same topics with the settings in force; a topic that is not compacted has none."""
    names = [name for name in dict.fromkeys(each.topic for each in then) if _is_compacted(view, name)]
    if not names:
        return {}
    found = plan(view.store, topics=names, now_ms=now_ms, estimate=False)
    return {(each.topic, each.partition): each for each, _ in found}


def _is_compacted(view: View, name: str) -> bool:
    return view.store.log_config(view.store.topic(name)).compact


def _estimates(view: View, due: list[PartitionPlan]) -> dict[tuple[str, int], Estimate]:
    """Of as many as can be read within the limits, the dirtiest first."""
    found: dict[tuple[str, int], Estimate] = {}
    budget = budget_of(view.store).divided(passes_at_once(due, threads_of(view.store)))
    began, left_bytes = time.monotonic(), _READ_BYTES
    for each in due:
        if left_bytes <= 0 or time.monotonic() - began > _SECONDS:
            break
        guess = estimate_partition(each, budget, read_bytes_max=min(_READ_BYTES_EACH, left_bytes))
        left_bytes -= min(each.read_bytes, _READ_BYTES_EACH)
        if guess is not None:
            found[each.topic, each.partition] = guess
    return found


def _totals(due: list[tuple[PartitionPlan, Estimate | None]]) -> dict[str, Any]:
    saved = [max(estimate.before_bytes - estimate.after_bytes, 0) for _, estimate in due if estimate is not None]
    return {
        "due": len(due),
        "read_bytes": sum(each.read_bytes for each, _ in due),
        "extra_bytes": max((each.extra_bytes for each, _ in due), default=0),
        "saved_bytes": sum(saved) if saved else None,
    }


def _document(
    view: View, then: PartitionPlan, now: PartitionPlan | None, estimate: Estimate | None, segment_bytes: int | None
) -> dict[str, Any]:
    after_bytes = then.size_bytes if estimate is None else estimate.after_bytes
    each_bytes = segment_bytes or view.store.log_config(view.store.topic(then.topic)).segment_bytes
    return {
        "topic": then.topic,
        "partition": then.partition,
        "due": then.is_due,
        "due_now": now is not None and now.is_due,
        "state": state_of_plan(then),
        "state_now": "not_compacted" if now is None else state_of_plan(now),
        "why": then.why,
        "dirty_ratio": round(then.cleanable.ratio, 6),
        "size_bytes": then.size_bytes,
        "dirty_bytes": then.cleanable.cleanable_bytes,
        "read_bytes": then.read_bytes,
        "extra_bytes": then.extra_bytes,
        "groups": then.groups,
        "segments_after": max(math.ceil(after_bytes / each_bytes), 1) if then.is_due else None,
        "estimate": None
        if estimate is None
        else {
            "before_bytes": estimate.before_bytes,
            "after_bytes": estimate.after_bytes,
            "records": estimate.records,
            "removed": dict(estimate.removed),
            "keys": estimate.keys,
            "map_full": estimate.map_full,
            "rough": estimate.rough,
        },
    }
