"""Retention of a store as a step of its own: `python -m compaction_job.retention --store DIR [--topic T]…`.

For schedulers that start compaction one partition at a time. Every policy of every topic, compacted or not; files whose
delay is over are removed with it. A partition that fails does not stop the others. Prints what it did as JSON; exit
codes are those of the `duramen` command: 0 done, 1 failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from compaction_job.job import Report, project, retain_all
from compaction_job.step import run_step, store_parser
from logstore.directory.shared_clock import doubt_of
from logstore.store import LogStore


def parser() -> argparse.ArgumentParser:
    options = store_parser("retention", "Delete what retention gives up.")
    options.add_argument("--topic", action="append", dest="topics", metavar="NAME", help="only these topics")
    options.add_argument("--now-ms", type=int)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    def work(store: LogStore, options: argparse.Namespace) -> int:
        now_ms = store.clock.now_ms() if options.now_ms is None else options.now_ms
        report = Report("retention", "local", now_ms)
        if options.now_ms is None and (doubt := doubt_of(store.clock)):
            report.notes.append(doubt)
        retain_all(store, options.topics, None, now_ms, report)
        project(store, report)
        document = report.as_dict()
        print(json.dumps({name: document[name] for name in ("now_ms", "retained", "problems", "notes")}))
        for problem in report.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1 if report.problems else 0

    return run_step(parser(), arguments, work)


if __name__ == "__main__":
    sys.exit(main())
