"""Small logs for tests: records and batches in few words, a log on any file system, what lies in its directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from logstore.clock import Clock, ManualClock
from logstore.config import LogConfig
from logstore.files import FileSystem
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter

PARTITION = TopicPartition("orders", 0)
NOW_MS = 1_700_000_000_000
#: where a log lies on a simulated file system
DIRECTORY = "/data/orders-0"
SEGMENT_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex")


def state_path(directory: str) -> str:
    return os.path.join(os.path.dirname(directory), "state", "orders-0")


def open_log(
    fs: FileSystem,
    directory: str = DIRECTORY,
    config: LogConfig = LogConfig(),  # noqa: B008 (frozen)
    *,
    clean: bool = True,
    clock: Clock | None = None,
    background_flush: bool = False,
    **options: object,
) -> PartitionWriter:
    """A log of the partition `orders-0` with a state file beside it; the clock stands at NOW_MS unless given.

    Indexes are preallocated to 64 KiB at most: at their usual size they would be most of a simulated disk.
    """
    config = replace(config, segment_index_bytes=min(config.segment_index_bytes, 1 << 16))
    return PartitionWriter.open(
        str(directory),
        partition=PARTITION,
        config=config,
        clean=clean,
        clock=clock or ManualClock(NOW_MS),
        fs=fs,
        state_path=state_path(str(directory)),
        background_flush=background_flush,
        **options,  # type: ignore[arg-type]
    )


def rec(
    value: bytes | str | None = b"v", key: bytes | str | None = b"k", at_ms: int = NOW_MS, offset: int = -1
) -> Record:
    return Record(
        key.encode() if isinstance(key, str) else key,
        value.encode() if isinstance(value, str) else value,
        at_ms,
        (),
        offset,
    )


def recs(count: int, *, first: int = 0, at_ms: int = NOW_MS, step_ms: int = 1, value_bytes: int = 10) -> list[Record]:
    """Records whose keys and values tell where they belong; `offset` is what a log would give from `first` on."""
    return [
        rec(f"v{n}".encode().ljust(value_bytes, b"."), f"k{n}", at_ms + (n - first) * step_ms, n)
        for n in range(first, first + count)
    ]


def batch(records: Iterable[Record], **options: object) -> bytes:
    """One batch as a client sends it; `options` are those of BatchOptions."""
    return encode_batch(columns_of(records), BatchOptions(**options))  # type: ignore[arg-type]


def sized_batch(
    size_bytes: int, *, count: int = 1, at_ms: int = NOW_MS, base_offset: int = 0, **options: object
) -> bytes:
    """A batch of exactly `size_bytes`, its records all at `at_ms`."""
    padding = max(size_bytes - 61 - 10 * count, 0)
    while True:
        records = [rec(b"", None, at_ms)] * (count - 1) + [rec(b"x" * padding, None, at_ms)]
        made = batch(records, base_offset=base_offset, **options)
        if len(made) == size_bytes:
            return made
        if len(made) > size_bytes + 16 or padding > size_bytes:
            raise ValueError(f"no batch of {count} records has {size_bytes} bytes")
        padding += 1 if len(made) < size_bytes else -1


def contents(log: PartitionWriter, offset: int | None = None) -> list[tuple[int, bytes | None, bytes | None, int]]:
    """Everything up to the log's end, as (offset, key, value, timestamp)."""
    return [as_tuple(record) for record in log.records(offset, isolation=Isolation.LOG_END)]


def as_tuple(record: Record, offset: int | None = None) -> tuple[int, bytes | None, bytes | None, int]:
    return (record.offset if offset is None else offset, record.key, record.value, record.timestamp_ms)


def expected(records: Sequence[Record], first: int = 0) -> list[tuple[int, bytes | None, bytes | None, int]]:
    """The same of records appended one after the other from offset `first` on."""
    return [as_tuple(record, first + n) for n, record in enumerate(records)]


def bases(log: PartitionWriter) -> list[int]:
    return [segment.base_offset for segment in log.segments]


def directory_bytes(fs: FileSystem, directory: str = DIRECTORY) -> dict[str, bytes]:
    """Every plain file of the directory."""
    found = {}
    for name in fs.listdir(directory):
        path = os.path.join(directory, name)
        try:
            file = fs.open(path)
        except IsADirectoryError:
            continue
        try:
            found[name] = file.pread(file.size(), 0)
        except IsADirectoryError:
            continue
        finally:
            file.close()
    return found
