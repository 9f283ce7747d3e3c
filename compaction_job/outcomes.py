"""What became of an Airflow run, as JSON: `python -m compaction_job.outcomes --store DIR --airflow-run-id ID`.

From the receipts in the ledger, so it does not matter where the applications ran. Each partition's newest receipt
counts: a failed try that was repeated is over. Exit codes are those of the `duramen` command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from logstore.errors import DuramenError
from logstore.ledger import Ledger
from logstore.store.store import LogStore


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="compaction_job.outcomes", description="What an Airflow run did, as JSON.")
    options.add_argument("--store", default=os.environ.get("DURAMEN_STORE"), help="the store's directory")
    options.add_argument("--airflow-run-id", required=True)
    return options


def outcomes(store: LogStore, airflow_run_id: str) -> list[dict[str, Any]]:
    """Topics and partitions in order."""
    ledger = Ledger(store.layout.ledger, fs=store.fs, clock=store.clock)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for run in ledger.runs(pc.field("airflow_run_id") == airflow_run_id):
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
    options = parser().parse_args(arguments)
    if not options.store:
        parser().error("no store: give --store, or set DURAMEN_STORE")
    try:
        with LogStore(options.store) as store:
            found = outcomes(store, options.airflow_run_id)
    except (DuramenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
