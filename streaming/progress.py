"""How micro-batches went: the ledger's figures beside the query's own progress. Reads only.

Spark has no place for a foreachBatch function's figures in its progress, except for what is observed on the stream's
own plan: rows and bytes go there (`LogSink.observed`), and everything is joined by batch id here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logstore.commit.committer import Committed
from logstore.ledger import CommitRow

#: name of the observation; an app_id is appended
OBSERVED = "duramen"
BATCHES_MAX = 100  # as many as Spark keeps


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One committed micro-batch. `commit_ms` and `append_ms` are None where they can no longer be known."""

    batch_id: int
    records: int
    bytes: int
    dead_letters: int
    encode_ms: int | None
    plan_ms: int | None
    commit_ms: int | None
    append_ms: int | None
    workers: tuple[str, ...]
    #: Spark's StreamingQueryProgress of the same batch, where the query still has it
    query: Any = None


def batch_progress(
    rows: Sequence[CommitRow], last: Committed | None, spark_progress: Mapping[int, Any]
) -> list[BatchProgress]:
    """An app's batches from its ledger rows, oldest first.

    A row is written before its own commit and append: their times are in the next row, or in the `last` receipt.
    """
    plans: dict[str, list[CommitRow]] = {}
    for row in rows:
        if not row.void and row.batch_id is not None:
            plans.setdefault(row.plan_id, []).append(row)
    ordered = list(plans.values())
    found = []
    for number, of_plan in enumerate(ordered):
        first = of_plan[0]
        after: Mapping[str, int] = {}
        if number + 1 < len(ordered):
            following = ordered[number + 1][0].timings_ms
            after = {name.removeprefix("previous_"): ms for name, ms in following.items() if "previous_" in name}
        elif last is not None and last.plan_id == first.plan_id:
            after = last.timings_ms
        assert first.batch_id is not None
        found.append(
            BatchProgress(
                first.batch_id,
                sum(row.records for row in of_plan),
                sum(row.size_bytes for row in of_plan),
                first.dead_letters,
                first.timings_ms.get("encode"),
                first.timings_ms.get("plan"),
                after.get("commit"),
                after.get("append"),
                first.workers,
                spark_progress.get(first.batch_id),
            )
        )
    return found
