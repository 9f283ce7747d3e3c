"""`duramen top`: partitions and the passes under way, now or live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import OnlyTopics, chosen_topics, readable_topics
from duramen.commands.plan import explained
from duramen.session import has_colour, print_table, printable_cell, session, size_text
from duramen.tables import Wrong, table_lines
from duramen.terminal import printable, raw

if TYPE_CHECKING:
    from logstore.compaction.maintenance import MaintainedStore


class Sort(str, Enum):
    DUE = "due"
    NAME = "name"
    SIZE = "size"
    RECORDS = "records"
    DIRTY = "dirty"
    RATE = "rate"


#: greater first
_ORDER: dict[Sort, Callable[[dict[str, Any]], Any]] = {
    Sort.DUE: lambda each: (each["due"], each["late_ms"], each["dirty_ratio"], -(each["next_ms"] or 1 << 62)),
    Sort.NAME: lambda each: 0,
    Sort.SIZE: lambda each: each["size_bytes"],
    Sort.RECORDS: lambda each: each["records"],
    Sort.DIRTY: lambda each: each["dirty_ratio"],
    Sort.RATE: lambda each: each["records_per_second"] or 0,
}
_COLUMNS = ("partition", "size", "records", "dirty", "of", "in/s", "next", "why")
_SHORT = (
    ("due: its dirty ratio is above the threshold", "above the ratio"),
    ("not due: its dirty ratio is not above min.cleanable.dirty.ratio", "below the ratio"),
    ("not due: everything new is in the active segment", "nothing closed"),
    ("not compacted: its cleanup.policy does not include compact", "not compacted"),
    ("paused; `duramen resume` lets it go on", "paused"),
    ("not due: ", ""),
    ("due: ", ""),
)
_PASS_COLUMNS = ("pass", "step", "read", "of", "rate", "left", "who")


def top(
    topic: OnlyTopics = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Sort by this.")] = Sort.DUE,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between refreshes.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show once and exit.")] = False,
) -> None:
    """Show partitions, how dirty they are and when they are due, and every pass of compaction under way, by whatever
    process. Live on a terminal, until interrupted.
    """
    with session.open_any() as store:
        watch = Watch(store, topic)
        if once or session.json or not sys.stdout.isatty():
            document = watch.look(sort)
            session.answer(document, lambda: _print(document))
            return
        _show_live(watch, sort, interval)


@dataclass(slots=True)
class Watch:
    """Looks at a store repeatedly; two looks give the rate of new records."""

    store: MaintainedStore
    topics: list[str] | None
    _looked_s: float | None = None
    _ends: dict[tuple[str, int], int] = field(default_factory=dict)

    def look(self, sort: Sort) -> dict[str, Any]:
        """The document of one moment."""
        from compaction_job.activity import read_activities

        store = self.store
        now_ms, now_s = store.clock.now_ms(), time.monotonic()
        elapsed_s = None if self._looked_s is None else max(now_s - self._looked_s, 0.001)
        partitions, problems = self._partitions(now_ms, elapsed_s)
        self._looked_s = now_s
        partitions.sort(key=lambda each: (each["topic"], each["partition"]))
        partitions.sort(key=_ORDER[sort], reverse=sort is not Sort.NAME)
        return {
            "time_ms": now_ms,
            "store": store.path,
            "free_bytes": store.maintenance().free_bytes(),
            "passes": [
                each | {"host": one["host"], "pid": one["pid"]}
                for one in read_activities(store, now_ms=now_ms)
                for each in one["passes"]
            ],
            "partitions": partitions,
            "problems": problems,
        }

    def _partitions(self, now_ms: int, elapsed_s: float | None) -> tuple[list[dict[str, Any]], list[str]]:
        from logstore.compaction.planning import PlanOptions, plan_partition
        from logstore.errors import DuramenError

        store, found, problems = self.store, [], []
        options = PlanOptions(now_ms, failures=store.maintenance().set_aside(now_ms), flushed=True)
        for topic in chosen_topics(store, self.topics) if self.topics else readable_topics(store):
            try:
                ends, config = store.ends(topic).high_watermarks, store.log_config(topic)
            except DuramenError as error:
                problems.append(f"{topic.name}: {error}")
                continue
            for number in range(topic.partitions):
                try:
                    plan = plan_partition(store, topic, number, options)
                    start = store.partition_state(topic, number).log_start_offset
                except DuramenError as error:
                    problems.append(f"{topic.name}-{number}: {error}")
                    continue
                before, end = self._ends.get((topic.id, number)), ends[number]
                self._ends[topic.id, number] = end
                rate = None if before is None or elapsed_s is None else max(end - before, 0) / elapsed_s
                found.append(
                    explained(plan)
                    | {
                        "size_bytes": store.log_bytes(topic, number),
                        "records": max(end - start, 0),
                        "records_exact": not plan.cleanable.first_dirty_offset > start,
                        "threshold": config.min_cleanable_dirty_ratio,
                        "records_per_second": None if rate is None else round(rate, 1),
                    }
                )
        return found, problems


def _rows(document: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{each['topic']}-{each['partition']}",
            size_text(each["size_bytes"]),
            ("" if each["records_exact"] else "≤") + str(each["records"]),
            f"{each['dirty_ratio']:.2f}" if each["compacted"] else "-",
            f"{each['threshold']:.2f}" if each["compacted"] else "-",
            "-" if each["records_per_second"] is None else f"{each['records_per_second']:,.0f}",
            _next(each, document["time_ms"]),
            Wrong(_why(each)) if each["set_aside"] or each["late_ms"] else _why(each),
        ]
        for each in document["partitions"]
    ]


def _why(each: dict[str, Any]) -> str:
    """The reason in few words: the columns before it say whether it is due, and how dirty it is."""
    text: str = each["why"]
    for known, short in _SHORT:
        if text.startswith(known):
            return short + text.removeprefix(known)
    return text


def _next(each: dict[str, Any], now_ms: int) -> str:
    if each["due"]:
        return f"{span_text(each['late_ms'])} late" if each["late_ms"] else "now"
    next_ms = each["set_aside"]["retry_ms"] if each["set_aside"] else each["next_ms"]
    return "-" if next_ms is None or not each["compacted"] or each["paused"] else f"in {span_text(next_ms - now_ms)}"


def span_text(span_ms: int) -> str:
    """A length of time in two or three characters and its unit."""
    seconds = max(span_ms, 0) // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _pass_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for each in document["passes"]:
        rate, left_ms = each["bytes_per_second"], each["left_ms"]
        rows.append(
            [
                f"{each['topic']}-{each['partition']}",
                each["step"],
                size_text(each["done_bytes"]),
                size_text(each["total_bytes"]) if each["total_bytes"] else "-",
                f"{size_text(rate)}/s" if rate else "-",
                "-" if left_ms is None else span_text(left_ms),
                f"{each['host']}, pid {each['pid']}" + (", Spark" if each["engine"] == "spark" else ""),
            ]
        )
    return rows


def _headline(document: dict[str, Any]) -> str:
    due = sum(each["due"] for each in document["partitions"])
    free = "" if document["free_bytes"] is None else f", {size_text(document['free_bytes'])} free"
    return f"{len(document['partitions'])} partitions, {due} due{free}: {document['store']}"


def _print(document: dict[str, Any]) -> None:
    print(_headline(document))
    if document["passes"]:
        print_table(_PASS_COLUMNS, _pass_rows(document))
        print()
    print_table(_COLUMNS, _rows(document))
    for problem in document["problems"]:
        print(problem)


def _show_live(watch: Watch, sort: Sort, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=raw(sys.stdout))
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            lines = screen_lines(watch.look(sort), console.width, console.height, colour=has_colour())
            live.update(Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            # A store so large that a look takes long is looked at less often: half of one core at most.
            time.sleep(max(interval, time.monotonic() - began))


def screen_lines(document: dict[str, Any], width: int, height: int, *, colour: bool = False) -> list[str]:
    """As many lines as the screen has, one a partition; its sentence ends where the screen does."""
    moment = time.strftime("%H:%M:%S", time.gmtime(document["time_ms"] // 1000))
    headline = f"{moment}Z  {printable(_headline(document))}"
    lines = [headline if len(headline) <= width else f"{headline[: width - 1]}…", ""]
    passes = [[printable_cell(cell) for cell in row] for row in _pass_rows(document)]
    if passes:
        shown = passes[: max(height // 3, 1)]
        lines += table_lines(_PASS_COLUMNS, shown, colour=colour)
        lines += [f"and {len(passes) - len(shown)} more passes"] * (len(passes) > len(shown)) + [""]
    problems = [printable(problem) for problem in document["problems"][:3]]
    room = max(height - len(lines) - len(problems) - 2, 1)
    rows = [[printable_cell(cell) for cell in row] for row in _rows(document)]
    sentence = max(
        width - max(map(len, table_lines(_COLUMNS[:-1], [row[:-1] for row in rows[:room]])), default=0) - 2, 8
    )
    for row in rows[:room]:
        row[-1] = type(row[-1])(row[-1] if len(row[-1]) <= sentence else row[-1][: sentence - 1] + "…")
    lines += table_lines(_COLUMNS, rows[:room], colour=colour)
    lines += [f"and {len(rows) - room} more partitions"] * (len(rows) > room)
    return lines + problems
