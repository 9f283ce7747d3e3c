"""A request against the contract: finds its operation, and checks every parameter before anything is done."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from duramen.console.contract import OPERATIONS, PREFIX, Operation, Parameter
from duramen.console.problems import Refused, bad_request
from duramen.console.schema import Schema

BODY_BYTES_MAX = 64 << 10
_FIELDS_MAX = 64
_INTEGER = re.compile(r"-?[0-9]{1,19}\Z")
_NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,3})?\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with its parameters, checked; those not given have their defaults, or are None."""

    operation: Operation
    values: Mapping[str, Any]


def find_operation(method: str, path: str) -> tuple[Operation, dict[str, str]]:
    """The operation at `path`, percent-encoded as it came, and what stands in its places. Raises Refused."""
    parts = path.split("/")
    found: list[tuple[Operation, dict[str, str]]] = []
    for operation in OPERATIONS:
        wanted = (PREFIX + operation.path).split("/")
        if len(wanted) != len(parts):
            continue
        given: dict[str, str] = {}
        for pattern, part in zip(wanted, parts, strict=True):
            if pattern.startswith("{"):
                given[pattern[1:-1]] = part
            elif pattern != part:
                break
        else:
            found.append((operation, given))
    if not found:
        raise Refused(404, "NotFound", "there is nothing at this path", hint=f"{PREFIX}/openapi.json lists all paths.")
    for operation, given in found:
        if operation.method == method:
            return operation, {name: _decoded(part, name) for name, part in given.items()}
    raise Refused(405, "MethodNotAllowed", f"use {' or '.join(sorted({each.method for each, _ in found}))} here")


def _decoded(part: str, name: str) -> str:
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise bad_request(f"{name} is not UTF-8", parameter=name) from None


def read_call(method: str, path: str, query: str) -> Call:
    """Raises Refused for anything the contract does not say."""
    operation, in_path = find_operation(method, path)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict")
    except ValueError:
        raise bad_request("the query is not UTF-8, or has too many fields") from None
    given: dict[str, str] = {}
    known = {each.name: each for each in operation.parameters}
    for name, value in pairs:
        if name not in known or known[name].in_path:
            raise bad_request(f"there is no parameter {name[:80]!r} here", hint=_names(known))
        if name in given:
            raise bad_request(f"{name} is given twice", parameter=name)
        given[name] = value
    given |= in_path
    values = {name: _value(each, given[name]) if name in given else each.default for name, each in known.items()}
    return Call(operation, values)


def _names(known: Mapping[str, Parameter]) -> str:
    names = [name for name, each in known.items() if not each.in_path]
    return f"The parameters are {', '.join(names)}." if names else "It takes none."


def _value(parameter: Parameter, text: str) -> Any:
    schema, name = parameter.schema, parameter.name
    kind = schema["type"]
    value: Any = text
    if kind == "integer":
        if not _INTEGER.match(text):
            raise bad_request(f"{name} is not a whole number", parameter=name)
        value = int(text)
    elif kind == "number":
        if not _NUMBER.match(text) or not math.isfinite(float(text)):
            raise bad_request(f"{name} is not a number", parameter=name)
        value = float(text)
    elif kind == "boolean":
        if text not in ("true", "false"):
            raise bad_request(f"{name} is true or false", parameter=name)
        value = text == "true"
    check_value(schema, value, name)
    return value


def read_body(operation: Operation, data: bytes) -> dict[str, Any]:
    """The body as the operation wants it. Raises Refused."""
    assert operation.body is not None
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None
    check_value(operation.body, value, "body")
    assert isinstance(value, dict)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(name)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_value(schema: Schema, value: Any, name: str) -> None:
    """Raises Refused unless `value` is as the schema says; knows the words this contract uses."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    allowed = tuple(each for kind in kinds for each in _TYPES[kind])
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise bad_request(f"{name} is not {' or '.join(kinds)}", parameter=name)
    if value is None:
        return
    if "enum" in schema and value not in schema["enum"]:
        raise bad_request(f"{name} is one of {', '.join(map(str, schema['enum']))}", parameter=name)
    if isinstance(value, str):
        _check_text(schema, value, name)
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            raise bad_request(f"{name} has at most {schema['maxItems']} entries", parameter=name)
        for each in value:
            check_value(schema["items"], each, name)
    elif isinstance(value, dict):
        _check_fields(schema, value, name)
    elif not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        raise bad_request(
            f"{name} is not between {schema.get('minimum', '-')} and {schema.get('maximum', '-')}", parameter=name
        )


def _check_text(schema: Schema, value: str, name: str) -> None:
    if len(value) > schema.get("maxLength", len(value)):
        raise bad_request(f"{name} has at most {schema['maxLength']} characters", parameter=name)
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        raise bad_request(f"{name} is not as {schema['pattern']}", parameter=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name} is not Unicode", parameter=name) from None


def _check_fields(schema: Schema, value: dict[str, Any], name: str) -> None:
    fields = schema["properties"]
    for each in value:
        if each not in fields:
            raise bad_request(f"{name} has no field {str(each)[:80]!r}", hint=f"It has {', '.join(fields)}.")
    for each in schema["required"]:
        if each not in value:
            raise bad_request(f"{name} lacks {each}", parameter=each)
    for each, inner in value.items():
        check_value(fields[each], inner, each)
