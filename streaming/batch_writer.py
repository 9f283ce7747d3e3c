"""`df.write.format("duramen")`: a DataFrame appended once, through the same staging and commit as the sink."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions
from logstore.errors import InvalidConfig, InvalidRecord
from logstore.store import LogStore
from streaming.options import WriteOptions
from streaming.sink import (
    EXPECTED,
    check_types,
    dead_letters,
    known_columns,
    store_token,
    targets_of,
    tell_left_out,
)
from streaming.tasks import EncodeJob, encode_rows, read_report, staged_file


@dataclass
class StagedMessage(WriterCommitMessage):
    task: int
    report: bytes


class LogWriter(DataSourceArrowWriter):
    """Planned on the driver, run on executors, committed on the driver: processes that share the plan's folder."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidConfig("a log is only ever appended to", hint="Use mode('append')")
        problems = check_types({field.name: field.dataType.simpleString() for field in schema}, options.topic)
        if problems:
            raise InvalidRecord("; ".join(problems), hint=f"Expected columns: {EXPECTED}")
        tell_left_out(schema.fieldNames())
        self._options = options
        self._encode = EncodeOptions(options.compression_type, options.batch_size or EncodeOptions().batch_size)
        with LogStore(options.store) as store:
            Committer(store)  # a ledger that cannot be written is known before rows are worked on
            self._targets = targets_of(store, schema.fieldNames(), options.topic, options.dead_letter_topic)
            self._letters = None
            if options.dead_letter_topic is not None:
                self._letters = dead_letters(
                    self._targets[options.dead_letter_topic], options.topic, options.app_id, options.batch_id
                )
            self._token = store_token(store)
            self._plan_id = uuid.uuid4().hex
            self._folder = store.layout.plan(self._plan_id)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        job = EncodeJob(
            self._options.store,
            self._folder,
            self._token,
            self._targets,
            self._options.topic,
            self._encode,
            self._letters,
        )
        rows = (batch.select(known_columns(batch.schema.names)) for batch in iterator)
        for report in encode_rows(job)(rows):
            return StagedMessage(report.column(0)[0].as_py(), report.column(1)[0].as_py())
        raise AssertionError("a task always reports")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Spark calls `abort` when this raises."""
        reports = sorted((each for each in messages if isinstance(each, StagedMessage)), key=lambda each: each.task)
        files = [file for file in (staged_file(read_report(each.report)) for each in reports) if file is not None]
        with LogStore(self._options.store) as store:
            committer = Committer(store)
            app = None
            if self._options.app_id is not None and self._options.batch_id is not None:
                app = AppBatch(
                    self._options.app_id, self._options.batch_id, self._options.query_id, self._options.adopt
                )
            staging = Staging(store, self._plan_id)
            targets = {target.id: target for target in self._targets.values()}
            done = committer.commit(staging, files, targets, app=app, engine="spark")
            for name in done.topics:
                committer.flush(store.topic(name))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with LogStore(self._options.store) as store:
            staging = Staging(store, self._plan_id)
            # An append may have failed after the commit: then the staged files are all there is of it.
            staging.decided = bool(Committer(store).ledger.find_plan(self._plan_id))
            staging.close()
