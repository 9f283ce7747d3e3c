"""Names of the files and directories of a Kafka log directory.

Owns every suffix, checkpoint name and marker name, and how a name is parsed and built. It touches no file
and never builds a path from a topic that has not passed the topic rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from logstore.errors import InvalidTopic
from logstore.limits import INT32_MAX, INT64_MAX
from logstore.topic import TopicPartition

# --- files of a log directory ------------------------------------------------------------------------------------

LOCK = ".lock"
META_PROPERTIES = "meta.properties"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
RECOVERY_POINT_CHECKPOINT = "recovery-point-offset-checkpoint"
LOG_START_OFFSET_CHECKPOINT = "log-start-offset-checkpoint"
HIGH_WATERMARK_CHECKPOINT = "replication-offset-checkpoint"
CLEANER_OFFSET_CHECKPOINT = "cleaner-offset-checkpoint"

#: Directories that are not partitions; an ordinary log loader skips them.
CLUSTER_METADATA_DIRECTORY = "__cluster_metadata-0"
REMOTE_LOG_INDEX_CACHE_DIRECTORY = "remote-log-index-cache"

#: A half-written replacement; it may be ignored or deleted.
TEMPORARY_SUFFIX = ".tmp"

# --- files of a partition directory ------------------------------------------------------------------------------

LEADER_EPOCH_CHECKPOINT = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"


class FileKind(Enum):
    """What a numbered file holds; the value is its suffix."""

    LOG = ".log"
    INDEX = ".index"
    TIME_INDEX = ".timeindex"
    TXN_INDEX = ".txnindex"
    SNAPSHOT = ".snapshot"


class Transient(Enum):
    """The stage of a replacement or deletion that a numbered file is in; the value follows the kind's suffix."""

    NONE = ""
    #: output of a compaction or split still being written
    CLEANED = ".cleaned"
    #: output complete, replacement of the old segments under way
    SWAP = ".swap"
    #: logically gone, unlink pending
    DELETED = ".deleted"


#: The files that make up one segment, in the order in which they are renamed.
SEGMENT_KINDS = (FileKind.LOG, FileKind.INDEX, FileKind.TIME_INDEX, FileKind.TXN_INDEX)

_NUMBERED = re.compile(
    r"([0-9]{20})(\.log|\.index|\.timeindex|\.txnindex|\.snapshot)(|\.cleaned|\.swap|\.deleted)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class NumberedFile:
    """The parts of a numbered file's name. For a snapshot the number is the offset it is valid up to, exclusive."""

    base_offset: int
    kind: FileKind
    transient: Transient = Transient.NONE

    @property
    def name(self) -> str:
        return file_name(self.base_offset, self.kind, self.transient)


def file_name(base_offset: int, kind: FileKind, transient: Transient = Transient.NONE) -> str:
    """`00000000000000000042.log`, with the transient suffix last."""
    if not 0 <= base_offset <= INT64_MAX:
        raise ValueError(f"{base_offset} is not an offset")
    return f"{base_offset:020d}{kind.value}{transient.value}"


def parse_file_name(name: str) -> NumberedFile | None:
    """The parts of a numbered file's name, or None for any other file."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    base_offset = int(match[1])
    if base_offset > INT64_MAX:
        return None
    return NumberedFile(base_offset, FileKind(match[2]), Transient(match[3]))


# --- partition directories ---------------------------------------------------------------------------------------


class DirectoryState(Enum):
    """The role of a partition directory; the value ends its name."""

    LIVE = ""
    #: waits for its deletion
    DELETE = "-delete"
    #: a copy being built while a replica moves between log directories
    FUTURE = "-future"
    #: belongs on another node; set aside, never deleted by itself
    STRAY = "-stray"


#: File systems take names of at most this many bytes; Kafka cuts the topic of a deleted or stray directory to fit.
DIRECTORY_NAME_CHARS_MAX = 255


@dataclass(frozen=True, slots=True)
class PartitionDirectory:
    """The parts of a partition directory's name; `unique_id` is empty for a live one."""

    partition: TopicPartition
    state: DirectoryState = DirectoryState.LIVE
    unique_id: str = ""


def partition_directory_name(
    partition: TopicPartition, state: DirectoryState = DirectoryState.LIVE, unique_id: str = ""
) -> str:
    """`topic-N`, or `topic-N.<id>-delete` and its like; `unique_id` is 32 hex digits and given for those only."""
    if state is DirectoryState.LIVE:
        return str(partition)
    if not re.fullmatch(r"[0-9a-f]{32}", unique_id):
        raise ValueError(f"{unique_id!r} is not 32 lower-case hex digits")
    tail = f"-{partition.partition}.{unique_id}{state.value}"
    topic = partition.topic
    if state is not DirectoryState.FUTURE:  # Kafka leaves -future names uncut
        topic = topic[: DIRECTORY_NAME_CHARS_MAX - len(tail)]
    return topic + tail


def parse_partition_directory(name: str) -> PartitionDirectory:
    """The parts of a partition directory's name. Raises InvalidTopic when it is not named like one.

    The topic of a `-delete` or `-stray` directory may have been cut when it was renamed.
    """
    # A -future name may exceed what a file system takes, but never by this much; it bounds the digits given to int().
    if len(name) > 2 * DIRECTORY_NAME_CHARS_MAX:
        raise InvalidTopic(f"a directory name of {len(name)} characters is not a partition's")
    state, unique_id, plain = DirectoryState.LIVE, "", name
    for candidate in (DirectoryState.DELETE, DirectoryState.FUTURE, DirectoryState.STRAY):
        if name.endswith(candidate.value):
            plain, dot, unique_id = name[: -len(candidate.value)].rpartition(".")
            if not dot or not unique_id:
                raise InvalidTopic(f"{name!r} is not named like a partition directory (topic-N.id{candidate.value})")
            state = candidate
    partition = TopicPartition.parse(plain)
    if partition.partition > INT32_MAX:
        raise InvalidTopic(f"{name!r} has a partition number above {INT32_MAX}")
    return PartitionDirectory(partition, state, unique_id)
