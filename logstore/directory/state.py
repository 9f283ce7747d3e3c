"""The partition's state file: its segment list, and the few facts that no `.log` file holds.

Readers of other processes go by this list, never by a directory listing, which can miss a segment while files are
swapped. The file is replaced as a whole, durably, by the holder of the partition lock; a damaged one is a typed error,
and recovery rebuilds the list from the directory. One line of JSON after one line with version, checksum, and whose
list it is (a topic's id and the partition):

    duramen-partition-state 1 crc32c=89abcdef of=7cYhnYw2RPyQkXyUvPzQ1A/0
    {"generation": 7, "log_start_offset": 0, "segments": [[base, size, largest timestamp], …], …}
"""

from __future__ import annotations

import errno
import functools
import json
import os
from dataclasses import dataclass, field, replace

from crc32c import crc32c

from logstore.errors import CorruptState
from logstore.files import FileSystem, read_whole, replace_file
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, Limits
from logstore.topic import parse_uuid

_NAME = "duramen-partition-state"
_VERSION = 1
#: what JSON takes in memory for a byte of text, at worst; a file within the limit stays within it parsed
_MEMORY_FACTOR = 32
#: one segment of the list as text: an offset, a size and a time
_ENTRY_BYTES_MAX = 19 + 10 + 20 + 4
_CACHED_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment as readers see it; size and timestamp of the last one are those of the moment of writing."""

    base_offset: int
    size_bytes: int
    largest_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class SwapNote:
    """A replacement under way: once noted, the next writer finishes it."""

    new_bases: tuple[int, ...]
    old_bases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets whose records damage took: from `base_offset` up to, but not including, `end_offset`."""

    base_offset: int
    end_offset: int
    reason: str
    since_ms: int
    #: some of them may have been gone before, by compaction
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class PartitionState:
    generation: int = 0
    log_start_offset: int = 0
    first_dirty_offset: int = 0
    dropped_tombstones: int = 0
    segments: tuple[SegmentEntry, ...] = field(default=())
    swap: SwapNote | None = None
    #: whether idempotent or transactional producers are known; their state must be kept then
    producers: bool = True
    #: no recovery point above this may be believed: offsets cut off since may have been written again
    recovery_point_max: int | None = None
    #: whether the last writer closed the log, everything on disk
    closed: bool = False
    #: when the first tombstone or marker of the compacted part may go; -1: there is none, None: not known
    next_horizon_ms: int | None = None
    #: whether there may be batches of transactions: they stay when their producers have long expired
    transactions: bool = True
    #: below this a swap may have taken superseded records out, although the pass has not moved `first_dirty_offset` yet
    thinned_offset: int = 0
    #: what damage cost, by offset; a gap that is listed here is not compaction
    losses: tuple[Loss, ...] = ()
    #: what unfinished passes have thinned begins here: below it nothing changed since `first_dirty_offset` moved
    thinned_base_offset: int = 0
    #: timestamp of the oldest record of the compacted part with a value; -1: there is none, None: not known
    oldest_value_ms: int | None = None
    #: the codec the last pass was to give to cold data; None: none
    wanted_codec_id: int | None = None
    #: file time of the oldest group that has another one, as it was too young then; -1: there is none
    oldest_other_codec_ms: int = -1
    #: whether the compacted part is known to have no batch of a transaction, whatever `transactions` says of the rest
    clean_part_plain: bool = False

    @property
    def is_as_made(self) -> bool:
        """Whether the list is the one a partition was made with: it says nothing about records."""
        return not self.generation and not any(entry.size_bytes or entry.base_offset for entry in self.segments)

    @property
    def is_half_thinned(self) -> bool:
        """Whether a pass that did not finish has swapped in groups that lack records."""
        return self.thinned_offset > self.first_dirty_offset

    def exact_from(self, offset: int) -> int | None:
        """None when the records below `offset` still give the state as it was there; else the first offset that does.

        Compaction removes a record for the sake of a later one, which lies below the end of the pass's map. From that
        end on nothing is missed, also when the pass stopped half way. Below the log start everything is gone.
        """
        first_exact = max(self.first_dirty_offset, self.log_start_offset)
        if self.is_half_thinned and max(offset, first_exact) > self.thinned_base_offset:
            first_exact = max(self.thinned_offset, self.log_start_offset)
        return first_exact if offset < first_exact else None

    def thinned(self, base_offset: int, map_end_offset: int) -> PartitionState:
        """With a group noted that begins at `base_offset` and lost records to later ones below the map's end."""
        base = min(self.thinned_base_offset, base_offset) if self.is_half_thinned else base_offset
        return replace(self, thinned_offset=max(self.thinned_offset, map_end_offset), thinned_base_offset=max(base, 0))

    def with_segments(self, segments: tuple[SegmentEntry, ...], *, log_start_offset: int) -> PartitionState:
        """The next generation with another list, of a log that is being written."""
        return replace(
            self,
            generation=self.generation + 1,
            segments=segments,
            log_start_offset=log_start_offset,
            closed=False,
        )


