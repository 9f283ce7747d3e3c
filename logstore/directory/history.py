"""How a topic grew: a ring file of fixed slots, a few thousand bytes forever, however long the store lives.

    header   "duramen-history 1 OWNER\\n", padded with zeros to 64 bytes
    slot*    time_ms:8 size_bytes:8 dirty_bytes:8 records:8 tombstones:8 crc32c:4 zero:4      little-endian

Three tiers follow each other: a slot a minute, a quarter of an hour, six hours. A moment belongs to one slot of each
tier, and the newest sample of that time stays. Slots are written in place, without a lock and without a sync: the last
writer wins, and readers ignore a slot that is torn, or as old as the ring is long. Nothing depends on this file; one
that cannot be read is started again by the next sample.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from logstore.files import FileSystem, read_whole
from logstore.limits import INT64_MAX

_HEADER_BYTES = 64
_SLOT = struct.Struct("<qqqqqI4x")
_FIGURES = struct.Struct("<qqqqq")


@dataclass(frozen=True, slots=True)
class Tier:
    step_ms: int
    slots: int

    @property
    def span_ms(self) -> int:
        return self.step_ms * self.slots


MINUTES, QUARTERS, DAYS = Tier(60_000, 180), Tier(900_000, 192), Tier(21_600_000, 120)
TIERS = (MINUTES, QUARTERS, DAYS)
FILE_BYTES = _HEADER_BYTES + _SLOT.size * sum(tier.slots for tier in TIERS)


@dataclass(frozen=True, slots=True)
class Sample:
    time_ms: int
    size_bytes: int
    dirty_bytes: int
    records: int
    tombstones: int


def write_sample(fs: FileSystem, path: str, owner: str, sample: Sample) -> None:
    """Put the sample into its slots; `owner` is whose history it is. Raises OSError."""
    header = _header(owner)
    file = fs.open(path, create=True)
    try:
        if file.pread(_HEADER_BYTES, 0) != header or file.size() > FILE_BYTES:
            file.truncate(0)
            file.pwrite(header, 0)
        for tier in TIERS:
            slot = _first_slot(tier) + sample.time_ms // tier.step_ms % tier.slots
            file.pwrite(_encoded(slot, sample), _HEADER_BYTES + slot * _SLOT.size)
    finally:
        file.close()


def read_samples(fs: FileSystem, path: str, owner: str, tier: Tier, *, now_ms: int) -> list[Sample]:
    """The tier's samples up to now, oldest first; none where there is no file, or it is another's or damaged."""
    try:
        data = read_whole(fs, path, limit=FILE_BYTES)
    except OSError:
        return []
    if data[:_HEADER_BYTES] != _header(owner):
        return []
    first = _first_slot(tier)
    found = []
    for slot in range(first, first + tier.slots):
        raw = data[_HEADER_BYTES + slot * _SLOT.size :][: _SLOT.size]
        sample = _decoded(slot, raw)
        if sample is not None and now_ms - tier.span_ms < sample.time_ms <= now_ms + tier.step_ms:
            found.append(sample)
    return sorted(found, key=lambda each: each.time_ms)


def _first_slot(tier: Tier) -> int:
    return sum(each.slots for each in TIERS[: TIERS.index(tier)])


def _header(owner: str) -> bytes:
    return f"duramen-history 1 {owner}\n".encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")


def _encoded(slot: int, sample: Sample) -> bytes:
    numbers = (sample.time_ms, sample.size_bytes, sample.dirty_bytes, sample.records, sample.tombstones)
    figures = [min(max(number, 0), INT64_MAX) for number in numbers]
    return _SLOT.pack(*figures, crc32c(_FIGURES.pack(*figures), slot + 1))


def _decoded(slot: int, raw: bytes) -> Sample | None:
    if len(raw) < _SLOT.size:
        return None
    *figures, crc = _SLOT.unpack(raw)
    if crc32c(raw[: _FIGURES.size], slot + 1) != crc or min(figures) < 0:
        return None
    return Sample(*figures)
