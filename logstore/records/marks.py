"""Marks: what is to become of each batch in compaction, one row of int64 a batch beside its row in the batch table."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Marks: TypeAlias = npt.NDArray[np.int64]
"""Shape (batches, MARK_COLUMNS), C order."""

MARK_ACTION = 0
MARK_KEPT = 1  # records that stay
MARK_TOMBSTONES = 2  # of these, how many have no value
MARK_NULLED = 3  # of these, how many lose their value now
MARK_HORIZON = 4  # delete horizon of the new batch; -1: none
MARK_CODEC = 5  # of the new batch
MARK_JOIN = 6  # 1: its records go to the batch written before it
MARK_MAY_GO = 7  # 1: its transaction was aborted, or nothing else is left of it
MARK_STAYS = 8  # 1: kept even when it is empty
MARK_COLUMNS = 9
MARK_BYTES = MARK_COLUMNS * 8

#: actions
DELETE = 0
VERBATIM = 1
EMPTY = 2
REBUILD = 3

#: what becomes of a record: one byte each
DROP_RECORD = 0
KEEP_RECORD = 1
NULL_RECORD = 3

#: whose value is the latest
ORDER_OFFSET = 0
ORDER_TIMESTAMP = 1
ORDER_HEADER = 2


def new_marks(count: int) -> Marks:
    return np.zeros((count, MARK_COLUMNS), dtype=np.int64)
