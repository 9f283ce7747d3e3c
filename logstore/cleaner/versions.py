"""Which record of a key counts in a topic ordered by something other than offsets (`duramen.compaction.order`).

Compaction and restores must agree, or a state would depend on whether compaction has run. Both use the same map; here
it is filled from a range of a log as a reader sees it. All keys of the range are held, 32 bytes each and some room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from logstore.config import LogConfig
from logstore.limits import INT64_MIN, Limits
from logstore.partition.reading import LogView, read_chunks
from logstore.records.decoder import Decoder
from logstore.records.marks import ORDER_HEADER, ORDER_OFFSET, ORDER_TIMESTAMP
from logstore.records.offset_map import MapSettings, OffsetMap
from logstore.records.survivors import Survivors

_ORDERS = {"offset": ORDER_OFFSET, "timestamp": ORDER_TIMESTAMP, "header": ORDER_HEADER}
_VERSION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Order:
    """`header` is the name of the header with the version, where that decides."""

    kind: int = ORDER_OFFSET
    header: str = ""

    @classmethod
    def of(cls, config: LogConfig) -> Order:
        kind = _ORDERS[config.duramen_compaction_order]
        return cls(kind, config.duramen_compaction_version_header if kind == ORDER_HEADER else "")

    @property
    def by_offset(self) -> bool:
        return self.kind == ORDER_OFFSET

    @property
    def needs_headers(self) -> bool:
        return self.kind == ORDER_HEADER

    def __str__(self) -> str:
        if self.kind == ORDER_HEADER:
            return f"the highest version in the header {self.header!r}"
        return "the highest timestamp" if self.kind == ORDER_TIMESTAMP else "the highest offset"

    def version(self, timestamp_ms: int, headers: Iterable[tuple[str, bytes | None]]) -> int:
        """What decides before offsets do. Of several headers of that name, the last one with a version counts."""
        if self.kind == ORDER_OFFSET:
            return 0
        if self.kind == ORDER_TIMESTAMP:
            return timestamp_ms
        found = [value for name, value in headers if name == self.header and value and len(value) == _VERSION_BYTES]
        return int.from_bytes(found[-1], "big", signed=True) if found else INT64_MIN


def winners(view: LogView, low: int, high: int, order: Order, *, committed: bool, limits: Limits) -> Survivors:
    """The offsets among [low, high) whose records count. Raises CorruptBatch."""
    settings = MapSettings(order=order.kind, header=order.header.encode())
    whole = replace(settings, buffer_bytes=settings.buffer_for(high - low + 1))  # more than there can be keys
    offset_map = OffsetMap(whole, records=high - low)
    decoder = Decoder(limits=limits, headers=False)
    for chunk in read_chunks(view, low, high, limits=limits, committed=committed):
        for first, last in decoder.opened(chunk.data, chunk.table, file=chunk.file, base_position=chunk.position):
            put = offset_map.put(
                chunk.table,
                first,
                last,
                min_offset=low,
                max_offset=high,
                file=chunk.file,
                base_position=chunk.position,
            )
            assert put.stopped_at is None
    found = offset_map.survivors(low, high, bytes_max=high - low)
    assert found is not None
    return found
