"""What Kafka's leader does with a producer's batches: the checks, and the few changes on their way into the log."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from logstore.config import LogConfig
from logstore.errors import CorruptBatch, InvalidRecord, InvalidTimestamp, NullKey, RecordTooLarge, UnsupportedFormat
from logstore.limits import INT64_MAX, Limits
from logstore.partition.validation import check_sizes, check_timestamps, codec_level, topic_codec_id
from logstore.records.columns import columns_of
from logstore.records.decoder import Decoder
from logstore.records.encoder import BatchOptions, EncodedBatches, encode_batch
from logstore.records.native import address_of, kernels
from logstore.records.record import NO_TIMESTAMP, Record
from logstore.records.scan import is_damage, scan_batches
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_SEQUENCE,
    CODEC_MASK,
    CONTROL_BIT,
    COUNT,
    LAST_OFFSET,
    MAGIC,
    MAX_TIMESTAMP,
    POSITION,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    SIZE,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchTable,
)


def check_readable(table: BatchTable, limits: Limits, partition: object) -> None:
    """Raises RecordTooLarge for a batch, as stored, that is larger than a read buffer may become."""
    largest = int(table[:, SIZE].max()) if len(table) else 0
    if largest > limits.read_buffer_bytes:
        raise RecordTooLarge(
            f"a batch of {largest} bytes; a read buffer may have {limits.read_buffer_bytes}",
            partition=partition,
            hint="Send smaller records",
        )


def whole_batches(data: npt.NDArray[np.uint8], config: LogConfig, partition: object, *, sized: bool) -> EncodedBatches:
    """The batches of `data`, checksums verified; a batch cut off at the end is trimmed. Raises CorruptBatch,
    RecordTooLarge.
    """
    scan = scan_batches(data)
    if is_damage(scan.code):
        if sized:  # one that would not be taken anyway is not worth its checksum
            check_sizes(scan_batches(data, verify_crc=False).table, config, partition)
        raise scan.error(partition=partition)
    if not len(scan.table):
        raise InvalidRecord("there is no whole batch to append", partition=partition)
    if sized:
        check_sizes(scan.table, config, partition)
    return EncodedBatches(data[: scan.next_position], scan.table)


def client_batches(
    given: EncodedBatches, config: LogConfig, now_ms: int, limits: Limits, partition: object
) -> Iterator[EncodedBatches]:
    """One client batch after the other, ready to be placed: stored as sent where possible, rebuilt where not.

    A batch is rebuilt when its codec is not the topic's, or when it is of a legacy format; plain legacy messages are
    put together. Raises InvalidRecord and its kind.
    """
    decoder = Decoder(limits=limits)
    for first, last in _appends(given.table):
        table = given.table[first:last].copy()
        begin = int(table[0, POSITION])
        data = given.data[begin : int(table[-1, POSITION] + table[-1, SIZE])].copy()
        table[:, POSITION] -= begin
        yield _one_client_batch(EncodedBatches(data, table), decoder, config, now_ms, partition)


def _appends(table: BatchTable) -> Iterator[tuple[int, int]]:
    """Which rows become one batch: each its own, but a run of plain legacy messages together."""
    loose = (table[:, MAGIC] < 2) & ((table[:, ATTRIBUTES] & CODEC_MASK) == 0)
    first = 0
    for row in range(1, len(table) + 1):
        if row < len(table) and loose[row] and loose[row - 1] and table[row, MAGIC] == table[row - 1, MAGIC]:
            continue
        yield first, row
        first = row


def _one_client_batch(
    batch: EncodedBatches, decoder: Decoder, config: LogConfig, now_ms: int, partition: object
) -> EncodedBatches:
    table, data = batch.table, batch.data
    attributes = int(table[0, ATTRIBUTES])
    append_time = config.message_timestamp_type == "LogAppendTime"
    legacy = int(table[0, MAGIC]) < 2
    if attributes & CONTROL_BIT and not legacy:
        raise InvalidRecord("control batches are not taken from clients", partition=partition)
    if attributes & TIMESTAMP_TYPE_BIT:
        raise InvalidTimestamp("a client batch must not be marked LogAppendTime", partition=partition)
    if not legacy and int(table[0, BASE_OFFSET]) != 0:
        raise InvalidRecord(
            f"a client batch begins at offset 0, this one at {int(table[0, BASE_OFFSET])}", partition=partition
        )
    if int(table[0, PRODUCER_ID]) >= 0 and int(table[0, BASE_SEQUENCE]) < 0:
        raise InvalidRecord(
            f"producer {int(table[0, PRODUCER_ID])} sends sequence number {int(table[0, BASE_SEQUENCE])}",
            partition=partition,
        )
    codec_id = attributes & CODEC_MASK
    if codec_id > 4:
        raise UnsupportedFormat(f"codec {codec_id}", partition=partition)
    wanted = topic_codec_id(config, codec_id)
    if legacy or wanted != codec_id:
        return _rebuilt(batch, decoder, config, wanted, now_ms, append_time, partition)

    max_timestamp_ms = check_records(data, table, decoder, config, now_ms, append_time, partition)
    if append_time:
        kernels().stamp_append_time(address_of(data), address_of(table), 1, now_ms)
    elif max_timestamp_ms != int(table[0, MAX_TIMESTAMP]):
        kernels().set_max_timestamp(address_of(data), address_of(table), max_timestamp_ms)
    return batch


def check_records(
    data: npt.NDArray[np.uint8],
    table: BatchTable,
    decoder: Decoder,
    config: LogConfig,
    now_ms: int,
    append_time: bool,
    partition: object,
) -> int:
    """Look at every record of one batch as Kafka's leader does; returns the largest timestamp."""
    offsets = list(range(int(table[0, BASE_OFFSET]), int(table[0, LAST_OFFSET]) + 1))
    if int(table[0, COUNT]) == 0:
        raise InvalidRecord("a client batch without records", partition=partition)
    try:
        columns = list(decoder.columns(data, table.copy()))
    except CorruptBatch as error:
        raise CorruptBatch(error.what, partition=partition) from error
    if [offset for part in columns for offset in part.offsets.tolist()] != offsets:
        raise InvalidRecord(
            "a client batch's records have the offsets 0, 1, 2…, this one's do not", partition=partition
        )
    keyless = sum(int((part.keys.valid == 0).sum()) for part in columns)
    if config.compact and keyless:
        raise NullKey(f"{keyless} records have no key; a compacted topic takes none without", partition=partition)
    times = np.concatenate([part.timestamps_ms for part in columns])
    largest = max(int(times.max()), NO_TIMESTAMP)
    if not append_time:
        smallest = int(times[times >= 0].min(initial=INT64_MAX))
        check_timestamps(NO_TIMESTAMP if smallest == INT64_MAX else smallest, largest, config, now_ms, partition)
    return largest


