"""The topics, one topic with its partitions, and one partition with its strip of segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compaction_job.figures import PartitionFigures, Section, counted_in, sections_of
from compaction_job.sampling import WHOLE
from duramen.console.figures import TopicLook, count_states, state_of
from duramen.console.runs import last_ended, runs_of
from duramen.console.view import View
from duramen.console.why import why
from logstore.directory.history import DAYS, MINUTES, QUARTERS, Sample, Tier, read_samples
from logstore.errors import UnknownTopic
from logstore.files import OS_FILES
from logstore.setting import format_value

#: a strip with more segments than that has neighbours taken together
SEGMENTS_MAX = 2000
_GROWTH_POINTS = 60
_RUNS_OF_PARTITION = 20
TIERS: dict[str, Tier] = {"3h": MINUTES, "2d": QUARTERS, "30d": DAYS}

_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda each: each["name"],
    "size": lambda each: each["size_bytes"],
    "records": lambda each: each["records"],
    "keys": lambda each: each["keys"] or 0,
    "tombstones": lambda each: each["tombstones"] or 0,
    "dirty_ratio": lambda each: -1 if each["dirty_ratio"] is None else each["dirty_ratio"],
    "partitions": lambda each: each["partitions"],
    "segments": lambda each: each["segments"],
    "last_record": lambda each: each["last_record_ms"] or 0,
}


def topics(
    view: View,
    *,
    search: str | None = None,
    state: str | None = None,
    sort: str = "name",
    order: str = "asc",
    limit: int | None = None,
    offset: int = 0,
) -> dict[str, Any]:
    ended = last_ended(view)
    wanted = (search or "").lower()
    found = [
        topic_document(look, ended.get(look.name))
        for look in view.figures.topics()
        if wanted in look.name.lower() and (state is None or count_states(look.partitions)[state])
    ]
    found.sort(key=lambda each: each["name"])
    found.sort(key=_SORTS[sort], reverse=order == "desc")
    page = found[offset:] if limit is None else found[offset : offset + limit]
    return {
        "now_ms": view.now_ms,
        "total": len(found),
        "offset": offset,
        "limit": limit or max(len(found), 1),
        "topics": [each | {"growth": _growth(view, each["id"])} for each in page],
    }


def topic_document(look: TopicLook, last_run_ms: int | None) -> dict[str, Any]:
    """A topic's sums over its partitions, without its growth."""
    readable = list(look.readable())
    config, topic = look.config, look.topic
    compacted = config is not None and config.compact
    keys = [each.keys for each in readable if each.keys is not None]
    tombstones = [each.tombstones for each in readable if each.tombstones is not None]
    nexts = [each.plan.cleanable.next_ms for each in readable if each.plan.cleanable.next_ms is not None]
    newest = [each.last_record_ms for each in readable if each.last_record_ms is not None]
    states = count_states(look.partitions)
    return {
        "name": look.name,
        "id": "" if topic is None else topic.id,
        "partitions": len(look.partitions),
        "segments": sum(each.segments for each in readable),
        "size_bytes": sum(each.size_bytes for each in readable),
        "clean_bytes": sum(each.by_section.get(Section.CLEAN, 0) for each in readable),
        "dirty_bytes": sum(each.by_section.get(Section.DIRTY, 0) for each in readable),
        "uncleanable_bytes": sum(each.uncleanable_bytes for each in readable),
        "records": sum(each.records for each in readable),
        "records_exact": len(readable) == len(look.partitions) and all(each.records_exact for each in readable),
        "keys": sum(keys) if keys else None,
        "tombstones": sum(tombstones) if tombstones else None,
        "dirty_ratio": round(max((each.plan.cleanable.ratio for each in readable), default=0.0), 6)
        if compacted
        else None,
        "dirty_ratio_max": config.min_cleanable_dirty_ratio if config is not None and compacted else None,
        "policy": _policy(look),
        "compacted": compacted,
        "paused": config is not None and compacted and config.duramen_compaction_paused,
        "states": states,
        "last_record_ms": max(newest, default=None),
        "next_ms": min(nexts, default=None) if compacted else None,
        "last_run_ms": last_run_ms,
        "error": look.error or next((each for each in look.partitions if isinstance(each, str)), None),
    }


