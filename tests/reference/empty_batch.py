"""A batch without records, as compaction leaves one behind."""

from __future__ import annotations

from logstore.errors import InvalidRecord
from logstore.limits import INT32_MAX
from logstore.records.encoder import BatchOptions
from logstore.records.header import HEADER
from logstore.records.native import address_of, kernels
from logstore.records.record import NO_TIMESTAMP
from logstore.records.table import CODEC_MASK, DELETE_HORIZON_BIT, HEADER_BYTES, PREFIX_BYTES


def encode_empty_batch(options: BatchOptions, *, last_offset: int, max_timestamp_ms: int) -> bytes:
    """A batch without records that keeps the offsets up to `last_offset` and the producer's numbers, as compaction
    leaves one behind. It has no codec and no delete horizon.
    """
    if not 0 <= last_offset - options.base_offset <= INT32_MAX:
        raise InvalidRecord(f"a batch cannot reach from offset {options.base_offset} to {last_offset}")
    batch = bytearray(HEADER_BYTES)
    HEADER.pack_into(
        batch,
        0,
        options.base_offset,
        HEADER_BYTES - PREFIX_BYTES,
        options.leader_epoch,
        2,
        0,
        options.attributes & ~(CODEC_MASK | DELETE_HORIZON_BIT),
        last_offset - options.base_offset,
        NO_TIMESTAMP,
        max_timestamp_ms,
        options.producer_id,
        options.producer_epoch,
        options.base_sequence,
        0,
    )
    kernels().finish_batch(address_of(batch), HEADER_BYTES)
    return bytes(batch)
