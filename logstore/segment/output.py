"""Outputs of a rewrite: segments written under `.cleaned`, swapped in when they are complete."""

from __future__ import annotations

import os

from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.segment.names import SEGMENT_KINDS, Transient, file_name
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings


def new_output(
    fs: FileSystem, directory: str, base_offset: int, settings: SegmentSettings, limits: Limits
) -> LogSegment:
    """An empty segment; what an interrupted attempt left under its name goes first."""
    discard_output(fs, directory, base_offset)
    return LogSegment(
        fs, directory, base_offset, settings=settings, writable=True, suffix=Transient.CLEANED, limits=limits
    )


def discard_output(fs: FileSystem, directory: str, base_offset: int) -> None:
    for kind in SEGMENT_KINDS:
        path = os.path.join(directory, file_name(base_offset, kind, Transient.CLEANED))
        if fs.exists(path):
            fs.unlink(path)
