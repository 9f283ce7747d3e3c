"""Appending without Spark: rows of one call are staged, committed and appended like any micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed
from logstore.commit.driver import Batch, Commits, Encoded, append_batch
from logstore.commit.staging import EncodeOptions, StagedWriter, TopicTarget
from logstore.errors import DuramenError
from logstore.records.record import Record

#: so many apps of one process are followed; of others the ledger lacks the times of commit and append
_APPS_MAX = 1000


def append_table(
    committer: Commits[Any],
    topic: str,
    table: pa.Table | pa.RecordBatch,
    *,
    options: EncodeOptions = EncodeOptions(),  # noqa: B008 (frozen)
    app: AppBatch | None = None,
) -> Committed:
    """Append rows of key, value, timestamp?, headers?, partition? to one topic, all or none of them.

    With `app`, a batch that is in the ledger already is not written again. Raises InvalidRecord and its kind,
    UnknownTopic, ReplayMismatch, LockHeld, DiskFull: nothing was changed then. AppendUnfinished: it was committed.
    """

    def encode(staging: Batch) -> Encoded:
        target, now_ms = committer.target(topic), committer.clock.now_ms()
        writer = StagedWriter(staging.output(), options=options, now_ms=now_ms)
        rows_before = 0
        try:
            for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
                if batch.num_rows:
                    _write(writer, target, batch, rows_before)
                rows_before += batch.num_rows
        except BaseException:
            writer.abandon()
            raise
        return Encoded([writer.finish()], [target])

    name = None if app is None else app.app_id
    before = committer.for_next_row.pop(name, {})
    done = append_batch(committer, encode, app=app, timings_ms=before)
    if len(committer.for_next_row) < _APPS_MAX:
        committer.for_next_row[name] = done.for_next_row(before)
    return done


def _write(writer: StagedWriter, target: TopicTarget, batch: pa.RecordBatch, rows_before: int) -> None:
    names = batch.schema.names
    partitions = batch.column("partition") if "partition" in names else None
    rows = batch.drop_columns(["partition"]) if partitions is not None else batch
    try:
        writer.write(target, rows, partitions)
    except DuramenError as error:
        if error.row is not None and rows_before:
            row = rows_before + error.row
            error.reworded(row_renamed(error, f"row {row}"), row=row)
        raise


def row_renamed(error: DuramenError, name: str) -> str:
    """What the error says, with a name for its row that its reader knows."""
    return error.what.replace(f"row {error.row}", name, 1)


def table_of(records: Iterable[Record]) -> pa.Table:
    """Plain records as a table to append; a timestamp of -1 becomes the time of encoding."""
    rows = list(records)
    return pa.table(
        {
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
            "timestamp": pa.array([None if row.timestamp_ms < 0 else row.timestamp_ms for row in rows], pa.int64()),
            "headers": pa.array(
                [[{"key": name, "value": value} for name, value in row.headers] for row in rows],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
