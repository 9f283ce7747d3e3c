"""Retention of a store as a step of its own: `python -m compaction_job.retention --store DIR [--topic T]…`.

For schedulers that start compaction one partition at a time. Every policy of every topic, compacted or not; files whose
delay is over are removed with it. A bucket is sealed before, and what nobody needs there is deleted. A partition that
fails does not stop the others. Prints what it did as JSON; exit codes are those of the `duramen` command: 0 done,
1 failed, 2 bad usage.
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
from logstore.compaction.maintenance import Job, MaintainedStore, Maintenance
from logstore.errors import DuramenError, LockHeld
from logstore.topics.registry import Topic


def retain_all(
    store: MaintainedStore,
    choice: Choice,
    report: Report,
    stopping: Callable[[], bool] = lambda: False,
    *,
    maintenance: Maintenance | None = None,
) -> None:
    """Retention of every policy as of the report's time, also of partitions whose compaction failed.

    Its `maintenance`, where it is at hand, saves opening the ledger again.
    """
    maintenance = maintenance or store.maintenance()
    for topic in choice.topics_of(store):
        if not stopping():
            _prepare(maintenance, topic, report)
        for number in range(topic.partitions):
            if not choice.has(topic.name, number):
                continue
            if stopping():
                return
            try:
                done = maintenance.retain(topic, number, now_ms=report.now_ms)
                if done.passes:
                    report.retained.append(done)
            except LockHeld as error:
                report.notes.append(f"retention of {topic.name}-{number} is left to another process: {error.what}")
            except DuramenError as error:
                report.problems.append(f"retention of {topic.name}-{number}: {error}")


def _prepare(maintenance: Maintenance, topic: Topic, report: Report) -> None:
    try:
        maintenance.prepare_retention(topic)
    except LockHeld as error:
        report.notes.append(f"{topic.name} is flushed by another process: {error.what}")
    except DuramenError as error:
        report.problems.append(f"{topic.name} could not be flushed first: {error}")


def project(store: MaintainedStore, report: Report, *, maintenance: Maintenance | None = None) -> None:
    """What other tools read, and a sample of what changed for the history, at the end of every run."""
    maintenance = maintenance or store.maintenance()
    changed = {run.plan.topic for run in report.done} | {each.partition.topic for each in report.retained}
    take_samples(store, changed, maintenance=maintenance)
    report.problems += maintenance.publish()


def _tidy(maintenance: Maintenance, job: Job, report: Report) -> None:
    """What a store in a bucket needs beside, where a scheduler stands for the daemon."""
    if job in maintenance.jobs:
        done = maintenance.tidy(job, lambda: False, wait_for_idle=False)
        report.problems += done.problems
        report.notes += done.notes


def parser() -> argparse.ArgumentParser:
    options = store_parser("retention", "Delete what retention gives up.")
    options.add_argument("--topic", action="append", dest="topics", metavar="NAME", help="only these topics")
    options.add_argument("--now-ms", type=int)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    def work(store: MaintainedStore, options: argparse.Namespace) -> int:
        maintenance = store.maintenance()
        now_ms = maintenance.now_ms(working=True) if options.now_ms is None else options.now_ms
        report = Report("retention", "local", now_ms)
        if options.now_ms is None and (doubt := maintenance.clock_doubt()):
            report.notes.append(doubt)
        _tidy(maintenance, Job.SEAL, report)
        retain_all(store, Choice(options.topics), report, maintenance=maintenance)
        _tidy(maintenance, Job.SWEEP, report)
        project(store, report, maintenance=maintenance)
        document = report.as_dict()
        print(json.dumps({name: document[name] for name in ("now_ms", "retained", "problems", "notes")}))
        for problem in report.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1 if report.problems else 0

    return run_step(parser(), arguments, work)


if __name__ == "__main__":
    sys.exit(main())
