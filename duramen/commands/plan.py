"""`duramen explain` and `duramen plan`: what is due for compaction and why, and what a compaction would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.compact import reasons_text
from duramen.commands.options import Force, NowMs, OnlyTopics, Topics, chosen_topics
from duramen.losses import loss_documents, print_losses
from duramen.session import DAMAGE, key_values, minutes_text, print_table, session, size_text, stop

if TYPE_CHECKING:
    from compaction_job.estimate import Estimate
    from logstore.compaction.planning import PartitionPlan

_NEXT_RULES = {
    "horizon": "delete horizon",
    "max_lag": "max.compaction.lag.ms",
    "expired": "duramen.key.ttl.ms",
    "recompress": "duramen.compaction.recompress.after.ms",
}


def explain(topics: Topics = None, now_ms: NowMs = None) -> None:
    """Show for each partition whether it is due for compaction, why, and when it will be due next."""
    from logstore.compaction.planning import PlanOptions, plan_partition
    from logstore.errors import DuramenError

    damaged = False
    with session.open_any() as store:
        now = store.clock.now_ms() if now_ms is None else now_ms
        options = PlanOptions(now, failures=store.maintenance().set_aside(now), flushed=True)
        documents = []
        for topic in chosen_topics(store, topics):
            for number in range(topic.partitions):
                try:
                    plan = plan_partition(store, topic, number, options)
                    losses = store.partition_state(topic, number).losses
                    documents.append(explained(plan) | {"losses": loss_documents(losses)})
                except DuramenError as error:
                    damaged = True
                    documents.append({"topic": topic.name, "partition": number, "error": str(error)})

    def text() -> None:
        print_table(
            ["partition", "dirty", "first dirty", "first uncleanable", "next horizon", "next look", "why"],
            [
                [
                    f"{each['topic']}-{each['partition']}",
                    *(
                        ["-"] * 5 + [each["error"]]
                        if "error" in each
                        else [
                            f"{each['dirty_ratio']:.2f}",
                            each["first_dirty_offset"],
                            each["first_uncleanable_offset"],
                            minutes_text(each["next_horizon_ms"]),
                            when_text(each),
                            each["why"],
                        ]
                    ),
                ]
                for each in documents
            ],
        )
        for each in documents:
            print_losses(f"{each['topic']}-{each['partition']}", each.get("losses", ()))

    session.answer({"now_ms": now, "partitions": documents}, text)
    if damaged:
        stop(DAMAGE)


def explained(plan: PartitionPlan) -> dict[str, Any]:
    found = plan.cleanable
    aside = plan.set_aside
    return {
        "topic": plan.topic,
        "partition": plan.partition,
        "due": plan.is_due,
        "why": plan.why,
        "dirty_ratio": round(found.ratio, 6),
        "first_dirty_offset": found.first_dirty_offset,
        "first_uncleanable_offset": found.first_uncleanable_offset,
        "clean_bytes": found.clean_bytes,
        "cleanable_bytes": found.cleanable_bytes,
        "size_bytes": plan.size_bytes,
        "segments": plan.segments,
        "next_ms": found.next_ms,
        "next_due": None if found.next_due is None else found.next_due.name.lower(),
        "late_ms": found.late_ms,
        "next_horizon_ms": plan.next_horizon_ms,
        "rolls_active": plan.rolls_active,
        "compacted": plan.compacted,
        "paused": plan.paused,
        "unfinished": plan.unfinished,
        "checkpoint_reset": found.checkpoint_reset,
        "set_aside": None if aside is None else asdict(aside),
    }


def when_text(document: dict[str, Any]) -> str:
    """When it can be due by time alone."""
    if document["due"]:
        late = f", late by {document['late_ms'] / 1000:.0f} s" if document["late_ms"] else ""
        return f"now{late}"
    if not document["compacted"] or document["paused"]:
        return "-"
    if document["set_aside"]:
        return f"retry {minutes_text(document['set_aside']['retry_ms'])}"
    if document["next_ms"] is None:
        return "with new records"
    rule = _NEXT_RULES.get(document["next_due"], "min.compaction.lag.ms")
    return f"{minutes_text(document['next_ms'])} ({rule})"


def plan(
    topic: OnlyTopics = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="NAME=VALUE",
            help="What if the topics had this setting? May be given again.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    now_ms: NowMs = None,
) -> None:
    """Show what a compaction would do: groups, bytes, extra disk, and an estimate of what would go."""
    from compaction_job.job import plan as planned

    what_if = key_values(config, "--config")
    with session.open_any() as store:
        now = store.clock.now_ms() if now_ms is None else now_ms
        found = planned(store, topics=topic, config=what_if, force=force, now_ms=now)
    documents = [_planned(each, estimate) for each, estimate in found]
    due = [each for each in documents if each["due"]]

    def text() -> None:
        print_table(
            ["partition", "due", "groups", "to read", "extra disk", "removes", "saves", "why"],
            [
                [
                    f"{each['topic']}-{each['partition']}",
                    "yes" if each["due"] else "no",
                    each["groups"] if each["due"] else "-",
                    size_text(each["read_bytes"]) if each["due"] else "-",
                    size_text(each["extra_bytes"]) if each["due"] else "-",
                    _removes(each["estimate"]),
                    _saves(each["estimate"]),
                    each["why"],
                ]
                for each in documents
            ],
        )
        for each in documents:
            for line in _warnings(each):
                print(f"{each['topic']}-{each['partition']}: {line}")
        print(
            f"{len(due)} of {len(documents)} partitions are due: {size_text(sum(each['read_bytes'] for each in due))} "
            f"to read, at most {size_text(max((each['extra_bytes'] for each in due), default=0))} of extra disk for one"
        )

    session.answer({"now_ms": now, "force": force, "config": what_if, "partitions": documents}, text)


def _planned(plan: PartitionPlan, estimate: Estimate | None) -> dict[str, Any]:
    return explained(plan) | {
        "groups": plan.groups,
        "groups_at_once": plan.groups_at_once,
        "read_bytes": plan.read_bytes,
        "extra_bytes": plan.extra_bytes,
        "estimate": None if estimate is None else asdict(estimate),
    }


def _removes(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return ("about " if estimate["rough"] else "") + reasons_text(estimate["removed"])


def _saves(estimate: dict[str, Any] | None) -> str:
    if estimate is None or not estimate["before_bytes"]:
        return "-"
    saved = estimate["before_bytes"] - estimate["after_bytes"]
    return f"{size_text(saved)} ({100 * saved / estimate['before_bytes']:.0f} %)"


def _warnings(document: dict[str, Any]) -> Iterator[str]:
    from logstore.compaction.budget import MapAdvice

    estimate = document["estimate"]
    if estimate is None:
        return
    if estimate["map_full"]:
        advice = MapAdvice(estimate["map_buffer_wanted"], estimate["map_threads_wanted"])
        yield f"the offset map is too small for one pass; {advice} would do"
    if estimate["removed"].get("keyless"):
        yield f"{estimate['removed']['keyless']} records have no key and would be removed"
