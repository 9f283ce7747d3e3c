"""`duramen explain`, `plan`, `compact`, `pause`, `resume`, `prove-erased`: what compaction would do, does, and did."""

from __future__ import annotations

import base64
import binascii
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.consume import Encoding
from duramen.commands.offsets import Topics, chosen_topics
from duramen.losses import loss_documents, losses_of, print_losses
from duramen.session import (
    DAMAGE,
    FAILED,
    INTERRUPTED,
    bad_usage,
    key_values,
    print_pairs,
    print_table,
    session,
    size_text,
    stop,
    time_text,
)
from duramen.terminal import raw

if TYPE_CHECKING:
    from types import FrameType

    from compaction_job.estimate import Estimate
    from compaction_job.job import Progress, Report
    from logstore.compaction.erasure import Erasure
    from logstore.compaction.planning import PartitionPlan
    from logstore.store import LogStore
    from logstore.topics.registry import Topic

PAUSED = "duramen.compaction.paused"
NEXT_RULES = {
    "horizon": "delete horizon",
    "max_lag": "max.compaction.lag.ms",
    "expired": "duramen.key.ttl.ms",
    "recompress": "duramen.compaction.recompress.after.ms",
}

OneTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
TopicOption = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="TOPIC", help="Only this topic; may be given again.", show_default=False),
]
NowMs = Annotated[
    int | None,
    typer.Option("--now-ms", metavar="MS", min=0, help="Decide as if it were this time.", show_default="now"),
]
Force = Annotated[bool, typer.Option("--force", help="Whatever the dirty ratio; min.compaction.lag.ms still holds.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]


class EngineName(str, Enum):
    LOCAL = "local"
    SPARK = "spark"


# --- explain -------------------------------------------------------------------------------------------------------


def explain(topics: Topics = None, now_ms: NowMs = None) -> None:
    """Show for each partition whether it is due for compaction, why, and when it will be due next."""
    from logstore.compaction.planning import plan_partition
    from logstore.errors import DuramenError

    damaged = False
    with session.open() as store:
        now = store.clock.now_ms() if now_ms is None else now_ms
        failures = _failures(store, now)
        documents = []
        for topic in chosen_topics(store, topics):
            for number in range(topic.partitions):
                try:
                    plan = plan_partition(store, topic, number, now_ms=now, failures=failures, flushed=True)
                    losses = store.partition_state(topic, number).losses
                    documents.append(_explained(plan) | {"losses": loss_documents(losses)})
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
                            time_text(each["next_horizon_ms"]),
                            _when(each),
                            each["why"],
                        ]
                    ),
                ]
                for each in documents
            ],
        )
        for each in documents:
            print_losses(f"{each['topic']}-{each['partition']}", losses_of(each.get("losses", ())))

    session.answer({"now_ms": now, "partitions": documents}, text)
    if damaged:
        stop(DAMAGE)


def _failures(store: LogStore, now_ms: int) -> dict[tuple[str, int], Any]:
    """Set-aside partitions; a store without a ledger has none, and is not given one by looking."""
    if not store.has_ledger:
        return {}
    from logstore.compaction.planning import failures_of, still_set_aside

    ledger = store.ledger()
    return still_set_aside(failures_of(store, ledger), now_ms)


def _explained(plan: PartitionPlan) -> dict[str, Any]:
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
        "set_aside": None
        if aside is None
        else {
            "reason": aside.reason,
            "failures": aside.failures,
            "failed_ms": aside.failed_ms,
            "retry_ms": aside.retry_ms,
        },
    }


def _when(document: dict[str, Any]) -> str:
    """When it can be due by time alone."""
    if document["due"]:
        late = f", late by {document['late_ms'] / 1000:.0f} s" if document["late_ms"] else ""
        return f"now{late}"
    if not document["compacted"] or document["paused"]:
        return "-"
    if document["set_aside"]:
        return f"retry {time_text(document['set_aside']['retry_ms'])}"
    if document["next_ms"] is None:
        return "with new records"
    rule = NEXT_RULES.get(document["next_due"], "min.compaction.lag.ms")
    return f"{time_text(document['next_ms'])} ({rule})"


