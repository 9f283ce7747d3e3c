"""A record as plain Python sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

#: "no timestamp"
NO_TIMESTAMP = -1


class TimestampType(IntEnum):
    CREATE_TIME = 0
    LOG_APPEND_TIME = 1

    def __str__(self) -> str:
        return "CreateTime" if self is TimestampType.CREATE_TIME else "LogAppendTime"


@dataclass(frozen=True, slots=True)
class Record:
    """One record: a key and its value, None for a tombstone.

    `offset` is absolute; -1 while it has not been appended yet.

        Record(b"42", b"ordered", headers=(("source", b"shop"),))
    """

    key: bytes | None
    value: bytes | None
    timestamp_ms: int = NO_TIMESTAMP
    headers: tuple[tuple[str, bytes | None], ...] = ()
    offset: int = -1
    timestamp_type: TimestampType = TimestampType.CREATE_TIME
