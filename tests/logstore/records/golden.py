"""Batches that Kafka itself wrote: the vectors made from its jars, and a few as literals, to be read at a glance."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logstore.records.record import Record, TimestampType

T = 1_700_000_000_000

# (k1, v1, headers h = x and n = null) at offset 100, and (k2, null) at 101, five milliseconds later.
_HEAD = "0000018bcfe568000000018bcfe56805ffffffffffffffffffffffffffff00000002"
_RECORDS = "22000000046b310476310402680278026e0110000a02046b320100"
TWO = {
    "none": f"00000000000000640000004cffffffff02d4575bef000000000001{_HEAD}{_RECORDS}",
    "gzip": f"000000000000006400000060ffffffff02a066b096000100000001{_HEAD}"
    "1f8b08000000000000ff5362606060c9366429336461ca60aa60ca631460e06262c9366264000009cc75d61b000000",
    "snappy": f"000000000000006400000062ffffffff02a5f6909b000200000001{_HEAD}"
    f"82534e415050590000000001000000010000001d1b68{_RECORDS}",
    "lz4": f"00000000000000640000005bffffffff0266948666000300000001{_HEAD}04224d186040821b000080{_RECORDS}00000000",
    "zstd": f"000000000000006400000058ffffffff0254b032ee000400000001{_HEAD}28b52ffd0058d80000{_RECORDS}010000",
}
TWO_RECORDS = (
    Record(b"k1", b"v1", T, (("h", b"x"), ("n", None)), 100),
    Record(b"k2", None, T + 5, (), 101),
)
#: offset 200, timestamp T, leader epoch 7, producer 9 of epoch 3, coordinator epoch 11
ABORT_MARKER = bytes.fromhex(
    "00000000000000c80000004200000007020650e7e10030000000000000018bcfe568000000018bcfe568000000000000000009"
    "0003ffffffff000000012000000008000000000c00000000000b00"
)
COMMIT_MARKER = bytes.fromhex(
    "00000000000000c8000000420000000702f26e31a90030000000000000018bcfe568000000018bcfe568000000000000000009"
    "0003ffffffff000000012000000008000000010c00000000000b00"
)
#: offsets 100 to 104, leader epoch 7, producer 9 of epoch 3, sequence 40, largest timestamp T + 5
EMPTY = bytes.fromhex(
    "0000000000000064000000310000000702bd2b1946000000000004ffffffffffffffff0000018bcfe56805000000000000000900030000"
    "002800000000"
)
#: (a, null) created at 1000 and (b, x) at 2000, appended at APPENDED_MS by leader epoch 0
APPENDED_MS = 0x1A1E2585C0F
APPENDED = bytes.fromhex(
    "0000000000000000000000430000000002a2ce763600080000000100000000000003e8000001a1e2585c0fffffffffffffffffffffffff"
    "ffff000000020e000000026101001200d00f020262027800"
)
#: the same after a clean, when its tombstone got a delete horizon
HORIZON_MS = 0x1A1E2586006
CLEANED = bytes.fromhex(
    "000000000000000000000044000000000204f74b5c004800000001000001a1e2586006000001a1e2585c0fffffffffffffffffffffffff"
    "ffff000000021000ed0f00026101001200ed0f020262027800"
)


@dataclass(frozen=True)
class Case:
    """Bytes, and what Kafka says is in them."""

    name: str
    data: bytes
    batches: list[dict[str, Any]]

    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in records_of(batch)]


def _bytes(content: str | dict[str, Any] | None) -> bytes | None:
    if isinstance(content, dict):
        part, times = content["repeat"]
        return base64.b64decode(part) * int(times)
    return None if content is None else base64.b64decode(content)


def records_of(batch: dict[str, Any]) -> list[Record]:
    kind = TimestampType.LOG_APPEND_TIME if batch["timestamp_type"] == "LogAppendTime" else TimestampType.CREATE_TIME
    return [
        Record(
            _bytes(key),
            _bytes(value),
            timestamp,
            tuple((name, _bytes(content)) for name, content in headers),
            offset,
            kind,
        )
        for offset, timestamp, key, value, headers in batch["records"]
    ]


def cases() -> list[Case]:
    path = Path(__file__).resolve().parents[2] / "vectors" / "batches_v2.json"
    content = json.loads(path.read_text())
    return [Case(case["name"], bytes.fromhex(case["hex"]), case["batches"]) for case in content["cases"]]
