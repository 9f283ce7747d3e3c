"""The columns of the data source: those of Spark's Kafka source, or those that a read names in its schema.

Spark does not tell a source in Python which columns a query uses, and moves every column of every row that it gets.
`spark.read.schema("key string, value string")` reads these columns alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import StructType

from logstore.errors import InvalidConfig
from logstore.records.arrow import to_arrow
from logstore.records.columns import DecodedColumns

HEADERS = "headers"
_HEADERS_SPARK = "array<struct<key:string,value:binary>>"
#: named and nullable as Spark names them
_HEADERS_ARROW = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    _HEADERS_SPARK: _HEADERS_ARROW,
}
#: name -> the types it may be read as, the default first; a string is what Spark's cast from binary gives
_TYPES: dict[str, tuple[str, ...]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "offset": ("bigint",),
    "timestamp": ("timestamp",),
    "timestampType": ("int",),
    HEADERS: (_HEADERS_SPARK,),
}

#: what a record may lack
_NULLABLE = ("key", "value")


@dataclass(frozen=True, slots=True)
class ChosenColumn:
    name: str
    #: as the reader spells it
    field: pa.Field


def schema_text(*, headers: bool) -> str:
    """The schema of a read that names none."""
    return ", ".join(f"{name} {types[0]}" for name, types in _TYPES.items() if headers or name != HEADERS)


def chosen_columns(schema: StructType) -> tuple[ChosenColumn, ...]:
    """Raises InvalidConfig for a column that there is not, or that cannot be read as this type."""
    proper = {name.lower(): name for name in _TYPES}
    found = []
    for field in schema.fields:
        name = proper.get(field.name.lower())
        if name is None:
            near = difflib.get_close_matches(field.name.lower(), proper, n=1)
            hint = f"Did you mean {proper[near[0]]}?" if near else f"There are: {', '.join(_TYPES)}"
            raise InvalidConfig(f"there is no column {field.name!r} to be read", hint=hint)
        kind = field.dataType.simpleString()
        if kind not in _TYPES[name]:
            raise InvalidConfig(f"column {name!r} cannot be read as {kind}, but as {' or '.join(_TYPES[name])}")
        if not field.nullable and name in _NULLABLE:
            raise InvalidConfig(f"column {name!r} cannot be NOT NULL: there are records without a {name}")
        found.append(ChosenColumn(name, pa.field(field.name, _ARROW[kind], field.nullable)))
    return tuple(found)


def spark_batch(decoded: DecodedColumns, topic: str, partition: int, columns: Sequence[ChosenColumn]) -> pa.RecordBatch:
    """One decoded chunk of a partition as Spark wants it."""
    records = to_arrow(decoded)
    count = len(decoded)
    make: dict[str, Callable[[pa.DataType], pa.Array]] = {
        # A string is the same bytes under another type: Spark's own cast does not look at them either.
        "key": lambda kind: records.column("key").view(kind),
        "value": lambda kind: records.column("value").view(kind),
        "topic": lambda kind: pa.repeat(pa.scalar(topic, kind), count),
        "partition": lambda kind: pa.repeat(pa.scalar(partition, kind), count),
        "offset": lambda kind: records.column("offset"),
        "timestamp": lambda kind: pa.array(decoded.timestamps_ms * 1000).view(kind),
        "timestampType": lambda kind: records.column("timestamp_type").cast(kind),
        HEADERS: lambda kind: records.column("headers").cast(kind),
    }
    arrays = [make[column.name](column.field.type) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([column.field for column in columns]))
