"""A store: a directory of topics and their partition logs. `LogStore` is its face; the work is done in the rooms."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.directory.locks import DEFAULT_WAIT_MS
from logstore.directory.origin import Origin, read_origin
from logstore.errors import InvalidConfig, TopicExists
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.objects.opening import is_url
from logstore.restore.reads import Reads
from logstore.topics import checkpoints, creating, deleting, sweeping
from logstore.topics.definition import TopicChange
from logstore.topics.opened import OpenStore
from logstore.topics.placing import check_place
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    import pyarrow as pa

    from logstore.commit.apps import AppBatch
    from logstore.commit.committer import Committed, Committer
    from logstore.commit.own_flush import OwnFlush
    from logstore.commit.transactions import OpenTransaction
    from logstore.compaction.maintenance import MaintainedStore, Maintenance
    from logstore.directory.ends import TopicEnds
    from logstore.partition.log import PartitionLog
    from logstore.records.record import Record
    from logstore.topics.moving import Arrivals, Departures, Take


def open_store(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    storage_options: Mapping[str, str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    limits: Limits = DEFAULT_LIMITS,
    lock_wait_ms: int = DEFAULT_WAIT_MS,
) -> MaintainedStore:
    """The store at a path or a URL (`s3://bucket/prefix`); the only place that chooses between the two kinds.

    `storage_options` are for a URL: endpoint, region and the like; in a bucket there are no locks to wait for.
    Raises NotAStore and what opening either raises.
    """
    if is_url(path):
        from logstore.bucket.store import BucketStore

        return BucketStore(os.fspath(path), create=create, storage_options=storage_options, clock=clock, limits=limits)
    return LogStore(
        path,
        create=create,
        storage_options=storage_options,
        clock=clock,
        limits=limits,
        lock_wait_ms=lock_wait_ms,
    )


def directory_of(path: str | os.PathLike[str]) -> str:
    """The path, for what works with a store in a directory only. Raises InvalidConfig for a URL."""
    if is_url(path):
        raise InvalidConfig(
            f"{os.fspath(path)} is in a bucket, and this needs a store in a directory",
            hint="docs/bucket.md says what works with a bucket",
        )
    return os.fspath(path)


class LogStore(OpenStore, Reads):
    """An open store; close it, or use it as a context manager.

    Any number of processes may have it open at once.

        with LogStore("/data/store", create=True) as store:
            store.create_topic("orders", partitions=1, configs={"cleanup.policy": "compact"})
            store.append("orders", [Record(b"42", b"ordered")])

    A URL (`LogStore("s3://bucket/prefix", storage_options={…})`) opens a store in a bucket; see `open_store`.
    """

    if not TYPE_CHECKING:

        def __new__(cls, path, **options):
            """A URL opens a store in a bucket, which offers what reading and appending ask of this one."""
            return open_store(path, **options) if cls is LogStore and is_url(path) else super().__new__(cls)

    _committer: Committer | None = None
    _own_flush: OwnFlush | None = None

    def close(self) -> None:
        """Flush what this process appended, unless another process holds the topic, and close the store. Idempotent."""
        own_flush, self._own_flush = self._own_flush, None
        try:
            if own_flush is not None:
                own_flush.flush_all()
        finally:
            self._committer = None
            super().close()

    def alter_settings(
        self, settings: Mapping[str, object], *, unset: Iterable[str] = (), dry_run: bool = False
    ) -> None:
        """Raises InvalidConfig: they are in a file, with the comments of whoever wrote it."""
        raise InvalidConfig(
            "the settings of a store in a directory are in a file",
            file=self.layout.settings,
            hint="Edit that file; `duramen config --template` prints one with every default",
        )

    # --- topics --------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        configs: Mapping[str, object] | None = None,
        dry_run: bool = False,
    ) -> Topic:
        """Raises InvalidTopic, TopicExists, UnknownConfig, InvalidConfig."""
        return creating.create_topic(self, name, partitions, configs, dry_run=dry_run)

    def alter_topic(
        self,
        name: str,
        *,
        configs: Mapping[str, object] | None = None,
        unset: Iterable[str] = (),
        partitions: int | None = None,
        defaults: bool = False,
        dry_run: bool = False,
    ) -> Topic:
        """Set and unset the topic's own settings, or widen it; returns the changed topic.

        If its settings were unknown, they are known from now on: `defaults` says so without setting any.

        Raises UnknownTopic, UnknownConfig, InvalidConfig.
        """
        change = TopicChange.of(configs, unset, partitions, defaults)
        return creating.alter_topic(self, name, change, dry_run=dry_run)

    def delete_topic(self, name: str, *, dry_run: bool = False) -> Topic:
        """Remove the topic and all its records. Raises UnknownTopic, LockHeld."""
        return deleting.delete_topic(self, name, dry_run=dry_run)

    def sweep(self) -> list[str]:
        """Remove what crashed processes left behind and a name or a mark says may go; returns the paths."""
        return sweeping.sweep(self)

    def project_checkpoints(self) -> None:
        """Bring Kafka's four checkpoint files up to date with the state; for tools, nothing of ours reads them."""
        checkpoints.project_checkpoints(self)

    def origin(self) -> Origin | None:
        """Of what the store is a copy, and since when it is written to; None: it is none. Raises CorruptState."""
        return read_origin(self.fs, self.layout)

    def check_free(self, topic: Topic) -> None:
        """Whether a topic could come in under its name. Raises TopicExists, StrayDirectory."""
        if self.fs.exists(self.layout.topic(topic.name)):
            raise TopicExists(
                f"there is a topic {topic.name} already", hint="Delete it first, or take the others with --topic."
            )
        check_place(self, topic, clear=False)

    def arrivals(self) -> contextlib.AbstractContextManager[Arrivals]:
        """For topics that come in from elsewhere; see `moving.Arrivals`."""
        from logstore.transfer.directory_arrivals import directory_arrivals

        return directory_arrivals(self)

    def departures(self, topics: Sequence[Topic], *, what: str) -> contextlib.AbstractContextManager[Departures]:
        """For topics that are copied elsewhere; see `moving.Departures`."""
        from logstore.transfer.directory_departures import directory_departures

        return directory_departures(self, topics, what=what)

    def exports(self, topics: Sequence[Topic]) -> contextlib.AbstractContextManager[Take]:
        """How an export gets at partitions: each by itself, as of when it is taken."""
        from logstore.transfer.kafka_export import take_from_directory

        return contextlib.nullcontext(partial(take_from_directory, self))

    # --- records -------------------------------------------------------------------------------------------------

    def commits(self) -> Committer:
        """The commit path, for those who stage for themselves."""
        from logstore.commit.committer import Committer

        if self._committer is None:
            self._committer = Committer(self)
        return self._committer

    def append(
        self, topic: str, records: Iterable[Record] | pa.Table | pa.RecordBatch, *, app: AppBatch | None = None
    ) -> Committed:
        """Append records, or an Arrow table of key, value, timestamp?, headers?, partition?; all or none of them.

        With `app` a batch that is in the ledger already is not written again. Raises InvalidRecord and its kind,
        UnknownTopic, ReplayMismatch, LockHeld, DiskFull.
        """
        from logstore.commit.own_flush import OwnFlush
        from logstore.commit.produce import append_table, table_of

        committer = self.commits()
        if self._own_flush is None:
            self._own_flush = OwnFlush(committer)
        table = records if hasattr(records, "to_batches") or hasattr(records, "schema") else table_of(records)
        committed = append_table(committer, topic, table, app=app)
        self._own_flush.appended(committed)
        return committed

    def open_transactions(
        self, topic: Topic, number: int, *, ends: TopicEnds | None = None
    ) -> Sequence[OpenTransaction]:
        """Transactions of an imported partition that have no end. Raises LockHeld, CorruptState, DamagedLog."""
        from logstore.commit.transactions import open_transactions

        return open_transactions(self, topic, number, ends=ends)

    def maintenance(self) -> Maintenance:
        """Compaction, retention and upkeep, as jobs and the daemon do them."""
        from logstore.upkeep.directory_maintenance import DirectoryMaintenance

        return DirectoryMaintenance(self)

    def writing(
        self, topic: Topic, number: int, *, what: str, clock: Clock | None = None
    ) -> contextlib.AbstractContextManager[PartitionLog]:
        """The partition's log for its one writer. Raises LockHeld, CorruptState, DamagedLog."""
        from logstore.commit.writing import writing

        return writing(self, topic, number, what=what, clock=clock)
