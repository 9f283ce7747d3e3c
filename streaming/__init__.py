"""Spark: the sink, the data source and state restoration."""

from __future__ import annotations

from streaming.options import SinkOptions
from streaming.restore import RestoredState, restore_into_delta, restore_state
from streaming.sink import LogSink

__all__ = ["LogSink", "RestoredState", "SinkOptions", "restore_into_delta", "restore_state"]
