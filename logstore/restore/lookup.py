"""The latest record of one key, by scanning its partition backwards, segment by segment.

State is read_committed (see `visibility`): open and aborted transactions do not count.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from logstore.cleaner.versions import Order
from logstore.directory.state import PartitionState
from logstore.errors import OffsetOutOfRange, SegmentsChanged
from logstore.partition.reader import PartitionReader
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic

_LOOKS_MAX = 20


@dataclass(frozen=True, slots=True)
class Found:
    partition: int
    record: Record


def latest_of_key(store: ReadableStore, topic: Topic, key: bytes) -> Found | None:
    """The key's last record, a tombstone included; None when there is none.

    Where every record was placed by its key only that partition is read, newest segment first; else all are, and the
    newest by timestamp counts; a tie goes to the higher partition, as in a restore. Where versions decide, the whole
    partition is read. Raises SegmentsChanged when compaction replaced segments again and again meanwhile.
    """
    order = Order.of(store.log_config(topic))
    numbers = [partition_for_key(key, topic.partitions)] if topic.keyed else range(topic.partitions)
    best: Found | None = None
    for number in numbers:
        record = latest_in_partition(store, topic, number, key)
        if record is not None and (best is None or _place(record, order) >= _place(best.record, order)):
            best = Found(number, record)
    if best is None:
        store.check_exists(topic)  # a topic that is gone has no record of the key either
    return best


def _place(record: Record, order: Order) -> tuple[int, int]:
    return order.version(record.timestamp_ms, record.headers), record.timestamp_ms


def latest_in_partition(store: ReadableStore, topic: Topic, number: int, key: bytes) -> Record | None:
    """The same in one partition."""
    order = Order.of(store.log_config(topic))
    for _ in range(_LOOKS_MAX):
        with contextlib.suppress(OffsetOutOfRange, SegmentsChanged), store.snapshot(topic, number) as reader:
            before = reader.state()
            found = _scan_backwards(reader, key, order)
            # What was looked for may have been superseded after the end, and be removed before we came to it.
            if (found is not None and order.by_offset) or not _lost_records(before, reader.state()):
                return found
    raise SegmentsChanged(
        f"compaction or retention changed the log during each of {_LOOKS_MAX} lookups",
        partition=topic.partition(number),
        hint="Try again",
    )


def _lost_records(before: PartitionState, after: PartitionState) -> bool:
    """Whether anything but appends happened between two looks: those leave sealed segments as they are."""
    if before.generation == after.generation:
        return False
    sealed = before.segments[:-1]
    return (
        before.swap is not None
        or after.swap is not None
        or before.log_start_offset != after.log_start_offset
        or before.thinned_offset != after.thinned_offset
        or after.segments[: len(sealed)] != sealed
    )


def _scan_backwards(reader: PartitionReader, key: bytes, order: Order) -> Record | None:
    """Up to where readers may see at the first look; what comes later is not looked at."""
    view = reader.view(committed=True)
    end = view.end_offset
    best: tuple[int, int, Record] | None = None  # version, offset
    for base in reversed(view.bases):
        start = max(base, view.log_start_offset)
        if start < end:
            for columns in reader.columns(start, end, committed=True):
                for record in columns.having_key(key):
                    version = order.version(record.timestamp_ms, record.headers)
                    if best is None or (version, record.offset) > best[:2]:
                        best = version, record.offset, record
        if best is not None and order.by_offset:
            break
        end = min(end, start)
    return best[2] if best is not None else None
