"""Bytes of a record made readable: text, JSON, hex, a long, Avro or Protobuf by a schema file. They are never trusted.

A value is cut behind a limit and its whole length is said. What does not fit the format asked for is shown as text or
hex, with the reason.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from logstore.errors import PackageMissing, UsageError

#: what is parsed at most, to say whether it is JSON, or to decode it by a schema
PARSED_BYTES_MAX = 1 << 20
_SCHEMA_BYTES_MAX = 16 << 20
_LONG_BYTES = 8
_WIRE_HEADER_BYTES = 5
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

Decode = Callable[[bytes], Any]


class Undecodable(ValueError):
    """The bytes are not what the format says."""


def shown(data: bytes | None, how: str, limit: int, decoders: Mapping[str, Decode]) -> dict[str, Any] | None:
    """The document of these bytes. `decoders` are those of the schemas given, by format."""
    if data is None:
        return None
    if how == "auto":
        for name in decoders:
            found = _by_schema(data, name, limit, decoders)
            if found is not None and found["error"] is None:
                return found
        return _auto(data, limit)
    if how in ("avro", "protobuf"):
        found = _by_schema(data, how, limit, decoders)
        if found is None:
            return _auto(data, limit) | {"error": f"no {how} schema was given: --schema TOPIC=FILE"}
        return found
    try:
        return _asked(data, how, limit)
    except Undecodable as error:
        return _auto(data, limit) | {"error": str(error)}


def _auto(data: bytes, limit: int) -> dict[str, Any]:
    for how in ("json", "text"):
        try:
            return _asked(data, how, limit, strict=True)
        except Undecodable:
            continue
    return _hex(data, limit)


def _asked(data: bytes, how: str, limit: int, *, strict: bool = False) -> dict[str, Any]:
    if how == "hex":
        return _hex(data, limit)
    if how == "long":
        if len(data) != _LONG_BYTES:
            raise Undecodable(f"a long has {_LONG_BYTES} bytes, not {len(data)}")
        return _document("long", str(int.from_bytes(data, "big", signed=True)), data, len(data))
    if how == "json":
        _check_json(data)
        return _text(data, limit, "json")
    found = _text(data, limit, "text")
    if strict and _NOT_TEXT.search(found["text"]):
        raise Undecodable("holds control characters")
    return found


def _check_json(data: bytes) -> None:
    if len(data) > PARSED_BYTES_MAX:
        raise Undecodable(f"larger than {PARSED_BYTES_MAX} bytes, so it was not parsed as JSON")
    if data[:1] not in (b"{", b"["):
        stripped = data.lstrip()[:1]
        if stripped not in (b"{", b"[", b'"', b"t", b"f", b"n", b"-") and not stripped.isdigit():
            raise Undecodable("not JSON")
    try:
        if not isinstance(json.loads(data.decode()), (dict, list, str, int, float, bool, type(None))):
            raise Undecodable("not JSON")
    except (ValueError, RecursionError):
        raise Undecodable("not JSON") from None


def _text(data: bytes, limit: int, name: str) -> dict[str, Any]:
    part = data[:limit]
    try:
        return _document(name, part.decode(), data, len(part))
    except UnicodeDecodeError as error:
        if len(data) > limit and error.start >= len(part) - 3 and error.reason == "unexpected end of data":
            return _document(name, part[: error.start].decode(), data, error.start)
        raise Undecodable(f"not UTF-8 at byte {error.start}") from None


def _hex(data: bytes, limit: int) -> dict[str, Any]:
    part = data[: max(limit // 2, 1)]
    return _document("hex", part.hex(), data, len(part))


def _document(name: str, text: str, data: bytes, count: int) -> dict[str, Any]:
    return {
        "format": name,
        "text": text,
        "length": len(data),
        "cut": count < len(data),
        "shown": count,
        "error": None,
    }


# --- schemas ----------------------------------------------------------------------------------------------------------


def _by_schema(data: bytes, how: str, limit: int, decoders: Mapping[str, Decode]) -> dict[str, Any] | None:
    decode = decoders.get(how)
    if decode is None:
        return None
    if len(data) > PARSED_BYTES_MAX:
        return _auto(data, limit) | {"error": f"larger than {PARSED_BYTES_MAX} bytes, so it was not decoded"}
    try:
        text = json.dumps(decode(data), default=_plain, ensure_ascii=False)
        text.encode()
    except Exception as error:  # whatever a decoder makes of bytes that are none of its own
        return _auto(data, limit) | {"error": f"not {how} by the schema: {type(error).__name__}: {error}"[:500]}
    found = _document(how, text[:limit], data, len(data))
    return found | {"cut": len(text) > limit}


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class MessageSchemas:
    """Schema files of topics, from `TOPIC=FILE` for values and `TOPIC:key=FILE` for keys.

    `.avsc` is Avro. Protobuf is a descriptor set, as `protoc --include_imports --descriptor_set_out=FILE` writes it,
    with `#Message` behind its name: `orders=shop.desc#shop.Order`. Raises UsageError, PackageMissing.
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._decoders: dict[tuple[str, str], dict[str, Decode]] = {}
        for each in given:
            place, found, path = each.partition("=")
            topic, _, part = place.partition(":")
            if not found or not topic or part not in ("", "key", "value"):
                raise UsageError(f"a schema is TOPIC=FILE or TOPIC:key=FILE, not {each!r}")
            file, _, message = path.partition("#")
            how, decode = _loaded(file, message)
            self._decoders.setdefault((topic, part or "value"), {})[how] = decode

    def of(self, topic: str, part: str) -> Mapping[str, Decode]:
        """Decoders by format for a topic's keys or values."""
        return self._decoders.get((topic, part), {})


