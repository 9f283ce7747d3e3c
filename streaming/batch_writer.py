"""`df.write.format("duramen")`: a DataFrame appended once, through the same staging and commit as the sink."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from logstore.commit.apps import AppBatch
from logstore.commit.staged_output import Filled
from logstore.errors import InvalidConfig, InvalidRecord
from streaming.opened import opened
from streaming.options import WriteOptions
from streaming.record_columns import EXPECTED, check_types, warn_left_out
from streaming.staged_write import (
    StagedMessage,
    commit_staged,
    discard_staged,
    encode_job,
    now_ms,
    stage,
    staged_messages,
)


class LogWriter(DataSourceArrowWriter):
    """Planned on the driver, run on executors, committed on the driver: processes that share the plan's folder."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidConfig("a log is only ever appended to", hint="Use mode('append')")
        problems = check_types({field.name: field.dataType.simpleString() for field in schema}, options.topic)
        if problems:
            raise InvalidRecord("; ".join(problems), hint=f"Expected columns: {EXPECTED}")
        warn_left_out(schema.fieldNames())
        self._options = options
        self._plan_id = uuid.uuid4().hex
        self._since_ms = now_ms()
        with opened(options.store, options.storage) as store:
            outputs = store.commits().outputs(self._plan_id)  # one that cannot be written is known before rows come
            self._job = encode_job(store, options, outputs, schema.fieldNames(), options.batch_id)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return stage(self._job, iterator, Filled(self._plan_id, self._since_ms))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Spark calls `abort` when this raises."""
        options, app = self._options, None
        if options.app_id is not None and options.batch_id is not None:
            app = AppBatch(options.app_id, options.batch_id, options.query_id, options.adopt)
        commit_staged(options, staged_messages(messages), Filled(self._plan_id, self._since_ms), app)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        discard_staged(self._options, [self._plan_id])
