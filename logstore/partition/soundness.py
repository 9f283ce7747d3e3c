"""Whether batches that have their checksums can be where they lie: the rules recovery and salvage share.

A checksum covers neither a batch's offset nor what a marker or a legacy set says inside; the neighbours and the
contents do.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from logstore.errors import CorruptBatch, DecompressionLimit, UnsupportedFormat
from logstore.files import File
from logstore.limits import Limits
from logstore.partition.producers import producer_entries
from logstore.records.legacy import decode_legacy
from logstore.records.table import ATTRIBUTES, CODEC_MASK, CONTROL_BIT, LAST_OFFSET, MAGIC, POSITION, SIZE
from logstore.segment.batches import Chunk, begin_after, begin_offsets, ordered_batches

#: errors that a batch with a sound checksum may still show when it is opened
MALFORMED = (CorruptBatch, DecompressionLimit, UnsupportedFormat)


def in_order(file: File, chunk: Chunk, *, after: int, low: int, high: int) -> tuple[int, str]:
    """How many leading batches continue the log after offset `after`, within [low, high), and what is wrong with the
    next one ('' when nothing is).
    """
    table = chunk.table
    end = chunk.position + int(table[-1, POSITION] + table[-1, SIZE])
    sound = ordered_batches(
        table,
        after=after,
        expected=after + 1,
        low=low,
        high=high,
        following=partial(begin_after, file, end, file.size()),
    )
    if sound == len(table):
        return sound, ""
    begin, last = int(begin_offsets(table)[sound]), int(table[sound, LAST_OFFSET])
    return sound, f"offsets {begin} to {last} contradict the segment or the batches around them"


def well_formed(chunk: Chunk, after: int, sound: int, reason: str, limits: Limits) -> tuple[int, str]:
    """The same with legacy sets and control batches opened: where the messages of a set begin is known only inside
    it, and what no producer state can be made of is damage, too.
    """
    sound, reason = _legacy_in_order(chunk, after, sound, reason, limits)
    table = chunk.table[:sound]
    for row in np.nonzero((table[:, MAGIC] == 2) & (table[:, ATTRIBUTES] & CONTROL_BIT != 0))[0].tolist():
        try:
            for _ in producer_entries(chunk.data, table[row : row + 1], limits):
                pass
        except MALFORMED as error:
            return row, error.what
    return sound, reason


def _legacy_in_order(chunk: Chunk, after: int, sound: int, reason: str, limits: Limits) -> tuple[int, str]:
    table = chunk.table[:sound]
    sets = (table[:, MAGIC] < 2) & (table[:, ATTRIBUTES] & CODEC_MASK != 0)
    for row in np.nonzero(sets)[0].tolist():
        position = int(table[row, POSITION])
        try:
            first = decode_legacy(
                chunk.data[position : position + int(table[row, SIZE])].data, limits=limits
            ).first_offset
        except CorruptBatch as error:
            return row, error.what
        previous = int(table[row - 1, LAST_OFFSET]) if row else after
        if first <= previous:
            return row, f"messages from offset {first} on do not follow offset {previous}"
    return sound, reason
