"""Splits a segment whose offsets do not fit its base: old releases of Kafka left such segments."""

from __future__ import annotations

import os

from logstore.config import LogConfig
from logstore.directory.swap import replace_segments
from logstore.errors import DamageError
from logstore.files import FileSystem
from logstore.limits import RELATIVE_OFFSET_MAX, Limits
from logstore.records.table import BASE_OFFSET, LAST_OFFSET
from logstore.segment.names import parse_file_name
from logstore.segment.output import new_output
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings


def split_segment(fs: FileSystem, path: str, config: LogConfig, limits: Limits) -> int:
    """Copy the segment into several whose offsets fit, and swap them in; how many. No segment of the log is open."""
    directory = os.path.dirname(path)
    parsed = parse_file_name(os.path.basename(path))
    assert parsed is not None
    settings = SegmentSettings.under(config)
    source = LogSegment(fs, directory, parsed.base_offset, limits=limits)
    outputs: list[LogSegment] = []
    for chunk in source.chunks(verify_crc=False):
        for row in range(len(chunk.table)):
            base = int(chunk.table[row, BASE_OFFSET])
            last = int(chunk.table[row, LAST_OFFSET])
            if not outputs or last - outputs[-1].base_offset > RELATIVE_OFFSET_MAX:
                legacy_base = last if outputs else parsed.base_offset  # where it begins is known only inside
                outputs.append(new_output(fs, directory, base if base >= 0 else legacy_base, settings, limits))
            outputs[-1].place(chunk.data, chunk.table[: row + 1], row)
    total = sum(output.size_bytes for output in outputs)
    size = source.size_bytes
    source.close(clean=False)
    bases = [output.base_offset for output in outputs]
    for output in outputs:
        output.seal()
        output.flush()
        output.close(clean=False)
        fs.unlink(output.offset_index.path)  # so that all three indexes are rebuilt, with transactions
    if total != size:
        raise DamageError(f"splitting gave {total} bytes of {size}", file=path)
    replace_segments(fs, directory, bases, [parsed.base_offset])
    return len(bases)
