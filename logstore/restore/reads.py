"""Reading as the face of a store offers it, of either kind: `restore` and `follow`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from logstore.restore.follow import Followed
    from logstore.topics.readable import ReadableStore


class Reads:
    """What `LogStore` and `BucketStore` have of it."""

    def restore(
        self: ReadableStore,
        topic: str,
        *,
        as_of_offsets: Mapping[int, int] | None = None,
        as_of_timestamp_ms: int | None = None,
        since_offsets: Mapping[int, int] | None = None,
        tombstones: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The latest record of each key as Arrow batches: now, below some offsets, or as of a time.

        `restore_state` does the same with Spark, and says more of `since_offsets`.
        Raises UnknownTopic, InvalidConfig, OffsetOutOfRange, HistoryCompacted.

            for batch in store.restore("accounts", as_of_timestamp_ms=1_700_000_000_000): …
        """
        from logstore.restore.restore import plan_restore, restore

        plan = plan_restore(
            self,
            topic,
            as_of_offsets=as_of_offsets,
            as_of_timestamp_ms=as_of_timestamp_ms,
            since_offsets=since_offsets,
        )
        return restore(self, plan, tombstones=tombstones)

    def follow(
        self: ReadableStore,
        topic: str | Sequence[str],
        position: Mapping[str, object] | None = None,
        *,
        poll_s: float | None = None,
        wait: bool = True,
        committed: bool = True,
    ) -> Iterator[Followed]:
        """Records of all partitions from `position` on, as they come; without one, from the beginning.

        A position is plain JSON that the caller keeps with what it made of the records; each delivery carries the next.
        Of several topics, each round ends where a commit is in all of them or in none. `committed` leaves out open and
        aborted transactions, as read_committed does. It looks for news every `poll_s`: 0.1 seconds in a directory, a
        second in a bucket, where a look is a request.
        Raises UnknownTopic when the topic was deleted or created again, OffsetOutOfRange when records are gone.
        """
        from logstore.restore.follow import follow

        return follow(
            self, topic, position, poll_s=self.poll_s if poll_s is None else poll_s, wait=wait, committed=committed
        )
