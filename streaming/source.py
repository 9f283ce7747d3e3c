"""The data source `duramen`: batch and streaming reads and writes over a store.

Columns and options are those of Spark's Kafka source. Reads are planned as offset ranges, never as files, because
files are replaced by compaction while a query runs. Gaps inside a range are compaction and not loss, unless `recover`
wrote down that damage took those records; a log start that has moved past a position is loss.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from logstore.errors import InvalidConfig, OffsetOutOfRange, UnknownTopic
from logstore.records.columns import DecodedColumns
from streaming.columns import HEADERS, ChosenColumn, chosen_columns, schema_text, spark_batch
from streaming.opened import opened, polled
from streaming.options import ReadOptions, option_of, read_options, write_options
from streaming.ranges import (
    OffsetRange,
    Positions,
    StreamOffsets,
    batch_ranges,
    from_stream,
    in_range,
    latest_positions,
    pieces,
    resolve,
    stream_start,
    to_stream,
    visible_end,
)

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter  # since 4.1

#: Spark 4.2 asks a stream with its position and a limit, earlier ones with neither
CAN_LIMIT = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


class DuramenSource(DataSource):
    """Registered under the short name `duramen` by `pyspark_duramen`."""

    @classmethod
    def name(cls) -> str:
        return "duramen"

    def schema(self) -> str:
        return schema_text(headers=str(option_of(self.options, "includeHeaders")).lower() == "true")

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options, streaming=False)
        columns = chosen_columns(schema)
        # pyspark refuses a reader that takes filters while pushdown is off, which is the default. Only when it is on
        # does it ask from its pushdown worker.
        asked_by = sys._getframe(1).f_code.co_filename
        if asked_by.endswith("data_source_pushdown_filters.py"):
            return FilteringReader(options, columns)
        return LogReader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options, columns = read_options(self.options, streaming=True), chosen_columns(schema)
        if not CAN_LIMIT:
            return LogStreamReader(options, columns)
        from streaming.admission import LimitingStreamReader

        return LimitingStreamReader(options, columns)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from streaming.batch_writer import LogWriter

        return LogWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from streaming.stream_writer import stream_writer

        return stream_writer(write_options(self.options, streaming=True), schema, overwrite)


class RangePartition(InputPartition):
    def __init__(self, range_: OffsetRange) -> None:
        super().__init__(range_)


class LogReader(DataSourceReader):
    def __init__(self, options: ReadOptions, columns: Sequence[ChosenColumn]) -> None:
        self.options = options
        self.columns = columns
        self.bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        with opened(self.options.store, self.options.storage) as store:
            ranges = batch_ranges(store, self.options)
            ranges = [each for each in map(self.bounds.narrowed, ranges) if each is not None]
        return [RangePartition(each) for each in ranges] or [RangePartition(_NOTHING)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self.options, partition.value, self.columns, self.bounds)


_NOTHING = OffsetRange("", "", 0, 0, 0)


class Bounds:
    """What pushed-down filters leave of a range; everything by default."""

    def __init__(self) -> None:
        self.partitions: set[int] | None = None
        self.topics: set[str] | None = None
        self.low = 0
        self.high: int | None = None
        self.low_ms: int | None = None
        self.high_ms: int | None = None

    def take(self, column: str, operator: str, value: Any) -> bool:
        """Note one condition; False when it is not one that helps."""
        if column in ("partition", "topic") and operator in ("=", "in"):
            values: set[Any] = set(value) if operator == "in" else {value}
            known: set[Any] | None = self.partitions if column == "partition" else self.topics
            values = values if known is None else known & values
            if column == "partition":
                self.partitions = values
            else:
                self.topics = values
            return True
        if column == "offset" and type(value) is int and operator != "in":
            if operator in ("=", ">", ">="):
                self.low = max(self.low, value + (operator == ">"))
            if operator in ("=", "<", "<="):
                end = value + (operator != "<")
                self.high = end if self.high is None else min(self.high, end)
            return True
        if column == "timestamp" and isinstance(value, datetime.datetime) and value.tzinfo is not None:
            ms = (value - _EPOCH) // datetime.timedelta(milliseconds=1)
            if operator in ("=", ">", ">="):
                self.low_ms = ms if self.low_ms is None else max(self.low_ms, ms)
            if operator in ("=", "<", "<="):
                self.high_ms = ms + 1 if self.high_ms is None else min(self.high_ms, ms + 1)
            return False  # narrows what is read; Spark still applies it, since times are finer than ours
        return False

    def narrowed(self, each: OffsetRange) -> OffsetRange | None:
        if self.partitions is not None and each.partition not in self.partitions:
            return None
        if self.topics is not None and each.topic not in self.topics:
            return None
        low = max(each.start, self.low)
        high = each.end if self.high is None else min(each.end, self.high)
        return OffsetRange(each.topic, each.topic_id, each.partition, low, high) if low < high else None


class FilteringReader(LogReader):
    """Takes filters on partition, topic, offset and timestamp."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

        operators = {
            EqualTo: "=",
            GreaterThan: ">",
            GreaterThanOrEqual: ">=",
            LessThan: "<",
            LessThanOrEqual: "<=",
            In: "in",
        }
        for each in filters:
            operator = operators.get(type(each))
            column: tuple[str, ...] = getattr(each, "attribute", ())
            value = getattr(each, "value", None)
            if operator is None or len(column) != 1 or not self.bounds.take(column[0], operator, value):
                yield each


