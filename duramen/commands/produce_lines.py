"""Lines of a file as records: JSON objects, or a key and a value with a separator between them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from duramen.commands.options import Encoding
from duramen.session import bad_usage, key_values

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_COMMIT = 100_000
_FIELDS = {"key", "value", "timestamp", "headers", "partition", "offset", "topic"}
_LINE_BYTES_MAX = 64 << 20
_PROPERTIES = ("parse.key", "key.separator", "null.marker")


@dataclass(frozen=True, slots=True)
class Row:
    #: of the file, counted from 1
    line: int
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyValueLines:
    """Lines that are a key, the separator, and a value, which may have the separator in it."""

    separator: bytes
    null_marker: bytes | None

    def columns(self, line: bytes, encoding: Encoding) -> dict[str, Any]:
        """Raises ValueError."""
        key, separator, value = line.rstrip(b"\n").removesuffix(b"\r").partition(self.separator)
        if not separator:
            raise ValueError(f"there is no {self.separator.decode(errors='replace')!r} between a key and a value")
        if encoding is Encoding.BASE64:
            key = base64.b64decode(key, validate=True)
        is_null = value == self.null_marker
        if encoding is Encoding.BASE64 and not is_null:
            value = base64.b64decode(value, validate=True)
        columns: dict[str, Any] = dict.fromkeys(("timestamp", "partition"))
        return columns | {"key": key, "value": None if is_null else value, "headers": []}


def key_value_lines(
    separator: str | None, null_marker: str | None, properties: list[str] | None
) -> KeyValueLines | None:
    """None where lines are JSON. Raises BadUsage."""
    given = key_values(properties, "--property")
    for name in given:
        if name not in _PROPERTIES:
            raise bad_usage(f"--property {name} has no meaning here; there are {', '.join(_PROPERTIES)}")
    if given and given.get("parse.key", "").lower() != "true":
        raise bad_usage("--property needs parse.key=true: a record here has a key. Records without one are JSON lines")
    if given:
        separator = given.get("key.separator", "\t") if separator is None else separator
        null_marker = given.get("null.marker") if null_marker is None else null_marker
    if separator is None:
        if null_marker is not None:
            raise bad_usage("--null-marker needs --key-separator; in JSON, null is null")
        return None
    separator = separator.replace("\\t", "\t")
    if not separator:
        raise bad_usage("--key-separator is empty")
    return KeyValueLines(separator.encode(), None if null_marker is None else null_marker.encode())


class LineReader:
    """The lines of a file, with their numbers and a digest of all that were read."""

    def __init__(self, lines: IO[bytes], file: str, encoding: Encoding, pairs: KeyValueLines | None = None) -> None:
        self._lines = lines
        self._file = file
        self._encoding = encoding
        self._pairs = pairs
        #: the last line that was read
        self.number = 0
        #: of the lines that were read
        self.size_bytes = 0
        self.digest = hashlib.sha256()

    def skip(self, count: int) -> None:
        """Read up to `count` lines and do nothing with them."""
        while self.number < count and self._next():
            pass

    def chunks(self) -> Iterator[list[Row]]:
        rows: list[Row] = []
        while line := self._next():
            if line.strip():
                rows.append(Row(self.number, self._columns(line)))
            if len(rows) == ROWS_PER_COMMIT:
                yield rows
                rows = []
        if rows:
            yield rows

    def _columns(self, line: bytes) -> dict[str, Any]:
        if self._pairs is None:
            return _row(line, self.number, self._encoding, self._file)
        try:
            return self._pairs.columns(line, self._encoding)
        except ValueError as error:
            where: dict[str, object] = {"file": self._file, "line": self.number}
            raise bad_usage(f"line {self.number}: {_reason_of(error)}", where=where) from None

    def _next(self) -> bytes:
        line = self._lines.readline(_LINE_BYTES_MAX + 1)
        if len(line) > _LINE_BYTES_MAX:
            raise bad_usage(f"line {self.number + 1} is longer than {_LINE_BYTES_MAX} bytes")
        if line:
            self.number += 1
            self.size_bytes += len(line)
            # A last line without its end reads the same once more lines were added.
            self.digest.update(line if line.endswith(b"\n") else line + b"\n")
        return line


def _row(line: bytes, number: int, encoding: Encoding, file: str) -> dict[str, Any]:
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
            if not -(1 << 31) <= (given.get("partition") or 0) < 1 << 31:
                raise ValueError("there is no such partition")
            if not -(1 << 63) <= (given.get("timestamp") or 0) < 1 << 63:
                raise ValueError("timestamp is not in milliseconds")
        return {
            "key": _bytes(given.get("key"), encoding),
            "value": _bytes(given["value"], encoding),
            "timestamp": given.get("timestamp"),
            "partition": given.get("partition"),
            "headers": _headers(given.get("headers"), encoding),
        }
    except (ValueError, TypeError, binascii.Error) as error:
        raise bad_usage(f"line {number}: {_reason_of(error)}", where={"file": file, "line": number}) from None


def _headers(given: object, encoding: Encoding) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(each, list) and len(each) == 2 for each in given):
        raise ValueError('headers are a list of pairs: [["name", "value"], …]')
    return [{"key": str(name), "value": _bytes(value, encoding)} for name, value in given]


def _reason_of(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not a JSON object ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, binascii.Error):
        return "a key or value is not base64; --encoding utf8 takes text as it is"
    return str(error)


def _bytes(value: object, encoding: Encoding) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):  # numbers, objects: as JSON writes them
        value = json.dumps(value, ensure_ascii=False)
    return base64.b64decode(value, validate=True) if encoding is Encoding.BASE64 else value.encode()


def table_of(rows: list[Row]) -> pa.Table:
    import pyarrow as pa

    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    kinds = {
        "key": pa.binary(),
        "value": pa.binary(),
        "timestamp": pa.int64(),
        "partition": pa.int32(),
        "headers": headers,
    }
    return pa.table({name: pa.array([row.columns[name] for row in rows], kind) for name, kind in kinds.items()})
