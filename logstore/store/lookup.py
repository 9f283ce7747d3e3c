"""The latest record of one key, by scanning its partition backwards, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass

from logstore.cleaner.versions import Order
from logstore.errors import OffsetOutOfRange
from logstore.partition.reader import PartitionReader
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.store.registry import Topic
from logstore.store.store import LogStore

_LOOKS_MAX = 20


@dataclass(frozen=True, slots=True)
class Found:
    partition: int
    record: Record


def latest_of_key(store: LogStore, topic: Topic, key: bytes) -> Found | None:
    """The key's last record, a tombstone included; None when there is none.

    Where every record was placed by its key only that partition is read, newest segment first; else all are, and the
    newest by timestamp counts; a tie goes to the higher partition, as in a restore. Where versions decide, the whole
    partition is read.
    """
    order = Order.of(store.log_config(topic))
    numbers = [partition_for_key(key, topic.partitions)] if topic.keyed else range(topic.partitions)
    best: Found | None = None
    for number in numbers:
        record = _last(store, topic, number, key, order)
        if record is not None and (best is None or _place(record, order) >= _place(best.record, order)):
            best = Found(number, record)
    return best


def _place(record: Record, order: Order) -> tuple[int, int]:
    return order.version(record.timestamp_ms, record.headers), record.timestamp_ms


def _last(store: LogStore, topic: Topic, number: int, key: bytes, order: Order) -> Record | None:
    reader = store.reader(topic, number)
    try:
        for _ in range(_LOOKS_MAX):
            generation = reader.state().generation
            try:
                found = _scan_backwards(reader, key, order)
            except OffsetOutOfRange:  # the log start moved past where we looked
                continue
            # What is not found may have been replaced by a later record, both at work behind our back.
            if (found is not None and order.by_offset) or reader.state().generation == generation:
                return found
        return None
    finally:
        reader.close()


def _scan_backwards(reader: PartitionReader, key: bytes, order: Order) -> Record | None:
    view = reader.view()
    end = view.end_offset
    best: tuple[int, int, Record] | None = None  # version, offset
    for base in reversed(view.bases):
        start = max(base, view.log_start_offset)
        if start < end:
            for columns in reader.columns(start, end):
                for record in columns.having_key(key):
                    version = order.version(record.timestamp_ms, record.headers)
                    if best is None or (version, record.offset) > best[:2]:
                        best = version, record.offset, record
        if best is not None and order.by_offset:
            break
        end = min(end, start)
    return best[2] if best is not None else None
