"""Where the last records of keys lie, a bit for each offset.

Once all keys of a range were put into a map, it also says which offsets are some key's last. With a bit for each of
them, a second look at the records needs neither hash nor map, and batches with no bit set are not opened at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.records.native import address_of, kernels
from logstore.records.table import BatchTable

#: beyond this the bits take more memory than they are worth, unless they are needed
SURVIVOR_BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True)
class Survivors:
    """Of offsets [first_offset, end_offset). The last byte of `bits` has none."""

    first_offset: int
    end_offset: int
    bits: npt.NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        memory: npt.NDArray[np.uint8],
        slot_bytes: int,
        first_offset: int,
        end_offset: int,
        *,
        bytes_max: int = SURVIVOR_BYTES_MAX,
    ) -> Survivors | None:
        """Those of a map, in whose slots 16 bytes of hash come before offset + 1; None where they would take more
        memory than `bytes_max`.
        """
        if not 0 < end_offset - first_offset <= 8 * bytes_max:
            return None
        bits = np.zeros((end_offset - first_offset + 7) // 8 + 1, dtype=np.uint8)
        slots = len(memory) // slot_bytes
        kernels().mark_offsets(address_of(memory), slots, slot_bytes, first_offset, end_offset, address_of(bits))
        return cls(first_offset, end_offset, bits)

    def skip_superseded(self, table: BatchTable) -> None:
        """Mark the batches SKIP that surely hold none."""
        kernels().skip_superseded(
            address_of(table), len(table), address_of(self.bits), self.first_offset, self.end_offset
        )
