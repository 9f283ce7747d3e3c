"""Replacements of a manifest: each is a function of the manifest that was just read, never of one kept from before.

They say what the next content is, or raise SegmentsChanged: then whoever asked looks again and plans anew. Writing it
is one compare-and-set, which fails if the manifest moved meanwhile; then the function is asked again with the new one.
`now_ms` is always a time that was asked for after the manifest was read.
Generation, log start, sealed offset and the count of dropped tombstones never fall, and an ended manifest stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from logstore.bucket.manifest import Garbage, Manifest, Segment
from logstore.bucket.rows import TopicRow, check_chain, concerning, unstable_after
from logstore.directory.state import Loss
from logstore.errors import LedgerError, OffsetOutOfRange, SegmentsChanged
from logstore.ledger.rows import RunRow
from logstore.partition.losses import without


@dataclass(frozen=True, slots=True)
class SealPlan:
    """Whole commits, in sequence, that become segments."""

    partition: int
    from_offset: int
    end_offset: int
    rows: tuple[TopicRow, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """What sealing gave: segments for the planned offsets, and the state of producers and epochs behind them."""

    segments: tuple[Segment, ...]
    producer_snapshot: bytes = b""
    leader_epochs: tuple[tuple[int, int], ...] = ()
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbours that were rewritten into others."""

    sources: tuple[Segment, ...]
    outputs: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class CompactionPass:
    """A pass over all segments below `end_offset`; those in no group stay as they are."""

    #: every segment from the log start up to where the pass ended, as listed when it was planned
    read: tuple[Segment, ...]
    groups: tuple[Group, ...]
    first_dirty_seen: int
    first_dirty_after: int
    dropped_tombstones: int = 0
    next_horizon_ms: int | None = None
    oldest_value_ms: int | None = None
    wanted_codec_id: int | None = None
    oldest_other_codec_ms: int = -1
    #: segments that stay as they are, now that they are counted
    counted: tuple[Segment, ...] = ()
    #: the receipt
    run: RunRow | None = None
    clean_part_plain: bool = False


def plan_seal(
    manifest: Manifest | None, rows: Sequence[TopicRow], partition: int, *, commits_max: int
) -> SealPlan | None:
    """The next commits to seal, or None. `rows` are the topic's, read after the manifest.

    Raises LedgerError for rows that do not chain. Rows that begin above the sealed offset mean an old manifest.
    """
    if manifest is not None and manifest.ended:
        return None
    check_chain(rows)
    sealed = manifest.sealed_offset if manifest else 0
    due = concerning(rows, partition, sealed)[:commits_max]
    if not due:
        return None
    if due[0].base_offsets[partition] != sealed:
        raise SegmentsChanged(f"partition {partition} is sealed up to {sealed} no longer")
    return SealPlan(partition, sealed, due[-1].end_offsets[partition], due)


def seal_segments(manifest: Manifest | None, plan: SealPlan, sealed: Sealed, *, now_ms: int, nonce: str) -> Manifest:
    """The plan's commits as segments. Raises SegmentsChanged when others sealed them, or the topic has ended."""
    current = _living(manifest or Manifest(0, nonce))
    if current.sealed_offset != plan.from_offset:
        raise SegmentsChanged(f"others sealed up to {current.sealed_offset}; the plan begins at {plan.from_offset}")
    _check_cover(sealed.segments, plan.from_offset, plan.end_offset)
    # Segments below the log start are none for readers.
    listed, gone = _split(sealed.segments, current.log_start_offset)
    return replace(
        current,
        generation=current.generation + 1,
        nonce=nonce,
        sealed_offset=plan.end_offset,
        segments=(*current.segments, *listed),
        producer_snapshot=sealed.producer_snapshot,
        leader_epochs=sealed.leader_epochs,
        unstable_offset=unstable_after(current.unstable_offset, plan.rows, plan.partition),
        losses=(*current.losses, *sealed.losses),
        garbage=_more(current, gone, now_ms),
    )


