"""Metadata logs (`__cluster_metadata-0`) made for tests: the messages a controller writes, and the log around them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

from logstore.config import LogConfig
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.partition_writer import PartitionWriter


def uvarint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def string(text: str | None) -> bytes:
    return b"\0" if text is None else uvarint(len(text.encode()) + 1) + text.encode()


def message(key: int, *parts: bytes, version: int = 0, frame: int = 1) -> bytes:
    return uvarint(frame) + uvarint(key) + uvarint(version) + b"".join(parts) + b"\0"


def topic(name: str, topic_id: uuid.UUID) -> bytes:
    return message(2, string(name), topic_id.bytes)


def partition(number: int, topic_id: uuid.UUID) -> bytes:
    return message(3, number.to_bytes(4, "big"), topic_id.bytes, b"\x02\0\0\0\x01", version=2)


def config(kind: int, resource: str, name: str, value: str | None) -> bytes:
    return message(4, bytes([kind]), string(resource), string(name), string(value))


def remove(topic_id: uuid.UUID) -> bytes:
    return message(9, topic_id.bytes)


BEGIN, END, ABORT = message(23), message(24), message(25)


def write_log(directory: Path, messages: Iterable[bytes], *, snapshot_at: int | None = None) -> None:
    """As a controller writes it; with `snapshot_at`, its first records are summed up in a snapshot of that offset."""
    messages = list(messages)
    if snapshot_at is not None:
        write_log(directory.with_name("snapshot-0"), messages[:snapshot_at])
        (source,) = directory.with_name("snapshot-0").glob("*.log")
        directory.mkdir(parents=True, exist_ok=True)
        source.rename(directory / f"{snapshot_at:020}-0000000001.checkpoint")
        messages = [message(20)] * snapshot_at + messages[snapshot_at:]
    log = PartitionWriter.open(
        str(directory), partition=TopicPartition("__cluster_metadata", 0), config=LogConfig(), clean=False
    )
    for each in messages:
        log.append([Record(None, each, 1_700_000_000_000)])
    log.close()
