"""A step of the job as a command of its own: it opens a store and prints one JSON document.

Exit codes are those of the `duramen` command: 0 done, 1 failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from logstore.compaction.maintenance import MaintainedStore
from logstore.errors import DuramenError
from logstore.store import open_store


def store_parser(name: str, description: str) -> argparse.ArgumentParser:
    """With the option that every step has."""
    options = argparse.ArgumentParser(prog=f"compaction_job.{name}", description=description)
    options.add_argument("--store", default=os.environ.get("DURAMEN_STORE"), help="the store: a directory or a URL")
    return options


def run_step(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    work: Callable[[MaintainedStore, argparse.Namespace], int],
) -> int:
    """The exit code of `work`, or that of the error it ended with."""
    options = parser.parse_args(arguments)
    if not options.store:
        parser.error("no store: give --store, or set DURAMEN_STORE")
    try:
        with open_store(options.store) as store:
            return work(store, options)
    except (DuramenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