class LogStreamReader(DataSourceStreamReader):
    """A stream whose micro-batches take all there is; what Spark 4.0 and 4.1 can use."""

    def __init__(self, options: ReadOptions, columns: Sequence[ChosenColumn] = ()) -> None:
        self.options = options
        self.columns = columns
        self._check_limits()

    def _check_limits(self) -> None:
        """Raises InvalidConfig. Spark asks for the next end without saying where the stream is."""
        given = {
            "maxOffsetsPerTrigger": self.options.max_offsets_per_trigger,
            "minOffsetsPerTrigger": self.options.min_offsets_per_trigger,
        }
        for name, value in given.items():
            if value is not None:
                raise InvalidConfig(
                    f"{name} needs Spark 4.2 or newer; this is {pyspark.__version__}",
                    hint="Leave it out: then a micro-batch reads all there is",
                )

    def initialOffset(self) -> StreamOffsets:
        with opened(self.options.store, self.options.storage) as store:
            found = resolve(store, self.options, self.options.starting, "starting")
        return to_stream({(topic.name, topic.id, number): offset for topic, number, offset in found})

    def latestOffset(self) -> StreamOffsets:  # type: ignore[override]  # the signature of 4.0 and 4.1
        return to_stream(self._latest())

    def _latest(self) -> Positions:
        with contextlib.suppress(UnknownTopic), polled(self.options.store, self.options.storage) as store:
            return latest_positions(store, self.options)
        # Since the last look it was deleted, and may have been created again.
        with opened(self.options.store, self.options.storage) as store:
            return latest_positions(store, self.options)

    def partitions(self, start: StreamOffsets, end: StreamOffsets) -> Sequence[InputPartition]:
        stops = from_stream(end)
        begins = stream_start(self.options, from_stream(start), stops)
        with opened(self.options.store, self.options.storage) as store:
            ranges = [
                in_range(store, self.options, OffsetRange(*key, begins[key], stop), is_planned=True)
                for key, stop in stops.items()
                if stop > begins[key]
            ]
        return [RangePartition(each) for each in pieces(ranges, self.options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self.options, partition.value, self.columns, Bounds())


def read_range(
    options: ReadOptions, wanted: OffsetRange, columns: Sequence[ChosenColumn], bounds: Bounds
) -> Iterator[pa.RecordBatch]:
    """The records of one range as Arrow batches with Spark's columns."""
    headers = any(column.name == HEADERS for column in columns)
    with opened(options.store, options.storage) as store:
        while wanted.start < wanted.end:
            wanted = in_range(store, options, wanted)
            topic = store.known_topic(wanted.topic)
            end = min(wanted.end, visible_end(store, options, topic, wanted))
            reader = store.reader(topic, wanted.partition, end_offset=end)
            try:
                for decoded in reader.columns(wanted.start, wanted.end, committed=options.committed, headers=headers):
                    batch = spark_batch(decoded, wanted.topic, wanted.partition, columns)
                    wanted = replace(wanted, start=int(decoded.offsets[-1]) + 1)
                    yield from _within(batch, decoded, bounds)
                return
            except OffsetOutOfRange:  # the log start has overtaken us
                if options.fail_on_data_loss:
                    raise


def _within(batch: pa.RecordBatch, columns: DecodedColumns, bounds: Bounds) -> Iterator[pa.RecordBatch]:
    if bounds.low_ms is None and bounds.high_ms is None:
        yield batch
        return
    keep = np.ones(len(columns), dtype=bool)
    if bounds.low_ms is not None:
        keep &= columns.timestamps_ms >= bounds.low_ms
    if bounds.high_ms is not None:
        keep &= columns.timestamps_ms < bounds.high_ms
    if keep.any():
        yield batch.filter(pa.array(keep))


__all__ = ["DuramenSource", "WriterCommitMessage"]
