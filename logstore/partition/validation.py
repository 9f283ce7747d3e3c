"""What an append must satisfy before a byte is written, and the few changes Kafka makes to a client's batch on its
way in.

Pure with respect to the log: it looks at batches, the topic's settings and the clock, and gives back batches ready to
be placed.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from logstore.config import LogConfig
from logstore.errors import (
    InvalidTimestamp,
    NullKey,
    RecordTooLarge,
)
from logstore.records.columns import Columns
from logstore.records.compression import codec_by_name
from logstore.records.record import NO_TIMESTAMP
from logstore.records.table import (
    HEADER_BYTES,
    SIZE,
    BatchTable,
)


def topic_codec_id(config: LogConfig, producer_codec_id: int) -> int:
    """The codec a batch is stored with: the topic's, unless it leaves the choice to the producer."""
    if config.compression_type == "producer":
        return producer_codec_id
    return codec_by_name("none" if config.compression_type == "uncompressed" else config.compression_type).id


def codec_level(config: LogConfig, codec_id: int) -> int | None:
    return {1: config.compression_gzip_level, 3: config.compression_lz4_level, 4: config.compression_zstd_level}.get(
        codec_id
    )


def check_sizes(table: BatchTable, config: LogConfig, partition: object) -> None:
    """Raises RecordTooLarge for a batch above max.message.bytes."""
    sizes = table[:, SIZE]
    if len(sizes) and int(sizes.max()) > config.max_message_bytes:
        raise RecordTooLarge(
            f"a batch of {int(sizes.max())} bytes; max.message.bytes is {config.max_message_bytes}",
            partition=partition,
            hint="Send smaller records, or raise max.message.bytes of the topic",
        )


def check_timestamps(smallest_ms: int, largest_ms: int, config: LogConfig, now_ms: int, partition: object) -> None:
    """Raises InvalidTimestamp for a create time too old or too far ahead; -1 is not checked."""
    if smallest_ms >= 0 and now_ms - smallest_ms > config.message_timestamp_before_max_ms:
        raise InvalidTimestamp(
            f"timestamp {smallest_ms} is more than message.timestamp.before.max.ms="
            f"{config.message_timestamp_before_max_ms} before now ({now_ms})",
            partition=partition,
        )
    if largest_ms - now_ms > config.message_timestamp_after_max_ms:
        raise InvalidTimestamp(
            f"timestamp {largest_ms} is more than message.timestamp.after.max.ms="
            f"{config.message_timestamp_after_max_ms} after now ({now_ms})",
            partition=partition,
        )


def check_columns(columns: Columns, config: LogConfig, now_ms: int, codec_id: int, partition: object) -> None:
    """The same rules for columns about to be encoded, before anything is written."""
    if config.compact and columns.keys.valid_address:
        valid = _valid_rows(columns.keys.valid_address, columns.keys.valid_bit, columns.count)
        if not valid.all():
            row = int(np.argmin(valid))
            raise NullKey(
                f"row {row} has no key; a compacted topic needs a key in every record", partition=partition, row=row
            )
    if columns.timestamps_ms is not None and config.message_timestamp_type == "CreateTime":
        known, given = columns.timestamps_ms, None
        if columns.timestamps_valid_address:  # a null becomes the time of the append
            given = _valid_rows(columns.timestamps_valid_address, columns.timestamps_valid_bit, columns.count)
            known = known[given]
        if len(known) and int(known.min()) == NO_TIMESTAMP:
            known = known[known != NO_TIMESTAMP]
        if len(known):
            try:
                check_timestamps(int(known.min()), int(known.max()), config, now_ms, partition)
            except InvalidTimestamp as error:
                too_old = now_ms - int(known.min()) > config.message_timestamp_before_max_ms
                culprit = known.min() if too_old else known.max()
                found = columns.timestamps_ms == culprit
                row = int(np.argmax(found if given is None else found & given))
                error.reworded(f"row {row}: {error.what}", row=row)
                raise
    largest = _largest_row(columns, config.max_message_bytes) if codec_id == 0 else None
    if largest is not None:
        raise RecordTooLarge(
            f"row {largest[0]} has {largest[1]} bytes of key and value; "
            f"max.message.bytes is {config.max_message_bytes}",
            partition=partition,
            row=largest[0],
            hint="Send smaller records, or raise max.message.bytes of the topic",
        )


def check_rows(columns: Columns, batch_bytes_max: int, partition: object) -> None:
    """Raises RecordTooLarge for a row that no reader could hold, whatever the topic allows and however it is packed."""
    largest = _largest_row(columns, batch_bytes_max)
    if largest is not None:
        raise RecordTooLarge(
            f"row {largest[0]} has {largest[1]} bytes of key and value; the largest batch that can be read has "
            f"{batch_bytes_max} bytes before compression, whatever max.message.bytes says",
            partition=partition,
            row=largest[0],
            hint="Send smaller records",
        )


def _largest_row(columns: Columns, limit: int) -> tuple[int, int] | None:
    """The row with the most bytes, and how many, if a batch of it alone is above the limit."""
    if not columns.count or _most_bytes(columns) + HEADER_BYTES + 7 <= limit:
        return None
    sizes = np.diff(columns.keys.offsets[: columns.count + 1]) + np.diff(columns.values.offsets[: columns.count + 1])
    row = int(np.argmax(sizes))
    return (row, int(sizes[row])) if int(sizes[row]) + HEADER_BYTES + 7 > limit else None


def _most_bytes(columns: Columns) -> int:
    """No row has more bytes of key and value: a bound from a thousandth of the offsets."""
    bounds = np.append(np.arange(0, columns.count, 1024), columns.count)
    return int((np.diff(columns.keys.offsets[bounds]) + np.diff(columns.values.offsets[bounds])).max())


def _valid_rows(address: int, first_bit: int, count: int) -> npt.NDArray[np.bool_]:
    """An Arrow validity bitmap as one bool a row."""
    start = first_bit >> 3
    bitmap = np.frombuffer(ctypes.string_at(address + start, ((first_bit + count + 7) >> 3) - start), dtype=np.uint8)
    begin = first_bit & 7
    return np.unpackbits(bitmap, bitorder="little")[begin : begin + count].astype(np.bool_)