def topic_id_of(path: str) -> str | None:
    """The id of the topic in whose folder a file of the state lies; None: it lies elsewhere."""
    name = os.path.basename(os.path.dirname(path))
    try:
        parse_uuid(name)
    except ValueError:
        return None
    return name


def owner_of(path: str) -> str | None:
    """Whose list a file is, by its place: the topic's id and the partition. None: it lies elsewhere."""
    topic_id = topic_id_of(path)
    return None if topic_id is None else f"{topic_id}/{os.path.basename(path)}"


def encode_state(state: PartitionState, owner: str | None = None) -> bytes:
    """With `owner`, it is recognised as damage when it turns up in place of another."""
    body = {
        "generation": state.generation,
        "log_start_offset": state.log_start_offset,
        "first_dirty_offset": state.first_dirty_offset,
        "dropped_tombstones": state.dropped_tombstones,
        "segments": [[s.base_offset, s.size_bytes, s.largest_timestamp_ms] for s in state.segments],
        "producers": state.producers,
        "recovery_point_max": state.recovery_point_max,
        "closed": state.closed,
        "next_horizon_ms": state.next_horizon_ms,
        "transactions": state.transactions,
        "thinned_offset": state.thinned_offset,
        "thinned_base_offset": state.thinned_base_offset,
        "oldest_value_ms": state.oldest_value_ms,
        "wanted_codec_id": state.wanted_codec_id,
        "oldest_other_codec_ms": state.oldest_other_codec_ms,
        "clean_part_plain": state.clean_part_plain,
        "losses": [
            [loss.base_offset, loss.end_offset, loss.reason, loss.since_ms, loss.at_most] for loss in state.losses
        ],
        "swap": None if state.swap is None else [list(state.swap.new_bases), list(state.swap.old_bases)],
    }
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    said = "" if owner is None else f" of={owner}"
    return f"{_NAME} {_VERSION} crc32c={crc32c(text, crc32c(said.encode())):08x}{said}\n".encode() + text


