"""The plain face: records one by one out of bytes, over the same kernels as the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.records.decoder import Decoder
from logstore.records.record import Record
from logstore.records.scan import is_damage, scan_batches

if TYPE_CHECKING:
    from typing_extensions import Buffer


def iter_records(
    data: Buffer,
    *,
    limits: Limits = DEFAULT_LIMITS,
    verify_crc: bool = True,
    control: bool = False,
    file: str | None = None,
) -> Iterator[Record]:
    """Records of all whole batches; a batch cut off at the end is left out, damage raises CorruptBatch."""
    array = np.frombuffer(memoryview(data), dtype=np.uint8)
    scan = scan_batches(array, verify_crc=verify_crc)
    decoder = Decoder(limits=limits, control=control)
    for columns in decoder.columns(array, scan.table, file=file):
        yield from columns.records()
    if is_damage(scan.code):
        raise scan.error(file=file)
