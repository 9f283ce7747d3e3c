"""What the console can do to a store: compact, pause, resume, retain. Each is shown first, and done only as shown.

A dry run gives a digest; doing it needs the same request with that digest, which counts once and for ten minutes. What
takes long goes on in the background, a few at a time, and is listed with how far it is.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compaction_job.choice import Choice
from compaction_job.job import Progress, compact, plan
from compaction_job.report import Report
from compaction_job.retention import project, retain_all
from duramen.console.problems import Refused
from duramen.session import size_text
from logstore.compaction.maintenance import MaintainedStore
from logstore.errors import DuramenError
from logstore.setting import format_value
from logstore.store import open_store

PAUSED = "duramen.compaction.paused"
_DIGEST_S = 600.0
_PENDING_MAX, _AT_ONCE_MAX, _KEPT_MAX = 64, 2, 50
_EFFECTS_MAX = 1000

Body = Mapping[str, Any]
Partitions = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a dry run found, and how to do it."""

    summary: str
    changes: bool
    effects: list[dict[str, Any]]
    do: Callable[[_Action], None]
    total: int = 1


@dataclass(frozen=True, slots=True)
class _Pending:
    name: str
    body: str
    expires: float
    shown: _Shown


@dataclass(slots=True)
class _Action:
    action_id: str
    name: str
    topic: str | None
    partitions: list[int] | None
    started_ms: int
    summary: str
    total: int
    state: str = "running"
    ended_ms: int | None = None
    problems: list[str] = field(default_factory=list)
    done: int = 0

    def document(self) -> dict[str, Any]:
        return {
            "action_id": self.action_id,
            "action": self.name,
            "topic": self.topic,
            "partitions": self.partitions,
            "state": self.state,
            "started_ms": self.started_ms,
            "ended_ms": self.ended_ms,
            "summary": self.summary,
            "problems": self.problems[:100],
            "done": self.done,
            "total": self.total,
        }


