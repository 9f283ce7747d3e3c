"""A partition's manifest: its sealed segments, and the few facts that no segment holds.

Absent means that nothing is sealed yet; only the ledger says whether the topic lives. It changes by compare-and-set.
Generation and nonce are new each time, so no two contents are equal and a version that was seen cannot come back.
A long list lies in immutable pages; the root then holds only their names and the newest segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from logstore.bucket.receipts import Receipts, receipts_document, receipts_from
from logstore.directory.sealed import seal, unseal, whole_number
from logstore.directory.state import Loss
from logstore.errors import CorruptState
from logstore.limits import DEFAULT_LIMITS, INT64_MIN, Limits
from logstore.objects.objects import KEY_BYTES_MAX

VERSION = 1
#: with more segments than this, the oldest move into pages
ROOT_SEGMENTS_MAX = 2000
PAGE_SEGMENTS = 1000
#: with the counts of compaction, and as first written, without
_SEGMENT_COLUMNS = (10, 12)
#: characters of the reason of a loss
LOSS_REASON_MAX = 500


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed segment: one object with Kafka's `.log` bytes, then its three indexes."""

    key: str
    base_offset: int
    #: where the next segment begins; what lies in between and has no record was compacted
    next_offset: int
    log_bytes: int = 0
    offset_index_bytes: int = 0
    time_index_bytes: int = 0
    txn_index_bytes: int = 0
    largest_timestamp_ms: int = -1
    #: when its last record was appended, by the store's clock: what retention and lags fall back to
    appended_ms: int = 0
    records: int = 0
    #: as compaction counted them, -1 where it did not; statistics
    keys: int = field(default=-1, compare=False)
    tombstones: int = field(default=-1, compare=False)

    @property
    def age_ms(self) -> int:
        """The time of its newest record; of its last append where no record has one."""
        return self.largest_timestamp_ms if self.largest_timestamp_ms >= 0 else self.appended_ms


@dataclass(frozen=True, slots=True)
class Garbage:
    """An object that no reader finds any more, and since when at the latest.

    None: just made garbage. Whoever writes that cannot tell when it will be in force, since a write may take any time.
    So the next one who finds it in the manifest notes the time, which is then surely not too early.
    """

    key: str
    since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    key: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    generation: int
    nonce: str
    #: everything below is in segments; what is committed above lies in staged objects
    sealed_offset: int = 0
    segments: tuple[Segment, ...] = ()
    log_start_offset: int = 0
    first_dirty_offset: int = 0
    dropped_tombstones: int = 0
    #: when the first tombstone or marker of the compacted part may go; -1: there is none, None: not known
    next_horizon_ms: int | None = None
    #: Kafka's producer snapshot and leader epochs (epoch, first offset) as of `sealed_offset`
    producer_snapshot: bytes = b""
    leader_epochs: tuple[tuple[int, int], ...] = ()
    garbage: tuple[Garbage, ...] = ()
    #: the topic was deleted: nothing is listed, and nothing may be again
    ended: bool = False
    #: pages that hold the oldest segments, as they were read
    pages: tuple[Page, ...] = field(default=(), compare=False)
    #: as in a partition's state file: oldest record of the compacted part with a value; -1: none, None: not known
    oldest_value_ms: int | None = None
    #: the codec the last pass was to give to cold data; None: none
    wanted_codec_id: int | None = None
    #: age of the oldest group that has another one; -1: there is none
    oldest_other_codec_ms: int = -1
    #: what passes did here
    receipts: Receipts = field(default_factory=Receipts, hash=False)
    #: where the oldest transaction begins that is open at `sealed_offset`; None: none is
    unstable_offset: int | None = None
    #: there may be batches of transactions: the partition was imported, or copied
    transactions: bool = False
    #: the compacted part is known to have none of them
    clean_part_plain: bool = False
    #: below the first, from the second on, a pass that did not finish has taken superseded records (imports)
    thinned_offset: int = 0
    thinned_base_offset: int = 0
    #: what damage cost, by offset
    losses: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        for before, after in pairwise(self.segments):
            if before.next_offset != after.base_offset:
                raise CorruptState(f"segments with a gap or an overlap at offset {before.next_offset}", file=after.key)
        if any(segment.base_offset > segment.next_offset for segment in self.segments):
            raise CorruptState("a segment that ends before it begins")
        if self.segments and self.segments[-1].next_offset != self.sealed_offset:
            raise CorruptState(f"the last segment does not end at the sealed offset {self.sealed_offset}")
        covered = self.segments[0].base_offset if self.segments else self.sealed_offset
        if not self.ended and self.log_start_offset < covered:
            raise CorruptState(f"the log starts at {self.log_start_offset}, and its first segment at {covered}")

    @property
    def names(self) -> frozenset[str]:
        """Every object that this manifest keeps from being swept."""
        listed = {segment.key for segment in self.segments} | {page.key for page in self.pages}
        return frozenset(listed | {each.key for each in self.garbage})


