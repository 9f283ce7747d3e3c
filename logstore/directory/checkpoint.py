"""The small text files of a log directory: offset checkpoints, partition.metadata, meta.properties, the clean-shutdown
marker.

Owns their grammar in both directions. Every write replaces the whole file durably (temporary file, fsync, rename,
directory fsync). An absent file is no error: each reader says what absence means. It never decides what a checkpoint's
numbers mean for a log.

    frame     := version NL count NL entry*         entry := field (SP field)* NL
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from logstore.errors import CorruptCheckpoint, InvalidTopic
from logstore.files import FileSystem, read_whole, replace_file
from logstore.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX, Limits
from logstore.topic import TopicPartition, check_topic_name, format_uuid, parse_uuid

OFFSET_CHECKPOINT_VERSION = 0
#: What one parsed entry is assumed to take in memory, so that a file within `side_file_bytes` stays within it parsed.
ENTRY_MEMORY_BYTES = 256

_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
# Java's \s; a tab or a run of blanks separates as well as one blank
_BLANKS = re.compile(r"[ \t\x0b\f]+")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a text file, with its place, for error messages."""

    file: str
    number: int
    position: int
    text: str

    def corrupt(self, what: str, *, hint: str | None = None) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"line {self.number}: {what}", file=self.file, position=self.position, hint=hint)

    def integer(self, text: str, name: str, low: int, high: int) -> int:
        if not _INTEGER.fullmatch(text):
            raise self.corrupt(f"{name} is not a number: {_shown(text)}")
        value = int(text)
        if not low <= value <= high:
            raise self.corrupt(f"{name} {value} is outside {low}..{high}")
        return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _read(fs: FileSystem, path: str, limit_bytes: int) -> bytes | None:
    """All bytes, None when the file is absent."""
    try:
        return read_whole(fs, path, limit=limit_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptCheckpoint(
                f"larger than the limit of {limit_bytes} bytes",
                file=path,
                hint="Raise limits.side_file_bytes if the file is really meant to be this large",
            ) from error
        raise


def _lines(path: str, data: bytes) -> Iterator[Line]:
    """The lines of `data` one by one, so that a file of nothing but newlines costs nothing."""
    position, number = 0, 1
    while position < len(data):
        end = data.find(b"\n", position)
        raw = data[position : len(data) if end < 0 else end]
        try:
            text = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"line {number}: not UTF-8", file=path, position=position) from error
        yield Line(path, number, position, text)
        position = len(data) if end < 0 else end + 1
        number += 1


# --- the frame ---------------------------------------------------------------------------------------------------


def read_frame(
    fs: FileSystem, path: str, *, version: int, fields: int, limits: Limits = DEFAULT_LIMITS
) -> Iterator[tuple[Line, list[str]]]:
    """The entries of a checkpoint, each with the line it came from. No entries when the file is absent or empty.

    Raises CorruptCheckpoint for anything that is not the frame, the last check (the count) after the last entry.
    """
    data = _read(fs, path, limits.side_file_bytes)
    if not data:
        return
    lines = _lines(path, data)
    head = next(lines)
    found = head.integer(head.text, "version", -INT32_MAX, INT32_MAX)
    if found != version:
        raise head.corrupt(f"version {found} where {version} was expected", hint="A newer release may have written it")
    head = next(lines, Line(path, 2, len(data), ""))
    expected = head.integer(head.text, "entry count", 0, INT32_MAX)
    entries_max = limits.side_file_bytes // ENTRY_MEMORY_BYTES
    if expected > entries_max:
        raise head.corrupt(f"{expected} entries, more than the limit of {entries_max}")
    count = 0
    for line in lines:
        count += 1
        if count > expected:
            raise line.corrupt(f"more entries than the {expected} announced")
        parts = _BLANKS.split(line.text)
        while parts and not parts[-1]:
            parts.pop()
        if len(parts) != fields:
            raise line.corrupt(f"{len(parts)} fields where {fields} belong: {_shown(line.text)}")
        yield line, parts
    if count != expected:
        raise head.corrupt(f"{expected} entries announced, {count} found")


def write_frame(fs: FileSystem, path: str, *, version: int, entries: Iterable[str]) -> None:
    """Replace the checkpoint durably."""
    replace_file(fs, path, frame_bytes(version, entries))


def frame_bytes(version: int, entries: Iterable[str]) -> bytes:
    body = list(entries)
    return "".join(f"{line}\n" for line in (str(version), str(len(body)), *body)).encode("utf-8")


# --- offset checkpoints ------------------------------------------------------------------------------------------


