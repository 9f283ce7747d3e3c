"""Topics that come into a bucket from a directory: segments put, manifests made, one commit that makes them visible.

Before the first object of a topic its mark is put, `arriving/TOPICID`; the commit comes last. A sweep deletes what a
mark names when no commit did so in time: the mark is a week old, the ledger is fenced and does not know the topic, and
an arrival that is half as old is not committed any more. A topic that the ledger lost has no mark, so nothing of it
goes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logstore.bucket.definitions import commit_rows, project
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import check_age
from logstore.bucket.keys import ARRIVING, arriving_key, is_mark, new_nonce, quarantine_key, segment_key, topic_prefixes
from logstore.bucket.manifest import Manifest, Segment
from logstore.bucket.rows import Kind, LedgerView, TopicRow, Transactions
from logstore.bucket.segment_object import FileParts, LocalSegment, measured, put_segment
from logstore.directory.trees import remove_tree
from logstore.errors import ObjectStoreError, TopicExists
from logstore.files import OS_FILES, FileSystem, read_whole
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.snapshot import decode_snapshot
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, FileKind, file_name
from logstore.topics.moving import Moved
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

_STATE_FILE = "state"
_DELETED_AT_ONCE = 500


@contextlib.contextmanager
def bucket_arrivals(store: BucketStore) -> Iterator[BucketArrivals]:
    """What was begun and is not published is removed; what a killed process leaves, by the sweep."""
    store.check_writable()
    with tempfile.TemporaryDirectory(prefix="duramen-") as folder:
        arrivals = BucketArrivals(store, folder)
        try:
            yield arrivals
        except BaseException:
            if not arrivals.sent:  # else the commit may be there, or land later: the sweep knows then
                for topic in arrivals.topics:
                    with contextlib.suppress(ObjectStoreError):
                        _remove(store, topic.id)
            raise


@dataclass(slots=True)
class BucketArrivals:
    """Implements `Arrivals`."""

    store: BucketStore
    folder: str
    topics: list[Topic] = field(default_factory=list)
    #: since before the first name was made
    elapsed: Elapsed = field(default_factory=Elapsed)
    #: the commit may have been sent
    sent: bool = False
    _ends: dict[str, list[int]] = field(default_factory=dict)
    _unstable: dict[str, dict[int, int]] = field(default_factory=dict)

    @property
    def fs(self) -> FileSystem:
        return OS_FILES

    def begin(self, topic: Topic) -> None:
        self.topics.append(topic)
        self._ends[topic.id], self._unstable[topic.id] = [0] * topic.partitions, {}
        self.store.objects.create(arriving_key(topic.id), f"{topic.name} {new_nonce()}\n".encode())

    def _partition_folder(self, topic: Topic, number: int) -> str:
        return os.path.join(self.folder, f"{topic.id}-{number}")

    def directory(self, topic: Topic, number: int) -> str:
        directory = os.path.join(self._partition_folder(topic, number), "log")
        self.fs.mkdir(directory)
        return directory

    def state_path(self, topic: Topic, number: int) -> str:
        return os.path.join(self._partition_folder(topic, number), _STATE_FILE)

    def place(self, topic: Topic, number: int, moved: Moved) -> tuple[str, ...]:
        """Put the partition's objects, and its manifest."""
        directory = os.path.join(self._partition_folder(topic, number), "log")
        manifest = manifest_of(self.store, topic, number, moved, directory)
        if manifest is not None:
            self.store.manifests.change(topic.id, number, lambda seen, _, nonce: manifest if seen is None else None)
        self._ends[topic.id][number] = moved.high_watermark
        if moved.last_stable_offset < moved.high_watermark:
            self._unstable[topic.id][number] = moved.last_stable_offset
        kept = tuple(self._keep_aside(topic, number, path) for path in moved.aside if os.path.isfile(path))
        remove_tree(self.fs, self._partition_folder(topic, number))
        return kept

    def _keep_aside(self, topic: Topic, number: int, path: str) -> str:
        key = quarantine_key(topic.id, number, 0, new_nonce())
        size = self.fs.stat(path).size_bytes
        self.store.objects.put(key, FileParts(self.fs, path, size))
        return key

    def publish(self) -> None:
        """One commit for all topics; the marks go behind it."""
        rows = commit_rows(self.store, self._rows)
        for row in rows:
            assert row.definition is not None
            project(self.store, row.definition)
        with contextlib.suppress(ObjectStoreError):  # the sweep removes the mark of a topic that is there
            self.store.objects.delete([arriving_key(topic.id) for topic in self.topics])

    def _rows(self, view: LedgerView) -> tuple[TopicRow, ...]:
        check_age(self.elapsed.ms())
        for topic in self.topics:
            if view.named(topic.name) is not None:
                raise TopicExists(f"there is a topic {topic.name} already")
        self.sent = True
        return tuple(self._row(topic) for topic in self.topics)

    def _row(self, topic: Topic) -> TopicRow:
        ends = tuple(self._ends[topic.id])
        unstable = tuple(sorted(self._unstable[topic.id].items()))
        return TopicRow(
            topic.id,
            1,
            Kind.DEFINED,
            topic.config_version,
            ends,
            ends,
            self.store.clock.now_ms(),
            definition=topic,
            transactions=Transactions(unstable) if unstable else None,
        )