def apply_pass(manifest: Manifest | None, done: CompactionPass, *, now_ms: int, nonce: str) -> Manifest:
    """The whole pass at once. Raises SegmentsChanged unless everything it read is still listed.

    What retention took away at the front is the exception: nothing older than what stays is left there, so what the
    pass found out about the rest holds.
    """
    current = _living(manifest)
    if current.first_dirty_offset != done.first_dirty_seen:
        raise SegmentsChanged(f"another pass moved the first dirty offset to {current.first_dirty_offset}")
    listed = {segment.key for segment in current.segments}
    for segment in done.read:
        if segment.key not in listed and segment.next_offset > current.log_start_offset:
            raise SegmentsChanged("a segment that the pass read is no longer listed", file=segment.key)
    segments = list(current.segments)
    freed: list[Segment] = []
    for group in done.groups:
        _check_cover(group.outputs, group.sources[0].base_offset, group.sources[-1].next_offset)
        left = [segment for segment in group.sources if segment.key in listed]
        if not left:
            continue  # retention took all of it; the outputs were never named, and the sweep takes them
        at = segments.index(left[0])
        if segments[at : at + len(left)] != left:
            raise SegmentsChanged("the segments of a group are no longer neighbours", file=left[0].key)
        segments[at : at + len(left)] = group.outputs
        freed.extend(left)
    counted = {segment.key: segment for segment in done.counted}
    kept, gone = _split([counted.get(segment.key, segment) for segment in segments], current.log_start_offset)
    return replace(
        current,
        generation=current.generation + 1,
        nonce=nonce,
        segments=kept,
        receipts=current.receipts if done.run is None else current.receipts.noted(done.run),
        first_dirty_offset=max(current.first_dirty_offset, done.first_dirty_after),
        dropped_tombstones=current.dropped_tombstones + done.dropped_tombstones,
        next_horizon_ms=done.next_horizon_ms,
        oldest_value_ms=done.oldest_value_ms,
        wanted_codec_id=done.wanted_codec_id,
        oldest_other_codec_ms=done.oldest_other_codec_ms,
        clean_part_plain=done.clean_part_plain,
        garbage=_more(current, (*freed, *gone), now_ms),
    )


def note_run(manifest: Manifest | None, run: RunRow, *, nonce: str) -> Manifest | None:
    """The receipt of a pass that failed. None where there is nothing to note it in, or it is there."""
    if manifest is None or manifest.ended:
        return None
    receipts = manifest.receipts.noted(run)
    if receipts is manifest.receipts:
        return None
    return replace(manifest, generation=manifest.generation + 1, nonce=nonce, receipts=receipts)


def mend_segments(
    manifest: Manifest | None,
    mended: Mapping[str, Sequence[Segment]],
    losses: Sequence[Loss],
    *,
    now_ms: int,
    nonce: str,
    found: Sequence[tuple[int, int]] = (),
) -> Manifest:
    """What was made of damaged segments in their place, by key; `found` are offsets that are lost no longer.

    Raises SegmentsChanged unless all segments are still listed.
    """
    current = _living(manifest)
    left = set(mended) - {segment.key for segment in current.segments}
    if left:
        raise SegmentsChanged("a damaged segment is no longer listed", file=min(left))
    segments: list[Segment] = []
    for segment in current.segments:
        outputs = mended.get(segment.key, (segment,))
        _check_cover(outputs, segment.base_offset, segment.next_offset)
        segments.extend(outputs)
    kept = {segment.key for segment in segments}
    return replace(
        current,
        generation=current.generation + 1,
        nonce=nonce,
        segments=tuple(segments),
        next_horizon_ms=None,
        losses=(*without(current.losses, found), *losses),
        garbage=_more(current, [segment for segment in current.segments if segment.key not in kept], now_ms),
    )


