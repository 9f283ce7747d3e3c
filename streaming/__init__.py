"""Spark: the sink, the data source and state restoration."""

from __future__ import annotations

from streaming.sink import LogSink

__all__ = ["LogSink"]
