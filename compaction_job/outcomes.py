"""What became of an Airflow run, as JSON: `python -m compaction_job.outcomes --store DIR --airflow-run-id ID`.

From the receipts that the store keeps, so it does not matter where the applications ran. Each partition's newest
receipt counts: a failed try that was repeated is over. Exit codes are those of the `duramen` command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from compaction_job.step import run_step, store_parser
from logstore.compaction.maintenance import MaintainedStore


def parser() -> argparse.ArgumentParser:
    options = store_parser("outcomes", "What an Airflow run did, as JSON.")
    options.add_argument("--airflow-run-id", required=True)
    return options


def outcomes(store: MaintainedStore, airflow_run_id: str) -> list[dict[str, Any]]:
    """Topics and partitions in order."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for run in store.maintenance().runs():
        if run.airflow_run_id != airflow_run_id:
            continue
        found[run.topic or "", run.partition or 0] = {
            "topic": run.topic,
            "partition": run.partition,
            "result": run.result,
            "reason": run.reason,
            "run_id": run.run_id,
            "before_bytes": run.before_bytes,
            "after_bytes": run.after_bytes,
            "removed": dict(run.removed),
        }
    return [found[key] for key in sorted(found)]


def main(arguments: Sequence[str] | None = None) -> int:
    def work(store: MaintainedStore, options: argparse.Namespace) -> int:
        print(json.dumps(outcomes(store, options.airflow_run_id)))
        return 0

    return run_step(parser(), arguments, work)


if __name__ == "__main__":
    sys.exit(main())
