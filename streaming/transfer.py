"""How rows get from Spark's JVM into Python: in Arrow batches of a bounded size that is known beforehand.

Spark ends a batch by rows and by bytes. Since 4.2 it adds up the bytes after every row, which is a third of its work on
the way (docs/benchmarks.md). The sink bounds them otherwise: fewer rows a batch, none of which may be wider than its
share of the batch. Wider values are clipped on their way, just long enough to be noticed; the rows then travel again
with Spark's own limit, and the sink stays with it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
#: with this one Spark does not add up
_NO_LIMIT = 2**31 - 1
#: enough that a batch costs little beside its rows
_ROWS = 8192
#: planning the clipping takes some 20 ms, which fewer rows do not bring in; a batch is likely to be like the one before
ROWS_WORTHWHILE = 250_000
#: a share below this says that a user wants small batches
_WIDTH_MIN = 256
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}


class WideRows(Exception):
    """A value wider than its share; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class Width:
    """The bytes that every value of a column may have in a batch of so many rows."""

    rows: int
    bytes: int
    columns: tuple[str, ...]

    def clipped(self, df: DataFrame) -> DataFrame:
        # As text: making it out of column objects takes as long as a small batch.
        return df.selectExpr(
            *[self._clipped(f"`{name}`") if name in self.columns else f"`{name}`" for name in df.columns]
        )

    def _clipped(self, name: str) -> str:
        return f"if(octet_length({name}) > {self.bytes}, substring({name}, 1, {self.bytes + 1}), {name}) as {name}"

    def check(self, batch: pa.RecordBatch) -> None:
        """Raises WideRows when a value was clipped."""
        for name in self.columns:
            column = batch.column(name)
            if not pa.types.is_null(column.type) and (pc.max(pc.binary_length(column)).as_py() or 0) > self.bytes:
                raise WideRows


def width_of(df: DataFrame) -> Width | None:
    """What a value of these rows may have when Spark is not to add up; None where its own limit has to do."""
    types = dict(df.dtypes)
    columns = tuple(name for name, kind in types.items() if kind in ("binary", "string"))
    if not columns or any(kind.startswith("array") for kind in types.values()):
        return None
    limit, records = (_setting(df.sparkSession, name) for name in (_BYTES, _RECORDS))
    if limit is None or records is None or limit >= _NO_LIMIT:
        return None
    rows = min(records, _ROWS) if records > 0 else _ROWS
    share = limit // rows // len(columns)
    return Width(rows, share, columns) if share >= _WIDTH_MIN else None


def _setting(session: Any, name: str) -> int | None:
    """None for one that this Spark does not have, or whose value is not understood."""
    from pyspark.errors import PySparkException

    try:
        text = session.conf.get(name)
    except PySparkException:
        return None
    found = re.fullmatch(r"(-?\d+)([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        return None
    return int(found[1]) * _UNITS[found[2]]


@dataclass(slots=True)
class _Before:
    users: int = 0
    settings: dict[str, str] = field(default_factory=dict)


_lock = threading.Lock()
_before: dict[int, _Before] = {}


@contextmanager
def bounded_by_rows(session: Any, width: Width) -> Iterator[None]:
    """The session's limits for rows that are clipped to `width`; they are as before when the last who asked is done."""
    with _lock:
        before = _before.setdefault(id(session), _Before())
        before.users += 1
        if before.users == 1:
            before.settings = {name: session.conf.get(name) for name in (_BYTES, _RECORDS)}
            session.conf.set(_RECORDS, width.rows)
            session.conf.set(_BYTES, _NO_LIMIT)
    try:
        yield
    finally:
        with _lock:
            before.users -= 1
            if not before.users:
                del _before[id(session)]
                for name, value in before.settings.items():
                    session.conf.set(name, value)
