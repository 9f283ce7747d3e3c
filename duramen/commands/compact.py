"""`duramen compact`, `pause` and `resume`: what is due is compacted, by this process or by Spark, or left alone."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun, Force, NowMs, OneTopic, OnlyTopics
from duramen.session import FAILED, INTERRUPTED, bad_usage, count_text, print_table, session, size_text, stop

if TYPE_CHECKING:
    from types import FrameType

    from compaction_job.job import Progress, Report
    from logstore.compaction.planning import PartitionPlan
    from logstore.topics.registry import Topic

_PAUSED = "duramen.compaction.paused"


class EngineName(str, Enum):
    LOCAL = "local"
    SPARK = "spark"


Engine = Annotated[EngineName, typer.Option("--engine", help="This process alone, or Spark's tasks.")]


def compact(
    topic: OnlyTopics = None,
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
    engine: Engine = EngineName.LOCAL,
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
    """Compact every partition that is due, most urgent first, then run retention. Each pass leaves a receipt."""
    from compaction_job.job import compact as run_job

    if partition is not None and (topic is None or len(topic) != 1):
        raise bad_usage("--partition needs exactly one --topic")
    with session.open_any() as store:
        for number in partition or ():
            store.topic(topic[0]).partition(number)  # type: ignore[index]
        with spark_session(engine) as spark, stop_event() as stopping, _shown() as progress:
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
            print(f"{kept.partition}: {count_text(len(one.base_offsets), 'segment')} deleted because of {one.policy}")
    for line in (*report.notes, *report.problems):
        print(line)
    before = sum(run.report.before_bytes for run in report.done if run.report)
    after = sum(run.report.after_bytes for run in report.done if run.report)
    became = f"; {size_text(before)} became {size_text(after)}" if report.done else ""
    print(
        f"{len(report.done)} compacted, {len(report.failed)} failed, "
        f"{len(report.runs) - len(report.done) - len(report.failed)} left alone{became} in {report.seconds:.2f} s "
        f"({report.engine}, run {report.run_name})"
    )


def reasons_text(removed: dict[str, int]) -> str:
    """Records by reason, for people."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(removed.items()) if count) or "nothing"


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
def stop_event(
    said: str = "stopping; what is swapped in stays, the rest is done by the next run",
) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set: the work ends at its next step. A second SIGINT interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()
        sys.stderr.write(said + "\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cancel_with(stopping: threading.Event, spark: Any) -> None:
    """Let Spark's tasks end when the work is stopped; not from the signal's handler, which may interrupt py4j."""

    from logstore.spark_tasks import cancel_jobs

    def cancel() -> None:
        stopping.wait()
        with contextlib.suppress(Exception):  # the session may be gone by then
            cancel_jobs(spark)

    if spark is not None:
        threading.Thread(target=cancel, name="duramen-cancel", daemon=True).start()


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """Progress on stderr while a person is watching: a line each for the whole and for each partition under way."""
    from compaction_job.job import Progress

    if not session.is_watched:
        yield Progress()
        return
    from duramen.progress import Bars, Counter

    bars = Bars()
    lock = threading.Lock()
    whole, expected = Counter(), Counter()
    due: dict[str, int] = {}
    under_way: dict[str, tuple[Any, Counter]] = {}
    steps: dict[str, str] = {}

    def planned(plans: Sequence[PartitionPlan]) -> None:
        due.update({each.name: each.read_bytes for each in plans if each.is_due})
        expected.add(sum(due.values()))
        if due:
            name = f"{len(due)} partition{'s' * (len(due) > 1)}"
            bars.watch(name, lambda: expected.count, lambda: whole.count)

    def started(plan: PartitionPlan) -> None:
        counter = Counter()
        with lock:
            expected.add(plan.read_bytes - due.get(plan.name, 0))  # rolled since: there is more to read
            due[plan.name] = plan.read_bytes
            steps[plan.name] = "index"
            note = lambda: steps.get(plan.name, "")  # noqa: E731
            task = bars.watch(plan.name, lambda: plan.read_bytes, lambda: counter.count, note=note)
            under_way[plan.name] = (task, counter)

    def moved(name: str, step: str, size_bytes: int) -> None:
        found = under_way.get(name)
        if found is None:
            return
        steps[name] = "rewrite" if step == "write" else step
        if step != "write":
            found[1].add(size_bytes)
            whole.add(size_bytes)

    def ended(run: Any) -> None:
        with lock:
            found = under_way.pop(run.plan.name, None)
            planned_bytes = due.pop(run.plan.name, 0)
        # Whatever it did not read, there is nothing left to do of it.
        whole.add(planned_bytes - (found[1].count if found is not None else 0))
        if found is not None:
            bars.forget(found[0])

    with bars:
        yield Progress(planned=planned, started=started, moved=moved, ended=ended)


def pause(topic: OneTopic, dry_run: DryRun = False) -> None:
    """Leave a topic out of compaction until it is resumed; appends, reads and retention go on."""
    with session.open_any() as store:
        before = store.topic(topic)
        altered = store.alter_topic(topic, configs={_PAUSED: True}, dry_run=dry_run)
        _answer_paused(before, altered, paused=True, dry_run=dry_run)


def resume(topic: OneTopic, dry_run: DryRun = False) -> None:
    """Let a paused topic be compacted again."""
    with session.open_any() as store:
        # The store may pause all topics that say nothing of their own.
        by_default = bool(store.topic_settings()[_PAUSED].value)
        before = store.topic(topic)
        altered = store.alter_topic(
            topic,
            configs={_PAUSED: False} if by_default else {},
            unset=() if by_default else (_PAUSED,),
            dry_run=dry_run,
        )
        _answer_paused(before, altered, paused=False, dry_run=dry_run)


def _answer_paused(before: Topic, topic: Topic, *, paused: bool, dry_run: bool) -> None:
    changes = topic.config_version != before.config_version
    verb = ("Would pause" if paused else "Would resume") if dry_run else ("Paused" if paused else "Resumed")
    session.answer(
        {"topic": topic.name, "paused": paused, "altered": changes and not dry_run},
        lambda: print(f"{verb} compaction of {topic.name}"),
    )