def decode_state(data: bytes, *, file: str | None = None, owner: str | None = None) -> PartitionState:
    """Raises CorruptState for anything `encode_state` would not have written, and for the list of another `owner`."""
    head, _, text = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) not in (3, 4) or words[0] != _NAME.encode():  # older releases did not say whose it is
        raise CorruptState("not a partition state file", file=file, position=0)
    if words[1] != str(_VERSION).encode():
        raise CorruptState(
            f"version {words[1][:20]!r} of the partition state; this release knows {_VERSION}", file=file, position=0
        )
    said = b" " + words[3] if len(words) == 4 else b""
    if words[2] != f"crc32c={crc32c(text, crc32c(said)):08x}".encode():
        raise CorruptState("the checksum does not match", file=file, position=0)
    if said and owner is not None and said != f" of={owner}".encode():
        raise CorruptState(
            f"this is the segment list of another partition ({said[4:].decode(errors='replace')})",
            file=file,
            position=0,
        )
    try:
        return _parse(text) if len(text) > _CACHED_BYTES_MAX else _parse_known(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptState(f"malformed partition state: {error}", file=file, position=len(head) + 1) from None


def _parse(text: bytes) -> PartitionState:
    return _from_json(json.loads(text))


@functools.lru_cache(maxsize=128)
def _parse_known(text: bytes) -> PartitionState:
    """Lists of partitions that were never written to are the same: parsed once."""
    return _parse(text)


def _from_json(body: object) -> PartitionState:
    if not isinstance(body, dict):
        raise ValueError("not an object")
    segments = []
    previous = -1
    for base, size, timestamp in body["segments"]:
        if _natural(base) <= previous:
            raise ValueError(f"segment {base} after {previous}")
        if type(timestamp) is not int or abs(timestamp) > INT64_MAX:
            raise ValueError(f"timestamp {timestamp!r}")
        segments.append(SegmentEntry(base, _natural(size), timestamp))
        previous = base
    swap = None
    if body["swap"] is not None:
        new, old = body["swap"]
        swap = SwapNote(tuple(map(_natural, new)), tuple(map(_natural, old)))
    return PartitionState(
        _natural(body["generation"]),
        _natural(body["log_start_offset"]),
        _natural(body["first_dirty_offset"]),
        _natural(body["dropped_tombstones"]),
        tuple(segments),
        swap,
        body.get("producers", True) is not False,
        None if body.get("recovery_point_max") is None else _natural(body["recovery_point_max"]),
        body.get("closed") is True,
        _horizon(body.get("next_horizon_ms")),
        body.get("transactions", True) is not False,
        # Of an older version: whatever its passes finished.
        _natural(body.get("thinned_offset", body["first_dirty_offset"])),
        tuple(_loss(*loss) for loss in body.get("losses", ())),
        _natural(body.get("thinned_base_offset", 0)),
        oldest_value_ms=_horizon(body.get("oldest_value_ms")),
        wanted_codec_id=None if body.get("wanted_codec_id") is None else _natural(body["wanted_codec_id"]),
        oldest_other_codec_ms=-1
        if body.get("oldest_other_codec_ms", -1) == -1
        else _natural(body["oldest_other_codec_ms"]),
        clean_part_plain=body.get("clean_part_plain") is True,
    )


def _loss(base: object, end: object, reason: object, since_ms: object, at_most: object = False) -> Loss:
    if not isinstance(reason, str) or _natural(base) >= _natural(end):
        raise ValueError(f"loss {base!r} to {end!r}")
    return Loss(_natural(base), _natural(end), reason, _natural(since_ms), at_most is True)


def _horizon(value: object) -> int | None:
    return value if value in (None, -1) else _natural(value)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise ValueError(f"{value!r} is not a number from 0 to 2^63-1")
    return value


def segments_max(limits: Limits) -> int:
    """How many segments a state file lists at most; a longer file would not be read."""
    return limits.side_file_bytes // _MEMORY_FACTOR // _ENTRY_BYTES_MAX


def read_state(fs: FileSystem, path: str, *, limits: Limits = DEFAULT_LIMITS) -> PartitionState | None:
    """None when the file does not exist. Raises CorruptState."""
    limit_bytes = limits.side_file_bytes // _MEMORY_FACTOR
    try:
        data = read_whole(fs, path, limit=limit_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptState(f"larger than the limit of {limit_bytes} bytes", file=path, position=0) from None
        raise
    return decode_state(data, file=path, owner=owner_of(path))


def write_state(fs: FileSystem, path: str, state: PartitionState) -> None:
    replace_file(fs, path, encode_state(state, owner_of(path)))