def _policy(look: TopicLook) -> str:
    if look.config is None or look.topic is None or look.topic.settings_unknown:
        return "unknown"
    policies = [name for name, on in (("compact", look.config.compact), ("delete", look.config.delete)) if on]
    return ",".join(policies) or "none"


def _growth(view: View, topic_id: str) -> list[dict[str, int]]:
    if not topic_id:
        return []
    return thinned(_samples(view, topic_id, MINUTES), _GROWTH_POINTS)


def _samples(view: View, topic_id: str | None, tier: Tier) -> list[dict[str, int]]:
    path = view.maintenance.history_path(topic_id)
    if path is None:
        return []
    found = read_samples(OS_FILES, path, topic_id or WHOLE, tier, now_ms=view.now_ms)
    return [_point(each) for each in found]


def store_history(view: View) -> list[dict[str, int]]:
    return _samples(view, None, MINUTES)


def thinned(points: Sequence[dict[str, int]], count_max: int) -> list[dict[str, int]]:
    """At most so many of them, the newest included."""
    if len(points) <= count_max:
        return list(points)
    last = len(points) - 1
    return [points[at * last // (count_max - 1)] for at in range(count_max)]


def _point(sample: Sample) -> dict[str, int]:
    return {
        "time_ms": sample.time_ms,
        "size_bytes": sample.size_bytes,
        "dirty_bytes": sample.dirty_bytes,
        "records": sample.records,
        "tombstones": sample.tombstones,
    }


def history(view: View, *, topic: str, range: str = "3h") -> dict[str, Any]:
    tier = TIERS[range]
    found = view.store.topic(topic)
    return {"range": range, "step_ms": tier.step_ms, "points": _samples(view, found.id, tier)}


def topic(view: View, *, topic: str, limit: int | None = None, offset: int = 0) -> dict[str, Any]:
    look = view.figures.topic(topic)
    if look.topic is None:
        raise UnknownTopic(look.error or f"topic {topic} cannot be read")
    last = len(look.partitions) if limit is None else offset + limit
    page = list(enumerate(look.partitions))[offset:last]
    document = topic_document(look, last_ended(view).get(topic))
    return {
        "now_ms": view.now_ms,
        "topic": document | {"growth": _growth(view, look.topic.id)},
        "configs": {name: format_value(value) for name, value in sorted(look.topic.configs.items())},
        "total": len(look.partitions),
        "offset": offset,
        "limit": limit or max(len(look.partitions), 1),
        "partitions": [_row(number, each) for number, each in page],
    }


def _row(number: int, found: PartitionFigures | str) -> dict[str, Any]:
    if isinstance(found, str):
        zeros = ("log_start_offset", "log_end_offset", "segments", "size_bytes", "records")
        return dict.fromkeys(("keys", "tombstones", "dirty_ratio", "next_ms", "last_record_ms")) | {
            **dict.fromkeys((*zeros, "clean_bytes", "dirty_bytes", "uncleanable_bytes"), 0),
            "partition": number,
            "records_exact": False,
            "state": "unreadable",
            "why": "it cannot be read; `duramen verify` says more",
            "error": found,
        }
    compacted = found.plan.compacted
    return {
        "partition": number,
        "state": state_of(found),
        "why": found.plan.why,
        "log_start_offset": found.log_start_offset,
        "log_end_offset": found.log_end_offset,
        "segments": found.segments,
        "size_bytes": found.size_bytes,
        "clean_bytes": found.by_section.get(Section.CLEAN, 0),
        "dirty_bytes": found.by_section.get(Section.DIRTY, 0),
        "uncleanable_bytes": found.uncleanable_bytes,
        "records": found.records,
        "records_exact": found.records_exact,
        "keys": found.keys,
        "tombstones": found.tombstones,
        "dirty_ratio": round(found.plan.cleanable.ratio, 6) if compacted else None,
        "next_ms": found.plan.cleanable.next_ms if compacted else None,
        "last_record_ms": found.last_record_ms,
        "error": None,
    }


def partition(view: View, *, topic: str, partition: int) -> dict[str, Any]:
    look = view.figures.topic(topic)
    assert look.topic is not None
    look.topic.partition(partition)  # raises UnknownTopic
    found = look.partitions[partition]
    document: dict[str, Any] = {
        "now_ms": view.now_ms,
        "topic": topic,
        "partition": partition,
        "why": why(look, partition),
        "runs": runs_of(view, topic, partition, _RUNS_OF_PARTITION),
    }
    if isinstance(found, str):
        zeros = ("size_bytes", "clean_bytes", "dirty_bytes", "uncleanable_bytes", "log_start_offset", "log_end_offset")
        more = ("last_stable_offset", "first_dirty_offset", "first_uncleanable_offset", "records", "segments_total")
        return document | dict.fromkeys((*zeros, *more), 0) | {"records_exact": False, "segments": [], "losses": []}
    return document | _strip(view, look, partition, found)


def _strip(view: View, look: TopicLook, number: int, figures: PartitionFigures) -> dict[str, Any]:
    """The segments, from one look at the list: their sizes add up to the log's."""
    store, topic = view.store, look.topic
    assert topic is not None
    listed = store.look(topic, number)
    state = listed.state
    found, compacted = figures.plan.cleanable, figures.plan.compacted
    sections = sections_of(state, found, compacted=compacted)
    counts = counted_in(state, view.ledger.counts().get((topic.id, number), {}), figures.log_end_offset)
    active_bytes = listed.active_bytes()
    segments: list[dict[str, Any]] = []
    for at, entry in enumerate(state.segments):
        last = at + 1 == len(state.segments)
        known = counts[at][1]
        segments.append(
            {
                "base_offset": entry.base_offset,
                "end_offset": max(figures.log_end_offset, entry.base_offset)
                if last
                else state.segments[at + 1].base_offset,
                "size_bytes": active_bytes if last else entry.size_bytes,
                "section": sections[at].value,
                "count": 1,
                "largest_timestamp_ms": entry.largest_timestamp_ms if entry.largest_timestamp_ms >= 0 else None,
                "records": None if known is None else known.records,
                "keys": None if known is None else known.keys,
                "tombstones": None if known is None else known.tombstones,
                "run_id": None if known is None else known.run_id,
            }
        )
    by_section = dict.fromkeys(Section, 0)
    for segment, section in zip(segments, sections, strict=True):
        by_section[section] += segment["size_bytes"]
    return {
        "size_bytes": sum(by_section.values()),
        "clean_bytes": by_section[Section.CLEAN],
        "dirty_bytes": by_section[Section.DIRTY],
        "uncleanable_bytes": by_section[Section.UNCLEANABLE] + by_section[Section.ACTIVE],
        "log_start_offset": state.log_start_offset,
        "log_end_offset": figures.log_end_offset,
        "last_stable_offset": listed.last_stable_offset,
        "first_dirty_offset": found.first_dirty_offset,
        "first_uncleanable_offset": found.first_uncleanable_offset,
        "records": sum(records for records, _ in counts),
        "records_exact": figures.records_exact,
        "segments_total": len(segments),
        "segments": together(segments, SEGMENTS_MAX),
        "losses": [
            {
                "base_offset": loss.base_offset,
                "end_offset": loss.end_offset,
                "reason": loss.reason,
                "since_ms": loss.since_ms,
                "at_most": loss.at_most,
            }
            for loss in state.losses[:1000]
        ],
    }


def together(segments: list[dict[str, Any]], count_max: int) -> list[dict[str, Any]]:
    """Neighbours of the same section as one, so that there are few enough; nothing is lost of their sizes."""
    if len(segments) <= count_max:
        return segments
    each_max = -(-len(segments) // (count_max - len(Section)))
    found: list[dict[str, Any]] = []
    for segment in segments:
        last = found[-1] if found else None
        if last is None or last["section"] != segment["section"] or last["count"] >= each_max:
            found.append(dict(segment))
            continue
        last["end_offset"] = segment["end_offset"]
        last["size_bytes"] += segment["size_bytes"]
        last["count"] += 1
        last["run_id"] = None
        times = [ms for ms in (last["largest_timestamp_ms"], segment["largest_timestamp_ms"]) if ms is not None]
        last["largest_timestamp_ms"] = max(times, default=None)
        for name in ("records", "keys", "tombstones"):
            known = last[name] is not None and segment[name] is not None
            last[name] = last[name] + segment[name] if known else None
    return found
