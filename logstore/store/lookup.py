"""The latest record of one key, by scanning its partition backwards, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass

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
    newest by timestamp counts; a tie goes to the higher partition, as in a restore.
    """
    numbers = [partition_for_key(key, topic.partitions)] if topic.keyed else range(topic.partitions)
    best: Found | None = None
    for number in numbers:
        record = _last(store, topic, number, key)
        if record is not None and (best is None or record.timestamp_ms >= best.record.timestamp_ms):
            best = Found(number, record)
    return best


def _last(store: LogStore, topic: Topic, number: int, key: bytes) -> Record | None:
    reader = store.reader(topic, number)
    try:
        for _ in range(_LOOKS_MAX):
            generation = reader.state().generation
            try:
                found = _scan_backwards(reader, key)
            except OffsetOutOfRange:  # the log start moved past where we looked
                continue
            # What is not found may have been replaced by a later record, both at work behind our back.
            if found is not None or reader.state().generation == generation:
                return found
        return None
    finally:
        reader.close()


def _scan_backwards(reader: PartitionReader, key: bytes) -> Record | None:
    view = reader.view()
    end = view.end_offset
    for base in reversed(view.bases):
        start = max(base, view.log_start_offset)
        found = None
        if start < end:
            for columns in reader.columns(start, end):
                for record in columns.having_key(key):
                    found = record
        if found is not None:
            return found
        end = min(end, start)
    return None
