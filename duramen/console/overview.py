"""The header: the store as a whole, its health, its jobs and the passes under way."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc

from compaction_job.activity import read_activities
from compaction_job.figures import Section
from duramen import __version__
from duramen.commands.health import origin_document
from duramen.console.documents import STATES
from duramen.console.figures import TopicLook, count_states
from duramen.console.topics import store_history
from duramen.console.view import View
from logstore.objects.opening import is_url

_FINDINGS_MAX = 50
#: below this share of the disk, or of what the largest pass needs, it is worth a word
_FREE_SHARE_MIN = 0.05
_RUNNING_MAX = 200
_LATE_MS = 3_600_000

Finding = dict[str, Any]


def store(view: View) -> dict[str, Any]:
    looks = view.figures.topics()
    now_ms = view.now_ms
    activities = read_activities(view.store, now_ms=now_ms)
    space = _space(view, looks)
    daemon = _daemon(activities) | {"told": view.maintenance.activity_folder is not None}
    findings = list(_findings(view, looks, daemon, space))
    severities = {each["severity"] for each in findings}
    return {
        "now_ms": now_ms,
        "stamp": _stamp(view, activities),
        "version": __version__,
        "store": {
            "path": view.store.path.encode("utf-8", "backslashreplace").decode(),
            "kind": "bucket" if is_url(view.store.path) else "directory",
            "read_only": view.store.is_read_only,
            "id": None,
            "origin": origin_document(view.store),
        },
        "health": {
            "status": "error" if "error" in severities else "warning" if severities else "ok",
            "findings": findings[:_FINDINGS_MAX],
            "left_off": max(len(findings) - _FINDINGS_MAX, 0),
        },
        "space": space,
        "totals": _totals(looks),
        "daemon": daemon,
        "running": _running(view, activities),
        "history": store_history(view),
        "actions": _actions(view),
    }


def _stamp(view: View, activities: list[dict[str, Any]]) -> str:
    busy = [each["passes"] for each in activities if each.get("passes")]
    return f"{view.figures.generation}-{zlib.crc32(repr((view.ledger.versions(), busy)).encode()):08x}"


def _space(view: View, looks: list[TopicLook]) -> dict[str, Any]:
    return {
        "free_bytes": view.maintenance.free_bytes(),
        "total_bytes": view.maintenance.total_bytes(),
        "log_bytes": sum(each.size_bytes for look in looks for each in look.readable()),
    }


def _totals(looks: list[TopicLook]) -> dict[str, Any]:
    partitions = [each for look in looks for each in look.readable()]
    states = dict.fromkeys(STATES, 0)
    for look in looks:
        for name, count in count_states(look.partitions).items():
            states[name] += count
    return {
        "topics": len(looks),
        "partitions": sum(len(look.partitions) for look in looks),
        "segments": sum(each.segments for each in partitions),
        "records": sum(each.records for each in partitions),
        "records_exact": all(each.records_exact for each in partitions),
        "clean_bytes": sum(each.by_section.get(Section.CLEAN, 0) for each in partitions),
        "dirty_bytes": sum(each.by_section.get(Section.DIRTY, 0) for each in partitions),
        "uncleanable_bytes": sum(each.uncleanable_bytes for each in partitions),
        "states": states,
    }


def _daemon(activities: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several daemons the one that was heard of last."""
    daemons = [each for each in activities if isinstance(each.get("jobs"), dict)]
    if not daemons:
        return {"running": False, "where": None, "seen_ms": None, "jobs": []}
    newest = max(daemons, key=lambda each: each["seen_ms"])
    names = ("interval_ms", "running", "runs", "last_started_ms", "last_ended_ms", "ok", "problems", "next_ms")
    return {
        "running": True,
        "where": f"{newest.get('host')} (process {newest.get('pid')})",
        "seen_ms": newest["seen_ms"],
        "jobs": [{"name": name} | {each: job.get(each) for each in names} for name, job in newest["jobs"].items()],
    }


def _running(view: View, activities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Passes that the ledger calls running, with what their processes say; and those the ledger does not show yet."""
    said = {each["run_id"]: each | {"seen_ms": one["seen_ms"]} for one in activities for each in one.get("passes", ())}
    running = view.ledger.runs().table.select(_RUN_COLUMNS).filter(pc.field("result") == "running")
    open_runs = running.slice(0, _RUNNING_MAX).to_pylist()
    for row in open_runs:
        said.setdefault(
            row["run_id"],
            {
                "run_id": row["run_id"],
                "topic": row["topic"] or "",
                "partition": row["partition"] or 0,
                "engine": row["engine"] or "",
                "started_ms": row["started_ms"] or 0,
                **dict.fromkeys(("step", "done_bytes", "total_bytes", "bytes_per_second", "left_ms", "seen_ms")),
            },
        )
    return sorted(said.values(), key=lambda each: each["started_ms"])[:_RUNNING_MAX]


_RUN_COLUMNS = ["run_id", "topic", "partition", "engine", "started_ms", "result"]


def _findings(view: View, looks: list[TopicLook], daemon: dict[str, Any], space: dict[str, Any]) -> Iterator[Finding]:
    """Errors first within each topic; what a person should look at."""
    for look in looks:
        yield from _of_topic(look)
    for job in daemon["jobs"]:
        if job["ok"] is False:
            problem = "; ".join(job["problems"])[:500] or "its last run failed"
            yield _finding("error", f"{job['name']}: {problem}", None, "The daemon's log says more.")
    free, total = space["free_bytes"], space["total_bytes"]
    if free is not None and total and free < total * _FREE_SHARE_MIN:
        yield _finding("warning", f"only {free} bytes are free", None, "Compaction needs room beside what is there.")
    if doubt := view.maintenance.clock_doubt():
        yield _finding("warning", doubt, None, None)


def _of_topic(look: TopicLook) -> Iterator[Finding]:
    if look.error is not None:
        yield _finding("error", look.error, look.name, "`duramen verify` says more.")
    for number, each in enumerate(look.partitions):
        name = f"{look.name}-{number}"
        if isinstance(each, str):
            yield _finding("error", each, name, "`duramen verify` says more.")
            continue
        if each.lost_offsets:
            yield _finding("error", f"damage took records of at most {each.lost_offsets} offsets", name, None)
        if each.plan.set_aside is not None and each.plan.compacted:
            yield _finding("warning", each.plan.why, name, None)
        if each.plan.is_due and each.plan.cleanable.late_ms > _LATE_MS:
            late = each.plan.cleanable.late_ms // 60_000
            yield _finding("warning", f"compaction is late by {late} minutes", name, "Is `duramen schedule` running?")


def _finding(severity: str, what: str, where: str | None, hint: str | None) -> Finding:
    return {"severity": severity, "what": what, "where": where, "hint": hint}


def _actions(view: View) -> dict[str, Any]:
    if view.actions is None:
        return {"enabled": False, "why": "this is a report of one moment"}
    if view.store.is_read_only:
        return {"enabled": False, "why": "the store can only be read here"}
    return {"enabled": True, "why": None}
