"""Where in a store a key may still be: segments, files about to be deleted, staging, quarantine; and when each goes.

Reads every byte of the topic, whatever the state says is current, and changes nothing. What cannot be read counts as a
place that may hold the key. Copies outside of the store (backups, exports, what consumers made of it) are not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow.compute as pc

from logstore.cleaner.filter import ABORTED, TOMBSTONE
from logstore.cleaner.versions import Order
from logstore.commit.staged_reader import StagedReader
from logstore.compaction.failures import KIND, set_aside_now
from logstore.compaction.key_scan import Found, Hit, KeyScan
from logstore.compaction.planning import PartitionPlan, PlanOptions, plan_partition
from logstore.config import LogConfig
from logstore.directory.locks import FileLock
from logstore.directory.state import PartitionState
from logstore.errors import DuramenError
from logstore.files import read_whole
from logstore.ledger import RunRow
from logstore.ledger.rows import DONE
from logstore.partition.quarantine import QUARANTINE
from logstore.records.partitioner import partition_for_key
from logstore.restore.lookup import latest_in_partition
from logstore.segment.names import FileKind, Transient, parse_file_name
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic

SEGMENT, DELETED, LEFTOVER = "segment", "deleted", "leftover"
STAGING, RUN, QUARANTINED = "staging", "run", "quarantine"
_LOOKS_MAX = 20
_OWNER_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """A file that holds records of a key, or may."""

    kind: str
    file: str
    partition: int | None
    #: 0 with `unreadable`
    records: int
    offsets: tuple[int, int] | None
    holds: str
    #: when it goes, in words, and the earliest moment where that is known
    goes: str
    goes_ms: int | None = None
    unreadable: bool = False

    def document(self) -> dict[str, object]:
        """The place as JSON, as commands and the console show it."""
        first, last = self.offsets or (None, None)
        return {
            "kind": self.kind,
            "file": self.file,
            "partition": self.partition,
            "records": self.records,
            "first_offset": first,
            "last_offset": last,
            "holds": self.holds,
            "goes": self.goes,
            "goes_ms": self.goes_ms,
            "unreadable": self.unreadable,
        }


@dataclass(slots=True)
class Erasure:
    """What was found of one key. Once nothing holds it: the run that must have removed it, if it ever was here."""

    key: bytes
    places: list[Place] = field(default_factory=list)
    removed_by: RunRow | None = None
    #: offsets below this went by retention or delete-records, per partition, where any did
    log_starts: dict[int, int] = field(default_factory=dict)

    @property
    def erased(self) -> bool:
        return not self.places


def find_keys(
    store: OpenStore,
    topic: Topic,
    keys: Sequence[bytes],
    *,
    now_ms: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Erasure]:
    """Look for the keys in everything the store has of the topic. Raises UnknownTopic, CorruptState, LedgerError."""
    search = _Search(store, topic, keys, now_ms, progress)
    for number in range(topic.partitions):
        search.partition(number)
    search.staging()
    return search.result()


class _Search:
    def __init__(
        self, store: OpenStore, topic: Topic, keys: Sequence[bytes], now_ms: int, progress: Callable[[int], None]
    ) -> None:
        self._store = store
        self._fs = store.fs
        self._topic = topic
        self._keys = keys
        self._scan = KeyScan(keys, store.limits, progress)
        self._now_ms = now_ms
        self._config = store.log_config(topic)
        self._ledger = store.ledger() if store.has_ledger else None
        self._planning = PlanOptions(now_ms, failures=set_aside_now(store, now_ms), flushed=True)
        self._found = [Erasure(key) for key in keys]

    # --- the log ----------------------------------------------------------------------------------------------------

    def partition(self, number: int) -> None:
        """Every file in the partition's directory; again from the start when segments changed meanwhile."""
        directory = self._store.layout.partition(self._topic.partition(number))
        if not self._fs.exists(directory):
            return
        files: dict[str, Found] = {}
        for _ in range(_LOOKS_MAX):
            generation = self._store.partition_state(self._topic, number).generation
            with contextlib.suppress(FileNotFoundError):
                files = {
                    name: self._scan.file(self._fs, os.path.join(directory, name))
                    for name in sorted(self._fs.listdir(directory))
                    if (parsed := parse_file_name(name)) is not None and parsed.kind is FileKind.LOG
                }
                if self._store.partition_state(self._topic, number).generation == generation:
                    break
        self._judge_partition(number, directory, files)
        self._quarantine(number, os.path.join(directory, QUARANTINE))

    def _judge_partition(self, number: int, directory: str, files: dict[str, Found]) -> None:
        state = self._store.partition_state(self._topic, number)
        plan = plan_partition(self._store, self._topic, number, self._planning)
        listed = {entry.base_offset: entry for entry in state.segments}
        high_watermark = self._store.high_watermark(self._topic, number)
        latest = [-1] * len(self._keys)
        for name, found in files.items():
            parsed = parse_file_name(name)
            assert parsed is not None
            if parsed.transient is Transient.NONE and parsed.base_offset in listed:
                for hit in found.hits:
                    latest[hit.key] = max(latest[hit.key], hit.offset)
        if state.transactions or not Order.of(self._config).by_offset:
            # The last record need not be the key's value: it may be aborted, or older by its version.
            for at, key in enumerate(self._keys):
                if latest[at] >= 0:
                    record = latest_in_partition(self._store, self._topic, number, key)
                    latest[at] = -1 if record is None else record.offset
        for name, found in files.items():
            parsed = parse_file_name(name)
            assert parsed is not None
            path = os.path.join(directory, name)
            if parsed.transient is Transient.DELETED:
                ctime_ms = self._ctime_ms(path)
                if ctime_ms is None:
                    continue  # swept meanwhile
                goes_ms = ctime_ms + self._config.file_delete_delay_ms
                self._add(DELETED, path, number, found, "swept once file.delete.delay.ms has passed", goes_ms)
            elif parsed.transient is Transient.NONE and parsed.base_offset in listed:
                active = parsed.base_offset == state.segments[-1].base_offset
                if active and found.last_offset >= high_watermark - 1:
                    found.unreadable = None  # the end of an append under way, which staging has too
                self._add_segment(path, number, found, latest, state, plan, active)
            else:
                self._add(LEFTOVER, path, number, found, "removed by the next compaction, or by `duramen recover`")

    def _ctime_ms(self, path: str) -> int | None:
        try:
            return self._fs.stat(path).ctime_ms
        except FileNotFoundError:
            return None

    def _add_segment(
        self,
        path: str,
        number: int,
        found: Found,
        latest: Sequence[int],
        state: PartitionState,
        plan: PartitionPlan,
        active: bool,
    ) -> None:
        for key in range(len(self._keys)):
            hits = [hit for hit in found.hits if hit.key == key]
            if not hits:
                continue
            # The record that counts leaves last; it need not be the last in the file.
            last = max(hits, key=lambda hit: (hit.offset == latest[key], hit.offset))
            superseded = sum(hit.offset != latest[key] for hit in hits)
            parts = [f"{superseded} superseded record{'s' * (superseded > 1)}"] if superseded else []
            if last.offset == latest[key]:
                parts.append("its tombstone" if last.tombstone else "its value")
            goes, goes_ms = leaves(self._config, plan, state, last, last.offset == latest[key], active, self._now_ms)
            self._place(SEGMENT, path, number, key, hits, ", ".join(parts), goes, goes_ms)
        self._add_unreadable(SEGMENT, path, number, found, "a compaction refuses it; see `duramen verify`")

    def _quarantine(self, number: int, root: str) -> None:
        for path in self._walk(root):
            if ".log" in os.path.basename(path):
                folder = os.path.dirname(path)
                self._add(
                    QUARANTINED,
                    path,
                    number,
                    self._scan.file(self._fs, path),
                    f"never by itself: look at it, then remove {folder}",
                )

    # --- staging ----------------------------------------------------------------------------------------------------

    def staging(self) -> None:
        """Plans and runs of this topic, and everything else in `staging/`."""
        for name in sorted(self._fs.listdir(self._store.layout.staging)):
            path = os.path.join(self._store.layout.staging, name)
            owner, _, kind = name.partition("-")
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if kind == "plan":
                    self._plan(owner, path)
                elif kind == "run":
                    self._run(path)
                else:
                    self._other(kind, path)

    def _plan(self, plan_id: str, folder: str) -> None:
        rows = [] if self._ledger is None else self._ledger.find_plan(plan_id)
        committed = any(not row.void for row in rows)
        goes = (
            "with the next flush of the topic, as `duramen compact` and `duramen schedule` do"
            if committed
            else "not committed: when its writer commits and flushes it, or with the next sweep"
        )
        for name in sorted(self._fs.listdir(folder)):
            if not name.endswith(".batches"):
                continue
            path = os.path.join(folder, name)
            try:
                reader = StagedReader(self._fs, path, topic_id=self._topic.id, limits=self._store.limits)
            except DuramenError as error:
                self._add(STAGING, path, None, Found(unreadable=str(error)), goes)
                continue
            try:
                for number in range(self._topic.partitions):
                    self._add(STAGING, path, number, self._scan.chunks(reader.chunks(number)), goes)
            finally:
                reader.release()

    def _run(self, folder: str) -> None:
        owner = os.path.join(folder, "owner")
        partition = self._run_of(owner)
        if partition is not None and partition not in {str(each) for each in self._topic.partition_list()}:
            return
        lock = FileLock(self._fs, owner)
        left = self._fs.exists(owner) and lock.try_acquire()
        lock.release()
        goes = (
            "left by a killed compaction: with the next one"
            if left
            else "a compaction is at work: it is swapped in or removed"
        )
        for path in self._walk(folder):
            if ".log" in os.path.basename(path):
                number = None if partition is None else int(partition.rpartition("-")[2])
                self._add(RUN, path, number, self._scan.file(self._fs, path), goes)

    def _run_of(self, owner: str) -> str | None:
        """The partition a run's folder is for; None when it does not say."""
        try:
            return str(json.loads(read_whole(self._fs, owner, limit=_OWNER_BYTES_MAX))["partition"])
        except (OSError, ValueError, KeyError, TypeError, DuramenError):
            return None

    def _other(self, kind: str, folder: str) -> None:
        goes = "never by itself: look at it, then remove it" if kind == "stray" else "with the next `duramen retain`"
        for path in self._walk(folder):
            if ".log" in os.path.basename(path):
                self._add(LEFTOVER, path, None, self._scan.file(self._fs, path), goes)

    def _walk(self, folder: str) -> Iterator[str]:
        try:
            names = sorted(self._fs.listdir(folder))
        except FileNotFoundError:
            return
        except NotADirectoryError:
            yield folder
            return
        for name in names:
            yield from self._walk(os.path.join(folder, name))

    # --- the answer -------------------------------------------------------------------------------------------------

    def _add(
        self, kind: str, path: str, number: int | None, found: Found, goes: str, goes_ms: int | None = None
    ) -> None:
        for key in range(len(self._keys)):
            hits = [hit for hit in found.hits if hit.key == key]
            if hits:
                tombstones = sum(hit.tombstone for hit in hits)
                counts = ((len(hits) - tombstones, "value"), (tombstones, "tombstone"))
                holds = ", ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counts if count)
                self._place(kind, path, number, key, hits, holds, goes, goes_ms)
        self._add_unreadable(kind, path, number, found, goes, goes_ms)

    def _place(
        self,
        kind: str,
        path: str,
        number: int | None,
        key: int,
        hits: Sequence[Hit],
        holds: str,
        goes: str,
        goes_ms: int | None,
    ) -> None:
        offsets = (min(hit.offset for hit in hits), max(hit.offset for hit in hits))
        place = Place(kind, path, number, len(hits), None if kind == STAGING else offsets, holds, goes, goes_ms)
        self._found[key].places.append(place)

    def _add_unreadable(
        self, kind: str, path: str, number: int | None, found: Found, goes: str, goes_ms: int | None = None
    ) -> None:
        if found.unreadable is not None:
            holds = f"cannot be read, so it may hold it: {found.unreadable}"
            for erasure in self._found:
                erasure.places.append(Place(kind, path, number, 0, None, holds, goes, goes_ms, unreadable=True))

    def result(self) -> list[Erasure]:
        topic = self._topic
        done = (pc.field("topic_id") == topic.id) & (pc.field("kind") == KIND) & (pc.field("result") == DONE)
        runs = [] if self._ledger is None else self._ledger.runs(done)
        for erasure in self._found:
            if not erasure.erased:
                continue
            numbers = (
                [partition_for_key(erasure.key, topic.partitions)] if topic.keyed else list(range(topic.partitions))
            )
            for run in runs:  # oldest first: the last run that removed keys for good must have removed it
                mine = run.kind == KIND and run.topic_id == topic.id and run.partition in numbers
                if mine and run.result == DONE and (run.removed.get(TOMBSTONE) or run.removed.get(ABORTED)):
                    erasure.removed_by = run
            for number in numbers:
                start = self._store.partition_state(topic, number).log_start_offset
                if start > 0:
                    erasure.log_starts[number] = start
        return self._found


