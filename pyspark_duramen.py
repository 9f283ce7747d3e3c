"""Spark registers the data source `duramen` by itself when it finds this module."""

from __future__ import annotations

from streaming.source import DuramenSource as DefaultSource

__all__ = ["DefaultSource"]
