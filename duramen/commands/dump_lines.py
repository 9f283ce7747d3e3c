"""Kafka's log files as lines, one mapping each: what `duramen dump` writes as JSON, and draws its text from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logstore.files import File
    from logstore.records.header import BatchHeader
    from logstore.records.record import Record

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dumper:
    """Turns files into lines; damage is a line of its own, never an exception."""

    #: records too, not only batches
    deep: bool
    #: how keys and values are shown; None: they are not
    keys: Callable[[bytes], str] | None
    values: Callable[[bytes], str] | None
    #: the entries of indexes
    entries: bool
    #: indexes are compared with their log
    against_log: bool
    max_batch_bytes: int
    #: of a .log, from its beginning
    max_bytes: int | None

    def lines(self, path: str) -> Iterator[Line]:
        from logstore.errors import DuramenError
        from logstore.partition.quarantine import parse_region_name
        from logstore.segment.names import FileKind, parse_file_name

        numbered = parse_file_name(os.path.basename(path))
        yield {"kind": "file", "file": path}
        if numbered is None:
            if parse_region_name(os.path.basename(path)):
                yield from self._region(path)
            else:
                yield _finding("not named like a file of a log", path)
            return
        base = numbered.base_offset
        readers: dict[FileKind, Callable[[str, int], Iterator[Line]]] = {
            FileKind.LOG: self._log,
            FileKind.INDEX: self._offset_index,
            FileKind.TIME_INDEX: self._time_index,
            FileKind.TXN_INDEX: self._txn_index,
            FileKind.SNAPSHOT: self._snapshot,
        }
        try:
            yield from readers[numbered.kind](path, base)
        except DuramenError as error:
            yield _finding(error.what, error.file or path, error.position, error.offset)

    # --- .log --------------------------------------------------------------------------------------------------------

    def _log(self, path: str, base_offset: int) -> Iterator[Line]:
        from logstore.errors import CorruptBatch
        from logstore.files import OS_FILES

        yield {"kind": "log", "file": path, "starting_offset": base_offset}
        file = OS_FILES.open(path)
        try:
            size = file.size()
            end = size if self.max_bytes is None else min(size, self.max_bytes)
            position, next_offset = 0, base_offset
            for header in _headers(file, end):
                data = None
                if header.size_bytes <= self.max_batch_bytes:
                    data = file.pread(header.size_bytes, header.position)
                else:
                    yield _finding(
                        f"a batch of {header.size_bytes} bytes, above --max-message-size {self.max_batch_bytes}",
                        path,
                        header.position,
                        header.last_offset,
                    )
                valid = data is not None and _checksum_holds(header, data)
                yield _batch(header, valid)
                if data is not None and not valid:
                    yield _finding("the checksum does not match", path, header.position, header.last_offset)
                first = header.last_offset if header.base_offset is None else header.base_offset
                if first < next_offset:
                    yield _finding(f"offset {first} where at least {next_offset} belongs", path, header.position, first)
                if self.deep and valid and data is not None:
                    yield from self._records(header, data, path)
                position, next_offset = header.end_position, header.next_offset
            if position < end and self.max_bytes is None:
                raise CorruptBatch(f"{end - position} bytes after the last whole batch", file=path, position=position)
        finally:
            file.close()

    def _region(self, path: str) -> Iterator[Line]:
        """Bytes that recovery took out of a log: the intact batches among them, and what is between."""
        from logstore.files import OS_FILES
        from logstore.limits import INT64_MAX
        from logstore.partition.quarantine import parse_region_name
        from logstore.segment.resync import Effort, intact_at, next_intact

        parsed = parse_region_name(os.path.basename(path))
        assert parsed is not None
        yield {"kind": "region", "file": path, "origin": parsed[0], "position": parsed[1]}
        file = OS_FILES.open(path)
        try:
            position, size = 0, file.size()
            effort = Effort.for_file(size)
            while position < size:
                header = intact_at(file, position, size) or next_intact(
                    file, position, size, low=0, high=INT64_MAX, effort=effort
                )
                end = size if header is None else header.position
                if end > position:
                    yield _finding(f"no intact batch in {end - position} bytes", path, position)
                if header is None:
                    return
                yield _batch(header, True)
                if self.deep and header.size_bytes <= self.max_batch_bytes:
                    yield from self._records(header, file.pread(header.size_bytes, header.position), path)
                position = header.end_position
        finally:
            file.close()

    def _records(self, header: BatchHeader, data: bytes, path: str) -> Iterator[Line]:
        from logstore.errors import DuramenError
        from logstore.limits import Limits
        from logstore.records.control import ControlType, parse_control_record
        from logstore.records.iterate import iter_records

        try:
            for number, record in enumerate(iter_records(data, limits=Limits(), verify_crc=False, control=True)):
                line = self._record(header, number, record)
                if header.control:
                    control = parse_control_record(record)
                    line["control"] = control.kind.name
                    if control.kind in (ControlType.ABORT, ControlType.COMMIT):
                        line["coordinator_epoch"] = control.coordinator_epoch
                yield line
        except DuramenError as error:
            yield _finding(error.what, path, header.position, header.last_offset)

    def _record(self, header: BatchHeader, number: int, record: Record) -> Line:
        sequence = -1 if header.base_sequence < 0 else (header.base_sequence + number) & 0x7FFFFFFF
        line: Line = {
            "kind": "record",
            "offset": record.offset,
            "timestamp_type": str(record.timestamp_type),
            "timestamp": record.timestamp_ms,
            "key_size": -1 if record.key is None else len(record.key),
            "value_size": -1 if record.value is None else len(record.value),
            "sequence": sequence,
            "header_keys": [name for name, _ in record.headers],
        }
        if self.keys is not None and self.values is not None and not header.control:
            line["key"] = None if record.key is None else self.keys(record.key)
            line["value"] = None if record.value is None else self.values(record.value)
        return line

    # --- indexes -----------------------------------------------------------------------------------------------------

    def _offset_index(self, path: str, base_offset: int) -> Iterator[Line]:
        from logstore.files import OS_FILES
        from logstore.segment.offset_index import OffsetIndex

        log_path = _log_of(path, base_offset)
        index = OffsetIndex(OS_FILES, path, base_offset, OS_FILES.stat(path).size_bytes)
        log = OS_FILES.open(log_path) if os.path.exists(log_path) else None
        try:
            index.sanity_check(log.size() if log else 1 << 31)
            for item in index.items():
                if self.entries:
                    yield {"kind": "offset_index_entry", "offset": item.offset, "position": item.position}
                if self.against_log and log is not None:
                    yield from self._offset_entry_against_log(log, path, item.offset, item.position)
        finally:
            index.close()
            if log is not None:
                log.close()
        yield {"kind": "passed", "file": path}

    def _offset_entry_against_log(self, log: File, path: str, offset: int, position: int) -> Iterator[Line]:
        from logstore.errors import CorruptBatch
        from logstore.records.header import read_header

        try:
            header = read_header(log, position, log.size())
        except CorruptBatch:
            header = None
        if header is None or header.last_offset != offset:
            found = "no batch" if header is None else f"a batch that ends at {header.last_offset}"
            yield _finding(f"entry ({offset}, {position}) leads to {found}", path, offset=offset)

    def _time_index(self, path: str, base_offset: int) -> Iterator[Line]:
        from logstore.files import OS_FILES
        from logstore.segment.time_index import TimeIndex

        log_path = _log_of(path, base_offset)
        index = TimeIndex(OS_FILES, path, base_offset, OS_FILES.stat(path).size_bytes)
        try:
            index.sanity_check()
            items = index.items()
        finally:
            index.close()
        newest = _largest_timestamps(log_path, {item.offset for item in items}) if self.against_log else {}
        for item in items:
            if self.entries:
                yield {"kind": "time_index_entry", "timestamp": item.timestamp_ms, "offset": item.offset}
            if newest is not None and self.against_log and newest.get(item.offset) != item.timestamp_ms:
                found = newest.get(item.offset)
                what = "no batch ends there" if found is None else f"the batch's largest timestamp is {found}"
                yield _finding(f"entry ({item.timestamp_ms}, {item.offset}): {what}", path, offset=item.offset)
        yield {"kind": "passed", "file": path}

    def _txn_index(self, path: str, base_offset: int) -> Iterator[Line]:
        from logstore.files import OS_FILES
        from logstore.segment.txn_index import TxnIndex

        index = TxnIndex(OS_FILES, path, base_offset, writable=False)
        index.sanity_check()
        for aborted in index.entries():
            if self.entries:
                yield {
                    "kind": "aborted_transaction",
                    "producer_id": aborted.producer_id,
                    "first_offset": aborted.first_offset,
                    "last_offset": aborted.last_offset,
                    "last_stable_offset": aborted.last_stable_offset,
                }
        yield {"kind": "passed", "file": path}

    def _snapshot(self, path: str, base_offset: int) -> Iterator[Line]:
        from logstore.files import OS_FILES
        from logstore.partition.snapshot import read_snapshot

        for entry in read_snapshot(OS_FILES, path):
            yield {
                "kind": "producer",
                "producer_id": entry.producer_id,
                "producer_epoch": entry.producer_epoch,
                "last_sequence": entry.last_sequence,
                "last_offset": entry.last_offset,
                "offset_delta": entry.offset_delta,
                "last_timestamp": entry.timestamp_ms,
                "coordinator_epoch": entry.coordinator_epoch,
                "current_transaction_first_offset": entry.current_txn_first_offset,
            }
        yield {"kind": "passed", "file": path}


def _log_of(path: str, base_offset: int) -> str:
    """The log that an index belongs to; that of a deleted one is deleted, too, and another may have its name."""
    from logstore.segment.names import FileKind, file_name, parse_file_name

    numbered = parse_file_name(os.path.basename(path))
    assert numbered is not None
    return os.path.join(os.path.dirname(path), file_name(base_offset, FileKind.LOG, numbered.transient))


def _headers(file: File, end: int) -> Iterator[BatchHeader]:
    from logstore.records.header import read_header

    position = 0
    while (header := read_header(file, position, end)) is not None:
        yield header
        position = header.end_position


def _checksum_holds(header: BatchHeader, data: bytes) -> bool:
    if header.magic == 2:
        from crc32c import crc32c

        return crc32c(memoryview(data)[21:]) == header.crc
    import zlib

    return zlib.crc32(memoryview(data)[16:]) == header.crc


def _largest_timestamps(log_path: str, offsets: set[int]) -> dict[int, int] | None:
    """Largest timestamp of each batch that ends at one of the offsets; None when there is no log to ask."""
    from logstore.errors import CorruptBatch
    from logstore.files import OS_FILES

    if not os.path.exists(log_path):
        return None
    found = {}
    file = OS_FILES.open(log_path)
    try:
        for header in _headers(file, file.size()):
            if header.last_offset in offsets:
                found[header.last_offset] = header.max_timestamp_ms
    except CorruptBatch:
        pass  # the dump of the .log reports it; entries beyond lead nowhere
    finally:
        file.close()
    return found


def _finding(what: str, file: str, position: int | None = None, offset: int | None = None) -> Line:
    return {"kind": "finding", "what": what, "file": file, "position": position, "offset": offset}


def _batch(header: BatchHeader, valid: bool) -> Line:
    from logstore.records.compression import CODECS

    known = header.codec_id < len(CODECS)
    return {
        "kind": "batch",
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.count,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "partition_leader_epoch": header.leader_epoch,
        "is_transactional": header.transactional,
        "is_control": header.control,
        "delete_horizon": header.delete_horizon_ms,
        "position": header.position,
        "timestamp_type": str(header.timestamp_type),
        "max_timestamp": header.max_timestamp_ms,
        "size": header.size_bytes,
        "magic": header.magic,
        "codec": CODECS[header.codec_id].name if known else str(header.codec_id),
        "crc": header.crc,
        "is_valid": valid,
    }
