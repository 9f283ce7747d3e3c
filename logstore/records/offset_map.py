"""Key to last offset: a table of 24 bytes an entry in one block of memory.

Keys are not stored but 128 bits of a keyed hash of them; without the secret nobody can make two keys collide. The
memory is a budget: a map that is full says so, and where it stopped.
"""

from __future__ import annotations

import secrets

import numpy as np

from logstore.errors import CorruptBatch
from logstore.records import slots
from logstore.records.codes import EXPLAINED, FULL, OK
from logstore.records.native import address_of, kernels
from logstore.records.survivors import Survivors
from logstore.records.table import BASE_OFFSET, COUNT, POSITION, SKIP, BatchTable

SLOT_BYTES = 24
_AHEAD = 64


def new_secret() -> tuple[int, int]:
    """Two random numbers; all maps that are compared or merged must share them."""
    return secrets.randbits(63), secrets.randbits(63)


class OffsetMap:
    """Open with a fixed number of slots; `limit` of them may be used."""

    def __init__(
        self,
        slot_count: int,
        *,
        load_factor: float = 0.9,
        secret: tuple[int, int] | None = None,
        bucket: int = 0,
        buckets: int = 1,
    ) -> None:
        """With `buckets` above 1 the map takes only the keys of one of them, by hash."""
        if slot_count < 2:
            raise ValueError(f"a map of {slot_count} slots holds nothing")
        self.slots = slot_count
        # One slot stays empty, or looking for a missing key would never end.
        self.limit = min(int(slot_count * load_factor), slot_count - 1)
        self.secret = secret or new_secret()
        self._memory = np.zeros(slot_count * SLOT_BYTES, dtype=np.uint8)  # given by the system as it is touched
        self._scratch = np.empty(_AHEAD * SLOT_BYTES, dtype=np.uint8)
        self._block = np.zeros(slots.M_SLOTS, dtype=np.int64)
        block = self._block
        block[slots.M_MAP] = address_of(self._memory)
        block[slots.M_MAP_SLOTS] = slot_count
        block[slots.M_MAP_LIMIT] = self.limit
        block[slots.M_SECRET_0], block[slots.M_SECRET_1] = self.secret
        block[slots.M_SCRATCH] = address_of(self._scratch)
        block[slots.M_BUCKET] = bucket
        block[slots.M_BUCKETS] = buckets

    @property
    def used(self) -> int:
        return int(self._block[slots.M_MAP_USED])

    def put(
        self, table: BatchTable, first: int, last: int, *, min_offset: int, max_offset: int, file: str | None = None
    ) -> int | None:
        """Take the keys of opened batches [first, last). None when all were taken, else the offset that was not.

        Raises CorruptBatch.
        """
        self._block[slots.M_MIN_OFFSET] = min_offset
        self._block[slots.M_MAX_OFFSET] = max_offset
        code = kernels().map_put(address_of(table), first, last, address_of(self._block))
        if code == OK:
            return None
        if code == FULL:
            return int(self._block[slots.M_STOP_OFFSET])
        raise self._corrupt(table, code, file)

    def keep(
        self,
        table: BatchTable,
        first: int,
        last: int,
        *,
        min_offset: int,
        max_offset: int,
        tombstones: bool = False,
        survivors: Survivors | None = None,
        file: str | None = None,
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]:
        """One byte a record of the batches that are not skipped: is it its key's last? And how many are.

        No key is looked for where there are `survivors`, which must be those of [min_offset, max_offset).
        """
        live = table[first:last, SKIP] == 0
        flags = np.empty(int(table[first:last, COUNT][live].sum()), dtype=np.uint8)
        block = self._block
        block[slots.M_MIN_OFFSET] = min_offset
        block[slots.M_MAX_OFFSET] = max_offset
        block[slots.M_KEEP] = address_of(flags) if len(flags) else 0
        block[slots.M_KEEP_TOMBSTONES] = tombstones
        block[slots.M_SURVIVORS] = 0 if survivors is None else address_of(survivors.bits)
        code = kernels().map_keep(address_of(table), first, last, address_of(block))
        if code != OK:
            raise self._corrupt(table, code, file)
        return flags, int(block[slots.M_N])

    def survivors(self, first_offset: int, end_offset: int) -> Survivors | None:
        """Where the last records of keys lie in [first_offset, end_offset), all of which was put in."""
        return Survivors.of(self._memory, SLOT_BYTES, first_offset, end_offset)

    def grown(self, slot_count: int) -> OffsetMap:
        """The same entries with more room."""
        block = self._block
        larger = OffsetMap(
            slot_count,
            load_factor=self.limit / self.slots,
            secret=self.secret,
            bucket=int(block[slots.M_BUCKET]),
            buckets=int(block[slots.M_BUCKETS]),
        )
        larger._block[slots.M_MAP_USED] = kernels().map_grow(
            address_of(self._memory), self.slots, address_of(larger._memory), slot_count
        )
        return larger

    def _corrupt(self, table: BatchTable, code: int, file: str | None) -> CorruptBatch:
        blamed = table[int(self._block[slots.M_BATCH])]
        return CorruptBatch(EXPLAINED[code], file=file, position=int(blamed[POSITION]), offset=int(blamed[BASE_OFFSET]))
