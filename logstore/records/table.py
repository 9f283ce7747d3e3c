"""The batch table: one row of int64 a batch, shared by kernels and Python.

A table describes batches that lie in a buffer, without an object a batch. Rows are made by the encoder or by a scan
of bytes read back; `PAYLOAD_ADDRESS` points at uncompressed v2 records, wherever those are (in the buffer itself or
in an arena they were decompressed into), so decoding never asks how a batch was stored.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BatchTable: TypeAlias = npt.NDArray[np.int64]
"""Shape (batches, COLUMNS), C order."""

POSITION = 0  # of the batch in its buffer
SIZE = 1  # whole batch, prefix included
BASE_OFFSET = 2  # -1 for legacy batches until they are opened
LAST_OFFSET = 3
LEADER_EPOCH = 4
MAGIC = 5
ATTRIBUTES = 6
BASE_TIMESTAMP = 7
MAX_TIMESTAMP = 8
PRODUCER_ID = 9
PRODUCER_EPOCH = 10
BASE_SEQUENCE = 11
COUNT = 12
CRC = 13
PAYLOAD_ADDRESS = 14
PAYLOAD_SIZE = 15
SKIP = 16  # 1: occupies its offsets, delivers no record (control, aborted, outside the asked range)
COLUMNS = 17
ROW_BYTES = COLUMNS * 8

HEADER_BYTES = 61  # of a v2 batch
PREFIX_BYTES = 12  # offset and size, common to all formats
LEGACY_OVERHEAD_MIN = 14  # of a v0 message, after the prefix
LEGACY_V1_BYTES_MIN = 34  # a whole v1 message with null key and null value
RECORD_BYTES_MIN = 7  # a v2 record with null key, null value, no headers

CODEC_MASK = 0x07
TIMESTAMP_TYPE_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40


def new_table(capacity: int) -> BatchTable:
    return np.empty((capacity, COLUMNS), dtype=np.int64)
