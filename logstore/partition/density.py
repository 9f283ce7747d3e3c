"""Whether a log may have lost records to compaction, decided from its batches alone.

Appends leave no gaps: each batch holds as many records as it has offsets and begins where the one before it ends.
Compaction keeps offsets, so what it removed shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from logstore.errors import DuramenError
from logstore.records.table import ATTRIBUTES, BASE_OFFSET, CODEC_MASK, COUNT, LAST_OFFSET, BatchTable
from logstore.segment.segment import LogSegment


def thinned_below(segments: Sequence[LogSegment]) -> int:
    """The offset below which records may be missing: the last segment's base, or 0 where every offset has its record.

    Reads up to the first gap. What was removed may have been superseded anywhere up to the last segment, which is
    never compacted.
    """
    expected = segments[0].base_offset
    try:
        for segment in segments[:-1]:
            for chunk in segment.chunks(verify_crc=False):
                if not _is_dense(chunk.table, expected):
                    return segments[-1].base_offset
                expected = int(chunk.table[-1, LAST_OFFSET]) + 1
    except DuramenError:  # damaged, or too large to look at: nothing is known of it
        return segments[-1].base_offset
    return 0 if expected == segments[-1].base_offset else segments[-1].base_offset


def _is_dense(table: BatchTable, expected: int) -> bool:
    """Whether the batches hold a record for every offset from `expected` on."""
    last = table[:, LAST_OFFSET]
    # A legacy batch says neither where it begins nor how many it holds; one that is not a wrapper is a single message.
    legacy = table[:, BASE_OFFSET] < 0
    wrapper = legacy & ((table[:, ATTRIBUTES] & CODEC_MASK) != 0)
    base = np.where(legacy, last, table[:, BASE_OFFSET])
    count = np.where(legacy, 1, table[:, COUNT])
    before = np.concatenate(([expected - 1], last[:-1]))
    return bool(((base == before + 1) & (count == last - base + 1) & ~wrapper).all())