def manifest_of(store: BucketStore, topic: Topic, number: int, moved: Moved, directory: str) -> Manifest | None:
    """Put the segments of a folder; the manifest that names them. None: there is nothing to say."""
    state, end = moved.state, moved.high_watermark
    entries = [each for each in state.segments if each.base_offset < end]
    if not entries and not end:
        return None
    segments = []
    for at, entry in enumerate(entries):
        following = entries[at + 1].base_offset if at + 1 < len(entries) else end
        local = LocalSegment(OS_FILES, directory, entry.base_offset)
        key = segment_key(topic.id, number, entry.base_offset, new_nonce())
        segment = measured(local, Segment(key, entry.base_offset, following), store.limits)
        segments.append(put_segment(store.objects, local, segment))
    epochs = LeaderEpochs(OS_FILES, os.path.join(directory, LEADER_EPOCH_CHECKPOINT)).entries
    return Manifest(
        generation=1,
        nonce=new_nonce(),
        sealed_offset=end,
        segments=tuple(segments),
        log_start_offset=state.log_start_offset,
        first_dirty_offset=min(state.first_dirty_offset, end),
        dropped_tombstones=state.dropped_tombstones,
        next_horizon_ms=state.next_horizon_ms,
        producer_snapshot=_producer_snapshot(store, directory, end),
        leader_epochs=tuple((each.epoch, each.start_offset) for each in epochs),
        oldest_value_ms=state.oldest_value_ms,
        wanted_codec_id=state.wanted_codec_id,
        oldest_other_codec_ms=state.oldest_other_codec_ms,
        unstable_offset=moved.last_stable_offset if moved.last_stable_offset < end else None,
        transactions=state.transactions,
        clean_part_plain=state.clean_part_plain,
        thinned_offset=state.thinned_offset,
        thinned_base_offset=state.thinned_base_offset,
        losses=state.losses,
    )


def _producer_snapshot(store: BucketStore, directory: str, end: int) -> bytes:
    path = os.path.join(directory, file_name(end, FileKind.SNAPSHOT))
    if not OS_FILES.exists(path):
        return b""
    data = read_whole(OS_FILES, path, limit=store.limits.side_file_bytes)
    return data if decode_snapshot(data, file=path) else b""


def sweep_arrivals(store: BucketStore, *, now_ms: int, orphan_ms: int, fence: Callable[[], None]) -> list[str]:
    """Delete what arrivals left that no commit made visible, and marks that mean nothing; returns the keys.

    List the marks; fence the ledger; read it again; delete. `now_ms` and the marks' ages are the server's.
    """
    marks = {head.key.rpartition("/")[2]: head for head in store.objects.list(ARRIVING) if is_mark(head.key)}
    old = [topic_id for topic_id, head in marks.items() if now_ms - head.modified_ms >= orphan_ms]
    if not old:
        return []
    fence()
    known = {row.topic_id for row in store.ledger.refresh().rows}
    gone = [key for topic_id in old if topic_id not in known for key in _remove(store, topic_id)]
    done = [marks[topic_id].key for topic_id in old]
    store.objects.delete(done)
    return [*gone, *done]


def _remove(store: BucketStore, topic_id: str) -> list[str]:
    """Everything of a topic that no row names and none can name any more. Its mark stays: a late put may still land."""
    keys = [head.key for prefix in topic_prefixes(topic_id) for head in store.objects.list(prefix)]
    for first in range(0, len(keys), _DELETED_AT_ONCE):
        store.objects.delete(keys[first : first + _DELETED_AT_ONCE])
    return keys
