"""The columns that become records: their names and types, and what is wrong with those of a DataFrame."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from logstore.errors import InvalidRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXPECTED = """key binary|string (optional), value binary|string, timestamp timestamp|bigint ms (optional),
headers array<struct<key:string,value:binary>> (optional), topic string (optional), partition int (optional)"""

OUTPUT_MODES = """Of an aggregation make key and value, e.g. selectExpr("cast(id as string) as key",
"to_json(struct(*)) as value"). Update mode sends the rows that changed, so that a key's latest value is its state;
complete mode sends all rows again with every batch, and none for a key that is gone; append mode sends each row once,
when it is final"""

_TYPES: dict[str, tuple[str, ...]] = {
    "key": ("binary", "string", "void"),
    "value": ("binary", "string", "void"),
    "timestamp": ("timestamp", "timestamp_ntz", "bigint", "int"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int", "smallint", "tinyint", "bigint"),
}
_ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "void": pa.null(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "array<struct<key:string,value:binary>>": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}
_log = logging.getLogger("duramen")


def check_schema(df: DataFrame, topic: str | None) -> None:
    """Raises InvalidRecord with the expected schema for columns that cannot become records."""
    problems = check_types(dict(df.dtypes), topic)
    if problems:
        hint = f"{columns_text(df.columns)}. Expected: {EXPECTED}"
        if "key" not in df.columns or "value" not in df.columns:
            hint += f". {OUTPUT_MODES}"
        raise InvalidRecord("; ".join(problems), hint=hint)


def known_columns(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in _TYPES]


def warn_left_out(names: Sequence[str], but: str | None = None) -> None:
    """Warn of columns that no record has; they are left out, as Spark's Kafka sink does it."""
    left_out = [name for name in names if name not in _TYPES and name != but]
    if not left_out:
        return
    near = {name: difflib.get_close_matches(name.lower(), _TYPES, n=1) for name in left_out}
    meant = "".join(f" Did you mean {found[0]} by {name}?" for name, found in near.items() if found)
    _log.warning("columns that are not part of a record are left out: %s.%s", ", ".join(left_out), meant)


def arrow_schema(types: Mapping[str, str]) -> pa.Schema:
    """Columns that have passed `check_types`, as Arrow has them."""
    return pa.schema([(name, _ARROW[types[name]]) for name in known_columns(types)])


def columns_text(names: Sequence[str]) -> str:
    return f"The columns are {', '.join(names)}"


def check_types(types: dict[str, str], topic: str | None) -> list[str]:
    """What is wrong with columns of these types; empty when nothing is."""
    problems = []
    for name, kind in types.items():
        if name in _TYPES and kind not in _TYPES[name]:
            problems.append(f"column {name!r} is {kind}, expected {' or '.join(_TYPES[name])}")
    if "value" not in types:
        problems.append("there is no column 'value'")
    if topic is None and "topic" not in types:
        problems.append("no topic: neither the sink nor a column names one")
    return problems
