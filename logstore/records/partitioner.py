"""Kafka's default partitioner: which partition a keyed record belongs to, and rows of columns grouped by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.errors import InvalidPartition
from logstore.records import slots
from logstore.records.codes import OK
from logstore.records.columns import BytesColumn
from logstore.records.native import address_of, kernels

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows by partition: those of partition p are `selection[starts[p]:starts[p + 1]]`, in their order."""

    selection: Int64Array
    starts: Int64Array

    def rows(self, partition: int) -> Int64Array:
        return self.selection[int(self.starts[partition]) : int(self.starts[partition + 1])]


def partition_for_key(key: bytes, partitions: int) -> int:
    """The partition of one key, as Kafka's producers choose it."""
    data = np.frombuffer(key + b"\0", dtype=np.uint8)
    return (kernels().murmur2(address_of(data), len(key)) & 0x7FFFFFFF) % partitions


def route(
    keys: BytesColumn,
    count: int,
    partitions: int,
    *,
    given: Int64Array | None = None,
    given_valid_address: int = 0,
    given_valid_bit: int = 0,
    sticky: int = 0,
) -> Routed:
    """Group `count` rows. A given partition wins over the key's; rows with neither go to `sticky`.

    Raises InvalidPartition for a partition that does not exist.
    """
    if not 0 <= sticky < partitions:
        raise InvalidPartition(f"rows without key were to go to partition {sticky}; the topic has {partitions}")
    ids = np.empty(count, dtype=np.int64)
    selection = np.empty(count, dtype=np.int64)
    starts = np.empty(partitions + 1, dtype=np.int64)
    block = np.zeros(slots.R_SLOTS, dtype=np.int64)
    block[slots.R_ROWS] = count
    block[slots.R_KEY_OFFSETS] = address_of(keys.offsets)
    block[slots.R_KEY_DATA] = keys.data_address
    block[slots.R_KEY_VALID] = keys.valid_address
    block[slots.R_KEY_VALID_AT] = keys.valid_bit
    if given is not None and count:
        block[slots.R_PARTITIONS] = address_of(given)
        block[slots.R_PARTITION_VALID] = given_valid_address
        block[slots.R_PARTITION_VALID_AT] = given_valid_bit
    block[slots.R_PARTITION_COUNT] = partitions
    block[slots.R_STICKY] = sticky
    block[slots.R_IDS] = address_of(ids)
    block[slots.R_STARTS] = address_of(starts)
    block[slots.R_SELECTION] = address_of(selection)
    if kernels().route(address_of(block)) != OK:
        row = int(block[slots.R_BAD_ROW])
        assert given is not None
        raise InvalidPartition(f"row {row} asks for partition {int(given[row])}; the topic has {partitions}", row=row)
    return Routed(selection, starts)