def _rebuilt(
    batch: EncodedBatches,
    decoder: Decoder,
    config: LogConfig,
    codec_id: int,
    now_ms: int,
    append_time: bool,
    partition: object,
) -> EncodedBatches:
    """The same records in one new v2 batch with the topic's codec; the size limit is checked again."""
    header = batch.table[0].copy()
    legacy = int(header[MAGIC]) < 2
    if not legacy:
        check_records(batch.data, batch.table.copy(), decoder, config, now_ms, append_time, partition)
    records: list[Record] = [
        record for columns in decoder.columns(batch.data, batch.table) for record in columns.records()
    ]
    if config.compact and any(record.key is None for record in records):
        raise NullKey("a record has no key; a compacted topic takes none without", partition=partition)
    if legacy and not append_time:
        known = [record.timestamp_ms for record in records if record.timestamp_ms >= 0]
        check_timestamps(min(known, default=-1), max(known, default=-1), config, now_ms, partition)
    options = BatchOptions(
        codec_id=codec_id,
        level=codec_level(config, codec_id),
        transactional=not legacy and bool(header[ATTRIBUTES] & TRANSACTIONAL_BIT),
        producer_id=int(header[PRODUCER_ID]),
        producer_epoch=int(header[PRODUCER_EPOCH]),
        base_sequence=int(header[BASE_SEQUENCE]),
    )
    data = np.frombuffer(bytearray(encode_batch(columns_of(records), options)), dtype=np.uint8)
    scan = scan_batches(data, verify_crc=False)
    check_sizes(scan.table, config, partition)
    if append_time:  # the records keep the times they came with, as in a batch stored as sent
        kernels().stamp_append_time(address_of(data), address_of(scan.table), 1, now_ms)
    return EncodedBatches(data, scan.table)
