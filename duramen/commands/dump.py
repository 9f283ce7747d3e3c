"""`duramen dump`: the contents of Kafka's log files, with the flags and the wording of Kafka's own dump tool."""

from __future__ import annotations

import base64
import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from duramen.commands.dump_lines import Dumper, Line
from duramen.session import DAMAGE, bad_usage, print_json, session, stop
from duramen.terminal import SafeStream, raw

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
    dumper = Dumper(
        deep=deep_iteration or print_data_log,
        keys=_DECODERS[key_decoder] if print_data_log else None,
        values=_DECODERS[value_decoder] if print_data_log else None,
        entries=not (index_sanity_check or verify_index_only),
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
                write(_text(line, metadata=not skip_record_metadata) + "\n")
    if damaged:
        stop(DAMAGE)


def _expanded(given: list[str]) -> list[str]:
    """Files as given; of a folder, those that belong to a log."""
    paths: list[str] = []
    for path in given:
        if os.path.isdir(path):
            paths += [os.path.join(path, name) for name in sorted(os.listdir(path)) if _is_of_a_log(name)]
        elif path:
            paths.append(path)
    return paths


def _check_names(paths: list[str]) -> None:
    """Raises for a file that is missing, or cannot be one of a log: that is a slip, not damage."""
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not _is_of_a_log(os.path.basename(path)):
            raise bad_usage(
                f"{path} is not a file of a log: those have names such as 00000000000000000000.log. To see the records "
                "of a topic, use `duramen consume`"
            )


def _is_of_a_log(name: str) -> bool:
    from logstore.partition.quarantine import parse_region_name
    from logstore.segment.names import parse_file_name

    return bool(parse_file_name(name) or parse_region_name(name))


def _number(size: int) -> Callable[[bytes], str]:
    def decode(data: bytes) -> str:
        if len(data) != size:
            return f"0x{data.hex()} (not {size} bytes)"
        return str(int.from_bytes(data, "big", signed=True))

    return decode


_DECODERS: dict[str, Callable[[bytes], str]] = {
    "string": lambda data: data.decode("utf-8", "replace"),
    "base64": lambda data: base64.b64encode(data).decode("ascii"),
    "hex": bytes.hex,
    "integer": _number(4),
    "long": _number(8),
}


def _text(line: Line, *, metadata: bool) -> str:
    """The line in the words of Kafka's tool; without `metadata`, records are keys and values only."""
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
        return _record_text(line, metadata)
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
