"""`writeStream.format("duramen")`: micro-batches appended exactly once, through the sink's staging and commit.

Spark makes the writer anew in every process: where the query is planned, where tasks write and where a batch is
committed. So everything that a commit needs travels in the messages of the tasks, and the names of staged files follow
from the writer and the batch. A batch that Spark runs again is recognised by (app_id, batch_id), as the sink's are.
"""

from __future__ import annotations

import datetime
import itertools
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedFile, TopicTarget
from logstore.errors import InvalidConfig, InvalidRecord, TopicChanged
from logstore.store import LogStore
from streaming.options import WriteOptions
from streaming.sink import (
    arrow_schema,
    check_types,
    dead_letters,
    known_columns,
    store_token,
    targets_of,
    tell_left_out,
)
from streaming.tasks import EncodeJob, encode_rows, read_report, staged_file

#: Spark tells tasks whose they are
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_ROWS_AT_ONCE = 8192


@dataclass
class BatchMessage(WriterCommitMessage):
    """What one task staged, and all that the commit must know."""

    task: int
    plan_id: str
    query_id: str | None
    report: bytes
    #: by topic id, as the task saw them; those it wrote to
    targets: dict[str, TopicTarget]


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
        self._encode = EncodeOptions(options.compression_type, options.batch_size or EncodeOptions().batch_size)
        self._types = types
        self._id = uuid.uuid4()
        with LogStore(options.store) as store:
            self._token = store_token(store)
            targets_of(store, types, options.topic, options.dead_letter_topic)  # before rows are worked on for nothing

    def write(self, iterator: Iterator[Any]) -> BatchMessage:
        return self._staged(_as_arrow(iterator, self._types))

    def _staged(self, batches: Iterator[pa.RecordBatch]) -> BatchMessage:
        context = TaskContext.get()
        query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if batch_id is None:
            raise InvalidConfig("Spark does not say which micro-batch this task is of", hint="Use LogSink instead")
        if context is not None and batch_id == "0" and context.partitionId() == 0:  # once is enough
            tell_left_out(list(self._types))
        # By task attempts of one batch in one life of the query shared, by nothing else.
        plan_id = uuid.uuid5(self._id, f"{query_id}:{batch_id}").hex
        options = self._options
        with LogStore(options.store) as store:
            targets = targets_of(store, self._types, options.topic, options.dead_letter_topic)
            letters = None
            if options.dead_letter_topic is not None:
                letters = dead_letters(targets[options.dead_letter_topic], options.topic, self._app_id, int(batch_id))
            folder = store.layout.plan(plan_id)
        job = EncodeJob(options.store, folder, self._token, targets, options.topic, self._encode, letters)
        rows = (batch.select(known_columns(batch.schema.names)) for batch in batches)
        for report in encode_rows(job)(rows):
            task, data = report.column(0)[0].as_py(), report.column(1)[0].as_py()
            file = _file(data)
            written = set() if file is None else {count.topic_id for count in file.counts}
            named = {target.id: target for target in targets.values() if target.id in written}
            return BatchMessage(task, plan_id, query_id, data, named)
        raise AssertionError("a task always reports")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Spark calls `abort` when this raises, and the query fails; started again, it runs the batch again."""
        staged = sorted((each for each in messages if isinstance(each, BatchMessage)), key=lambda each: each.task)
        files = [file for file in (staged_file(read_report(each.report)) for each in staged) if file is not None]
        query_id = next((each.query_id for each in staged), None)
        app = AppBatch(self._app_id, batchId, query_id, self._options.adopt)
        with LogStore(self._options.store) as store:
            committer = Committer(store)
            if committer.check_replay(app):
                committer.finish_replay(app)
                self._discard(store, staged)
                return
            staging = Staging(store, next((each.plan_id for each in staged), None))
            try:
                targets = _agreed(staged)
                done = committer.commit(staging, files, targets, app=app, engine="spark")
            finally:
                staging.close()
            for name in done.topics:
                committer.flush(store.topic(name))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        with LogStore(self._options.store) as store:
            self._discard(store, [each for each in messages if isinstance(each, BatchMessage)])

    def _discard(self, store: LogStore, staged: Iterable[BatchMessage]) -> None:
        for plan_id in {each.plan_id for each in staged}:
            staging = Staging(store, plan_id)
            # An append may have failed after the commit: then the staged files are all there is of it.
            staging.decided = bool(Committer(store).ledger.find_plan(plan_id))
            staging.close()


def stream_writer(options: WriteOptions, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For Arrow batches where Spark has such a writer (4.1), else for rows."""
    arrow = getattr(datasource, "DataSourceStreamArrowWriter", None)
    if arrow is None:
        return StreamWriter(options, schema, overwrite)
    from streaming.stream_arrow_writer import StreamArrowWriter

    return StreamArrowWriter(options, schema, overwrite)


def _file(report: bytes) -> StagedFile | None:
    """None for a task that met an error, too: the commit raises it."""
    try:
        return staged_file(read_report(report))
    except Exception:
        return None


def _agreed(staged: Iterable[BatchMessage]) -> dict[str, TopicTarget]:
    """The topics as all tasks saw them. Raises TopicChanged."""
    found: dict[str, TopicTarget] = {}
    for message in staged:
        for topic_id, target in message.targets.items():
            if found.setdefault(topic_id, target).config_version != target.config_version:
                raise TopicChanged(
                    f"topic {target.name} was altered while the batch was written", hint="Start the query again"
                )
    return found


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
