"""Retention of a store as a step of its own: `python -m compaction_job.retention --store DIR [--topic T]…`.

For schedulers that start compaction one partition at a time. Every policy of every topic, compacted or not; files whose
delay is over are removed with it. A partition that fails does not stop the others. Prints what it did as JSON; exit
codes are those of the `duramen` command: 0 done, 1 failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from compaction_job.choice import Choice
from compaction_job.report import Report
from compaction_job.sampling import take_samples
from compaction_job.step import run_step, store_parser
from logstore.directory.shared_clock import clock_warning
from logstore.errors import DuramenError, LockHeld
from logstore.ledger import Ledger
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.retention import flush_before_retention, retain


def retain_all(store: LogStore, choice: Choice, report: Report, stopping: Callable[[], bool] = lambda: False) -> None:
    """Retention of every policy as of the report's time, also of partitions whose compaction failed.

    Flushes first: only what is on disk in the logs may go, and a flush removes what is staged.
    """
    for topic in choice.topics_of(store):
        if not stopping():
            _flush_first(store, topic, report)
        for number in range(topic.partitions):
            if not choice.has(topic.name, number):
                continue
            if stopping():
                return
            try:
                if retain(store, topic, number, now_ms=report.now_ms, dry_run=True).passes:
                    report.retained.append(retain(store, topic, number, now_ms=report.now_ms, wait_ms=0))
                else:
                    store.sweep_deleted(topic, number, now_ms=report.now_ms)
            except LockHeld as error:
                report.notes.append(f"retention of {topic.name}-{number} is left to another process: {error.what}")
            except DuramenError as error:
                report.problems.append(f"retention of {topic.name}-{number}: {error}")


def _flush_first(store: LogStore, topic: Topic, report: Report) -> None:
    try:
        flush_before_retention(store, topic)
    except LockHeld as error:
        report.notes.append(f"{topic.name} is flushed by another process: {error.what}")
    except DuramenError as error:
        report.problems.append(f"{topic.name} could not be flushed first: {error}")


def project(store: LogStore, report: Report, *, ledger: Ledger | None = None) -> None:
    """Kafka's checkpoint files, and a sample of what changed for the history, at the end of every run."""
    changed = {run.plan.topic for run in report.done} | {each.partition.topic for each in report.retained}
    take_samples(store, changed, ledger=ledger)
    try:
        store.project_checkpoints()
    except (DuramenError, OSError) as error:
        report.problems.append(f"Kafka's checkpoint files could not be written: {error}")


def parser() -> argparse.ArgumentParser:
    options = store_parser("retention", "Delete what retention gives up.")
    options.add_argument("--topic", action="append", dest="topics", metavar="NAME", help="only these topics")
    options.add_argument("--now-ms", type=int)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    def work(store: LogStore, options: argparse.Namespace) -> int:
        now_ms = store.clock.now_ms() if options.now_ms is None else options.now_ms
        report = Report("retention", "local", now_ms)
        if options.now_ms is None and (doubt := clock_warning(store.clock)):
            report.notes.append(doubt)
        retain_all(store, Choice(options.topics), report)
        project(store, report)
        document = report.as_dict()
        print(json.dumps({name: document[name] for name in ("now_ms", "retained", "problems", "notes")}))
        for problem in report.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1 if report.problems else 0

    return run_step(parser(), arguments, work)


if __name__ == "__main__":
    sys.exit(main())
