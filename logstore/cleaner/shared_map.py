"""An offset map that several threads fill at once: one of the size of one, and nothing to merge.

Its keys are those of all their ranges together. Where not all keys fit, it cannot say which prefix of the log would
have fitted, and is useless.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from logstore.records.marks import ORDER_OFFSET
from logstore.records.offset_map import OffsetMap, Put
from logstore.records.table import BASE_OFFSET, BatchTable


class SharedMap:
    """Make a `Filler` for each thread; `close` once they are done."""

    def __init__(self, offset_map: OffsetMap) -> None:
        assert offset_map.settings.order == ORDER_OFFSET, "a version and an offset cannot be replaced in one step"
        self.map = offset_map
        self.used: npt.NDArray[np.int64] = np.array([offset_map.used], dtype=np.int64)
        self._too_small = False
        self._filling = 0
        self._growing = False
        self._unfinished = 0  # records of batches that did not fit, and will be put again
        self._moved = threading.Condition()

    def enter(self, view: OffsetMap) -> bool:
        """From here to `leave` the memory stays where it is. False when the map is too small."""
        with self._moved:
            self._moved.wait_for(lambda: not self._growing)
            if self._too_small:
                return False
            view.look_at(self.map)
            self._filling += 1
            return True

    def leave(self, put: Put | None) -> None:
        with self._moved:
            self._filling -= 1
            if put is not None:
                if put.stopped_at is None:
                    self.map.count(put.records)
                else:
                    self._unfinished += put.records
            self._moved.notify_all()

    def grow(self, view: OffsetMap) -> None:
        """Make room, unless another thread has done so in the meantime."""
        with self._moved:
            self._moved.wait_for(lambda: not self._growing)
            if self._too_small or view.slots != self.map.slots:
                return
            self._growing = True
            try:
                self._moved.wait_for(lambda: self._filling == 0)
                self.map.used = int(self.used[0])
                expected = self.map.expected(self._unfinished)
                self._unfinished = 0
                self._too_small = expected >= self.map.keys_max or not self.map.grow(expected)
            finally:
                self._growing = False
                self._moved.notify_all()

    def close(self) -> bool:
        """Whether all keys are in the map, as if it had been filled in order."""
        self.map.used = int(self.used[0])
        # One without room ends before the next record, even one of a key it knows.
        return not self._too_small and not self.map.is_full


class Filler:
    """One thread's access to the shared map."""

    def __init__(self, shared: SharedMap) -> None:
        self._shared = shared
        self._view = shared.map.view(used=shared.used)

    @property
    def used(self) -> int:
        return int(self._shared.used[0])

    def put(
        self,
        table: BatchTable,
        first: int,
        last: int,
        *,
        min_offset: int,
        file: str | None = None,
        base_position: int = 0,
    ) -> Put:
        """As that of the map. Where that is too small, it does not say how far it got."""
        while self._shared.enter(self._view):
            put = None
            try:
                put = self._view.put_some(
                    table, first, last, min_offset=min_offset, file=file, base_position=base_position
                )
            finally:
                self._shared.leave(put)
            if put.stopped_at is None:
                return put
            self._shared.grow(self._view)
        return Put(0, 0, stopped_at=int(table[first, BASE_OFFSET]))
