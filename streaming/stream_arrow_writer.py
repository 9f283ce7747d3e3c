"""The stream writer for Spark 4.1 and newer, which hands over Arrow batches. Imports what 4.0 does not have."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from streaming.staged_write import StagedMessage
from streaming.stream_writer import StreamWriter


class StreamArrowWriter(StreamWriter, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return self._staged(iterator)
