"""Control records: the key says which kind, the value of a transaction marker carries the coordinator's epoch.

key:   version:2 = 0, type:2          value of an end-transaction marker: version:2 = 0, coordinatorEpoch:4
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from logstore.errors import CorruptBatch
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record

_KEY = struct.Struct(">hh")
_MARKER = struct.Struct(">hi")


class ControlType(IntEnum):
    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6
    UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class ControlRecord:
    kind: ControlType
    coordinator_epoch: int = -1


def parse_control_record(record: Record) -> ControlRecord:
    """What a control record says. Types from the future are UNKNOWN; raises CorruptBatch for a malformed one."""
    key = record.key
    if key is None or len(key) < _KEY.size:
        raise CorruptBatch("a control record without a whole key", offset=record.offset)
    version, number = _KEY.unpack_from(key)
    if version < 0:
        raise CorruptBatch(f"a control record of version {version}", offset=record.offset)
    kind = ControlType(number) if 0 <= number <= ControlType.KRAFT_VOTERS else ControlType.UNKNOWN
    if kind not in (ControlType.ABORT, ControlType.COMMIT):
        return ControlRecord(kind)
    value = record.value
    if value is None or len(value) < _MARKER.size:
        raise CorruptBatch("a transaction marker without a whole value", offset=record.offset)
    version, coordinator_epoch = _MARKER.unpack_from(value)  # later versions only add fields at the end
    if version < 0:
        raise CorruptBatch(f"a transaction marker of version {version}", offset=record.offset)
    return ControlRecord(kind, coordinator_epoch)


def encode_marker(
    *,
    commit: bool,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    timestamp_ms: int,
    leader_epoch: int = -1,
) -> bytes:
    """A COMMIT or ABORT marker as a batch of its own, at base offset 0."""
    key = _KEY.pack(0, ControlType.COMMIT if commit else ControlType.ABORT)
    record = Record(key, _MARKER.pack(0, coordinator_epoch), timestamp_ms)
    options = BatchOptions(
        transactional=True,
        control=True,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        leader_epoch=leader_epoch,
    )
    return encode_batch(columns_of([record]), options)
