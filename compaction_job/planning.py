"""What is due, as JSON: `python -m compaction_job.planning --store DIR [--topic T]… [--ratio X]`.

For schedulers: most urgent first, in shares for one Spark application each, and why the others are left alone. Changes
nothing. Exit codes are those of the `duramen` command: 0 done, 1 failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from compaction_job.job import plan
from compaction_job.shares import SHARE_BYTES, shares, written
from compaction_job.step import run_step, store_parser
from logstore.compaction.maintenance import MaintainedStore
from logstore.compaction.planning import PartitionPlan, compacted_partitions, most_urgent_first
from logstore.compaction.receipts import plan_details
from logstore.errors import DuramenError


def parser() -> argparse.ArgumentParser:
    options = store_parser("planning", "Which partitions are due, as JSON.")
    options.add_argument("--topic", action="append", dest="topics", metavar="NAME", help="only these topics")
    options.add_argument("--ratio", type=_ratio, metavar="X", help="this dirty ratio instead of the topics' own")
    options.add_argument("--force", action="store_true", help="ignore the dirty ratio, and earlier failures")
    options.add_argument(
        "--share-bytes", type=_bytes, default=SHARE_BYTES, metavar="N", help="how large a share may be"
    )
    options.add_argument("--now-ms", type=int)
    return options


def _ratio(text: str) -> float:
    ratio = float(text)
    if not 0.0 <= ratio <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return ratio


def _bytes(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return size


def due_partitions(
    store: MaintainedStore,
    *,
    topics: Sequence[str] | None = None,
    ratio: float | None = None,
    force: bool = False,
    now_ms: int | None = None,
    share_bytes: int = SHARE_BYTES,
) -> dict[str, Any]:
    """The document the command prints. Raises UnknownTopic, NotCompacted."""
    names = list(dict.fromkeys(topic.name for topic, _ in compacted_partitions(store, topics)))
    config = None if ratio is None else {"min.cleanable.dirty.ratio": ratio}
    found: list[PartitionPlan] = []
    problems: list[str] = []
    for name in names:  # one topic whose state is damaged does not keep the others from being compacted
        try:
            planned = plan(store, topics=[name], config=config, force=force, now_ms=now_ms, estimate=False)
        except DuramenError as error:
            problems.append(f"{name} could not be planned: {error}")
        else:
            found += [each for each, _ in planned]
    plans = most_urgent_first(found)
    due = [each for each in plans if _is_due(each, force)]
    sizes = {(each.topic, each.partition): each.size_bytes for each in due}
    return {
        "store": store.path,
        "topics": names,
        "due": [_described(each) for each in due],
        "shares": [
            {"only": written(share), "partitions": len(share), "size_bytes": sum(sizes[each] for each in share)}
            for share in shares(sizes, share_bytes)
        ],
        "not_due": [_described(each) for each in plans if not _is_due(each, force)],
        "problems": problems,
    }


def _is_due(each: PartitionPlan, force: bool) -> bool:
    """`force` also tries what was set aside again, as the job does."""
    return each.is_due or (force and each.set_aside is not None and each.cleanable.due is not None and not each.paused)


def _described(each: PartitionPlan) -> dict[str, Any]:
    return {
        "topic": each.topic,
        "partition": each.partition,
        "why": each.why,
        "size_bytes": each.size_bytes,
    } | plan_details(each)


def main(arguments: Sequence[str] | None = None) -> int:
    def work(store: MaintainedStore, options: argparse.Namespace) -> int:
        document = due_partitions(
            store,
            topics=options.topics,
            ratio=options.ratio,
            force=options.force,
            now_ms=options.now_ms,
            share_bytes=options.share_bytes,
        )
        print(json.dumps(document))
        return 0

    return run_step(parser(), arguments, work)


if __name__ == "__main__":
    sys.exit(main())
