"""Appending without Spark: rows of one call are staged, committed and appended like any micro-batch."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pyarrow as pa

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed, Committer
from logstore.commit.plan_folder import Staging, disk_full
from logstore.commit.staging import EncodeOptions, StagedWriter, TopicTarget
from logstore.errors import CommitConflict, DuramenError, TopicChanged, is_disk_full
from logstore.records.record import Record

_ENCODE_TRIES_MAX = 5


def append_table(
    committer: Committer,
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
    for attempt in range(_ENCODE_TRIES_MAX):
        if app is not None and committer.check_replay(app):
            committer.finish_replay(app)
            return Committed("", replayed=True)
        began = time.monotonic()
        target = committer.target(topic)
        staging = Staging(committer.store)
        try:
            writer = StagedWriter(
                committer.store.fs, staging.folder, options=options, now_ms=committer.store.clock.now_ms()
            )
            rows_before = 0
            for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
                if batch.num_rows:
                    _write(writer, target, batch, rows_before)
                rows_before += batch.num_rows
            staged = writer.finish()
            encode_ms = int((time.monotonic() - began) * 1000)
            return committer.commit(
                staging, [staged], {target.id: target}, app=app, timings_ms={"encode": encode_ms}, engine="local"
            )
        except (TopicChanged, CommitConflict):  # nothing happened: look again
            if attempt + 1 == _ENCODE_TRIES_MAX:
                raise
        except OSError as error:
            if is_disk_full(error) and not staging.decided:
                raise disk_full(error) from error
            raise
        finally:
            staging.close()
    raise AssertionError("unreachable")


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