def read_offset_checkpoint(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> dict[TopicPartition, int]:
    """Offset of each partition; {} when the file is absent or empty. Raises CorruptCheckpoint."""
    offsets: dict[TopicPartition, int] = {}
    for line, (topic, partition, offset) in read_frame(
        fs, path, version=OFFSET_CHECKPOINT_VERSION, fields=3, limits=limits
    ):
        try:
            check_topic_name(topic)
        except InvalidTopic as error:
            raise line.corrupt(error.what) from error
        key = TopicPartition(topic, line.integer(partition, "partition", 0, INT32_MAX))
        if key in offsets:
            raise line.corrupt(f"{key} is listed twice")
        offsets[key] = line.integer(offset, "offset", 0, INT64_MAX)
    return offsets


def write_offset_checkpoint(fs: FileSystem, path: str, entries: Mapping[TopicPartition, int]) -> None:
    """Replace the checkpoint durably, partitions in order so that equal content is equal bytes."""
    write_frame(
        fs,
        path,
        version=OFFSET_CHECKPOINT_VERSION,
        entries=(f"{key.topic} {key.partition} {entries[key]}" for key in sorted(entries)),
    )


# --- partition.metadata ------------------------------------------------------------------------------------------

PARTITION_METADATA_VERSION = 0
#: Two short lines; anything far beyond is something else.
_PARTITION_METADATA_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    topic_id: str
    version: int = PARTITION_METADATA_VERSION


def read_partition_metadata(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> PartitionMetadata | None:
    """The topic id, None when the file is absent. Raises CorruptCheckpoint, also for an empty file."""
    data = _read(fs, path, min(limits.side_file_bytes, _PARTITION_METADATA_BYTES_MAX))
    if data is None:
        return None
    lines = _lines(path, data)
    line, text = _metadata_value(path, data, next(lines, None), "version")
    version = line.integer(text, "version", 0, INT32_MAX)
    line, text = _metadata_value(path, data, next(lines, None), "topic_id")
    try:
        topic_id = parse_uuid(text)
    except ValueError as error:
        raise line.corrupt(f"topic id {_shown(text)} is not a base64url UUID") from error
    if topic_id.int == 0:
        raise line.corrupt("the all-zero topic id is not valid")
    return PartitionMetadata(format_uuid(topic_id), version)


def _metadata_value(path: str, data: bytes, line: Line | None, name: str) -> tuple[Line, str]:
    if line is None:
        raise CorruptCheckpoint(f"ends before its {name} line", file=path, position=len(data))
    parts = re.split(r":[ \t]+", line.text)
    if len(parts) != 2 or parts[0] != name:
        raise line.corrupt(f"expected '{name}: ...', found {_shown(line.text)}")
    return line, parts[1].rstrip(" \t")


def write_partition_metadata(fs: FileSystem, path: str, topic_id: str, *, durable: bool = True) -> None:
    """Replace the file, and sync it unless the caller does."""
    replace_file(fs, path, partition_metadata(topic_id), durable=durable)


def partition_metadata(topic_id: str) -> bytes:
    """What the file holds; it has no newline at its end, as Kafka writes it."""
    if parse_uuid(topic_id).int == 0:
        raise ValueError("the all-zero topic id is not valid")
    return f"version: {PARTITION_METADATA_VERSION}\ntopic_id: {topic_id}".encode("ascii")


# --- meta.properties ---------------------------------------------------------------------------------------------

_META_PROPERTIES_BYTES_MAX = 1 << 20
_PHYSICAL_LINE = re.compile(rb"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
_NAMED_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True, slots=True)
class MetaProperties:
    """Identity of a log directory. Version 1 is KRaft's, version 0 older; `others` keeps keys we do not know."""

    version: int = 1
    node_id: int | None = None
    cluster_id: str | None = None
    directory_id: str | None = None
    others: Mapping[str, str] = field(default_factory=dict)


def read_meta_properties(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> MetaProperties | None:
    """The directory's identity, None when the file is absent. Raises CorruptCheckpoint."""
    data = _read(fs, path, min(limits.side_file_bytes, _META_PROPERTIES_BYTES_MAX))
    if data is None:
        return None
    values = parse_properties(data, file=path)

    def number(name: str, low: int, high: int) -> int | None:
        if name not in values:
            return None
        line, text = values.pop(name)
        return line.integer(text, name, low, high)

    def text(name: str) -> str | None:
        return values.pop(name)[1] if name in values else None

    # read the version first: in a version we do not know the other keys may mean anything
    version = number("version", 0, 1) or 0
    # a node that was never given a number has broker.id -1 in old directories
    node_id = number("node.id", 0, INT32_MAX) if version == 1 else number("broker.id", -1, INT32_MAX)
    cluster_id = text("cluster.id")
    if version == 1 and (node_id is None or not cluster_id):
        missing = "node.id" if node_id is None else "cluster.id"
        raise CorruptCheckpoint(f"{missing} is missing", file=path, hint="Version 1 always has node.id and cluster.id")
    directory_id = None
    if "directory.id" in values:
        line, raw = values.pop("directory.id")
        try:
            directory_id = format_uuid(parse_uuid(raw))
        except ValueError as error:
            raise line.corrupt(f"directory.id {_shown(raw)} is not a base64url UUID") from error
    return MetaProperties(
        version, node_id, cluster_id, directory_id, {name: value for name, (_, value) in values.items()}
    )


def write_meta_properties(fs: FileSystem, path: str, properties: MetaProperties) -> None:
    """Replace the file durably."""
    values: dict[str, str] = {"version": str(properties.version)}
    if properties.node_id is not None:
        values["node.id" if properties.version == 1 else "broker.id"] = str(properties.node_id)
    if properties.cluster_id is not None:
        values["cluster.id"] = properties.cluster_id
    if properties.directory_id is not None:
        values["directory.id"] = properties.directory_id
    values.update(properties.others)
    replace_file(fs, path, format_properties(values))


def format_properties(values: Mapping[str, str]) -> bytes:
    """Java properties text in ASCII, one `key=value` a line."""
    lines = (f"{_escaped(name, key=True)}={_escaped(values[name], key=False)}\n" for name in values)
    return "".join(lines).encode("ascii")


def _escaped(text: str, *, key: bool) -> str:
    names = {value: "\\" + letter for letter, value in _NAMED_ESCAPES.items()}
    out: list[str] = []
    for at, char in enumerate(text):
        if char in names:
            out.append(names[char])
        elif char in "\\=:#!" or (char == " " and (key or at == 0)):
            out.append("\\" + char)
        elif " " <= char <= "~":
            out.append(char)
        else:  # Java escapes UTF-16 units, not code points
            units = char.encode("utf-16-be", "surrogatepass")
            out.extend(f"\\u{units[i] << 8 | units[i + 1]:04X}" for i in range(0, len(units), 2))
    return "".join(out)


def parse_properties(data: bytes, *, file: str) -> dict[str, tuple[Line, str]]:
    """Values of Java properties text by key, each with the line it began on; a repeated key keeps its last value.

    Raises CorruptCheckpoint for a malformed escape, the only thing Java's reader refuses.
    """
    values: dict[str, tuple[Line, str]] = {}
    for line in _logical_lines(data, file):
        text = line.text
        end = 0
        while end < len(text) and text[end] not in "=: \t\f":
            end += 2 if text[end] == "\\" else 1
        start = _skip_blanks(text, end)
        if start < len(text) and text[start] in "=:":
            start = _skip_blanks(text, start + 1)
        values[_unescaped(line, text[:end])] = (line, _unescaped(line, text[start:]))
    return values


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\f":
        at += 1
    return at


def _logical_lines(data: bytes, file: str) -> Iterator[Line]:
    """Lines with continuations joined, blank and comment lines left out. Java reads the file as Latin-1."""
    pending: list[str] = []
    first: tuple[int, int] = (0, 0)
    for number, found in enumerate(_PHYSICAL_LINE.finditer(data), 1):
        text = found[1].decode("latin-1").lstrip(" \t\f")
        if not pending:
            first = (number, found.start())
        if not pending and (not text or text[0] in "#!"):
            continue
        slashes = len(text) - len(text.rstrip("\\"))
        if slashes % 2:
            pending.append(text[:-1])
            continue
        yield Line(file, *first, "".join(pending) + text)
        pending = []
    if pending:  # the last line ended in a lone backslash: Java drops it
        yield Line(file, *first, "".join(pending))


def _unescaped(line: Line, text: str) -> str:
    if "\\" not in text:
        return text
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char != "\\" or at == len(text):
            out.append(char if char != "\\" else "")
            continue
        char = text[at]
        at += 1
        if char == "u":
            digits = text[at : at + 4]
            if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
                raise line.corrupt(f"\\u is not followed by four hex digits: {_shown(text)}")
            out.append(chr(int(digits, 16)))
            at += 4
        else:
            out.append(_NAMED_ESCAPES.get(char, char))
    # join the halves of characters beyond the basic plane; a lone half stays as it is
    return "".join(out).encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")


# --- .kafka_cleanshutdown ----------------------------------------------------------------------------------------


def write_clean_shutdown(fs: FileSystem, path: str, broker_epoch: int = -1) -> None:
    """Write the marker durably; it switches off all verification at the next start."""
    replace_file(fs, path, f'{{"version":0,"brokerEpoch":{broker_epoch}}}'.encode("ascii"))


def delete_clean_shutdown(fs: FileSystem, path: str) -> bool:
    """Remove the marker durably, before any log is loaded; True when there was one."""
    try:
        fs.unlink(path)
    except FileNotFoundError:
        return False
    fs.fsync_dir(os.path.dirname(path) or ".")
    return True
