"""The offset map: key to last offset, 24 bytes an entry, within a budget. Compaction and restores use it.

Keys are not stored but 128 bits of hash: keyed by a secret of the run, so that nobody can make two keys collide, or
MD5 as in Kafka. It is full when its budget's share of slots is used, and then says which record it did not take. The
memory grows with the keys up to the budget. A finished map can be saved, and mapped read-only by other processes.

With another order than that of offsets (see `marks`) an entry has 32 bytes, and the greater version wins.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import struct
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from logstore.errors import CorruptBatch, CorruptState, InvalidConfig
from logstore.files import FileSystem
from logstore.limits import INT64_MAX
from logstore.records import slots
from logstore.records.codes import EXPLAINED, FULL, OK
from logstore.records.marks import ORDER_OFFSET
from logstore.records.native import address_of, kernels
from logstore.records.survivors import SURVIVOR_BYTES_MAX, Survivors
from logstore.records.table import BASE_OFFSET, COUNT, POSITION, SKIP, BatchTable

_SCRATCH_BYTES = 64 * 48 + 128
_SLOTS_MIN = 1 << 16
_GROWTH = 2
_SPARE = 1.1  # how much more room is made than the expected keys need
_HUGE_PAGES_BYTES_MIN = 8 << 20
_ROOM = 0.7  # while it can grow; beyond that looking for a key takes many steps
_MAGIC = b"duramen-map-1\n"
_SAVE_BYTES = 8 << 20

SIPHASH = "siphash"
MD5 = "md5"


def new_secret() -> tuple[int, int]:
    """Two random numbers; all maps that are compared or merged must share them."""
    return secrets.randbits(63), secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class MapSettings:
    """`buffer_bytes` and `load_factor` are log.cleaner.dedupe.buffer.size and log.cleaner.io.buffer.load.factor."""

    buffer_bytes: int = 128 << 20
    load_factor: float = 0.9
    algorithm: str = SIPHASH
    secret: tuple[int, int] = field(default_factory=new_secret)
    order: int = ORDER_OFFSET
    header: bytes = b""

    def __post_init__(self) -> None:
        if self.keys_max < 1:
            raise InvalidConfig(
                f"log.cleaner.dedupe.buffer.size = {self.buffer_bytes} with a load factor of {self.load_factor} "
                "has no room for a single key",
                hint=f"An entry takes {self.entry_bytes} bytes; give it at least 1 MiB",
            )

    @property
    def entry_bytes(self) -> int:
        return 24 if self.order == ORDER_OFFSET else 32

    @property
    def keys_max(self) -> int:
        """Keys a pass can know; as Kafka computes it."""
        return int(self.buffer_bytes // self.entry_bytes * self.load_factor)

    def buffer_for(self, keys: int) -> int:
        """The buffer that would hold so many keys."""
        return int(keys / self.load_factor + 1) * self.entry_bytes


@dataclass(frozen=True, slots=True)
class Put:
    """`stopped_at` is the record that found the map full, `last_offset` the last one taken before it, or -1.

    Where it was full, `records` and `keyless` may have some without key after that record.
    """

    records: int
    keyless: int
    stopped_at: int | None = None
    last_offset: int = -1


def distinct_keys(known: int, seen: int, records: int) -> int:
    """How many keys so many records have, when the first `seen` of them had `known`; for keys of equal chances."""
    if seen <= known or records <= seen:
        return max(records, known)  # no key came twice, or nothing is known of what comes
    low, high = float(known), 1e3 * records
    for _ in range(60):
        keys = (low * high) ** 0.5
        if -keys * math.expm1(-seen / keys) < known:
            low = keys
        else:
            high = keys
    return int(min(-low * math.expm1(-records / low), records)) + 1


class OffsetMap:
    """Not for several threads at once: give each its own `view`. See `SharedMap` for filling one together."""

    def __init__(
        self,
        settings: MapSettings,
        *,
        keys_max: int | None = None,
        records: int = 0,
        slots_min: int = 0,
        bucket: int = 0,
        buckets: int = 1,
    ) -> None:
        """With `keys_max` it takes fewer keys than the budget has room for. `records` are expected. It begins
        with `slots_min` slots. With `buckets` above 1 it takes only the keys of one of them, by hash.
        """
        self.settings = settings
        self.keys_max = settings.keys_max if keys_max is None else min(keys_max, settings.keys_max)
        #: one slot more than Kafka has, so that there is always an empty one
        self._slots_max = settings.buffer_bytes // settings.entry_bytes + 1
        if self.keys_max < settings.keys_max:
            self._slots_max = int(self.keys_max / settings.load_factor) + 2
        self._records = records
        self._seen = 0
        self._scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)
        self.block = np.zeros(slots.K_SLOTS, dtype=np.int64)
        self.block[slots.K_BUCKET], self.block[slots.K_BUCKETS] = bucket, buckets
        self._header = np.frombuffer(settings.header or b"\0", dtype=np.uint8)
        self._set_memory(self._new_memory(min(max(slots_min, _SLOTS_MIN), self._slots_max)))

    def _new_memory(self, slot_count: int) -> npt.NDArray[np.uint8]:
        return _zeroed(slot_count * self.settings.entry_bytes)

    def _set_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        settings, block = self.settings, self.block
        self._memory = memory
        self.slots = len(memory) // settings.entry_bytes
        block[slots.K_MAP] = address_of(memory)
        block[slots.K_MAP_SLOTS] = self.slots
        block[slots.K_SLOT_BYTES] = settings.entry_bytes
        block[slots.K_LIMIT] = self.keys_max
        whole = self.slots >= self._slots_max
        block[slots.K_ROOM] = self.keys_max if whole else min(self.keys_max, int(self.slots * _ROOM))
        block[slots.K_SECRET_0], block[slots.K_SECRET_1] = settings.secret
        block[slots.K_MD5] = settings.algorithm == MD5
        block[slots.K_SCRATCH] = address_of(self._scratch)
        block[slots.K_ORDER] = settings.order
        block[slots.K_HEADER] = address_of(self._header)
        block[slots.K_HEADER_SIZE] = len(settings.header)

    @property
    def used(self) -> int:
        return int(self.block[slots.K_USED])

    @used.setter
    def used(self, keys: int) -> None:
        self.block[slots.K_USED] = keys

    @property
    def is_full(self) -> bool:
        return self.used >= self.keys_max

    def expected(self, seen_too: int = 0) -> int:
        """Keys that all records will have, going by those that came; `seen_too` came that were not counted yet."""
        return distinct_keys(self.used, self._seen + seen_too, self._records)

    def grow(self, keys: int = 0) -> bool:
        """More memory with the same entries, for at least so many keys; False when the budget is spent."""
        if self.slots >= self._slots_max:
            return False
        old, old_slots, used = self._memory, self.slots, self.used
        wanted = max(self.slots * _GROWTH, int(keys * _SPARE / _ROOM))
        self._set_memory(self._new_memory(min(wanted, self._slots_max)))
        self.block[slots.K_USED] = 0
        code = kernels().merge_maps(address_of(old), old_slots, address_of(self.block))
        assert code == OK
        assert self.used == used
        return True

    # --- filling ----------------------------------------------------------------------------------------------------

    def put(
        self,
        table: BatchTable,
        first: int,
        last: int,
        *,
        min_offset: int,
        max_offset: int = INT64_MAX,
        only_known: bool = False,
        file: str | None = None,
        base_position: int = 0,
    ) -> Put:
        """Take the keys of opened batches [first, last), of offsets [min_offset, max_offset). Raises CorruptBatch.

        With `only_known` no key is added: records of older segments compete with those in the map.
        """
        while True:
            put = self.put_some(
                table,
                first,
                last,
                min_offset=min_offset,
                max_offset=max_offset,
                only_known=only_known,
                file=file,
                base_position=base_position,
            )
            # With more room the batches are taken again: what is in already stays as it is, and counts are of one look.
            # Room is made for all keys still expected, so that memory is not moved through many sizes.
            if put.stopped_at is None or self.is_full or not self.grow(self.expected(put.records)):
                break
        self.count(put.records)
        return put

    def put_some(
        self,
        table: BatchTable,
        first: int,
        last: int,
        *,
        min_offset: int,
        max_offset: int = INT64_MAX,
        only_known: bool = False,
        file: str | None = None,
        base_position: int = 0,
    ) -> Put:
        """The same, but it does not grow, and nothing is counted."""
        block = self.block
        block[slots.K_ONLY_KNOWN] = only_known
        block[slots.K_MIN_OFFSET] = min_offset
        block[slots.K_MAX_OFFSET] = max_offset
        block[slots.K_LAST_OFFSET] = -1
        code = kernels().index_keys(address_of(table), first, last, address_of(block))
        if code not in (OK, FULL):
            raise self.corrupt(table, code, file, base_position)
        put = Put(int(block[slots.K_RECORDS]), int(block[slots.K_KEYLESS]))
        if code == FULL:
            put = replace(put, stopped_at=int(block[slots.K_STOP_OFFSET]), last_offset=int(block[slots.K_LAST_OFFSET]))
        return put

    def count(self, records: int) -> None:
        """Note that this many records were put; `expected` is computed from it."""
        self._seen += records

    def merge(self, other: OffsetMap) -> bool:
        """Take all entries of another map, the greater winning; False, and nothing done, when they might not fit.

        A map with no room left takes no record, not even of a key it knows: so there must be some left.
        """
        if self.used + other.used >= self.keys_max:
            return False
        if other.used > self.block[slots.K_ROOM]:
            self.grow(other.used)
        # Most keys may be in both: there is only as much room made as is needed, and what is in already stays the same.
        while kernels().merge_maps(address_of(other._memory), other.slots, address_of(self.block)) == FULL:
            grown = self.grow()
            assert grown
        return True

    def release(self) -> None:
        """Give the memory back; the map is empty then."""
        self._set_memory(self._new_memory(1))
        self.block[slots.K_USED] = 0

    # --- asking -----------------------------------------------------------------------------------------------------

    def view(self, *, used: npt.NDArray[np.int64] | None = None) -> OffsetMap:
        """The same map for another thread; to be asked, or to be filled by several if they count its keys in `used`."""
        twin = object.__new__(OffsetMap)
        twin.settings, twin.keys_max, twin._slots_max = self.settings, self.keys_max, self._slots_max
        twin._records, twin._seen = self._records, self._seen
        twin._scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)
        twin.block = self.block.copy()
        twin._header = self._header
        twin._memory, twin.slots = self._memory, self.slots
        twin.block[slots.K_SCRATCH] = address_of(twin._scratch)
        twin.block[slots.K_SHARED_USED] = 0 if used is None else address_of(used)
        return twin

    def look_at(self, other: OffsetMap) -> None:
        """Use another map's memory."""
        if self._memory is not other._memory:
            self._set_memory(other._memory)

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
    ) -> tuple[npt.NDArray[np.uint8], int]:
        """One byte a record of the batches that are not skipped: is it its key's last? And how many are.

        No key is looked for where there are `survivors`, which must be those of [min_offset, max_offset).
        """
        live = table[first:last, SKIP] == 0
        flags = np.empty(int(table[first:last, COUNT][live].sum()), dtype=np.uint8)
        block = self.block
        block[slots.K_MIN_OFFSET] = min_offset
        block[slots.K_MAX_OFFSET] = max_offset
        block[slots.K_KEEP] = address_of(flags) if len(flags) else 0
        block[slots.K_TOMBSTONES_TOO] = tombstones
        block[slots.K_SURVIVORS] = 0 if survivors is None else address_of(survivors.bits)
        code = kernels().keep_latest(address_of(table), first, last, address_of(block))
        if code != OK:
            raise self.corrupt(table, code, file)
        return flags, int(block[slots.K_RECORDS])

    def corrupt(self, table: BatchTable, code: int, file: str | None, base_position: int = 0) -> CorruptBatch:
        """The error that a kernel returned."""
        blamed = table[int(self.block[slots.K_BATCH])]
        return CorruptBatch(
            EXPLAINED[code],
            file=file,
            position=base_position + int(blamed[POSITION]),
            offset=int(blamed[BASE_OFFSET]),
        )

    def survivors(self, first_offset: int, end_offset: int, *, bytes_max: int = SURVIVOR_BYTES_MAX) -> Survivors | None:
        """Where the last records of keys lie in [first_offset, end_offset), all of which was put in."""
        return Survivors.of(self._memory, self.settings.entry_bytes, first_offset, end_offset, bytes_max=bytes_max)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, fs: FileSystem, path: str) -> None:
        """Write the map whole; it is not durable, since a run that is killed makes it again."""
        head = {"slots": self.slots, "used": self.used, "keys_max": self.keys_max, "crc": crc32c(self._memory.data)}
        text = json.dumps(head).encode()
        prefix = _MAGIC + struct.pack("<I", len(text)) + text
        prefix += bytes(-len(prefix) % 64)
        file = fs.open(path, create=True)
        try:
            file.truncate(0)
            file.pwrite(prefix, 0)
            for at in range(0, len(self._memory), _SAVE_BYTES):
                file.pwrite(self._memory[at : at + _SAVE_BYTES].data, len(prefix) + at)
        finally:
            file.close()

    @classmethod
    def load(cls, path: str, settings: MapSettings) -> OffsetMap:
        """A saved map, mapped read-only. Raises CorruptState."""
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
            begin = len(_MAGIC) + 4
            (size,) = struct.unpack("<I", data[len(_MAGIC) : begin].tobytes())
            head = json.loads(data[begin : begin + size].tobytes())
            begin += size
            memory = data[begin + -begin % 64 :]
            if data[: len(_MAGIC)].tobytes() != _MAGIC or len(memory) != head["slots"] * settings.entry_bytes:
                raise ValueError("not a map")
            if crc32c(memory.data) != head["crc"]:
                raise ValueError("the checksum does not match")
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise CorruptState(f"damaged offset map: {error}", file=os.fspath(path)) from None
        loaded = cls(settings, keys_max=head["keys_max"])
        loaded._set_memory(memory)
        loaded.block[slots.K_USED] = head["used"]
        return loaded


def _zeroed(size: int) -> npt.NDArray[np.uint8]:
    """Memory given by the system as it is touched, in large pages where it has them: keys lie all over it."""
    if size < _HUGE_PAGES_BYTES_MIN:
        return np.zeros(size, dtype=np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
