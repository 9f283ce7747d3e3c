"""The store's ledger: three Delta tables that say what was committed, what ran, and what each segment holds."""

from __future__ import annotations

from logstore.ledger.ledger import Ledger
from logstore.ledger.rows import AppProgress, CommitRequest, CommitRow, RunRow, SegmentRow, TopicCommit

__all__ = ["AppProgress", "CommitRequest", "CommitRow", "Ledger", "RunRow", "SegmentRow", "TopicCommit"]
