"""Memory that is reused as soon as no array refers to it any more.

Memory fresh from the system costs more than what is usually done with it, because every page is zeroed first. Code that
fills large arrays over and over takes them from a `Memory`: it hands out a block only when no array made of it is
alive, so that its users need not say when they are done. Not for several threads at once.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

_ROUND_BYTES = 1 << 18  # no two sizes are alike, so that a block serves the next one only if it is a bit larger


class Memory:
    def __init__(self, *, blocks: int = 3, block_bytes_max: int = 16 << 20) -> None:
        """Keeps at most so many blocks, none of them larger than `block_bytes_max`."""
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._blocks_max = blocks
        self._block_bytes_max = block_bytes_max

    def block(self, size: int) -> npt.NDArray[np.uint8]:
        """At least `size` bytes, of any content. In use while this array or any view of it exists."""
        for at in range(len(self._blocks)):
            # The list and the call hold a reference each; any other means that it is still in use.
            if sys.getrefcount(self._blocks[at]) <= 2 and len(self._blocks[at]) >= size:
                return self._blocks[at]
        if size > _ROUND_BYTES:
            size += -size % _ROUND_BYTES
        block = np.empty(size, dtype=np.uint8)
        if size <= self._block_bytes_max:
            self._blocks.append(block)
            if len(self._blocks) > self._blocks_max:
                del self._blocks[0]
        return block

    def array(self, count: int) -> npt.NDArray[np.int64]:
        """The same as `count` int64."""
        return self.block(8 * count)[: 8 * count].view(np.int64)