# --- bytes ---------------------------------------------------------------------------------------------------------


def encode_manifest(manifest: Manifest, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """What is stored under the manifest's key. Its pages must have been put. Raises CorruptState beyond the limit."""
    paged = sum(len(page.segments) for page in manifest.pages)
    if manifest.segments[:paged] != tuple(segment for page in manifest.pages for segment in page.segments):
        raise CorruptState("pages that do not hold the oldest segments")
    document = {
        "generation": manifest.generation,
        "nonce": manifest.nonce,
        "sealed_offset": manifest.sealed_offset,
        "pages": [[page.key, len(page.segments)] for page in manifest.pages],
        "segments": [_row(segment) for segment in manifest.segments[paged:]],
        "log_start_offset": manifest.log_start_offset,
        "first_dirty_offset": manifest.first_dirty_offset,
        "dropped_tombstones": manifest.dropped_tombstones,
        "next_horizon_ms": manifest.next_horizon_ms,
        "oldest_value_ms": manifest.oldest_value_ms,
        "wanted_codec_id": manifest.wanted_codec_id,
        "oldest_other_codec_ms": manifest.oldest_other_codec_ms,
        "producer_snapshot": manifest.producer_snapshot.hex(),
        "leader_epochs": [list(each) for each in manifest.leader_epochs],
        "garbage": [[each.key, each.since_ms] for each in manifest.garbage],
        "ended": manifest.ended,
        "receipts": receipts_document(manifest.receipts),
        "unstable_offset": manifest.unstable_offset,
        "transactions": manifest.transactions,
        "clean_part_plain": manifest.clean_part_plain,
        "thinned": [manifest.thinned_offset, manifest.thinned_base_offset],
        "losses": [[e.base_offset, e.end_offset, e.reason, e.since_ms, e.at_most] for e in manifest.losses],
    }
    return _within(seal(document, version=VERSION), limits)


def decode_manifest(
    data: bytes, key: str, read_page: Callable[[str], bytes], *, limits: Limits = DEFAULT_LIMITS
) -> Manifest:
    """Raises CorruptState, StoreVersionError, and what `read_page` raises."""
    document = unseal(_within(data, limits), version=VERSION, file=key)
    try:
        pages = tuple(
            _page(_text(name), _count(count), read_page(_text(name)), limits)
            for name, count in _rows(document["pages"], 2)
        )
        (thinned,) = _rows([document.get("thinned", [0, 0])], 2)
        return Manifest(
            generation=whole_number(document, "generation", file=key),
            nonce=_text(document["nonce"]),
            sealed_offset=whole_number(document, "sealed_offset", file=key),
            segments=(
                *(segment for page in pages for segment in page.segments),
                *(_segment(row) for row in _rows(document["segments"], *_SEGMENT_COLUMNS)),
            ),
            log_start_offset=whole_number(document, "log_start_offset", file=key),
            first_dirty_offset=whole_number(document, "first_dirty_offset", file=key),
            dropped_tombstones=whole_number(document, "dropped_tombstones", file=key),
            next_horizon_ms=_count_or_none(document["next_horizon_ms"]),
            oldest_value_ms=_count_or_none(document["oldest_value_ms"]),
            wanted_codec_id=_count_or_none(document["wanted_codec_id"]),
            oldest_other_codec_ms=_count(document["oldest_other_codec_ms"], low=-1),
            producer_snapshot=bytes.fromhex(_text(document["producer_snapshot"], limits.side_file_bytes)),
            leader_epochs=tuple((_count(epoch), _count(start)) for epoch, start in _rows(document["leader_epochs"], 2)),
            garbage=tuple(
                Garbage(_text(name), None if since is None else _count(since))
                for name, since in _rows(document["garbage"], 2)
            ),
            ended=_flag(document["ended"]),
            pages=pages,
            receipts=receipts_from(document["receipts"]) if "receipts" in document else Receipts(),
            unstable_offset=_count_or_none(document.get("unstable_offset")),
            transactions=_flag(document.get("transactions", False)),
            clean_part_plain=_flag(document.get("clean_part_plain", False)),
            thinned_offset=_count(thinned[0]),
            thinned_base_offset=_count(thinned[1]),
            losses=tuple(_loss(row) for row in _rows(document.get("losses", []), 5)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptState(f"malformed manifest: {error}", file=key) from None
    except CorruptState as error:
        raise error.at(file=error.file or key) from None


def paged(manifest: Manifest, new_key: Callable[[], str]) -> tuple[Manifest, tuple[Page, ...]]:
    """`manifest` with its list spread over pages, and the pages that must be put before it is written.

    A page whose segments are all still there, and in front, is kept. Others become garbage by `free_pages`.
    """
    kept: list[Page] = []
    at = 0
    for page in manifest.pages:
        if manifest.segments[at : at + len(page.segments)] != page.segments:
            break
        kept.append(page)
        at += len(page.segments)
    new: list[Page] = []
    while len(manifest.segments) - at > ROOT_SEGMENTS_MAX:
        new.append(Page(new_key(), manifest.segments[at : at + PAGE_SEGMENTS]))
        at += PAGE_SEGMENTS
    return replace(manifest, pages=(*kept, *new)), tuple(new)


def free_pages(before: Manifest | None, after: Manifest) -> Manifest:
    """`after` with the pages of `before` that it no longer uses as garbage."""
    used = {page.key for page in after.pages}
    gone = [Garbage(page.key) for page in (before.pages if before else ()) if page.key not in used]
    return replace(after, garbage=(*after.garbage, *gone)) if gone else after


def encode_page(page: Page, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    return _within(seal({"segments": [_row(segment) for segment in page.segments]}, version=VERSION), limits)


def _page(key: str, count: int, data: bytes, limits: Limits) -> Page:
    document = unseal(_within(data, limits), version=VERSION, file=key)
    segments = tuple(_segment(row) for row in _rows(document["segments"], *_SEGMENT_COLUMNS))
    if len(segments) != count:
        raise CorruptState(f"{len(segments)} segments in the page, {count} in the manifest", file=key)
    return Page(key, segments)


def _row(segment: Segment) -> list[object]:
    return [
        segment.key,
        segment.base_offset,
        segment.next_offset,
        segment.log_bytes,
        segment.offset_index_bytes,
        segment.time_index_bytes,
        segment.txn_index_bytes,
        segment.largest_timestamp_ms,
        segment.appended_ms,
        segment.records,
        segment.keys,
        segment.tombstones,
    ]


def _segment(row: Sequence[object]) -> Segment:
    key, *numbers = row
    low = [0] * len(numbers)
    low[6] = INT64_MIN  # a timestamp may be anything
    low[9:] = [-1] * len(low[9:])
    return Segment(_text(key), *(_count(number, least) for number, least in zip(numbers, low, strict=True)))


def _loss(row: Sequence[object]) -> Loss:
    base, end, reason, since_ms, at_most = row
    return Loss(_count(base), _count(end), _text(reason, LOSS_REASON_MAX), _count(since_ms), _flag(at_most))


def _rows(value: object, *widths: int) -> list[list[object]]:
    if not isinstance(value, list) or any(not isinstance(row, list) or len(row) not in widths for row in value):
        raise ValueError(f"not a list of rows of {widths[-1]}")
    return value


def _count(value: object, low: int = 0) -> int:
    if type(value) is not int or not low <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a number from {low} on")
    return value


def _count_or_none(value: object) -> int | None:
    return None if value is None else _count(value, low=-1)


def _text(value: object, most: int = KEY_BYTES_MAX) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError("not a text, or too long")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not true or false")
    return value


def _within(data: bytes, limits: Limits) -> bytes:
    if len(data) > limits.side_file_bytes:
        raise CorruptState(f"a manifest of {len(data)} bytes; the limit is {limits.side_file_bytes}")
    return data
