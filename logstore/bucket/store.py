"""An open store in a bucket: what the rooms above ask of a store, answered by the ledger, manifests and objects.

Nothing is locked and nothing is kept on disk. Any number of processes may have the store open at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from logstore.bucket import definitions
from logstore.bucket.arriving import BucketArrivals, bucket_arrivals
from logstore.bucket.commit_file import commit_key, decode_commit
from logstore.bucket.committing import BucketCommitter
from logstore.bucket.departing import BucketDepartures, bucket_departures
from logstore.bucket.files import BlockCache
from logstore.bucket.keys import STORE, new_nonce
from logstore.bucket.ledger import BucketLedger
from logstore.bucket.looking import look_at
from logstore.bucket.manifests import Manifests
from logstore.bucket.pins import Pins
from logstore.bucket.producers import Producers
from logstore.bucket.reader import BucketReader, PartitionSource, Shelf, aborted_by, look
from logstore.bucket.rows import Kind, LedgerView, TopicRow, view_tail
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules
from logstore.bucket.tail import Plans
from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.config import resolve_broker
from logstore.directory.ends import TopicEnds
from logstore.directory.few_files import FewFiles
from logstore.directory.origin import Origin
from logstore.directory.sealed import seal, unseal, whole_number
from logstore.directory.state import PartitionState
from logstore.errors import (
    BackupRefused,
    CommitConflict,
    CorruptState,
    NotAStore,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    TopicExists,
    UnknownTopic,
)
from logstore.files import OS_FILES, FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.objects.objects import Objects, Version
from logstore.objects.opening import MEMORY, open_objects, open_raw
from logstore.objects.probe import probe_objects
from logstore.objects.retrying import RetryingObjects
from logstore.partition.environment import LogEnvironment
from logstore.partition.reading import MAX_TIMESTAMP_QUERY
from logstore.restore.reads import Reads
from logstore.topics.definition import TopicChange
from logstore.topics.looking import PartitionLook
from logstore.topics.registry import Topic, unknown_topic
from logstore.topics.store_settings import StoreSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self

    from logstore.bucket.maintenance import BucketMaintenance
    from logstore.commit.apps import AppBatch
    from logstore.commit.committer import Committed
    from logstore.commit.transactions import OpenTransaction
    from logstore.records.record import Record
    from logstore.topics.moving import Take

FORMAT = 1
_SETTINGS_TRIES_MAX = 20
_LOOKS_AT_ONCE = 16

#: where the probe has held, by URL; once a process
_probed: set[str] = set()
_probing = threading.Lock()


class BucketStore(StoreSettings, Reads):
    """An open store; use it as a context manager, or leave it: nothing has to be given up.

    >>> with BucketStore("s3://bucket/prefix", create=True) as store: ...
    """

    poll_s = 1.0

    def __init__(
        self,
        url: str,
        *,
        create: bool = False,
        storage_options: Mapping[str, str] | None = None,
        objects: Objects | None = None,
        clock: Clock = SYSTEM_CLOCK,
        limits: Limits = DEFAULT_LIMITS,
        is_draft: bool = False,
    ) -> None:
        """Open the store at `url`; with `create`, make it where there is none. `objects` stand for the URL in tests.
        One that `is_draft` is no store before `publish`.

        Raises NotAStore, StoreVersionError, UnknownBucket, AccessDenied, InvalidConfig, PackageMissing,
        UnsuitableObjectStore, ObjectStoreUnavailable.
        """
        self.url = url.rstrip("/")
        self.clock = clock
        self.limits = limits
        self.storage_options: Mapping[str, str] = dict(storage_options or {})
        self.objects: Objects = objects or open_objects(self.url, self.storage_options)
        self._may_probe = objects is None
        #: of what the store is a copy, and the version of the ledger it began with
        self._origin: tuple[Origin, int] | None = None
        self.ledger = BucketLedger(self.objects, clock=clock, limits=limits)
        self.manifests = Manifests(self.objects, clock.now_ms, limits=limits)
        self.shelf = Shelf(BlockCache(self.objects), Plans(self.objects, limits), limits)
        self.pins = Pins(self.objects, clock)
        self._take_settings({}, self.url)
        if is_draft:
            return
        try:
            document, _ = self._read_id()
        except NotAStore:
            if not create:
                raise
            document = self._make()
        #: what it said of itself, its settings included
        self._opened_as = document
        self._take_settings(document["settings"], f"{self.url}/{STORE}")
        self.ledger.refresh()

    @property
    def requests(self) -> Counter[str]:
        """Requests that this process made so far, by kind; each attempt counts."""
        return self.objects.requests if isinstance(self.objects, RetryingObjects) else Counter()

    def check_made(self) -> None:
        """Of a draft, whether it is a store already. Raises NotAStore."""
        self._read_id()

    def _read_id(self) -> tuple[dict[str, Any], Version]:
        """What the store says of itself, its settings included."""
        try:
            data, version = self.objects.get(STORE)
        except ObjectMissing:
            raise NotAStore(
                f"{self.url} is not a store: it has no {STORE}",
                hint="Look at the URL, or create the store there (create=True; `duramen topics create`)",
            ) from None
        file = f"{self.url}/{STORE}"
        try:
            document = unseal(data, version=FORMAT, file=file)
            if "copy_of" in document:
                taken_ms, at = (whole_number(document, name, file=file) for name in ("taken_ms", "taken_version"))
                self._origin = Origin(str(document["copy_of"]), taken_ms), at
        except CorruptState as error:
            raise NotAStore(f"{self.url} is not a store: {error.what}", file=file) from error
        if not isinstance(document.setdefault("settings", {}), dict):
            raise NotAStore(f"{self.url} is not a store: its settings are no object", file=file)
        return document, version

    def _make(self) -> dict[str, Any]:
        self.check_writable()
        self.ledger.make()
        with contextlib.suppress(ObjectExists):
            self._create_id({})
        return self._read_id()[0]

    @property
    def store_id(self) -> str:
        """What makes it this store, whatever lies at its URL one day. One request. Raises NotAStore."""
        return str(self._read_id()[0].get("store_id"))

    def alter_settings(
        self, settings: Mapping[str, object], *, unset: Iterable[str] = (), dry_run: bool = False
    ) -> None:
        """Set and unset settings of the store as a whole, under their broker names. Who has it open goes on with those
        it was opened with. Raises UnknownConfig, InvalidConfig.
        """
        self.check_writable()
        unset = list(unset)
        for _ in range(_SETTINGS_TRIES_MAX):
            document, version = self._read_id()
            known = {name: value for name, value in document["settings"].items() if name not in unset}
            wanted = known | {name: str(value) for name, value in settings.items()}
            resolve_broker(wanted, store_file=f"{self.url}/{STORE}")
            if dry_run:
                return
            document |= {"settings": wanted, "nonce": new_nonce()}
            with contextlib.suppress(ObjectChanged):
                self.objects.replace(STORE, seal(document, version=FORMAT), version)
                self._take_settings(wanted, f"{self.url}/{STORE}")
                return
        raise CommitConflict("others altered the settings at the same time, again and again", hint="Try again")

    def is_unchanged(self) -> bool:
        """Whether it is the store that was opened, with the settings of then; if so, it is looked at anew."""
        try:
            if self._read_id()[0] != self._opened_as:
                return False
        except NotAStore:
            return False
        self.ledger.refresh()
        return True

    def _create_id(self, more: Mapping[str, object]) -> None:
        """Last: a store that has it has a ledger. Raises ObjectExists."""
        document = {"store_id": new_nonce(), "made_ms": self.clock.now_ms(), **more}
        self.objects.create(STORE, seal(document, version=FORMAT))

    def make_id(self, seen: Version | None) -> None:
        """A new one in the place of what was `seen`, or of nothing. Raises ObjectExists, ObjectChanged."""
        if seen is None:
            return self._create_id({})
        document = {"store_id": new_nonce(), "made_ms": self.clock.now_ms()}
        self.objects.replace(STORE, seal(document, version=FORMAT), seen)

    def own_settings(self) -> dict[str, object]:
        """Those of the store as a whole, as they were given."""
        return dict(self._settings)

    def publish(self, origin: Origin, version: int, settings: Mapping[str, object] | None = None) -> None:
        """Make a draft the store that it is a copy of, as of that version of its ledger. Raises BackupRefused."""
        copy = {"copy_of": origin.source, "taken_ms": origin.taken_ms, "taken_version": version}
        try:
            self._create_id(copy | {"settings": dict(settings or {})})
        except ObjectExists as error:
            raise BackupRefused("somebody made a store there meanwhile", file=f"{self.url}/{STORE}") from error

    def origin(self) -> Origin | None:
        """Of what the store is a copy, and since when it is written to; None: it is none."""
        if self._origin is None:
            return None
        origin, version = self._origin
        if self.ledger.refresh().version == version:
            return origin
        return replace(origin, restored_ms=self._first_after(version))

    def _first_after(self, version: int) -> int:
        """When the commit behind a version was made; of one that was cleaned up, the oldest that is known."""
        try:
            entry = decode_commit(self.objects.get(commit_key(version + 1))[0], version + 1, limits=self.limits)
            rows = entry.rows
        except ObjectMissing:
            rows = self.ledger.view.rows
        return min((row.clock_ms for row in rows), default=0)

    def close(self) -> None:
        """Give up the pin of reads that ended, and what was fetched. Idempotent; the store can still be used."""
        self.pins.close()
        self.shelf.cache.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # --- settings ---------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.url

    @property
    def is_read_only(self) -> bool:
        """Rights are the bucket's: what is refused is told by the request."""
        return False

    def check_writable(self) -> None:
        """Try once a process whether conditional writes hold here. Raises UnsuitableObjectStore, AccessDenied."""
        if not self._may_probe or self.url.startswith(MEMORY):
            return
        with _probing:
            if self.url not in _probed:
                probe_objects(open_raw(self.url, self.storage_options))
                _probed.add(self.url)

    # --- topics -----------------------------------------------------------------------------------------------------

    def topic_names(self) -> list[str]:
        return sorted(topic.name for topic in self.ledger.refresh().definitions.values())

    def topics(self) -> list[Topic]:
        """All topics by name."""
        return sorted(self.ledger.refresh().definitions.values(), key=lambda topic: topic.name)

    def topic(self, name: str) -> Topic:
        """As it is now: one request. Raises UnknownTopic."""
        found = self.ledger.refresh().named(name)
        if found is None:
            raise unknown_topic(name, [topic.name for topic in self.ledger.view.definitions.values()])
        return found

    def known_topic(self, name: str) -> Topic:
        """As it was when the ledger was last looked at; looks for one that is not known. Raises UnknownTopic."""
        return self.ledger.view.named(name) or self.topic(name)

    def check_exists(self, topic: Topic) -> None:
        """Raises UnknownTopic when the topic is another one by now."""
        _newest(self.ledger.refresh(), topic)

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        configs: Mapping[str, object] | None = None,
        dry_run: bool = False,
    ) -> Topic:
        """Raises InvalidTopic, TopicExists, UnknownConfig, InvalidConfig, CommitUnknown."""
        self.check_writable()
        return definitions.create_topic(self, name, partitions, configs, dry_run=dry_run)

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
        """Set and unset the topic's own settings, or widen it; returns it as it is then.

        Raises UnknownTopic, UnknownConfig, InvalidConfig, CommitUnknown.
        """
        self.check_writable()
        change = TopicChange.of(configs, unset, partitions, defaults)
        return definitions.alter_topic(self, name, change, dry_run=dry_run)

    def delete_topic(self, name: str, *, dry_run: bool = False) -> Topic:
        """End the topic; its objects go with maintenance. Raises UnknownTopic, CommitUnknown."""
        self.check_writable()
        return definitions.delete_topic(self, name, dry_run=dry_run)

    def check_free(self, topic: Topic) -> None:
        """Whether a topic could come in under its name. Raises TopicExists."""
        if self.ledger.refresh().named(topic.name) is not None:
            raise TopicExists(
                f"there is a topic {topic.name} already", hint="Delete it first, or take the others with --topic."
            )

    def arrivals(self) -> AbstractContextManager[BucketArrivals]:
        """For topics that come in from elsewhere; see `moving.Arrivals`."""
        return bucket_arrivals(self)

    def departures(self, topics: Sequence[Topic], *, what: str) -> AbstractContextManager[BucketDepartures]:
        """For topics that are copied elsewhere; see `moving.Departures`."""
        return bucket_departures(self, topics, what=what)

    @contextmanager
    def exports(self, topics: Sequence[Topic]) -> Iterator[Take]:
        """How an export gets at partitions: all as of one moment."""
        with self.departures(topics, what="export") as leaving:
            yield leaving.take

    @property
    def fs(self) -> FileSystem:
        """Of folders on this machine, for what is on its way in or out."""
        return OS_FILES

    def log_environment(self) -> LogEnvironment:
        """For a log in a local folder, on its way in or out."""
        return LogEnvironment(FewFiles(OS_FILES), self.clock, self.limits)

    # --- ends -------------------------------------------------------------------------------------------------------

    def ends(self, topic: Topic) -> TopicEnds:
        """As of now: one request. Raises UnknownTopic."""
        view = self.ledger.refresh()
        return view.ends(_newest(view, topic))

    def ends_at_once(self, topics: Sequence[Topic]) -> dict[str, TopicEnds]:
        """Of several topics, as one version of the ledger has them; by topic id. Raises UnknownTopic."""
        view = self.ledger.refresh()
        return {topic.id: view.ends(_newest(view, topic)) for topic in topics}

    def high_watermark(self, topic: Topic, number: int) -> int:
        """Where readers must stop, as of now."""
        topic.partition(number)
        return self.ends(topic).high_watermarks[number]

    # --- partitions -------------------------------------------------------------------------------------------------

    def source(self, topic: Topic, number: int, *, end_offset: int = 0) -> PartitionSource:
        """How to look at a partition; with an `end_offset` it may be as it was when that was seen.

        Raises UnknownTopic.
        """

        def rows() -> Sequence[TopicRow]:
            view = self.ledger.refresh()
            _newest(view, topic)
            return view.topic(topic.id)

        partition = topic.partition(number)
        directory = f"{self.url}/{topic.id}/{number}"
        seen = self.ledger.view
        known = seen.topic(topic.id) if end_offset else ()
        if not known or known[-1].kind is Kind.ENDED or known[-1].end_offsets[number : number + 1] < (end_offset,):
            known = ()
        return PartitionSource(
            partition,
            number,
            directory,
            self.manifests.reading(topic.id, number),
            rows,
            known,
            is_stable=not seen.unstable.get(topic.id),
        )

    def reader(self, topic: Topic | str, number: int, *, end_offset: int = 0) -> BucketReader:
        """A reader of the partition; one a thread. With an `end_offset`, which was seen, it may see nothing newer.

        >>> for record in store.reader("orders", 0).records(0): ...
        """
        topic = self.topic(topic) if isinstance(topic, str) else topic
        return BucketReader(self.shelf, self.source(topic, number, end_offset=end_offset))

    def is_in_tail(self, topic: Topic, number: int, offset: int) -> bool:
        view = self.ledger.view
        return not view.unstable.get(topic.id) and view_tail(view.topic(topic.id), number, offset) is not None

    @contextlib.contextmanager
    def snapshot(
        self, topic: Topic, number: int, *, end_offset: int = 0, again: tuple[int, int] | None = None
    ) -> Iterator[BucketReader]:
        """A reader of exactly the objects that are named now, under a pin."""
        with self.pins.held():
            reader = self.reader(topic, number, end_offset=end_offset).frozen()
            with reader.copied(*again) if again is not None else contextlib.nullcontext(reader) as found:
                yield found

    def partition_state(self, topic: Topic, number: int) -> PartitionState:
        """What is listed, as the rooms above know it from a directory. Raises UnknownTopic, LedgerError."""
        return self.reader(topic, number).state()

    def partition_states(self, topic: Topic) -> list[PartitionState]:
        """The same of all partitions, some at once. Raises UnknownTopic, LedgerError."""
        from concurrent.futures import ThreadPoolExecutor

        ends = self.ends(topic).high_watermarks
        with ThreadPoolExecutor(min(_LOOKS_AT_ONCE, topic.partitions)) as pool:
            return list(pool.map(lambda n: self.reader(topic, n, end_offset=ends[n]).state(), range(topic.partitions)))

    def look(self, topic: Topic, number: int) -> PartitionLook:
        """The partition as planning sees it. Raises UnknownTopic, LedgerError."""
        source = self.source(topic, number)
        environment = MaintenanceEnvironment(self.objects, self.manifests, self.shelf)
        return look_at(environment, source, look(source), SealRules())

    def log_bytes(self, topic: Topic, number: int) -> int:
        """Size of the partition's batches, sealed or not. Reads the plans of what is not."""
        view = self.reader(topic, number).look().view
        plans = [self.shelf.plans.get(row.plan) for row in view.tail if row.plan is not None]
        tail = sum(piece.size_bytes for plan in plans for piece in plan.pieces(topic.id, number))
        return sum(segment.log_bytes for segment in view.segments) + tail

    def stamp(self, topic: Topic) -> tuple[int, ...]:
        """Changes with each commit to the topic, as the ledger was last seen; not with seals and passes."""
        newest = self.ledger.view.newest(topic.id)
        return () if newest is None else (newest.sequence,)

    def largest_timestamp_ms(self, topic: Topic, number: int) -> int:
        """The newest record's time, -1 when there is none."""
        found = self.reader(topic, number).offset_for_timestamp(MAX_TIMESTAMP_QUERY)
        return -1 if found is None else found.timestamp_ms

    def maintenance(self) -> BucketMaintenance:
        """Compaction, retention and what else keeps it small, as jobs and the daemon do them."""
        from logstore.bucket.maintenance import BucketMaintenance

        return BucketMaintenance(self)

    # --- records ----------------------------------------------------------------------------------------------------

    def commits(self) -> BucketCommitter:
        return self.committer

    @cached_property
    def committer(self) -> BucketCommitter:
        return BucketCommitter(self)

    def append(
        self, topic: str, records: Iterable[Record] | pa.Table | pa.RecordBatch, *, app: AppBatch | None = None
    ) -> Committed:
        """Append records, or an Arrow table of key, value, timestamp?, headers?, partition?; all or none of them.

        With `app` a batch that is in the ledger already is not written again. Raises InvalidRecord and its kind,
        UnknownTopic, ReplayMismatch, CommitConflict, StaleObjects: nothing is committed then; CommitUnknown.
        """
        from logstore.commit.produce import append_table, table_of

        if app is None:  # else the replay check looks: what is refused is refused by the settings of now
            self.ledger.refresh()
        table = records if hasattr(records, "to_batches") or hasattr(records, "schema") else table_of(records)
        return append_table(self.committer, topic, table, app=app)

    def open_transactions(self, topic: Topic, number: int, *, ends: TopicEnds | None = None) -> list[OpenTransaction]:
        """Transactions of an imported partition that have no end. Raises UnknownTopic, CorruptSnapshot."""
        from logstore.commit.transactions import open_transaction

        if not self.ledger.refresh().unstable.get(topic.id):
            return []
        partition, looked = topic.partition(number), self.reader(topic, number).look()
        producers = Producers(looked.manifest.producer_snapshot if looked.manifest else b"")
        ended = {each.producer_id for row in looked.view.tail for each in aborted_by(row, number)}
        return [
            open_transaction(partition, state)
            for state in producers.open_transactions()
            if state.producer_id not in ended
        ]


def _newest(view: LedgerView, topic: Topic) -> TopicRow:
    newest = view.newest(topic.id)
    if newest is None or newest.kind is Kind.ENDED:
        raise UnknownTopic(f"topic {topic.name} was deleted or created again meanwhile")
    return newest
