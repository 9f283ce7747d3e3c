"""`df.write.format("duramen")`: a DataFrame appended once, through the same staging and commit as the sink."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.folder_outputs import store_token
from logstore.errors import InvalidConfig, InvalidRecord
from logstore.store import LogStore
from streaming.options import WriteOptions
from streaming.record_columns import EXPECTED, check_types, warn_left_out
from streaming.staged_write import StagedMessage, commit_staged, discard_staged, encode_job, stage, staged_messages


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
        with LogStore(options.store) as store:
            Committer(store)  # a ledger that cannot be written is known before rows are worked on
            token = store_token(store)
            self._job = encode_job(store, options, token, schema.fieldNames(), self._plan_id, options.batch_id)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return stage(self._job, iterator, self._plan_id)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Spark calls `abort` when this raises."""
        options, app = self._options, None
        if options.app_id is not None and options.batch_id is not None:
            app = AppBatch(options.app_id, options.batch_id, options.query_id, options.adopt)
        commit_staged(options.store, staged_messages(messages), self._plan_id, app)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        discard_staged(self._options.store, [self._plan_id])