def _loaded(file: str, message: str) -> tuple[str, Decode]:
    path = Path(file)
    if path.stat().st_size > _SCHEMA_BYTES_MAX:
        raise UsageError("a schema file has at most 16 MiB", file=file)
    data = path.read_bytes()
    if message:
        return "protobuf", _protobuf(data, message, file)
    if path.suffix == ".proto":
        raise UsageError(
            "a .proto file must be compiled first",
            file=file,
            hint="protoc --include_imports --descriptor_set_out=FILE.desc FILE.proto, then TOPIC=FILE.desc#Message.",
        )
    return "avro", _avro(data, file)


def _avro(data: bytes, file: str) -> Decode:
    try:
        import fastavro
    except ImportError:
        raise PackageMissing("an Avro schema needs the package fastavro", hint="Install duramen[console].") from None
    try:
        schema = fastavro.parse_schema(json.loads(data))
    except Exception as error:
        raise UsageError(f"not an Avro schema: {error}", file=file) from None

    def read(payload: bytes) -> Any:
        stream = io.BytesIO(payload)
        value = fastavro.schemaless_reader(stream, schema, None)
        if stream.tell() != len(payload):
            raise Undecodable(f"{len(payload) - stream.tell()} bytes are left over")
        return value

    return _with_wire_header(read)


def _protobuf(data: bytes, message: str, file: str) -> Decode:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
    except ImportError:
        raise PackageMissing("a Protobuf schema needs the package protobuf", hint="Install duramen[console].") from None
    try:
        pool = descriptor_pool.DescriptorPool()
        for each in descriptor_pb2.FileDescriptorSet.FromString(data).file:
            pool.Add(each)
        kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(message))
    except Exception as error:
        raise UsageError(f"not a descriptor set with {message}: {error}", file=file) from None

    def read(payload: bytes) -> Any:
        return json_format.MessageToDict(kind.FromString(payload), preserving_proto_field_name=True)

    return _with_wire_header(read, indexes=True)


def _with_wire_header(read: Decode, *, indexes: bool = False) -> Decode:
    """Tries the bytes as they are, then behind the five bytes a schema registry's serializers put first."""

    def decode(payload: bytes) -> Any:
        headed = payload[:1] == b"\0" and len(payload) > _WIRE_HEADER_BYTES
        if headed:
            rest = payload[_WIRE_HEADER_BYTES:]
            try:
                return read(rest[1:] if indexes and rest[:1] == b"\0" else rest)
            except Exception:
                return read(payload)
        return read(payload)

    return decode
