"""`duramen dump`: the contents of Kafka's log files, with the flags and the wording of Kafka's own dump tool."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.session import DAMAGE, bad_usage, print_json, session, stop
from duramen.terminal import SafeStream, raw

if TYPE_CHECKING:
    from logstore.files import File
    from logstore.records.header import BatchHeader
    from logstore.records.record import Record

Line = dict[str, Any]

_MAX_MESSAGE_BYTES = 5 * 1024 * 1024


def dump(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...",
            help=".log, .index, .timeindex, .txnindex or .snapshot files, regions of a quarantine, or folders.",
            show_default=False,
        ),
    ] = None,
    files_option: Annotated[
        str | None,
        typer.Option("--files", metavar="FILE,FILE", help="The same, separated by commas.", show_default=False),
    ] = None,
    deep_iteration: Annotated[bool, typer.Option("--deep-iteration", help="Show records, not only batches.")] = False,
    print_data_log: Annotated[
        bool, typer.Option("--print-data-log", help="Show keys and values too; implies --deep-iteration.")
    ] = False,
    index_sanity_check: Annotated[
        bool, typer.Option("--index-sanity-check", help="Only check that indexes are in order; print no entries.")
    ] = False,
    verify_index_only: Annotated[
        bool, typer.Option("--verify-index-only", help="Only check index entries against their log; print no entries.")
    ] = False,
    max_message_size: Annotated[
        int, typer.Option("--max-message-size", min=1, help="Largest batch that is opened, in bytes.")
    ] = _MAX_MESSAGE_BYTES,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", min=1, help="Stop a .log after this many bytes.", show_default=False)
    ] = None,
    skip_record_metadata: Annotated[
        bool, typer.Option("--skip-record-metadata", help="Of records, print keys and values only.")
    ] = False,
    key_decoder: Annotated[str, typer.Option("--key-decoder", help="string, base64, hex, integer or long.")] = "string",
    value_decoder: Annotated[
        str, typer.Option("--value-decoder", help="string, base64, hex, integer or long.")
    ] = "string",
) -> None:
    """Print the contents of log files and say what is wrong with them."""
    paths = _expanded([*(files or ()), *(files_option.split(",") if files_option else ())])
    if not paths:
        raise bad_usage("no file of a log was given, and the folders given hold none")
    _check_names(paths)
    for decoder in (key_decoder, value_decoder):
        if decoder not in _DECODERS:
            raise bad_usage(f"no decoder is called {decoder!r}; there are {', '.join(_DECODERS)}")
    shows_entries = not (index_sanity_check or verify_index_only)
    dumper = _Dumper(
        deep=deep_iteration or print_data_log,
        keys=_DECODERS[key_decoder] if print_data_log else None,
        values=_DECODERS[value_decoder] if print_data_log else None,
        metadata=not skip_record_metadata,
        entries=shows_entries,
        against_log=not index_sanity_check,
        max_batch_bytes=max_message_size,
        max_bytes=max_bytes,
    )
    # Into a file or a pipe goes what Kafka's tool would write; a terminal is spared the control characters in it.
    out = SafeStream(raw(sys.stdout))
    write = out.write if sys.stdout.isatty() else out.write_exactly
    damaged = 0
    for path in paths:
        for line in dumper.lines(path):
            damaged += line["kind"] == "finding"
            if session.json:
                print_json(line)
            else:
                write(_text(line, dumper) + "\n")
    if damaged:
        stop(DAMAGE)


def _check_names(paths: list[str]) -> None:
    """Raises for a file that is missing, or cannot be one of a log: that is a slip, not damage."""
    from logstore.partition.quarantine import parse_region_name
    from logstore.segment.names import parse_file_name

    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        name = os.path.basename(path)
        if parse_file_name(name) is None and not parse_region_name(name):
            raise bad_usage(
                f"{path} is not a file of a log: those have names such as 00000000000000000000.log. To see the records "
                "of a topic, use `duramen consume`"
            )


def _expanded(given: list[str]) -> list[str]:
    """Files as given; of a folder, those that belong to a log."""
    from logstore.partition.quarantine import parse_region_name
    from logstore.segment.names import parse_file_name

    paths: list[str] = []
    for path in given:
        if os.path.isdir(path):
            names = sorted(os.listdir(path))
            paths += [os.path.join(path, name) for name in names if parse_file_name(name) or parse_region_name(name)]
        elif path:
            paths.append(path)
    return paths


def _string(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode("ascii")


def _number(size: int) -> Callable[[bytes], str]:
    def decode(data: bytes) -> str:
        if len(data) != size:
            return f"0x{data.hex()} (not {size} bytes)"
        return str(int.from_bytes(data, "big", signed=True))

    return decode


_DECODERS: dict[str, Callable[[bytes], str]] = {
    "string": _string,
    "base64": _base64,
    "hex": bytes.hex,
    "integer": _number(4),
    "long": _number(8),
}


class _Dumper:
    """Turns files into lines; damage is a line of its own, never an exception."""

    def __init__(
        self,
        *,
        deep: bool,
        keys: Callable[[bytes], str] | None,
        values: Callable[[bytes], str] | None,
        metadata: bool,
        entries: bool,
        against_log: bool,
        max_batch_bytes: int,
        max_bytes: int | None,
    ) -> None:
        self.deep = deep
        self.keys = keys
        self.values = values
        self.metadata = metadata
        self.entries = entries
        self.against_log = against_log
        self.max_batch_bytes = max_batch_bytes
        self.max_bytes = max_bytes

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
        pass  # the .log's own dump tells of it; entries beyond lead nowhere
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


def _text(line: Line, dumper: _Dumper) -> str:
    """The line in the words of Kafka's tool."""
    kind = line["kind"]
    if kind == "file":
        return f"Dumping {line['file']}"
    if kind == "log":
        return f"Log starting offset: {line['starting_offset']}"
    if kind == "region":
        return f"Region of {line['origin']} from position {line['position']} on"
    if kind == "passed":
        return f"{line['file']} passed sanity check."
    if kind == "finding":
        places = [f"{name} {line[name]}" for name in ("file", "position", "offset") if line[name] is not None]
        return f"DAMAGE: {line['what']} ({', '.join(places)})"
    if kind == "batch":
        return _batch_text(line)
    if kind == "record":
        return _record_text(line, dumper.metadata)
    if kind == "offset_index_entry":
        return f"offset: {line['offset']} position: {line['position']}"
    if kind == "time_index_entry":
        return f"timestamp: {line['timestamp']} offset: {line['offset']}"
    if kind == "aborted_transaction":
        return (
            f"version: 0 producerId: {line['producer_id']} firstOffset: {line['first_offset']} "
            f"lastOffset: {line['last_offset']} lastStableOffset: {line['last_stable_offset']}"
        )
    first = line["current_transaction_first_offset"]
    return (
        f"producerId: {line['producer_id']} producerEpoch: {line['producer_epoch']} "
        f"coordinatorEpoch: {line['coordinator_epoch']} currentTxnFirstOffset: {'None' if first < 0 else first} "
        f"lastTimestamp: {line['last_timestamp']} lastSequence: {line['last_sequence']} "
        f"lastOffset: {line['last_offset']} offsetDelta: {line['offset_delta']} timestamp: {line['last_timestamp']}"
    )


