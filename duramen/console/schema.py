"""Small words for JSON Schema, so that the contract reads as a table."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def integer(doc: str = "", *, minimum: int | None = None, maximum: int | None = None) -> Schema:
    return _described({"type": "integer"}, doc) | _range(minimum, maximum)


def number(doc: str = "", *, minimum: float | None = None, maximum: float | None = None) -> Schema:
    return _described({"type": "number"}, doc) | _range(minimum, maximum)


def text(doc: str = "", *, length_max: int | None = None, pattern: str | None = None) -> Schema:
    found = _described({"type": "string"}, doc)
    if length_max is not None:
        found["maxLength"] = length_max
    return found if pattern is None else found | {"pattern": pattern}


def boolean(doc: str = "") -> Schema:
    return _described({"type": "boolean"}, doc)


def one_of(*values: str, doc: str = "") -> Schema:
    return _described({"type": "string", "enum": list(values)}, doc)


def array(items: Schema, doc: str = "", *, count_max: int | None = None) -> Schema:
    found = _described({"type": "array", "items": items}, doc)
    return found if count_max is None else found | {"maxItems": count_max}


def mapping(values: Schema, doc: str = "") -> Schema:
    return _described({"type": "object", "additionalProperties": values}, doc)


def anything(doc: str = "") -> Schema:
    return _described({"type": "object"}, doc)


def record(doc: str = "", /, **fields: Schema) -> Schema:
    """An object with exactly these fields, all of them there."""
    return _described({"type": "object"}, doc) | {
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def with_optional(schema: Schema, *names: str) -> Schema:
    """The same object, with fields that may be absent."""
    return schema | {"required": [name for name in schema["required"] if name not in names]}


def nullable(schema: Schema) -> Schema:
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    found = schema | {"type": [schema["type"], "null"]}
    return found | {"enum": [*schema["enum"], None]} if "enum" in schema else found


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _described(schema: Schema, doc: str) -> Schema:
    return schema | {"description": doc} if doc else schema


def _range(minimum: float | None, maximum: float | None) -> Schema:
    found: Schema = {} if minimum is None else {"minimum": minimum}
    return found if maximum is None else found | {"maximum": maximum}