# --- plan ----------------------------------------------------------------------------------------------------------


def plan(
    topic: TopicOption = None,
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
    with session.open() as store:
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
    return _explained(plan) | {
        "groups": plan.groups,
        "groups_at_once": plan.groups_at_once,
        "read_bytes": plan.read_bytes,
        "extra_bytes": plan.extra_bytes,
        "estimate": None
        if estimate is None
        else {
            "before_bytes": estimate.before_bytes,
            "after_bytes": estimate.after_bytes,
            "records": estimate.records,
            "removed": dict(estimate.removed),
            "keys": estimate.keys,
            "map_full": estimate.map_full,
            "map_buffer_wanted": estimate.map_buffer_wanted,
            "map_threads_wanted": estimate.map_threads_wanted,
            "rough": estimate.rough,
        },
    }


def _removes(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return ("about " if estimate["rough"] else "") + reasons_text(estimate["removed"])


def reasons_text(removed: dict[str, int]) -> str:
    """Records by reason, for people."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(removed.items()) if count) or "nothing"


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


# --- compact -------------------------------------------------------------------------------------------------------


def compact(
    topic: TopicOption = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", metavar="N", min=0, help="Only this partition; may be given again.", show_default=False
        ),
    ] = None,
    force: Force = False,
    roll_active: Annotated[
        bool, typer.Option("--roll-active", help="Close active segments first, so that they are compacted, too.")
    ] = False,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="This process alone, or Spark's tasks.")
    ] = EngineName.LOCAL,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=1024,
            help="Passes and groups at once; log.cleaner.threads where it is set, else one a core.",
            show_default=False,
        ),
    ] = None,
    now_ms: NowMs = None,
    dry_run: DryRun = False,
) -> None:
    """Compact every partition that is due, most urgent first, then run retention. The ledger records every pass."""
    from compaction_job.job import compact as run_job

    if partition is not None and (topic is None or len(topic) != 1):
        raise bad_usage("--partition needs exactly one --topic")
    with session.open() as store:
        for number in partition or ():
            store.topic(topic[0]).partition(number)  # type: ignore[index]
        with spark_session(engine) as spark, told_to_stop() as stopping, _shown() as progress:
            _cancel_with(stopping, spark)
            report = run_job(
                store,
                spark=spark,
                topics=topic,
                partitions=partition,
                dry_run=dry_run,
                force=force,
                roll_active=roll_active,
                now_ms=now_ms,
                threads=threads,
                stopping=stopping.is_set,
                progress=progress,
            )
    session.answer(report.as_dict(), lambda: _receipts(report))
    if stopping.is_set():
        stop(INTERRUPTED)
    if report.failed or report.problems:
        stop(FAILED)


def _receipts(report: Report) -> None:
    from logstore.compaction.budget import MapAdvice

    rows = []
    for run in report.runs:
        receipt = run.report
        rows.append(
            [
                run.plan.name,
                run.result,
                "-" if receipt is None else size_text(receipt.before_bytes),
                "-" if receipt is None else size_text(receipt.after_bytes),
                "-" if receipt is None else reasons_text(receipt.removed),
                "-" if receipt is None else f"{receipt.seconds:.2f}",
                run.reason + (", rolled" if run.rolled else ""),
            ]
        )
    print_table(["partition", "result", "before", "after", "removed", "seconds", "why"], rows)
    for run in report.runs:
        if run.report is not None and run.report.map_full:
            advice = MapAdvice(run.report.map_buffer_wanted or 0, run.report.map_threads_wanted)
            print(
                f"{run.plan.name}: the offset map was full at offset {run.report.end_offset}; "
                f"{advice} would do for one pass"
            )
    for kept in report.retained:
        for one in kept.passes:
            print(f"{kept.partition}: {len(one.base_offsets)} segments deleted because of {one.policy}")
    for line in (*report.notes, *report.problems):
        print(line)
    before = sum(run.report.before_bytes for run in report.done if run.report)
    after = sum(run.report.after_bytes for run in report.done if run.report)
    print(
        f"{len(report.done)} compacted, {len(report.failed)} failed, "
        f"{len(report.runs) - len(report.done) - len(report.failed)} left alone; {size_text(before)} became "
        f"{size_text(after)} in {report.seconds:.2f} s ({report.engine}, run {report.run_name})"
    )


@contextlib.contextmanager
def spark_session(engine: EngineName) -> Iterator[Any]:
    """A session while the engine is Spark; None otherwise."""
    if engine is EngineName.LOCAL:
        yield None
        return
    import os

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise bad_usage("--engine spark needs pyspark: install duramen[spark], or use --engine local") from None
    # Spark's own progress bar would be drawn over ours.
    builder = SparkSession.builder.appName("duramen-compaction").config("spark.ui.showConsoleProgress", "false")
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set: the work ends at its next step. A second SIGINT interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()
        sys.stderr.write("stopping; what is swapped in stays, the rest is done by the next run\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cancel_with(stopping: threading.Event, spark: Any) -> None:
    """Let Spark's tasks end when the work is told to stop; not from the signal's handler, which may interrupt py4j."""

    def cancel() -> None:
        stopping.wait()
        with contextlib.suppress(Exception):  # the session may be gone by then
            spark.sparkContext.cancelAllJobs()

    if spark is not None:
        threading.Thread(target=cancel, name="duramen-cancel", daemon=True).start()


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """Progress on stderr while a person is watching: a line each for the whole and for each partition under way."""
    from compaction_job.job import Progress

    if session.json or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        TextColumn("{task.fields[step]}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=raw(sys.stderr)),
        transient=True,
    )
    lock = threading.Lock()
    tasks: dict[str, Any] = {}
    whole: list[Any] = []

    def planned(plans: Sequence[PartitionPlan]) -> None:
        due = [each for each in plans if each.is_due]
        whole.append(bars.add_task(f"{len(due)} partitions", total=sum(each.read_bytes for each in due), step=""))

    def started(plan: PartitionPlan) -> None:
        with lock:
            tasks[plan.name] = bars.add_task(plan.name, total=plan.read_bytes, step="index")

    def moved(name: str, step: str, size_bytes: int) -> None:
        with lock:
            task = tasks.get(name)
        if task is None:
            return
        done = 0 if step == "write" else size_bytes
        bars.update(task, advance=done, step="rewrite" if step == "write" else step)
        if whole:
            bars.advance(whole[0], done)

    def ended(run: Any) -> None:
        with lock:
            task = tasks.pop(run.plan.name, None)
        if task is not None:
            bars.remove_task(task)

    with bars:
        yield Progress(planned=planned, started=started, moved=moved, ended=ended)


# --- pause and resume ----------------------------------------------------------------------------------------------


def pause(topic: OneTopic, dry_run: DryRun = False) -> None:
    """Leave a topic out of compaction until it is resumed; appends, reads and retention go on."""
    with session.open() as store:
        altered = store.alter_topic(topic, configs={PAUSED: True}, dry_run=dry_run)
        _answer_paused(altered, paused=True, dry_run=dry_run)


def resume(topic: OneTopic, dry_run: DryRun = False) -> None:
    """Let a paused topic be compacted again."""
    with session.open() as store:
        # The store may pause all topics that say nothing of their own.
        by_default = bool(store.topic_settings()[PAUSED].value)
        altered = store.alter_topic(
            topic,
            configs={PAUSED: False} if by_default else {},
            unset=() if by_default else (PAUSED,),
            dry_run=dry_run,
        )
        _answer_paused(altered, paused=False, dry_run=dry_run)


def _answer_paused(topic: Topic, *, paused: bool, dry_run: bool) -> None:
    verb = ("Would pause" if paused else "Would resume") if dry_run else ("Paused" if paused else "Resumed")
    session.answer(
        {"topic": topic.name, "paused": paused, "altered": not dry_run},
        lambda: print(f"{verb} compaction of {topic.name}"),
    )


# --- prove-erased --------------------------------------------------------------------------------------------------


def prove_erased(
    topic: OneTopic,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="The keys.", show_default=False)],
    encoding: Annotated[
        Encoding, typer.Option("--encoding", help="How the keys are written on the command line.")
    ] = Encoding.UTF8,
    now_ms: NowMs = None,
) -> None:
    """Look for keys in every file of the store that may still hold them; exit 1 while one does."""
    from logstore.compaction.erasure import find_keys

    wanted = [_key(each, encoding) for each in keys]
    with session.open() as store:
        found_topic = store.topic(topic)
        now = store.clock.now_ms() if now_ms is None else now_ms
        total = sum(store.log_bytes(found_topic, number) for number in range(found_topic.partitions))
        with session.progress(f"looking through {topic}", total) as step:
            found = find_keys(store, found_topic, wanted, now_ms=now, progress=step)
    documents = [_erasure(text, each) for text, each in zip(keys, found, strict=True)]

    def text() -> None:
        for number, document in enumerate(documents):
            if number:
                print()
            print(f"{document['key']}: {document['verdict']}")
            if document["places"]:
                print_table(
                    ["place", "partition", "offsets", "holds", "goes", "not before", "file"],
                    [
                        [
                            each["kind"],
                            "-" if each["partition"] is None else each["partition"],
                            "-" if each["first_offset"] is None else f"{each['first_offset']}..{each['last_offset']}",
                            each["holds"],
                            each["goes"],
                            time_text(each["goes_ms"]),
                            each["file"],
                        ]
                        for each in document["places"]
                    ],
                )
            run = document["removed_by"]
            if run is not None:
                print_pairs(
                    [
                        ("run", run["run_id"]),
                        ("partition", f"{topic}-{run['partition']}"),
                        ("ended", time_text(run["ended_ms"])),
                        ("removed", reasons_text(run["removed"])),
                    ]
                )

    session.answer({"topic": topic, "now_ms": now, "keys": documents}, text)
    if not all(each.erased for each in found):
        stop(FAILED)


def _key(text: str, encoding: Encoding) -> bytes:
    if encoding is Encoding.UTF8:
        return text.encode("utf-8", "surrogateescape")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_usage(f"{text!r} is not base64") from None


def _erasure(text: str, found: Erasure) -> dict[str, Any]:
    run = found.removed_by
    return {
        "key": text,
        "erased": found.erased,
        "verdict": _verdict(found),
        "places": [
            {
                "kind": each.kind,
                "file": each.file,
                "partition": each.partition,
                "records": each.records,
                "first_offset": None if each.offsets is None else each.offsets[0],
                "last_offset": None if each.offsets is None else each.offsets[1],
                "holds": each.holds,
                "goes": each.goes,
                "goes_ms": each.goes_ms,
                "unreadable": each.unreadable,
            }
            for each in found.places
        ],
        "removed_by": None
        if run is None
        else {
            "run_id": run.run_id,
            "partition": run.partition,
            "ended_ms": run.ended_ms,
            "removed": dict(run.removed),
        },
    }


def _verdict(found: Erasure) -> str:
    if not found.erased:
        return f"still in {len(found.places)} places" if len(found.places) > 1 else "still in 1 place"
    if found.removed_by is not None:
        return "nothing holds it; the last run that removed deleted keys from its partition"
    if found.log_starts:
        below = ", ".join(f"{start} of partition {number}" for number, start in sorted(found.log_starts.items()))
        return f"nothing holds it; never written, or gone with what retention deleted below offset {below}"
    return "never written"
