"""The topics of a cluster and their settings, from a KRaft metadata log (`__cluster_metadata-0`), which is only read.

The newest snapshot (`OFFSET-EPOCH.checkpoint`) holds everything up to its offset; the log's records after it are
replayed, metadata transactions included. Both are ordinary record batches. A record's value is one message:

    value          := frameVersion:uvarint apiKey:uvarint version:uvarint message
    TopicRecord    := name:string topicId:uuid tags                                               apiKey 2
    PartitionRecord:= partitionId:4 topicId:uuid …                                                apiKey 3
    ConfigRecord   := resourceType:1 resourceName:string name:string value:string? tags           apiKey 4
    RemoveTopicRecord := topicId:uuid tags                                                        apiKey 9
    BeginTransaction, EndTransaction, AbortTransaction                                            apiKey 23, 24, 25
    string         := (length + 1):uvarint bytes; 0 is null

Other records are skipped. Knows nothing of stores; what the settings mean is the caller's.
"""

from __future__ import annotations

import os
import re
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from logstore.errors import CorruptBatch, UnsupportedFormat
from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.records.decoder import Decoder
from logstore.segment.batches import read_batches
from logstore.segment.names import FileKind, Transient, file_name, parse_file_name
from logstore.topic import format_uuid

FRAME_VERSION = 1
_TOPIC, _PARTITION, _CONFIG, _REMOVE_TOPIC, _BEGIN, _END, _ABORT = 2, 3, 4, 9, 23, 24, 25
#: resources a ConfigRecord can be about
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
#: the broker that all brokers take their dynamic defaults from
CLUSTER_DEFAULT = ""

_SNAPSHOT = re.compile(r"([0-9]{20})-([0-9]{10})\.checkpoint")
#: the most topics, partitions and settings of a cluster; a log with more is refused
_FACTS_MAX = 5_000_000


@dataclass(frozen=True, slots=True)
class ClusterTopic:
    name: str
    topic_id: str
    partitions: int
    configs: dict[str, str]


@dataclass(slots=True)
class ClusterMetadata:
    """What the log says as of its end."""

    #: ids by name
    topics: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, int] = field(default_factory=dict)
    #: settings by resource: (type, name)
    configs: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    records: int = 0

    def topic(self, name: str) -> ClusterTopic | None:
        topic_id = self.topics.get(name)
        if topic_id is None:
            return None
        configs = self.configs.get((TOPIC_RESOURCE, name), {})
        return ClusterTopic(name, topic_id, self.partitions.get(topic_id, 0), dict(configs))

    def broker_settings(self, node_id: int | None) -> dict[str, str]:
        """Dynamic settings in force on a broker: the cluster's defaults, and its own over them."""
        own = {} if node_id is None else self.configs.get((BROKER_RESOURCE, str(node_id)), {})
        return {**self.configs.get((BROKER_RESOURCE, CLUSTER_DEFAULT), {}), **own}


def read_cluster_metadata(fs: FileSystem, directory: str, *, limits: Limits) -> ClusterMetadata:
    """Replay the log in `directory`. Raises CorruptBatch, UnsupportedFormat and others of damage."""
    names = fs.listdir(directory)
    snapshots = sorted((int(match[1]), int(match[2]), name) for name in names if (match := _SNAPSHOT.fullmatch(name)))
    replay = _Replay()
    start = 0
    if snapshots:
        start, _, name = snapshots[-1]
        for _, value in _values(fs, os.path.join(directory, name), limits):
            replay.take(value)
    parsed = [found for name in names if (found := parse_file_name(name)) is not None]
    bases = sorted(f.base_offset for f in parsed if f.kind is FileKind.LOG and f.transient is Transient.NONE)
    if not snapshots and not bases:
        raise CorruptBatch("a metadata log without segments and snapshots", file=directory)
    if bases and bases[0] > start:
        raise CorruptBatch(f"the metadata log begins at {bases[0]}, its snapshot ends at {start}", file=directory)
    for at, base in enumerate(bases):
        if at + 1 < len(bases) and bases[at + 1] <= start:
            continue
        for offset, value in _values(fs, os.path.join(directory, file_name(base, FileKind.LOG)), limits):
            if offset >= start:
                replay.take(value)
    return replay.metadata


