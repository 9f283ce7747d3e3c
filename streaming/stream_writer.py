"""`writeStream.format("duramen")`: micro-batches appended exactly once, through the sink's staging and commit.

Spark makes a new writer in every process: where the query is planned, where tasks write and where a batch is
committed. So everything that a commit needs travels in the messages of the tasks, and the names of staged files follow
from the writer and the batch. A batch that Spark runs again is recognised by (app_id, batch_id), as the sink's are.
"""

from __future__ import annotations

import datetime
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from logstore.commit.apps import AppBatch
from logstore.commit.staged_output import Filled
from logstore.errors import InvalidConfig, InvalidRecord
from streaming.opened import opened
from streaming.options import WriteOptions
from streaming.record_columns import arrow_schema, check_types, warn_left_out
from streaming.staged_write import (
    StagedMessage,
    commit_staged,
    discard_staged,
    encode_job,
    now_ms,
    stage,
    staged_messages,
)
from streaming.targets import targets_of

#: Spark tells tasks which query they belong to
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_ROWS_AT_ONCE = 8192


class StreamWriter(DataSourceStreamWriter):
    """For rows, which is all that Spark 4.0 hands over."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidConfig(
                "a log is only ever appended to, and complete mode replaces",
                hint="Use outputMode('append'), or LogSink in foreachBatch with outputMode('update')",
            )
        types = {field.name: field.dataType.simpleString() for field in schema}
        problems = check_types(types, options.topic)
        if problems:
            raise InvalidRecord("; ".join(problems))
        assert options.app_id is not None
        self._options = options
        self._app_id = options.app_id
        self._types = types
        self._id = uuid.uuid4()
        with opened(options.store, options.storage) as store:
            self._outputs = store.commits().outputs(self._id.hex)  # each batch has its own
            targets_of(store, types, options.topic, options.dead_letter_topic)  # before rows are worked on for nothing

    def write(self, iterator: Iterator[Any]) -> StagedMessage:
        return self._staged(_as_arrow(iterator, self._types))

    def _staged(self, batches: Iterator[pa.RecordBatch]) -> StagedMessage:
        context = TaskContext.get()
        query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if batch_id is None:
            raise InvalidConfig("Spark does not say which micro-batch this task is of", hint="Use LogSink instead")
        if context is not None and batch_id == "0" and context.partitionId() == 0:  # once is enough
            warn_left_out(list(self._types))
        # By task attempts of one batch in one life of the query shared, by nothing else.
        plan_id, since_ms = uuid.uuid5(self._id, f"{query_id}:{batch_id}").hex, now_ms()
        with opened(self._options.store, self._options.storage) as store:
            job = encode_job(store, self._options, self._outputs.of(plan_id), self._types, int(batch_id))
        return stage(job, batches, Filled(plan_id, since_ms), query_id)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Spark calls `abort` when this raises, and the query fails; started again, it runs the batch again."""
        staged = staged_messages(messages)
        first = next(iter(staged), None)
        app = AppBatch(self._app_id, batchId, None if first is None else first.query_id, self._options.adopt)
        filled = None if first is None else Filled(first.plan_id, min(each.since_ms for each in staged))
        commit_staged(self._options, staged, filled, app)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        discard_staged(self._options, {each.plan_id for each in staged_messages(messages)})


def stream_writer(options: WriteOptions, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For Arrow batches where Spark has such a writer (4.1), else for rows."""
    arrow = getattr(datasource, "DataSourceStreamArrowWriter", None)
    if arrow is None:
        return StreamWriter(options, schema, overwrite)
    from streaming.stream_arrow_writer import StreamArrowWriter

    return StreamArrowWriter(options, schema, overwrite)


def _as_arrow(rows: Iterator[Any], types: dict[str, str]) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(types)
    while held := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        columns = [pa.array([_plain(row[field.name], field.type) for row in held], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value of a Spark row as Arrow takes it."""
    if isinstance(value, datetime.datetime) and pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.astimezone(datetime.timezone.utc)  # rows have the machine's own time
    if isinstance(value, list):
        return [None if each is None else {"key": each[0], "value": each[1]} for each in value]
    return value
