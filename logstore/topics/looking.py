"""One partition at one moment, as planning and figures see it: what is listed, where it ends, how its files are read.

The same for a directory and a bucket. What takes a look at files, or a request, is asked for only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from logstore.config import LogConfig
from logstore.directory.state import PartitionState, SegmentEntry
from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.records.header import BatchHeader, read_header
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from logstore.ledger.rows import RunRow


@dataclass(frozen=True, slots=True)
class PartitionLook:
    """`state` lists the segments, the last of them active; `fs` has their files below `directory`, for reading."""

    partition: TopicPartition
    directory: str
    fs: FileSystem
    state: PartitionState
    high_watermark: int
    last_stable_offset: int
    #: nothing above it is known to be durable in the log
    recovery_point: int
    limits: Limits
    #: size of the active segment
    active_bytes: Callable[[], int]
    #: what the active segment becomes once it is closed, and the empty one behind it
    closed: Callable[[], tuple[SegmentEntry, ...]]
    #: the time of the newest record of the active segment as far as it is written down, -1 where it is not
    newest_ms: Callable[[], int]
    #: whether a run closes it now by the topic's settings, although nothing is appended
    closes: Callable[[LogConfig, int], bool]
    #: the newest receipts of its passes, oldest first, where they lie with what is listed
    runs: tuple[RunRow, ...] = ()

    def rolled(self) -> PartitionLook:
        """With the active segment closed, and none after it yet."""
        state = replace(self.state, segments=(*self.state.segments[:-1], *self.closed()))
        return replace(self, state=state, active_bytes=lambda: 0, closed=lambda: state.segments[-1:])


def first_header(fs: FileSystem, path: str) -> BatchHeader | None:
    """The header of a file's first batch; None when there is no batch, or no file any more."""
    try:
        file = fs.open(path)
    except FileNotFoundError:
        return None
    try:
        return read_header(file, 0, file.size())
    except FileNotFoundError:  # an object is missed when it is read
        return None
    finally:
        file.close()