def _batch_text(line: Line) -> str:
    horizon = line["delete_horizon"]
    return (
        f"baseOffset: {'?' if line['base_offset'] is None else line['base_offset']} lastOffset: {line['last_offset']} "
        f"count: {'?' if line['count'] is None else line['count']} baseSequence: {line['base_sequence']} "
        f"lastSequence: {line['last_sequence']} producerId: {line['producer_id']} "
        f"producerEpoch: {line['producer_epoch']} partitionLeaderEpoch: {line['partition_leader_epoch']} "
        f"isTransactional: {_bool(line['is_transactional'])} isControl: {_bool(line['is_control'])} "
        f"deleteHorizonMs: {'OptionalLong.empty' if horizon is None else f'OptionalLong[{horizon}]'} "
        f"position: {line['position']} {line['timestamp_type']}: {line['max_timestamp']} size: {line['size']} "
        f"magic: {line['magic']} compresscodec: {line['codec']} crc: {line['crc']} isvalid: {_bool(line['is_valid'])}"
    )


def _record_text(line: Line, metadata: bool) -> str:
    parts = ["|"]
    if metadata:
        names = ",".join(line["header_keys"])
        parts.append(
            f"offset: {line['offset']} {line['timestamp_type']}: {line['timestamp']} keySize: {line['key_size']} "
            f"valueSize: {line['value_size']} sequence: {line['sequence']} headerKeys: [{names}]"
        )
    if "control" in line:
        if "coordinator_epoch" in line:
            parts.append(f"endTxnMarker: {line['control']} coordinatorEpoch: {line['coordinator_epoch']}")
        else:
            parts.append(f"controlType: {line['control']}")
    if "key" in line:
        parts.append(f"key: {'null' if line['key'] is None else line['key']}")
        parts.append(f"payload: {'null' if line['value'] is None else line['value']}")
    return " ".join(parts)


def _bool(value: bool) -> str:
    return "true" if value else "false"