def raise_log_start(
    manifest: Manifest | None, log_start_offset: int, *, high_watermark: int, now_ms: int, nonce: str
) -> Manifest | None:
    """Retention and delete-records: the log begins at `log_start_offset`. None when nothing changes.

    Raises SegmentsChanged for an ended topic, OffsetOutOfRange for a start above what is committed.
    """
    current = _living(manifest or Manifest(0, nonce))
    if log_start_offset > high_watermark:
        raise OffsetOutOfRange(f"a log start above the high watermark {high_watermark}", offset=log_start_offset)
    start = max(log_start_offset, current.log_start_offset)
    kept, gone = _split(current.segments, start)
    if start == current.log_start_offset and not gone:
        return None
    return replace(
        current,
        generation=current.generation + 1,
        nonce=nonce,
        segments=kept,
        log_start_offset=start,
        garbage=_more(current, gone, now_ms),
    )


def end_partition(manifest: Manifest | None, *, now_ms: int, nonce: str) -> Manifest:
    """The topic's end, for one that has a manifest and for one that never had: nothing can be sealed after it."""
    current = manifest or Manifest(0, nonce)
    return replace(
        current,
        generation=current.generation + 1,
        nonce=nonce,
        segments=(),
        garbage=_more(current, current.segments, now_ms),
        ended=True,
    )


def fence_partition(manifest: Manifest | None, *, nonce: str) -> Manifest:
    """The same content as a new one: every replacement that was planned before fails.

    A manifest that is not there is created: else a sealer that found none could still create it.
    """
    current = manifest or Manifest(0, nonce)
    return replace(current, generation=current.generation + 1, nonce=nonce)


def collected(manifest: Manifest, gone: Iterable[str], *, now_ms: int, nonce: str) -> Manifest | None:
    """Without the garbage that was deleted, and with the time of what is new. None when nothing changes."""
    names = set(gone)
    left = tuple(each for each in _more(manifest, (), now_ms) if each.key not in names)
    if left == manifest.garbage:
        return None
    return replace(manifest, generation=manifest.generation + 1, nonce=nonce, garbage=left)


def has_won(manifest: Manifest | None, outputs: Iterable[str]) -> bool:
    """Whether a replacement whose answer was lost is in force, or was: nobody else names these outputs."""
    return manifest is not None and not manifest.names.isdisjoint(outputs)


def check_successor(before: Manifest | None, after: Manifest) -> None:
    """What holds between any two neighbours, asked before every write. Raises LedgerError: a fault of ours."""
    if before is None:
        before = Manifest(after.generation - 1, "")
    falls = [
        name
        for name in ("log_start_offset", "sealed_offset", "first_dirty_offset", "dropped_tombstones")
        if getattr(after, name) < getattr(before, name)
    ]
    if after.generation != before.generation + 1 or after.nonce == before.nonce or falls or before.ended > after.ended:
        raise LedgerError(
            f"a manifest of generation {after.generation} that cannot follow {before.generation}: {falls}"
        )


def _living(manifest: Manifest | None) -> Manifest:
    if manifest is None or manifest.ended:
        raise SegmentsChanged("the topic has ended, or nothing of it is sealed")
    return manifest


def _check_cover(segments: Sequence[Segment], base: int, end: int) -> None:
    at = base
    for segment in segments:
        if segment.base_offset != at or segment.next_offset < at:
            raise LedgerError(f"segments that do not cover {base} to {end}", file=segment.key)
        at = segment.next_offset
    if at != end:
        raise LedgerError(f"segments that end at {at}, not at {end}")


def _split(segments: Sequence[Segment], log_start: int) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Those that reach above the log start, and those that do not."""
    return (
        tuple(segment for segment in segments if segment.next_offset > log_start),
        tuple(segment for segment in segments if segment.next_offset <= log_start),
    )


def _more(manifest: Manifest, gone: Iterable[Segment], now_ms: int) -> tuple[Garbage, ...]:
    known = (Garbage(each.key, now_ms if each.since_ms is None else each.since_ms) for each in manifest.garbage)
    return (*known, *(Garbage(segment.key) for segment in gone))
