"""What time alone brings, by day: delete horizons, erasure deadlines, keys past their time, retention, new tries."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from compaction_job.figures import PartitionFigures
from duramen.console.documents import EVENTS
from duramen.console.figures import TopicLook
from duramen.console.view import View
from logstore.cleaner.eligibility import Due
from logstore.compaction.partition_view import PartitionView
from logstore.errors import DuramenError
from logstore.limits import INT64_MAX

_DAYS = 90
_DAY_MS = 86_400_000
#: what datetime can show
_TIME_MS_MAX = 253_370_764_800_000

_WHAT = {
    "delete_horizon": "the first tombstones or markers may go with the next compaction",
    "erasure_deadline": "max.compaction.lag.ms: what was replaced or deleted is compacted by then",
    "key_ttl": "duramen.key.ttl.ms: keys reach the end of their time",
    "retention": "retention.ms: the oldest segment may be deleted",
    "retry": "set aside after failures; it is tried again",
}

Event = tuple[int, str, str, int]


def horizons(
    view: View,
    *,
    topic: str | None = None,
    from_ms: int | None = None,
    to_ms: int | None = None,
    utc_offset_minutes: int = 0,
    limit: int | None = None,
) -> dict[str, Any]:
    now_ms = view.now_ms
    first = now_ms if from_ms is None else min(from_ms, _TIME_MS_MAX)
    last = min(first + _DAYS * _DAY_MS if to_ms is None else to_ms, _TIME_MS_MAX)
    looks = view.figures.topics() if topic is None else [view.figures.topic(topic)]
    events = sorted(
        event
        for look in looks
        for number, each in enumerate(look.partitions)
        if isinstance(each, PartitionFigures)
        for event in _events(view, look, number, each, now_ms)
        if first <= event[0] < last
    )
    days: dict[str, dict[str, int]] = {}
    for time_ms, kind, _, _ in events:
        days.setdefault(_day(time_ms, utc_offset_minutes), dict.fromkeys(EVENTS, 0))[kind] += 1
    return {
        "now_ms": now_ms,
        "from_ms": first,
        "to_ms": last,
        "utc_offset_minutes": utc_offset_minutes,
        "days": [{"day": day, "counts": counts} for day, counts in days.items()],
        "total": len(events),
        "events": [
            {"time_ms": time_ms, "kind": kind, "topic": name, "partition": number, "what": _WHAT[kind]}
            for time_ms, kind, name, number in (events if limit is None else events[:limit])
        ],
    }


def _day(time_ms: int, utc_offset_minutes: int) -> str:
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=time_ms, minutes=utc_offset_minutes)
    return moment.strftime("%Y-%m-%d")


def _events(view: View, look: TopicLook, number: int, found: PartitionFigures, now_ms: int) -> Iterator[Event]:
    """Only what is still to come: what is over is due, and told there."""
    config, topic, plan = look.config, look.topic, found.plan
    assert config is not None
    assert topic is not None
    times: list[tuple[int | None, str]] = []
    if plan.compacted and not plan.paused:
        times.append((plan.next_horizon_ms, "delete_horizon"))
        if config.max_compaction_lag_ms < INT64_MAX:
            times.append((_lag_deadline_ms(view, look, number, found), "erasure_deadline"))
        if plan.cleanable.next_due is Due.EXPIRED:
            times.append((plan.cleanable.next_ms, "key_ttl"))
        if plan.set_aside is not None:
            times.append((plan.set_aside.retry_ms, "retry"))
    if config.delete and config.retention_ms >= 0 and not topic.settings_unknown:
        state = view.store.partition_state(topic, number)
        if len(state.segments) > 1 and state.segments[0].largest_timestamp_ms >= 0:
            times.append((state.segments[0].largest_timestamp_ms + config.retention_ms, "retention"))
    for time_ms, kind in times:
        if time_ms is not None and time_ms > now_ms:
            yield time_ms, kind, look.name, number


def _lag_deadline_ms(view: View, look: TopicLook, number: int, found: PartitionFigures) -> int | None:
    """When the oldest record that no pass has met reaches max.compaction.lag.ms."""
    config, topic = look.config, look.topic
    assert config is not None
    assert topic is not None
    if found.plan.cleanable.next_due is Due.MAX_LAG:
        return found.plan.cleanable.next_ms
    try:
        state = view.store.partition_state(topic, number)
        dirty = found.plan.cleanable.first_dirty_offset
        bases = [segment.base_offset for segment in state.segments]
        held = [base for at, base in enumerate(bases) if at + 1 == len(bases) or bases[at + 1] > dirty]
        if not held or found.log_end_offset <= dirty:
            return None
        first_ms = PartitionView.of(view.store, topic, number, config).first_timestamp(held[0])
    except (DuramenError, OSError):
        return None
    return first_ms + config.max_compaction_lag_ms if first_ms >= 0 else None
