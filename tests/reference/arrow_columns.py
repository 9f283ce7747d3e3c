"""A whole Arrow table as columns for the encoder, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from logstore.errors import InvalidRecord
from logstore.records import arrow
from logstore.records.columns import Columns
from logstore.records.memory import Memory


def columns_from_arrow(table: pa.Table | pa.RecordBatch, memory: Memory | None = None) -> Iterator[Columns]:
    """Slices of at most 65,536 rows, so that nothing is converted for the whole table at once. Raises InvalidRecord.

    What is converted lies in `memory`, where there is one.
    """
    known = ("key", "value", "timestamp", "headers")
    names = table.schema.names
    for name in names:
        if name not in known:
            raise InvalidRecord(f"column {name!r} is none of {', '.join(known)}")
        if names.count(name) > 1:
            raise InvalidRecord(f"column {name!r} is there {names.count(name)} times")
    if "value" not in names:
        raise InvalidRecord("there is no column 'value'")
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    if memory is None:
        memory = Memory(blocks=10)  # five columns' offsets; the caller may look at a slice while it asks for the next
    for batch in batches:
        for start in range(0, batch.num_rows, arrow._ROWS_AT_ONCE):
            yield arrow.columns_of_batch(batch.slice(start, arrow._ROWS_AT_ONCE), memory)
