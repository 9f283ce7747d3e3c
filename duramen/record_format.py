"""How `consume` writes a record that is not JSON: kcat's format strings, and what Kafka's console consumer prints."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from duramen.session import bad_usage

if TYPE_CHECKING:
    from logstore.records.record import Record

#: topic, partition and record to bytes
Piece = Callable[[str, int, "Record"], bytes]
Encode = Callable[[bytes], bytes]

FIELDS = "%t topic, %p partition, %o offset, %k key, %s value, %T timestamp, %h headers, %K and %S lengths"
_PIECE = re.compile(r"%(.)|\\x([0-9A-Fa-f]{2})|\\(.)|([^%\\]+)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_KAFKA_NULL = "null"


def format_pieces(text: str, encode: Encode) -> list[Piece]:
    """The pieces of a format string. Raises BadUsage."""
    if text.isalpha():  # meant as the name of a format
        raise bad_usage(
            f"--format {text!r} shows nothing of a record; there are {FIELDS}. Without it, records are JSON"
        )
    fields = _fields(encode)
    pieces: list[Piece] = []
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            raise bad_usage(f"--format ends in {text[at:]!r}; write %% or \\\\ for the sign itself")
        at = found.end()
        name, code, escape, plain = found.groups()
        if name and name != "%":
            if name not in fields:
                raise bad_usage(f"--format has %{name}; there are {FIELDS}")
            pieces.append(fields[name])
        elif escape and escape not in _ESCAPES:
            raise bad_usage(f"--format has \\{escape}; there are \\n, \\t, \\r, \\0, \\\\ and \\xNN")
        elif code:
            pieces.append(_literal(bytes([int(code, 16)])))
        elif escape:
            pieces.append(_literal(_ESCAPES[escape]))
        else:
            pieces.append(_literal(name.encode() if name else plain.encode("utf-8", "surrogateescape")))
    return pieces


def _fields(encode: Encode) -> dict[str, Piece]:
    """A null key, value or header is nothing; its length is -1."""
    return {
        "t": lambda topic, _number, _record: topic.encode(),
        "p": lambda _topic, number, _record: b"%d" % number,
        "o": lambda _topic, _number, record: b"%d" % record.offset,
        "k": lambda _topic, _number, record: b"" if record.key is None else encode(record.key),
        "s": lambda _topic, _number, record: b"" if record.value is None else encode(record.value),
        "T": lambda _topic, _number, record: b"%d" % record.timestamp_ms,
        "h": lambda _topic, _number, record: b",".join(
            name.encode() + b"=" + (b"" if value is None else encode(value)) for name, value in record.headers
        ),
        "K": lambda _topic, _number, record: b"%d" % (-1 if record.key is None else len(record.key)),
        "S": lambda _topic, _number, record: b"%d" % (-1 if record.value is None else len(record.value)),
    }


def _literal(data: bytes) -> Piece:
    return lambda _topic, _number, _record: data


def kafka_pieces(properties: Mapping[str, str], encode: Encode) -> list[Piece]:
    """What Kafka's console consumer prints with these properties. Raises BadUsage."""
    null = properties.get("null.literal", _KAFKA_NULL).encode()
    separator = _literal(_unescaped(properties.get("key.separator", "\t")))

    def shown(data: bytes | None) -> bytes:
        return null if data is None else encode(data)

    parts: dict[str, Piece] = {
        "print.timestamp": lambda _topic, _number, record: (
            b"NO_TIMESTAMP"
            if record.timestamp_ms < 0
            else b"%s:%d" % (str(record.timestamp_type).encode(), record.timestamp_ms)
        ),
        "print.partition": lambda _topic, number, _record: b"Partition:%d" % number,
        "print.offset": lambda _topic, _number, record: b"Offset:%d" % record.offset,
        "print.headers": lambda _topic, _number, record: (
            b",".join(name.encode() + b":" + shown(value) for name, value in record.headers) or b"NO_HEADERS"
        ),
        "print.key": lambda _topic, _number, record: shown(record.key),
        "print.value": lambda _topic, _number, record: shown(record.value),
    }
    known = {*parts, "key.separator", "line.separator", "null.literal"}
    for name in properties:
        if name not in known:
            raise bad_usage(f"--property {name} has no meaning here; there are {', '.join(sorted(known))}")
    pieces: list[Piece] = []
    for name, piece in parts.items():
        if properties.get(name, "true" if name == "print.value" else "false").lower() == "true":
            pieces += [separator, piece] if pieces else [piece]
    return [*pieces, _literal(_unescaped(properties.get("line.separator", "\n")))]


def _unescaped(text: str) -> bytes:
    """As shells leave it: `\\t` typed in quotes means a tab."""
    return re.sub(r"\\([ntr0\\])", lambda found: _ESCAPES[found[1]].decode(), text).encode()


def encoder(*, is_base64: bool) -> Encode:
    return base64.b64encode if is_base64 else bytes
