"""A writer without a daemon flushes what it appended: staged files are the redo log, and must not pile up.

After so many commits, bytes or seconds an append ends with a flush of its topic, and closing the store flushes the
rest; `flush.messages` and `flush.ms` of a topic may ask for it earlier. A flush that fails, or finds the topic taken,
fails no append: what is staged stays, and the next one tries again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.errors import DuramenError, UnknownTopic

if TYPE_CHECKING:
    from logstore.commit.committer import Committed, Committer
    from logstore.commit.plan import TopicPlan

COMMITS_MAX = 32
BYTES_MAX = 64 << 20
AGE_S_MAX = 5.0


@dataclass(slots=True)
class _Unflushed:
    since: float
    commits: int = 0
    size_bytes: int = 0
    records: int = 0

    def add(self, plan: TopicPlan) -> bool:
        """Whether a flush is due now."""
        self.commits += 1
        self.size_bytes += plan.bytes
        self.records += plan.records
        return (
            self.commits >= COMMITS_MAX
            or self.size_bytes >= BYTES_MAX
            or self.records >= plan.flush_messages
            or time.monotonic() - self.since >= min(AGE_S_MAX, plan.flush_ms / 1000)
        )


class OwnFlush:
    """What this process appended and did not flush, by topic; threads may miscount a little, which is harmless."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._topics: dict[str, _Unflushed] = {}
        #: why the last flush did not happen; the appends stand
        self.error: Exception | None = None

    def appended(self, committed: Committed) -> None:
        """Note a commit; flushes the topics that are due."""
        for name, plan in committed.topics.items():
            known = self._topics.setdefault(name, _Unflushed(time.monotonic()))
            if known.add(plan):
                self._flush(name)

    def flush_all(self) -> None:
        """Flush everything that this process appended."""
        for name in list(self._topics):
            self._flush(name)

    def _flush(self, name: str) -> None:
        unflushed = self._topics.pop(name, None)
        if unflushed is None:
            return  # another thread is flushing
        try:
            self._committer.flush(self._committer.store.topic(name), wait_ms=0)
            self.error = None
        except UnknownTopic:
            pass  # deleted meanwhile
        except (DuramenError, OSError) as error:
            self.error = error
            # Not again at once: the process that holds the topic flushes it, or the next commits do.
            self._topics[name] = _Unflushed(time.monotonic(), 0, unflushed.size_bytes % BYTES_MAX)