def leaves(
    config: LogConfig, plan: PartitionPlan, state: PartitionState, last: Hit, is_latest: bool, active: bool, now_ms: int
) -> tuple[str, int | None]:
    """When the newest of a file's records of the key leaves the log."""
    if last.offset < state.log_start_offset:
        return "below the log start: with the next retention", now_ms
    if not config.compact:
        if config.delete and config.retention_ms >= 0:
            newest = max((s.largest_timestamp_ms for s in state.segments if s.base_offset <= last.offset), default=-1)
            return "the topic is not compacted: when retention.ms takes its segment", (
                newest + config.retention_ms if newest >= 0 and not active else None
            )
        return "never: the topic is neither compacted nor kept for a limited time", None
    if is_latest and not last.tombstone:
        return "stays: it is the key's value; write a null value to delete it", None
    if is_latest:
        if last.horizon_ms is not None:
            return "with the first compaction after its delete horizon", last.horizon_ms
        return f"delete.retention.ms ({config.delete_retention_ms} ms) after the compaction that first meets it", None
    if plan.paused:
        return "compaction is paused: not before `duramen resume`", None
    if last.offset >= plan.cleanable.first_uncleanable_offset:
        held = "its segment is still written to" if active else "it is held back (`duramen explain` says why)"
        return f"with a compaction later on: {held}", plan.cleanable.next_ms
    if plan.is_due:
        return "with the next compaction, which is due", now_ms
    return f"with the next compaction ({plan.why})", plan.cleanable.next_ms
