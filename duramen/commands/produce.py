"""`duramen produce` and `duramen get`: records in, and the latest value of one key out."""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.consume import Encoding
from duramen.session import bad_usage, print_pairs, session, stop, time_text

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_COMMIT = 100_000
_FIELDS = {"key", "value", "timestamp", "headers", "partition", "offset", "topic"}
_LINE_BYTES_MAX = 64 << 20
NOT_FOUND = 1


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    file: Annotated[str, typer.Argument(metavar="[FILE|-]", help="One JSON object a line; - is standard input.")] = "-",
    encoding: Annotated[Encoding, typer.Option("--encoding", help="How keys and values are written.")] = Encoding.UTF8,
    compression: Annotated[
        str, typer.Option("--compression", help="none, gzip, snappy, lz4 or zstd, where the topic leaves the choice.")
    ] = "none",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every line, append nothing.")] = False,
) -> None:
    """Append records, one JSON object a line: {"key", "value" or null, "timestamp"?, "headers"?, "partition"?}.

    Everything up to 100,000 lines is appended as one, all or none of it.
    """
    from logstore.store.committer import Committer
    from logstore.store.own_flush import OwnFlush
    from logstore.store.produce import append_table
    from logstore.store.staging import EncodeOptions

    with session.open() as store, _lines(file) as lines:
        store.topic(topic)
        committer = None if dry_run else Committer(store)
        own_flush = None if committer is None else OwnFlush(committer)
        records = size = 0
        ends: dict[int, int] = {}
        with session.progress(f"produce {topic}", None) as step:
            for table in _tables(lines, encoding):
                records += table.num_rows
                step(table.num_rows)
                if committer is None or own_flush is None:
                    continue
                done = append_table(committer, topic, table, options=EncodeOptions(compression_type=compression))
                own_flush.appended(done)  # not all of a large file has to lie in staging
                size += done.bytes
                ends = dict(enumerate(done.topics[topic].end_offsets))
        if committer is not None and ends:
            committer.flush(store.topic(topic))
    document: dict[str, Any] = {
        "topic": topic,
        "records": records,
        "bytes": size,
        "end_offsets": {str(number): end for number, end in ends.items()},
        "dry_run": dry_run,
    }
    verb = "would append" if dry_run else "appended"
    session.answer(document, lambda: print(f"{verb} {records} records to {topic} ({size} bytes)"))


def _lines(file: str) -> IO[bytes]:
    if file == "-":
        return open(sys.stdin.fileno(), "rb", closefd=False)
    return open(file, "rb")


def _tables(lines: IO[bytes], encoding: Encoding) -> Iterator[pa.Table]:
    rows: list[dict[str, Any]] = []
    number = 0
    while line := lines.readline(_LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > _LINE_BYTES_MAX:
            raise bad_usage(f"line {number} is longer than {_LINE_BYTES_MAX} bytes")
        if line.strip():
            rows.append(_row(line, number, encoding))
        if len(rows) == _ROWS_PER_COMMIT:
            yield _table(rows)
            rows = []
    if rows:
        yield _table(rows)


def _row(line: bytes, number: int, encoding: Encoding) -> dict[str, Any]:
    try:
        given = json.loads(line)
        if not isinstance(given, dict):
            raise ValueError("not a JSON object")
        foreign = sorted(set(given) - _FIELDS)
        if foreign:
            raise ValueError(f"{foreign[0]!r} is none of {', '.join(sorted(_FIELDS))}")
        if "value" not in given:
            raise ValueError("there is no value (null is a tombstone)")
        for name in ("timestamp", "partition"):
            if given.get(name) is not None and type(given[name]) is not int:
                raise ValueError(f"{name} is not a whole number")
        return {
            "key": _bytes(given.get("key"), encoding),
            "value": _bytes(given["value"], encoding),
            "timestamp": given.get("timestamp"),
            "partition": given.get("partition"),
            "headers": [
                {"key": str(name), "value": _bytes(value, encoding)} for name, value in given.get("headers") or []
            ],
        }
    except (ValueError, TypeError, binascii.Error) as error:
        raise bad_usage(f"line {number}: {error}") from None


def _bytes(value: object, encoding: Encoding) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):  # numbers, objects: as JSON writes them
        value = json.dumps(value, ensure_ascii=False)
    return base64.b64decode(value, validate=True) if encoding is Encoding.BASE64 else value.encode()


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    kinds = {
        "key": pa.binary(),
        "value": pa.binary(),
        "timestamp": pa.int64(),
        "partition": pa.int32(),
        "headers": headers,
    }
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()})


def get(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)],
    encoding: Annotated[Encoding, typer.Option("--encoding", help="How key and value are written.")] = Encoding.UTF8,
) -> None:
    """The latest value of one key, with its offset and time. Exit code 1 when the key has none."""
    from logstore.store.lookup import latest_of_key

    try:
        wanted = _bytes(key, encoding) or b""
    except binascii.Error as error:
        raise bad_usage(f"KEY is not base64: {error}") from None
    with session.open() as store:
        found = latest_of_key(store, store.topic(topic), wanted)
    if found is None or found.record.value is None:
        state = "was deleted" if found is not None else "has no value"
        session.answer(
            {"topic": topic, "key": key, "found": False}, lambda: print(f"{key} {state} in {topic}", file=sys.stderr)
        )
        stop(NOT_FOUND)
    record = found.record
    value = record.value
    assert value is not None
    shown = base64.b64encode(value).decode() if encoding is Encoding.BASE64 else value.decode("utf-8", "replace")
    document = {
        "topic": topic,
        "key": key,
        "found": True,
        "value": shown,
        "partition": found.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
    }
    session.answer(
        document,
        lambda: print_pairs(
            [
                ("value", shown),
                ("partition", found.partition),
                ("offset", record.offset),
                ("time", time_text(record.timestamp_ms)),
            ]
        ),
    )
