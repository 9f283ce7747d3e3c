"""Reading a partition in a bucket: the manifest first, then the ledger, then objects by name.

What this adds to `PartitionReader` is where the list comes from and how a segment is opened; scanning, searching by
time and decoding are the same. A *cursor* holds a position: an object that is gone means that the list moved on, so it
is read again; if a fresh one names it still, the log is damaged. A *snapshot* reads exactly what one pair of manifest
and ledger names, under a pin: an object that is gone is an error, since to go on at a position could bring deleted keys
back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from logstore.bucket.files import BlockCache, BytesFile, LazyFile, ObjectFile, SegmentFiles, as_missing_file
from logstore.bucket.local_copy import LocalCopy
from logstore.bucket.manifest import Manifest
from logstore.bucket.rows import ReaderView, TopicRow, view_partition, view_tail
from logstore.bucket.tail import Plans, TailCommit, TailFile, plan_key
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, SegmentEntry
from logstore.errors import LedgerError, SegmentsChanged
from logstore.files import File, FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import LogView, OnOutOfRange
from logstore.records.columns import DecodedColumns
from logstore.segment.names import FileKind, file_name
from logstore.segment.txn_index import AbortedTransaction, encode_entry
from logstore.topic import TopicPartition

_LOOKS_MAX = 20
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class Shelf:
    """What all readers of a store share in one process: objects are fetched once, plans decoded once."""

    cache: BlockCache
    plans: Plans
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class PartitionSource:
    """One partition, and how to look at it. `rows` gives those of its topic, read anew by each call."""

    partition: TopicPartition
    number: int
    #: how files are named in messages: the folder of the partition's segments
    directory: str
    manifest: Callable[[], Manifest | None]
    rows: Callable[[], Sequence[TopicRow]]
    #: rows that were read before; they do for a reader that wants nothing newer, unless the manifest is ahead of them
    known: Sequence[TopicRow] = ()
    #: no transaction of the topic is open, so what is known says where its readers stop
    is_stable: bool = False

    def rows_for(self, manifest: Manifest | None) -> Sequence[TopicRow]:
        """Rows that are not behind a manifest that was just read."""
        if self.known:
            end = self.known[-1].end_offsets[self.number]
            if manifest is None or not (manifest.ended or max(manifest.sealed_offset, manifest.log_start_offset) > end):
                return self.known
        return self.rows()


@dataclass(frozen=True, slots=True)
class Looked:
    """A partition at one moment."""

    manifest: Manifest | None
    view: ReaderView
    #: the topic's rows that were not pruned
    rows: tuple[TopicRow, ...]

    @property
    def leader_epoch(self) -> int:
        return leader_epoch(self.manifest)

    def state(self) -> PartitionState:
        """The same as the rooms above know it from a directory: a tail is an active segment."""
        manifest, view = self.manifest, self.view
        entries = [SegmentEntry(s.base_offset, s.log_bytes, s.largest_timestamp_ms) for s in view.segments]
        dirty = manifest.first_dirty_offset if manifest else 0
        return PartitionState(
            generation=manifest.generation if manifest else 0,
            log_start_offset=view.log_start_offset,
            first_dirty_offset=dirty,
            dropped_tombstones=manifest.dropped_tombstones if manifest else 0,
            segments=(*entries, SegmentEntry(view.sealed_offset, 0, -1)),
            producers=bool(manifest and manifest.producer_snapshot),
            next_horizon_ms=manifest.next_horizon_ms if manifest else None,
            transactions=bool(manifest and manifest.transactions),
            thinned_offset=max(dirty, manifest.thinned_offset) if manifest else 0,
            losses=manifest.losses if manifest else (),
            thinned_base_offset=manifest.thinned_base_offset if manifest else 0,
            oldest_value_ms=manifest.oldest_value_ms if manifest else None,
            wanted_codec_id=manifest.wanted_codec_id if manifest else None,
            oldest_other_codec_ms=manifest.oldest_other_codec_ms if manifest else -1,
            clean_part_plain=bool(manifest and manifest.clean_part_plain),
        )


def aborted_by(row: TopicRow, number: int) -> list[AbortedTransaction]:
    """The entries of the transaction index that a row makes in a partition."""
    ended = row.transactions.aborted if row.transactions is not None else ()
    return [
        AbortedTransaction(each.producer_id, each.first_offset, row.base_offsets[number], each.last_stable_offset)
        for each in ended
        if each.partition == number
    ]


def leader_epoch(manifest: Manifest | None) -> int:
    return manifest.leader_epochs[-1][0] if manifest and manifest.leader_epochs else 0


def look(source: PartitionSource) -> Looked:
    """The partition as of now: the manifest, then the rows. Raises LedgerError."""
    for attempt in range(_LOOKS_MAX):
        if attempt:
            time.sleep(_LOOK_AGAIN_S)
        manifest = source.manifest()
        rows = tuple(source.rows() if attempt else source.rows_for(manifest))
        view = view_partition(manifest, rows, source.number)
        if view is not None:
            return Looked(manifest, view, rows)
    raise LedgerError(
        "the ledger lacks rows that no manifest has sealed",
        partition=source.partition,
        hint="Run `duramen verify`",
    )


class BucketReader(PartitionReader):
    """Not for several threads at once; make one a thread."""

    def __init__(
        self,
        shelf: Shelf,
        source: PartitionSource,
        *,
        snapshot: Looked | None = None,
        copy: LocalCopy | None = None,
    ) -> None:
        """With a `snapshot` nothing else is read; whoever takes one holds a pin. A `copy` may have its bytes."""
        super().__init__(
            PartitionPlace(partition=source.partition, directory=source.directory, state_path=source.directory),
            high_watermark=self._end,
            limits=shelf.limits,
        )
        self._shelf = shelf
        self._source = source
        self._snapshot = snapshot
        self._copy = copy
        #: the object behind each base offset of the last view
        self._names: dict[int, str] = {}
        #: where a cursor begins that has not looked yet
        self._cursor: int | None = None

    def look(self) -> Looked:
        return self._snapshot or look(self._source)

    def frozen(self) -> BucketReader:
        """A reader of the partition as it is now; it fails where what it reads was deleted meanwhile."""
        return BucketReader(self._shelf, self._source, snapshot=self.look(), copy=self._copy)

    @contextmanager
    def copied(self, start: int, end: int) -> Iterator[BucketReader]:
        """The same for the offsets [start, end), which are read more than once: fetched ahead, and kept meanwhile."""
        looked = self.look()
        copy = self._shelf.cache.local_copy(looked.view.segments, start, end)
        try:
            yield BucketReader(self._shelf, self._source, snapshot=looked, copy=copy)
        finally:
            if copy is not None:
                copy.close()

    def _end(self) -> int:
        return self.look().view.high_watermark

    def state(self) -> PartitionState:
        return self.look().state()

    @property
    def files(self) -> FileSystem:
        """The files of the last view, for reading."""
        return self._fs

    def gone(self, error: FileNotFoundError) -> str:
        if self._snapshot is not None:
            raise SegmentsChanged(
                "what is read was deleted meanwhile", file=error.filename, hint="Begin again; nothing of it counts"
            ) from error
        return super().gone(error)

    def _list_is_current(self) -> bool:
        """What was read was whole: objects do not change, so only one that is gone makes a list too old."""
        return True

    def view(self, *, committed: bool = False) -> LogView:
        """The log as of now; with `committed` up to the last stable offset."""
        looked = self._by_rows() or self.look()
        found = looked.view
        rows = {row.base_offsets[self._source.number]: row for row in found.tail}
        names = {segment.base_offset: segment.key for segment in found.segments}
        names |= {base: plan_key(row) for base, row in rows.items()} or {found.sealed_offset: ""}
        for base in [base for base in self._open if names.get(base) != self._names.get(base)]:
            del self._open[base]
        self._names = names
        self._fs = SegmentFiles(
            self._shelf.cache, self._directory, found.segments, self._tail(looked, rows), self._copy
        )
        self._sizes = {segment.base_offset: segment.log_bytes for segment in found.segments}
        timestamps = {segment.base_offset: segment.largest_timestamp_ms for segment in found.segments}
        end = found.last_stable_offset if committed else found.high_watermark
        return LogView(
            self.partition,
            tuple(names),
            self._segment,
            found.log_start_offset,
            end,
            found.high_watermark,
            timestamps,
        )

    def columns(
        self,
        start: int,
        end: int | None = None,
        *,
        committed: bool = False,
        headers: bool = True,
        on_out_of_range: OnOutOfRange = OnOutOfRange.FAIL,
    ) -> Iterator[DecodedColumns]:
        """The same. A cursor in the tail that goes on takes the rows that are known for it; where one of their objects
        is gone or damaged, the manifest says what became of it.
        """
        self._cursor = start if self.goes_on else None
        yield from super().columns(start, end, committed=committed, headers=headers, on_out_of_range=on_out_of_range)

    def _by_rows(self) -> Looked | None:
        """What a cursor's first look needs, where that takes no request."""
        cursor, self._cursor = self._cursor, None
        if cursor is None or self._snapshot is not None or not (self._source.known and self._source.is_stable):
            return None
        view = view_tail(self._source.known, self._source.number, cursor)
        return None if view is None else Looked(None, view, tuple(self._source.known))

    def _tail(self, looked: Looked, rows: Mapping[int, TopicRow]) -> dict[str, LazyFile]:
        """A segment for each commit; without one an empty segment, since a log always ends with an active one."""
        if not rows:
            path = self._log_path(looked.view.sealed_offset)
            return {path: LazyFile(lambda: ObjectFile(self._shelf.cache, "", 0, (0, 0), path), 0)}
        files = {
            self._log_path(base): LazyFile(partial(self._open_commit, row, looked.leader_epoch), row.clock_ms)
            for base, row in rows.items()
        }
        for base, row in rows.items():
            aborted = b"".join(map(encode_entry, aborted_by(row, self._source.number)))
            if aborted:
                path = os.path.join(self._directory, file_name(base, FileKind.TXN_INDEX))
                files[path] = LazyFile(partial(BytesFile, path, aborted), row.clock_ms)
        return files

    def _open_commit(self, row: TopicRow, epoch: int) -> File:
        number = self._source.number
        path = self._log_path(row.base_offsets[number])
        assert row.plan is not None
        with as_missing_file(path):
            plan = self._shelf.plans.get(row.plan)
        return TailFile(self._shelf.cache, TailCommit.of(plan, row, number, epoch), path)

    def _log_path(self, base: int) -> str:
        return os.path.join(self._directory, file_name(base, FileKind.LOG))