class Actions:
    """For any number of threads. Work is done on stores of its own, so that it outlives no request's."""

    def __init__(self, store: MaintainedStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._kept: deque[_Action] = deque(maxlen=_KEPT_MAX)
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._shows: dict[str, Callable[[Body], _Shown]] = {
            "compact": self._compact,
            "pause": lambda body: self._pause(body, paused=True),
            "resume": lambda body: self._pause(body, paused=False),
            "retain": self._retain,
        }

    def close(self, timeout_s: float = 8.0) -> None:
        """What runs ends at its next step."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)

    def documents(self) -> list[dict[str, Any]]:
        """Newest first."""
        with self._lock:
            return [each.document() for each in reversed(self._kept)]

    def dry_run(self, name: str, body: Body) -> dict[str, Any]:
        """What the action would do, with the digest that doing it needs. Raises Refused, DuramenError."""
        self._store.check_writable()
        self._store.topic_names()  # a look: of a bucket's topics that were seen before, the settings are those of then
        shown = self._shows[name](body)
        digest = secrets.token_hex(16)
        with self._lock:
            now = time.monotonic()
            self._pending = {key: each for key, each in self._pending.items() if each.expires > now}
            while len(self._pending) >= _PENDING_MAX:
                del self._pending[next(iter(self._pending))]
            self._pending[digest] = _Pending(name, _canonical(body), now + _DIGEST_S, shown)
        return {
            "action": name,
            "dry_run": True,
            "digest": digest,
            "expires_ms": self._store.clock.now_ms() + int(_DIGEST_S * 1000),
            "summary": shown.summary,
            "changes": shown.changes,
            "effects": shown.effects[:_EFFECTS_MAX],
            "left_off": max(len(shown.effects) - _EFFECTS_MAX, 0),
        }

    def do(self, name: str, body: Body) -> dict[str, Any]:
        """Begin what a dry run of the same request has shown. Raises Refused."""
        self._store.check_writable()
        digest = body.get("digest")
        if not digest:
            raise Refused(409, "DryRunFirst", "ask with dry_run=true first, and send its digest")
        with self._lock:
            pending = self._pending.get(str(digest))
            if pending is None or pending.expires < time.monotonic():
                raise Refused(409, "UnknownDigest", "the digest is used up, too old or none of ours", hint="Ask again.")
            if pending.name != name or pending.body != _canonical(body):
                raise Refused(409, "OtherRequest", "the digest is of another request", hint="Ask again.")
            self._threads = [each for each in self._threads if each.is_alive()]
            if len(self._threads) >= _AT_ONCE_MAX:
                raise Refused(429, "Busy", f"{_AT_ONCE_MAX} actions are under way", hint="Wait for one to end.")
            del self._pending[str(digest)]
            shown = pending.shown
            action = _Action(
                secrets.token_hex(8),
                name,
                body.get("topic"),
                body.get("partitions"),
                self._store.clock.now_ms(),
                shown.summary,
                shown.total,
            )
            self._kept.append(action)
            thread = threading.Thread(target=self._run, args=(action, shown.do), name="duramen-action", daemon=True)
            self._threads.append(thread)
            thread.start()
        thread.join(0.2)  # what is quick is over when the answer comes
        return {"action_id": action.action_id, "action": name, "dry_run": False}

    def _run(self, action: _Action, do: Callable[[_Action], None]) -> None:
        try:
            do(action)
        except (DuramenError, OSError) as error:
            action.problems.append(str(error))
        except Exception as error:
            action.problems.append(f"unexpected {type(error).__name__}: {error}")
        action.ended_ms = self._store.clock.now_ms()
        action.state = "failed" if action.problems else "done"

    # --- compact ----------------------------------------------------------------------------------------------------

    def _compact(self, body: Body) -> _Shown:
        topic, force, rolls = body.get("topic"), bool(body.get("force")), bool(body.get("roll_active"))
        only = body.get("partitions")
        if only is not None and topic is None:
            raise Refused(400, "BadRequest", "partitions need a topic", parameter="partitions")
        if topic is not None:
            found = self._store.topic(topic)
            for number in only or ():
                found.partition(number)
        plans = [
            each
            for each, _ in plan(self._store, topics=None if topic is None else [topic], force=force, estimate=False)
            if only is None or each.partition in only
        ]
        due = [each for each in plans if each.is_due or (rolls and each.compacted and not each.paused)]
        chosen: Partitions = {}
        for each in due:
            chosen.setdefault(each.topic, []).append(each.partition)
        size = sum(each.read_bytes for each in due)

        def do(action: _Action) -> None:
            with open_store(self._store.path) as store:
                report = compact(
                    store,
                    topics=chosen,
                    force=force,
                    roll_active=rolls,
                    retention=False,
                    run_name=f"console-{action.action_id}",
                    stopping=self._stop.is_set,
                    progress=Progress(ended=lambda _: _count(action)),
                )
            action.problems += [f"{run.plan.name}: {run.reason}" for run in report.failed] + report.problems
            before = sum(run.report.before_bytes for run in report.done if run.report)
            after = sum(run.report.after_bytes for run in report.done if run.report)
            action.summary = (
                f"compacted {len(report.done)} of {len(due)} partitions: {size_text(before)} became {size_text(after)}"
            )

        return _Shown(
            f"{_many(len(due), 'partition')} would be compacted: {size_text(size)} to read",
            bool(due),
            [_effect(each.topic, each.partition, each.why, each.read_bytes, each.extra_bytes) for each in due],
            do if due else _nothing,
            len(due),
        )

    # --- pause and resume -------------------------------------------------------------------------------------------

    def _pause(self, body: Body, *, paused: bool) -> _Shown:
        topic = str(body["topic"])
        found = self._store.topic(topic)
        before = self._store.topic_settings(found)[PAUSED].value
        # The store may pause all topics that say nothing of their own.
        own = paused or bool(self._store.topic_settings()[PAUSED].value)
        change: dict[str, Any] = {"configs": {PAUSED: paused}} if own else {"unset": (PAUSED,)}
        self._store.alter_topic(topic, dry_run=True, **change)

        def do(action: _Action) -> None:
            self._store.check_exists(found)
            self._store.alter_topic(topic, **change)
            action.done = 1
            action.summary = f"{topic} is {'paused' if paused else 'compacted again'}"

        would = "would not be compacted until it is resumed" if paused else "would be compacted again"
        what = f"{PAUSED}: {format_value(before)} becomes {format_value(paused)}"
        changes = bool(before) != paused
        return _Shown(
            f"{topic} {would}" if changes else f"{topic} is so already",
            changes,
            [_effect(topic, None, what)] if changes else [],
            do if changes else _nothing,
        )

    # --- retain -----------------------------------------------------------------------------------------------------

    def _retain(self, body: Body) -> _Shown:
        topic = body.get("topic")
        store, maintenance = self._store, self._store.maintenance()
        topics = store.topics() if topic is None else [store.topic(topic)]
        now_ms = maintenance.now_ms(working=True)
        effects: list[dict[str, Any]] = []
        chosen: set[tuple[str, int]] = set()
        for each in topics:
            for number in range(each.partitions):
                with contextlib.suppress(DuramenError):  # what cannot be read is not deleted
                    for one in maintenance.retain(each, number, now_ms=now_ms, dry_run=True).passes:
                        what = f"{_many(len(one.base_offsets), 'segment')} because of {one.policy}"
                        effects.append(_effect(each.name, number, what, one.size_bytes))
                        chosen.add((each.name, number))

        def do(action: _Action) -> None:
            report = Report("retention", "local", now_ms)
            with open_store(store.path) as opened:
                wanted: dict[str, list[int]] = {}
                for name, number in sorted(chosen):
                    wanted.setdefault(name, []).append(number)
                retain_all(opened, Choice(wanted), report, self._stop.is_set)
                project(opened, report)
            action.done = len(report.retained)
            action.problems += report.problems
            deleted = sum(len(one.base_offsets) for each in report.retained for one in each.passes)
            action.summary = f"deleted {_many(deleted, 'segment')} of {_many(len(report.retained), 'partition')}"

        size = sum(each["bytes"] for each in effects)
        return _Shown(
            f"segments of {_many(len(chosen), 'partition')} would be deleted: {size_text(size)}",
            bool(chosen),
            effects,
            do if chosen else _nothing,
            len(chosen),
        )


def _nothing(action: _Action) -> None:
    action.summary = "there was nothing to do"


def _count(action: _Action) -> None:
    action.done = min(action.done + 1, action.total)


def _effect(
    topic: str, partition: int | None, what: str, size_bytes: int | None = None, extra_bytes: int | None = None
) -> dict[str, Any]:
    return {"topic": topic, "partition": partition, "what": what, "bytes": size_bytes, "extra_bytes": extra_bytes}


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _canonical(body: Body) -> str:
    """What was asked for, without the digest; absent and null are the same."""
    return json.dumps({name: value for name, value in body.items() if name != "digest" and value}, sort_keys=True)
