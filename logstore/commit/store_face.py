"""What whoever appends and defines topics asks of an open store: of a directory and of a bucket alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed
from logstore.commit.driver import Commits
from logstore.config import Resolved
from logstore.directory.origin import Origin
from logstore.files import FileSystem
from logstore.partition.environment import LogEnvironment
from logstore.records.record import Record
from logstore.topics.moving import Arrivals, Departures, Take
from logstore.topics.readable import ReadableStore
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self

    from logstore.commit.transactions import OpenTransaction
    from logstore.directory.ends import TopicEnds


class Store(ReadableStore, Protocol):
    """Implemented by `LogStore` and `BucketStore`. Nothing that takes one asks which it is."""

    @property
    def is_read_only(self) -> bool: ...

    def check_writable(self) -> None:
        """For those who would notice only after much work. Raises ReadOnlyStore, UnsuitableObjectStore."""

    def alter_settings(
        self, settings: Mapping[str, object], *, unset: Iterable[str] = (), dry_run: bool = False
    ) -> None:
        """Set and unset settings of the store as a whole, under their broker names. Raises UnknownConfig,
        InvalidConfig, also where they are in a file that people edit.
        """

    def commits(self) -> Commits[Any]:
        """The commit path."""

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        configs: Mapping[str, object] | None = None,
        dry_run: bool = False,
    ) -> Topic: ...

    def alter_topic(
        self,
        name: str,
        *,
        configs: Mapping[str, object] | None = None,
        unset: Iterable[str] = (),
        partitions: int | None = None,
        defaults: bool = False,
        dry_run: bool = False,
    ) -> Topic: ...

    def delete_topic(self, name: str, *, dry_run: bool = False) -> Topic: ...

    def append(
        self, topic: str, records: Iterable[Record] | pa.Table | pa.RecordBatch, *, app: AppBatch | None = None
    ) -> Committed: ...

    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]: ...
    def log_environment(self) -> LogEnvironment: ...
    def check_free(self, topic: Topic) -> None: ...
    def arrivals(self) -> AbstractContextManager[Arrivals]: ...
    @property
    def fs(self) -> FileSystem:
        """Of folders on this machine."""

    def origin(self) -> Origin | None: ...
    def exports(self, topics: Sequence[Topic]) -> AbstractContextManager[Take]: ...
    def departures(self, topics: Sequence[Topic], *, what: str) -> AbstractContextManager[Departures]: ...

    def open_transactions(
        self, topic: Topic, number: int, *, ends: TopicEnds | None = None
    ) -> Sequence[OpenTransaction]:
        """Of an imported partition, by first offset. With `ends`, those of the topic as a commit found them, which
        keeps others from committing to it. Raises LockHeld, CorruptState, DamagedLog.
        """

    def log_bytes(self, topic: Topic, number: int) -> int:
        """Size of the partition's batches."""

    def stamp(self, topic: Topic) -> tuple[int, ...]:
        """Changes whenever the topic's ends or its settings do, as far as a cheap look tells. For caches that also
        expire."""

    def largest_timestamp_ms(self, topic: Topic, number: int) -> int:
        """The newest record's time, -1 when there is none."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
