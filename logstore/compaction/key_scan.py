"""Looking for keys in files of batches, record by record; what cannot be read is reported, not raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logstore.errors import DuramenError
from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.records.columns import DecodedColumns
from logstore.records.decoder import Decoder
from logstore.records.table import ATTRIBUTES, BASE_TIMESTAMP, DELETE_HORIZON_BIT, LAST_OFFSET, MAGIC, SKIP
from logstore.segment.batches import Chunk, read_batches


@dataclass(frozen=True, slots=True)
class Hit:
    key: int
    offset: int
    tombstone: bool
    horizon_ms: int | None


@dataclass(slots=True)
class Found:
    """One file's hits."""

    hits: list[Hit] = field(default_factory=list)
    last_offset: int = -1
    unreadable: str | None = None


class KeyScan:
    """`progress` is called with the bytes of each file that was read."""

    def __init__(self, keys: Sequence[bytes], limits: Limits, progress: Callable[[int], None]) -> None:
        self._keys = [np.frombuffer(key, dtype=np.uint8) for key in keys]
        self._limits = limits
        self._progress = progress
        self._decoder = Decoder(limits=limits, headers=False)

    def file(self, fs: FileSystem, path: str) -> Found:
        """Raises FileNotFoundError."""
        file = fs.open(path)
        try:
            size = file.size()
            found = self.chunks(read_batches(file, 0, size, limits=self._limits, verify_crc=False))
            self._progress(size)
        finally:
            file.close()
        return found

    def chunks(self, chunks: Iterator[Chunk]) -> Found:
        """What the batches hold, up to the first that cannot be read."""
        found = Found()
        try:
            for chunk in chunks:
                table = chunk.table
                table[:, SKIP] = 0
                for columns in self._decoder.columns(chunk.data, table, file=chunk.file, base_position=chunk.position):
                    for key, wanted in enumerate(self._keys):
                        for row in _rows_with(columns, wanted).tolist():
                            offset = int(columns.offsets[row])
                            batch = table[int(np.searchsorted(table[:, LAST_OFFSET], offset))]
                            horizon = (
                                int(batch[BASE_TIMESTAMP])
                                if batch[MAGIC] == 2 and int(batch[ATTRIBUTES]) & DELETE_HORIZON_BIT
                                else None
                            )
                            found.hits.append(Hit(key, offset, not columns.values.valid[row], horizon))
                found.last_offset = int(table[-1, LAST_OFFSET])
        except DuramenError as error:
            found.unreadable = str(error)
        return found


def _rows_with(columns: DecodedColumns, wanted: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Rows with exactly this key, compared a byte of all candidates at a time, from the end: keys differ there."""
    offsets = columns.keys.offsets
    rows = np.nonzero((np.diff(offsets) == len(wanted)) & (columns.keys.valid != 0))[0]
    starts = offsets[rows].astype(np.int64)
    for at in range(len(wanted) - 1, -1, -1):
        if not len(rows):
            break
        same = columns.keys.data[starts + at] == wanted[at]
        rows, starts = rows[same], starts[same]
    return rows
