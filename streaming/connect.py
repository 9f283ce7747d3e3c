"""Finds the streaming query that calls the sink over Spark Connect: there the sink runs beside the server, which does
not say for which query.

While the client gives the sink to a query's writer, it is pickled. Then it leaves a mark among the writer's options; by
that it finds its query again, in the plans that the server prints. Imports no Spark.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import uuid
from typing import Any

from logstore.errors import InvalidConfig

_OPTION = "duramen.sink."
_WRITERS = "pyspark.sql.connect.streaming.readwriter"
#: Only workers that the server starts for the functions of queries have it; each serves one query.
_WORKER_ENV = "SPARK_CONNECT_LOCAL_URL"

_found: dict[str, str] = {}


def leave_mark() -> str:
    """A new mark, in the options of the query whose writer is being given a function right now, if there is one."""
    mark = uuid.uuid4().hex
    frame = sys._getframe(1)
    while frame is not None:
        writer: Any = frame.f_locals.get("self")
        if frame.f_code.co_name == "foreachBatch" and type(writer).__module__ == _WRITERS:
            writer.option(_OPTION + mark, "here")
            break
        frame = frame.f_back  # type: ignore[assignment]
    return mark


def calling_query(session: Any, mark: str | None) -> str | None:
    """The id of the query this process works for, None where it works for none.

    Raises InvalidConfig when there are several and none has the mark: a guess would let two queries mix under one name.
    """
    if _WORKER_ENV not in os.environ:
        return None
    if mark is not None and mark in _found:
        return _found[mark]
    active = session.streams.active
    marked = [query.id for query in active if mark is not None and _OPTION + mark in _plan_text(query)]
    if len(marked) == 1 and mark is not None:
        return _found.setdefault(mark, str(marked[0]))
    if len(active) == 1:
        return str(active[0].id)
    raise InvalidConfig(
        f"{len(active)} queries are active in this Spark Connect session, and any of them could be writing this batch",
        hint="Make the LogSink outside of the function given to foreachBatch, or give it SinkOptions(query_id=…)",
    )


def _plan_text(query: Any) -> str:
    printed = io.StringIO()
    # A query that just ended has no plan to show.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(printed):
        query.explain(True)
    return printed.getvalue()