def _values(fs: FileSystem, path: str, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Offset and value of each record; control records (leader changes, snapshot headers) are skipped.

    Damage is an error also at the end of the log: a setting that keeps records may come after it.
    """
    decoder = Decoder(limits=limits, headers=False)
    file = fs.open(path)
    try:
        for chunk in read_batches(file, 0, file.size(), limits=limits):
            for columns in decoder.columns(chunk.data, chunk.table, file=path, base_position=chunk.position):
                for record in columns.records():
                    yield record.offset, record.value or b""
    finally:
        file.close()


class _Replay:
    """Applies messages in order; those of a metadata transaction when it ends."""

    def __init__(self) -> None:
        self.metadata = ClusterMetadata()
        self._pending: list[bytes] | None = None
        self._facts = 0

    def take(self, value: bytes) -> None:
        if not value:
            return
        reader = _Reader(value)
        frame, key, version = reader.uvarint(), reader.uvarint(), reader.uvarint()
        if frame != FRAME_VERSION:
            raise UnsupportedFormat(f"a metadata record of frame version {frame}; this release knows {FRAME_VERSION}")
        if key == _BEGIN:
            self._pending = []
        elif key == _ABORT:
            self._pending = None
        elif key == _END:
            pending, self._pending = self._pending or [], None
            for each in pending:
                self._apply(each)
        elif self._pending is not None:
            self._count()
            self._pending.append(value)
        else:
            self._message(key, version, reader)

    def _apply(self, value: bytes) -> None:
        reader = _Reader(value)
        reader.uvarint()
        key, version = reader.uvarint(), reader.uvarint()
        self._message(key, version, reader)

    def _count(self) -> None:
        self._facts += 1
        if self._facts > _FACTS_MAX:
            raise UnsupportedFormat(f"a metadata log of more than {_FACTS_MAX} topics, partitions and settings")

    def _message(self, key: int, version: int, reader: _Reader) -> None:
        if key in (_TOPIC, _CONFIG, _REMOVE_TOPIC) and version != 0:
            raise UnsupportedFormat(f"version {version} of metadata record {key}; this release knows 0")
        found = self.metadata
        found.records += 1
        if key == _TOPIC:
            self._count()
            name, topic_id = reader.string() or "", reader.uuid()
            found.topics[name], found.names[topic_id] = topic_id, name
        elif key == _PARTITION:
            number, topic_id = reader.int32(), reader.uuid()
            found.partitions[topic_id] = max(found.partitions.get(topic_id, 0), number + 1)
        elif key == _CONFIG:
            self._count()
            resource = (reader.int8(), reader.string() or "")
            name, setting = reader.string() or "", reader.string()
            settings = found.configs.setdefault(resource, {})
            if setting is None:
                settings.pop(name, None)
            else:
                settings[name] = setting
        elif key == _REMOVE_TOPIC:
            name = found.names.pop(reader.uuid(), "")
            found.partitions.pop(found.topics.pop(name, ""), None)
            found.configs.pop((TOPIC_RESOURCE, name), None)


class _Reader:
    """Kafka's flexible encoding, as far as it is needed. Raises CorruptBatch for what does not follow it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if size < 0 or len(part) < size:
            raise CorruptBatch("a metadata record ends too early")
        self._at += size
        return part

    def uvarint(self) -> int:
        number = 0
        for shift in range(0, 35, 7):
            (byte,) = self._take(1)
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise CorruptBatch("a number of a metadata record is too long")

    def int8(self) -> int:
        return int(struct.unpack(">b", self._take(1))[0])

    def int32(self) -> int:
        return int(struct.unpack(">i", self._take(4))[0])

    def uuid(self) -> str:
        return format_uuid(uuid.UUID(bytes=self._take(16)))

    def string(self) -> str | None:
        size = self.uvarint()
        if size == 0:
            return None
        try:
            return self._take(size - 1).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptBatch("a text of a metadata record is not UTF-8") from error
